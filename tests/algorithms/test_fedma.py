"""FedMA: layer after layer is matched, sent, and held fast while clients train what comes behind it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import CLASSES, run_rounds, scripted, small_federation
from torch import nn

import fedfill
from fedfill import tree
from fedfill.algorithms.fedma import FedMA, MatchedLayer
from fedfill.algorithms.pfnm import OwnUnits
from fedfill.data.samples import normalise
from fedfill.models.networks import ModelSettings, build
from fedfill.models.units import layers_in_order, reordered
from fedfill.models.views import weights_of
from fedfill.protocol.client import Client
from fedfill.tree import Weights

QUICK: dict[str, Any] = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}
LAYERS = ("encoder.trunk.0", "encoder.trunk.3", "encoder.mu", "classifier")


def test_one_client_without_retraining_is_fedavg_to_the_bit(tmp_path: Path):
    options = {"data": "digits", "clients": 1, "partition": "iid", "data_fraction": 0.1, "rounds": 2, "local_epochs": 1}
    plain = fedfill.run("fedavg", **options, out=tmp_path / "fedavg")
    own = fedfill.run("fedma", **options, retrain_epochs=0, out=tmp_path / "fedma")
    assert own.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert own.summary["train_samples"] == plain.summary["train_samples"]


def test_legs_of_a_round_matched_layers_are_fixed_and_the_rest_is_trained():
    legs: list[tuple[int, int, Weights, Weights, Weights]] = []

    class Seen(FedMA):
        def contribute(self, client, message, loss, **more):
            done = super().contribute(client, message, loss, **more)
            legs.append((client.id, len(message.weights), message.weights, more.get("fixed") or {}, done.trained))
            return done

    server = run_rounds(Seen(**QUICK, own_start=True), rounds=1, workers=1)
    assert [n for i, n, *_ in legs if i == 0] == [8, 6, 4, 2]  # weights and biases of four layers, of three, ...
    for _, _, start, fixed, trained in legs:
        assert not start.keys() & fixed.keys()
        assert start.keys() | fixed.keys() == server.state.weights.keys()
        assert all(not torch.equal(trained[name], w) for name, w in start.items())
        # what is fixed is the global model's already, for all clients the same
        assert all(torch.equal(server.state.weights[name], w) for name, w in fixed.items())
    assert [state["own"] for state in server.client_states.values()] == [None] * 4


def test_a_client_goes_on_from_its_own_network_with_its_units_moved():
    """Where a client's own first layer comes back in another order, its function is the one that it was."""
    network = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), seed=0).eval()
    data = small_federation().clients[0].train
    weights = {name: w + 0.1 * torch.randn(w.shape) for name, w in weights_of(network).items()}
    layers = layers_in_order(network, data.inputs[:1])
    places = torch.randperm(16)
    moved = reordered(weights, layers, 0, places.argsort())

    def resident(loaded: Weights) -> nn.Module:
        network.load_state_dict(loaded)
        return network

    state = type("Own", (), {"own": weights})()
    client = Client(id=0, round=0, data=data, classes=CLASSES, state=state, initial=weights, seed=0, resident=resident)
    algorithm = FedMA(retrain_epochs=0)
    sent = algorithm.retrain(client, MatchedLayer(0, layers[0].of(moved), places))
    assert sent.weights.keys() == {"encoder.trunk.3.weight", "encoder.trunk.3.bias"}
    assert all(torch.equal(w, moved[name]) for name, w in sent.weights.items())
    with torch.no_grad():
        scores = [resident(own)(normalise(data.inputs)) for own in (weights, state.own)]
    assert torch.allclose(*scores, atol=1e-5 * float(scores[0].abs().max()))
    algorithm.retrain(client, MatchedLayer(2, layers[2].of(moved), torch.arange(16)))
    assert state.own is None


def answers(weights: list[Weights], counts: list[list[int]], network: nn.Module) -> dict[str, Any]:
    """Scripted clients that do not train: they move their units as the server says."""
    own = {i: dict(w) for i, w in enumerate(weights)}
    layers = layers_in_order(network, torch.zeros(1, 1, 8, 8, dtype=torch.uint8))

    def train(i: int, message: Any, t: int) -> OwnUnits:
        return OwnUnits(layers[0].of(own[i]), counts[i])

    def retrain(i: int, message: MatchedLayer, t: int) -> OwnUnits:
        n = message.number
        own[i] = {**reordered(own[i], layers, n, message.places.argsort()), **message.weights}
        return OwnUnits(layers[n + 1].of(own[i]), None)

    return {"train": train, "retrain": retrain}


@pytest.mark.parametrize("name", ["cnn2", "cnn4", "cnn2fc-small"])
def test_permutations_of_one_network_become_that_network(name: str):
    network = build(name, (1, 8, 8), CLASSES, ModelSettings(), seed=0).eval()
    stream = torch.Generator().manual_seed(1)
    weights = {k: w + 0.1 * torch.randn(w.shape, generator=stream) for k, w in weights_of(network).items()}
    inputs = small_federation().test.inputs
    layers = layers_in_order(network, inputs[:1])
    clients = []
    for _ in range(4):
        own = weights
        for n, layer in enumerate(layers[:-1]):
            own = reordered(own, layers, n, torch.randperm(layer.outputs, generator=stream))
        clients.append(own)
    server, engine = scripted(clients=4, weights=weights, model=network)
    engine.script |= answers(clients, [[4, 3, 2, 1]] * 4, network)
    FedMA().round(server, 0)
    assert all(torch.equal(server.state.weights[k], w) for k, w in clients[0].items())  # whose order is kept
    with torch.no_grad():
        scores = []
        for own in (weights, server.state.weights):
            network.load_state_dict(own)
            scores.append(network(normalise(inputs)))
    assert torch.allclose(*scores, atol=1e-5 * float(scores[0].abs().max()))


def test_a_round_worked_by_hand():
    """The second client's units are the first's the other way round; the last layer counts by shares of each class's
    records, of the first client 3/4, 0, 1/2 (nobody has one) and 1/4."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.ReLU(), nn.Linear(2, CLASSES))
    first, second = (torch.zeros(2, 64) for _ in range(2))
    first[0, 0], first[1, 1] = 1, 2
    second[1, 0], second[0, 1] = 3, 4
    clients = [
        {
            "1.weight": first, "1.bias": torch.tensor([1.0, 0.0]),
            "3.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 2.0]]), "3.bias": torch.zeros(4),
        },
        {
            "1.weight": second, "1.bias": torch.tensor([0.0, 2.0]),
            "3.weight": torch.tensor([[0.0, 5.0], [3.0, 0.0], [7.0, 0.0], [6.0, 0.0]]), "3.bias": torch.ones(4),
        },
    ]  # fmt: skip
    server, engine = scripted(clients=2, weights=weights_of(network), model=network)
    engine.script |= answers(clients, [[30, 0, 0, 1], [10, 5, 0, 3]], network)
    FedMA().round(server, 0)
    found = server.state.weights
    assert found["1.weight"][:, :2].tolist() == [[2.0, 0.0], [0.0, 3.0]]
    assert found["1.bias"].tolist() == [1.5, 0.0]
    assert torch.allclose(found["3.weight"], torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 3.5], [0.0, 5.0]]))
    assert torch.allclose(found["3.bias"], torch.tensor([0.25, 1.0, 0.5, 0.75]))
    sent = {(handler, i): message for _, handler, i, message in engine.sent}
    assert sent["retrain", 1].places.tolist() == [1, 0]
    assert sent["retrain", 0].weights["1.weight"] is sent["retrain", 1].weights["1.weight"]


def test_a_client_that_is_lost_on_the_way_is_left_out_from_there():
    network = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), seed=0).eval()
    weights = weights_of(network)
    clients = [{k: w + i for k, w in weights.items()} for i in range(3)]
    server, engine = scripted(clients=3, weights=weights, model=network)
    script = answers(clients, [[1, 1, 1, 1]] * 3, network)

    def retrain(i: int, message: MatchedLayer, t: int) -> OwnUnits:
        if i == 0 and message.number == 1:
            raise RuntimeError("gone")
        return script["retrain"](i, message, t)

    engine.script |= {**script, "retrain": retrain}
    FedMA().round(server, 0)
    means = {
        path: float(server.state.weights[f"{path}.bias"].mean() - weights[f"{path}.bias"].mean()) for path in LAYERS
    }
    assert list(means.values()) == pytest.approx([1.0, 1.0, 1.5, 1.5])
    assert [(handler, i) for _, handler, i, _ in engine.sent if i == 0] == [
        ("train", 0),
        ("retrain", 0),
        ("retrain", 0),
    ]


def test_bytes_of_all_legs_and_samples_of_all_trainings():
    plain, server = (run_rounds(FedMA(**QUICK, retrain_epochs=n), rounds=1) for n in (0, 2))
    p = {path: sum(w.numel() for k, w in server.state.weights.items() if k.startswith(f"{path}.")) for path in LAYERS}
    total, *_ = [sum(p.values())]
    hidden = 16 + 32 + 16
    assert server.costs.legs == {
        "train": [4 * 4 * total, 4 * (4 * p["encoder.trunk.0"] + 8 * CLASSES)],
        "retrain": [
            4 * (4 * (total - p["classifier"]) + 8 * hidden + 3 * 8),
            4 * 4 * (total - p["encoder.trunk.0"]),
        ],
    }
    assert plain.costs.legs == server.costs.legs
    assert (plain.costs.train_samples, server.costs.train_samples) == (4 * 40, 4 * 40 * (1 + 3 * 2))


def test_a_network_without_hidden_layers_is_averaged_by_class(tmp_path: Path):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    options = {"data": "digits", "clients": 3, "data_fraction": 0.1, "rounds": 2, "local_epochs": 1, "model": network}
    found = {fedfill.run(name, **options, out=tmp_path / name).summary["weights_sha256"] for name in ("pfnm", "fedma")}
    assert len(found) == 1


def test_two_runs_are_the_same_and_retraining_is_not_nothing():
    once, twice, more = (run_rounds(FedMA(**QUICK, retrain_epochs=n), rounds=2) for n in (1, 1, 2))
    same = run_rounds(FedMA(**QUICK), rounds=2)
    assert len({tree.sha256(server.state.weights) for server in (once, twice, same)}) == 1
    assert tree.sha256(more.state.weights) != tree.sha256(once.state.weights)
