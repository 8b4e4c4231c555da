"""Proportional hazards as a network: probabilities by hand, and that they are those of a Cox model."""

from __future__ import annotations

import math

import pytest
import torch
from tests.helpers import refused

from fedfill.models.hazards import ProportionalHazards
from fedfill.models.networks import ModelSettings, build
from fedfill.statistics.survival import total_hazard


def made(beta: list[float], hazard: list[float], leaving: list[float]) -> ProportionalHazards:
    model = ProportionalHazards(len(beta), 2 * len(hazard) + 1)
    with torch.no_grad():
        model.risk.weight.copy_(torch.tensor([beta]))
        model.log_hazard.copy_(torch.tensor(hazard).log())
        model.leaving.copy_(torch.tensor(leaving).logit())
    return model


def test_probabilities_by_hand() -> None:
    """One time, half of whom leave before; the event has 1 - exp(-h e^risk) of the others."""
    model = made([math.log(2.0)], [0.3], [0.5])
    event = 1 - math.exp(-0.3 * 2)
    found = model(torch.tensor([[1.0]])).exp()[0].tolist()
    assert found == pytest.approx([0.5 * event, 0.5, 0.5 * (1 - event)])


@pytest.mark.parametrize("size", [1, 2, 30])
def test_probabilities_add_up_to_one_whatever_the_weights(size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    model = ProportionalHazards(4, 2 * size + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(3 * torch.randn(parameter.shape, generator=draw))
    logs = model(torch.randn(20, 4, generator=draw))
    assert logs.shape == (20, 2 * size + 1)
    assert torch.allclose(logs.double().exp().sum(1), torch.ones(20, dtype=torch.float64), atol=1e-4)


def test_the_hazard_over_the_grid_ranks_rows_by_their_risk() -> None:
    model = made([1.0], [0.02, 0.1, 0.05], [0.1, 0.2, 0.3])
    risk = torch.tensor([[-1.0], [0.0], [2.0]])
    found = total_hazard(model(risk))
    assert found.tolist() == pytest.approx((0.17 * risk[:, 0].double().exp()).tolist(), rel=1e-5)


def test_no_weights_make_a_loss_that_is_no_number() -> None:
    model = made([200.0], [1e-30, 5.0], [1e-7, 1 - 1e-7])
    for x in (-1.0, 0.0, 1.0):
        loss = model(torch.tensor([[x]])).sum()
        loss.backward()
        assert bool(torch.isfinite(loss))
        assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


def test_the_network_needs_the_cells_of_a_grid() -> None:
    network = build("hazards", (3,), 7, ModelSettings(), seed=0)
    assert {name: tuple(p.shape) for name, p in network.named_parameters()} == {
        "classifier.log_hazard": (3,), "classifier.leaving": (3,), "classifier.risk.weight": (1, 3),
    }  # fmt: skip
    logs = network(torch.zeros(1, 3))
    assert float(logs.detach().exp().sum()) == pytest.approx(1.0, abs=1e-6)
    for classes in (2, 10):
        with refused("model", classes):
            build("hazards", (3,), classes, ModelSettings(), seed=0)
