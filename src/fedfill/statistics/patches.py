"""Filters from patches of everybody's images, by sums alone: whitening, and spherical k-means.

Coates and Ng, "Learning Feature Representations with K-Means", 2012. A patch is a row of channels * k * k numbers, less
their mean and over their deviation (`fedfill.models.filters.even_patches`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedfill.models.filters import even_patches
from fedfill.privacy import sums as privacy
from fedfill.statistics.sums import GRID, Block, Statistic, truncated
from fedfill.tree import Weights

PER_IMAGE = 5
"""Patches of each image."""
RIDGE = 0.1
"""What is added to the eigenvalues of the patches' covariance before they are whitened."""
_UNPROTECTED = 1e30  # a bound that no noise is ever made for


def extract(images: Tensor, size: int) -> Tensor:
    """Some even patches of each image, at places that follow from the image alone, whoever holds it.

    Args:
        images: Values on the scale 0..255, ``[b, channels, height, width]``.
        size: Pixels to a side of a patch, k.

    Returns:
        ``[b * PER_IMAGE, channels * k * k]``.
    """
    b, _, height, width = images.shape
    rows, columns = height - size + 1, width - size + 1
    flat = images.flatten(1).round().to(torch.int64)
    mixed = (flat * (2 * torch.arange(flat.shape[1], device=flat.device) + 1)).sum(1)  # [b], another for most images
    found = []
    for k in range(PER_IMAGE):
        place = (mixed * (2 * k + 3) + 7919 * k) % (rows * columns)
        top, left = place // columns, place % columns
        down = top[:, None] + torch.arange(size, device=top.device)
        right = left[:, None] + torch.arange(size, device=top.device)
        every = torch.arange(b, device=top.device)[:, None, None]
        found.append(images.permute(0, 2, 3, 1)[every, down[:, :, None], right[:, None, :]])  # [b, k, k, channels]
    patches = torch.stack(found, 1).permute(0, 1, 4, 2, 3)  # [b, PER_IMAGE, channels, k, k]
    return even_patches(patches.reshape(b * PER_IMAGE, -1))


def moments(n: int) -> Statistic:
    """How many patches there are, their sum ``[n]``, and the sum of p p' ``[n, n]``."""
    blocks = {
        "patches": Block((1,), privacy.other(_UNPROTECTED, 1), bits=0),
        "total": Block((n,), privacy.other(_UNPROTECTED, n), bits=GRID),
        "squares": Block((n, n), privacy.other(_UNPROTECTED, n * (n + 1) // 2), symmetric=True, bits=2 * GRID),
    }

    def add(sums: Weights, p: Tensor, labels: Tensor) -> None:
        sums["patches"] += len(p)
        sums["total"] += p.sum(0)
        sums["squares"].addmm_(p.T, p)

    return Statistic(blocks, add, "moments of patches")


def whitening(patches: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """What whitens patches: their mean, and V (s + 0.1)^-1/2 V' with V diag(s) V' their covariance (ZCA).

    Args:
        patches: How many, ``[1]`` float64.
        total: Their sum, ``[n]``.
        squares: The sum of p p', ``[n, n]``.

    Returns:
        Mean ``[n]`` and a symmetric matrix ``[n, n]``, float64.
    """
    count = patches.clamp(min=1)
    mean = total / count
    values, vectors = torch.linalg.eigh(squares / count - mean[:, None] * mean)
    return mean, (vectors * (values.clamp(min=0) + RIDGE) ** -0.5) @ vectors.T


def clusters(dictionary: Tensor) -> Statistic:
    """For each filter D_j the sum of (q.D_j) q over the whitened patches q that it is nearest to, ``[F, n]``."""
    directions = dictionary.double()
    blocks = {"clusters": Block(tuple(dictionary.shape), privacy.other(_UNPROTECTED, dictionary.numel()), bits=GRID)}

    def add(sums: Weights, q: Tensor, labels: Tensor) -> None:
        alike = q @ directions.T  # [b, F]
        nearest = alike.argmax(1)
        share = truncated(q * alike.gather(1, nearest[:, None]))
        sums["clusters"].index_add_(0, nearest, share)

    return Statistic(blocks, add, "patches by their nearest filter")


def update(dictionary: Tensor, sums: Tensor) -> Tensor:
    """The next filters: unit directions of the sums, with a thousandth of the filters before.

    Args:
        dictionary: D, ``[F, n]``.
        sums: Of `clusters`, ``[F, n]``.

    Returns:
        ``[F, n]`` float64; a filter that is nearest to no patch stays.
    """
    return functional.normalize(sums.double() + 1e-3 * dictionary.double())
