"""Marginals: hand-worked tables, identities, consistency, and draws that keep the tables."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfill.statistics.marginals import (
    Noisy,
    agreed,
    consistent,
    dependence,
    directed,
    marginal_counts,
    network,
    rounded,
    simplex,
    spanning_tree,
    tables_of,
    total_of,
    workload_error,
)  # fmt: skip
from fedfill.statistics.sums import summed

SITE_1 = [(0, 0, 0)] * 4 + [(0, 1, 1)] * 2 + [(1, 1, 2)] * 3 + [(1, 0, 0)]
SITE_2 = [(1, 1, 2)] * 5 + [(1, 1, 1)] * 2 + [(0, 0, 0)] * 2 + [(0, 1, 2)]
SIZES = (2, 2, 3)
PAIRS = [(0, 1), (0, 2), (1, 2)]
ONES = [(0,), (1,), (2,)]


def counted(rows: list[tuple[int, ...]], cliques: list[tuple[int, ...]]) -> list[Noisy]:
    z = torch.tensor(rows, dtype=torch.float32)
    sums = summed(marginal_counts(SIZES, cliques), [(z, torch.zeros(len(rows), dtype=torch.int64))])
    return tables_of(sums["counts"], SIZES, cliques, 0.0)


def test_counts_by_hand() -> None:
    ones = counted(SITE_1 + SITE_2, ONES)
    assert [table.counts.tolist() for table in ones] == [[9, 11], [7, 13], [7, 4, 9]]
    pairs = counted(SITE_1 + SITE_2, PAIRS)
    assert pairs[0].counts.tolist() == [[6, 3], [1, 10]]
    assert pairs[1].counts.tolist() == [[6, 2, 1], [1, 2, 8]]
    assert pairs[2].counts.tolist() == [[7, 0, 0], [0, 4, 9]]
    # whoever holds the records
    apart = [counted(site, PAIRS) for site in (SITE_1, SITE_2)]
    assert all((a.counts + b.counts == whole.counts).all() for a, b, whole in zip(*apart, pairs, strict=True))


def test_a_record_moves_one_cell_of_each_table() -> None:
    (block,) = marginal_counts(SIZES, PAIRS).blocks.values()
    assert block.bound.bound == pytest.approx(math.sqrt(3))
    assert block.bound.replaced == pytest.approx(math.sqrt(6))
    one, other = (counted([row], PAIRS) for row in ((0, 0, 0), (1, 1, 2)))
    moved = math.sqrt(sum(float(((a.counts - b.counts) ** 2).sum()) for a, b in zip(one, other, strict=True)))
    assert moved == pytest.approx(block.bound.replaced), "the worst pair is reached"


def test_the_tree_by_hand() -> None:
    rows = SITE_1 + SITE_2
    scores = dependence(counted(rows, PAIRS), counted(rows, ONES))
    assert sorted(scores, key=lambda pair: -scores[pair])[0] == (1, 2)
    assert spanning_tree({(0, 1): 11.4, (0, 2): 12.2, (1, 2): 18.2}, range(3)) == [(1, 2), (0, 2)]
    assert spanning_tree({(0, 1): 11.4, (0, 2): 12.2, (1, 2): 18.2}, range(3), first=[(0, 1)]) == [(0, 1), (1, 2)]
    assert list(directed([(1, 2), (0, 2)], 0)) == [(0, 2), (2, 1)]


def test_a_tree_gives_its_own_tables_and_what_follows_from_them() -> None:
    pairs = counted(SITE_1 + SITE_2, PAIRS)
    found = network(SIZES, {0: (), 1: (0,), 2: (1,)}, pairs, 20)  # A - B - C
    draw = np.random.default_rng(0)
    rows = found.sample(200_000, draw)
    shares = np.bincount(np.ravel_multi_index(tuple(rows.T), SIZES), minlength=12).reshape(SIZES) / len(rows)
    assert shares[1, 1, 2] == pytest.approx(0.3462, abs=0.003)
    assert shares[0, 0, 0] == pytest.approx(0.3, abs=0.003)
    assert shares.sum(1)[0].tolist() == pytest.approx([6 / 20, 0.9231 / 20, 2.0769 / 20], abs=0.003)
    assert shares.sum(2).reshape(-1).tolist() == pytest.approx([0.3, 0.15, 0.05, 0.5], abs=1e-5), "an edge is exact"


def test_one_step_of_agreement_by_hand() -> None:
    tables = [
        Noisy((1,), np.array([7.2, 12.9]), 1.0),
        Noisy((0, 1), np.array([[6.4, 3.1], [0.7, 10.2]]), 1.0),
        Noisy((1, 2), np.array([[6.8, 0.4, -0.5], [0.2, 3.9, 9.3]]), 1.0),
    ]
    own, ab, bc = agreed(tables, (1,))
    assert own.counts.tolist() == pytest.approx([7.0818, 13.1], abs=1e-4)
    assert ab.counts.reshape(-1).tolist() == pytest.approx([6.3909, 3.0, 0.6909, 10.1], abs=1e-4)
    assert bc.counts.reshape(-1).tolist() == pytest.approx([6.9273, 0.5273, -0.3727, 0.1, 3.8, 9.2], abs=1e-4)
    again = agreed([own, ab, bc], (1,))
    assert all(np.allclose(a.counts, b.counts) for a, b in zip(again, (own, ab, bc), strict=True)), "idempotent"
    assert (ab.counts.sum(), bc.counts.sum()) == pytest.approx((20.1818, 20.1818), abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=30), st.floats(0.5, 100))
def test_the_simplex(values: list[float], total: float) -> None:
    counts = np.array(values)
    found = simplex(counts, total)
    assert found.min() >= 0
    assert found.sum() == pytest.approx(total)
    assert simplex(found, total) == pytest.approx(found)
    order = np.argsort(counts, kind="stable")
    assert (np.diff(found[order]) >= -1e-9).all()
    # no other point of the simplex is nearer: the gradient towards every corner points away
    assert all((counts - found) @ (total * corner - found) <= 1e-6 * (1 + total**2) for corner in np.eye(len(counts)))


def test_noisy_tables_become_consistent_and_valid() -> None:
    draw = np.random.default_rng(1)
    rows = np.stack([draw.integers(0, 2, 500), draw.integers(0, 2, 500), draw.integers(0, 3, 500)], axis=1)
    rows[:, 2] = np.where(rows[:, 0] == 1, 2, rows[:, 2])
    exact = counted([tuple(row) for row in rows], [*ONES, (0, 1), (0, 2), (0, 1, 2)])
    noisy = [Noisy(t.clique, t.counts + draw.normal(0, 8, t.counts.shape), 8.0) for t in exact]
    total = total_of(noisy)
    found = consistent(noisy, total)
    assert all(table.counts.min() >= 0 for table in found)
    for a, b in itertools.combinations(found, 2):
        if shared := tuple(sorted(set(a.clique) & set(b.clique))):
            assert np.abs(a.over(shared) - b.over(shared)).max() < 1e-4 * total
    before, after = (
        sum(np.abs(t.counts - e.counts).sum() for t, e in zip(those, exact, strict=True)) for those in (noisy, found)
    )
    assert after < before, "what tables agree on is more exact"


def test_without_noise_nothing_is_moved() -> None:
    exact = counted(SITE_1 + SITE_2, [*ONES, *PAIRS])
    assert total_of(exact) == pytest.approx(20)
    for table, found in zip(exact, consistent(exact, 20), strict=True):
        assert found.counts == pytest.approx(table.counts, abs=1e-4)


def test_the_scores_of_noise_alone_have_mean_nothing_and_deviation_one() -> None:
    draw = np.random.default_rng(2)
    sizes, n, std = (5, 7), 20_000, 30.0
    found = []
    for _ in range(300):
        own = [draw.dirichlet(np.ones(size)) for size in sizes]
        ones = [Noisy((k,), n * share, 0.0) for k, share in enumerate(own)]
        pair = Noisy((0, 1), n * np.outer(*own) + draw.normal(0, std, sizes), std)
        found.append(dependence([pair], ones)[0, 1])
    assert np.mean(found) == pytest.approx(0, abs=0.2)
    assert np.std(found) == pytest.approx(1, abs=0.15)


def test_rounding_by_hand() -> None:
    expected = 20 * np.array([0.345, 0.05, 0.455, 0.15])
    draws = [rounded(expected, np.random.default_rng(k)).tolist() for k in range(400)]
    assert {tuple(found) for found in draws} == {(7, 1, 9, 3), (6, 1, 10, 3)}
    assert np.mean([found[0] == 7 for found in draws]) == pytest.approx(0.9, abs=0.05)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 5), min_size=1, max_size=12), st.integers(0, 300), st.integers(0, 99))
def test_rounding_keeps_the_sum_and_is_within_one(weights: list[float], n: int, seed: int) -> None:
    shares = np.array(weights) + 1e-3
    expected = n * shares / shares.sum()
    found = rounded(expected, np.random.default_rng(seed))
    assert found.sum() == n
    assert np.abs(found - expected).max() <= 1 + 1e-6


def test_draws_for_given_labels() -> None:
    pairs = counted(SITE_1 + SITE_2, PAIRS)
    found = network(SIZES, {2: (), 0: (2,), 1: (2,)}, pairs, 20)
    root = np.repeat([0, 1, 2], 100)
    rows = found.sample(300, np.random.default_rng(0), root)
    assert rows[:, 2].tolist() == root.tolist()
    assert rows[:100, 1].max() == 0, "whoever has C = 0 has B = 0"


def test_the_workload_error_by_hand() -> None:
    real = np.array([[0, 0], [0, 0], [1, 1], [1, 1]])
    assert workload_error(real, real, (2, 2)) == 0
    assert workload_error(np.array([[0, 1], [1, 0]]), real, (2, 2)) == 1
    assert workload_error(np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), real, (2, 2)) == 0.5
