"""pFedMe: steps towards models that are a few held steps away, and the server's part of the way to the average."""

import pytest
import torch
from tests.algorithms.toy import trained
from tests.helpers import refused, run_rounds, scripted

from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.pfedme import PFedMe

QUICK = {"local_epochs": 1, "batch_size": 8}


class Toy(PFedMe):
    def loss(self, model, batch, context):
        return (model.weight.sum() - 3) ** 2 / 2


def test_a_step_worked_by_hand():
    """F = (w - 3)^2 / 2, w 1, lambda 2, rate .1. One step: theta 1.2. A second: 1.2 - .1 (-1.8 + 2 * .2) = 1.34."""
    for steps, theta in ((1, 1.2), (2, 1.34)):
        algorithm = Toy(pfedme_lambda=2, personal_steps=steps, personal_rate=0.1, learning_rate=0.25, local_steps=1)
        sent, client = trained(algorithm, 1.0)
        assert sent == pytest.approx(1 - 0.25 * 2 * (1 - theta))
        own = sent
        for _ in range(steps):
            own -= 0.1 * ((own - 3) + 2 * (own - sent))
        assert float(client.state.own["weight"]) == pytest.approx(own)


def test_many_steps_reach_the_proximal_point():
    """argmin (x - 3)^2 / 2 + lambda/2 (x - w)^2 = (3 + lambda w) / (1 + lambda)."""
    _, client = trained(Toy(pfedme_lambda=3, personal_steps=60, personal_rate=0.1, learning_rate=1e-9), 1.0)
    assert float(client.state.own["weight"]) == pytest.approx((3 + 3 * 1) / 4, abs=1e-5)


def test_with_one_step_it_is_fedavg_at_the_product_of_the_rates():
    """theta = w - rate grad, so that w - eta lambda (w - theta) = w - eta lambda rate grad."""
    own = run_rounds(
        PFedMe(**QUICK, personal_steps=1, personal_rate=0.1, pfedme_lambda=10, learning_rate=0.05), rounds=2
    )
    plain = run_rounds(FedAvg(**QUICK, optimizer="sgd", learning_rate=0.05 * 10 * 0.1), rounds=2)
    assert all(torch.allclose(own.state.weights[name], w, atol=1e-5) for name, w in plain.state.weights.items())
    assert own.costs.legs == plain.costs.legs


def test_the_server_goes_a_part_of_the_way():
    whole, part, beyond = (run_rounds(PFedMe(**QUICK, server_mix=beta), rounds=1) for beta in (1.0, 0.25, 2.0))
    for name, w in whole.initial.items():
        mean = whole.state.weights[name]
        assert torch.allclose(part.state.weights[name], 0.75 * w + 0.25 * mean, atol=1e-6)
        assert torch.allclose(beyond.state.weights[name], 2 * mean - w, atol=1e-6)


def test_buffers_are_averaged_whatever_the_part_of_the_way():
    start, mean = (
        {"weight": torch.full((2,), x), "bias": torch.zeros(2), "running_mean": torch.full((2,), x)} for x in (1.0, 5.0)
    )
    server, _ = scripted(2, start, model=torch.nn.BatchNorm1d(2))
    found = PFedMe(server_mix=0.25).combine(server, start, mean, [])
    assert found["weight"].tolist() == [2.0, 2.0]
    assert found["running_mean"].tolist() == [5.0, 5.0]


def test_slips():
    with refused("optimizer", "adam", "pfedme"):
        run_rounds(PFedMe(optimizer="adam"), rounds=1)
    for axis, name in (("local", "fedprox"), ("aggregation", "fednova")):
        with refused(axis, f"{name} with pfedme"):
            run_rounds(PFedMe(**{axis: name}), rounds=1)
