"""CFL: a cluster is divided in two where its model stands still and its clients pull at it; or all of them once."""

import pytest
import torch
from tests.helpers import refused, run_rounds, scripted, two_kinds

from fedfill import tree
from fedfill.algorithms import Update
from fedfill.algorithms.cfl import CFL
from fedfill.algorithms.fedavg import FedAvg

QUICK = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}
MOVES = {0: [1.0, 0.0], 1: [0.9, 0.1], 2: [-1.0, 0.2], 3: [-0.8, 0.0]}
"""Their mean has the length .0791, the longest one 1.0198."""


class Two(torch.nn.Module):
    """A model of two parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(1))


def begun(algorithm, participation=1.0, samples=None):
    """A server whose clients move from what they get by `MOVES`, each time."""
    start = {"w": torch.zeros(2), "seen": torch.zeros(1)}
    server, engine = scripted(4, start, participation, model=Two())
    server.state = type(server.state)(algorithm.server_state(start))

    def train(i, message, t):
        moved = {"w": message.weights["w"] + torch.tensor(MOVES[i]), "seen": message.weights["seen"] + 100 * i}
        return Update(moved, (samples or {}).get(i, 1))

    engine.script["train"] = train
    return server, engine


def play(algorithm, server, rounds):
    for t in range(rounds):
        server.begin(t)
        algorithm.round(server, t)


def models(server):
    return [[round(x, 4) for x in model["w"].tolist()] for model in server.state.models]


def test_a_division_by_hand():
    algorithm = CFL(warm_rounds=0)
    server, engine = begun(algorithm)
    play(algorithm, server, 1)
    assert server.state.clusters == {0: 0, 1: 0, 2: 1, 3: 1}
    assert models(server) == [[0.95, 0.05], [-0.9, 0.1]]  # each half begins with its own mean
    assert server.notes["update_lengths"] == {"0": [0.0791, 1.0198]}
    assert server.state.updates == {}
    # buffers are averaged, and in no cosine
    assert [float(model["seen"]) for model in server.state.models] == [50, 250]

    server.begin(1)
    algorithm.round(server, 1)
    got = {i: message.weights["w"].tolist() for t, _, i, message in engine.sent[4:]}
    assert got[0] == got[1] == pytest.approx([0.95, 0.05])
    assert got[2] == got[3] == pytest.approx([-0.9, 0.1])
    assert len(server.state.models) == 2  # two members are not divided


@pytest.mark.parametrize(
    "settings",
    [
        {"still": 0.07},  # .0791 / 1.0198 is above it
        {"warm_rounds": 1},
        {"eps1": 0.079},
        {"eps1": 0.1, "eps2": 1.02},
        {"gamma": 0.99},  # sqrt((1 + .9529) / 2) = .9881
        {"clusters": 1},
    ],
)
def test_where_it_is_not_ripe_it_is_fedavg(settings):
    algorithm = CFL(**{"warm_rounds": 0, **settings})
    server, _ = begun(algorithm)
    play(algorithm, server, 1)
    assert models(server) == [[0.025, 0.075]]


@pytest.mark.parametrize("settings", [{"still": 0.08}, {"eps1": 0.08, "eps2": 1.01}, {"gamma": 0.98}])
def test_at_the_other_side_of_each_bound_it_is(settings):
    algorithm = CFL(**{"warm_rounds": 0, **settings})
    server, _ = begun(algorithm)
    play(algorithm, server, 1)
    assert len(server.state.models) == 2


def test_two_clients_that_pull_apart_stay_together():
    """0 and 2 pull apart, and so do 1 and 3: each pair is a cluster."""
    algorithm = CFL(warm_rounds=0)
    server, _ = begun(algorithm)
    server.state.models, server.state.clusters = [server.state.weights] * 2, {0: 0, 1: 1, 2: 0, 3: 1}
    play(algorithm, server, 2)
    assert server.state.clusters == {0: 0, 1: 1, 2: 0, 3: 1}
    assert models(server) == [[0.0, 0.2], [0.1, 0.1]]


def test_the_mean_update_weighs_clients_by_their_samples():
    """With twice the samples for 0 and 1 it has the length .3269, a third of the longest."""
    for weighting, found in (("samples", 1), ("uniform", 2)):
        algorithm = CFL(warm_rounds=0, still=0.25, weighting=weighting)
        server, _ = begun(algorithm, samples={0: 2, 1: 2, 2: 1, 3: 1})
        play(algorithm, server, 1)
        assert len(server.state.models) == found


def test_a_cluster_waits_until_each_member_was_heard():
    algorithm = CFL(warm_rounds=0)
    server, engine = begun(algorithm, participation=0.5)
    heard: set[int] = set()
    for t in range(10):
        server.begin(t)
        before = len(engine.sent)
        algorithm.round(server, t)
        heard |= {i for _, _, i, _ in engine.sent[before:]}
        assert (len(server.state.models) == 2) is (len(heard) == 4)
        if len(heard) == 4:
            break
    assert server.state.clusters == {0: 0, 1: 0, 2: 1, 3: 1}


def test_once_asks_everybody_and_those_that_are_lost_are_in_the_first_cluster():
    algorithm = CFL(when="once", warm_rounds=1, linkage="average")
    server, engine = begun(algorithm, participation=0.5)
    script = engine.script["train"]

    def train(i, message, t):
        if i == 2 and t == 1:
            raise RuntimeError("away")
        return script(i, message, t)

    engine.script["train"] = train
    play(algorithm, server, 3)
    asked = {t: sorted(i for u, _, i, _ in engine.sent if u == t) for t in range(3)}
    assert [len(asked[t]) for t in range(3)] == [2, 4, 2]
    assert server.state.clusters == {0: 0, 1: 0, 2: 0, 3: 1}
    assert len(server.state.models) == 2


@pytest.mark.parametrize("settings", [{"still": 1e-9, "warm_rounds": 0}, {"clusters": 1}, {"when": "once"}])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_a_division_it_is_fedavg_to_the_bit(settings, participation):
    plain, own = (
        run_rounds(a, rounds=3, participation=participation, model={"width": "wide"})
        for a in (FedAvg(**QUICK), CFL(**QUICK, **settings))
    )
    assert tree.sha256(own.state.models[0]) == tree.sha256(plain.state.weights)
    assert own.costs.legs == plain.costs.legs


@pytest.mark.parametrize("settings", [{}, {"linkage": "single"}, {"when": "once"}, {"when": "once", "clusters": 2}])
def test_two_kinds_of_clients_get_their_models(settings):
    algorithm = CFL(**QUICK | {"local_epochs": 2, "warm_rounds": 2} | settings)
    server = run_rounds(algorithm, rounds=7, federation=two_kinds(), model={"latent_activation": "relu"})
    assert server.state.clusters == {0: 0, 1: 0, 2: 1, 3: 1}
    assert min(server.evaluation.accuracy_by_client) > 0.9
    for i in range(4):
        own = algorithm.personal_weights(server.client_states[i], algorithm.global_weights(server))
        assert tree.sha256(own) == tree.sha256(server.state.models[i // 2])


def test_who_never_trained_is_judged_by_the_first_model():
    algorithm = CFL()
    server, _ = begun(algorithm)
    weights = algorithm.global_weights(server)
    for state in ({}, {"number": None}):
        assert set(algorithm.personal_weights(state, weights)) == {"w", "seen"}


def test_slips():
    with refused("gamma", "0.5 with when=once"):
        run_rounds(CFL(when="once", gamma=0.5), rounds=1)
    with refused("aggregation", "fednova with cfl"):
        run_rounds(CFL(aggregation="fednova"), rounds=1)
    with refused("local", "scaffold with cfl"):
        run_rounds(CFL(local="scaffold", optimizer="sgd"), rounds=1)
