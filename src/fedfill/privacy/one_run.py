"""One run with many canaries: what guesses of their coins prove.

* `one_run_epsilon`: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023;
* `rejects` and `one_run_mu`: Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One Run", 2024.

Both hold for canaries that disturb each other, as long as their coins are fair and independent. NumPy and SciPy only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special, stats

from fedfill.privacy.bounds import Curve, gaussian_curve, largest, least_level


@dataclass(frozen=True)
class Guesses:
    """What was guessed of the coins of one run's canaries.

    Attributes:
        canaries: How many have a coin (m).
        made: Of how many the coin was guessed (r).
        right: How many guesses were right (c).
    """

    canaries: int
    made: int
    right: int

    @classmethod
    def of(cls, scores: ArrayLike, coins: ArrayLike, guesses: int | None = None) -> Guesses:
        """Guess +1 for the largest scores and -1 for the smallest, half of each, and abstain on the rest.

        Args:
            scores: Of each canary, larger for a coin of +1.
            coins: Fair and independent, +1 or -1.
            guesses: How many are made (r); None: a fifth of the canaries. Fixed before the scores are looked at.

        Returns:
            The count. Ties are broken by place and not by coin.
        """
        found, sides = np.asarray(scores, float), np.asarray(coins)
        half = (len(found) // 5 if guesses is None else guesses) // 2
        order = np.argsort(found, kind="stable")
        right = int((sides[order[:half]] < 0).sum() + (sides[order[len(order) - half :]] > 0).sum())
        return cls(len(found), 2 * half, right)

    def epsilon(self, delta: float, alpha: float = 0.05) -> float:
        """`one_run_epsilon` of these guesses."""
        return one_run_epsilon(self.canaries, self.made, self.right, delta, alpha)

    def mu(self, alpha: float = 0.05) -> float:
        """`one_run_mu` of these guesses."""
        return one_run_mu(self.canaries, self.made, self.right, alpha)

    def p_value(self, claim: Curve) -> float:
        """The least level at which `rejects` refutes a claim."""
        return least_level(lambda alpha: rejects(self.canaries, self.made, self.right, claim, alpha))

    @property
    def perfect(self) -> Guesses:
        """The same with all guesses right: its bound is the largest that could have been found."""
        return Guesses(self.canaries, self.made, self.made)


def one_run_p_value(m: int, r: int, c: int, epsilon: float, delta: float) -> float:
    """The level at which guesses refute (epsilon, delta)-differential privacy (Steinke et al. 2023, theorem 5.2).

    Args:
        m: Canaries, abstained ones too.
        r: Guesses.
        c: Right ones, 0..r.
        epsilon: What is claimed, 0 or more.
        delta: 0..1.

    Returns:
        The p-value, 0..1, which rises with epsilon and delta.
    """
    rate = float(special.expit(epsilon))
    tails = stats.binom.sf(np.arange(c, -1, -1) - 1, r, rate)  # P(X >= c), P(X >= c - 1), ...
    slope = 0.0
    if c and delta:
        slope = max(0.0, float(((tails[1:] - tails[0]) / np.arange(1, c + 1)).max()))
    return min(1.0, float(tails[0]) + 2 * m * delta * slope)


def one_run_epsilon(m: int, r: int, c: int, delta: float, alpha: float = 0.05) -> float:
    """The epsilon that guesses refute below, for whatever mechanism the canaries went through.

    Args:
        m: As in `one_run_p_value`.
        r: As in `one_run_p_value`.
        c: As in `one_run_p_value`.
        delta: 0..1.
        alpha: 1 minus the confidence.

    Returns:
        The bound; 0 where nothing is refuted.
    """
    return largest(lambda epsilon: one_run_p_value(m, r, c, epsilon, delta) <= alpha, 8.0) if r else 0.0


def rejects(m: int, r: int, c: int, claim: Curve, alpha: float) -> bool:
    """Whether guesses refute a trade-off curve (Mahloujifar, Melis and Chaudhuri 2024, algorithm 3).

    Args:
        m: As in `one_run_p_value`.
        r: As in `one_run_p_value`.
        c: As in `one_run_p_value`.
        claim: H of the curve.
        alpha: 1 minus the confidence.

    Returns:
        Whether so many right guesses have a probability below `alpha` under the claim.
    """
    right, wrong = alpha * c / m, alpha * (r - c) / m
    for i in range(c - 1, -1, -1):
        more = max(wrong, claim(right))
        if more <= wrong:
            break
        right = min(1.0, right + i / (r - i) * (more - wrong))
        wrong = more
    return right + wrong > r / m


@functools.lru_cache(maxsize=4096)
def one_run_mu(m: int, r: int, c: int, alpha: float = 0.05) -> float:
    """The mu of Gaussian differential privacy that guesses refute below.

    Args:
        m: As in `one_run_p_value`.
        r: As in `one_run_p_value`.
        c: As in `one_run_p_value`.
        alpha: 1 minus the confidence.

    Returns:
        The bound; 0 where nothing is refuted.
    """
    return largest(lambda mu: rejects(m, r, c, gaussian_curve(mu), alpha), 8.0) if r else 0.0
