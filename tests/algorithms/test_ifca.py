"""IFCA: several models, of which each client chooses one by its loss; and averages by cluster."""

import pytest
import torch
from tests.helpers import refused, run_rounds, scripted, two_kinds

from fedfill import tree
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.ifca import IFCA, ClusterUpdate
from fedfill.training.evaluation import mean_loss

QUICK = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_with_one_cluster_it_is_fedavg_to_the_bit(weighting: str):
    for participation in (1.0, 0.5):
        plain, own = (
            run_rounds(a, rounds=3, participation=participation, model={"width": "wide"})
            for a in (FedAvg(**QUICK, weighting=weighting), IFCA(**QUICK, weighting=weighting, clusters=1))
        )
        assert tree.sha256(own.state.models[0]) == tree.sha256(plain.state.weights)
        assert own.costs.train_samples == plain.costs.train_samples


def test_two_kinds_of_clients_find_their_models():
    settings = {**QUICK, "local_epochs": 2}
    plain, server = (
        run_rounds(a, rounds=5, federation=two_kinds(), model={"latent_activation": "relu"})
        for a in (FedAvg(**settings), IFCA(**settings))
    )
    chosen = [server.client_states[i]["cluster"] for i in range(4)]
    assert chosen[0] == chosen[1] != chosen[2] == chosen[3]
    assert min(server.evaluation.accuracy_by_client) > 0.9
    assert sum(plain.evaluation.accuracy_by_client) / 4 < 0.8  # one model can't be right for both


def test_clients_choose_the_least_loss_and_a_model_that_nobody_chose_stays():
    algorithm = IFCA(**QUICK, clusters=3)
    begun = {}

    def look(server, t):
        begun[t] = [dict(model) for model in server.state.models]

    server = run_rounds(algorithm, rounds=2, after=look, federation=two_kinds())
    chosen = {int(i): j for i, j in server.history[1]["clusters"].items()}
    for i, client in enumerate(two_kinds().clients):
        losses = [mean_loss(server_model(server, model), client.train) for model in begun[0]]
        assert chosen[i] == losses.index(min(losses))
    for j in range(3):
        same = tree.sha256(begun[0][j]) == tree.sha256(begun[1][j])
        assert same is (j not in chosen.values())


def test_a_cluster_that_there_is_not_is_left_out():
    start = {"weight": torch.zeros(1, 1)}
    server, engine = scripted(4, start, model=torch.nn.Linear(1, 1, bias=False))
    server.state = type(server.state)({**IFCA().server_state(start), "models": [start, {"weight": torch.ones(1, 1)}]})
    sent = {0: (4.0, 1), 1: (8.0, -1), 2: (8.0, 2), 3: (6.0, 1)}
    engine.script["choose_and_train"] = lambda i, message, t: ClusterUpdate(
        {"weight": torch.tensor([[sent[i][0]]])}, 1, cluster=sent[i][1]
    )
    IFCA().round(server, 0)
    assert [lost["client"] for lost in server.lost] == [1, 2]
    assert [float(model["weight"]) for model in server.state.models] == [0.0, 5.0]
    assert server.notes["clusters"] == {"0": 1, "3": 1}


@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_models_start_apart_with_the_mean_and_the_deviation_of_the_first(spread: float):
    w = 3 + 2 * torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    server, _ = scripted(2, {"weight": w}, model=torch.nn.Linear(200, 200, bias=False))
    server.state = type(server.state)(IFCA().server_state({"weight": w}))
    first, second, third = (model["weight"] for model in IFCA(clusters=3, spread=spread).models(server))
    assert first is w
    for other in (second, third):
        assert float(other.mean()) == pytest.approx(3, abs=0.05)
        assert float(other.std()) == pytest.approx(2, rel=0.02)
        alike = torch.corrcoef(torch.stack([w.flatten(), other.flatten()]))[0, 1]
        assert float(alike) == pytest.approx((1 + spread**2) ** -0.5, abs=0.02)
    assert not torch.equal(second, third)


def server_model(server, weights):
    model = server.model(weights)
    assert not model.training
    return model


def test_all_models_go_down_and_one_comes_up():
    plain, server = (run_rounds(a, rounds=2) for a in (FedAvg(**QUICK), IFCA(**QUICK, clusters=3)))
    down, up = plain.costs.legs["train"]
    assert server.costs.legs == {"choose_and_train": [3 * down, up + 2 * 4 * 8]}


def test_who_has_no_cluster_yet_has_the_first():
    server = run_rounds(IFCA(**QUICK), rounds=1, participation=0.5)
    weights = IFCA(**QUICK).global_weights(server)
    for state, j in (({}, 0), ({"cluster": None}, 0), ({"cluster": 1}, 1)):
        model = IFCA().personal_weights(state, weights)
        assert tree.sha256(model) == tree.sha256(server.state.models[j])
    assert not torch.equal(*(model["classifier.weight"] for model in server.state.models))


def test_slips():
    with refused("spread", 0, "clusters=2"):
        run_rounds(IFCA(spread=0), rounds=1)
    with refused("aggregation", "fednova with ifca"):
        run_rounds(IFCA(aggregation="fednova"), rounds=1)
    with refused("local", "scaffold with ifca"):
        run_rounds(IFCA(local="scaffold", optimizer="sgd"), rounds=1)
