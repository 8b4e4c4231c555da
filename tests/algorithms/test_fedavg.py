"""FedAvg: a round worked by hand, its settings, and its messages."""

import pytest
import torch
from tests.helpers import run_rounds, scripted

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg


def test_round_is_the_sample_weighted_mean_by_hand():
    server, engine = scripted(clients=3, weights={"w": torch.tensor([1.0, 2.0])})
    engine.script["train"] = lambda i, message, t: Update({"w": message.weights["w"] + i}, samples=[10, 30, 60][i])
    FedAvg().round(server, 0)
    # 1 + (0 * 10 + 1 * 30 + 2 * 60) / 100 = 2.5
    assert torch.allclose(server.state.weights["w"], torch.tensor([2.5, 3.5]))


def test_uniform_weighting_by_hand():
    server, engine = scripted(clients=3, weights={"w": torch.tensor([1.0])})
    engine.script["train"] = lambda i, message, t: Update({"w": message.weights["w"] + i}, samples=[10, 30, 60][i])
    FedAvg(weighting="uniform").round(server, 0)
    assert torch.allclose(server.state.weights["w"], torch.tensor([2.0]))


def test_weights_are_renormalised_over_the_replies_that_arrived():
    server, engine = scripted(clients=3, weights={"w": torch.tensor([0.0])})

    def train(i: int, message: Broadcast, t: int) -> Update:
        if i == 2:
            raise RuntimeError("gone")
        return Update({"w": torch.tensor([[4.0], [8.0]][i])}, samples=[10, 30][i])

    engine.script["train"] = train
    FedAvg().round(server, 0)
    assert torch.allclose(server.state.weights["w"], torch.tensor([7.0]))  # (4 * 10 + 8 * 30) / 40
    assert [lost["client"] for lost in server.lost] == [2]


def test_learning_rate_halves_every_ten_rounds():
    algorithm = FedAvg(learning_rate=0.1)
    rates = [algorithm.training(t).learning_rate for t in (0, 9, 10, 19, 20, 49)]
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.1 / 16])
    constant = FedAvg(learning_rate=0.1, lr_decay=1.0)
    assert {constant.training(t).learning_rate for t in range(50)} == {0.1}


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd", "learning_rate": 0.05, "momentum": 0.9},
        {"optimizer": "adam", "learning_rate": 0.01},
        {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.1},
    ],
)
def test_every_optimizer_learns(settings):
    server = run_rounds(FedAvg(local_epochs=2, batch_size=8, **settings), rounds=6, model={"latent_activation": "relu"})
    assert server.evaluation.accuracy > 0.9


def test_partial_participation_trains_only_the_cohort():
    server = run_rounds(FedAvg(local_epochs=1), rounds=1, participation=0.5)
    assert server.costs.train_samples == 2 * 40
    assert server.costs.legs["train"][0] == 2 * sum(t.numel() * t.element_size() for t in server.initial.values())
