"""Eigenvalues of a Gram matrix under Gaussian noise: where the noise ends, and what is left above it.

A symmetric matrix of independent noise has its eigenvalues between -edge and edge (Wigner's semicircle).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SIGNAL = 4.0
"""How far the signal of a direction, n/d, must stand above the noise for `dimension_for`; found by experiment, flat."""


def noise_edge(off_diagonal_std: float, d: int) -> float:
    """The largest eigenvalue of the noise, about: 2 s sqrt(d).

    Args:
        off_diagonal_std: s, of the noise in the sum, off the diagonal; on it, it is sqrt(2) s.
        d: Rows of the matrix.

    Returns:
        The edge, 0 or more.
    """
    return 2 * off_diagonal_std * math.sqrt(d)


def drowned(moments: Tensor, std: float) -> bool:
    """Whether the differences between classes do not stand out of the noise in the sums of their features.

    Noise alone has a mean square of std^2 around the mean of the columns, and the relative deviation of that mean square
    is sqrt(2 / (d (C - 1))). Four of these are the least that counts as more than noise (the rule is ours).

    Args:
        moments: M with noise, ``[d, C]``, of centred features, C of 2 or more.
        std: Of the noise on each number, above 0.

    Returns:
        True where noise alone would look so.
    """
    d, classes = moments.shape
    free = d * max(classes - 1, 1)
    around = float((moments - moments.mean(1, keepdim=True)).square().sum()) / (free * std**2)
    return around < 1 + 4 * math.sqrt(2 / free)


def clipped(eigenvalues: Tensor) -> Tensor:
    """Negative eigenvalues at 0: a Gram matrix has none."""
    return eigenvalues.clamp(min=0)


def shrunk(eigenvalues: Tensor, edge: float) -> Tensor:
    """The best shrinkage in Frobenius norm of eigenvalues that stand out of noise (the spiked model).

    An eigenvalue l of the matrix shows at w = l + (edge/2)^2 / l, turned by the noise; sqrt(w^2 - edge^2) is what it is
    worth, and below the edge nothing. See Gavish and Donoho, "Optimal Shrinkage of Singular Values", 2017.

    Args:
        eigenvalues: w, of any shape.
        edge: See `noise_edge`.

    Returns:
        Of the same shape, 0 or more.
    """
    return torch.where(eigenvalues > edge, (eigenvalues**2 - edge**2).clamp(min=0).sqrt(), 0.0)


def dimension_for(n: float, off_diagonal_std: float) -> int:
    """How many features the noise lets one use, from public numbers alone, for features of length 1.

    The signal of a direction is about n/d, the noise grows as sqrt(d): d = (4n / (2 s))^(2/3).

    Args:
        n: Records.
        off_diagonal_std: s, as in `noise_edge`.

    Returns:
        A power of 2 from 64 to 2,048, the nearest by ratio.
    """
    if off_diagonal_std <= 0:
        return 2048
    best = (SIGNAL * max(n, 1) / (2 * off_diagonal_std)) ** (2 / 3)
    return int(2 ** min(max(round(math.log2(best)), 6), 11))
