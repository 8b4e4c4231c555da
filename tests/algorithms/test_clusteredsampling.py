"""Clustered sampling: a client from each group of like clients, drawn without a bias."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import refused, run_rounds, scripted, two_kinds

from fedfill import tree
from fedfill.algorithms.clusteredsampling import ClusteredSampling, DrawnUpdate, Size, ball_of, distributions, heaps
from fedfill.algorithms.fedavg import FedAvg

QUICK = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}


def pairs(n: int) -> torch.Tensor:
    """Clients 0 and 1 are alike, 2 and 3, and so on."""
    kinds = torch.arange(n) // 2
    return (kinds[:, None] != kinds[None, :]).double() * (1 + (kinds[:, None] - kinds[None, :]).abs())


def test_two_groups_of_equal_clients_have_an_urn_each():
    assert distributions([5, 5, 5, 5], 2, pairs(4)) == [[(0, 10), (1, 10)], [(2, 10), (3, 10)]]


def test_urns_by_hand():
    """n = 10, two draws: client 0 has 12 balls, fills an urn of 10 alone, and has 2 left, with which all the others' fit."""
    assert distributions([6, 1, 2, 1], 2, pairs(4)) == [[(0, 10)], [(0, 2), (1, 2), (2, 4), (3, 2)]]


def test_the_heaviest_groups_have_the_urns():
    """n = 10, two draws: pairs of 8, 8 and 4 balls, no two of which fit into one urn."""
    assert distributions([3, 1, 2, 2, 1, 1], 2, pairs(6)) == [[(0, 6), (1, 2), (4, 2)], [(2, 4), (3, 4), (5, 2)]]


def test_a_group_that_is_poured_may_lie_in_two_urns():
    """n = 9, two draws of 18 balls: three pairs of 6 balls. Two pairs have urns, and the third fills both."""
    found = distributions([2, 1, 2, 1, 2, 1], 2, pairs(6))
    assert found == [[(0, 4), (1, 2), (4, 3)], [(2, 4), (3, 2), (4, 1), (5, 2)]]


def test_branches_are_as_large_as_fits():
    apart = pairs(4)
    assert heaps([3, 3, 3, 3], 12, apart) == [[0, 1, 2, 3]]
    assert heaps([3, 3, 3, 3], 11, apart) == [[0, 1], [2, 3]]
    assert heaps([3, 3, 3, 3], 5, apart) == [[0], [1], [2], [3]]
    assert heaps([0, 3, 0, 3], 6, apart) == [[1, 3]]


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), draws=st.integers(1, 12), seed=st.integers(0, 99))
def test_each_client_is_expected_as_often_as_its_samples_say(sizes: list[int], draws: int, seed: int):
    points = torch.randn(len(sizes), 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    urns = distributions(sizes, draws, torch.cdist(points, points))
    n = sum(sizes)
    assert len(urns) == draws
    expected = [Fraction(0)] * len(sizes)
    for urn in urns:
        assert sum(balls for _, balls in urn) == n
        for i, balls in urn:
            assert balls > 0
            expected[i] += Fraction(balls, n)
    assert expected == [Fraction(draws * own, n) for own in sizes]


def test_every_ball_is_some_clients():
    urn = [(3, 2), (0, 1), (3, 1)]
    assert [ball_of(urn, place) for place in range(4)] == [3, 3, 0, 3]


def begun(participation: float, sizes: list[int], moves):
    """A server whose clients move from what they get by what a script says: client to a number."""
    algorithm = ClusteredSampling()
    start = {"weight": torch.zeros(1, 1)}
    server, engine = scripted(len(sizes), start, participation, model=torch.nn.Linear(1, 1, bias=False))
    server.state = type(server.state)(algorithm.server_state(start))
    engine.script["size"] = lambda i, message, t: Size(sizes[i])
    engine.script["train_drawn"] = lambda i, message, t: DrawnUpdate(
        {"weight": message.weights["weight"] + moves(i)}, sizes[i], draws=message.draws
    )
    return algorithm, server, engine


def test_draws_are_counted_and_averaged():
    """Client 0 has 8 of 10 samples: of two draws one is its for sure, and the other in 6 of 10 cases."""
    algorithm, server, _ = begun(0.5, [8, 1, 1, 0], lambda i: float(i == 0))
    counts = []
    for t in range(60):
        server.begin(t)
        before = float(server.state.weights["weight"])
        algorithm.round(server, t)
        draws = server.notes["draws"]
        assert sum(draws.values()) == 2
        assert float(server.state.weights["weight"]) - before == pytest.approx(draws["0"] / 2, abs=1e-5)
        counts.append(draws["0"])
    assert set(counts) == {1, 2}
    assert 75 < sum(counts) < 117  # 96 expected, 3.8 its deviation


def test_like_clients_are_not_drawn_together_once_they_are_known():
    """Four clients of one size, two of which move up and two down: from the round on in which all were seen, one of each."""
    algorithm, server, _ = begun(0.5, [5, 5, 5, 5], lambda i: 1.0 if i < 2 else -1.0)
    known = 0
    for t in range(30):
        server.begin(t)
        all_seen = len(server.state.updates) == 4
        algorithm.round(server, t)
        if all_seen:
            known += 1
            assert sum(int(i) < 2 for i in server.notes["draws"]) == 1
    assert known > 10


def test_who_has_no_samples_is_not_asked_where_all_others_are():
    algorithm, server, engine = begun(1.0, [8, 1, 0, 1], lambda i: float(i))
    algorithm.round(server, 0)
    assert server.notes["draws"] == {"0": 8, "1": 1, "3": 1}
    assert sorted(i for _, name, i, _ in engine.sent if name == "train_drawn") == [0, 1, 3]
    assert float(server.state.weights["weight"]) == pytest.approx((8 * 0 + 1 + 3) / 10)


def test_who_was_never_seen_is_like_others_of_the_same_and_at_a_right_angle_to_all_who_were():
    algorithm, server, _ = begun(0.5, [5, 5, 5, 5], lambda i: 1.0)
    server.state.updates = {0: {"weight": torch.tensor([[3.0]])}, 2: {"weight": torch.tensor([[-0.5]])}}
    r = 2**0.5
    expected = [[0, r, 2, r], [r, 0, r, 0], [2, r, 0, r], [r, 0, r, 0]]
    torch.testing.assert_close(algorithm.apart(server, range(4)), torch.tensor(expected, dtype=torch.float64))


def test_sizes_are_asked_for_once_and_again_where_they_were_lost():
    algorithm, server, engine = begun(0.5, [5, 5, 5, 5], lambda i: 1.0)

    def size(i, message, t):
        if i == 3 and t == 0:
            raise RuntimeError("away")
        return Size(-1 if i == 2 and t == 0 else 5)

    engine.script["size"] = size
    for t in range(3):
        server.begin(t)
        algorithm.round(server, t)
    assert [(t, i) for t, name, i, _ in engine.sent if name == "size"] == [(0, i) for i in (3, 2, 1, 0)] + [
        (1, 3),
        (1, 2),
    ]
    assert server.state.sizes == dict.fromkeys(range(4), 5)


def test_where_all_take_part_it_is_fedavg_to_the_bit():
    plain, own = (
        run_rounds(a, rounds=3, model={"width": "wide"}) for a in (FedAvg(**QUICK), ClusteredSampling(**QUICK))
    )
    assert tree.sha256(own.state.weights) == tree.sha256(plain.state.weights)


def test_it_takes_local_objectives():
    settings = {**QUICK, "optimizer": "sgd", "local": "scaffold"}
    server = run_rounds(ClusteredSampling(**settings), rounds=4, participation=0.5, federation=two_kinds())
    assert server.evaluation.accuracy > 0.2


def test_slips():
    with refused("aggregation", "fednova with clusteredsampling"):
        run_rounds(ClusteredSampling(aggregation="fednova"), rounds=1)
    algorithm, server, _ = begun(0.5, [0, 0, 0], lambda i: 1.0)
    with refused("data", "no client with training samples"):
        algorithm.round(server, 0)
