"""Kaplan-Meier, log-rank and concordance from counts on a grid; statsmodels is the referee."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.duration.survfunc import SurvfuncRight, survdiff
from tests.statistics.survival_world import EVENTS, GRID, SITE, TIMES, counted, drawn, hand

from fedfill.data.survival import cell_names, cells, grid_size
from fedfill.statistics.survival import (
    Curve,
    Pairs,
    at_risk,
    bound_of,
    concordance,
    concordance_of_counts,
    encoding,
    kaplan_meier,
    log_rank,
    noisy_kaplan_meier,
    split,
    total_hazard,
)

RECORD = st.tuples(st.integers(0, 12), st.booleans())


def test_a_curve_worked_by_hand() -> None:
    curve = kaplan_meier(hand())
    assert curve.events.tolist() == [1, 1, 2, 0, 2, 1, 0]
    assert curve.at_risk.tolist() == [10, 9, 8, 5, 4, 2, 1]
    assert curve.survival.tolist() == pytest.approx([0.9, 0.8, 0.6, 0.6, 0.3, 0.15, 0.15])
    assert curve.se.tolist() == pytest.approx([0.0949, 0.1265, 0.1549, 0.1549, 0.1688, 0.1356, 0.1356], abs=5e-5)


def test_the_band_is_that_of_lifelines() -> None:
    """Limits of lifelines 0.30.3 for these records."""
    low, high = kaplan_meier(hand()).band()
    assert low.tolist() == pytest.approx(
        [0.473009, 0.408691, 0.252669, 0.252669, 0.049327, 0.008020, 0.008020], abs=1e-6
    )
    assert high.tolist() == pytest.approx(
        [0.985281, 0.945873, 0.827221, 0.827221, 0.617738, 0.474354, 0.474354], abs=1e-6
    )


def test_where_the_grid_has_all_times_of_events_the_curve_is_that_of_the_records() -> None:
    """Also where records are censored between them: who leaves at 2.5 is not at risk at 3."""
    draw = np.random.default_rng(3)
    times, events = draw.integers(1, 30, 200).astype(np.float64), draw.random(200) < 0.6
    times = times + np.where(events, 0, draw.random(200))
    grid = np.unique(times[events])
    curve, known = kaplan_meier(counted(cells(times, events, grid), len(grid))), SurvfuncRight(times, events)
    with_event = known.n_events > 0
    assert curve.survival.numpy() == pytest.approx(known.surv_prob[with_event], abs=1e-12)
    assert curve.at_risk.tolist() == known.n_risk[with_event].tolist()
    alive = curve.survival.numpy() > 0
    assert curve.se.numpy()[alive] == pytest.approx(known.surv_prob_se[with_event][alive], abs=1e-12)


@given(st.lists(RECORD, min_size=1, max_size=40), st.sets(st.integers(1, 12), min_size=1))
def test_cells_and_those_at_risk_are_counted_by_their_rule(records: list[tuple[int, bool]], ends: set[int]) -> None:
    grid = sorted(ends)
    times, events = np.array([t for t, _ in records], dtype=np.float64), np.array([e for _, e in records])
    found = cells(times, events, grid)
    counts = counted(found, len(grid))
    assert len(cell_names(grid)) == len(set(cell_names(grid))) == len(counts) == 2 * len(grid) + 1
    assert grid_size(len(counts)) == len(grid)
    for k, end in enumerate(grid):
        before = grid[k - 1] if k else 0
        told = sum(e and (before < t <= end or (k == 0 and t == 0)) for t, e in records)
        # an event before t_k is over; one in (t_{k-1}, t_k] counts as at t_k
        risk = sum((t > before or k == 0) if e else t >= end for t, e in records)
        assert (counts[k], at_risk(counts)[k]) == (told, risk)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_the_band_narrows_with_the_level_and_holds_the_curve(level: float) -> None:
    curve = kaplan_meier(hand())
    low, high = curve.band(level)
    wide, far = curve.band(0.95)
    assert bool((low <= curve.survival).all() & (curve.survival <= high).all())
    assert bool((wide < low).all() & (high < far).all())


def test_at_the_ends() -> None:
    """Nobody has had the event: no width. All had it: 0, with the limit of the time before above it."""
    none, everyone = torch.tensor([0.0, 0, 0, 0, 5]), torch.tensor([2.0, 3, 0, 0, 0])
    assert [x.tolist() for x in (kaplan_meier(none).survival, *kaplan_meier(none).band())] == [[1, 1]] * 3
    low, high = kaplan_meier(everyone).band()
    assert (float(low[1]), float(high[1])) == (0.0, float(high[0]))
    assert float(kaplan_meier(everyone).se[1]) == 0
    assert kaplan_meier(torch.zeros(5)).survival.tolist() == [1, 1]


def test_a_log_rank_test_worked_by_hand() -> None:
    found = cells(TIMES, EVENTS, GRID)
    test = log_rank(torch.stack([counted(found[site == SITE], len(GRID)) for site in (1, 2)]))
    assert test.observed.tolist() == [3, 4]
    assert test.expected.tolist() == pytest.approx([3.5556, 3.4444], abs=5e-5)
    assert float(test.covariance[0, 0]) == pytest.approx(1.5088, abs=5e-5)
    assert (test.statistic, test.freedom) == (pytest.approx(0.2046, abs=5e-5), 1)


@pytest.mark.parametrize("strata", [1, 4])
def test_the_log_rank_test_is_that_of_statsmodels(strata: int) -> None:
    times, events, _ = drawn(300, 1, seed=5)
    draw = np.random.default_rng(1)
    group, stratum = draw.integers(0, 3, 300), draw.integers(0, strata, 300)
    grid = np.unique(times[events])
    found = cells(times, events, grid)
    parts = [
        log_rank(torch.stack([counted(found[(stratum == s) & (group == g)], len(grid)) for g in range(3)]))
        for s in range(strata)
    ]
    test = sum(parts[1:], parts[0])
    statistic, p = survdiff(times, events, group, strata=stratum if strata > 1 else None)
    assert (test.statistic, test.p, test.freedom) == (pytest.approx(statistic), pytest.approx(p), 2)


def test_one_group_or_nobody_gives_nothing_to_compare() -> None:
    for counts in (hand()[None], torch.stack([hand(), torch.zeros(15)]), torch.zeros(3, 15)):
        assert (log_rank(counts).statistic, log_rank(counts).p) == (0.0, 1.0)


def slow_pairs(risk: list[float], times: list[int], events: list[bool]) -> Pairs:
    right = tied = comparable = 0
    for i, early in enumerate(times):
        for j, late in enumerate(times):
            if events[i] and (late > early or (late == early and not events[j])):
                comparable += 1
                right += risk[i] > risk[j]
                tied += risk[i] == risk[j]
    return Pairs(right, tied, comparable)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), min_size=1, max_size=25))
def test_concordance_counts_all_pairs(records: list[tuple[int, int, bool]]) -> None:
    risk, times, events = (list(column) for column in zip(*records, strict=True))
    found = cells(np.array(times, dtype=np.float64), np.array(events), range(1, 7))
    expected = slow_pairs(risk, times, events)
    assert concordance(torch.tensor(risk), torch.from_numpy(found), 6) == expected
    by_risk = torch.stack([counted(found[np.array(risk) == r], 6) for r in range(4)])
    assert concordance_of_counts(by_risk) == expected


def test_harrells_index_is_that_of_lifelines() -> None:
    """Figures of lifelines 0.30.3 for these records."""
    found = torch.from_numpy(cells(TIMES, EVENTS, GRID))
    pairs = concordance(torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3.0]), found, len(GRID))
    assert pairs.index == pytest.approx(0.45588235)
    assert (pairs + pairs).index == pairs.index
    assert concordance(torch.zeros(0), found[:0], len(GRID)).index is None


def test_the_hazard_of_a_model_is_that_of_its_probabilities() -> None:
    """An event at t_1 has .2, at t_2 .4 of the .6 that are at risk there, and the others leave at once."""
    chances = torch.tensor([[0.2, 0.4, 0.1, 0.1, 0.2]])
    assert float(total_hazard(chances.log())) == pytest.approx(-math.log(1 - 0.2 / 0.9) - math.log(1 - 0.4 / 0.6))


# Under noise


@pytest.mark.parametrize("size", [1, 2, 7, 52])
def test_encoded_counts_without_noise_give_the_exact_curve(size: int) -> None:
    times, events, _ = drawn(400, 1, seed=size)
    counts = counted(cells(times, events, np.linspace(4, 40, size)), size)
    exact, found = kaplan_meier(counts), noisy_kaplan_meier(encoding(size) @ counts, encoding(size), 0.0)
    assert found.survival.numpy() == pytest.approx(exact.survival.numpy(), abs=1e-9)
    assert float(found.noise.max()) == 0
    assert found.band()[0].numpy() == pytest.approx(exact.band()[0].numpy(), abs=1e-6)


@pytest.mark.parametrize("size", [1, 3, 20])
def test_one_record_moves_encoded_counts_as_far_as_their_bound_and_no_further(size: int) -> None:
    matrix = encoding(size)
    added, replaced = bound_of(matrix)
    moves = [matrix[:, i] - matrix[:, j] for i in range(2 * size + 1) for j in range(i)]
    assert float(matrix.norm(dim=0).max()) == pytest.approx(added)
    assert max(float(move.norm()) for move in moves) == pytest.approx(replaced)
    assert torch.equal(matrix * 2**12, (matrix * 2**12).round())


def test_encoded_sums_have_less_noise_than_sums_of_noisy_counts() -> None:
    """52 weeks: 2.3 in place of 7.2 times the noise of a count."""
    matrix = encoding(52)
    sums = torch.tril(torch.ones(52, 52, dtype=torch.float64)) @ torch.linalg.inv(matrix)[:52]
    spread = float(sums.norm(dim=1).max()) * bound_of(matrix)[0]
    assert spread == pytest.approx(2.33, abs=0.01)
    assert spread < math.sqrt(52) / 3


def curves(n: int, std: float, draws: int) -> tuple[Curve, list[Curve]]:
    times, events, _ = drawn(n, 1, seed=9)
    grid = np.arange(2, 31, 2.0)
    counts = counted(cells(times, events, grid), len(grid))
    matrix = encoding(len(grid))
    stream = torch.Generator().manual_seed(1)
    noise = std * torch.randn(draws, len(counts), generator=stream, dtype=torch.float64)
    return kaplan_meier(counts), [noisy_kaplan_meier(matrix @ counts + e, matrix, std) for e in noise]


def test_the_noise_in_the_curve_has_the_variance_that_is_told() -> None:
    exact, noisy = curves(2000, 5.0, 300)
    logs = torch.stack([curve.survival.log() for curve in noisy])  # [draws, G]
    told = torch.stack([curve.noise for curve in noisy]).mean(0)
    ratio = (logs - exact.survival.log()).square().mean(0) / told
    assert float(ratio.min()) > 0.7
    assert float(ratio.max()) < 1.3


def test_the_band_holds_the_curve_of_all_records_as_often_as_it_says() -> None:
    exact, noisy = curves(2000, 5.0, 200)
    bands = [curve.band() for curve in noisy]
    hit = [bool(((low <= exact.survival) & (exact.survival <= high)).all()) for low, high in bands]
    assert sum(hit) >= 0.95 * len(hit)


def test_curves_under_heavy_noise_stay_curves() -> None:
    _, noisy = curves(30, 50.0, 20)
    for curve in noisy:
        low, high = curve.band()
        steps = torch.diff(curve.survival, prepend=torch.ones(1, dtype=torch.float64))
        assert float(steps.max()) <= 0
        assert bool(((low >= 0) & (low <= curve.survival) & (curve.survival <= high) & (high <= 1)).all())
        assert bool(torch.isfinite(curve.se).all())
        assert float(split(torch.cat([curve.events, curve.at_risk, torch.zeros(1)]))[0].min()) >= 0
