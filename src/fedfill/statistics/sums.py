"""Statistics: a function of one record alone, with a bound on its length, summed over a client's records.

Everything that is made from such a sum at the server, a ridge regression, class means, a gradient, does not depend on how
the records lie on clients. What a record contributes is bounded by its construction and never by a look at the data, so
that one Gaussian mechanism on the sum has an exact guarantee (`fedfill.privacy.sums`).

Coordinates are truncated towards zero to multiples of 2^-12 before they are summed. That makes no record longer, and every
partial sum is exact in float64: any order, any chunks and any division give the same bits, up to 2^29 records of length 1.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from fedfill.errors import FedfillError
from fedfill.privacy import sums as privacy
from fedfill.privacy.sums import BlockBound, pack
from fedfill.tree import Weights

GRID = 12
"""Bits behind the point of a coordinate that is summed."""
FINE = 2.0**8
"""Length of the longest feature vector up to which sums are whole numbers; features without a bound are summed as they are."""
NO_BOUND = 1e30
"""Stands for an infinite radius in bounds that no noise will ever use."""
LARGEST = 2**28
"""Numbers of a statistic at the most: 2 GiB in float64."""
Add = Callable[[Weights, Tensor, Tensor], None]
"""Adds what some records contribute to sums by block, in place: (sums, features ``[b, d]``, labels ``[b]``)."""


@dataclass(frozen=True)
class Block:
    """One of the sums of a statistic.

    Attributes:
        shape: Of the sum.
        bound: What one record contributes at the most, in l2, and what it can change where it is replaced by another.
        symmetric: Whether the last two axes are a symmetric matrix, of which the upper triangle is sent.
        bits: The sum is a multiple of 2^-bits; None: it is any number.
    """

    shape: tuple[int, ...]
    bound: BlockBound
    symmetric: bool = False
    bits: int | None = None

    @property
    def sent(self) -> tuple[int, ...]:
        """The shape that is sent."""
        if not self.symmetric:
            return self.shape
        *front, d, _ = self.shape
        return (*front, d * (d + 1) // 2)


@dataclass(frozen=True)
class Statistic:
    """What is summed over records.

    Attributes:
        blocks: By name.
        add: Adds what records contribute.
        words: What is summed, in plain words, for the account of privacy.
    """

    blocks: Mapping[str, Block]
    add: Add
    words: str

    def bounds(self) -> dict[str, BlockBound]:
        """Of all blocks."""
        return {name: block.bound for name, block in self.blocks.items()}

    def on_grids(self, bits: Mapping[str, int]) -> Statistic:
        """The same statistic, whose sums are told in multiples of 2^-bits, by block: no coarser than they are."""
        return replace(self, blocks={name: replace(block, bits=bits[name]) for name, block in self.blocks.items()})

    def template(self) -> Weights:
        """Tensors without values, of the types and shapes in which the sums are joined."""
        return {
            name: torch.empty(block.sent, dtype=torch.float64 if block.bits is None else torch.int64, device="meta")
            for name, block in self.blocks.items()
        }


def truncated(z: Tensor) -> Tensor:
    """Multiples of 2^-`GRID`, rounded towards zero, in float64: no row is longer than it was."""
    return z.to(torch.float64).mul_(2.0**GRID).trunc_().mul_(2.0**-GRID)


def within(z: Tensor, radius: float) -> Tensor:
    """Features ``[b, d]`` in float64, none longer than a finite radius: the bound of a sum holds for rounding too."""
    z = z.double()
    return z * (radius / z.norm(dim=1, keepdim=True).clamp(min=radius)) if math.isfinite(radius) else z


def summed(statistic: Statistic, records: Iterable[tuple[Tensor, Tensor]]) -> Weights:
    """The sums over one client's records.

    Args:
        statistic: What is summed.
        records: Chunks of features ``[b, d]``, of which each row stands for a record, and labels ``[b]``.

    Returns:
        By block, float64 in the block's own shape; zeros where there is no record.

    Raises:
        ValueError: Where a feature is not finite.
    """
    sums = {name: torch.zeros(block.shape, dtype=torch.float64) for name, block in statistic.blocks.items()}
    done = 0
    for z, labels in records:
        finite = torch.isfinite(z).all(1)
        if not bool(finite.all()):
            raise ValueError(f"the features of record {done + int((~finite).nonzero()[0, 0])} are not finite")
        if z.device.type != "cpu" and not done:
            sums = {name: x.to(z.device) for name, x in sums.items()}
        statistic.add(sums, truncated(z), labels)
        done += len(z)
    return sums


def as_sent(statistic: Statistic, sums: Weights) -> Weights:
    """Sums as they are sent where nothing is added to them: triangles, and whole numbers where every one is exact."""
    packed = {name: pack(x) if statistic.blocks[name].symmetric else x for name, x in sums.items()}
    return {name: _whole(x, statistic.blocks[name].bits) for name, x in packed.items()}


def _whole(x: Tensor, bits: int | None) -> Tensor:
    """Multiples of 2^-bits as whole numbers of 32 bits where all fit, else of 64."""
    if bits is None:
        return x
    whole = (x * 2.0**bits).round_().to(torch.int64)
    return whole.to(torch.int32) if not whole.numel() or int(whole.abs().max()) < 2**31 else whole


def as_joined(statistic: Statistic, received: Weights) -> Weights:
    """The sums over all clients, in float64 and as triangles, from what came of joining them."""
    return {
        name: x if x.is_floating_point() else x.to(torch.float64) * 2.0 ** -(statistic.blocks[name].bits or 0)
        for name, x in received.items()
    }


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """``[b, classes]`` float64."""
    return functional.one_hot(labels, classes).to(torch.float64)


def class_moments(
    d: int, classes: int, *, radius: float = 1.0,
    moments: bool = True, counts: bool = True, gram: bool = True, by_class: bool = False, diagonal: bool = False,
) -> Statistic:  # fmt: skip
    """Sums of features by class, and second moments: of all classes together or of each, whole or on the diagonal.

    Args:
        d: Length of a feature vector.
        classes: Number of classes.
        radius: Length of the longest feature vector; infinite where nothing bounds it.
        moments: Whether the sums of z by class are in it, ``moments`` ``[d, classes]``.
        counts: Whether the numbers of records by class are in it, ``counts`` ``[classes]``.
        gram: Whether the sum of z z' over all records is in it, ``gram`` ``[d, d]``.
        by_class: Whether it is there for each class, ``class_grams`` ``[classes, d, d]``.
        diagonal: Whether the sums of z * z are there for each class, ``squares`` ``[d, classes]``.

    Returns:
        The statistic, with at least one of these.

    Raises:
        FedfillError: Where the sums would not fit into memory.
    """
    bounded = min(radius, NO_BOUND)
    once, twice = (GRID, 2 * GRID) if radius <= FINE else (None, None)
    blocks: dict[str, Block] = {}
    if moments:
        blocks["moments"] = Block((d, classes), privacy.moments(bounded, d, classes), bits=once)
    if counts:
        blocks["counts"] = Block((classes,), privacy.counts(classes), bits=0)
    if gram:
        blocks["gram"] = Block((d, d), privacy.gram(bounded, d), symmetric=True, bits=twice)
    if by_class:
        blocks["class_grams"] = Block((classes, d, d), privacy.gram(bounded, d, classes), symmetric=True, bits=twice)
    if diagonal:
        # z * z is the diagonal of z z', and two of them differ by no more than two Gram matrices
        bound = BlockBound(bounded**2, 2**0.5 * bounded**2, d * classes)
        blocks["squares"] = Block((d, classes), bound, bits=twice)
    require_memory(d, blocks)

    def add(sums: Weights, z: Tensor, labels: Tensor) -> None:
        y = one_hot(labels, classes)
        if moments:
            sums["moments"].addmm_(z.T, y)
        if counts:
            sums["counts"] += y.sum(0)
        if gram:
            sums["gram"].addmm_(z.T, z)
        if diagonal:
            sums["squares"].addmm_((z * z).T, y)
        if by_class:
            for c in range(classes):
                own = z[labels == c]
                sums["class_grams"][c].addmm_(own.T, own)

    return Statistic(blocks, add, f"{', '.join(blocks)} of features")


def require_memory(d: int, blocks: Mapping[str, Block]) -> None:
    """Refuse sums that would not fit into memory, whole matrices as they are, before anything is allocated."""

    def numbers(features: int) -> int:
        shapes = [[features if side == d else side for side in block.shape] for block in blocks.values()]
        return sum(map(math.prod, shapes))

    if numbers(d) > LARGEST:
        fits = bisect.bisect_right(range(d), LARGEST, key=numbers) - 1
        raise FedfillError(
            f"features: the sums of {d} features ({', '.join(blocks)}) are {numbers(d) * 8 / 2**30:.1f} GiB; allowed: "
            f"{LARGEST * 8 / 2**30:.0f} GiB, which is {fits} features, such as project({fits})"
        )


def plain_sum(d: int, *, radius: float = 1.0) -> Statistic:
    """The sum of the feature vectors, ``sum`` ``[d]``, and how many there are, ``records`` ``[1]``: the parts of their mean."""
    blocks = {
        "sum": Block((d,), privacy.other(min(radius, NO_BOUND), d), bits=GRID if radius <= FINE else None),
        "records": Block((1,), privacy.counts(1), bits=0),
    }

    def add(sums: Weights, z: Tensor, labels: Tensor) -> None:
        sums["sum"] += z.sum(0)
        sums["records"] += len(z)

    return Statistic(blocks, add, "sums of features")
