"""The accountant against printed figures, closed forms, dp-accounting's other accountant, and bad input."""

import math
from collections.abc import Callable

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import refused

from fedfill.privacy import accountant
from fedfill.privacy.accountant import compose, gaussian_mu, std_for
from fedfill.privacy.sensitivity import label_change_sensitivity, mean_sensitivity

DELTA = 1e-5
COUNTS = (10, 50, 100, 500)

# latents in 0..1, exact Gaussian, delta 1e-5: epsilon of one copy | alpha copies | 200 alpha candidates, for each count
TABLE = {
    # (latent_dim, alpha, std)
    (32, 50, 3.0): [
        (".68", "6.1", "257"),
        (".12", ".99", "22.5"),
        (".05", ".47", "9.3"),
        (".01", ".08", "1.5"),
    ],
    (128, 200, 4.0): [
        ("1.06", "24.4", "1840"),
        (".18", "3.39", "111"),
        (".09", "1.55", "39.4"),
        (".01", ".27", "5.1"),
    ],
    (128, 50, 4.0): [
        ("1.06", "10.0", "520"),
        (".18", "1.55", "39"),
        (".09", ".73", "15.5"),
        (".01", ".13", "2.3"),
    ],
}
CELLS = [
    (latent_dim, count, std, copies, figure)
    for (latent_dim, alpha, std), rows in TABLE.items()
    for count, row in zip(COUNTS, rows, strict=True)
    for copies, figure in zip((1, alpha, 200 * alpha), row, strict=True)
]


def printed(value: float, like: str) -> str:
    """The value with as many decimals as the printed figure has, and no leading zero."""
    decimals = len(like.partition(".")[2])
    text = f"{value:.{decimals}f}"
    return text[1:] if text.startswith("0.") else text


@pytest.mark.parametrize(("latent_dim", "count", "std", "copies", "figure"), CELLS)
def test_table_of_noisy_means(latent_dim: int, count: int, std: float, copies: int, figure: str) -> None:
    mu = gaussian_mu(mean_sensitivity(latent_dim, count), std, copies)
    assert printed(accountant.epsilon(mu, DELTA), figure) == figure


@pytest.mark.parametrize(
    ("latent_dim", "count", "std", "copies", "digits"),
    [(32, 100, 3, 1, 0.054948499125), (128, 100, 4, 200, 1.554981691532), (128, 50, 4, 50, 1.554981691532)],
)
def test_cells_close_to_a_rounding_edge(latent_dim: int, count: int, std: float, copies: int, digits: float) -> None:
    # solved with 40 decimal digits: a coarse numerical accountant rounds these three up
    mu = gaussian_mu(mean_sensitivity(latent_dim, count), std, copies)
    assert accountant.epsilon(mu, DELTA) == pytest.approx(digits, rel=1e-9)


@pytest.mark.parametrize(
    ("latent_dim", "sigma", "alpha", "one", "all_copies"),
    [(32, 3.0, 50, "9.3", "145"), (128, 4.0, 200, "15.5", "970"), (128, 4.0, 50, "15.5", "284")],
)
@pytest.mark.parametrize("count", [10, 500])
def test_noise_scaled_by_the_papers_sensitivity(
    latent_dim: int, sigma: float, alpha: int, one: str, all_copies: str, count: int
) -> None:
    # the paper's S_f is 1 / m, that of one coordinate; the number of records then cancels out
    std = sigma / count
    for copies, figure in ((1, one), (alpha, all_copies)):
        mu = gaussian_mu(mean_sensitivity(latent_dim, count), std, copies)
        assert printed(accountant.epsilon(mu, DELTA), figure) == figure


def test_the_papers_example() -> None:
    textbook = math.sqrt(2 * math.log(1.25 / 0.01)) / 0.5
    assert textbook == pytest.approx(6.215, abs=5e-4)
    assert std_for(1.0, 0.5, 0.01) == pytest.approx(3.147, abs=5e-4)
    assert accountant.delta(gaussian_mu(1.0, 3.9), 0.5) == pytest.approx(0.0032, abs=5e-5)
    # 128 coordinates in place of one
    mu = gaussian_mu(mean_sensitivity(128, 100), 3.9 / 100)
    assert mu == pytest.approx(2.90, abs=5e-3)
    assert accountant.epsilon(mu, 0.01) == pytest.approx(10.2, abs=0.05)


def test_one_noisy_mean_for_each_class() -> None:
    assert accountant.epsilon(gaussian_mu(mean_sensitivity(128, 50), 1.0), DELTA) == pytest.approx(0.83, abs=5e-3)
    assert accountant.epsilon(gaussian_mu(mean_sensitivity(128, 100), 1.0), DELTA) == pytest.approx(0.39, abs=5e-3)


def test_noisy_sum() -> None:
    # centred latents in -1/2..1/2 have a length of at most sqrt(l) / 2, by which adding a record moves the sum
    mu = gaussian_mu(math.sqrt(128) / 2, 20.0)
    assert mu == pytest.approx(0.283, abs=5e-4)
    assert accountant.epsilon(mu, DELTA) == pytest.approx(1.06, abs=5e-3)
    # a noisy count about the same record costs on top
    assert compose([mu, gaussian_mu(1.0, 5.0)]) == pytest.approx(math.sqrt(0.08 + 0.04))


def test_mu_by_hand() -> None:
    assert gaussian_mu(2.0, 4.0) == 0.5
    assert gaussian_mu(2.0, 4.0, copies=9) == 1.5
    assert compose([3.0, 4.0]) == 5.0
    assert compose([0.5] * 9) == pytest.approx(gaussian_mu(2.0, 4.0, copies=9))
    assert compose([]) == 0.0
    # mu 1, epsilon 0: the total variation distance of two unit normals one apart, 2 Phi(1/2) - 1
    assert accountant.delta(1.0, 0.0) == pytest.approx(0.3829249225480262, rel=1e-12)
    # mu 1, epsilon 1: Phi(-1/2) - e Phi(-3/2)
    assert accountant.delta(1.0, 1.0) == pytest.approx(0.308537538726 - math.e * 0.066807201269, rel=1e-9)


def test_sensitivities_by_hand() -> None:
    assert mean_sensitivity(16, 10) == 0.4
    assert mean_sensitivity(16, 10, "clip", 3.0) == pytest.approx(0.6)
    assert mean_sensitivity(16, 10, "none") == math.inf
    assert label_change_sensitivity(16, 3, 4) == pytest.approx(4 * 5 / 12)
    assert label_change_sensitivity(16, 4, 3) == label_change_sensitivity(16, 3, 4)
    assert label_change_sensitivity(9, 3, 4, "clip", 1.0) == pytest.approx(2 * 5 / 12)


@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_no_record_moves_a_mean_further(latent_dim: int, count: int, other: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    # corners of the cube, where the distances are largest
    mine = draw.integers(0, 2, (count, latent_dim)).astype(float)
    theirs = draw.integers(0, 2, (other, latent_dim)).astype(float)
    changed = mine.copy()
    changed[0] = 1 - changed[0]
    moved = np.linalg.norm(mine.mean(0) - changed.mean(0))
    assert moved == pytest.approx(mean_sensitivity(latent_dim, count))
    if count > 1:
        gained = np.concatenate([theirs, changed[:1]])
        both = math.hypot(
            float(np.linalg.norm(mine.mean(0) - mine[1:].mean(0))),
            float(np.linalg.norm(theirs.mean(0) - gained.mean(0))),
        )
        assert both <= label_change_sensitivity(latent_dim, count, other) + 1e-12


@given(st.floats(1e-4, 1e4), st.floats(1e-12, 0.9))
def test_epsilon_and_delta_are_inverse(mu: float, delta: float) -> None:
    value = accountant.epsilon(mu, delta)
    if value == 0:
        assert accountant.delta(mu, 0.0) <= delta * (1 + 1e-9)
    else:
        assert accountant.delta(mu, value) == pytest.approx(delta, rel=1e-5)


@given(st.floats(1e-4, 1e4), st.floats(1e-12, 0.9), st.floats(1.001, 10))
def test_epsilon_grows_with_mu_and_shrinks_with_delta(mu: float, delta: float, factor: float) -> None:
    value = accountant.epsilon(mu, delta)
    assert accountant.epsilon(mu * factor, delta) >= value
    assert accountant.epsilon(mu, delta / factor) >= value


@given(st.floats(1e-6, 1e4), st.floats(1e-12, 0.9), st.integers(1, 1000), st.floats(1e-3, 1e3))
def test_noise_keeps_the_promise_and_is_not_wasted(
    promised: float, delta: float, copies: int, sensitivity: float
) -> None:
    std = std_for(sensitivity, promised, delta, copies)
    spent = accountant.epsilon(gaussian_mu(sensitivity, std, copies), delta)
    assert spent <= promised * (1 + 1e-12)
    if promised > 1e-3 and delta > 1e-9:
        less = accountant.epsilon(gaussian_mu(sensitivity, std * 0.999, copies), delta)
        assert less > promised


@given(st.lists(st.floats(0, 100), max_size=20), st.lists(st.floats(0, 100), max_size=20))
def test_composition_adds_squares_in_any_grouping(some: list[float], others: list[float]) -> None:
    together = compose(some + others)
    assert together == pytest.approx(compose([compose(some), compose(others)]))
    assert together**2 == pytest.approx(sum(mu * mu for mu in some + others))
    assert together == pytest.approx(compose(others + some))


def test_dp_accountings_privacy_loss_distributions_agree() -> None:
    mus = [0.01 + 0.0005 * index for index in range(150)]
    other = pld.PLDAccountant(value_discretization_interval=1e-4)
    for mu in mus:
        other.compose(dp_accounting.GaussianDpEvent(1 / mu))
    ours = accountant.epsilon(compose(mus), DELTA)
    assert ours > 1  # a figure that composition decides: the largest of the 150 alone costs much less
    assert accountant.epsilon(max(mus), DELTA) < 0.5
    # the other one rounds each of the 150 privacy losses up to a grid
    assert ours <= other.get_epsilon(DELTA) <= ours * 1.02


def test_extremes_do_not_overflow() -> None:
    assert gaussian_mu(1.0, 0.0) == math.inf
    assert gaussian_mu(math.inf, 3.0) == math.inf
    assert gaussian_mu(0.0, 0.0) == 0.0
    assert compose([1.0, math.inf]) == math.inf
    assert accountant.epsilon(math.inf, DELTA) == math.inf
    assert accountant.epsilon(0.0, DELTA) == 0.0
    assert accountant.epsilon(1e-9, DELTA) == 0.0
    assert accountant.epsilon(1e8, DELTA) == pytest.approx(5e15, rel=1e-6)
    assert accountant.epsilon(1.000001e6, DELTA) == pytest.approx(accountant.epsilon(1e6, DELTA), rel=1e-5)
    assert accountant.epsilon(1e-7, 1e-12) < 1e-6
    assert accountant.delta(1e-7, accountant.epsilon(1e-7, 1e-12)) <= 1e-12
    assert accountant.delta(math.inf, 5.0) == 1.0
    assert accountant.delta(0.0, 0.0) == 0.0
    assert accountant.delta(1e-300, 1e300) == 0.0
    assert accountant.delta(1e300, 1.0) == 1.0
    # exp(800) is no double; Phi(0) less the first term of the tail's expansion, 1 / (40 sqrt(2 pi))
    assert accountant.delta(40.0, 800.0) == pytest.approx(0.5 - 1 / (40 * math.sqrt(2 * math.pi)), abs=1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("delta", [1e-300, 1e-15, 1e-5, 0.5, 0.999])
def test_no_warning_at_any_scale(delta: float) -> None:
    for exponent in range(-20, 21):
        assert 0 <= accountant.epsilon(10.0**exponent, delta) < math.inf


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_wrong_delta_is_one_sentence(delta: float) -> None:
    with refused("delta", delta):
        accountant.epsilon(1.0, delta)
    with refused("delta", delta):
        std_for(1.0, 1.0, delta)


def test_wrong_settings_are_one_sentence() -> None:
    with refused("the standard deviation of the noise", -1.0):
        gaussian_mu(1.0, -1.0)
    with refused("the standard deviation of the noise", math.nan):
        gaussian_mu(1.0, math.nan)
    with refused("the number of noisy copies", 0):
        gaussian_mu(1.0, 1.0, 0)
    with refused("the number of noisy copies", 0):
        std_for(1.0, 1.0, DELTA, 0)
    for promised in (0.0, -1.0, math.inf, math.nan):
        with refused("epsilon", promised):
            std_for(1.0, promised, DELTA)
    with refused("the bound of the latent codes", "'sigmod'", "'sigmoid'"):
        mean_sensitivity(8, 8, "sigmod")
    for norm in (None, 0.0, -1.0, math.inf):
        with refused("the norm to clip latent codes to", norm):
            mean_sensitivity(8, 8, "clip", norm)


@pytest.mark.parametrize("wrong", [-1.0, math.nan])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda mu: compose([1.0, mu]), ()),
        (accountant.epsilon, (DELTA,)),
        (accountant.delta, (1.0,)),
        (gaussian_mu, (1.0,)),
        (std_for, (1.0, DELTA)),
        (lambda value: accountant.delta(1.0, value), ()),
    ],
)
def test_wrong_arguments_of_a_program(
    function: Callable[..., float], arguments: tuple[float, ...], wrong: float
) -> None:
    with pytest.raises(ValueError, match=str(wrong)):
        function(wrong, *arguments)


def test_more_wrong_arguments_of_a_program() -> None:
    with pytest.raises(ValueError, match="inf"):
        std_for(math.inf, 1.0, DELTA)
    for latent_dim, count in ((0, 5), (5, 0)):
        with pytest.raises(ValueError, match=f"{latent_dim} and {count}"):
            mean_sensitivity(latent_dim, count)


# Poisson samples


@pytest.mark.parametrize(("target", "probability", "steps"), [(5.0, 0.1, 40), (1.0, 0.02, 30), (8.0, 1.0, 10)])
def test_sampled_noise_keeps_its_promise_and_a_hair_less_breaks_it(
    target: float, probability: float, steps: int
) -> None:
    noise = accountant.sampled_noise(target, probability, steps, DELTA)
    assert accountant.sampled_epsilon(noise, probability, steps, DELTA) <= target
    assert accountant.sampled_epsilon(noise * 0.998, probability, steps, DELTA) > target


def test_sampled_noise_of_every_record_in_every_step_is_that_of_a_gaussian() -> None:
    noise = accountant.sampled_noise(3.0, 1.0, 9, DELTA)
    assert noise == pytest.approx(std_for(1.0, 3.0, DELTA, copies=9), rel=2e-3)


def test_more_steps_and_larger_samples_cost_more_and_need_more_noise() -> None:
    by_steps = [accountant.replaced_epsilon(0.0, ((1.0, 0.05, n),), DELTA) for n in (1, 10, 40)]
    by_share = [accountant.replaced_epsilon(0.0, ((1.0, q, 10),), DELTA) for q in (0.01, 0.1, 1.0)]
    by_mu = [accountant.replaced_epsilon(mu, ((1.0, 0.05, 10),), DELTA) for mu in (0.0, 0.3, 1.0)]
    for figures in (by_steps, by_share, by_mu):
        assert figures == sorted(figures)
        assert figures[0] < figures[-1]


@pytest.mark.parametrize(
    ("mu", "sampled"),
    [
        (0.0, ((5.0, 1e-6, 10**12),)),
        (0.0, ((0.01, 1e-9, 10**9),)),
        (0.0, ((0.01, 0.5, 10**6),)),
        (1e5, ((1.0, 0.01, 10),)),
        (1.0, ((1e9, 1e-300, 10**9), (1e-300, 1.0, 1))),
        (0.0, tuple((1.0 + i, 0.5, 1) for i in range(101))),
    ],
)
def test_what_is_too_much_for_distributions_is_charged_without_sampling(
    mu: float, sampled: tuple[tuple[float, float, int], ...]
) -> None:
    bound = accountant.epsilon(compose([mu, *(gaussian_mu(2.0, noise, n) for noise, _, n in sampled)]), DELTA)
    assert accountant.replaced_epsilon(mu, sampled, DELTA) == pytest.approx(bound)


def test_a_replaced_record_costs_more_than_one_that_is_removed_and_no_more_than_two() -> None:
    """Replacing is removing and adding: with every record in every step mu is doubled, and sampling only helps."""
    one = accountant.sampled_epsilon(1.0, 0.05, 20, DELTA)
    replaced = accountant.replaced_epsilon(0.0, ((1.0, 0.05, 20),), DELTA)
    assert one < replaced < accountant.epsilon(gaussian_mu(2.0, 1.0, 20), DELTA)
    everywhere = accountant.replaced_epsilon(0.0, ((2.0, 1.0, 4),), DELTA)
    assert everywhere == pytest.approx(accountant.epsilon(gaussian_mu(2.0, 2.0, 4), DELTA), rel=2e-3)


def test_mixed_mechanisms_without_sampling_are_one_gaussian() -> None:
    mixed = accountant.replaced_epsilon(0.7, ((2.0, 1.0, 4),), DELTA)
    assert mixed == pytest.approx(accountant.epsilon(compose([0.7, gaussian_mu(2.0, 2.0, 4)]), DELTA), rel=2e-3)
    assert accountant.replaced_epsilon(0.7, (), DELTA) == accountant.epsilon(0.7, DELTA)


@pytest.mark.parametrize("noise", [0.0001, 0.09])
def test_little_noise_has_the_bound_without_sampling(noise: float) -> None:
    bound = accountant.epsilon(gaussian_mu(2.0, noise, 30), DELTA)
    assert accountant.replaced_epsilon(0.0, ((noise, 0.1, 30),), DELTA) == bound
    assert accountant.sampled_epsilon(noise, 0.1, 30, DELTA) == accountant.epsilon(gaussian_mu(1.0, noise, 30), DELTA)
    # with another mechanism beside it
    mu = compose([gaussian_mu(2.0, noise, 30), 0.5])
    assert accountant.replaced_epsilon(0.5, ((noise, 0.1, 30),), DELTA) == accountant.epsilon(mu, DELTA)


@pytest.mark.parametrize(
    ("noise", "probability", "steps", "expected"),
    [
        (5.0, 1e-3, 1_000_000, 0.734),
        (2.336, 64 / 60000, 180_000, 0.739),
        (0.14, 64 / 6000, 94, 171.7),
        (5.0, 1e-4, 1_000_000, 0.0594),
    ],
)
def test_rare_samples_and_little_noise_are_not_rounded_up(
    noise: float, probability: float, steps: int, expected: float
) -> None:
    """Beside the figures of grids three to fifty times as fine; on one of .001 the first two are 1.55 and 1.00."""
    assert accountant.sampled_epsilon(noise, probability, steps, DELTA) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_a_wrong_target_is_one_sentence(target: float) -> None:
    with refused("target_epsilon"):
        accountant.sampled_noise(target, 0.1, 10, DELTA)
    with refused("delta", 0.0):
        accountant.sampled_noise(1.0, 0.1, 10, 0.0)


# Everything about a record that is added or removed


def test_a_record_added_costs_what_papers_tell() -> None:
    for noise, share, steps in ((1.1, 0.05, 50), (0.7, 0.2, 5), (2.0, 1.0, 4)):
        once = accountant.added_epsilon(0.0, ((noise, share, steps),), DELTA)
        assert once == pytest.approx(accountant.sampled_epsilon(noise, share, steps, DELTA), rel=1e-9)
        assert once < accountant.replaced_epsilon(0.0, ((noise, share, steps),), DELTA)
    # a share of 1 is no sampling, where mus add their squares
    mixed = accountant.added_epsilon(0.7, ((2.0, 1.0, 4),), DELTA)
    assert mixed == pytest.approx(accountant.epsilon(math.hypot(0.7, 1.0), DELTA), rel=0.02)
    assert accountant.added_epsilon(0.7, (), DELTA) == accountant.epsilon(0.7, DELTA)


def test_a_record_added_among_little_noise_or_many_steps_is_in_every_step() -> None:
    for noise, steps in ((0.05, 30), (1.0, 2 * 10**6)):
        bound = accountant.epsilon(math.hypot(0.5, accountant.gaussian_mu(1.0, noise, steps)), DELTA)
        assert accountant.added_epsilon(0.5, ((noise, 0.1, steps),), DELTA) == bound
