"""How alike clients' updates are: inner products, the cosines and distances that follow from them, and groups by these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedfill.models.views import first_names, trainable
from fedfill.tree import Weights


def movement(model: nn.Module, trained: Weights, start: Weights) -> Weights:
    """How far a training went: trained parameters less those that it began with, each once, and no buffers.

    Args:
        model: Whose tensors they are.
        trained: By name, after it.
        start: By name, before.

    Returns:
        Differences by name.
    """
    first = first_names(model)
    learnt = [name for name in trainable(model, start) if first[name] == name]
    return {name: trained[name] - start[name] for name in learnt}


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


def hierarchical(
    apart: Tensor, by: Literal["complete", "single", "average", "ward"], groups: int | None = None
) -> Tensor:
    """Agglomerative clustering: the two groups that are nearest are joined, again and again.

    Args:
        apart: Distances, ``[n, n]``.
        by: How far two groups are apart: as their members that are furthest apart (complete), the nearest ones (single), the
            mean over all pairs (average), or by what joining them adds to the squares within groups (ward).
        groups: How many there shall be, at the most n; None: two or more, where the distances of what is joined jump most.

    Returns:
        The group of each, ``[n]``, numbered from 0 by their first members.
    """
    from scipy.cluster.hierarchy import cut_tree, linkage  # here: it would make every start longer
    from scipy.spatial.distance import squareform

    n = len(apart)
    if n < 2 or groups == 1:
        return torch.zeros(n, dtype=torch.int64)
    tree = linkage(squareform(apart.numpy(), checks=False), by)  # [n - 1, 4], the third column ascends
    if groups is None:
        jumps = tree[1:, 2] - tree[:-1, 2]  # jumps[k]: where n - 1 - k groups are left
        groups = n - 1 - int(jumps.argmax()) if len(jumps) else 1
    found = cut_tree(tree, n_clusters=min(groups, n))[:, 0].tolist()
    numbers = {group: k for k, group in enumerate(dict.fromkeys(found))}
    return torch.tensor([numbers[group] for group in found])
