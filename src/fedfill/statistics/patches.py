"""Filters learned from sums over patches: whitening, and spherical k-means after Coates and Ng 2012 ("Learning Feature Representations with K-means").

Every step is a sum over records, so it does not matter which client holds which record. P is the numbers in a patch, channels
* k * k, in the order of `fedfill.models.filters.Patches`, whose buffers are what is learned here. All sums are exact.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedfill.models.filters import even_patches
from fedfill.privacy import sums as privacy
from fedfill.statistics.sums import GRID, Block, Statistic, truncated
from fedfill.streams import numpy_stream
from fedfill.tree import Weights

PER_RECORD = 5
"""Patches of each image."""
_NO_NOISE = 1e30  # a bound for which no noise is ever made


def positions(images: Tensor, size: int, per_record: int, seed: int) -> Tensor:
    """Where patches are taken: by what is in the image and by the seed, so that any division of the records gives the same.

    Args:
        images: Normalised, -1..1, ``[n, channels, height, width]``.
        size: Pixels to a side of a patch, k, at most those of an image.
        per_record: Patches of each image.
        seed: Of the experiment.

    Returns:
        Rows and columns of the upper left corners, ``[n, per_record, 2]`` int64, each about as likely as any other.
    """
    stream = numpy_stream(seed, "features", "positions")
    numbers = images[0].numel()
    mixing = stream.integers(2**64, size=numbers, dtype=np.uint64)
    pixels = ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).flatten(1).cpu().numpy()
    # sums of 64 bits that wrap around, of the pixels times random numbers, then Steele et al.'s SplitMix for each draw
    begin = np.array([row.astype(np.uint64) @ mixing for row in pixels], dtype=np.uint64).reshape(-1, 1)
    x = begin + np.arange(1, 2 * per_record + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x = (x ^ (x >> np.uint64(31))).reshape(-1, per_record, 2)
    sides = np.array([side - size + 1 for side in images.shape[2:]], dtype=np.uint64)
    return torch.from_numpy((x % sides).astype(np.int64)).to(images.device)


def patches_at(images: Tensor, places: Tensor, size: int) -> Tensor:
    """Patches of even brightness and contrast: (p - mean) / sqrt(variance + 10) on the scale 0..255.

    Args:
        images: Normalised, -1..1, ``[n, channels, height, width]``.
        places: Upper left corners, ``[n, m, 2]``.
        size: Pixels to a side of a patch, k.

    Returns:
        ``[n, m, P]`` float32, each shorter than k * sqrt(channels).
    """
    windows = images.unfold(2, size, 1).unfold(3, size, 1)  # [n, channels, rows, columns, k, k]
    record = torch.arange(len(images), device=images.device)[:, None]
    taken = windows[record, :, places[..., 0], places[..., 1]].flatten(2)  # [n, m, P]
    return even_patches(taken.add(1).mul_(127.5))


def moments(numbers: int) -> Statistic:
    """How many patches there are, ``patches`` ``[1]``, and the sums of p, ``first`` ``[P]``, and of p p', ``second`` ``[P, P]``."""
    blocks = {
        "patches": Block((1,), privacy.other(_NO_NOISE, 1), bits=0),
        "first": Block((numbers,), privacy.other(_NO_NOISE, numbers), bits=GRID),
        "second": Block(
            (numbers, numbers), privacy.other(_NO_NOISE, numbers * (numbers + 1) // 2), symmetric=True, bits=2 * GRID
        ),
    }

    def add(sums: Weights, p: Tensor, labels: Tensor) -> None:
        sums["patches"] += len(p)
        sums["first"] += p.sum(0)
        sums["second"].addmm_(p.T, p)

    return Statistic(blocks, add, "moments of patches")


def whitening(first: Tensor, second: Tensor, n: float, softening: float = 0.1) -> tuple[Tensor, Tensor]:
    """Mean and whitening of patches, from sums.

    Args:
        first: Sum of p, ``[P]``.
        second: Sum of p p', ``[P, P]``.
        n: Patches in the sums, above 0.
        softening: Added to each variance, so that directions without any do not explode.

    Returns:
        The mean ``[P]`` and V (s + softening)^-1/2 V' ``[P, P]`` with V diag(s) V' the covariance, in float64; variances below
        0, which noise makes, count as 0.
    """
    mean = first.double() / n
    covariance = second.double() / n - torch.outer(mean, mean)
    variances, directions = torch.linalg.eigh((covariance + covariance.t()) / 2)
    scale = (variances.clamp(min=0) + softening).rsqrt()
    return mean, (directions * scale) @ directions.t()


def whitened(patches: Tensor, mean: Tensor, matrix: Tensor) -> Tensor:
    """Patches as q = matrix (p - mean), ``[..., P]``, in their type."""
    return (patches - mean.to(patches.dtype)) @ matrix.to(patches.dtype).t()


def clusters(dictionary: Tensor) -> Statistic:
    """One step of spherical k-means: each patch goes to the direction on which it is longest, with its length there.

    Args:
        dictionary: Unit directions D, ``[F, P]``.

    Returns:
        The statistic of whitened patches q: sums of (q.D_j) q with j = argmax q.D_j, ``clusters`` ``[F, P]``.
    """
    directions = dictionary.double()
    blocks = {"clusters": Block(tuple(dictionary.shape), privacy.other(_NO_NOISE, dictionary.numel()), bits=GRID)}

    def add(sums: Weights, q: Tensor, labels: Tensor) -> None:
        along, nearest = (q @ directions.T).max(1)
        sums["clusters"].index_add_(0, nearest, truncated(along[:, None] * q))

    return Statistic(blocks, add, "patches by their nearest filter")


def update(dictionary: Tensor, sums: Tensor) -> Tensor:
    """The next directions.

    Args:
        dictionary: Unit directions D, ``[F, P]``.
        sums: Of all patches, by `clusters`, ``[F, P]``.

    Returns:
        unit(sums + 0.001 D), ``[F, P]`` float64: a direction to which no patch went stays.
    """
    return functional.normalize(sums.double() + 1e-3 * dictionary.to(sums.device).double())
