"""PFNM: units are matched before networks are averaged; permuted networks are one, one client is FedAvg."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import CLASSES, Run, bars, refused, run_rounds, scripted, small_federation
from torch import nn

import fedfill
from fedfill import tree
from fedfill.algorithms.fedma import FedMA
from fedfill.algorithms.pfnm import PFNM, OwnUnits
from fedfill.data.samples import normalise
from fedfill.models.networks import ModelSettings, build
from fedfill.models.units import layers_in_order, reordered
from fedfill.models.views import weights_of
from fedfill.tree import Weights

QUICK: dict[str, Any] = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}
EQUAL = [10] * CLASSES


def test_one_client_is_fedavg_to_the_bit(tmp_path: Path):
    options = {"data": "digits", "clients": 1, "partition": "iid", "data_fraction": 0.1, "rounds": 2, "local_epochs": 1}
    plain, own = (fedfill.run(name, **options, out=tmp_path / name) for name in ("fedavg", "pfnm"))
    assert own.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert [set(record["moved"].values()) for record in own.rounds] == [{0.0}] * 2


def permuted(weights: Weights, layers: list[Any], seed: int) -> Weights:
    stream = torch.Generator().manual_seed(seed)
    for n, layer in enumerate(layers[:-1]):
        weights = reordered(weights, layers, n, torch.randperm(layer.outputs, generator=stream))
    return weights


@pytest.mark.parametrize("name", ["cnn2", "cnn4", "cnn2fc-small"])
def test_permutations_of_one_network_become_that_network(name: str):
    network = build(name, (1, 8, 8), CLASSES, ModelSettings(projection=9), seed=0).eval()
    stream = torch.Generator().manual_seed(1)
    for parameter in network.parameters():  # biases are zeros at the start
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=stream)
    inputs = bars(20, [0, 1, 2, 3], 0).inputs
    weights, layers = weights_of(network), layers_in_order(network, inputs[:1])
    with torch.no_grad():
        scores = network(normalise(inputs))
    server, engine = scripted(clients=5, weights=weights, model=network)
    engine.script["train"] = lambda i, message, t: OwnUnits(permuted(weights, layers, i), EQUAL)
    PFNM().round(server, 0)
    found = server.state.weights
    network.load_state_dict(found)
    with torch.no_grad():
        assert torch.allclose(network(normalise(inputs)), scores, atol=1e-5 * float(scores.abs().max()))
    first = permuted(weights, layers, 0)  # whose order is kept
    assert all(torch.equal(found[key], w) for key, w in first.items())
    assert min(server.notes["moved"].values()) > 0.5


def test_equal_networks_keep_their_order():
    network = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), seed=0)
    weights = weights_of(network)
    server, engine = scripted(clients=3, weights=weights, model=network)
    engine.script["train"] = lambda i, message, t: OwnUnits(dict(weights), [i, 1, 2, 3])
    PFNM().round(server, 0)
    assert set(server.notes["moved"].values()) == {0.0}
    assert all(torch.allclose(server.state.weights[name], w, atol=1e-7) for name, w in weights.items())


def by_hand() -> tuple[nn.Module, list[OwnUnits]]:
    """Two networks of two inputs, two hidden units and four classes; the second has its units the other way round."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.ReLU(), nn.Linear(2, CLASSES))
    first, second = (torch.zeros(2, 64) for _ in range(2))
    first[0, 0], first[1, 1] = 1, 2
    second[1, 0], second[0, 1] = 3, 4
    own = [
        OwnUnits(
            {
                "1.weight": first, "1.bias": torch.tensor([1.0, 0.0]),
                "3.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 2.0]]), "3.bias": torch.zeros(4),
            },
            [30, 0, 0, 1],
        ),
        OwnUnits(
            {
                "1.weight": second, "1.bias": torch.tensor([0.0, 2.0]),
                "3.weight": torch.tensor([[0.0, 5.0], [3.0, 0.0], [7.0, 0.0], [6.0, 0.0]]), "3.bias": torch.ones(4),
            },
            [10, 5, 0, 3],
        ),
    ]  # fmt: skip
    return network, own


@pytest.mark.parametrize("prior", [None, 0.5])
def test_a_round_worked_by_hand(prior: float | None):
    """Hidden units count alike; each class of the last layer counts by the share of its records: of the first client 3/4,
    0, 1/2 (nobody has one) and 1/4. A prior of twice a client's precision divides 2 clients' sums by 4, a class's by 3."""
    network, own = by_hand()
    server, engine = scripted(clients=2, weights=weights_of(network), model=network)
    engine.script["train"] = lambda i, message, t: own[i]
    PFNM(prior_variance=prior).round(server, 0)
    found = server.state.weights
    hidden, last = (2, 1) if prior is None else (4, 3)
    assert found["1.weight"][:, :2].tolist() == [[4 / hidden, 0.0], [0.0, 6 / hidden]]
    assert not found["1.weight"][:, 2:].any()
    assert found["1.bias"].tolist() == [3 / hidden, 0.0]
    assert torch.allclose(
        found["3.weight"] * last, torch.tensor([[0.75 + 1.25, 0.0], [0.0, 3.0], [0.0, 3.5], [0.0, 0.5 + 4.5]])
    )
    assert torch.allclose(found["3.bias"] * last, torch.tensor([0.25, 1.0, 0.5, 0.75]))
    assert server.notes["moved"] == {"1": 0.5}


@pytest.mark.parametrize(
    ("theirs", "weight", "moved"), [([1, 0, 0, 0], 9.0, True), ([1, 1, 0, 0], 1.2, True), ([1, 1, 0, 0], 1.5, False)]
)
def test_weights_into_a_class_count_by_both_clients_shares_of_it(theirs: list[int], weight: float, moved: bool):
    """Two hidden units each. By class 0, of which both have 1/2, the second client's are the other way round: a gain of
    1/2 * 1/2. By class 1 they are in order: 3/4 * 1/4 * 1.2 is less, times 1.5 more, and 1 * 0 * 9 is nothing."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.ReLU(), nn.Linear(2, CLASSES))
    nothing = {name: torch.zeros_like(w) for name, w in weights_of(network).items()}
    own = []
    for counts, places, size in (([1, 3, 0, 0], (0, 1), 1.0), (theirs, (1, 0), weight)):
        outgoing = torch.zeros(CLASSES, 2)
        outgoing[0, places[0]], outgoing[1, 0] = 1.0, size
        own.append(OwnUnits({**nothing, "3.weight": outgoing}, counts))
    server, engine = scripted(clients=2, weights=weights_of(network), model=network)
    engine.script["train"] = lambda i, message, t: own[i]
    PFNM().round(server, 0)
    assert server.notes["moved"] == {"1": 0.5 if moved else 0.0}
    assert server.state.weights["3.weight"][0].tolist() == ([1.0, 0.0] if moved else [0.5, 0.5])


def test_units_are_matched_by_their_biases_too():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.ReLU(), nn.Linear(2, CLASSES))
    nothing = {name: torch.zeros_like(w) for name, w in weights_of(network).items()}
    server, engine = scripted(clients=2, weights=weights_of(network), model=network)
    engine.script["train"] = lambda i, message, t: OwnUnits({**nothing, "1.bias": torch.eye(2)[i]}, EQUAL)
    PFNM().round(server, 0)
    assert server.state.weights["1.bias"].tolist() == [1.0, 0.0]


def test_who_has_no_record_has_no_say_and_nonsense_is_left_out():
    network, own = by_hand()
    own += [replace(own[1], counts=counts) for counts in ([0] * 4, [1] * 5, [-1, 1, 1, 1], None)]
    own += [replace(own[1], weights={**own[1].weights, "1.bias": torch.zeros(3)})]
    found = []
    for clients in (2, 7):
        server, engine = scripted(clients=clients, weights=weights_of(network), model=network)
        engine.script["train"] = lambda i, message, t: own[i]
        PFNM().round(server, 0)
        found.append(tree.sha256(server.state.weights))
    assert found[0] == found[1]
    assert sorted(loss["client"] for loss in server.lost) == [3, 4, 5, 6]
    server, engine = scripted(clients=1, weights=weights_of(network), model=network)
    engine.script["train"] = lambda i, message, t: own[2]
    PFNM().round(server, 0)
    assert tree.sha256(server.state.weights) == tree.sha256(weights_of(network))
    assert "No client" in server.warnings[0]


def test_it_learns_from_starts_of_clients_own_and_they_are_draws_of_the_same_law():
    starts: dict[int, dict[int, Weights]] = {0: {}, 1: {}}

    class Seen(PFNM):
        def start(self, client, weights):
            found = starts[client.round][client.id] = super().start(client, weights)
            return found

    run_rounds(Seen(**QUICK, own_start=True), rounds=2, workers=1)
    initial = weights_of(build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), seed=0))
    for i, own in starts[0].items():
        for name, w in initial.items():
            assert torch.equal(own[name].flatten().sort()[0], w.flatten().sort()[0])
            assert not w.any() or not torch.equal(own[name], w)
            assert i == 0 or not w.any() or not torch.equal(own[name], starts[0][0][name])
    assert len({tree.sha256(own) for own in starts[1].values()}) == 1  # and then from the global model


def test_matching_helps_networks_of_clients_own_starts(monkeypatch: pytest.MonkeyPatch):
    """All clients have all classes: what is left to overcome is the order of the units."""
    settings, world = {**QUICK, "own_start": True, "local_epochs": 4}, small_federation(per_client=CLASSES)
    matched = run_rounds(PFNM(**settings), rounds=1, federation=world)
    monkeypatch.setattr("fedfill.algorithms.pfnm.match", lambda units, *_: [torch.arange(len(own)) for own in units])
    plain = run_rounds(PFNM(**settings), rounds=1, federation=world)
    assert matched.evaluation.loss < plain.evaluation.loss
    assert min(matched.history[0]["moved"].values()) > 0.3


@pytest.mark.parametrize("kind", [PFNM, FedMA])
def test_workers_change_no_bit(kind: type[PFNM]):
    for own_start in (False, True):
        found = [
            run_rounds(kind(**QUICK, own_start=own_start), rounds=3, participation=0.5, workers=workers)
            for workers in (1, 2)
        ]
        assert tree.sha256(found[0].state.weights) == tree.sha256(found[1].state.weights)


@pytest.mark.parametrize("kind", [PFNM, FedMA])
def test_what_composes_and_what_does_not(kind: type[PFNM]):
    for local in ("fedprox:mu=0.1", "fedlc", "fedrs", "fedntd", "feddecorr", "fedsam", "perfedavg"):
        own, plain = (run_rounds(kind(**QUICK, local=value), rounds=1) for value in (local, None))
        assert tree.sha256(own.state.weights) != tree.sha256(plain.state.weights), local
    for local in ("moon", "scaffold", "fedcurv"):
        with refused("local", local, kind.name, "fedprox"):
            Run(kind(local=local, optimizer="sgd"), {"projection": 8}, 1, 1.0, 1)
    for aggregation in ("fednova", "qffl", "dpfedavg", "fedavgm"):
        with refused("aggregation", aggregation, kind.name):
            Run(kind(aggregation=aggregation, optimizer="sgd"), {}, 1, 1.0, 1)
    assert kind.axes() == []
    with refused("model", kind.name, "PReLU", "cnn2fc"):
        Run(kind(), {"width": "wide"}, 1, 1.0, 1)
