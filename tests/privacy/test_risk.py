"""Risk of a synthetic table: each figure by hand, 0 in the mean where nothing was learned of rows, and copies that none may miss."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from tests.helpers import refused

from fedfill.privacy import risk
from fedfill.privacy.risk import Excess, Rows, found_at, neighbours, ranked, risks, singling_out, wilson

ORDERED, SIZES = (True, False, True, False, False), (16, 3, 17, 7, 2)
FIGURES = ("nearest", "membership_auc", "membership_tpr", "attribute", "singling_out")
EMPTY = math.nan


def people(n: int, seed: int) -> Rows:
    """Rows of one kind: a number, a word, a number that may be empty, a count, and a label that depends on all."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=n)
    age, income = np.clip(0.5 + 0.2 * z + 0.1 * rng.normal(size=n), 0, 1), rng.beta(2, 3, n)
    empty = rng.random(n) < 0.1
    words, count = rng.integers(0, 3, n), np.clip(rng.poisson(np.exp(z / 3)), 0, 6)
    label = (z + rng.normal(size=n) > 0).astype(np.int64)
    bins = [np.minimum((16 * x).astype(np.int64), 15) for x in (age, income)]
    cells = np.stack([bins[0], words, np.where(empty, 16, bins[1]), count, label], axis=1)
    return Rows(cells, np.stack([age, words, np.where(empty, EMPTY, income), count, label], axis=1))


# ---- distances


def test_gowers_distance_by_hand():
    """Half a number apart, another word, and one of two empty: (.5 + 1 + 1) / 3; both empty is no difference."""
    known = Rows(np.array([[1, 0, 2], [0, 1, 9]]), np.array([[0.75, 0.0, 0.2], [0.25, 1.0, EMPTY]]))
    asked = Rows(np.array([[0, 1, 2], [0, 0, 9]]), np.array([[0.25, 1.0, 0.2], [0.25, 0.0, EMPTY]]))
    far, told = neighbours(asked, known, (True, False, True))
    # of the first row: 1.5 / 3 and 1 / 3; of the second: 1.5 / 3 and 1 / 3
    assert far == pytest.approx([1 / 3, 1 / 3], abs=1e-4)
    # without the number 1 and 1 are apart: the first one counts; without the word .5 and 1; without the last 1.5 and 0
    assert told[0].tolist() == [1, 0, 9]
    # without the number 1 and 1; without the word 1.5 and 0; without the last .5 and 1
    assert told[1].tolist() == [1, 1, 2]


def test_a_copy_has_no_distance_and_tells_all_cells():
    rows = people(60, 0)
    far, told = neighbours(rows, rows, ORDERED)
    assert not far.any()
    assert (told == rows.cells).mean() > 0.9


@pytest.mark.parametrize("block", [1, 97, 1 << 16])
def test_slow_against_fast(block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(risk, "BLOCK", block)
    rows, known = people(40, 1), people(30, 2)

    def apart(a: float, b: float, ordered: bool) -> float:
        if not ordered:
            return float(a != b)
        return float(math.isnan(a) != math.isnan(b)) if math.isnan(a) or math.isnan(b) else abs(a - b)

    each = np.array(
        [[[apart(*pair) for pair in zip(x, y, ORDERED, strict=True)] for y in known.values] for x in rows.values]
    )  # [40, 30, 5]
    far, told = neighbours(rows, known, ORDERED)
    assert far == pytest.approx(each.mean(2).min(1), abs=1e-4)
    for j in range(5):
        others = np.delete(each, j, axis=2).mean(2)
        chosen = [np.flatnonzero(np.isclose(row, row.min(), atol=1e-4)) for row in others]
        assert all(told[i, j] in known.cells[places, j] for i, places in enumerate(chosen))


# ---- membership


def test_what_is_found_at_a_share_by_hand():
    """The middle one of three held-out rows stands for .5: nearer are 2 of 4. The first stands for .25: nearer is 1."""
    near, far = np.array([0.5, 1.5, 2.5, 9.0]), np.array([1.0, 2.0, 3.0])
    half, quarter, eighth = (found_at(near, far, share) for share in (0.5, 0.25, 0.125))
    assert (half.training, half.held_out, half.value) == (0.5, 0.5, 0.0)
    assert quarter.training == 0.25
    assert eighth.training == 0.125  # half the way to it
    assert half.low < 0 < half.high
    # as far as a held-out row: before it in one of two orders
    assert found_at(np.array([2.0, 2.0, 1.0, 9.0]), far, 0.5).training == (1 + 2 * 0.5) / 4


def test_ranks_by_hand_and_by_another_library():
    near, far = np.array([1.0, 2.0, 2.0]), np.array([2.0, 3.0])
    # pairs: 1 wins 2; each 2 wins one and ties one
    assert ranked(near, far).training == (2 + 2 * 1.5) / 6
    rng = np.random.default_rng(0)
    near, far = rng.integers(0, 20, 70).astype(float), rng.integers(3, 23, 50).astype(float)
    truth = np.repeat([1, 0], [70, 50])
    found = ranked(near, far)
    assert found.training == pytest.approx(roc_auc_score(truth, -np.concatenate([near, far])))
    # DeLong's deviation is near the bootstrap's
    draws = [ranked(rng.choice(near, 70), rng.choice(far, 50)).training for _ in range(400)]
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * np.std(draws), rel=0.15)


@pytest.mark.parametrize("distances", [[1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 2, 2, 5, 5], [1, 1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("n", [3, 4])
def test_over_all_ways_to_divide_rows_of_one_kind_the_mean_is_nothing(distances: list[int], n: int):
    figures: list[Callable[[np.ndarray, np.ndarray], Excess]] = [
        lambda near, far: found_at(near, far, 0.5),
        lambda near, far: found_at(near, far, 0.01),
        ranked,
    ]
    everything = np.array(distances, dtype=float)
    divided = list(itertools.combinations(range(7), n))
    for figure in figures:
        found = [figure(everything[list(own)], np.delete(everything, own)).value for own in divided]
        assert np.mean(found) == pytest.approx(0, abs=1e-12)


def test_the_interval_of_a_share():
    """10 of 20 and 0 of 10, as tables of Wilson's interval have them."""
    assert wilson(0.5, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    wide = wilson(0.5, 20, together=5)
    assert wide[0] < 0.2993 < 0.7007 < wide[1]


# ---- attributes


def test_a_gain_is_a_share_of_what_the_control_leaves():
    """Told are .75 of the training cells and .5 of the others: half of what was left."""
    ours, theirs = np.array([[1, 1], [1, 0]], dtype=bool), np.array([[1, 0], [0, 1]], dtype=bool)
    both = risk._of_columns(ours, theirs)
    assert (both.training, both.held_out, both.value) == (0.75, 0.5, 0.5)
    alone = risk._of_column(ours[:, 0], theirs[:, 0], 2)
    assert (alone.training, alone.held_out, alone.value) == (1.0, 0.5, 1.0)
    assert alone.low < 0 < alone.high
    certain = risk._of_column(ours[:, 0], ours[:, 0], 2)
    assert (certain.held_out, certain.value, certain.low, certain.high) == (1.0, 0.0, 0.0, 0.0)


# ---- singling out


def test_predicates_by_hand():
    """Synthetic (0,0), (0,1), (1,1): alone are a=1, b=0, and each of the three pairs. Of training rows a=1, b=0 and two pairs match one."""
    made, training, held = (np.array(rows) for rows in ([[0, 0], [0, 1], [1, 1]], [[0, 0], [1, 1]], [[0, 1], [0, 1]]))
    found, predicates = singling_out(made, training, held, (2, 2), np.random.default_rng(0))
    assert predicates == 5
    assert found.training == 4 / 5
    assert found.held_out == 0  # (0,1) matches both
    assert found.value == pytest.approx(4 / 5)
    nothing, none = singling_out(made[[0, 0]], training, held, (2, 2), np.random.default_rng(0))
    assert (none, nothing.value, nothing.low, nothing.high) == (0, 0.0, 0.0, 0.0)


def test_over_all_ways_to_divide_rows_predicates_have_no_excess():
    made, real = people(30, 0).cells, people(8, 1).cells
    found = []
    for own in itertools.combinations(range(8), 4):
        one, _ = singling_out(made, real[list(own)], np.delete(real, own, axis=0), SIZES, np.random.default_rng(0))
        found.append(one.value)
    assert np.ptp(found) > 0
    assert np.mean(found) == pytest.approx(0, abs=1e-12)


def test_few_held_out_rows_stand_among_training_rows():
    """One held-out row in the place of one of two: the control has two rows, too."""
    made, training, held = (np.array(rows) for rows in ([[0, 0], [1, 1]], [[0, 0], [1, 1]], [[2, 2]]))
    found, predicates = singling_out(made, training, held, (3, 3), np.random.default_rng(0))
    assert predicates == 6
    assert (found.training, found.held_out) == (1.0, 0.5)


# ---- all together


@pytest.mark.parametrize("seed", range(3))
def test_a_table_that_is_the_training_rows_is_caught_by_every_figure(seed: int):
    training = people(400, seed)
    shuffled = training[np.random.default_rng(seed).permutation(400)]
    found = risks(shuffled, training, people(200, seed + 100), ORDERED, SIZES, seed)
    assert {name: getattr(found, name).low > 0 for name in FIGURES} == dict.fromkeys(FIGURES, True)
    assert all(column.low > 0 for column in found.attributes)
    assert found.membership_auc.training > 0.99
    assert found.singling_out.training == 1


def test_an_independent_table_is_not():
    """Of 40 independent tables an interval of 95 % misses 0 twice; here it misses no more than four times on either side."""
    missed = dict.fromkeys((*FIGURES, "attributes"), 0)
    for seed in range(40):
        made, training, held = (people(n, 3 * seed + k) for k, n in enumerate((300, 300, 100)))
        found = risks(made, training, held, ORDERED, SIZES, seed)
        for name in FIGURES:
            one = getattr(found, name)
            assert one.low <= one.value <= one.high
            missed[name] += not one.low <= 0 <= one.high
        missed["attributes"] += not all(one.low <= 0 <= one.high for one in found.attributes)
    assert max(missed.values()) <= 4, missed


def test_a_few_copies_among_many_are_told_by_what_looks_at_the_nearest():
    training = people(600, 0)
    fresh = people(400, 1)
    mixed = Rows(
        *(np.concatenate([getattr(training, part)[:200], getattr(fresh, part)]) for part in ("cells", "values"))
    )
    found = risks(mixed, training, people(300, 2), ORDERED, SIZES, 0)
    assert found.membership_tpr.low > 0
    assert found.membership_tpr.training > 0.25


def test_many_rows_are_drawn_from_and_the_same_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(risk, "MOST", 50)
    monkeypatch.setattr(risk, "REFERENCES", 70)
    parts = people(100, 0), people(90, 1), people(40, 2)
    found = risks(*parts, ORDERED, SIZES, 3)
    assert found.searched == (50, 40, 70)
    assert risks(*parts, ORDERED, SIZES, 3) == found
    assert risks(*parts, ORDERED, SIZES, 4) != found


@pytest.mark.parametrize(("sizes", "facts"), [((0, 9, 9), (0, 9)), ((9, 1, 9), (1,)), ((9, 9, 0), (0,))])
def test_too_few_rows(sizes: tuple[int, ...], facts: tuple[int, ...]):
    with refused("risk", "allowed", *facts):
        risks(*(people(9, k)[np.arange(n)] for k, n in enumerate(sizes)), ORDERED, SIZES, 0)


def test_one_column_that_never_changes_is_no_risk():
    rows = people(50, 0)
    constant = replace(rows, cells=rows.cells.copy(), values=rows.values.copy())
    constant.cells[:, 1], constant.values[:, 1] = 0, 0
    found = risks(constant, constant, constant, ORDERED, SIZES, 0)
    assert found.attributes[1] == Excess(1.0, 1.0, 0.0, 0.0, 0.0)
