"""How alike clients' updates are: inner products, and the cosines and distances that follow from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedfill.tree import Weights


def products(updates: Sequence[Weights]) -> Tensor:
    """Inner products of updates with each other.

    Args:
        updates: n of them, with the same names and shapes.

    Returns:
        ``[n, n]``, float64, on the CPU; the diagonal holds the squared norms.
    """
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name in updates[0] if updates else ():
        rows = torch.stack([update[name].double().flatten() for update in updates])  # [n, size of the tensor]
        total += (rows @ rows.T).cpu()
    return total


def cosines(inner: Tensor) -> Tensor:
    """Cosines of the angles between updates, in -1..1; 0 where one of them is 0, and 1 of each with itself.

    Args:
        inner: Their inner products, ``[n, n]``.

    Returns:
        ``[n, n]``.
    """
    norms = inner.diagonal().clamp(min=0).sqrt()  # [n]
    scale = norms[:, None] * norms[None, :]
    found = torch.where(scale > 0, inner / scale.where(scale > 0, torch.ones_like(scale)), torch.zeros_like(inner))
    return found.clamp(-1, 1).fill_diagonal_(1)


def distances(inner: Tensor) -> Tensor:
    """Euclidean distances between updates, ``[n, n]``, from their inner products ``[n, n]``."""
    squares = inner.diagonal()
    apart = (squares[:, None] + squares[None, :] - 2 * inner).clamp(min=0).sqrt()
    return apart.fill_diagonal_(0)
