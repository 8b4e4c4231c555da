"""Measures of synthetic samples: are they recognised, are they spread like real ones, are they copies, are classes balanced.

Plain functions of tensors and models; what they are applied to is chosen in `fedfill.studies.measure`. Those on features
that need no data are in `fedfill.synthesis.likeness`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedfill.data.samples import Samples, normalise
from fedfill.errors import FedfillError
from fedfill.synthesis.intervals import Estimate, evenness, median, share

CHUNK = 1000
"""Samples that pass a model, or are compared with others, at a time."""


@torch.inference_mode()
def recognised(oracle: nn.Module, samples: Samples, classes: int) -> tuple[list[float | None], Estimate | None]:
    """How often a classifier names the class that samples claim to be of (Fed-ZDA, section 4.4, figure 3).

    Args:
        oracle: Maps normalised inputs to class scores ``[b, classes]``; in evaluation mode.
        samples: ``[n, ...]``; those with the label -1 claim nothing and are left out.
        classes: Number of classes.

    Returns:
        The share by class, None for a class without samples, and the share of all with its interval; None where nothing is
        labelled.
    """
    samples = samples[samples.labels >= 0]
    if not len(samples):
        return [None] * classes, None
    named = mapped(oracle, samples.inputs).argmax(1)  # [n]
    right = samples.labels[named == samples.labels]
    sizes, hits = (torch.bincount(labels, minlength=classes).tolist() for labels in (samples.labels, right))
    return [hit / size if size else None for hit, size in zip(hits, sizes, strict=True)], share(
        len(right), len(samples)
    )


@torch.inference_mode()
def features(model: nn.Module, inputs: Tensor, batch_size: int = CHUNK) -> Tensor:
    """What the part ``encoder`` of a model makes of inputs.

    Args:
        model: With a part ``encoder``; in evaluation mode.
        inputs: As they are stored, ``[n, ...]``, at least one.
        batch_size: How many at a time.

    Returns:
        ``[n, d]``.
    """
    return mapped(model.encoder, inputs, batch_size).flatten(1)  # type: ignore[arg-type]


def mapped(function: Callable[[Tensor], Tensor], inputs: Tensor, size: int = CHUNK) -> Tensor:
    """What a function of normalised inputs makes of inputs as they are stored, so many at a time."""
    return torch.cat([function(normalise(chunk)) for chunk in torch.split(inputs, size)])


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """The squared Fréchet distance of two Gaussians that are fitted to features (Dowson and Landau 1982; FID of Heusel et al. 2017).

    ``|μ_a - μ_b|² + tr(A + B - 2 (A B)^½)`` with the unbiased covariances A and B. The eigenvalues of A B are those of the symmetric
    ``A^½ B A^½``. Few samples raise it: compare distances of equal n alone.

    Args:
        a: ``[n, d]``, n at least 2.
        b: ``[m, d]``, m at least 2.

    Returns:
        The distance, at least 0.

    Raises:
        FedfillError: Where a side has fewer than two samples.
    """
    if min(len(a), len(b)) < 2:
        raise FedfillError(f"Fréchet distance: found {len(a)} and {len(b)} samples; allowed: at least 2 on each side")
    a, b = a.double(), b.double()
    shift = (a.mean(0) - b.mean(0)).square().sum()
    one, other = _covariance(a), _covariance(b)  # [d, d]
    values, vectors = torch.linalg.eigh(one)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    overlap = torch.linalg.eigvalsh(root @ other @ root).clamp(min=0).sqrt().sum()
    return max(0.0, float(shift + one.trace() + other.trace() - 2 * overlap))


def _covariance(x: Tensor) -> Tensor:
    centred = x - x.mean(0)
    return centred.T @ centred / (len(x) - 1)


def nearest(queries: Tensor, references: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Which of others is the nearest to each input, and how far it is.

    Args:
        queries: As they are stored, ``[n, ...]``.
        references: Likewise, ``[m, ...]``, at least one.
        chunk: How many are compared at a time; the memory grows with its square.

    Returns:
        Root mean squares of the differences of normalised values, ``[n]`` float32; 0 for a copy. And the positions of the
        nearest, ``[n]`` int64.
    """
    size = math.prod(queries.shape[1:])
    least = queries.new_full((len(queries),), float("inf"), dtype=torch.float32)
    where = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    for first in range(0, len(references), 10 * chunk):
        known = normalise(references[first : first + 10 * chunk]).flatten(1)  # [m', d]
        norms = known.square().sum(1)
        for start in range(0, len(queries), chunk):
            part = slice(start, start + chunk)
            asked = normalise(queries[part]).flatten(1)  # [n', d]
            # squared distances but for the query's own norm
            found, index = torch.addmm(norms, asked, known.T, alpha=-2).min(1)
            closer = found < least[part]
            least[part] = torch.where(closer, found, least[part])
            where[part] = torch.where(closer, index + first, where[part])
    # the product loses digits where two inputs are near each other: good enough to choose by, and not to report
    exact = [
        (normalise(queries[start : start + chunk]) - normalise(references[where[start : start + chunk]]))
        .flatten(1)
        .square()
        .sum(1)
        for start in range(0, len(queries), chunk)
    ]
    return (torch.cat(exact) / size).sqrt() if exact else least, where


def nearest_distances(queries: Tensor, references: Tensor, chunk: int = CHUNK) -> Tensor:
    """The distances of `nearest` alone."""
    return nearest(queries, references, chunk)[0]


@dataclass(frozen=True)
class Nearness:
    """Does a generator copy? Distances to the nearest training sample, of synthetic samples and of real ones nobody trained on.

    Attributes:
        median: Of the synthetic samples' distances, with its interval.
        minimum: The least of them.
        real_median: Of the real test samples' distances.
        real_percentile: Their 1st percentile, the yardstick.
        share_below: Of the synthetic samples that are no farther than that, with its interval, the yardstick given; about 0.01
            where they are as near as real ones.
    """

    median: Estimate
    minimum: float
    real_median: float
    real_percentile: float
    share_below: Estimate


def nearness(synthetic: Tensor, training: Tensor, test: Tensor) -> Nearness:
    """Compare synthetic samples' distances to the training data with those of real test samples.

    Args:
        synthetic: Inputs as they are stored, ``[n, ...]``, at least one.
        training: The real samples that might have been copied.
        test: Real samples that nobody trained on, at least one.

    Returns:
        The figures.
    """
    made, real = (nearest_distances(inputs, training) for inputs in (synthetic, test))
    yardstick = torch.quantile(real, 0.01)
    return Nearness(
        median=median(made),
        minimum=float(made.min()),
        real_median=float(torch.quantile(real, 0.5)),
        real_percentile=float(yardstick),
        share_below=share(int((made <= yardstick).sum()), len(made)),
    )


@dataclass(frozen=True)
class Balance:
    """How labels are spread over classes.

    Attributes:
        counts: Samples of each class.
        entropy: Of the labels' distribution over its largest, with its interval (`evenness`); None where nothing is labelled.
        labelled: Share of the samples that have a label.
    """

    counts: list[int]
    entropy: Estimate | None
    labelled: float


def class_balance(labels: Tensor, classes: int, seed: int) -> Balance:
    """How labels are spread over classes.

    Args:
        labels: ``[n]``, at least one; -1 where a sample has none.
        classes: Number of classes, at least 2.
        seed: Of the draws behind the interval.

    Returns:
        The figures.
    """
    counts = torch.bincount(labels[labels >= 0], minlength=classes)
    return Balance(counts.tolist(), evenness(counts, seed), int(counts.sum()) / len(labels))
