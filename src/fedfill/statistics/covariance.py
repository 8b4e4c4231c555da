"""Means and covariances of classes from sums, and covariances that are shrunk."""

from __future__ import annotations

import torch
from torch import Tensor


def class_means(moments: Tensor, counts: Tensor) -> Tensor:
    """``[C, d]`` from moments ``[d, C]`` and counts ``[C]``; zeros for a class that nobody holds."""
    present = counts > 0
    return torch.where(present[:, None], moments.T / torch.where(present, counts, 1.0)[:, None], 0.0)


def within_covariance(gram: Tensor, moments: Tensor, counts: Tensor) -> Tensor:
    """The pooled covariance within classes, without bias.

    Args:
        gram: G, ``[d, d]`` float64.
        moments: M, ``[d, C]`` float64.
        counts: N, ``[C]`` float64.

    Returns:
        S_w = (G - sum_c N_c mu_c mu_c') / (n - C), C the classes that somebody holds, ``[d, d]``; zero where n <= C.
    """
    means = class_means(moments, counts)
    held = counts.clamp(min=0)
    scatter = gram - (means.T * held) @ means
    free = float(held.sum() - (held > 0).sum())
    return (scatter + scatter.T) / (2 * free) if free > 0 else torch.zeros_like(scatter)


def class_covariances(class_grams: Tensor, moments: Tensor, counts: Tensor) -> Tensor:
    """Each class's covariance, without bias.

    Args:
        class_grams: Q_c, ``[C, d, d]`` float64.
        moments: M, ``[d, C]`` float64.
        counts: N, ``[C]`` float64.

    Returns:
        (Q_c - N_c mu_c mu_c') / (N_c - 1), ``[C, d, d]``; of a class with fewer than 2 records the pooled one.
    """
    means = class_means(moments, counts)
    scatter = class_grams - counts[:, None, None] * means[:, :, None] * means[:, None, :]
    own = counts >= 2
    covariances = scatter / torch.where(own, counts - 1, 1.0)[:, None, None]
    covariances = (covariances + covariances.mT) / 2
    if not own.all():
        held = torch.where((counts > 0)[:, None, None], class_grams, 0.0).sum(0)
        covariances[~own] = within_covariance(held, moments, counts)
    return covariances


def oas(covariance: Tensor, k: float) -> float:
    """The share of the oracle approximating shrinkage, best for Gaussian data.

    Chen, Wiesel, Eldar and Hero, "Shrinkage Algorithms for MMSE Covariance Estimation", 2010, equation 23.

    Args:
        covariance: S, ``[d, d]``.
        k: Degrees of freedom that it was estimated with.

    Returns:
        The share a in 0..1 of (tr S / d) I; 1 where S is a multiple of I already.
    """
    p = len(covariance)
    squares, trace = float((covariance**2).sum()), float(covariance.trace()) ** 2
    above, below = (1 - 2 / p) * squares + trace, (k + 1 - 2 / p) * (squares - trace / p)
    return min(1.0, above / below) if below > 1e-15 * squares * k else 1.0


def toward_sphere(covariance: Tensor, share: float) -> Tensor:
    """(1 - a) S + a (tr S / d) I for a covariance ``[d, d]`` and a share a."""
    d = len(covariance)
    return (1 - share) * covariance + share * covariance.trace() / d * torch.eye(d, dtype=covariance.dtype)
