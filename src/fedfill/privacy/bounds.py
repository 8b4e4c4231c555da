"""From scores to bounds: what an attack's success proves about privacy, whatever the account says.

An audit gives each canary a fair coin and a score. What follows from how well the scores tell the coins apart is a *lower*
bound on epsilon, or on mu, with a stated confidence:

* many runs, or many repeats of one release: `Rates` (Clopper and Pearson 1934) and `normal_mu` (noncentral t);
* one run with many canaries: `fedfill.privacy.one_run`;
* an estimate without a guarantee: `estimated_epsilon` (Andrew et al. 2024, "One-shot Empirical Privacy Estimation for
  Federated Learning").

NumPy and SciPy only; nothing here knows a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from fedfill.privacy import accountant

Floats = NDArray[np.float64]
Curve = Callable[[float], float]
"""H of a claim: the least type-I error at which a test can have so much power, a rising function of 0..1 to 0..1."""

_TINY = 1e-300
_STEPS = 60
_NOT_NORMAL = 1e-3


def largest(holds: Callable[[float], bool], high: float) -> float:
    """The largest number for which something holds that holds below it; 0 where it doesn't hold there, infinite beyond 1e6."""
    if not holds(0.0):
        return 0.0
    low = 0.0
    while holds(high):
        low, high = high, 2 * high
        if high > 1e6:
            return math.inf
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def least_level(rejected: Callable[[float], bool]) -> float:
    """The least level, 1e-300..1, at which a claim is rejected: its p-value."""
    if not rejected(1.0):
        return 1.0
    low, high = math.log(_TINY), 0.0
    if rejected(_TINY):
        return _TINY
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if rejected(math.exp(middle)) else (middle, high)
    return math.exp(high)


# Claims as curves


def gaussian_curve(mu: float) -> Curve:
    """The claim of Gaussian differential privacy.

    Args:
        mu: Its parameter, 0 or more.

    Returns:
        ``H(x) = Phi(Phi^-1(x) - mu)``.
    """
    return lambda x: float(special.ndtr(special.ndtri(min(max(x, 0.0), 1.0)) - mu))


def trade_off(epsilons: Sequence[float], deltas: Sequence[float], cells: int = 4000) -> Curve:
    """The claim that an accountant makes by pairs of epsilon and delta, all at once.

    ``f(x) = max(0, 1 - d - exp(e) x, exp(-e) (1 - d - x))`` over all pairs is the least type-II error that any test with a
    type-I error of x can have (Dong, Roth and Su 2022, proposition 2.12), and H is the inverse of 1 - f. Between pairs f is
    too small, and so is what is rejected.

    Args:
        epsilons: 0 or more each.
        deltas: 0..1, one for each epsilon.
        cells: Points of the grid on which 1 - f is inverted.

    Returns:
        H; never above the exact one.
    """
    e, d = np.asarray(epsilons, float)[:, None], np.asarray(deltas, float)[:, None]
    # fine near 0 and near 1, where the tests look
    half = np.geomspace(1e-12, 0.5, cells)
    x = np.concatenate([[0.0], half, 1 - half[::-1][1:], [1.0]])
    power = np.minimum(1.0, np.minimum(d + np.exp(np.minimum(e, 700)) * x, 1 - np.exp(-e) * (1 - d - x)).min(0))
    power = np.maximum.accumulate(power)

    def inverse(y: float) -> float:
        # the largest x of the grid whose power is no more than y
        place = int(np.searchsorted(power, min(max(y, 0.0), 1.0), side="right")) - 1
        return float(x[max(place, 0)])

    return inverse


# One release, repeated


@dataclass(frozen=True)
class Rates:
    """How often a fixed threshold was wrong, over independent repeats.

    Attributes:
        missed: Scores below the threshold where the canary was in.
        ins: Repeats with it.
        alarms: Scores at or above the threshold where it was not.
        outs: Repeats without it.
    """

    missed: int
    ins: int
    alarms: int
    outs: int

    @classmethod
    def at(cls, threshold: float, ins: ArrayLike, outs: ArrayLike) -> Rates:
        """Count the errors of a threshold that was fixed before anybody looked at these scores."""
        with_it, without = np.asarray(ins, float), np.asarray(outs, float)
        return cls(int((with_it < threshold).sum()), len(with_it), int((without >= threshold).sum()), len(without))

    def above(self, alpha: float) -> tuple[float, float]:
        """Upper bounds on both error rates, (missed, alarms), each with half of `alpha`."""
        return upper(self.missed, self.ins, alpha / 2), upper(self.alarms, self.outs, alpha / 2)

    def epsilon(self, delta: float, alpha: float = 0.05) -> float:
        """The epsilon that is refuted below, for whatever mechanism made the scores.

        Args:
            delta: 0..1.
            alpha: 1 minus the confidence.

        Returns:
            ``ln((1 - missed - delta) / alarms)`` of the bounds on both; 0 where nothing is refuted.
        """
        missed, alarms = self.above(alpha)
        power = 1 - missed - delta
        return max(0.0, math.log(power / alarms)) if power > 0 else 0.0

    def mu(self, alpha: float = 0.05) -> float:
        """The mu of Gaussian differential privacy that is refuted below; 0 where nothing is."""
        missed, alarms = self.above(alpha)
        return max(0.0, -float(special.ndtri(alarms)) - float(special.ndtri(missed)))

    def p_value(self, claim: Curve) -> float:
        """The level at which these errors refute a claim.

        Args:
            claim: H of its trade-off curve.

        Returns:
            The p-value: type-I error and power lie outside the curve at any larger level.
        """

        def rejected(alpha: float) -> bool:
            missed, alarms = self.above(alpha)
            return claim(1 - missed) > alarms

        return least_level(rejected)


def upper(count: int, n: int, alpha: float) -> float:
    """The bound of Clopper and Pearson on a probability, from above.

    Args:
        count: How often it happened.
        n: Of how many.
        alpha: With which probability the bound may be too low.

    Returns:
        0..1; 1 where it always happened.
    """
    return 1.0 if count >= n else float(stats.beta.isf(alpha, count + 1, n - count))


@dataclass(frozen=True)
class Normal:
    """What two groups of normal scores of equal spread show.

    Attributes:
        distance: Their means' distance in deviations, an estimate of mu.
        bound: The mu that is refuted below.
        misfit: p-value of their normality and equal spread, from Kolmogorov and Smirnov's test of each group; below 0.001 the
            bound is not to be used.
    """

    distance: float
    bound: float
    misfit: float

    @property
    def sound(self) -> bool:
        """Whether the scores look normal, so that the bound may be used."""
        return self.misfit >= _NOT_NORMAL


def normal_mu(ins: ArrayLike, outs: ArrayLike, alpha: float = 0.05) -> Normal:
    """The mu of normal scores of equal spread, which those of one Gaussian release are.

    Args:
        ins: Scores with the canary, two or more.
        outs: Scores without it, two or more.
        alpha: 1 minus the confidence.

    Returns:
        The estimate and the bound by the noncentral t distribution.
    """
    with_it, without = np.asarray(ins, float), np.asarray(outs, float)
    t, width, freedom, distance = _student(with_it, without)
    if not math.isfinite(t):
        return Normal(math.inf, math.inf, 0.0)
    spread = abs(with_it.mean() - without.mean()) / distance if distance else without.std(ddof=1)
    misfit = min(
        float(stats.kstest((group - group.mean()) / spread, "norm").pvalue) if spread > 0 else 0.0
        for group in (with_it, without)
    )
    bound = width * _noncentrality(t, freedom, alpha) if t > 0 else 0.0
    return Normal(distance, bound, misfit)


def normal_p_value(ins: ArrayLike, outs: ArrayLike, mu: float) -> float:
    """The level at which normal scores of equal spread refute a claim of Gaussian differential privacy.

    Args:
        ins: As in `normal_mu`.
        outs: As in `normal_mu`.
        mu: What is claimed, 0 or more.

    Returns:
        The p-value.
    """
    t, width, freedom, _ = _student(np.asarray(ins, float), np.asarray(outs, float))
    return _above(t, freedom, mu / width) if math.isfinite(t) else _TINY


def _student(with_it: Floats, without: Floats) -> tuple[float, float, int, float]:
    n1, n0 = len(with_it), len(without)
    freedom, width = n1 + n0 - 2, math.sqrt(1 / n1 + 1 / n0)
    square = (((with_it - with_it.mean()) ** 2).sum() + ((without - without.mean()) ** 2).sum()) / freedom
    gap = float(with_it.mean() - without.mean())
    if square <= 0:
        return (math.inf if gap > 0 else 0.0), width, freedom, math.inf if gap > 0 else 0.0
    distance = gap / math.sqrt(square)
    return distance / width, width, freedom, distance


def _above(t: float, freedom: int, shift: float) -> float:
    """P(T >= t) of the noncentral t; for many degrees of freedom by the normal law of T's root, which does not lose digits."""
    if freedom < 200:
        value = float(stats.nct.sf(t, freedom, shift))
        if math.isfinite(value):
            return min(max(value, _TINY), 1.0)
    # Johnson and Welch 1940: (t (1 - 1/4f) - shift) / sqrt(1 + t^2 / 2f) is nearly standard normal
    root = (t * (1 - 1 / (4 * freedom)) - shift) / math.sqrt(1 + t * t / (2 * freedom))
    return max(float(special.ndtr(-root)), _TINY)


def _noncentrality(t: float, freedom: int, alpha: float) -> float:
    return largest(lambda shift: _above(t, freedom, shift) <= alpha, max(t, 1.0))


# An estimate


def estimated_epsilon(mean: float, deviation: float, delta: float) -> float:
    """Epsilon between a normal law and the standard one: Andrew et al.'s estimate, without any guarantee.

    Args:
        mean: Of the canaries' scores, in deviations of those that took no part.
        deviation: Likewise, above 0. 1 is what theory says of one Gaussian release, and an estimate of it is shaky: a spread 20 %
            too large doubles epsilon.
        delta: Between 0 and 1, both excluded.

    Returns:
        The smallest epsilon at which neither law exceeds exp(epsilon) times the other by more than delta in all.
    """
    if math.isclose(deviation, 1.0, rel_tol=1e-12):
        return accountant.epsilon(abs(mean), delta)
    wide = 12 * max(1.0, deviation)
    x = np.linspace(min(0.0, mean) - wide, max(0.0, mean) + wide, 400_001)
    step = float(x[1] - x[0])
    one = np.exp(-0.5 * ((x - mean) / deviation) ** 2) / (deviation * math.sqrt(2 * math.pi))
    none = np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)

    def excess(epsilon: float) -> float:
        factor = math.exp(min(epsilon, 700))
        more, less = np.maximum(one - factor * none, 0).sum(), np.maximum(none - factor * one, 0).sum()
        return step * max(float(more), float(less))

    return largest(lambda epsilon: excess(epsilon) > delta, 8.0)
