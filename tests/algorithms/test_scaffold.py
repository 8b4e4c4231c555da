"""SCAFFOLD: one round of two clients by hand, and what its control variates must be."""

import pytest
import torch
from tests.helpers import refused, run_rounds, scripted, start_of
from torch import nn

from fedfill.algorithms import Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.scaffold import Scaffold
from fedfill.experiment.prepare import arrange
from fedfill.studies.compare import unshared
from fedfill.training.fit import LocalTraining

TRAINING = LocalTraining(optimizer="sgd", learning_rate=0.5)


def one(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([value])}


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.register_buffer("count", torch.zeros(1))


def test_the_corrected_gradient_by_hand():
    model = One()
    start = start_of(one(0.0), control=one(3.0), model=model, training=TRAINING)
    start.client.state.control = one(1.0)
    (5 * model.w.sum()).backward()
    Scaffold().penalty(start).adder(model)()
    assert model.w.grad.item() == 5 - 1 + 3  # g - c_i + c


def test_the_new_control_variate_by_hand():
    start = start_of(one(2.0), control=one(3.0), model=One(), training=TRAINING)
    start.client.state.control = one(1.0)
    change = Scaffold().up(start, one(0.0), steps=4)
    # c_i+ = 1 - 3 + (2 - 0) / (4 * 0.5) = -1
    assert start.client.state.control["w"].item() == -1.0
    assert change["w"].item() == -2.0


def test_a_client_without_steps_changes_nothing():
    start = start_of(one(2.0), control=one(3.0), model=One(), training=TRAINING)
    start.client.state.control = one(1.0)
    assert Scaffold().up(start, one(2.0), steps=0)["w"].item() == 0.0
    assert start.client.state.control["w"].item() == 1.0


def test_the_server_steps_by_hand_with_half_of_the_clients():
    server, engine = scripted(clients=4, weights=one(1.0), participation=0.5, model=One())
    server.state.control = one(10.0)
    engine.script["train"] = lambda i, message, t: Update(one(float(i)), samples=10 * i + 1, control=one(float(i)))
    Scaffold().round(server, 0)
    cohort = [i for _, _, i, _ in engine.sent]
    mean = sum(cohort) / 2
    assert server.state.weights["w"].item() == mean  # uniform
    assert server.state.control["w"].item() == 10.0 + 2 / 4 * mean  # |S|/N
    assert all(message.control["w"].item() == 10.0 for _, _, _, message in engine.sent)


def test_a_reply_that_is_lost_does_not_count_in_the_servers_control():
    server, engine = scripted(clients=4, weights=one(1.0), participation=0.5, model=One())
    server.state.control = one(10.0)

    def train(i, message, t):
        if i == lost:
            raise RuntimeError("gone")
        return Update(one(2.0), samples=10, control=one(8.0))

    engine.script["train"] = train
    lost = server.select(0)[0]
    Scaffold().round(server, 0)
    assert [loss["client"] for loss in server.lost] == [lost]
    assert server.state.weights["w"].item() == 2.0
    assert server.state.control["w"].item() == 10.0 + 1 / 4 * 8.0


def test_the_servers_control_is_the_mean_of_the_clients_when_all_take_part():
    server = run_rounds(Scaffold(local_epochs=2, batch_size=8), rounds=3)
    for name, c in server.state.control.items():
        own = torch.stack([server.client_states[i]["control"][name] for i in range(4)])
        assert torch.allclose(own.mean(0), c, atol=1e-5)


def test_the_first_round_is_fedavg_and_the_second_is_not():
    settings = {"local_epochs": 2, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.05, "weighting": "uniform"}
    for rounds, same in ((1, True), (2, False)):
        plain = run_rounds(FedAvg(**settings), rounds=rounds).state.weights
        controlled = run_rounds(Scaffold(**settings), rounds=rounds).state.weights
        assert all(torch.allclose(controlled[n], plain[n], atol=1e-6) for n in plain) is same


def test_buffers_have_no_control_variate_and_traffic_doubles():
    server = run_rounds(Scaffold(local_epochs=1, batch_size=8), rounds=1, model={"width": "wide"})
    assert not any("running" in name or "num_batches" in name for name in server.state.control)
    assert any("running" in name for name in server.state.weights)
    model = sum(t.numel() * t.element_size() for t in server.initial.values())
    control = sum(t.numel() * t.element_size() for t in server.state.control.values())
    assert server.costs.legs["train"] == [4 * (model + control), 4 * (model + control + 8)]


def test_a_comparison_says_why_its_budget_is_another_one():
    options = {"data": "digits", "clients": 4, "rounds": 1, "partition": "iid", "model": "auto", "seed": 0}
    own, plain = (arrange(name, **options) for name in ("scaffold", "fedavg"))
    (note,) = unshared(own, plain)
    assert "optimizer=sgd (not adam)" in note
    assert f"({Scaffold.unfair})" in note
    assert "optimizer=sgd and its learning_rate" in Scaffold.unfair  # what would make it fair
    fair = arrange("fedavg", **options, optimizer="sgd", learning_rate=own.algorithm.learning_rate)
    assert unshared(own, fair) == []


@pytest.mark.parametrize(
    ("settings", "setting", "found"),
    [
        ({"optimizer": "adam"}, "optimizer", "optimizer=adam"),
        ({"momentum": 0.9}, "optimizer", "momentum=0.9"),
        ({"aggregation": "fednova"}, "aggregation", "fednova"),
        ({"aggregation": "qffl", "weighting": "samples"}, "aggregation", "qffl"),
        ({"local": "fedprox"}, "local", "fedprox"),
    ],
)
def test_combinations_that_make_no_sense(settings, setting, found):
    with refused(setting, f"{found} with scaffold"):
        run_rounds(Scaffold(**settings), rounds=1)
