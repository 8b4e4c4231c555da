"""Matching of units: the papers' gains worked by hand and in loops, permutations that are found again, and means."""

from itertools import pairwise, permutations
from math import log

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedfill.models.matching import class_shares, gains, match, matched_mean


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def full_gains(
    v: Tensor, p: Tensor, a: Tensor, b: Tensor, m: list[int], clients: int, prior: float, new: int
) -> Tensor:
    """The paper's, number by number: global units that `m` clients have, and new ones, with gamma 1 and a mean of 0."""
    found = torch.zeros(len(v), len(a) + new, dtype=torch.float64)
    for line, own in enumerate(v):
        for i in range(len(a)):
            for q in range(len(p)):
                found[line, i] += (a[i, q] + p[q] * own[q]) ** 2 / (b[q] + p[q]) - a[i, q] ** 2 / b[q]
            found[line, i] += 2 * log(m[i] / (clients - m[i]))
        for k in range(1, new + 1):
            value = sum(float((p[q] * own[q]) ** 2 / (prior + p[q])) for q in range(len(p)))
            found[line, len(a) + k - 1] = value - 2 * log(k) + 2 * log(1 / clients)
    return found


FIRST = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
SECOND = torch.tensor([[0.1, 1.9], [3.0, -1.0]], dtype=torch.float64)
ONE = torch.ones(2, dtype=torch.float64)


def test_gains_worked_by_hand():
    """(1 + .1)^2 / 3 + 1.9^2 / 3 - 1 / 2 = 1.1067, and so on; a new unit: (.1^2 + 1.9^2) / 2 + 2 ln(1 / 2) = .4237."""
    known = torch.tensor([[1.1067, 3.0733], [5.1667, 1.3333]], dtype=torch.float64)
    assert torch.allclose(gains(SECOND, ONE, FIRST, 1 + ONE), known, atol=5e-5)
    whole = full_gains(SECOND, ONE, FIRST, 1 + ONE, [1, 1], 2, 1.0, 2)
    new = torch.tensor([[0.4237, -0.9626], [3.6137, 2.2274]], dtype=torch.float64)
    assert torch.allclose(whole, torch.cat([known, new], 1), atol=5e-5)
    assert linear_sum_assignment(whole.numpy(), maximize=True)[1].tolist() == [1, 0]
    assert [place.tolist() for place in match([FIRST, SECOND], [ONE, ONE], prior=1.0)] == [[0, 1], [1, 0]]


@pytest.mark.parametrize("prior", [0.0, 0.5])
def test_gains_are_those_of_loops_and_what_all_pairs_share_changes_no_match(prior: float):
    v, p = normal(5, 7, seed=1), normal(7, seed=2).abs() + 0.1
    a, b = normal(5, 7, seed=3), prior + 0.3 + normal(7, seed=4).abs()
    slow = full_gains(v, p, a, b, [2] * 5, 5, prior or 1.0, 0)
    assert torch.allclose(gains(v, p, a, b) + 2 * log(2 / 3), slow, rtol=1e-12, atol=1e-12)
    chosen = [linear_sum_assignment(g.numpy(), maximize=True)[1].tolist() for g in (slow, gains(v, p, a, b))]
    assert chosen[0] == chosen[1]


def test_two_clients_get_the_nearest_of_all_permutations():
    for seed in range(20):
        v, w = normal(4, 3, seed=seed), normal(4, 3, seed=100 + seed)
        one = torch.ones(3, dtype=torch.float64)
        best = min(permutations(range(4)), key=lambda to: float((w - v[list(to)]).square().sum()))
        for prior in (0.0, 2.0):
            assert match([v, w], [one, one], prior, sweeps=0)[1].tolist() == list(best)


def test_one_client_and_equal_clients_stay_as_they_are():
    v, one = normal(6, 4), torch.ones(4, dtype=torch.float64)
    for clients in (1, 2, 5):
        places = match([v] * clients, [one] * clients)
        assert [place.tolist() for place in places] == [list(range(6))] * clients


def test_permutations_of_one_network_are_found_and_its_units_are_exact():
    v = normal(16, 9).float().double()
    orders = [torch.randperm(16, generator=torch.Generator().manual_seed(j)) for j in range(5)]
    units, one = [v[order] for order in orders], torch.ones(9, dtype=torch.float64)
    places = match(units, [one] * 5)
    aligned = [u[place.argsort()] for u, place in zip(units, places, strict=True)]
    assert all(torch.equal(own, v[orders[0]]) for own in aligned)
    assert torch.equal(matched_mean(aligned, [torch.ones(())] * 5), v[orders[0]])


def objective(units: list[Tensor], precisions: list[Tensor], places: list[Tensor], prior: float) -> float:
    """What the matching makes as large as it can: the sum of (sum of p v)^2 / (prior + sum of p)."""
    parts = [(p * v)[place.argsort()] for v, p, place in zip(units, precisions, places, strict=True)]
    return float((torch.stack(parts).sum(0).square() / (prior + torch.stack(precisions).sum(0))).sum())


def test_sweeps_never_make_it_worse_and_end():
    gained = 0
    for seed in range(10):
        units = [normal(8, 5, seed=10 * seed + j) for j in range(6)]
        precisions = [normal(5, seed=1000 + 10 * seed + j).abs() + 0.1 for j in range(6)]
        values = [
            objective(units, precisions, match(units, precisions, 0.5, sweeps), 0.5) for sweeps in (0, 1, 2, 50, 51)
        ]
        assert all(after > before * (1 - 1e-12) for before, after in pairwise(values))
        assert values[-1] == values[-2]
        gained += values[-1] > values[0] * (1 + 1e-9)
    assert gained > 5


def test_what_nobody_knows_counts_nothing():
    """The second number is known to nobody but the last client: it decides nothing, and is that client's."""
    v, some, all_ = normal(6, 2), torch.tensor([1.0, 0.0]).double(), torch.ones(2).double()
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    noise = torch.stack([v[order][:, 0], normal(6, seed=9)], 1)
    places = match([v, v, noise], [some, some, all_])
    assert [place.tolist() for place in places] == [list(range(6)), list(range(6)), order.tolist()]
    aligned = [v, v, noise[places[2].argsort()]]
    assert torch.equal(matched_mean(aligned, [some, some, all_])[:, 1], aligned[2][:, 1])


def test_means_worked_by_hand():
    values = [torch.tensor([2.0, 4.0]), torch.tensor([6.0, 0.0])]
    precisions = [torch.tensor([1.0, 0.25]).double(), torch.tensor([1.0, 0.75]).double()]
    assert matched_mean(values, precisions).tolist() == [4.0, 1.0]
    assert matched_mean(values, precisions, prior=1.0).tolist() == pytest.approx([8 / 3, 0.5])
    shares = class_shares(torch.tensor([[3, 0, 0], [1, 5, 0]]))
    assert shares.tolist() == [[0.75, 0.0, 0.5], [0.25, 1.0, 0.5]]
