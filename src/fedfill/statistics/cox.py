"""Cox regression from sums over risk sets on a public grid, with Breslow's rule for ties, by Newton steps.

The hazard of a record with covariates x is h_0(t) exp(beta' x). At a beta the partial likelihood, its gradient and its information
need nothing of the records but, at each grid time, S0 = sum w, S1 = sum w x and S2 = sum w x x' over those at risk, w = exp(beta' x);
and once the events d_k and the sum of x over all events (Cox 1972; Breslow 1974)::

    log L = beta' X - sum_k d_k log S0_k                     X = sum of x over events
    U     = X - sum_k d_k S1_k / S0_k
    I     = sum_k d_k (S2_k / S0_k - S1_k S1_k' / S0_k^2)

None of the three changes with what x is counted from, but for rounding: so it is the middle of the records, as exp(beta' x) is beyond
what numbers hold where x is far from 0. All of these are sums over records, so that those of several sites are those of the pooled table. Stratified by site, each site has
risk sets and a baseline of its own, and log L, U and I are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfill.errors import FedfillError
from fedfill.privacy.packed import unpack

CHUNK = 500
"""Records whose outer products are made at once."""
SINGULAR = 1e-9
"""An eigenvalue of the scaled information below this share of the largest stands for a direction of which the records say nothing."""
CLOSE = 1e-12
"""Newton's decrement at which the steps end."""
STILL = 1e-3
"""How far the last step goes at the most, as a share of the coefficients; where they grow for ever no step gets shorter."""
FLAT = 1e-10
"""Variance of a column among those at risk, as a share of its mean square, below which it is rounding: the column is constant."""
BLIND = 1e-6
"""Share of a coefficient in directions of which the records say nothing, from which it is not known."""


@dataclass(frozen=True)
class RiskSums:
    """Sums over those at risk at each grid time.

    Attributes:
        s0: Of w, ``[G]`` float64.
        s1: Of w x, ``[G, p]``.
        s2: Of w x x', upper triangles, ``[G, p (p + 1) / 2]``.
    """

    s0: Tensor
    s1: Tensor
    s2: Tensor


def risk_sums(x: Tensor, cells: Tensor, size: int, beta: Tensor) -> RiskSums:
    """The sums over some records.

    Args:
        x: Covariates, ``[n, p]``.
        cells: ``[n]`` int64, 0..2G (`fedfill.data.survival`).
        size: G.
        beta: ``[p]``.

    Returns:
        The sums.

    Raises:
        FedfillError: Where a weight is beyond float64.
    """
    x, beta, p = x.double(), beta.double(), x.shape[1]
    last = times_at_risk(cells, size)
    s0, s1, s2 = (torch.zeros(size + 1, n, dtype=torch.float64) for n in (1, p, p * (p + 1) // 2))
    row, column = torch.triu_indices(p, p)
    for start in range(0, len(x), CHUNK):
        part, index = x[start : start + CHUNK], last[start : start + CHUNK]
        w = torch.exp(part @ beta)[:, None]
        s0.index_add_(0, index, w)
        s1.index_add_(0, index, w * part)
        s2.index_add_(0, index, w * part[:, row] * part[:, column])
    if not bool(torch.isfinite(s2).all()):
        raise FedfillError(
            "cox: found a hazard beyond what numbers hold; allowed: columns that do not separate those with an event from the others"
        )
    # whoever is at risk at k times is so at the first k
    found = [s.flip(0).cumsum(0).flip(0)[1:] for s in (s0, s1, s2)]
    return RiskSums(found[0][:, 0], found[1], found[2])


def moments_of(sums: RiskSums) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the covariates of those at risk at the first grid time.

    Args:
        sums: At coefficients of 0.

    Returns:
        ``[p]`` and ``[p, p]``; zeros where nobody is at risk.
    """
    n = sums.s0[0].clamp(min=1)
    mean = sums.s1[0] / n
    return mean, unpack(sums.s2[0] / n) - torch.outer(mean, mean)


def coarseness(events: Tensor, at_risk: Tensor) -> float:
    """The share of those at risk who have their event at the same grid time, mean over events; coefficients shrink by about as much.

    Args:
        events: d, ``[G]``.
        at_risk: n, ``[G]``.

    Returns:
        0..1, 0 without an event.
    """
    d, n = events.double(), at_risk.double().clamp(min=1)
    return float((d * d / n).sum() / d.sum().clamp(min=1))


def times_at_risk(cells: Tensor, size: int) -> Tensor:
    """At how many grid times each record was at risk, ``[n]`` int64, 0..G."""
    return torch.where(cells < size, cells + 1, cells - size)


@dataclass(frozen=True)
class Score:
    """The partial likelihood at a beta; those of strata are added.

    Attributes:
        log_likelihood: Logarithm of Breslow's partial likelihood.
        gradient: U, ``[p]``.
        information: I, ``[p, p]``.
    """

    log_likelihood: float
    gradient: Tensor
    information: Tensor

    def __add__(self, other: Score) -> Score:
        """Of both strata together."""
        return Score(
            self.log_likelihood + other.log_likelihood,
            self.gradient + other.gradient,
            self.information + other.information,
        )


def score(sums: RiskSums, events: Tensor, event_sum: Tensor, beta: Tensor) -> Score:
    """The partial likelihood of a stratum from its sums.

    Args:
        sums: At this beta.
        events: d, ``[G]``.
        event_sum: The sum of x over all events, ``[p]``.
        beta: ``[p]``.

    Returns:
        It and its derivatives.
    """
    there = events > 0
    d, s0 = events.double()[there], sums.s0[there]
    mean = sums.s1[there] / s0[:, None]  # [k, p]
    second = unpack((d[:, None] * sums.s2[there] / s0[:, None]).sum(0))
    gradient = event_sum.double() - d @ mean
    likelihood = event_sum.double() @ beta.double() - d @ s0.log()
    information = second - mean.T @ (d[:, None] * mean)
    varies = information.diagonal() > FLAT * second.diagonal()
    return Score(float(likelihood), gradient * varies, information * varies[:, None] * varies[None, :])


def score_of(x: Tensor, cells: Tensor, size: int, beta: Tensor) -> Score:
    """The partial likelihood of a stratum whose records are at hand; arguments as of `risk_sums`.

    Weights are taken from the middle of the records, which changes nothing else: exp of a risk far from 0 is beyond float64.
    """
    with_event = cells < size
    events = torch.bincount(cells[with_event], minlength=size)
    if len(x):  # rounded as inputs are, so that a column of one value becomes zeros and not what rounding leaves
        x = x.double() - x.double().mean(0).float().double()
    return score(risk_sums(x, cells, size, beta), events, x.double()[with_event].sum(0), beta)


@dataclass(frozen=True)
class CoxFit:
    """Where Newton's steps ended.

    Attributes:
        beta: ``[p]``; 0 in directions of which the records say nothing.
        covariance: The inverse of the information, ``[p, p]``.
        blind: The projection onto directions of which the records say nothing, of scaled coefficients, ``[p, p]``.
        log_likelihood: At this beta.
        null_log_likelihood: At zero.
        asked: How many betas were tried.
        converged: Whether the next step would have been nothing.
    """

    beta: Tensor
    covariance: Tensor
    blind: Tensor
    log_likelihood: float
    null_log_likelihood: float
    asked: int
    converged: bool

    @property
    def se(self) -> Tensor:
        """Standard errors, ``[p]``."""
        return self.covariance.diagonal().clamp(min=0).sqrt()

    @property
    def known(self) -> Tensor:
        """Whether the records tell each coefficient, ``[p]`` bool."""
        return self.blind.diagonal() < BLIND

    def mixed_with(self, k: int) -> list[int]:
        """The other coefficients that the records don't tell apart from the k-th."""
        found: list[int] = (self.blind[k].abs() > BLIND).nonzero()[:, 0].tolist()
        return [j for j in found if j != k]


def newton(ask: Callable[[Tensor], Score], p: int, most: int) -> CoxFit:
    """Maximise the partial likelihood, which is concave, from zero; a step that lowers it is halved.

    Args:
        ask: The score at a beta ``[p]``.
        p: How many coefficients there are.
        most: Betas that are tried at the most.

    Returns:
        The last one that raised the likelihood.
    """
    beta, asked, converged, lost = torch.zeros(p, dtype=torch.float64), 1, False, False
    now = first = ask(beta)
    inverse, blind = inverted(now.information)
    covariance = inverse

    def fell(tried: Score) -> bool:  # by more than rounding, which alone may lower it at the end
        return tried.log_likelihood < now.log_likelihood - 1e-10 * abs(now.log_likelihood)

    while asked < most:
        step = inverse @ now.gradient
        # where a coefficient grows for ever, the likelihood gains nothing in the end, and its steps get no shorter
        still = float(step.abs().max()) <= STILL * (1 + float(beta.abs().max()))
        if still and float(step @ now.gradient) < CLOSE:
            converged = not lost
            break
        tried, asked = ask(beta + step), asked + 1
        while asked < most and fell(tried):
            step = step / 2
            tried, asked = ask(beta + step), asked + 1
        if fell(tried):
            break
        beta, now = beta + step, tried
        inverse, unseen = inverted(now.information)
        # a coefficient may have grown until nothing is seen of it any more; the others go on, and it keeps the error that it had
        lost = lost or float(unseen.trace()) > float(blind.trace()) + 0.5
        covariance = covariance if lost else inverse
    return CoxFit(beta, covariance, blind, now.log_likelihood, first.log_likelihood, asked, converged)


def inverted(information: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of an information matrix.

    Args:
        information: I, ``[p, p]``.

    Returns:
        The inverse, zero in directions of which the records say nothing; and the projection onto these, ``[p, p]`` each.

    Raises:
        FedfillError: Where I is not finite.
    """
    if not bool(torch.isfinite(information).all()):
        raise FedfillError(
            "cox: found sums beyond what numbers hold; allowed: columns whose values lie nearer to each other"
        )
    scale = information.diagonal().clamp(min=0).sqrt()
    unit = torch.where(scale > 0, 1 / torch.where(scale > 0, scale, 1.0), 0.0)
    values, vectors = torch.linalg.eigh(information * unit[:, None] * unit[None, :])
    kept = values > SINGULAR * max(float(values.max()), 0.0)
    some = vectors[:, kept] / values[kept].sqrt()
    root: Tensor = unit[:, None] * some
    return root @ root.T, vectors[:, ~kept] @ vectors[:, ~kept].T


def breslow(sums: RiskSums, events: Tensor) -> Tensor:
    """The baseline hazard at each grid time, of a record whose covariates are all 0: d_k / S0_k, ``[G]``.

    Args:
        sums: At the coefficients.
        events: d, ``[G]``.

    Returns:
        0 where no event came.
    """
    there = events > 0
    return torch.where(there, events.double() / torch.where(there, sums.s0, 1.0), 0.0)


def hazard_ratio(beta: float, se: float, z: float) -> tuple[float, float, float]:
    """exp(beta) with its limits exp(beta - z se) and exp(beta + z se); infinite where they are beyond float64."""
    low, middle, high = (math.exp(min(b, 700.0)) for b in (beta - z * se, beta, beta + z * se))
    return middle, low, high
