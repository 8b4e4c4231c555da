"""Heads, which score classes by features, and what those that are solved from sums share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfill.errors import FedfillError

MARGIN = 1e9
"""How far an absent class lies below the others, as a multiple of what they are made of."""


@dataclass(frozen=True)
class LinearHead:
    """Scores z.w_c + b_c; the class is the first of the largest.

    Attributes:
        weight: ``[C, d]`` float64.
        bias: ``[C]`` float64, finite; see `linear`.
    """

    weight: Tensor
    bias: Tensor

    def scores(self, z: Tensor) -> Tensor:
        """``[n, C]`` float64 for features ``[n, d]``."""
        return z.double() @ self.weight.T + self.bias


def linear(weight: Tensor, bias: Tensor, present: Tensor) -> LinearHead:
    """A head in which classes that nobody holds never win.

    Minus infinity does not survive in a network: it turns into NaN under an average or a weight decay. So an absent
    class gets no weight and the bias -1e9 (1 + longest row + largest absolute bias), which loses for all features
    shorter than 1e9, and whose square float32 still holds.

    Args:
        weight: ``[C, d]``; rows of absent classes are not read.
        bias: ``[C]``, likewise.
        present: ``[C]`` bool, whether somebody holds the class.

    Returns:
        The head.

    Raises:
        FedfillError: Where no class is present.
    """
    somebody(present)
    weight = torch.where(present[:, None], weight, 0.0)
    bias = torch.where(present, bias, 0.0)
    lowest = -MARGIN * (1 + weight.norm(dim=1).max() + bias.abs().max())
    return LinearHead(weight, torch.where(present, bias, lowest))


def somebody(present: Tensor) -> None:
    """Raises where no class is present, ``[C]`` bool."""
    if not present.any():
        raise FedfillError("head: found no record of any class; allowed: sums over one record or more")


def sums(*blocks: Tensor) -> list[Tensor]:
    """Sums in float64, which solving them needs.

    Args:
        *blocks: Of any floating-point or integer type.

    Returns:
        The same in float64.

    Raises:
        FedfillError: Where a value is no finite number.
    """
    wide = [block.detach().double() for block in blocks]
    if not all(torch.isfinite(block).all() for block in wide):
        raise FedfillError("head: found a sum that is no finite number; allowed: finite sums")
    return wide


def cholesky(matrix: Tensor) -> Tensor | None:
    """The lower factor of a symmetric matrix ``[d, d]``, or None where it is not positive definite beyond rounding."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal() ** 2
    sound = not failed and pivots.min() > rounding(matrix.diagonal())
    return factor if sound else None


def rounding(values: Tensor) -> float:
    """The size below which an eigenvalue is rounding alone: of a matrix's diagonal or eigenvalues, ``[d]``."""
    return len(values) * torch.finfo(torch.float64).eps * float(values.abs().max())


def allowed(lam: float) -> bool:
    """Whether a lambda may be added to the eigenvalues of a Gram matrix."""
    return math.isfinite(lam) and lam >= 0


def singular(lam: float) -> FedfillError:
    """What to raise where this lambda is not `allowed`, or is too small for a Gram matrix."""
    if not allowed(lam):
        return FedfillError(f"ridge_lambda: found {lam}; allowed: a finite number, 0 or more")
    return FedfillError(
        f"ridge_lambda: found {lam:g} where the features' Gram matrix is singular; allowed: a larger one"
    )
