"""Figures with intervals of 95 %: a share, a median, the evenness of labels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from fedfill.streams import numpy_stream

LEVEL = 0.95
DRAWS = 1000
"""Of the bootstrap of labels."""


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval of 95 %.

    Attributes:
        value: The figure.
        low: Lower end.
        high: Upper end.
        n: Samples behind it.
    """

    value: float
    low: float
    high: float
    n: int


def share(hits: float, n: int, effective: float | None = None) -> Estimate:
    """A share with the exact interval of a binomial (Clopper and Pearson 1934).

    Args:
        hits: How many of them, 0..n.
        n: Of how many, at least 1.
        effective: How many independent ones they are worth; None: n.

    Returns:
        The share.
    """
    value = hits / n
    size = float(n) if effective is None else effective
    found, tail = value * size, (1 - LEVEL) / 2
    low = 0.0 if hits <= 0 else float(stats.beta.ppf(tail, found, size - found + 1))
    high = 1.0 if hits >= n else float(stats.beta.ppf(1 - tail, found + 1, size - found))
    return Estimate(value, low, high, n)


def median(values: Tensor) -> Estimate:
    """The median, with an interval between two ranks, whatever the distribution is.

    Its ends are the k-th smallest value and the k-th largest. k is the largest number for which fewer than k heads among n fair
    coins come with a probability of at most .025.

    Args:
        values: ``[n]``, at least one. Of fewer than 6 the ends are the least and the largest, between which the median lies
            with less than 95 %.

    Returns:
        The median.
    """
    n, ordered = len(values), values.double().sort().values
    k = max(1, int(stats.binom.ppf((1 - LEVEL) / 2, n, 0.5)))
    return Estimate(float(ordered.quantile(0.5)), float(ordered[k - 1]), float(ordered[n - k]), n)


def evenness(counts: Tensor, seed: int) -> Estimate | None:
    """The entropy of labels over the log of the number of classes: 1 where all have equally many, 0 where one has all.

    A draw with replacement is less even than what it is drawn from. So bootstrap draws tell the width alone: 1.96 of their
    deviations to each side.

    Args:
        counts: Labels of each class, ``[C]`` int64, C at least 2.
        seed: Of the draws.

    Returns:
        The figure; both ends are within 0..1. None where there is no label.
    """
    total = int(counts.sum())
    if not total:
        return None
    shares = (counts.double() / total).cpu().numpy()
    draws = numpy_stream(seed, "evenness", "bootstrap").multinomial(total, shares / shares.sum(), size=DRAWS) / total
    value = float(_entropy(shares[None])[0])
    wide = float(stats.norm.ppf((1 + LEVEL) / 2) * _entropy(draws).std(ddof=1))
    return Estimate(value, max(0.0, value - wide), min(1.0, value + wide), total)


def _entropy(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each row ``[k, C]``, over log C; within 0..1 but for the last bits, which are cut."""
    logs = np.log(np.where(shares > 0, shares, 1.0))
    cut: NDArray[np.float64] = np.clip(-(shares * logs).sum(1) / math.log(shares.shape[1]), 0.0, 1.0)
    return cut
