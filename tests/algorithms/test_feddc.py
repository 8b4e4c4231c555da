"""FedDC: its terms by hand, and that without one half it is FedDyn and without the other SCAFFOLD."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.helpers import refused, run_rounds, scripted, start_of
from torch import nn

from fedfill.algorithms import Start, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.feddc import FedDC
from fedfill.algorithms.feddyn import FedDyn
from fedfill.algorithms.fedprox import FedProx
from fedfill.algorithms.scaffold import Scaffold
from fedfill.training.fit import LocalTraining, Penalty

SGD = {"local_epochs": 2, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.05, "weighting": "uniform"}
TRAINING = LocalTraining(optimizer="sgd", learning_rate=0.5)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))


def one(w: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([w])}


class WithoutControl(FedDC):
    def penalty(self, start: Start) -> Penalty:
        made = super().penalty(start)
        return Penalty(made.mu, made.centre)


class WithoutDrift(FedDC):
    def combine(self, server: Any, weights: Any, mean: Any, replies: Sequence[Any]) -> Any:
        return FedAvg.combine(self, server, weights, mean, replies)


def test_the_gradient_by_hand():
    model = One()
    with torch.no_grad():
        model.w.fill_(3.0)
    start = start_of(one(1.0), control=one(3.0), model=One(), training=TRAINING, drift=one(0.5))
    start.client.state.control = one(1.0)
    (5 * model.w.sum()).backward()
    FedDC(dc_alpha=0.1).penalty(start).adder(model)()
    # g + alpha (w - (w_t - h_i)) + c - c_i
    assert model.w.grad.item() == pytest.approx(5 + 0.1 * (3 - (1 - 0.5)) + 3 - 1)


def test_a_clients_state_by_hand():
    start = start_of(one(2.0), control=one(3.0), model=One(), training=TRAINING, drift=one(0.5))
    start.client.state.control = one(1.0)
    change = FedDC().up(start, one(0.0), steps=4)
    assert start.client.state.drift["w"].item() == 0.5 - 2.0
    # c_i+ = 1 - 3 + 2 / (4 * 0.5)
    assert start.client.state.control["w"].item() == -1.0
    assert change["w"].item() == -2.0
    assert FedDC().up(start, one(2.0), steps=0)["w"].item() == 0.0  # no step: nothing new
    assert start.client.state.drift["w"].item() == -1.5


def test_round_by_hand_with_half_of_the_clients():
    weights = {**one(1.0), "mean": torch.tensor([0.0])}
    server, engine = scripted(clients=4, weights=weights, participation=0.5, model=One())
    server.state.control, server.state.drift = one(10.0), one(0.1)
    engine.script["train"] = lambda i, message, t: Update(
        {**one(2.0), "mean": torch.tensor([6.0])}, samples=1 + i, control=one(8.0)
    )
    FedDC().round(server, 0)
    assert all(message.control["w"].item() == 10.0 for _, _, _, message in engine.sent)
    drift = 0.1 + 2 / 4 * (2.0 - 1.0)
    assert server.state.drift["w"].item() == pytest.approx(drift)
    assert server.state.weights["w"].item() == pytest.approx(2.0 + drift)
    assert server.state.weights["mean"].item() == 6.0
    assert server.state.control["w"].item() == pytest.approx(10.0 + 2 / 4 * 8.0)


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], tensor, atol=2e-5) for name, tensor in other.items())


def test_without_the_correction_it_is_feddyn():
    """g_i is -alpha h_i, and h is -alpha times the mean of all clients' h_i."""
    dyn = run_rounds(FedDyn(**SGD, dyn_alpha=0.1), rounds=3, participation=0.5).state
    half = run_rounds(WithoutControl(**SGD, dc_alpha=0.1), rounds=3, participation=0.5).state
    assert close(half.weights, dyn.weights)
    assert close({name: -0.1 * h for name, h in half.drift.items()}, dyn.h)
    assert not close(run_rounds(FedDC(**SGD, dc_alpha=0.1), rounds=3, participation=0.5).state.weights, dyn.weights)


def test_without_the_drift_it_is_scaffold():
    scaffold = run_rounds(Scaffold(**SGD), rounds=3, participation=0.5).state
    half = run_rounds(WithoutDrift(**SGD, dc_alpha=0.0), rounds=3, participation=0.5).state
    assert close(half.weights, scaffold.weights)
    assert close(half.control, scaffold.control)


def test_the_first_round_goes_twice_as_far_as_fedprox():
    prox = run_rounds(FedProx(**SGD, mu=0.3), rounds=1)
    twice = run_rounds(FedDC(**SGD, dc_alpha=0.3), rounds=1).state.weights
    start = prox.initial
    assert close(twice, {name: w + (w - start[name]) for name, w in prox.state.weights.items()})


def test_server_and_clients_agree_when_all_take_part():
    server = run_rounds(FedDC(local_epochs=2, batch_size=8), rounds=3, model={"width": "wide"})
    for key in ("control", "drift"):
        kept = getattr(server.state, key)
        assert not any("running" in name for name in kept)
        for name, tensor in kept.items():
            own = torch.stack([server.client_states[i][key][name] for i in range(4)])
            assert torch.allclose(own.mean(0), tensor, atol=1e-5)


def test_it_learns():
    settings = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.05, "dc_alpha": 0.1}
    server = run_rounds(FedDC(**settings), rounds=10, model={"latent_activation": "relu"})
    assert server.evaluation.accuracy > 0.9


@pytest.mark.parametrize(
    ("settings", "setting", "found"),
    [
        ({"optimizer": "adam"}, "optimizer", "optimizer=adam"),
        ({"momentum": 0.9}, "optimizer", "momentum=0.9"),
        ({"aggregation": "fednova"}, "aggregation", "fednova"),
        ({"local": "fedprox"}, "local", "fedprox"),
    ],
)
def test_it_only_makes_sense_as_a_whole(settings: dict[str, Any], setting: str, found: str):
    with refused(setting, f"{found} with feddc"):
        run_rounds(FedDC(**settings), rounds=1)
