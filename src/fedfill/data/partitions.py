"""Partitions: who holds which sample.

Each partition is a pure function from labels, a number of clients and a seed to one sorted index array per client.
The same arguments always give the same arrays, and every sample belongs to exactly one client. Only `domain` looks at
something else than labels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fedfill.errors import FedfillError, did_you_mean
from fedfill.streams import numpy_stream

Indices = NDArray[np.int64]

NAMES = {
    "iid": "clients of equal size, labels at random",
    "dirichlet:BETA": "label skew: each class is divided by a draw from Dirichlet(BETA); a smaller BETA is more skewed",
    "classes:C": "label skew: every client holds at most C classes, in C pieces of one class each",
    "unimodal:C": "label skew: shards of one class and of nearly one size, C of them for each client (McMahan et al.)",
    "multimodal:C:SHARES": "label skew: groups of clients, of these SHARES (0.8,0.2), with groups of classes and unimodal:C in each",
    "quantity:BETA": "size skew: clients' sizes are a draw from Dirichlet(BETA), labels at random",
    "domain:K": "feature skew: K clients (1) for each domain of data that have domains, which share it at random",
}
"""The partitions that a spec can name, with one line for people."""

TRIES = 1000
"""How many draws are made before a partition is given up as out of reach."""


class Partitioner(Protocol):
    """The part of a `flwr_datasets` partitioner that is used here; a settable `dataset` belongs to it too."""

    @property
    def num_partitions(self) -> int:
        """How many partitions it makes."""

    def load_partition(self, partition_id: int) -> Any:
        """The rows of one partition, as a `datasets.Dataset`."""


def is_partitioner(value: Any) -> TypeGuard[Partitioner]:
    """Whether it is a `Partitioner`, by its class: most of them can't say how many partitions they make before they have data."""
    given = getattr(value, "__dict__", {})
    return all(hasattr(type(value), name) or name in given for name in ("num_partitions", "load_partition"))


def iid(labels: NDArray[Any], clients: int, seed: int) -> list[Indices]:
    """Samples dealt at random; clients' sizes differ by one at most.

    Args:
        labels: ``[n]`` integers.
        clients: How many clients, 1..n.
        seed: The experiment's seed.

    Returns:
        One sorted int64 index array per client.

    Raises:
        FedfillError: Where there are fewer samples than clients, or no clients.
    """
    labels = _checked(labels, clients)
    order = numpy_stream(seed, "partition").permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


def dirichlet(labels: NDArray[Any], clients: int, seed: int, beta: float, min_samples: int = 10) -> list[Indices]:
    """Label skew by Dirichlet draws, with the balance guard that MOON, NIID-Bench and FedDPMS use.

    Class by class, p ~ Dir(beta, ..., beta) over the clients; p is set to 0 for those that already hold n / clients
    samples or more and scaled back to a sum of 1; the class's shuffled samples are cut at cumsum(p). The whole draw is
    repeated until each client has `min_samples`.

    Args:
        labels: ``[n]`` integers; only classes that occur are looped over.
        clients: How many clients.
        seed: The experiment's seed.
        beta: Concentration, above 0: 0.1 is strong skew, 100 nearly none.
        min_samples: The smallest number of samples that a client may have.

    Returns:
        One sorted int64 index array per client.

    Raises:
        FedfillError: Where an argument is out of range or 1,000 draws don't reach `min_samples`.
    """
    labels = _checked(labels, clients)
    _check_beta("dirichlet", beta)
    _check_room("dirichlet", len(labels), clients, min_samples)
    rng = numpy_stream(seed, "partition")
    classes, sizes = np.unique(labels, return_counts=True)
    for _ in range(TRIES):
        # only counts are drawn until they are accepted: shuffling 1,000 times would be slow
        cuts = _guarded_cuts(sizes, clients, beta, rng)
        if cuts is not None and np.diff(cuts, axis=1, prepend=0).sum(axis=0).min() >= min_samples:
            pieces = [
                np.split(rng.permutation(np.flatnonzero(labels == label)), cut[:-1])
                for label, cut in zip(classes, cuts, strict=True)
            ]
            return [np.sort(np.concatenate(parts)) for parts in zip(*pieces, strict=True)]
    raise FedfillError(
        f"partition 'dirichlet:{beta:g}': none of {TRIES:,} draws gave each of {clients:,} clients {min_samples} of "
        f"the {len(labels):,} samples; use a larger beta, fewer clients or more data"
    )


def _guarded_cuts(sizes: Indices, clients: int, beta: float, rng: np.random.Generator) -> Indices | None:
    """Where each class is cut, ``[classes, clients]``; None if the guard leaves nobody to give a class to."""
    fair = sizes.sum() / clients
    held = np.zeros(clients, np.int64)
    cuts = np.empty((len(sizes), clients), np.int64)
    for row, size in enumerate(sizes):
        for _ in range(100):
            share = np.where(held < fair, rng.dirichlet(np.full(clients, beta)), 0.0)
            # a tiny beta puts nearly everything on one client: if that one is full, nothing is left to scale
            if share.sum() > 0:
                break
        else:
            return None
        # rounded, not cut off, so that no position among the clients is favoured and a share of 0 gives 0 samples
        cuts[row] = np.rint(np.cumsum(share / share.sum()) * size)
        cuts[row, -1] = size
        held += np.diff(cuts[row], prepend=0)
    return cuts


def classes(labels: NDArray[Any], clients: int, seed: int, count: int) -> list[Indices]:
    """Label skew by pieces of one class: ``clients * count`` pieces are shuffled and each client gets `count` of them.

    Every class is cut into the same number of pieces, of sizes that differ by one at most. Where the pieces don't
    divide by the classes, the largest classes get one more (among equals, chance decides); where a class has too few
    samples for its number, others take the rest. A client may be dealt two pieces of one class, so it holds at most
    `count` classes. With McMahan et al.'s shards of the sorted data a shard may straddle two classes; here none does.

    Args:
        labels: ``[n]`` integers.
        clients: How many clients.
        seed: The experiment's seed.
        count: Pieces per client, 1 to the number of classes that occur.

    Returns:
        One sorted int64 index array per client.

    Raises:
        FedfillError: Where `count` is out of range, or there are fewer pieces than classes or samples than pieces.
    """
    labels = _checked(labels, clients)
    present, sizes = np.unique(labels, return_counts=True)
    spec = f"partition 'classes:{count}'"
    if not 1 <= count <= len(present):
        raise FedfillError(f"{spec}: a client can hold 1 to {len(present)} of the {len(present)} classes in the data")
    pieces = clients * count
    if pieces < len(present):
        raise FedfillError(
            f"{spec}: {clients} clients make {pieces} pieces, too few for {len(present)} classes; "
            f"use at least {math.ceil(len(present) / clients)} classes per client or "
            f"{math.ceil(len(present) / count)} clients"
        )
    if pieces > len(labels):
        raise FedfillError(
            f"{spec}: {clients:,} clients need {pieces:,} pieces, but there are only {len(labels):,} samples"
        )
    rng = numpy_stream(seed, "partition")
    cut = [
        piece
        for label, number in zip(present, _spread(pieces, sizes, rng), strict=True)
        for piece in np.array_split(rng.permutation(np.flatnonzero(labels == label)), number)
    ]
    dealt = rng.permutation(pieces).reshape(clients, count)
    return [np.sort(np.concatenate([cut[piece] for piece in hand])) for hand in dealt]


def _spread(pieces: int, sizes: Indices, rng: np.random.Generator) -> Indices:
    """How many pieces each class is cut into: as even as possible, and never more pieces than samples."""
    given = np.zeros(len(sizes), np.int64)
    chance = rng.permutation(len(sizes))
    while left := pieces - int(given.sum()):
        room = np.flatnonzero(given < sizes)
        if left < len(room):
            largest_first = room[np.lexsort((chance[room], -sizes[room]))]
            given[largest_first[:left]] += 1
        else:
            given[room] += np.minimum(left // len(room), (sizes - given)[room])
    return given


def unimodal(labels: NDArray[Any], clients: int, seed: int, count: int) -> list[Indices]:
    """Label skew by shards: the data sorted by label are cut into ``clients * count`` shards, and each client gets `count`.

    McMahan et al.'s partition, which the Fed-ZDA paper calls unimodal, but for one point: their shards have one size and
    may straddle two classes. Here each class has shards in proportion to its size, so that their sizes differ a little
    and no shard straddles: every client holds at most `count` classes.

    Args:
        labels: ``[n]`` integers.
        clients: How many clients.
        seed: The experiment's seed.
        count: Shards per client, 1 to the number of classes that occur.

    Returns:
        One sorted int64 index array per client.

    Raises:
        FedfillError: Where `count` is out of range, or there are fewer shards than classes or samples than shards.
    """
    labels = _checked(labels, clients)
    _check_shards(f"partition 'unimodal:{count}'", labels, clients, count)
    return _deal(labels, clients, count, numpy_stream(seed, "partition"))


def multimodal(
    labels: NDArray[Any], clients: int, seed: int, count: int, shares: Sequence[float] = (0.8, 0.2)
) -> list[Indices]:
    """Subpopulations of unequal size: classes fall into groups, clients into groups with these shares, shards in each.

    The Fed-ZDA paper names the partition without defining it. Here the classes in their order are cut into as many groups
    as there are shares, of nearly equal numbers; each group of clients divides its group of classes as `unimodal` does.
    All clients have nearly one size: that of the group with the fewest samples per client, so that a small group of
    clients leaves samples of its classes out, and its classes are rare in the whole federation.

    Args:
        labels: ``[n]`` integers.
        clients: How many clients, at least one for each share.
        seed: The experiment's seed.
        count: Shards per client, 1 to the number of classes in the smallest group.
        shares: Of the clients, above 0, with a sum of 1.

    Returns:
        One sorted int64 index array per client, group after group.

    Raises:
        FedfillError: Where an argument is out of range, or a group has fewer shards than classes or samples than shards.
    """
    labels = _checked(labels, clients)
    spec = f"partition 'multimodal:{count}:{','.join(f'{share:g}' for share in shares)}'"
    present = np.unique(labels)
    if any(not share > 0 for share in shares) or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise FedfillError(f"{spec}: the shares must be above 0 and sum to 1, and these sum to {sum(shares):g}")
    if len(shares) > min(clients, len(present)):
        raise FedfillError(
            f"{spec}: {len(shares)} groups need as many clients and classes, and there are {clients:,} and {len(present)}"
        )
    ends = np.rint(np.cumsum(shares) * clients).astype(np.int64)
    sizes = np.diff(ends, prepend=0)
    if sizes.min() < 1:
        raise FedfillError(f"{spec}: of {clients:,} clients a group would have none; use larger shares or more clients")
    groups = np.array_split(present, len(shares))
    members = [np.flatnonzero(np.isin(labels, group)) for group in groups]
    for own, size in zip(members, sizes, strict=True):
        _check_shards(spec, labels[own], int(size), count)
    each = min(len(own) // int(size) for own, size in zip(members, sizes, strict=True))
    rng = numpy_stream(seed, "partition")
    dealt: list[Indices] = []
    for own, size in zip(members, sizes, strict=True):
        # a stratified share of the group's samples, so that its classes keep their proportions
        kept = own[hold_out(labels[own], 1 - each * int(size) / len(own), rng)[0]]
        _check_shards(spec, labels[kept], int(size), count)  # classes are rounded, so a few samples may be missing
        dealt += [kept[part] for part in _deal(labels[kept], int(size), count, rng)]
    return dealt


def _check_shards(spec: str, labels: Indices, clients: int, count: int) -> None:
    present, shards = len(np.unique(labels)), clients * count
    if not 1 <= count <= present:
        raise FedfillError(f"{spec}: a client can hold 1 to {present} of the {present} classes that it draws from")
    if shards < present:
        raise FedfillError(
            f"{spec}: {clients} clients make {shards} shards, too few for {present} classes; use more classes per client or more clients"
        )
    if shards > len(labels):
        raise FedfillError(
            f"{spec}: {clients:,} clients need {shards:,} shards, but there are only {len(labels):,} samples"
        )


def _deal(labels: Indices, clients: int, count: int, rng: np.random.Generator) -> list[Indices]:
    """Shards in proportion to the classes, at least one of each, dealt at random."""
    present, sizes = np.unique(labels, return_counts=True)
    shards = clients * count
    # the highest averages (Sainte-Lague): as many shards as asked for, none of them empty
    number = np.ones(len(present), np.int64)
    while number.sum() < shards:
        number[np.argmax(np.where(number < sizes, sizes / (2 * number + 1), 0))] += 1
    cut = [
        shard
        for label, pieces in zip(present, number, strict=True)
        for shard in np.array_split(rng.permutation(np.flatnonzero(labels == label)), pieces)
    ]
    hands = rng.permutation(shards).reshape(clients, count)
    return [np.sort(np.concatenate([cut[shard] for shard in hand])) for hand in hands]


def quantity(labels: NDArray[Any], clients: int, seed: int, beta: float, min_samples: int = 10) -> list[Indices]:
    """Size skew: clients' shares of the data are one draw from Dir(beta, ..., beta), the samples come at random.

    Args:
        labels: ``[n]`` integers.
        clients: How many clients.
        seed: The experiment's seed.
        beta: Concentration, above 0.
        min_samples: The smallest number of samples that a client may have.

    Returns:
        One sorted int64 index array per client.

    Raises:
        FedfillError: Where an argument is out of range or 1,000 draws don't reach `min_samples`.
    """
    labels = _checked(labels, clients)
    _check_beta("quantity", beta)
    _check_room("quantity", len(labels), clients, min_samples)
    rng = numpy_stream(seed, "partition")
    for _ in range(TRIES):
        cuts = np.rint(np.cumsum(rng.dirichlet(np.full(clients, beta))) * len(labels)).astype(np.int64)
        cuts[-1] = len(labels)
        if np.diff(cuts, prepend=0).min() >= min_samples:
            return [np.sort(part) for part in np.split(rng.permutation(len(labels)), cuts[:-1])]
    raise FedfillError(
        f"partition 'quantity:{beta:g}': none of {TRIES:,} draws gave each of {clients:,} clients {min_samples} of the "
        f"{len(labels):,} samples; use a larger beta, fewer clients or more data"
    )


def domain(domains: NDArray[Any], seed: int, count: int = 1) -> list[Indices]:
    """Feature skew: every domain has clients of its own, among which its samples are dealt at random.

    Args:
        domains: ``[n]`` integers, the samples' domains.
        seed: The experiment's seed.
        count: Clients for each domain; their sizes differ by one at most.

    Returns:
        One sorted int64 index array per client, domain after domain in the order of their numbers.

    Raises:
        FedfillError: Where a domain has fewer samples than clients.
    """
    rng = numpy_stream(seed, "partition")
    present, sizes = np.unique(domains, return_counts=True)
    if sizes.min(initial=count) < count:
        raise FedfillError(
            f"partition 'domain:{count}': a domain has only {sizes.min():,} samples to share out among its {count:,} clients"
        )
    return [
        np.sort(part)
        for number in present
        for part in np.array_split(rng.permutation(np.flatnonzero(domains == number)), count)
    ]


def parse(spec: str) -> tuple[str, list[float]]:
    """A spec's name and numbers, checked as far as that goes without data.

    Args:
        spec: For example ``"iid"``, ``"dirichlet:0.5"`` or ``"multimodal:2:0.8,0.2"``.

    Returns:
        The name, and its numbers: none for ``iid``, perhaps none for ``domain``; for ``multimodal`` the classes per client and then the shares.

    Raises:
        FedfillError: Where the name is unknown, or a number missing, malformed or out of range.
    """
    name, colon, text = spec.strip().partition(":")
    known = {usage.partition(":")[0]: usage for usage in NAMES}
    if name not in known:
        raise FedfillError(f"partition: '{spec}' is unknown; {did_you_mean(name, known)}")
    if name == "iid":
        if colon:
            raise FedfillError(f"partition: 'iid' takes no number, but '{spec}' was given")
        return name, []
    if name == "domain" and not colon:
        return name, []
    whole = name in ("classes", "unimodal", "multimodal", "domain")
    example = f"{name}:2" if whole else f"{name}:0.5"
    things = "clients for each domain" if name == "domain" else "classes"
    what = f"a whole number of {things}, 1 or more" if whole else "a number above 0"
    text, colon, rest = text.partition(":") if name == "multimodal" else (text, "", "")
    try:
        number = float(int(text)) if whole else float(text)
    except ValueError:
        found = f"'{spec}' has '{text}'" if text else f"'{spec}' has none"
        raise FedfillError(f"partition: '{name}' needs {what}, such as '{example}', but {found}") from None
    if not (0 < number < math.inf):
        raise FedfillError(f"partition: '{name}' needs {what}, but '{spec}' has {text}")
    try:
        shares = [float(share) for share in rest.split(",")] if colon else []
    except ValueError:
        raise FedfillError(
            f"partition: '{name}' takes shares of the clients, such as '{name}:2:0.8,0.2', but '{spec}' has '{rest}'"
        ) from None
    return name, [number, *shares]


def partition(
    spec: str, labels: NDArray[Any], clients: int | None, seed: int, domains: NDArray[Any] | None = None
) -> list[Indices]:
    """The partition that a spec names; see `NAMES`.

    Args:
        spec: Such as ``iid``, ``dirichlet:BETA`` or ``classes:C``.
        labels: ``[n]`` integers.
        clients: How many clients; None is enough for ``domain``, which makes as many as the domains need.
        seed: The experiment's seed.
        domains: ``[n]`` integers, the samples' domains; None where they have none.

    Returns:
        One sorted int64 index array per client.

    Raises:
        FedfillError: Where the spec is malformed or can't be met with these samples and clients.
    """
    name, numbers = parse(spec)
    if name == "domain":
        if domains is None:
            raise FedfillError(
                f"partition: '{spec}' needs data whose samples have domains, such as digits-domains, and these have none; "
                "tables and Parquet files name them in a column 'domain', folders of images are domain/class"
            )
        parts = domain(domains, seed, *map(int, numbers))
        if clients not in (None, len(parts)):
            raise FedfillError(
                f"clients: found {clients:,}, but partition '{spec}' makes {len(parts):,} of these domains; allowed: that many, "
                "and with partition=domain:K K times the domains"
            )
        return parts
    if clients is None:
        raise FedfillError(f"clients: a number is needed to divide the data by '{spec}'")
    if name == "iid":
        return iid(labels, clients, seed)
    if name in ("dirichlet", "quantity"):
        return {"dirichlet": dirichlet, "quantity": quantity}[name](labels, clients, seed, numbers[0])
    count = int(numbers[0])
    if name == "multimodal":
        return multimodal(labels, clients, seed, count, numbers[1:] or (0.8, 0.2))
    return {"classes": classes, "unimodal": unimodal}[name](labels, clients, seed, count)


def from_partitioner(partitioner: Partitioner, labels: NDArray[Any]) -> list[Indices]:
    """The index arrays that a `flwr_datasets` partitioner makes of these labels.

    The partitioner sees a data set with two columns: the labels, under the name that it partitions by (``label`` where
    it has none), and positions. It draws from its own seed, not the experiment's, and may leave samples out.
    The object itself isn't changed, so that it can be used again.

    Args:
        partitioner: An object with a settable `dataset`, `load_partition` and `num_partitions`.
        labels: ``[n]`` integers.

    Returns:
        One sorted int64 index array per client.

    Raises:
        FedfillError: Where the partitioner refuses, gives a sample to two clients or gives a client nothing.
    """
    import datasets

    kind = type(partitioner).__name__
    labels = _checked(labels, 1)
    column = getattr(partitioner, "_partition_by", None) or "label"
    position = "fedfill_position"
    rows = datasets.Dataset.from_dict({column: labels, position: np.arange(len(labels))})
    partitioner = copy.deepcopy(partitioner)
    try:
        partitioner.dataset = rows  # type: ignore[attr-defined]
        parts = [
            np.sort(np.asarray(partitioner.load_partition(client).with_format("numpy")[position][:], np.int64))
            for client in range(partitioner.num_partitions)
        ]
    except Exception as error:  # any user's object may stand here, and its complaint is what helps
        raise FedfillError(f"partition: the {kind} can't divide these {len(labels):,} samples: {error}") from error
    for client, part in enumerate(parts):
        if not len(part):
            raise FedfillError(f"partition: the {kind} gave client {client} no samples")
    if not parts or len(np.unique(np.concatenate(parts))) < sum(map(len, parts)):
        raise FedfillError(
            f"partition: the {kind} must give each sample to one client at most, and make at least one client"
        )
    return parts


def hold_out(labels: NDArray[Any], share: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """A stratified split: this share of each class is held out, rounded to the nearest, and one sample always stays.

    Args:
        labels: ``[n]`` integers.
        share: The share to hold out, 0..1. From one state of `rng`, a larger share keeps part of what a smaller keeps.
        rng: Where the draws come from.

    Returns:
        Sorted int64 positions: those that stay, and those held out.
    """
    held = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        # half up, with a little slack for shares such as 1 - 0.9 that floats can't hold
        held.append(members[: min(math.floor(share * len(members) + 0.5 + 1e-9), len(members) - 1)])
    out = np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)
    return np.setdiff1d(np.arange(len(labels)), out, assume_unique=True), out


def set_aside(labels: NDArray[Any], share: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """A stratified split for small numbers: this share of all samples is set aside, though a class's share may be under one.

    Seats are given by largest remainders: each class has its share rounded down, and what is missing from the total goes to
    the classes that lost most by it, chance deciding between equals. One sample of each class always stays.

    Args:
        labels: ``[n]`` integers.
        share: The share to set aside, 0..0.5.
        rng: Where the draws come from.

    Returns:
        Sorted int64 positions: those that stay, and those set aside.
    """
    order = rng.permutation(len(labels))
    present, owner, sizes = np.unique(labels[order], return_inverse=True, return_counts=True)
    lost, seats = np.modf(share * sizes + 1e-9)
    total = math.floor(share * len(labels) + 0.5 + 1e-9)
    room = np.flatnonzero(seats < sizes - 1)
    first = room[np.lexsort((rng.permutation(len(room)), -lost[room]))]
    seats[first[: max(0, total - int(seats.sum()))]] += 1
    aside = [order[owner == row][: int(seats[row])] for row in range(len(present))]
    out = np.sort(np.concatenate(aside)) if aside else np.empty(0, np.int64)
    return np.setdiff1d(np.arange(len(labels)), out, assume_unique=True), out


def keep_labels(labels: NDArray[Any], number: int, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """A stratified choice of the samples that keep their labels: one of each class first, then by the classes' sizes.

    The seats beyond the first of each class go to the highest averages (Sainte-Lague); chance decides between equals. Where
    `number` is smaller than the number of classes, the largest have one sample each.

    Args:
        labels: ``[n]`` integers.
        number: How many keep theirs, at least 1; all, where there are no more. From one state of `rng`, a larger number keeps
            what a smaller keeps.
        rng: Where the draws come from.

    Returns:
        Sorted int64 positions: those that keep their labels, and the others.
    """
    order = rng.permutation(len(labels))
    _, owner, sizes = np.unique(labels[order], return_inverse=True, return_counts=True)
    # a sample's place in its shuffled class, 0, 1, ..., says which of the class's seats it would take
    place = np.empty(len(labels), np.int64)
    place[np.argsort(owner, kind="stable")] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ranked = np.lexsort((-sizes[owner] / (2 * place + 1), place > 0))  # by the last key first; equals stay shuffled
    return np.sort(order[ranked[:number]]), np.sort(order[ranked[number:]])


def _checked(labels: NDArray[Any], clients: int) -> Indices:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise FedfillError(
            f"labels: found {labels.dtype} of shape {list(labels.shape)}; a partition needs a list of integers"
        )
    if clients < 1:
        raise FedfillError(f"clients: found {clients}, but at least 1 is needed")
    if clients > len(labels):
        raise FedfillError(f"clients: found {clients:,}, but there are only {len(labels):,} samples to share out")
    return labels.astype(np.int64, copy=False)


def _check_beta(name: str, beta: float) -> None:
    if not 0 < beta < math.inf:
        raise FedfillError(f"partition: '{name}' needs a number above 0, but {beta} was given")


def _check_room(name: str, samples: int, clients: int, min_samples: int) -> None:
    if clients * min_samples > samples:
        raise FedfillError(
            f"partition: '{name}' gives every client at least {min_samples} samples, but {samples:,} samples are too "
            f"few for {clients:,} clients; use at most {samples // min_samples:,}"
        )
