"""Skew: the partitions by label, size and domain, each a pure function to one sorted index array per client.

All of them refuse, with a `FedfillError`, arguments out of range and what can't be met with these samples and clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfill.data.stratified import Indices, hold_out
from fedfill.errors import FedfillError
from fedfill.streams import numpy_stream

TRIES = 1000
"""How many draws are made before a partition is given up as out of reach."""


def checked(labels: NDArray[Any], clients: int) -> Indices:
    """The labels as int64; refuses what is no list of integers, and fewer samples than clients, or no clients."""
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


def iid(labels: NDArray[Any], clients: int, seed: int) -> list[Indices]:
    """Samples dealt at random; clients' sizes differ by one at most.

    Args:
        labels: ``[n]`` integers.
        clients: How many clients, 1..n.
        seed: The experiment's seed.

    Returns:
        One sorted int64 index array per client.
    """
    labels = checked(labels, clients)
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
    """
    labels = checked(labels, clients)
    _check_draws("dirichlet", beta, len(labels), clients, min_samples)
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
    raise _out_of_reach(f"dirichlet:{beta:g}", len(labels), clients, min_samples)


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
    """
    labels = checked(labels, clients)
    _check_pieces(f"partition 'classes:{count}'", labels, clients, count)
    rng = numpy_stream(seed, "partition")
    sizes = np.unique(labels, return_counts=True)[1]
    return _deal(labels, _spread(clients * count, sizes, rng), clients, count, rng)


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
    """
    labels = checked(labels, clients)
    return _deal_shards(f"partition 'unimodal:{count}'", labels, clients, count, numpy_stream(seed, "partition"))


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
    """
    labels = checked(labels, clients)
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
        _check_pieces(f"{spec}, in a group", labels[own], int(size), count)
    each = min(len(own) // int(size) for own, size in zip(members, sizes, strict=True))
    rng = numpy_stream(seed, "partition")
    dealt: list[Indices] = []
    for own, size in zip(members, sizes, strict=True):
        # a stratified share of the group's samples, so that its classes keep their proportions
        kept = own[hold_out(labels[own], 1 - each * int(size) / len(own), rng)[0]]
        # classes are rounded, so a few samples may be missing and the shards be checked again
        dealt += [kept[part] for part in _deal_shards(f"{spec}, in a group", labels[kept], int(size), count, rng)]
    return dealt


def _deal_shards(spec: str, labels: Indices, clients: int, count: int, rng: np.random.Generator) -> list[Indices]:
    """Each class cut into shards in proportion to its size, at least one; each client gets `count` of them by chance."""
    _check_pieces(spec, labels, clients, count)
    sizes = np.unique(labels, return_counts=True)[1]
    # the highest averages (Sainte-Lague)
    shards = np.ones(len(sizes), np.int64)
    while shards.sum() < clients * count:
        shards[np.argmax(np.where(shards < sizes, sizes / (2 * shards + 1), 0))] += 1
    return _deal(labels, shards, clients, count, rng)


def _check_pieces(spec: str, labels: Indices, clients: int, count: int) -> None:
    present, pieces = len(np.unique(labels)), clients * count
    if not 1 <= count <= present:
        raise FedfillError(f"{spec}: a client can hold 1 to {present} of the {present} classes that it draws from")
    if pieces < present:
        raise FedfillError(
            f"{spec}: {clients} clients make {pieces} pieces, too few for {present} classes; use at least "
            f"{math.ceil(present / clients)} classes per client or {math.ceil(present / count)} clients"
        )
    if pieces > len(labels):
        raise FedfillError(
            f"{spec}: {clients:,} clients need {pieces:,} pieces, but there are only {len(labels):,} samples"
        )


def _deal(labels: Indices, numbers: Indices, clients: int, count: int, rng: np.random.Generator) -> list[Indices]:
    """Each class cut into its number of pieces, of sizes that differ by one at most; each client gets `count` by chance."""
    cut = [
        piece
        for label, number in zip(np.unique(labels), numbers, strict=True)
        for piece in np.array_split(rng.permutation(np.flatnonzero(labels == label)), number)
    ]
    hands = rng.permutation(clients * count).reshape(clients, count)
    return [np.sort(np.concatenate([cut[piece] for piece in hand])) for hand in hands]


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
    """
    labels = checked(labels, clients)
    _check_draws("quantity", beta, len(labels), clients, min_samples)
    rng = numpy_stream(seed, "partition")
    for _ in range(TRIES):
        cuts = np.rint(np.cumsum(rng.dirichlet(np.full(clients, beta))) * len(labels)).astype(np.int64)
        cuts[-1] = len(labels)
        if np.diff(cuts, prepend=0).min() >= min_samples:
            return [np.sort(part) for part in np.split(rng.permutation(len(labels)), cuts[:-1])]
    raise _out_of_reach(f"quantity:{beta:g}", len(labels), clients, min_samples)


def domain(domains: NDArray[Any], seed: int, count: int = 1) -> list[Indices]:
    """Feature skew: every domain has clients of its own, among which its samples are dealt at random.

    Args:
        domains: ``[n]`` integers, the samples' domains.
        seed: The experiment's seed.
        count: Clients for each domain; their sizes differ by one at most.

    Returns:
        One sorted int64 index array per client, domain after domain in the order of their numbers.
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


def _check_draws(name: str, beta: float, samples: int, clients: int, min_samples: int) -> None:
    if not 0 < beta < math.inf:
        raise FedfillError(f"partition: '{name}' needs a number above 0, but {beta} was given")
    if clients * min_samples > samples:
        raise FedfillError(
            f"partition: '{name}' gives every client at least {min_samples} samples, but {samples:,} samples are too "
            f"few for {clients:,} clients; use at most {samples // min_samples:,}"
        )


def _out_of_reach(spec: str, samples: int, clients: int, min_samples: int) -> FedfillError:
    return FedfillError(
        f"partition '{spec}': none of {TRIES:,} draws gave each of {clients:,} clients {min_samples} of the {samples:,} "
        "samples; use a larger beta, fewer clients or more data"
    )
