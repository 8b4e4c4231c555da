"""Federations: data divided among clients, each with its own test split, and a test set that nobody trains on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfill.data import partitions, sources
from fedfill.data.partitions import Indices, Partitioner, hold_out, keep_labels, set_aside
from fedfill.data.samples import Samples
from fedfill.data.sources import Source
from fedfill.errors import FedfillError, did_you_mean
from fedfill.streams import numpy_stream


@dataclass(frozen=True)
class ClientData:
    """What one client holds.

    Attributes:
        train: The labelled samples that it trains on, at least one.
        test: Its own test split; may be empty.
        unlabelled: Samples whose labels nobody knows; may be empty, and is where nothing is given.
        validation: Samples that it neither trains nor is tested on, to choose a round by; likewise.
    """

    train: Samples
    test: Samples
    unlabelled: Samples = None  # type: ignore[assignment]  # never None: what is empty has train's shape
    validation: Samples = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Fill in what was not given."""
        for part in ("unlabelled", "validation"):
            if getattr(self, part) is None:
                object.__setattr__(self, part, self.train[:0])

    def with_validation(self, share: float | None, stream: np.random.Generator) -> ClientData:
        """The same client, of whose training samples some are kept for validation.

        Args:
            share: How many, stratified by class (see `set_aside`); None: none.
            stream: Where the draws come from.

        Returns:
            The client.
        """
        if not share:
            return self
        kept, held = set_aside(self.train.labels.numpy(), share, stream)
        return replace(self, train=_take(self.train, kept), validation=_take(self.train, held))

    def with_labels(self, number: int | None, stream: np.random.Generator) -> ClientData:
        """The same client, of whose training samples no more than some keep their labels.

        Args:
            number: How many, stratified by class (see `keep_labels`); None: all.
            stream: Where the draws come from.

        Returns:
            The client; the others of its training samples are unlabelled, behind those that were.
        """
        if number is None or len(self.train) <= number:
            return self
        kept, others = keep_labels(self.train.labels.numpy(), number, stream)
        unlabelled = self.unlabelled + _take(self.train, others).unlabelled()
        return replace(self, train=_take(self.train, kept), unlabelled=unlabelled)


@dataclass(frozen=True)
class Federation:
    """All clients' data and the global test set. The tensors must never be written to.

    Attributes:
        name: The data set's name.
        clients: What each client holds.
        test: The global test set; nothing may be chosen by it.
        class_names: The classes' names in the order of their indices.
        notes: Sentences for people: where the test set comes from, how the data were divided.
        fingerprint: SHA-256 over every sample and who holds it.
        domains: The name of each client's domain, where the data were divided by these; else empty.
    """

    name: str
    clients: tuple[ClientData, ...]
    test: Samples
    class_names: tuple[str, ...]
    notes: tuple[str, ...]
    fingerprint: str
    domains: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample's inputs."""
        return tuple(self.test.inputs.shape[1:])

    @property
    def sample(self) -> Samples:
        """One sample of nothing, with the type and shape of all others."""
        inputs = self.test.inputs
        return Samples(torch.zeros(1, *inputs.shape[1:], dtype=inputs.dtype), torch.zeros(1, dtype=torch.int64))

    def pooled(self) -> Federation:
        """The same data in one place: client 0 holds all samples but own splits for test and validation, which all keep."""
        train, unlabelled = (_joined([getattr(c, part) for c in self.clients]) for part in ("train", "unlabelled"))
        first, *others = self.clients
        nothing = train[:0]
        kept = (replace(client, train=nothing, unlabelled=nothing) for client in others)
        clients = (replace(first, train=train, unlabelled=unlabelled), *kept)
        note = "The training samples of all clients are pooled."
        return replace(self, clients=clients, notes=(*self.notes, note))

    @property
    def counts(self) -> list[list[int]]:
        """For each client, how many labelled training samples of each class it holds."""
        return [client.train.counts(self.classes) for client in self.clients]

    @property
    def client_names(self) -> list[str]:
        """For people: each client's number, and the name of its domain where it has one."""
        return [" ".join([str(i), *self.domains[i : i + 1]]) for i in range(len(self.clients))]


def federate(
    data: Any,
    *,
    data_dir: Path | str | None = None,
    fraction: float = 1.0,
    partition: str | Partitioner | None = None,
    clients: int | None = None,
    seed: int,
    client_test: float = 0.1,
    labelled_per_client: int | None = None,
    client_validation: float | None = None,
    image_size: int | None = None,
    domain_fractions: str | None = None,
) -> Federation:
    """Load a data set and divide it among clients.

    A list of data sets is a partition of its own: each client gets one, and `partition` and `client_test` aren't used.
    Each client's own test split is then the test set of its data (where they have none, a fixed stratified fifth, and
    nothing where they are too few for that), and the global test set is all of these together. So it is with the partition
    ``domain``: each client's own test split is the whole test set of its domain, and `client_test` is used only by clients of
    a domain that has none.

    Args:
        data: A name (see `sources.load`), a Python form (see `sources.from_python`) or a list of forms, one per client.
        data_dir: Where data sets lie, for a name.
        fraction: The share of the training set to use, stratified by class and domain, above 0 and up to 1.
        partition: A spec such as ``"dirichlet:0.5"``, or a `flwr_datasets` partitioner.
        clients: How many clients; for a list or a partitioner None, or the number that it has.
        seed: The experiment's seed.
        client_test: The share of each client's samples, stratified by class, that becomes its own test split, 0..0.5.
        labelled_per_client: How many of each client's training samples keep their labels, at least 1, stratified by class;
            None: all.
        client_validation: The share of what is left of each client's training samples, stratified by class, that is kept for
            validation, 0..0.5; None: none.
        image_size: Pixels to a side to bring every image of data by name to, in colour; None: as they are.
        domain_fractions: Shares of single domains in place of `fraction`, such as ``"svhn=0.2,mnist_m=0.14"``.

    Returns:
        The federation.

    Raises:
        FedfillError: Where the data can't be read, or a setting is out of range or doesn't fit the data.
    """
    if not 0 < fraction <= 1:
        raise FedfillError(f"data_fraction: found {fraction}, but a number above 0 and up to 1 is needed")
    if not 0 <= client_test <= 0.5:
        raise FedfillError(f"client_test: found {client_test}, but a share from 0 to 0.5 is needed")
    if labelled_per_client is not None and (type(labelled_per_client) is not int or labelled_per_client < 1):
        raise FedfillError(
            f"labelled_per_client: found {labelled_per_client!r}, but a whole number of at least 1 is needed"
        )
    if client_validation is not None and not 0 <= client_validation <= 0.5:
        raise FedfillError(f"client_validation: found {client_validation}, but a share from 0 to 0.5 is needed")
    if image_size is not None and (type(image_size) is not int or image_size < 1):
        raise FedfillError(f"image_size: found {image_size!r}, but a whole number of at least 1 is needed")
    if image_size is not None and not isinstance(data, str):
        raise FedfillError(
            f"image_size: found {image_size}, but data from Python keep their shape; it goes with data by name"
        )
    source = sources.load(data, data_dir, image_size) if isinstance(data, str) else sources.from_python(data)
    if isinstance(source, list):
        if domain_fractions:
            raise FedfillError(
                f"domain_fractions: found '{domain_fractions}' with a list of data sets, which have no domains"
            )
        return _given(source, fraction, clients, seed, labelled_per_client, client_validation)
    train, domains = source.train, source.domains.train if source.domains is not None else None
    own = _fractions(domain_fractions, source)
    if fraction < 1 or own:
        labels = train.labels.numpy()
        strata = labels if domains is None else labels + len(source.class_names) * domains
        chosen = _part(strata, fraction, numpy_stream(seed, "fraction")) if fraction < 1 else np.arange(len(labels))
        if domains is not None and own:
            shares_of = [chosen[~np.isin(domains[chosen], list(own))]]
            for home, share in own.items():
                mine = np.flatnonzero(domains == home)
                shares_of.append(mine[_part(labels[mine], share, numpy_stream(seed, "fraction of a domain", home))])
            chosen = np.sort(np.concatenate(shares_of))
        train, domains = _take(train, chosen), None if domains is None else domains[chosen]
    parts, how = _divide(partition, train.labels.numpy(), clients, seed, domains)
    homes = [int(domains[part[0]]) for part in parts] if domains is not None and _by_domain(partition) else []
    tests = {home: _own_test(source, home) for home in set(homes)}
    members = []
    for index, part in enumerate(parts):
        if homes and len(tests[homes[index]]):
            members.append(ClientData(_take(train, part), tests[homes[index]]))
            continue
        kept, held = hold_out(train.labels.numpy()[part], client_test, numpy_stream(seed, "client-test", index))
        members.append(ClientData(_take(train, part[kept]), _take(train, part[held])))
    notes = [source.note, how]
    if source.domains is not None and not homes:
        notes.append(f"The domains of the data ({', '.join(source.domains.names)}) are one pool to this partition.")
    if fraction < 1:
        notes.append(
            f"Data fraction {fraction:g}: {len(train):,} of {len(source.train):,} training samples, stratified by "
            f"class{'' if domains is None else ' and domain'}."
        )
    if own and source.domains is not None:
        shares = ", ".join(f"{source.domains.names[home]} {share:g}" for home, share in own.items())
        notes.append(f"Shares of their own: {shares}.")
    if len(left := train.labels) > sum(map(len, parts)):
        notes.append(f"The partition left out {len(left) - sum(map(len, parts)):,} of {len(left):,} training samples.")
    if homes:
        without = sum(not len(tests[home]) for home in homes)
        untested = sum(not len(member.test) for member in members)
        notes.append(
            "Each client is tested on the whole test set of its domain"
            + (
                f"; where a domain has none, {client_test:.0%} of the client's samples: {without:,} of {len(members):,} clients"
                + (f"; too few for one: {untested:,}." if untested else ".")
                if without
                else "."
            )
        )
    elif client_test:
        without = sum(not len(member.test) for member in members)
        notes.append(
            f"Each client keeps {client_test:.0%} of its samples as its own test split, stratified by class"
            + (f"; too few for one: {without:,} of {len(members):,} clients." if without else ".")
        )
    names = tuple(source.domains.names[home] for home in homes) if source.domains is not None else ()
    return _federation(
        source.name,
        members,
        source.test,
        source.class_names,
        notes,
        labelled_per_client,
        client_validation,
        seed,
        names,
    )


def class_table(federation: Federation) -> tuple[list[str], list[list[Any]]]:
    """Who holds what, as a table to print.

    Args:
        federation: The federation.

    Returns:
        The header (client, samples, every class, unlabelled and validation where there are any, own test) and one row per
        client: what it is called, and numbers; samples and classes count labelled training samples.
    """
    some = [part for part in ("unlabelled", "validation") if any(len(getattr(c, part)) for c in federation.clients)]
    header = ["client", "samples", *federation.class_names, *some, "own test"]
    rows = [
        [name, len(client.train), *counts, *(len(getattr(client, part)) for part in some), len(client.test)]
        for name, client, counts in zip(federation.client_names, federation.clients, federation.counts, strict=True)
    ]
    return header, rows


def _given(
    given: list[Source], fraction: float, clients: int | None, seed: int, labelled_per_client: int | None,
    client_validation: float | None,
) -> Federation:  # fmt: skip
    """The federation of data sets that are given for each client."""
    if clients is not None and clients != len(given):
        raise FedfillError(f"clients: found {clients}, but the list holds {len(given)} data sets, one per client")
    class_names = max((source.class_names for source in given), key=len)
    first = given[0].train.inputs
    members = []
    for index, source in enumerate(given):
        if source.class_names != class_names[: len(source.class_names)]:
            raise FedfillError(
                f"data of client {index}: its classes are {', '.join(source.class_names)}, but those of another client "
                f"are {', '.join(class_names)}; all clients need the same classes in the same order"
            )
        inputs = source.train.inputs
        if inputs.shape[1:] != first.shape[1:] or inputs.dtype != first.dtype:
            raise FedfillError(
                f"data of client {index}: its samples have shape {list(inputs.shape[1:])} and type {inputs.dtype}, but "
                f"client 0's have {list(first.shape[1:])} and {first.dtype}; bring them to one shape and type"
            )
        train = source.train
        if fraction < 1:
            train = _take(train, _part(train.labels.numpy(), fraction, numpy_stream(seed, "fraction", index)))
        members.append(ClientData(train, source.test))
    test = Samples(torch.cat([s.test.inputs for s in given]), torch.cat([s.test.labels for s in given]))
    notes = list(dict.fromkeys(source.note for source in given if len(source.test)))
    if without := sum(not len(source.test) for source in given):
        notes.append(
            f"No test split of their own, as their samples are too few to hold one out: {without:,} of {len(given):,} "
            "clients."
        )
    notes.append(
        "Partition: given with the data, one data set per client; the test set is all clients' test sets together."
    )
    if fraction < 1:
        notes.append(f"Data fraction {fraction:g} of each client's training samples, stratified by class.")
    name = "+".join(dict.fromkeys(source.name for source in given))
    return _federation(name, members, test, class_names, notes, labelled_per_client, client_validation, seed)


def _by_domain(partition: Any) -> bool:
    return isinstance(partition, str) and partitions.parse(partition)[0] == "domain"


def _own_test(source: Source, home: int) -> Samples:
    """The test samples of a domain."""
    assert source.domains is not None
    return _take(source.test, np.flatnonzero(source.domains.test == home))


def _divide(
    partition: str | Partitioner | None, labels: Indices, clients: int | None, seed: int, domains: Indices | None
) -> tuple[list[Indices], str]:
    """The index arrays, and a sentence on where they come from."""
    if isinstance(partition, str):
        parts = partitions.partition(partition, labels, clients, seed, domains)
        return parts, f"Partition {partition}: {len(labels):,} training samples divided among {len(parts):,} clients."
    if partitions.is_partitioner(partition):
        parts = partitions.from_partitioner(partition, labels)
        if clients is not None and clients != len(parts):
            raise FedfillError(
                f"clients: found {clients}, but the {type(partition).__name__} makes {len(parts)} partitions"
            )
        kind = type(partition).__name__
        return parts, f"Partition: by the {kind}, into {len(parts):,} clients; its draws come from its own seed."
    found = "none was given" if partition is None else f"found {type(partition).__name__}"
    raise FedfillError(
        f"partition: a spec such as 'dirichlet:0.5' or a flwr_datasets partitioner is needed, but {found}"
    )


def _fractions(text: str | None, source: Source) -> dict[int, float]:
    """The share of each domain that is named, by its index."""
    found: dict[int, float] = {}
    for pair in text.split(",") if text is not None else ():
        name, _, share = (part.strip() for part in pair.partition("="))
        names = source.domains.names if source.domains is not None else ()
        if name not in names:
            known = did_you_mean(name, names) if names else "these data have no domains"
            raise FedfillError(f"domain_fractions: found '{pair}'; {known}")
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if not 0 < value <= 1:
            raise FedfillError(
                f"domain_fractions: found '{pair}'; allowed: NAME=SHARE with a share above 0 and up to 1"
            )
        if names.index(name) in found:
            raise FedfillError(f"domain_fractions: found '{name}' twice; allowed: once")
        found[names.index(name)] = value
    return found


def _part(strata: Indices, fraction: float, rng: np.random.Generator) -> Indices:
    """A part of each stratum, at least one sample; of two fractions the smaller is part of the larger."""
    return hold_out(strata, 1 - fraction, rng)[0]


def _take(samples: Samples, index: Indices) -> Samples:
    # numpy's gather: torch's wakes its thread pool, which for a client's few samples can cost a thousand times the copy
    return Samples(torch.from_numpy(samples.inputs.numpy()[index]), torch.from_numpy(samples.labels.numpy()[index]))


def _joined(parts: list[Samples]) -> Samples:
    return Samples(torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts]))


def _federation(
    name: str, members: list[ClientData], test: Samples, class_names: tuple[str, ...], notes: list[str],
    labelled_per_client: int | None, client_validation: float | None, seed: int, domains: tuple[str, ...] = (),
) -> Federation:  # fmt: skip
    if client_validation:
        members = [
            m.with_validation(client_validation, numpy_stream(seed, "client-validation", i))
            for i, m in enumerate(members)
        ]
        without = sum(not len(member.validation) for member in members)
        notes.append(
            f"Each client keeps {client_validation:.0%} of what is left for validation, stratified by class"
            + (f"; too few for it: {without:,} of {len(members):,} clients." if without else ".")
        )
    if labelled_per_client is not None:
        few, before = sum(len(m.train) < labelled_per_client for m in members), sum(len(m.train) for m in members)
        members = [m.with_labels(labelled_per_client, numpy_stream(seed, "labelled", i)) for i, m in enumerate(members)]
        notes.append(
            f"Labelled: {sum(len(m.train) for m in members):,} of {before:,} training samples, {labelled_per_client:,} for each "
            "client, stratified by class"
            + (f"; fewer samples than that, all labelled: {few:,} of {len(members):,} clients." if few else ".")
        )
    digest = hashlib.sha256("\n".join(class_names).encode())
    digest.update("".join(f"\n{name}" for name in domains).encode())
    # what is empty is left out
    parts = (part for m in members for part in (m.train, m.test, *(p for p in (m.unlabelled, m.validation) if len(p))))
    for samples in (test, *parts):
        _hash(samples, digest.update)
    return Federation(name, tuple(members), test, class_names, tuple(notes), digest.hexdigest(), domains)


def _hash(samples: Samples, update: Callable[[Any], None]) -> None:
    """Types, shapes and bytes of the samples; the shapes keep neighbours apart."""
    for tensor in (samples.inputs, samples.labels):
        update(f"\n{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        update(tensor.contiguous().numpy().reshape(-1).view(np.uint8))
