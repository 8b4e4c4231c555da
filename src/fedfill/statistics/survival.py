"""Survival analysis from counts on a public grid: Kaplan-Meier, its band, the log-rank test and concordance.

Counts have the cells of `fedfill.data.survival`, 2G + 1 on the last axis: events at each grid time, then records that were censored
after none, one, ..., all G of them. With d_k events and n_k at risk at t_k (Kaplan and Meier 1958; Greenwood 1926):
S(t_k) = prod_{j<=k} (1 - d_j / n_j), and var(log S(t_k)) = sum_{j<=k} d_j / (n_j (n_j - d_j)).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from scipy.special import gammaincc
from torch import Tensor

from fedfill.statistics.prefix import decoding, square_root

FIGURES = {"c_index": "C-index", "c_index_within_clients": "C-index within clients"}
"""What is measured of how a run ranks rows: names in its summary, and words for people."""
NO_RANKING = 0.5
"""The C-index of who ranks nobody before another."""
EXACTLY = "donot_use_mm_for_euclid_dist"
"""How torch shall compute distances."""


def split(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Events ``[..., G]`` and censored records ``[..., G + 1]`` of counts ``[..., 2G + 1]``."""
    size = counts.shape[-1] // 2
    return counts[..., :size], counts[..., size:]


def at_risk(counts: Tensor) -> Tensor:
    """Records at risk at each grid time, ``[..., G]``: those whose event is then or later, or who were censored then or later."""
    events, censored = split(counts)
    return _from_end(events + censored[..., 1:])


def _from_end(x: Tensor) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1)


@dataclass(frozen=True)
class Curve:
    """A Kaplan-Meier curve on a grid.

    Attributes:
        events: At each grid time, ``[G]`` float64.
        at_risk: Just before it, ``[G]``.
        survival: S at it, ``[G]``, 0..1.
        variance: Greenwood's, of log S, ``[G]``; infinite where S is 0.
        noise: Variance of log S by the noise in the counts, ``[G]``; 0 without noise.
        rows: At risk at time 0: all of them, with those who were censored before the first grid time.
    """

    events: Tensor
    at_risk: Tensor
    survival: Tensor
    variance: Tensor
    noise: Tensor
    rows: float

    @property
    def se(self) -> Tensor:
        """Standard error of S, ``[G]``: S times the root of both variances, and 0 where S is 0."""
        return torch.where(self.survival > 0, self.survival * (self.variance + self.noise).sqrt(), 0.0)

    def band(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Confidence limits at each time.

        Sampling has the log-log limits (Kalbfleisch and Prentice 1980). Noise is independent of it and normal, and widens each side
        by the root of the sum of squares (Zou and Donner 2008). It does so by the quantile for all times at once (Sidak 1967): at this
        level the band holds the whole curve that the records have without noise.

        Args:
            level: Of confidence, above 0 and below 1.

        Returns:
            Lower and upper limit, ``[G]`` each, 0..1. Where S is 0 the upper one is that of the time before.
        """
        z, all_z = (NormalDist().inv_cdf((1 + one) / 2) for one in (level, level ** (1 / len(self.survival))))
        s = self.survival
        inside = (s > 0) & (s < 1)
        log = torch.where(inside, s, 0.5).log()  # 0.5: any number, not used
        spread = torch.where(inside, z * self.variance.sqrt() / log.abs(), 0.0)
        low, high = (torch.where(inside, torch.exp(log * torch.exp(sign * spread)), s) for sign in (1.0, -1.0))
        wide = all_z * torch.where(s > 0, s, 1.0) * self.noise.sqrt()
        low = (s - torch.hypot(s - low, wide)).clamp(min=0)
        high = (s + torch.hypot(high - s, wide)).clamp(max=1)
        for k in range(1, len(s)):
            if s[k] <= 0:
                high[k] = high[k - 1]
        return low, high


def kaplan_meier(counts: Tensor) -> Curve:
    """The curve of exact counts.

    Args:
        counts: ``[2G + 1]``, 0 or more.

    Returns:
        The curve; where nobody is at risk any more it stays as it is.
    """
    counts = counts.double()
    events, n = split(counts)[0], at_risk(counts)
    return _curve(events, n, torch.zeros_like(events), float(counts.sum()))


def _curve(events: Tensor, n: Tensor, noise: Tensor, rows: float) -> Curve:
    there = n > 0
    hazard = torch.where(there, events / torch.where(there, n, 1.0), 0.0).clamp(0, 1)
    free = n - events
    terms = torch.where(there & (events > 0), events / (n * free.clamp(min=0)), 0.0)
    return Curve(events, n, (1 - hazard).cumprod(0), terms.cumsum(0), noise, rows)


# Counts under noise


def encoding(size: int) -> Tensor:
    """What counts on a grid of G times become under noise, ``[2G + 1, 2G + 1]``: see `fedfill.statistics.prefix`.

    Events are encoded for sums from the start, censored records for sums from the end, as those at risk are such sums.

    Args:
        size: G.

    Returns:
        The matrix; one record is one of its columns.
    """
    whole = torch.zeros(2 * size + 1, 2 * size + 1, dtype=torch.float64)
    whole[:size, :size], whole[size:, size:] = square_root(size), square_root(size + 1).T
    return whole


def bound_of(matrix: Tensor) -> tuple[float, float]:
    """How far one record moves encoded counts: added or removed, and replaced by any other; both exact."""
    return float(matrix.norm(dim=0).max()), float(torch.cdist(matrix.T, matrix.T, compute_mode=EXACTLY).max())


def noisy_kaplan_meier(encoded: Tensor, matrix: Tensor, std: float) -> Curve:
    """The curve of noisy counts.

    Cumulative events and censorings are made monotone by isotonic regression; what is at risk is 1 or more. The variance of log S by
    the noise is that of its linear part.

    Args:
        encoded: ``[2G + 1]``, the matrix times the counts, with noise.
        matrix: Of `encoding`.
        std: Of the noise on each entry.

    Returns:
        The curve, with the noise's variance.
    """
    decoded = decoding(matrix)  # [2G + 1, 2G + 1]
    events, censored = split(decoded @ encoded.double())
    events = _increments(events)
    censored = _increments(censored.flip(0)).flip(0)
    n = _from_end(events + censored[1:]).clamp(min=1.0)
    rows = max(float(events.sum() + censored.sum()), float(n[0]))
    size = len(events)
    events = torch.minimum(events, n)
    # of -log S_k = -sum_j log(1 - d_j / n_j), what a change of each cell makes: of its events at once, and of those at risk up to its time
    later = torch.tril(torch.ones(size, size, dtype=torch.float64))  # [k, j]: j <= k
    free = (n - events).clamp(min=1.0)
    by_events, by_risk = later / free, -later * (events / (n * free))
    gradient = torch.zeros(size, 2 * size + 1, dtype=torch.float64)
    gradient[:, :size] = by_events + by_risk.cumsum(1)
    gradient[:, size + 1 :] = by_risk.cumsum(1)
    noise = (gradient @ decoded * std).square().sum(1)
    return _curve(events, n, noise, rows)


def _increments(noisy: Tensor) -> Tensor:
    """Increments of 0 or more, whose sums from the start are the nearest to those of the noisy ones."""
    from scipy.optimize import isotonic_regression  # here: it takes longer to load than all of this

    sums = torch.from_numpy(isotonic_regression(noisy.cumsum(0).numpy()).x).clamp(min=0)
    return torch.diff(sums, prepend=torch.zeros(1, dtype=torch.float64))


# Comparing groups


@dataclass(frozen=True)
class LogRank:
    """What the log-rank test needs of a stratum; those of several are added.

    Attributes:
        observed: Events of each group, ``[K]``.
        expected: Those expected if all groups had one hazard, ``[K]``.
        covariance: Of observed - expected, ``[K, K]``.
    """

    observed: Tensor
    expected: Tensor
    covariance: Tensor

    def __add__(self, other: LogRank) -> LogRank:
        """Of both strata together."""
        return LogRank(
            self.observed + other.observed, self.expected + other.expected, self.covariance + other.covariance
        )

    @property
    def statistic(self) -> float:
        """The test statistic, chi-square with `freedom` degrees of freedom under one hazard; 0 where nothing can be compared."""
        difference = (self.observed - self.expected)[:-1]
        return float(difference @ torch.linalg.pinv(self.covariance[:-1, :-1], hermitian=True) @ difference)

    @property
    def freedom(self) -> int:
        """Its degrees of freedom."""
        return int(torch.linalg.matrix_rank(self.covariance[:-1, :-1], hermitian=True)) if len(self.observed) > 1 else 0

    @property
    def p(self) -> float:
        """Probability of as large a statistic under one hazard."""
        return float(gammaincc(self.freedom / 2, self.statistic / 2)) if self.freedom else 1.0


def log_rank(counts: Tensor) -> LogRank:
    """The log-rank test of one stratum (Mantel 1966).

    Args:
        counts: ``[K, 2G + 1]``, of K groups.

    Returns:
        Observed, expected and their covariance, by the hypergeometric distribution.
    """
    counts = counts.double()
    own, n = split(counts)[0], at_risk(counts)  # [K, G]
    d, all_n = own.sum(0), n.sum(0)
    share = torch.where(all_n > 0, n / all_n.clamp(min=1), 0.0)
    weight = torch.where(all_n > 1, d * (all_n - d) / (all_n - 1).clamp(min=1), 0.0)  # [G]
    covariance = torch.diag((weight * share).sum(1)) - (weight * share) @ share.T
    return LogRank(own.sum(1), (d * share).sum(1), covariance)


# Concordance


@dataclass(frozen=True)
class Pairs:
    """Pairs of records of which one is known to have had its event before the other (Harrell 1982).

    Attributes:
        right: The one with the earlier event has the higher risk.
        tied: Both have one risk.
        comparable: All of them.
    """

    right: float
    tied: float
    comparable: float

    def __add__(self, other: Pairs) -> Pairs:
        """Of both together."""
        return Pairs(self.right + other.right, self.tied + other.tied, self.comparable + other.comparable)

    @property
    def index(self) -> float | None:
        """Harrell's C, 0..1, ties counted half; None where no pair can be compared."""
        return (self.right + self.tied / 2) / self.comparable if self.comparable else None


def concordance(risk: Tensor, cells: Tensor, size: int) -> Pairs:
    """How well risks tell which of two records has its event first.

    Two events at one grid time are no pair. A record that was censored at the time of another's event, or later, outlived it.

    Args:
        risk: ``[n]``, the higher the sooner.
        cells: ``[n]`` int64, 0..2G.
        size: G.

    Returns:
        Counts of pairs.
    """
    value, cell = risk.double().cpu().numpy(), cells.cpu().numpy()
    order = np.argsort(value, kind="stable")
    value, cell = value[order], cell[order]
    # an event at t_k, k = 1..G, is over at 2k; a record censored after k grid times outlives those that are over by 2k
    over = np.where(cell < size, 2 * (cell + 1), 2 * (cell - size) + 1)
    right = tied = comparable = 0
    for k in np.unique(cell[cell < size]):
        ends, later = value[cell == k], value[over > 2 * (k + 1)]
        below, upto = np.searchsorted(later, ends, "left"), np.searchsorted(later, ends, "right")
        right, tied, comparable = (
            right + int(below.sum()), tied + int((upto - below).sum()), comparable + len(ends) * len(later)
        )  # fmt: skip
    return Pairs(float(right), float(tied), float(comparable))


def concordance_of_counts(counts: Tensor) -> Pairs:
    """Concordance of records of which only a range of risk is known, so that pairs within one range are tied.

    Args:
        counts: ``[B, 2G + 1]``, records by range of risk, from the lowest to the highest, and by cell.

    Returns:
        Counts of pairs.
    """
    counts = counts.double()
    events, censored = split(counts)
    later = _from_end(events + censored[:, 1:]) - events  # [B, G]: those who outlive an event at t_k
    below = later.cumsum(0) - later
    return Pairs(float((events * below).sum()), float((events * later).sum()), float((events * later.sum(0)).sum()))


def total_hazard(log_probabilities: Tensor) -> Tensor:
    """A model's cumulative hazard over the whole grid, by which it ranks records: the higher the sooner.

    Args:
        log_probabilities: Of the cells, ``[n, 2G + 1]``.

    Returns:
        ``[n]``: the sum of -log(1 - h_k), with h_k the probability of an event at t_k among those still at risk there.
    """
    return -_log_survival(log_probabilities.double().exp())[..., -1]


def survival_of(probabilities: Tensor) -> Tensor:
    """A model's S for each record.

    Args:
        probabilities: Of the cells, ``[n, 2G + 1]``.

    Returns:
        ``[n, G]``, 0..1: the product of 1 - h_k, with h_k the probability of an event at t_k among those still at risk there.
    """
    return _log_survival(probabilities.double()).exp()


def _log_survival(chances: Tensor) -> Tensor:
    h = split(chances)[0] / at_risk(chances).clamp(min=1e-300)
    return torch.log1p(-h.clamp(max=1 - 1e-12)).cumsum(-1)
