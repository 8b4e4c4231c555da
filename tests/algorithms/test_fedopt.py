"""The server's optimizers: two rounds of each by hand, and what they are without their memory."""

import pytest
import torch
from tests.helpers import refused, run_rounds, scripted
from torch import nn

from fedfill.algorithms import Update, find
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi

SMALL = {"local_epochs": 2, "batch_size": 8}


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))


@pytest.mark.parametrize(
    ("algorithm", "first", "second"),
    [
        # m = .5, then .45 - .2
        (FedAvgM(), 1.5, 1.75),
        # m = .05, v = .99e-6 + .0025; then m = .025, v = .99 v + .0004
        (FedAdam(), 1.09802, 1.143784),
        # v = 1e-6 + .0025; then D^2 is above v, so that v + .0004
        (FedYogi(), 1.09802, 1.14359),
        # m = D; v = 1e-6 + .25, then + .04
        (FedAdagrad(), 1.0998, 1.06273),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_two_rounds_by_hand(algorithm: FedAvg, first: float, second: float):
    """The mean moves by .5 and then by -.2; a buffer is averaged."""
    weights = {"w": torch.tensor([1.0]), "mean": torch.tensor([0.0])}
    server, engine = scripted(clients=2, weights=weights, model=One())
    for name, value in algorithm.server_state(weights).items():
        setattr(server.state, name, value)
    for step, expected in ((0.5, first), (-0.2, second)):
        moves = [step + 0.1, step - 0.1]
        engine.script["train"] = lambda i, message, t, moves=moves: Update(
            {"w": message.weights["w"] + moves[i], "mean": torch.tensor([6.0])}, samples=10
        )
        algorithm.round(server, 0)
        assert server.state.weights["w"].item() == pytest.approx(expected, abs=2e-5)
        assert server.state.weights["mean"].item() == 6.0


def test_yogis_squares_fall_by_no_more_than_what_comes_in():
    v, square = torch.tensor([1.0, 0.01]), torch.tensor([0.04, 0.04])
    assert FedYogi().second(v, square).tolist() == pytest.approx([1 - 0.0004, 0.01 + 0.0004])
    assert FedAdam().second(v, square).tolist() == pytest.approx([0.99 + 0.0004, 0.0099 + 0.0004])


def test_without_momentum_it_is_fedavg_to_the_bit():
    plain = run_rounds(FedAvg(**SMALL), rounds=3, participation=0.5).state.weights
    same = run_rounds(FedAvgM(**SMALL, beta1=0.0), rounds=3, participation=0.5).state.weights
    assert all(torch.equal(same[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("kind", [FedAdam, FedYogi, FedAdagrad])
def test_with_a_tau_far_above_all_movements_the_step_is_the_movement(kind: type):
    """Sqrt(v) + tau is 2 tau then, as v begins with tau^2; two public libraries begin with 0."""
    plain = run_rounds(FedAvg(**SMALL), rounds=1).state.weights
    large = {"tau": 1e6, "server_rate": 2e6, "beta1": 0.0}
    close = run_rounds(kind(**SMALL, **large, **({} if kind is FedAdagrad else {"beta2": 0.999999})), rounds=1)
    assert all(torch.allclose(close.state.weights[name], tensor, atol=1e-6) for name, tensor in plain.items())


@pytest.mark.parametrize("kind", [FedAvgM, FedAdam])
def test_only_parameters_have_a_step_and_it_is_learnt(kind: type):
    server = run_rounds(kind(**SMALL), rounds=6, model={"width": "wide"})
    assert server.evaluation.accuracy > 0.9
    assert not any("running" in name or "num_batches" in name for name in server.state.moment)
    assert all((server.state.weights[n] >= 0).all() for n in server.state.weights if n.endswith("running_var"))


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_as_an_aggregation_it_is_the_same(name: str):
    own = run_rounds(find(name)(**SMALL), rounds=2).state.weights
    taken = run_rounds(FedAvg(**SMALL, aggregation=name), rounds=2).state.weights
    assert all(torch.equal(taken[n], tensor) for n, tensor in own.items())
    with refused("aggregation", f"{name} with scaffold"):
        run_rounds(find("scaffold")(aggregation=name), rounds=1)
