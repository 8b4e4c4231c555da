"""Bounds from scores: printed tables to their digits, coverage and tightness by simulation, and what may not matter."""

import math

import numpy as np
import pytest
from scipy import special, stats

from fedfill.privacy import accountant, bounds
from fedfill.privacy.bounds import Rates, estimated_epsilon, gaussian_curve, normal_mu, normal_p_value, trade_off
from fedfill.privacy.one_run import Guesses, one_run_epsilon, one_run_mu, one_run_p_value, rejects

DELTA = 1e-5
IN, OUT = (2.1, 1.4, 3.0, 2.2, 1.8), (0.3, -0.5, 0.9, 0.1, -0.3)

STEINKE = [
    (1000, 1000, 600, 0, 0.2975), (1000, 1000, 600, 1e-5, 0.2972), (1000, 1000, 600, 1e-3, 0.2660),
    (1000, 1000, 520, 1e-5, 0.0), (1000, 200, 150, 1e-5, 0.8200), (1000, 100, 90, 0, 1.6308),
    (1000, 100, 90, 1e-5, 1.6261), (5000, 500, 450, 1e-5, 1.9414), (500, 100, 100, 0, 3.4930),
    (500, 100, 100, 1e-5, 3.4792), (1000, 1000, 1000, 1e-5, 5.7823),
]  # fmt: skip
GAUSSIAN = [
    (1000, 1000, 520, 0.0, 0.0), (1000, 1000, 600, 0.1638, 0.5835), (1000, 200, 150, 0.3395, 1.2969),
    (1000, 100, 90, 0.6025, 2.4564), (5000, 500, 450, 0.6715, 2.7761), (500, 100, 100, 1.3320, 6.1218),
]  # fmt: skip
RATES = [
    (310, 1000, 0.3397, 0.6647, 0.6646, 0.8266, 3.5159), (3085, 10_000, 0.3177, 0.7646, 0.7645, 0.9485, 4.1178),
    (0, 1000, 0.0037, 5.6006, 5.6006, 5.3598, 36.4895), (50, 100, 0.6017, 0, 0, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("m", "r", "c", "delta", "expected"), STEINKE)
def test_the_bound_of_one_run(m, r, c, delta, expected):
    assert one_run_epsilon(m, r, c, delta) == pytest.approx(expected, abs=6e-5)


def test_p_values_of_one_run():
    assert one_run_p_value(1000, 1000, 600, 0.2, 1e-5) == pytest.approx(0.0010232, abs=1e-7)
    assert one_run_p_value(1000, 1000, 600, 0.3, 1e-5) == pytest.approx(0.0545983, abs=1e-7)
    assert one_run_p_value(1000, 1000, 600, 0.3, 0) == pytest.approx(0.0542072, abs=1e-7)


@pytest.mark.parametrize("r", [5, 100, 1000])
def test_all_guesses_right_have_a_closed_form(r):
    t = 0.05 ** (1 / r)
    assert one_run_epsilon(2000, r, r, 0) == pytest.approx(math.log(t / (1 - t)), rel=1e-9)


def test_many_guesses_do_not_overflow():
    assert 0 < one_run_epsilon(200_000, 100_000, 60_000, 1e-6) < math.log(1.5)


@pytest.mark.parametrize(("m", "r", "c", "mu", "epsilon"), GAUSSIAN)
def test_the_gaussian_bound_of_one_run(m, r, c, mu, epsilon):
    found = one_run_mu(m, r, c)
    assert found == pytest.approx(mu, abs=6e-5)
    assert accountant.epsilon(found, DELTA) == pytest.approx(epsilon, abs=6e-5)
    assert accountant.epsilon(found, DELTA) >= one_run_epsilon(m, r, c, DELTA)


@pytest.mark.parametrize(
    "bound", [lambda c, r: one_run_epsilon(1000, r, c, DELTA), lambda c, r: one_run_mu(1000, r, c)]
)
def test_more_right_guesses_prove_more_and_wrong_ones_less(bound):
    by_right = [bound(c, 100) for c in range(50, 101, 5)]
    assert by_right == sorted(by_right)
    by_made = [bound(80, r) for r in range(80, 161, 10)]
    assert by_made == sorted(by_made, reverse=True)
    assert by_right[-1] > by_right[0]


def test_guesses_are_made_at_both_ends_and_a_fifth_of_all():
    scores = np.arange(20.0)
    coins = np.array([-1] * 10 + [1] * 10)
    assert Guesses.of(scores, coins) == Guesses(20, 4, 4)
    coins[19], coins[10] = -1, -1
    assert Guesses.of(scores, coins) == Guesses(20, 4, 3)
    assert Guesses.of(scores, coins, 19) == Guesses(20, 18, 17)  # and abstains on the middle


def test_the_order_of_canaries_does_not_matter():
    rng = np.random.default_rng(0)
    coins, scores = rng.choice([-1, 1], 400), rng.normal(size=400)
    place = rng.permutation(400)
    assert Guesses.of(scores, coins) == Guesses.of(scores[place], coins[place])
    ins, outs = rng.normal(1, 1, 200), rng.normal(size=200)
    assert normal_mu(ins, outs).bound == pytest.approx(normal_mu(ins[::-1], np.roll(outs, 7)).bound, rel=1e-12)


def test_ties_are_not_broken_by_the_coin():
    coins = np.array([1, -1] * 500)
    assert Guesses.of(np.zeros(1000), coins, 1000).right == 500


@pytest.mark.parametrize(("wrong", "n", "rate", "at_0", "at_delta", "mu", "through_mu"), RATES)
def test_the_bounds_of_rates(wrong, n, rate, at_0, at_delta, mu, through_mu):
    found = Rates(wrong, n, wrong, n)
    assert found.above(0.05) == pytest.approx((rate, rate), abs=6e-5)
    assert (found.epsilon(0), found.epsilon(DELTA)) == pytest.approx((at_0, at_delta), abs=6e-5)
    assert found.mu() == pytest.approx(mu, abs=6e-5)
    assert accountant.epsilon(found.mu(), DELTA) == pytest.approx(through_mu, abs=1e-4)


@pytest.mark.parametrize(("n", "most"), [(1000, 5.6006), (4000, 6.9883), (10_000, 7.9048)])
def test_what_repeats_could_find_at_the_most(n, most):
    assert Rates(0, n, 0, n).epsilon(DELTA) == pytest.approx(most, abs=6e-5)


def test_rates_are_counted_at_a_threshold():
    assert Rates.at(1.0, [0.5, 1.0, 2.0], [0.9, 1.0]) == Rates(1, 3, 1, 2)


def test_the_bound_of_normal_scores_by_hand():
    found = normal_mu(IN, OUT)
    assert found.distance == pytest.approx(3.5082, abs=6e-5)
    assert found.bound == pytest.approx(1.6858, abs=6e-5)
    assert found.sound
    assert normal_p_value(IN, OUT, found.bound) == pytest.approx(0.05, rel=1e-6)


def test_scores_that_are_not_normal_are_told():
    rng = np.random.default_rng(1)
    assert normal_mu(rng.normal(1, 1, 4000), rng.normal(size=4000)).sound
    assert not normal_mu(rng.normal(1, 1, 4000), rng.standard_cauchy(4000)).sound
    assert not normal_mu(rng.normal(1, 3, 4000), rng.normal(size=4000)).sound


def test_scores_without_any_noise_prove_that_there_is_none():
    found = normal_mu(np.ones(50), np.zeros(50))
    assert found.bound == math.inf
    assert normal_p_value(np.ones(50), np.zeros(50), 100.0) < 1e-100
    assert normal_mu(np.zeros(50), np.zeros(50)).bound == 0


@pytest.mark.parametrize("freedom", [250, 1000])
def test_the_noncentral_t_of_many_scores_is_close_to_the_exact_one(freedom):
    for t, shift in ((5, 3), (30, 28), (2, 0)):
        assert bounds._above(t, freedom, shift) == pytest.approx(stats.nct.sf(t, freedom, shift), rel=0.01)


@pytest.mark.parametrize(
    ("mean", "deviation", "expected"), [(1, 1, 4.3772), (1, 1.2, 8.8176), (1, 0.9, 7.3578), (0.5, 1, 1.9931)]
)
def test_the_estimate_for_clients(mean, deviation, expected):
    assert estimated_epsilon(mean, deviation, DELTA) == pytest.approx(expected, abs=6e-5)


def test_the_estimate_on_the_grid_meets_the_closed_form():
    assert estimated_epsilon(1.0, 1 + 1e-9, DELTA) == pytest.approx(4.3772, abs=6e-5)


def test_a_curve_from_an_accountant_is_the_gaussian_one():
    epsilons = np.linspace(0, 9, 200)
    curve = trade_off(epsilons, accountant.replaced_deltas(1.0, (), epsilons))
    exact = gaussian_curve(1.0)
    for x in (1e-4, 0.01, 0.1, 0.5, 0.9, 0.99):
        assert curve(x) <= exact(x) + 1e-12
        # a claim by pairs up to epsilon 9 says less of powers that only larger epsilons forbid
        assert curve(x) == pytest.approx(exact(x), rel=0.02, abs=1e-5)
    assert (curve(0.0), curve(1.0)) == (0.0, 1.0)


@pytest.mark.parametrize("sampled", [((1.0, 0.1, 50),), ((2.0, 0.5, 10), (1.0, 1.0, 1))])
def test_deltas_are_the_inverse_of_epsilons(sampled):
    for deltas, epsilon in (
        (accountant.replaced_deltas, accountant.replaced_epsilon),
        (accountant.added_deltas, accountant.added_epsilon),
    ):
        at = epsilon(0.3, sampled, DELTA)
        found = deltas(0.3, sampled, (0.0, at, 2 * at))
        assert found[1] == pytest.approx(DELTA, rel=1e-3)
        assert found[0] > found[1] > found[2] >= 0


def test_deltas_of_gaussian_noise_alone_are_exact():
    assert accountant.added_deltas(1.0, (), (0.0, 2.0)) == (accountant.delta(1.0, 0.0), accountant.delta(1.0, 2.0))


def test_a_replaced_record_has_twice_the_mu_of_an_added_one():
    both = [f(0.0, ((2.0, 1.0, 1),), (1.0,))[0] for f in (accountant.added_deltas, accountant.replaced_deltas)]
    assert both == pytest.approx([accountant.delta(0.5, 1.0), accountant.delta(1.0, 1.0)], rel=1e-2)


def test_the_claim_is_rejected_by_its_curve_as_by_its_mu():
    exact, (m, r, c) = gaussian_curve(0.6), (1000, 100, 90)  # mu_L = .6025
    epsilons = np.linspace(0, 12, 400)
    by_pairs = trade_off(epsilons, [accountant.delta(0.6, e) for e in epsilons])
    assert rejects(m, r, c, exact, 0.05)
    assert Guesses(m, r, c).p_value(gaussian_curve(one_run_mu(m, r, c))) == pytest.approx(0.05, rel=1e-6)
    assert Guesses(m, r, c).p_value(by_pairs) == pytest.approx(Guesses(m, r, c).p_value(exact), rel=0.1)
    assert not rejects(m, r, c, gaussian_curve(0.605), 0.05)


def test_p_values_of_rates_and_their_bound_agree():
    found = Rates(310, 1000, 310, 1000)
    assert found.p_value(gaussian_curve(found.mu())) == pytest.approx(0.05, rel=1e-3)
    assert found.p_value(gaussian_curve(0.5)) < 1e-4
    assert found.p_value(gaussian_curve(1.5)) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_bounds_on_repeats_hold_as_often_as_they_say(mu):
    rng, runs, n = np.random.default_rng(2), 10_000, 60
    ins, outs = rng.normal(mu, 1, (runs, n)), rng.normal(0, 1, (runs, n))
    t = (ins.mean(1) - outs.mean(1)) / np.sqrt((ins.var(1, ddof=1) + outs.var(1, ddof=1)) / n)
    # the bound is above mu exactly where t lies beyond this point
    point = stats.nct.isf(0.05, 2 * n - 2, mu / math.sqrt(2 / n))
    assert np.mean(t > point) == pytest.approx(0.05, abs=0.01)
    for k in np.argsort(abs(t - point))[:3]:
        assert (normal_mu(ins[k], outs[k]).bound > mu) == (t[k] > point)
    missed, alarms = (ins < mu / 2).sum(1), (outs >= mu / 2).sum(1)
    counts, times = np.unique(np.stack([missed, alarms]), axis=1, return_counts=True)
    wrong = sum(int(k) for (a, b), k in zip(counts.T, times, strict=True) if Rates(int(a), n, int(b), n).mu() > mu)
    assert wrong / runs <= 0.05


def test_false_rejections_of_one_run_are_rare():
    rng, m, r, wrong, runs = np.random.default_rng(3), 1000, 100, 0, 2000
    claim = gaussian_curve(1.0)
    rejected = {c: rejects(m, r, c, claim, 0.05) for c in range(r + 1)}
    for _ in range(runs):
        coins = rng.choice([-1, 1], m)
        wrong += rejected[Guesses.of(rng.normal(size=m) + 0.5 * coins, coins, r).right]
    assert wrong / runs <= 0.01


TIGHT = [(1000, 0.5, 0.495), (1000, 1.0, 0.566), (1000, 2.0, 0.583), (5000, 1.0, 0.591), (5000, 2.0, 0.631)]
# means of 400 simulations each, whose single ones deviate by .03 to .13


@pytest.mark.parametrize(("m", "mu", "ratio"), TIGHT)
def test_one_run_finds_what_it_should(m, mu, ratio):
    rng, found = np.random.default_rng(4), []
    for _ in range(120):
        coins = rng.choice([-1, 1], m)
        found.append(accountant.epsilon(Guesses.of(rng.normal(size=m) + mu / 2 * coins, coins).mu(), DELTA))
    assert np.mean(found) / accountant.epsilon(mu, DELTA) == pytest.approx(ratio, abs=0.03)


@pytest.mark.parametrize(
    ("n", "mu", "normal", "rates"), [(1000, 1, 0.91, 0.81), (4000, 0.5, 0.92, 0.83), (4000, 3, 0.98, 0.95)]
)
def test_repeats_find_what_they_should(n, mu, normal, rates):
    rng, by_normal, by_rates = np.random.default_rng(5), [], []
    for _ in range(60):
        ins, outs = rng.normal(mu, 1, n), rng.normal(0, 1, n)
        by_normal.append(accountant.epsilon(normal_mu(ins, outs).bound, DELTA))
        by_rates.append(accountant.epsilon(Rates.at(mu / 2, ins, outs).mu(), DELTA))
    true = accountant.epsilon(mu, DELTA)
    assert np.mean(by_normal) / true == pytest.approx(normal, abs=0.03)
    assert np.mean(by_rates) / true == pytest.approx(rates, abs=0.03)


def test_a_curve_is_never_above_its_exact_inverse():
    epsilons = np.linspace(0, 3, 50)
    curve = trade_off(epsilons, [accountant.delta(0.7, e) for e in epsilons])
    for y in np.linspace(0, 1, 101):
        assert curve(y) <= special.ndtr(special.ndtri(y) - 0.7) + 1e-12
