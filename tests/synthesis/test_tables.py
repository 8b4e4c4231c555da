"""Likeness of tables: errors of pairs by hand, identities, the floor, and Cramér's V against another library."""

import itertools

import numpy as np
import pytest
from scipy.stats.contingency import association

from fedfill.statistics.marginals import workload_error
from fedfill.synthesis.tables import apart, dependence, errors, pairs_of, shares

SIZES = (2, 3, 4)


def codes(n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 2, n)
    return np.stack([first, (first + rng.integers(0, 2, n)) % 3, rng.integers(0, 4, n)], axis=1)


def test_by_hand():
    """Real halves (0,0) and (1,1); synthetic all (0,0): half of the pair and of each column has to move."""
    real, made = np.array([[0, 0], [1, 1]]), np.array([[0, 0], [0, 0], [0, 0]])
    assert errors(made, real, (2, 2)).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert [x.tolist() for x in shares(made, (2, 2))] == [[1.0, 0.0], [1.0, 0.0]]
    # columns apart: a quarter in each cell, so half has to move
    assert apart(real, (2, 2)).tolist() == [[0.0, 0.5], [0.5, 0.0]]
    # the pair is wrong and both columns are right
    crossed = np.array([[0, 1], [1, 0]])
    assert errors(crossed, real, (2, 2)).tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_a_table_is_like_itself_in_any_order_and_number():
    real = codes(50, 0)
    again = np.concatenate([real[::-1], real])
    assert errors(again, real, SIZES) == pytest.approx(np.zeros((3, 3)))
    assert errors(real, codes(60, 1), SIZES) == pytest.approx(errors(codes(60, 1), real, SIZES).T)


def test_the_mean_over_pairs_is_the_workload_error():
    made, real = codes(50, 0), codes(80, 1)
    assert pairs_of(errors(made, real, SIZES)).mean() == pytest.approx(workload_error(made, real, SIZES))


def test_the_floor_is_what_columns_shuffled_apart_come_to():
    real, rng = codes(60, 2), np.random.default_rng(0)
    many = np.concatenate([np.stack([rng.permutation(column) for column in real.T], axis=1) for _ in range(500)])
    assert pairs_of(apart(real, SIZES)) == pytest.approx(pairs_of(errors(many, real, SIZES)), abs=0.01)
    grid = np.array(list(itertools.product(range(2), range(3), range(4))))
    assert not apart(grid, SIZES).any()


def test_cramers_v():
    found = dependence(codes(70, 3), SIZES)
    x = codes(70, 3)
    for a, b in itertools.combinations(range(3), 2):
        table = np.zeros((SIZES[a], SIZES[b]), dtype=int)
        np.add.at(table, (x[:, a], x[:, b]), 1)
        assert found[a, b] == pytest.approx(association(table, method="cramer"))
    # one tells the other, through empty cells; and a column with one value depends on nothing
    same = np.array([[0, 3, 0], [1, 1, 0], [0, 3, 0]])
    assert dependence(same, (4, 4, 2))[0] == pytest.approx([1.0, 1.0, 0.0])
