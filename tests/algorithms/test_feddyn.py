"""FedDyn: objective, client state and server step by hand."""

import pytest
import torch
from tests.helpers import refused, run_rounds, scripted, start_of
from torch import nn

from fedfill.algorithms import Update
from fedfill.algorithms.feddyn import FedDyn
from fedfill.experiment.prepare import arrange
from fedfill.studies.compare import unshared


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))


def two(w: float, mean: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([w]), "mean": torch.tensor([mean])}


def test_objective_by_hand():
    model = One()
    with torch.no_grad():
        model.w.fill_(3.0)
    start = start_of(two(1.0, 0.0), model=One(), gradient={"w": torch.tensor([4.0])})
    (2 * model.w.sum()).backward()
    FedDyn(dyn_alpha=0.5).penalty(start).adder(model)()
    assert model.w.grad.item() == pytest.approx(2 - 4 + 0.5 * 2)


def test_a_clients_gradient_by_hand():
    start = start_of(two(1.0, 0.0), model=One(), gradient=None)
    algorithm = FedDyn(dyn_alpha=0.5)
    assert algorithm.up(start, two(5.0, 9.0), steps=1) is None
    assert start.client.state.gradient["w"].item() == -2.0
    algorithm.up(start, two(0.0, 9.0), steps=1)
    assert start.client.state.gradient["w"].item() == -1.5
    assert list(start.client.state.gradient) == ["w"]


@pytest.mark.parametrize(("optimizer", "rate", "steps"), [("sgd", 0.2, 200), ("adam", 0.01, 2000)])
def test_the_gradient_is_read_off_the_point_and_not_off_the_steps(optimizer: str, rate: float, steps: int):
    """L(w) = (w - 3)^2, which has the gradient 2 (w - 3) where the local problem is solved, however that was done."""
    algorithm, model = FedDyn(dyn_alpha=0.5), One()
    start = start_of(two(1.0, 0.0), model=One(), gradient={"w": torch.tensor([-1.0])})
    add = algorithm.penalty(start).adder(model)
    taken = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](model.parameters(), lr=rate)
    for _ in range(steps):
        taken.zero_grad()
        ((model.w - 3) ** 2).sum().backward()
        add()
        taken.step()
    algorithm.up(start, {name: tensor.detach() for name, tensor in model.state_dict().items()}, steps)
    w = model.w.item()  # 2 (w - 3) + 1 + (w - 1) / 2 = 0
    assert w == pytest.approx(5.5 / 2.5, abs=1e-3)
    assert start.client.state.gradient["w"].item() == pytest.approx(2 * (w - 3), abs=1e-3)


def test_round_by_hand_with_half_of_the_clients():
    server, engine = scripted(clients=4, weights=two(1.0, 0.0), participation=0.5, model=One())
    server.state.h = {"w": torch.tensor([0.1])}
    engine.script["train"] = lambda i, message, t: Update(two(2.0, 6.0), samples=1 + i)
    FedDyn(dyn_alpha=0.5).round(server, 0)
    h = 0.1 - 0.5 * (2 / 4) * (2.0 - 1.0)  # h - alpha/N sum (w_i - w)
    assert server.state.h["w"].item() == pytest.approx(h)
    assert server.state.weights["w"].item() == pytest.approx(2.0 - h / 0.5)
    assert server.state.weights["mean"].item() == pytest.approx(6.0)


def test_it_learns_and_its_local_problems_agree():
    server = run_rounds(
        FedDyn(dyn_alpha=0.1, local_epochs=3, batch_size=8), rounds=6, model={"latent_activation": "relu"}
    )
    assert server.evaluation.accuracy > 0.9
    # with all clients in every round, h is minus the mean of the clients' gradients' part: h = mean(g_i)
    for name, h in server.state.h.items():
        own = torch.stack([server.client_states[i]["gradient"][name] for i in range(4)])
        assert torch.allclose(own.mean(0), h, atol=1e-5)


def test_a_comparison_has_nothing_to_say():
    """It trains on everybody's budget."""
    options = {"data": "digits", "clients": 4, "rounds": 1, "partition": "iid", "model": "auto", "seed": 0}
    assert unshared(arrange("feddyn", **options), arrange("fedavg", **options)) == []


@pytest.mark.parametrize(("axis", "name"), [("local", "fedprox"), ("aggregation", "fednova")])
def test_it_only_makes_sense_as_a_whole(axis, name):
    with refused(axis, f"{name} with feddyn", "allowed: none"):
        run_rounds(FedDyn(**{axis: name}), rounds=1)
