"""FedNova: normalised averaging by hand."""

import math

import pytest
import torch
from tests.helpers import run_rounds, scripted, start_of
from torch import nn

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fednova import FedNova, effective_steps
from fedfill.algorithms.qffl import QFFL
from fedfill.training.fit import LocalTraining


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))


def two(w: float, mean: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([w]), "mean": torch.tensor([mean])}


def test_effective_steps_by_hand():
    assert effective_steps(7, 0.0) == 7
    # momentum 0.5, three steps: gradients count 1, 1 + .5, 1 + .5 + .25 in the sum of the updates
    assert effective_steps(3, 0.5) == pytest.approx(1 + 1.5 + 1.75)
    assert effective_steps(0, 0.9) == 0


def test_a_clients_direction_by_hand():
    start = start_of(two(10.0, 1.0), model=One(), training=LocalTraining(optimizer="sgd"))
    packed, a = FedNova().pack(start, two(4.0, 5.0), steps=3)
    assert (packed["w"].item(), packed["mean"].item(), a) == (2.0, 5.0, 3.0)
    packed, a = FedNova().pack(start, two(10.0, 1.0), steps=0)
    assert (packed["w"].item(), a) == (0.0, 0.0)
    # with momentum 0.5 three steps count 1 + 1.5 + 1.75 = 4.25, and 8.5 / 4.25 = 2
    start = start_of(two(10.0, 1.0), model=One(), training=LocalTraining(optimizer="sgd", momentum=0.5))
    packed, a = FedNova().pack(start, two(1.5, 5.0), steps=3)
    assert (packed["w"].item(), a) == (pytest.approx(2.0), pytest.approx(4.25))


def test_round_by_hand():
    server, engine = scripted(clients=2, weights=two(10.0, 0.0), model=One())
    directions, steps, samples = [2.0, 6.0], [3.0, 1.0], [30, 10]
    engine.script["train"] = lambda i, message, t: Update(two(directions[i], float(i)), samples[i], scale=steps[i])
    FedNova().round(server, 0)
    # tau_eff = .75 * 3 + .25 * 1 = 2.5; sum p d = .75 * 2 + .25 * 6 = 3; 10 - 2.5 * 3
    assert server.state.weights["w"].item() == pytest.approx(2.5)
    assert server.state.weights["mean"].item() == pytest.approx(0.25)  # averaged as it is


def test_a_part_of_a_cohort_that_is_lost_moves_nothing():
    """There is no mean of no replies: the algorithm asks again in a later round."""
    server, engine = scripted(clients=3, weights=two(10.0, 0.0), model=One())
    engine.script["train"] = lambda i, message, t: Update(two(math.nan, 0.0), 10, scale=1.0)
    server.select(0)
    algorithm = FedNova()
    assert algorithm.gather(server, [1], algorithm.train, Broadcast(server.state.weights)) == ({}, {})


def test_with_equal_steps_it_is_fedavg():
    settings = {"local_steps": 6, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.05}
    plain = run_rounds(FedAvg(**settings), rounds=2).state.weights
    nova = run_rounds(FedNova(**settings), rounds=2).state.weights
    assert all(torch.allclose(nova[n], plain[n], atol=1e-6) for n in plain)


@pytest.mark.parametrize("kind", [FedNova, QFFL])
@pytest.mark.parametrize("wrong", [None, -1.0])
def test_a_reply_without_its_number_is_left_out_of_the_mean(kind: type, wrong: float | None):
    """It is not this program's: else it would end the run, or count with a weight that nobody told."""
    server, engine = scripted(clients=3, weights={"w": torch.tensor([0.0])})
    engine.script["train"] = lambda i, message, t: Update(
        {"w": torch.tensor([float(i)])}, 10, scale=wrong if i == 2 else 1.0
    )
    kind().round(server, 0)
    assert [lost["client"] for lost in server.lost] == [2]
    assert torch.isfinite(server.state.weights["w"]).all()
