"""Division: a data set becomes a federation, in which each client has training data and a test split of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedfill.data import partitions
from fedfill.data.columns import Columns
from fedfill.data.dataset import Source, check_alike, check_names, together
from fedfill.data.federation import ClientData, Federation, fingerprint, take
from fedfill.data.names import parse
from fedfill.data.objects import from_python
from fedfill.data.partitions import Partition
from fedfill.data.samples import Samples
from fedfill.data.schema import Schema
from fedfill.data.sources import load
from fedfill.data.stratified import Indices, hold_out
from fedfill.errors import FedfillError, did_you_mean, shown
from fedfill.streams import numpy_stream


def federate(
    data: Any,
    *,
    data_dir: Path | str | None = None,
    fraction: float = 1.0,
    partition: Partition | None = None,
    clients: int | None = None,
    seed: int,
    client_test: float = 0.1,
    labelled_per_client: int | None = None,
    client_validation: float | None = None,
    image_size: int | None = None,
    domain_fractions: str | None = None,
    schema: Schema | None = None,
    test_fraction: float | None = None,
) -> Federation:
    """Load a data set and divide it among clients.

    A list of data sets is a partition of its own: each client gets one, and `partition` and `client_test` aren't used.
    Each client's own test split is then the test set of its data (where they have none, what `test_fraction` says, and
    nothing where they are too few for that), and the global test set is all of these together. So it is with the partition
    ``domain``: each client's own test split is the whole test set of its domain, and `client_test` is used only by clients of
    a domain that has none.

    Args:
        data: A name (see `sources.load`), a Python form (see `objects.from_python`) or a list of forms, one per client.
        data_dir: Where data sets lie, for a name.
        fraction: The share of the training set to use, stratified by class and domain, above 0 and up to 1.
        partition: A spec such as ``"dirichlet:0.5"``, a list of indices for each client, a function (see
            `partitions.from_function`), or a `flwr_datasets` partitioner.
        clients: How many clients; for lists or a partitioner None, or the number that they have.
        seed: The experiment's seed.
        client_test: The share of each client's samples, stratified by class, that becomes its own test split, 0..0.5.
        labelled_per_client: How many of each client's training samples keep their labels, at least 1, stratified by class;
            None: all.
        client_validation: The share of what is left of each client's training samples, stratified by class, that is kept for
            validation, 0..0.5; None: none.
        image_size: Pixels to a side to bring every image of data by name to, grey where all are grey; None: as they are.
        domain_fractions: Shares of single domains in place of `fraction`, such as ``"svhn=0.2,mnist_m=0.14"``.
        schema: What a table's columns hold; None: as the training table says.
        test_fraction: The share of each class that is held out as everyone's test set where the data bring none, 0..0.5; with 0
            none is, and the training samples are the test set too. None: a fifth.

    Returns:
        The federation.

    Raises:
        FedfillError: Where the data can't be read, or a setting is out of range or doesn't fit the data.
    """
    for name, value, fits, needed in (
        ("data_fraction", fraction, 0 < fraction <= 1, "a number above 0 and up to 1"),
        ("test_fraction", test_fraction, 0 <= (test_fraction or 0) <= 0.5, "a share from 0 to 0.5"),
        ("client_test", client_test, 0 <= client_test <= 0.5, "a share from 0 to 0.5"),
        ("client_validation", client_validation, 0 <= (client_validation or 0) <= 0.5, "a share from 0 to 0.5"),
        ("labelled_per_client", labelled_per_client, _is_count(labelled_per_client), "a whole number of at least 1"),
        ("image_size", image_size, _is_count(image_size), "a whole number of at least 1"),
    ):
        if not fits:
            raise FedfillError(f"{name}: found {value!r}, but {needed} is needed")
    if image_size is not None and not isinstance(data, str):
        raise FedfillError(
            f"image_size: found {image_size}, but data from Python keep their shape; it goes with data by name"
        )
    source = (
        load(data, data_dir, image_size, schema, test_fraction)
        if isinstance(data, str)
        else from_python(data, schema=schema, test_fraction=test_fraction)
    )
    if isinstance(source, Source):
        shares = _fractions(domain_fractions, source)
        federation = _divided(source, fraction, shares, partition, clients, seed, client_test)
    elif domain_fractions:
        raise FedfillError(
            f"domain_fractions: found '{domain_fractions}' with a list of data sets, which have no domains"
        )
    else:
        federation = _given(source, fraction, clients, seed)
    if labelled_per_client is not None and federation.of_numbers:
        raise FedfillError(
            f"labelled_per_client: found {labelled_per_client} with a target of numbers; allowed: none, with which all samples are labelled"
        )
    federation = _with_fewer_labels(_with_validation(federation, client_validation, seed), labelled_per_client, seed)
    return replace(federation, fingerprint=fingerprint(federation))


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 1)


def _given(given: list[Source], fraction: float, clients: int | None, seed: int) -> Federation:
    """The federation of data sets that are given for each client."""
    if clients is not None and clients != len(given):
        raise FedfillError(f"clients: found {clients}, but the list holds {len(given)} data sets, one per client")
    class_names = max((source.class_names for source in given), key=len)
    members = []
    for index, source in enumerate(given):
        if source.class_names != class_names[: len(source.class_names)]:
            raise FedfillError(
                f"data of client {index}: its classes are {', '.join(source.class_names)}, but those of another client "
                f"are {', '.join(class_names)}; all clients need the same classes in the same order"
            )
        train = source.train
        check_alike(given[0].train.inputs, train.inputs, f"data of client {index}")
        if fraction < 1:
            train = take(train, _part(_strata(train, source.columns), fraction, numpy_stream(seed, "fraction", index)))
        members.append(ClientData(train, source.test))
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
    test = together([source.test for source in given])
    return Federation(name, tuple(members), test, class_names, tuple(notes), "", columns=given[0].columns)


def _divided(
    source: Source, fraction: float, shares: dict[int, float], partition: Partition | None,
    clients: int | None, seed: int, client_test: float,
) -> Federation:  # fmt: skip
    """The federation of a data set whose samples a partition divides."""
    chosen = _chosen(source, fraction, shares, seed)
    train, domains = source.train, None if source.domains is None else source.domains.train
    if chosen is not None:
        train, domains = take(train, chosen), None if domains is None else domains[chosen]
    labels, strata = train.strata, _strata(train, source.columns)
    parts, how = _parts(partition, labels, clients, seed, domains)
    notes = [source.note, how]
    by_domain = isinstance(partition, str) and parse(partition)[0] == "domain"
    if source.domains is not None and not by_domain:
        notes.append(f"The domains of the data ({', '.join(source.domains.names)}) are one pool to this partition.")
    if fraction < 1:
        notes.append(
            f"Data fraction {fraction:g}: {len(train):,} of {len(source.train):,} training samples, stratified by "
            f"class{'' if domains is None else ' and domain'}."
        )
    if shares and source.domains is not None:
        said = ", ".join(f"{source.domains.names[home]} {share:g}" for home, share in shares.items())
        notes.append(f"Shares of their own: {said}.")
    if left := len(train) - sum(map(len, parts)):
        notes.append(f"The partition left out {left:,} of {len(train):,} training samples.")
    homes: list[int] = []
    tests: dict[int, Samples] = {}
    if by_domain and source.domains is not None and domains is not None:
        homes = [int(domains[part[0]]) for part in parts]
        tests = {home: take(source.test, np.flatnonzero(source.domains.test == home)) for home in set(homes)}
    members = []
    for index, part in enumerate(parts):
        if homes and len(own := tests[homes[index]]):
            members.append(ClientData(take(train, part), own))
            continue
        kept, held = hold_out(strata[part], client_test, numpy_stream(seed, "client-test", index))
        members.append(ClientData(take(train, part[kept]), take(train, part[held])))
    untested = sum(not len(member.test) for member in members)
    if homes:
        notes.append("Each client is tested on the whole test set of its domain")
        if without := sum(not len(tests[home]) for home in homes):
            notes[-1] += f"; where a domain has none, {client_test:.0%} of the client's samples: "
            notes[-1] += f"{without:,} of {len(members):,} clients"
            notes[-1] += f"; too few for one: {untested:,}" if untested else ""
        notes[-1] += "."
    elif client_test:
        notes.append(
            f"Each client keeps {client_test:.0%} of its samples as its own test split, stratified by class"
            + _few("too few for one", untested, members)
        )
    names = tuple(source.domains.names[home] for home in homes) if source.domains is not None else ()
    if isinstance(partition, Mapping):
        names = tuple(str(name).strip() for name in partition)
        check_names(names, "clients of the partition")
    return Federation(
        source.name, tuple(members), source.test, source.class_names, tuple(notes), "", names, source.columns
    )


def _chosen(source: Source, fraction: float, shares: dict[int, float], seed: int) -> Indices | None:
    """The training samples to use, of each class and domain the same share but where a domain has its own; None: all."""
    if fraction == 1 and not shares:
        return None
    labels, domains = _strata(source.train, source.columns), None if source.domains is None else source.domains.train
    chosen = np.arange(len(labels))
    if fraction < 1:
        strata = labels if domains is None else labels + (labels.max(initial=0) + 1) * domains
        chosen = _part(strata, fraction, numpy_stream(seed, "fraction"))
    if domains is None or not shares:
        return chosen
    pieces = [chosen[~np.isin(domains[chosen], list(shares))]]
    for home, share in shares.items():
        own = np.flatnonzero(domains == home)
        pieces.append(own[_part(labels[own], share, numpy_stream(seed, "fraction of a domain", home))])
    return np.sort(np.concatenate(pieces))


def _parts(
    partition: Partition | None, labels: Indices, clients: int | None, seed: int, domains: Indices | None
) -> tuple[list[Indices], str]:
    """The index arrays, and a sentence on where they come from."""
    if isinstance(partition, str):
        parts = partitions.partition(partition, labels, clients, seed, domains)
        return parts, f"Partition {partition}: {len(labels):,} training samples divided among {len(parts):,} clients."
    kind = type(partition).__name__
    if partitions.is_partitioner(partition):
        parts = partitions.from_partitioner(partition, labels)
        if clients is not None and clients != len(parts):
            raise FedfillError(f"clients: found {clients}, but the {kind} makes {len(parts)} partitions")
        return parts, f"Partition: by the {kind}, into {len(parts):,} clients; its draws come from its own seed."
    if isinstance(partition, Mapping):
        names = [str(name).strip() if isinstance(name, str | int) else "" for name in partition]
        if not all(names) or len(set(names)) < len(names):
            raise FedfillError(f"partition: found the clients {shown([*partition])}; allowed: names, each once")
        partition = list(partition.values())
    if isinstance(partition, list | tuple):
        parts = partitions.from_indices(partition, len(labels), "the list")
        if clients is not None and clients != len(parts):
            raise FedfillError(f"clients: found {clients}, but the partition has {len(parts)} lists of indices")
        return parts, f"Partition: lists of indices, one for each of {len(parts):,} clients."
    if partitions.is_function(partition):
        if clients is None:
            raise FedfillError("clients: a number is needed to divide the data by a function")
        parts = partitions.from_function(partition, labels, clients, seed)
        name = getattr(partition, "__name__", kind)
        return (
            parts,
            f"Partition {name}, a function of your own: {len(labels):,} training samples, {len(parts):,} clients.",
        )
    found = "none was given" if partition is None else f"found {kind}"
    raise FedfillError(
        f"partition: {found}; allowed: a spec such as 'dirichlet:0.5', FILE.py:NAME, a function, a list of indices for each client, a dict of them by the clients' names, or a "
        "flwr_datasets partitioner"
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


def _strata(samples: Samples, columns: Columns | None) -> Indices:
    """What a stratified choice among these samples keeps the shares of."""
    labels = samples.strata
    return labels if columns is None else columns.strata(labels)


def _with_validation(federation: Federation, share: float | None, seed: int) -> Federation:
    """The same federation, whose clients keep a share of their training samples for validation."""
    if not share:
        return federation
    members = [
        member.with_validation(
            share, numpy_stream(seed, "client-validation", i), _strata(member.train, federation.columns)
        )
        for i, member in enumerate(federation.clients)
    ]
    note = f"Each client keeps {share:.0%} of what is left for validation, stratified by class"
    note += _few("too few for it", sum(not len(member.validation) for member in members), members)
    return replace(federation, clients=tuple(members), notes=(*federation.notes, note))


def _with_fewer_labels(federation: Federation, number: int | None, seed: int) -> Federation:
    """The same federation, whose clients have labels for that many of their training samples."""
    if number is None:
        return federation
    before = [len(member.train) for member in federation.clients]
    members = [m.with_labels(number, numpy_stream(seed, "labelled", i)) for i, m in enumerate(federation.clients)]
    note = (
        f"Labelled: {sum(len(m.train) for m in members):,} of {sum(before):,} training samples, {number:,} for each client, "
        "stratified by class"
    )
    note += _few("fewer samples than that, all labelled", sum(size < number for size in before), members)
    return replace(federation, clients=tuple(members), notes=(*federation.notes, note))


def _few(what: str, few: int, members: list[ClientData]) -> str:
    """The end of a note that is not true of some clients."""
    return f"; {what}: {few:,} of {len(members):,} clients." if few else "."
