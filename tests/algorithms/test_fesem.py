"""FeSEM: each client belongs to the centre that its trained model lies nearest to."""

import pytest
import torch
from tests.helpers import refused, run_rounds, scripted, two_kinds

from fedfill import tree
from fedfill.algorithms import Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fesem import FeSEM

QUICK = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}


class Two(torch.nn.Module):
    """A model of two parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(1))


def begun(algorithm, script, clients=4, participation=1.0):
    """A server whose clients send what a script says: (client, received, round) to two numbers."""
    start = {"w": torch.zeros(2), "seen": torch.zeros(1)}
    server, engine = scripted(clients, start, participation, model=Two())
    server.state = type(server.state)(algorithm.server_state(start))
    engine.script["train"] = lambda i, message, t: Update(
        {"w": torch.tensor(script(i, message.weights["w"].tolist(), t)), "seen": torch.tensor([100.0 * i])}, i + 1
    )
    return server, engine


def play(algorithm, server, rounds):
    for t in range(rounds):
        server.begin(t)
        algorithm.round(server, t)


def centres(server):
    return [[round(x, 4) for x in model["w"].tolist()] for model in server.state.models]


def test_two_rounds_by_hand():
    first = {0: [1.0, 0.0], 1: [3.0, 0.0], 2: [-1.0, 1.0], 3: [-1.0, -1.0]}
    second = {0: [2.0, 0.0], 1: [0.6, 0.0], 2: [0.4, 0.0], 3: [-2.0, 0.0]}  # halfway between the centres: .5
    algorithm = FeSEM()
    server, engine = begun(algorithm, lambda i, received, t: (first, second)[t][i])
    play(algorithm, server, 1)
    assert server.state.clusters == {0: 0, 1: 0, 2: 1, 3: 1}
    assert centres(server) == [[2.0, 0.0], [-1.0, 0.0]]
    server.begin(1)
    algorithm.round(server, 1)
    got = [message.weights["w"].tolist() for _, _, i, message in sorted(engine.sent[4:], key=lambda sent: sent[2])]
    assert got == [[2, 0], [2, 0], [-1, 0], [-1, 0]]
    assert server.state.clusters == {0: 0, 1: 0, 2: 1, 3: 1}
    assert centres(server) == [[1.3, 0.0], [-0.8, 0.0]]
    assert [float(model["seen"]) for model in server.state.models] == [50, 250]  # averaged, and in no distance


def test_a_client_goes_where_its_model_goes_and_a_centre_that_nobody_is_near_stays():
    def script(i, received, t):
        return [1.0, 0.0] if t else {0: [1.0, 0.0], 1: [1.0, 0.0], 2: [-1.0, 0.0], 3: [-1.0, 0.0]}[i]

    algorithm = FeSEM(weighting="samples")
    server, _ = begun(algorithm, script)
    play(algorithm, server, 2)
    assert server.state.clusters == dict.fromkeys(range(4), 0)
    assert centres(server) == [[1.0, 0.0], [-1.0, 0.0]]


def test_the_mean_may_weigh_by_samples():
    algorithm = FeSEM(weighting="samples")
    server, _ = begun(algorithm, lambda i, received, t: [1.0 + i % 2, 0.0] if i < 2 else [-9.0, float(i)])
    play(algorithm, server, 1)
    assert centres(server)[0] == [round((1 * 1 + 2 * 2) / 3, 4), 0.0]


def test_who_has_no_centre_yet_begins_between_them():
    """There it is as near to the one as to the other, so that its own movement decides."""
    algorithm = FeSEM()
    server, engine = begun(
        algorithm, lambda i, received, t: [received[0] + (2.0 if i % 2 else -1.0), 0.0], clients=8, participation=0.5
    )
    seen: set[int] = set()
    for t in range(12):
        server.begin(t)
        before, models = len(engine.sent), server.state.models
        algorithm.round(server, t)
        for _, _, i, message in engine.sent[before:]:
            if models and i not in seen:
                middle = sum(float(model["w"][0]) for model in models) / 2
                assert float(message.weights["w"][0]) == pytest.approx(middle)
        seen |= {i for _, _, i, _ in engine.sent[before:]}
        if len(seen) == 8:
            break
    assert len(seen) == 8
    assert (
        len({server.state.clusters[i] for i in (0, 2, 4, 6)})
        == len({server.state.clusters[i] for i in (1, 3, 5, 7)})
        == 1
    )


def test_fewer_replies_than_centres_leave_one_model():
    algorithm = FeSEM(clusters=3)
    server, _ = begun(algorithm, lambda i, received, t: [float(i), 0.0], participation=0.5)
    play(algorithm, server, 2)
    assert len(server.state.models) == 1
    assert server.state.clusters == {}
    assert any("clusters" in sentence for sentence in server.warnings)


def test_as_many_replies_as_centres_have_a_centre_each():
    server, _ = begun(FeSEM(clusters=4), lambda i, received, t: [float(i), 0.0])
    play(FeSEM(clusters=4), server, 1)
    assert server.state.clusters == {0: 0, 1: 1, 2: 2, 3: 3}
    assert centres(server) == [[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_with_one_centre_it_is_fedavg_to_the_bit(weighting, participation):
    plain, own = (
        run_rounds(a, rounds=3, participation=participation, model={"width": "wide"})
        for a in (FedAvg(**QUICK, weighting=weighting), FeSEM(**QUICK, weighting=weighting, clusters=1))
    )
    assert tree.sha256(own.state.models[0]) == tree.sha256(plain.state.weights)
    assert own.costs.legs == plain.costs.legs


def test_two_kinds_of_clients_find_their_centres():
    algorithm = FeSEM(**{**QUICK, "local_epochs": 2})
    server = run_rounds(algorithm, rounds=5, federation=two_kinds(), model={"latent_activation": "relu"})
    assert server.state.clusters == {0: 0, 1: 0, 2: 1, 3: 1}
    assert min(server.evaluation.accuracy_by_client) > 0.9


def test_slips():
    with refused("aggregation", "fednova with fesem"):
        run_rounds(FeSEM(aggregation="fednova"), rounds=1)
    with refused("local", "scaffold with fesem"):
        run_rounds(FeSEM(local="scaffold", optimizer="sgd"), rounds=1)
