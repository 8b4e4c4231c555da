"""MoFedSAM: the mixed step and the cohort's direction by hand, and what it is at the ends of its settings."""

from typing import Any

import pytest
import torch
from tests.helpers import refused, run_rounds, scripted, start_of
from torch import nn

from fedfill.algorithms import Update
from fedfill.algorithms.fedsam import FedSAM, MoFedSAM
from fedfill.training.fit import Context

SGD = {"local_epochs": 2, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.05, "weighting": "uniform"}


class One(nn.Module):
    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))
        self.register_buffer("mean", torch.zeros(1))


def one(w: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([w])}


def test_a_step_mixes_the_own_gradient_with_the_cohorts_direction():
    """v = .1 g + .9 M, with g of w^2/2 taken at 1 + .1."""
    algorithm, model = MoFedSAM(rho=0.1), One(1.0)
    start = start_of(one(1.0), control=one(4.0), model=One())
    objective = algorithm.objective(start, lambda m, b, c: m.w.square().sum() / 2)
    stub = type("Stub", (), {"inputs": torch.zeros(1), "labels": None, "index": None})()
    objective(model, stub, Context({}, torch.Generator(), 0)).backward()
    algorithm.penalty(start).adder(model)()
    assert model.w.grad.item() == pytest.approx(0.1 * 1.1 + 0.9 * 4.0)


def test_the_direction_is_the_mean_movement_per_step_by_hand():
    weights = {**one(1.0), "mean": torch.tensor([0.0])}
    server, engine = scripted(clients=4, weights=weights, participation=0.5, model=One())
    server.state.direction = one(10.0)
    steps = {i: 3.0 + k for k, i in enumerate(server.select(0))}
    engine.script["train"] = lambda i, message, t: Update(
        {**one(0.0), "mean": torch.tensor([6.0])}, samples=1 + i, scale=steps[i]
    )
    MoFedSAM(learning_rate=0.5).round(server, 0)
    assert all(message.control["w"].item() == 10.0 for _, _, _, message in engine.sent)
    assert server.state.direction["w"].item() == pytest.approx(1.0 / (3.5 * 0.5))
    assert list(server.state.direction) == ["w"]
    assert server.state.weights["mean"].item() == 6.0


def test_where_nobody_made_a_step_the_direction_stays():
    server, engine = scripted(clients=2, weights=one(1.0), model=One())
    server.state.direction = one(10.0)
    engine.script["train"] = lambda i, message, t: Update(one(1.0), samples=0, scale=0.0)
    MoFedSAM().round(server, 0)
    assert server.state.direction["w"].item() == 10


def test_with_the_own_gradient_alone_it_is_fedsam_to_the_bit():
    plain = run_rounds(FedSAM(**SGD), rounds=3, participation=0.5).state.weights
    same = run_rounds(MoFedSAM(**SGD, own_share=1.0), rounds=3, participation=0.5).state.weights
    assert all(torch.equal(same[name], tensor) for name, tensor in plain.items())


def test_it_learns_and_the_direction_counts_from_the_second_round_on():
    settings = {"local_epochs": 2, "batch_size": 8, "learning_rate": 0.2}
    server = run_rounds(MoFedSAM(**settings), rounds=12, model={"latent_activation": "relu"})
    assert server.evaluation.accuracy > 0.9
    assert any(m.abs().max() > 0 for m in server.state.direction.values())


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
    with refused(setting, f"{found} with mofedsam"):
        run_rounds(MoFedSAM(**settings), rounds=1)
