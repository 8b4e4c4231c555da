"""Cox regression from summed risk sets; statsmodels is the referee."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from statsmodels.duration.hazard_regression import PHReg
from tests.statistics.survival_world import EVENTS, GRID, SITE, TIMES, X, drawn
from torch import Tensor

from fedfill.data.survival import cells
from fedfill.errors import FedfillError
from fedfill.statistics.cox import CoxFit, RiskSums, Score, breslow, hazard_ratio, newton, risk_sums, score, score_of


def fitted(x: Tensor, found: Tensor, size: int, strata: Tensor | None = None, most: int = 30) -> CoxFit:
    parts = [torch.ones(len(x), dtype=torch.bool)] if strata is None else [strata == s for s in strata.unique()]

    def ask(beta: Tensor) -> Score:
        scores = [score_of(x[part], found[part], size, beta) for part in parts]
        return sum(scores[1:], scores[0])

    return newton(ask, x.shape[1], most)


def test_a_fit_worked_by_hand() -> None:
    found, x = torch.from_numpy(cells(TIMES, EVENTS, GRID)), torch.from_numpy(X)[:, None]
    at_zero = score_of(x, found, len(GRID), torch.zeros(1))
    assert float(at_zero.gradient) == pytest.approx(1.5556, abs=5e-5)
    assert float(at_zero.information) == pytest.approx(1.7469, abs=5e-5)
    assert at_zero.log_likelihood == pytest.approx(-12.1244, abs=5e-5)
    fit = fitted(x, found, len(GRID))
    assert (float(fit.beta), float(fit.se)) == (pytest.approx(0.9494, abs=5e-5), pytest.approx(0.8372, abs=5e-5))
    assert (fit.log_likelihood, fit.null_log_likelihood) == (
        pytest.approx(-11.4107, abs=5e-5),
        pytest.approx(-12.1244, abs=5e-5),
    )
    assert fit.converged
    assert fit.asked <= 6


@pytest.mark.parametrize("stratified", [False, True])
def test_the_fit_is_that_of_statsmodels(stratified: bool) -> None:
    times, events, x = drawn(400, 4, seed=2)
    grid = np.unique(times[events])
    found = torch.from_numpy(cells(times, events, grid))
    site = np.random.default_rng(4).integers(0, 5, 400)
    own = fitted(torch.from_numpy(x), found, len(grid), torch.from_numpy(site) if stratified else None)
    known = PHReg(times, x, status=events.astype(int), ties="breslow", strata=site if stratified else None).fit(
        tol=1e-12
    )
    assert own.beta.numpy() == pytest.approx(known.params, abs=1e-8)
    assert own.se.numpy() == pytest.approx(known.bse, abs=1e-8)
    assert own.log_likelihood == pytest.approx(known.llf, abs=1e-8)


def test_sums_of_sites_are_those_of_the_pooled_table() -> None:
    found, x = torch.from_numpy(cells(TIMES, EVENTS, GRID)), torch.from_numpy(X)[:, None]
    beta = torch.tensor([0.3], dtype=torch.float64)
    parts = [risk_sums(x[site == SITE], found[site == SITE], len(GRID), beta) for site in (1, 2)]
    whole = risk_sums(x, found, len(GRID), beta)
    for name in ("s0", "s1", "s2"):
        assert torch.allclose(sum(getattr(part, name) for part in parts), getattr(whole, name), rtol=1e-14)
    assert whole.s0.tolist()[-1] == 1.0


def test_risk_sums_are_those_of_the_records_at_risk() -> None:
    times, events, x = drawn(60, 3, seed=8)
    grid = [3.0, 10.0, 20.0]
    found, beta = cells(times, events, grid), np.array([0.2, -0.4, 0.1])
    sums = risk_sums(torch.from_numpy(x), torch.from_numpy(found), 3, torch.from_numpy(beta))
    for k, end in enumerate(grid):
        there = np.where(events, times > ([0, *grid][k]), times >= end)
        w = np.exp(x[there] @ beta)
        assert float(sums.s0[k]) == pytest.approx(w.sum())
        assert sums.s1[k].numpy() == pytest.approx(w @ x[there])
        outer = (w[:, None, None] * x[there][:, :, None] * x[there][:, None, :]).sum(0)
        assert sums.s2[k].numpy() == pytest.approx(outer[np.triu_indices(3)])


def test_the_gradient_is_that_of_the_likelihood() -> None:
    times, events, x = drawn(80, 3, seed=6)
    found, inputs = torch.from_numpy(cells(times, events, [5.0, 10.0, 30.0])), torch.from_numpy(x)
    beta = torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64)

    def gradient(at: Tensor) -> Tensor:
        return score_of(inputs, found, 3, at).gradient

    here, step = score_of(inputs, found, 3, beta), 1e-5
    for i, e in enumerate(torch.eye(3, dtype=torch.float64)):
        up, down = (score_of(inputs, found, 3, beta + sign * step * e).log_likelihood for sign in (1, -1))
        assert (up - down) / (2 * step) == pytest.approx(float(here.gradient[i]), rel=1e-5)
        second = (gradient(beta - step * e) - gradient(beta + step * e)) / (2 * step)
        assert torch.allclose(second, here.information[i], rtol=1e-5)


def test_what_the_records_say_nothing_of_stays_zero_and_the_rest_is_as_without_it() -> None:
    """A column that is constant, and one that is there twice."""
    times, events, x = drawn(300, 2, seed=3)
    grid = np.unique(times[events])
    found, own = torch.from_numpy(cells(times, events, grid)), torch.from_numpy(x)
    alone = fitted(own, found, len(grid))
    wide = fitted(torch.cat([own, torch.ones(300, 1), own[:, :1]], 1), found, len(grid))
    assert wide.known.tolist() == [False, True, False, False]
    assert [wide.mixed_with(k) for k in range(4)] == [[3], [], [], [0]]
    assert float(wide.beta[2]) == 0
    assert float(wide.beta[0] + wide.beta[3]) == pytest.approx(float(alone.beta[0]), abs=1e-8)
    assert float(wide.beta[1]) == pytest.approx(float(alone.beta[1]), abs=1e-8)
    assert wide.log_likelihood == pytest.approx(alone.log_likelihood)


@pytest.mark.parametrize("constant", [0.0, 1.0, 0.3, -0.9, 0.44, 0.123456789, 0.82, 500.7])
def test_a_constant_column_changes_nothing(constant: float) -> None:
    """Of its variance rounding leaves something, which is no information."""
    times, events, x = drawn(300, 2, seed=3)
    grid = np.unique(times[events])
    found, own = torch.from_numpy(cells(times, events, grid)), torch.from_numpy(x)
    alone = fitted(own, found, len(grid))
    wide = fitted(torch.cat([own, torch.full((300, 1), constant)], 1), found, len(grid))
    assert wide.known.tolist() == [True, True, False]
    assert wide.mixed_with(2) == []
    assert wide.converged
    assert wide.beta[:2].numpy() == pytest.approx(alone.beta.numpy(), abs=1e-8)
    assert wide.se[:2].numpy() == pytest.approx(alone.se.numpy(), abs=1e-8)


def test_a_column_that_tells_the_event_leaves_the_others_right() -> None:
    times, events, x = drawn(300, 2, seed=3)
    grid = np.unique(times[events])
    found, own = torch.from_numpy(cells(times, events, grid)), torch.from_numpy(x)
    told = torch.from_numpy(events.astype(np.float64))[:, None] * 4
    few, many = (fitted(torch.cat([own, told], 1), found, len(grid), most=most) for most in (12, 100))
    assert (few.converged, many.converged) == (False, False)
    assert many.beta[:2].numpy() == pytest.approx(few.beta[:2].numpy(), abs=1e-3)
    assert float(many.se[2]) > 100 * float(many.se[:2].max())
    assert many.known.tolist() == [True, True, True]


def test_a_column_that_tells_the_event_has_no_end() -> None:
    """Its coefficient grows with every step, so that the steps end where they must and say so."""
    events = np.array([True] * 5 + [False] * 5)
    found = torch.from_numpy(cells(np.arange(1.0, 11), events, [*range(1, 11)]))
    fit = fitted(torch.from_numpy(events.astype(np.float64))[:, None] * 4, found, 10, most=8)
    assert (fit.converged, fit.asked) == (False, 8)
    assert float(fit.beta) > 0.5
    for most in (30, 60, 200):  # however long: the information goes to nothing, and the steps do not
        assert not fitted(torch.from_numpy(events.astype(np.float64))[:, None] * 4, found, 10, most=most).converged
    with pytest.raises(FedfillError, match="cox: found a hazard"):
        risk_sums(torch.full((2, 1), 1e4), found[:2], 10, torch.ones(1))


def test_a_step_that_lowers_the_likelihood_is_halved() -> None:
    """A parabola with its top at 1, told with an information that is far too small: the first step would be to 5."""
    tried: list[float] = []

    def ask(beta: Tensor) -> Score:
        tried.append(float(beta))
        return Score(-float((beta - 1).square()), -2 * (beta - 1), torch.tensor([[0.4]], dtype=torch.float64))

    fit = newton(ask, 1, 60)
    assert tried[:3] == pytest.approx([0, 5, 2.5])
    assert float(fit.beta) == pytest.approx(1.0, abs=1e-4)
    assert newton(ask, 1, 1).asked == 1


def test_baselines_and_ratios() -> None:
    sums = RiskSums(torch.tensor([10.0, 4.0, 0.0]).double(), torch.zeros(3, 1), torch.zeros(3, 1))
    assert breslow(sums, torch.tensor([2, 1, 0])).tolist() == [0.2, 0.25, 0.0]
    assert hazard_ratio(0.0, 0.0, 1.96) == (1.0, 1.0, 1.0)
    assert hazard_ratio(1e5, 1.0, 1.96)[0] == pytest.approx(np.exp(700.0))
    none = score(sums, torch.zeros(3), torch.zeros(1), torch.zeros(1))
    assert (none.log_likelihood, float(none.information)) == (0.0, 0.0)
