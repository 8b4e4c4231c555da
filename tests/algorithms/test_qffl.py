"""q-FFL: a client's numbers and a round by hand, and q = 0."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import bars, refused, run_rounds, scripted, start_of
from torch import nn

import fedfill
from fedfill.algorithms import Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.qffl import QFFL
from fedfill.training.fit import LocalTraining


class One(nn.Module):
    """Two scores, 0 and w, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.zeros(len(x)), self.w.expand(len(x))], 1)


def two(w: float, mean: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([w]), "mean": torch.tensor([mean])}


def test_a_clients_numbers_by_hand():
    start = start_of(two(0.0, 1.0), model=One(), data=bars(6, [0, 1], 0), training=LocalTraining(learning_rate=0.1))
    packed, h = QFFL(q=2.0).pack(start, two(-0.3, 4.0), steps=5)
    loss, moved = math.log(2), 10 * 0.3
    assert packed["w"].item() == pytest.approx(loss**2 * moved, rel=1e-5)
    assert packed["mean"].item() == 4.0
    assert h == pytest.approx(2 * loss * moved**2 + 10 * loss**2, rel=1e-5)


def test_a_clients_loss_is_on_the_data_that_it_trains_on():
    """A method may train on other samples than the client's own: here on images of class 1, and the client's are of class 0."""
    received = two(math.log(3), 1.0)  # scores 0 and ln 3: class 1 has 3/4
    start = start_of(received, model=One(), data=bars(4, [0], 0), training=LocalTraining(learning_rate=0.1))
    start = replace(start, data=bars(4, [1], 0))
    packed, h = QFFL(q=1.0).pack(start, two(math.log(3) - 0.3, 1.0), steps=5)
    assert packed["w"].item() == pytest.approx(math.log(4 / 3) * 3, rel=1e-5)
    assert h == pytest.approx(9 + 10 * math.log(4 / 3), rel=1e-5)


def test_round_by_hand():
    server, engine = scripted(clients=2, weights=two(10.0, 0.0), model=One())
    engine.script["train"] = lambda i, message, t: Update(
        two([6.0, 3.0][i], float(i)), [1, 999][i], scale=[1.0, 2.0][i]
    )
    QFFL().round(server, 0)
    assert server.state.weights["w"].item() == pytest.approx(10 - 9 / 3)
    assert server.state.weights["mean"].item() == pytest.approx(0.5)


def test_q_0_is_the_plain_mean():
    settings = {"local_epochs": 2, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.05}
    plain = run_rounds(FedAvg(**settings, weighting="uniform"), rounds=2).state.weights
    fair = run_rounds(QFFL(**settings, q=0.0), rounds=2).state.weights
    assert all(torch.allclose(fair[n], plain[n], atol=1e-5) for n in plain)


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"optimizer": "sgd", "momentum": 0.9}])
def test_q_0_is_the_plain_mean_of_steps_of_any_length(settings: dict[str, Any]):
    settings = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01, **settings}
    plain = run_rounds(FedAvg(**settings, weighting="uniform"), rounds=2).state.weights
    for host in (QFFL(**settings, q=0.0), FedAvg(**settings, aggregation="qffl:q=0")):
        fair = run_rounds(host, rounds=2).state.weights
        assert all(torch.allclose(fair[n], plain[n], atol=1e-5) for n in plain)


def test_a_client_with_a_larger_loss_moves_the_model_more():
    packed = {}
    for i, received in enumerate((two(0.0, 0.0), two(3.0, 0.0))):  # labels 0: the loss grows with w
        start = start_of(received, model=One(), data=bars(4, [0], 0), training=LocalTraining(learning_rate=0.1))
        packed[i] = QFFL(q=1.0).pack(start, {**received, "w": received["w"] - 0.1}, steps=1)
    assert packed[1][0]["w"].item() > 3 * packed[0][0]["w"].item()


def test_a_q_beyond_all_numbers_is_named(tmp_path):
    with refused("q", "1000"):
        fedfill.run("qffl", q=1000, rounds=1, clients=3, local_epochs=1, data_fraction=0.2, out=tmp_path)


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"optimizer": "sgd", "momentum": 0.9}])
@pytest.mark.parametrize("name", ["qffl", "fedprox"])
def test_only_plain_gradient_steps_are_measured(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    options = {"data": "digits", "clients": 2, "rounds": 1, "local_epochs": 1, "data_fraction": 0.2, **settings}
    given = options if name == "qffl" else {**options, "aggregation": "qffl"}
    with refused("optimizer", "qffl", "q=0", *(f"{key}={value}" for key, value in settings.items())):
        fedfill.run(name, out=tmp_path / "refused", **given)
    free = {**options, "q": 0} if name == "qffl" else {**options, "aggregation": "qffl:q=0"}
    fedfill.run(name, out=tmp_path / "free", **free)
