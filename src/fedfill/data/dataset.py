"""Data sets in memory: what was read of one is checked, gets a test set where it brought none, and becomes a `Source`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfill.data.cells import DOMAIN_COLUMN
from fedfill.data.columns import Columns
from fedfill.data.images import in_colour
from fedfill.data.samples import Samples
from fedfill.data.stratified import Indices, hold_out
from fedfill.errors import FedfillError, shown
from fedfill.streams import numpy_stream

TEST_SHARE = 0.2
"""The share of each class that becomes the test set where a data set brings none."""

OWN = "Test set: the one given with the data."
SPLIT = (
    "Test set: none came with the data, so a fixed stratified fifth is kept as the test set, the same for every seed."
)
NONE = "Test set: none came with the data, and the samples are too few to hold one out."
FITTED = (
    "Test set: none came with the data, and none was held out (test_fraction 0). The test set is all samples, those of "
    "the clients too."
)


@dataclass(frozen=True)
class Part:
    """One part of a data set, as it was read.

    Attributes:
        samples: Its samples.
        names: The classes' names; None where nothing tells them.
        place: Where its highest label stands, for the beginning of a sentence.
        domains: ``[n]`` names of the samples' domains; None where they have none.
        strata: ``[n]``, of which a stratified choice keeps the shares; None: the classes.
        strays: Of a table with a schema by column ``[n]``, True where a cell is not as the schema has it.
    """

    samples: Samples
    names: tuple[str, ...] | None
    place: str
    domains: np.ndarray[Any, Any] | None = None
    strata: Indices | None = None
    strays: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)

    def at(self, index: Indices) -> Part:
        """The samples at these positions, of one domain."""
        strata = None if self.strata is None else self.strata[index]
        return Part(self.samples[torch.from_numpy(index)], self.names, self.place, strata=strata)


@dataclass(frozen=True)
class Domains:
    """Which domain each sample of a data set comes from.

    Attributes:
        names: The domains' names in the order of their indices; each has training samples.
        train: ``[n]`` int64 indices, one for each training sample.
        test: ``[m]`` int64 indices, one for each test sample.
    """

    names: tuple[str, ...]
    train: Indices
    test: Indices


@dataclass(frozen=True)
class Source:
    """A data set in memory. Its tensors are shared by all who load it and must never be written to.

    Attributes:
        name: Its name.
        train: The training samples.
        test: The test samples; nothing may be chosen by them. Empty only for one of several clients.
        class_names: The classes' names in the order of their indices.
        note: One sentence on where the test set comes from.
        domains: Where its samples come from; None where nothing tells it.
        columns: How rows of a table became its inputs; None where it is no table.
    """

    name: str
    train: Samples
    test: Samples
    class_names: tuple[str, ...]
    note: str
    domains: Domains | None = None
    columns: Columns | None = None

    def __post_init__(self) -> None:
        check_names(self.class_names, "class names of the data")
        check_names(() if self.domains is None else self.domains.names, "domains of the data")

    def __repr__(self) -> str:
        """How many samples of what, and which classes."""
        some = ", ".join(self.class_names[:5]) + (", ..." if len(self.class_names) > 5 else "")
        shape = "x".join(map(str, self.train.inputs.shape[1:]))
        return (
            f"<Source: {self.name}, {len(self.train):,} samples for training and {len(self.test):,} for testing, inputs of {shape}, "
            f"classes {some}>"
        )


Parts = Mapping[str, tuple[Part, Part | None]]
"""The training part and, where there is one, the test part of each domain, by its name."""


def source_of(
    name: str, where: str, train: Part, test: Part | None, everyone: int | None = None, sized: bool = False,
    test_fraction: float | None = None,
) -> Source:  # fmt: skip
    """The source of what was read, with a part of it held out where it brought no test set.

    Args:
        name: The source's name.
        where: The beginning of an error sentence.
        train: The training part.
        test: The test part, where there is one.
        everyone: For the data of one client, how many samples all clients have. Its own may then be too few for a test
            set, and classes that it lacks may outnumber them.
        sized: Whether all are images of one size by demand: where some are in colour, the grey ones become so too.
        test_fraction: Which share is held out, 0..0.5; with 0 the training samples are the test set too. None: `TEST_SHARE`.

    Returns:
        The source.
    """
    if sized:
        train, test = _same_channels({"": (train, test)})[""]
    if everyone is None and (train.domains is not None or (test is not None and test.domains is not None)):
        return join(name, where, _by_name(train, test, where), test_fraction=test_fraction)
    if everyone is None:  # else another client may need it
        refuse_fraction(test_fraction, where, [test])
    parts = (train,) if test is None else (train, test)
    class_names = _names(parts, everyone or sum(len(part.samples) for part in parts))
    if test is not None:
        if None not in (train.names, test.names) and train.names != test.names:
            raise FedfillError(
                f"{where}: the class names in the train and test splits differ; give both the same names in the same "
                "order"
            )
        check_alike(train.samples.inputs, test.samples.inputs, where)
        check_labels(test.samples.labels.numpy(), class_names, f"{where}, test set")
        return Source(name, train.samples, test.samples, class_names, OWN)
    kept, held = _split(train, test_fraction)
    if not len(held) and everyone is None:
        raise FedfillError(too_few(where, f"{len(train.samples):,} samples", test_fraction))
    return Source(name, kept, held, class_names, _split_note(test_fraction) if len(held) else NONE)


def refuse_fraction(test_fraction: float | None, where: str, tests: Iterable[Any]) -> None:
    """Refuse a share for a test set where each part has one already, in a sentence that names what `where` begins with."""
    if test_fraction is not None and all(test is not None for test in tests):
        raise FedfillError(
            f"test_fraction: found {test_fraction:g} with {where}, which have a test set of their own; allowed: none"
        )


def _split(part: Part, test_fraction: float | None, *domain: str) -> tuple[Samples, Samples]:
    """What is trained on, and a stratified share for testing; with a share of 0 all samples for both."""
    samples = part.samples
    if test_fraction == 0:
        return samples, samples
    strata = samples.strata if part.strata is None else part.strata
    share = TEST_SHARE if test_fraction is None else test_fraction
    # the seed is fixed forever: every experiment on a data set has the same test set
    kept, held = hold_out(strata, share, numpy_stream(0, "fixed-test", *domain))
    return samples[torch.from_numpy(kept)], samples[torch.from_numpy(held)]


def _split_note(test_fraction: float | None) -> str:
    """Where the test set comes from that was held out."""
    if test_fraction == 0:
        return FITTED
    return SPLIT if test_fraction is None else SPLIT.replace("fifth", f"share of {test_fraction:g}")


def _by_name(train: Part, test: Part | None, where: str) -> Parts:
    """What was read, taken apart by the names of the domains: numbers in their order, else by the alphabet."""
    if train.domains is None or (test is not None and test.domains is None):
        one, other = ("test", "training") if train.domains is None else ("training", "test")
        raise FedfillError(
            f"{where}: the {one} samples have a column '{DOMAIN_COLUMN}' and the {other} samples have none"
        )
    own, given = (
        in_order(()) if part is None or part.domains is None else in_order(part.domains) for part in (train, test)
    )
    if extra := [name for name in given if name not in own]:
        raise FedfillError(f"{where}: the test samples have a domain '{extra[0]}' that the training samples don't have")

    def of(part: Part, domain: str) -> Part:
        return part.at(np.flatnonzero(part.domains == domain))

    return {name: (of(train, name), of(test, name) if test is not None and name in given else None) for name in own}


def parts_of(source: Source) -> tuple[Part, Part | None]:
    """A source as the parts of a larger one."""
    train, test = (Part(part, source.class_names, f"data '{source.name}'") for part in (source.train, source.test))
    return train, test if len(source.test) else None


def _same_channels(parts: Parts) -> Parts:
    """The same images, all in colour where some are."""

    def coloured(part: Part) -> Part:
        return replace(part, samples=Samples(in_colour(part.samples.inputs), part.samples.labels))

    if len({part.samples.inputs.shape[1] for pair in parts.values() for part in pair if part is not None}) < 2:
        return parts
    return {name: (coloured(train), test and coloured(test)) for name, (train, test) in parts.items()}


def join(name: str, where: str, parts: Parts, sized: bool = False, test_fraction: float | None = None) -> Source:
    """The source of several domains, one after the other, of each of which a part is held out where it brings no test set.

    Args:
        name: The source's name.
        where: The beginning of an error sentence.
        parts: What was read of each domain.
        sized: As for `source_of`.
        test_fraction: Likewise, of each domain that brings no test set; at least one does not where it is given.

    Returns:
        The source.
    """
    if sized:
        parts = _same_channels(parts)
    refuse_fraction(test_fraction, where, [test for _, test in parts.values()])
    everything = [part for pair in parts.values() for part in pair if part is not None]
    class_names = _names(
        sorted(everything, key=lambda part: part.names is None), sum(len(p.samples) for p in everything)
    )
    halves = []
    for domain, (train, test) in parts.items():
        if not len(train.samples):
            raise FedfillError(f"{where}: domain '{domain}' has no training samples, but at least one is needed")
        for part in (train,) if test is None else (train, test):
            check_alike(everything[0].samples.inputs, part.samples.inputs, f"{where}, domain '{domain}'")
            if part.names not in (None, class_names):
                raise FedfillError(
                    f"{where}: the classes of domain '{domain}' are {', '.join(part.names or ())}, but those of another are "
                    f"{', '.join(class_names)}; all domains need the same classes in the same order"
                )
            check_labels(part.samples.labels.numpy(), class_names, f"{where}, domain '{domain}'")
        halves.append(_split(train, test_fraction, domain) if test is None else (train.samples, test.samples))
    without = [domain for domain, (_, test) in parts.items() if test is None]
    trains, tests = zip(*halves, strict=True)
    if not any(map(len, tests)):
        raise FedfillError(too_few(where, f"samples of each of {len(parts)} domains", test_fraction))
    note = _split_note(test_fraction) if len(without) == len(parts) else OWN
    if without and note == OWN:
        held = "fifth" if test_fraction is None else f"share of {test_fraction:g}"
        held = "the training samples themselves" if test_fraction == 0 else f"a fixed stratified {held}"
        note += f" Of {', '.join(without)}, which came without one, {held}."
    index = (np.repeat(np.arange(len(parts)), [len(samples) for samples in half]) for half in (trains, tests))
    return Source(name, together(trains), together(tests), class_names, note, Domains(tuple(parts), *index))


def together(parts: Sequence[Samples]) -> Samples:
    """All samples of the parts, one part after the other."""
    return Samples(torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts]))


def too_few(where: str, what: str, test_fraction: float | None = None) -> str:
    """The sentence for samples of which no test set can be held out."""
    if test_fraction is not None:
        return f"test_fraction: found {test_fraction:g} with {where}, which holds out none of the {what}; allowed: a larger share, or 0"
    return f"{where}: there is no test set and the {what} are too few to hold one out; give at least 3 of a class"


def _names(parts: Sequence[Part], samples: int) -> tuple[str, ...]:
    """The classes' names, or their numbers as far as the labels go, of which there may be no more than `samples`."""
    if parts[0].names is not None:
        return parts[0].names
    highest, place = max((int(part.samples.labels.max()), part.place) for part in parts)
    if highest >= samples:
        raise FedfillError(
            f"{place}: the highest label is {highest}, which makes {highest + 1:,} classes of {samples:,} samples; "
            "number the classes from 0, or give their names with the data"
        )
    return tuple(map(str, range(highest + 1)))


def check_labels(labels: np.ndarray[Any, Any], names: tuple[str, ...] | None, where: str) -> None:
    """Refuse labels that are negative or have no name, in a sentence that begins with `where`; numbers are no classes."""
    if np.issubdtype(labels.dtype, np.floating):
        return
    if labels.min(initial=0) < 0:
        raise FedfillError(f"{where}: a label is {labels.min()}, but classes are counted from 0")
    if names is None and labels.max(initial=0) > np.iinfo(np.int64).max:
        raise FedfillError(f"{where}: a label is {labels.max()}; allowed: classes counted from 0")
    if names is not None and labels.max(initial=0) >= len(names):
        raise FedfillError(
            f"{where}: a label is {labels.max()}, but there are {len(names)} class names, so 0 to {len(names) - 1}"
        )


def numbered(labels: np.ndarray[Any, Any], names: Sequence[str], where: str) -> np.ndarray[Any, Any]:
    """The indices of labels that are words.

    Args:
        labels: ``[n]``.
        names: The classes in the order of their indices.
        where: The beginning of an error sentence.

    Returns:
        ``[n]`` int64.

    Raises:
        FedfillError: Where a word names no class.
    """
    index = {name: number for number, name in enumerate(names)}
    if len(strange := np.setdiff1d(labels, names)):
        raise FedfillError(
            f"{where} has a class {shown(str(strange[0]))}, which is not one of class_names or, without these, of the training samples: "
            f"{', '.join(map(str, names[:10]))}{', ...' if len(names) > 10 else ''}"
        )
    return np.array([index[label] for label in labels], dtype=np.int64)


def label_array(labels: Any, where: str) -> np.ndarray[Any, Any]:
    """Labels from Python as an array of their own type; truth values become the words ``False`` and ``True``.

    Args:
        labels: An array, a tensor or a list.
        where: The beginning of an error sentence.

    Returns:
        Of any shape and type.

    Raises:
        FedfillError: Where no array can be made of them.
    """
    try:
        array: np.ndarray[Any, Any] = (
            labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
        )
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        kind = str(labels.dtype).removeprefix("torch.") if isinstance(labels, Tensor) else type(labels).__name__
        raise FedfillError(
            f"{where}: labels are {kind}, of which no array can be made; allowed: one whole number or one word per sample"
        ) from error
    return np.where(array, "True", "False") if array.dtype == bool else array


def check_names(names: Sequence[str], what: str) -> None:
    """Refuse names that no table or page can show or tell apart.

    These are blank ones, those of several lines, with control characters or with halves of letters, and any that is there twice.

    Args:
        names: Of classes, domains or clients.
        what: The beginning of an error sentence.

    Raises:
        FedfillError: With the first such name.
    """
    for name in names:
        if (
            not name.strip()
            or any(letter < " " or "\ud800" <= letter <= "\udfff" for letter in name.strip("\t"))
            or len(name.splitlines()) > 1
        ):
            raise FedfillError(f"{what}: found {shown(name)}; allowed: names of one line that can be read")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FedfillError(f"{what}: found {shown(twice)} twice; allowed: each name once")


def check_alike(first: Tensor, second: Tensor, where: str) -> None:
    """Refuse samples of different shapes or types, in a sentence that begins with `where`."""
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
        images = first.dtype == second.dtype == torch.uint8
        hint = ", and image_size brings images in files to one shape" if images else ""
        raise FedfillError(
            f"{where}: some samples have shape {list(first.shape[1:])} and type {first.dtype}, others "
            f"{list(second.shape[1:])} and {second.dtype}; all must be alike{hint}"
        )


def in_order(words: Iterable[str]) -> list[str]:
    """Different words: whole numbers first and by their value, the others by the alphabet."""
    words = set(map(str, words))
    # Python reads no number of thousands of digits
    whole = {word for word in words if len(word) < 1000 and word.removeprefix("-").isdecimal()}
    return sorted(words, key=lambda word: (int(word) if word in whole else math.inf, word))
