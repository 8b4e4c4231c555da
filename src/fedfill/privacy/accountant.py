"""What Gaussian noise buys: exact epsilon and delta, their composition, with and without sampling.

Everything is told by one number, mu: the l2 sensitivity of what is released, divided by the standard deviation of the
noise on it (the parameter of Gaussian differential privacy; Dong, Roth and Su 2022). Releases about the same records
add their mu squared, and one mu gives epsilon for every delta by the exact condition of Balle and Wang (2018), which
dp-accounting solves. The textbook bound ``std >= sensitivity * sqrt(2 ln(1.25 / delta)) / epsilon`` is not used: it is
proved for epsilon below 1 alone, and is loose there.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedfill.errors import FedfillError

_LITTLE_NOISE, _MANY_STEPS, _MANY_MECHANISMS = 0.1, 10**6, 10
_COARSEST_GRID = 100.0  # dp-accounting takes its exponential
_EXACT = (1e-6, 1e6)  # the range of mu in which the search for the exact epsilon keeps its digits


def gaussian_mu(sensitivity: float, std: float, copies: int = 1) -> float:
    """The mu of Gaussian noise on something of this sensitivity.

    Args:
        sensitivity: Largest l2 distance that one record can move the released vector, 0 or more; infinite where
            nothing bounds it.
        std: Standard deviation of the noise on each coordinate, 0 or more.
        copies: How often the same thing is released, each time with fresh noise, 1 or more. Where noisy copies are
            filtered, this is the number drawn and not the number kept.

    Returns:
        ``sqrt(copies) * sensitivity / std``; 0 where one record moves nothing, infinite without noise.

    Raises:
        FedfillError: Where `std` or `copies` is out of range.
        ValueError: Where `sensitivity` is negative or not a number.
    """
    if not 0 <= std < math.inf:
        raise FedfillError(f"the standard deviation of the noise is {std}; it must be a finite number of at least 0")
    if copies < 1:
        raise FedfillError(f"the number of noisy copies is {copies}; it must be at least 1")
    if not sensitivity >= 0:
        raise ValueError(f"a sensitivity is 0 or more, not {sensitivity}")
    if sensitivity == 0:
        return 0.0
    return math.sqrt(copies) * sensitivity / std if std > 0 else math.inf


def compose(mus: Iterable[float]) -> float:
    """The mu of several releases about the same records, each allowed to depend on those before it.

    Releases about disjoint records (say, of different classes, where the class of a record is fixed) don't add up: of
    those the largest counts alone.

    Args:
        mus: One mu for each release, 0 or more.

    Returns:
        The root of the sum of their squares.

    Raises:
        ValueError: Where a mu is negative or not a number.
    """
    return math.hypot(*(_checked_mu(mu) for mu in mus))


def epsilon(mu: float, delta: float) -> float:
    """The exact epsilon of a Gaussian mechanism at this delta.

    Args:
        mu: Sensitivity over standard deviation, 0 or more.
        delta: Between 0 and 1, both excluded.

    Returns:
        The smallest epsilon, 0 or more; infinite where `mu` is. For a mu below 1e-6 or above 1e6 an upper bound,
        which is off by less than 1e-4 in the one case and by less than a millionth of its value in the other.

    Raises:
        FedfillError: Where `delta` is out of range.
        ValueError: Where `mu` is negative or not a number.
    """
    _check_delta(delta)
    _checked_mu(mu)
    return _epsilon(mu, delta)


def delta(mu: float, epsilon: float) -> float:
    """The exact delta of a Gaussian mechanism at this epsilon, in closed form.

    With Phi the normal distribution function, ``Phi(mu/2 - epsilon/mu) - exp(epsilon) * Phi(-mu/2 - epsilon/mu)``.

    Args:
        mu: Sensitivity over standard deviation, 0 or more.
        epsilon: 0 or more.

    Returns:
        The smallest delta, 0..1; 1 where `mu` is infinite.

    Raises:
        ValueError: Where an argument is negative or not a number.
    """
    _checked_mu(mu)
    if not epsilon >= 0:
        raise ValueError(f"an epsilon is 0 or more, not {epsilon}")
    if mu == 0:
        return 0.0
    if mu == math.inf:
        return 1.0
    from scipy import special  # here and below: SciPy takes a tenth of the start of a program that has no such account

    near, far = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    # exp(epsilon) overflows and Phi(far) underflows; as near**2 / 2 = far**2 / 2 - epsilon, the scaled complementary
    # error function erfcx(x) = exp(x**2) erfc(x) takes up both
    density = math.exp(-near * near / 2) / 2
    tail = float(special.erfcx(-far / math.sqrt(2)))
    if near > 0:
        value = float(special.ndtr(near)) - density * tail
    else:
        value = density * (float(special.erfcx(-near / math.sqrt(2))) - tail)
    return min(max(value, 0.0), 1.0)


def std_for(sensitivity: float, epsilon: float, delta: float, copies: int = 1) -> float:
    """The smallest noise that keeps a promise.

    Args:
        sensitivity: Largest l2 distance that one record can move the released vector, 0 or more and finite.
        epsilon: What is promised, above 0.
        delta: Between 0 and 1, both excluded.
        copies: How often the same thing is released, each time with fresh noise, 1 or more.

    Returns:
        A standard deviation for each coordinate, at which `epsilon` of `gaussian_mu` is no more than what was promised.

    Raises:
        FedfillError: Where `epsilon`, `delta` or `copies` is out of range.
        ValueError: Where `sensitivity` is negative, infinite or not a number.
    """
    if not 0 < epsilon < math.inf:
        raise FedfillError(f"epsilon is {epsilon}; it must be a finite number above 0")
    _check_delta(delta)
    if copies < 1:
        raise FedfillError(f"the number of noisy copies is {copies}; it must be at least 1")
    if not 0 <= sensitivity < math.inf:
        raise ValueError(f"no noise is enough for a sensitivity of {sensitivity}")
    with np.errstate(divide="ignore"):  # the logarithm of a delta of 0, far from the root
        import dp_accounting  # takes a second, and most runs have no figure to compute

        multiplier = float(dp_accounting.get_sigma_gaussian(epsilon, delta, tol=1e-16)) * (1 + 1e-9)
    # the root is a hair too small by rounding, and more than that where epsilon is tiny
    while _epsilon(1 / multiplier, delta) > epsilon:
        multiplier *= 1.001
    return multiplier * sensitivity * math.sqrt(copies)


def sampled_epsilon(noise_multiplier: float, probability: float, rounds: int, delta: float) -> float:
    """Epsilon of a Gaussian mechanism on Poisson samples, round after round (privacy loss distributions of dp-accounting).

    Neighbours differ by one client, or one record, that is added or removed.

    Args:
        noise_multiplier: Standard deviation of the noise on the sum over what one client moves it at the most, above 0.
        probability: With which a client is in a round, in (0, 1].
        rounds: How many, at least 1.
        delta: Between 0 and 1, both excluded.

    Returns:
        An upper bound on epsilon, close to the exact value.

    Raises:
        FedfillError: Where `delta` is out of range.
    """
    return added_epsilon(0.0, ((noise_multiplier, probability, rounds),), delta)


@functools.lru_cache(maxsize=1024)
def sampled_noise(target: float, probability: float, steps: int, delta: float) -> float:
    """The least noise that keeps a promise about a Gaussian mechanism on Poisson samples; see `sampled_epsilon`.

    Args:
        target: The epsilon that is promised, above 0, where one record is added or removed.
        probability: With which a record is in a step, in (0, 1].
        steps: How many, at least 1.
        delta: Between 0 and 1, both excluded.

    Returns:
        A noise multiplier, hardly above the least.

    Raises:
        FedfillError: Where `target` or `delta` is out of range.
    """
    if not 0 < target < math.inf:
        raise FedfillError(f"target_epsilon: found {target}; allowed: a finite number above 0")
    _check_delta(delta)
    logging.getLogger("fedfill").info("searching the least noise for epsilon %g", target)
    low, high = 0.0, 1.0
    while sampled_epsilon(high, probability, steps, delta) > target:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if sampled_epsilon(middle, probability, steps, delta) > target else (low, middle)
    return high


def replaced_epsilon(mu: float, sampled: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Epsilon of everything that was released about one record, where it is replaced by another.

    Args:
        mu: Of all Gaussian mechanisms together, for a replaced record; see `compose`.
        sampled: Gaussian mechanisms on Poisson samples: noise multiplier with respect to the largest norm of one
            record's share, probability of a record, steps.
        delta: Between 0 and 1, both excluded.

    Returns:
        An upper bound on epsilon, close to the exact value.

    Raises:
        FedfillError: Where `delta` is out of range.
    """
    return _whole_epsilon(mu, sampled, delta, 2.0)


def added_epsilon(mu: float, sampled: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Epsilon of everything that was released about one record, where it is added or removed.

    Args:
        mu: Of all Gaussian mechanisms together, for a record added or removed.
        sampled: As in `replaced_epsilon`. Probabilities and steps may not depend on the number of records.
        delta: Between 0 and 1, both excluded.

    Returns:
        An upper bound on epsilon, close to the exact value.

    Raises:
        FedfillError: Where `delta` is out of range.
    """
    return _whole_epsilon(mu, sampled, delta, 1.0)


def replaced_deltas(
    mu: float, sampled: tuple[tuple[float, float, int], ...], epsilons: Sequence[float]
) -> tuple[float, ...]:
    """Delta at given epsilons of everything that was released about one record, where it is replaced by another.

    Together these pairs are the trade-off curve that an audit tests (`fedfill.privacy.bounds.trade_off`).

    Args:
        mu: As in `replaced_epsilon`.
        sampled: As in `replaced_epsilon`.
        epsilons: At which, 0 or more each.

    Returns:
        Upper bounds on delta, 0..1, close to the exact values, one for each epsilon.
    """
    return _whole_deltas(mu, sampled, tuple(epsilons), 2.0)


def added_deltas(
    mu: float, sampled: tuple[tuple[float, float, int], ...], epsilons: Sequence[float]
) -> tuple[float, ...]:
    """As `replaced_deltas`, for one record, or one client, that is added or removed.

    Args:
        mu: As in `added_epsilon`.
        sampled: As in `added_epsilon`.
        epsilons: At which, 0 or more each.

    Returns:
        Upper bounds on delta, 0..1, close to the exact values, one for each epsilon.
    """
    return _whole_deltas(mu, sampled, tuple(epsilons), 1.0)


@functools.lru_cache(maxsize=4096)
def _whole_epsilon(mu: float, sampled: tuple[tuple[float, float, int], ...], delta: float, norms: float) -> float:
    """For a record that moves a sum by so many norms: one where it is added or removed, two where it is replaced."""
    found = _losses(mu, sampled, delta, norms)
    return epsilon(found, delta) if isinstance(found, float) else float(found.get_epsilon(delta))


@functools.lru_cache(maxsize=64)
def _whole_deltas(
    mu: float, sampled: tuple[tuple[float, float, int], ...], epsilons: tuple[float, ...], norms: float
) -> tuple[float, ...]:
    found = _losses(mu, sampled, 1e-5, norms)
    one = functools.partial(delta, found) if isinstance(found, float) else found.get_delta
    return tuple(min(float(one(at)), 1.0) for at in epsilons)


def _losses(mu: float, sampled: tuple[tuple[float, float, int], ...], delta: float, norms: float) -> Any:
    """The accountant of everything together, or a mu where all of it is as Gaussian noise, or is charged as if it were."""
    # so little noise that the distributions outgrow memory: as if every record were in every step
    few = [(noise, steps) for noise, _, steps in sampled if noise < _LITTLE_NOISE]
    mu = math.hypot(mu, *(gaussian_mu(norms, noise, steps) for noise, steps in few))
    sampled = tuple(item for item in sampled if item[0] >= _LITTLE_NOISE)
    if not sampled or not mu < _EXACT[1]:
        return mu
    _check_delta(delta)
    interval = _interval(mu, sampled, delta)
    many = sum(steps for _, _, steps in sampled) > _MANY_STEPS or len(sampled) > _MANY_MECHANISMS
    if many or interval > _COARSEST_GRID:
        # distributions would take for ever, and may come of what a host says of itself: without sampling here too
        return math.hypot(mu, *(gaussian_mu(norms, noise, steps) for noise, _, steps in sampled))
    import dp_accounting
    from dp_accounting import pld

    relations = dp_accounting.NeighboringRelation
    relation = relations.ADD_OR_REMOVE_ONE if norms == 1 else relations.REPLACE_ONE
    accountant = pld.PLDAccountant(relation, value_discretization_interval=interval)
    for noise, probability, steps in sampled:
        accountant.compose(_sampled_event(noise, probability), steps)
    if mu:
        accountant.compose(dp_accounting.GaussianDpEvent(norms / mu))
    return accountant


def _interval(mu: float, sampled: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """The grid on which privacy losses are counted, which rounds epsilon up by a hundredth at the most.

    As fine as a tenth of a step's typical loss: on a coarser one the rounding of each step adds up, to twice epsilon where samples
    are rare and steps many. And no finer than what epsilon needs, or than a 200,000th of the range of a step's losses, or the
    distributions outgrow memory where there is little noise.
    """
    spread = {item: item[1] * math.sqrt(math.expm1(min(item[0] ** -2, 60.0))) for item in sampled}
    fine = min(min(_coarsest(item[0]), max(_range(item[0]) / 2e5, 0.1 * loss)) for item, loss in spread.items())
    # a sum of many small losses is as Gaussian's: a guess at epsilon, which settles no more than the grid
    total = math.hypot(
        mu,
        *(min(loss * math.sqrt(steps), gaussian_mu(1.0, noise, steps)) for (noise, _, steps), loss in spread.items()),
    )
    return max(fine, epsilon(total, delta) / 4e6)


def _range(noise: float) -> float:
    return 0.5 / noise**2 + 6 / noise


def _coarsest(noise: float) -> float:
    return 1e-3 if noise >= 0.5 else 1e-2


def _sampled_event(noise_multiplier: float, probability: float) -> Any:
    import dp_accounting

    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    return event if probability >= 1 else dp_accounting.PoissonSampledDpEvent(probability, event)


def _checked_mu(mu: float) -> float:
    if not mu >= 0:
        raise ValueError(f"a mu is 0 or more, not {mu}")
    return mu


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise FedfillError(f"delta is {delta}; it must lie between 0 and 1, both excluded (1e-5 is a usual choice)")


def _epsilon(mu: float, delta: float) -> float:
    # the total variation distance: where delta is no smaller, it covers everything
    if math.erf(mu / math.sqrt(8)) <= delta:
        return 0.0
    if not _EXACT[0] <= mu <= _EXACT[1]:
        from scipy import special

        # without the second term of the condition (see `delta`), which can only be too much
        return mu * (mu / 2 - float(special.ndtri(delta)))
    with np.errstate(divide="ignore"):  # the logarithm of a delta of 0, far from the root
        import dp_accounting  # as above

        return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta))
