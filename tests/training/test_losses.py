"""Losses that several algorithms share: values and gradients by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedfill.data.samples import Batch
from fedfill.training.losses import cross_entropy, inner_product, squared_distance
from fedfill.tree import Weights


def plane() -> nn.Module:
    """Two weights (3, -1) and a bias 2, batch norm behind."""
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, -1.0]]))
        model[0].bias.fill_(2.0)
    return model


OTHER: Weights = {
    "0.weight": torch.tensor([[1.0, 4.0]]),
    "0.bias": torch.tensor([2.5]),
    "1.running_mean": torch.ones(1),
}


def gradients(model: nn.Module, value: torch.Tensor) -> dict[str, list[float] | None]:
    value.backward()
    return {name: None if p.grad is None else p.grad.flatten().tolist() for name, p in model.named_parameters()}


def test_squared_distance_by_hand() -> None:
    # 2 and -5 and -1/2 apart; the running mean is no parameter, and batch norm's own aren't named
    model = plane()
    value = squared_distance(model, OTHER)
    assert value.item() == 4 + 25 + 0.25
    assert gradients(model, value) == {
        "0.weight": [4.0, -10.0], "0.bias": [-1.0], "1.weight": None, "1.bias": None,
    }  # fmt: skip


def test_inner_product_by_hand() -> None:
    model = plane()
    value = inner_product(model, OTHER)
    assert value.item() == 3 * 1 - 1 * 4 + 2 * 2.5
    assert gradients(model, value) == {
        "0.weight": [1.0, 4.0], "0.bias": [2.5], "1.weight": None, "1.bias": None,
    }  # fmt: skip


@pytest.mark.parametrize(("loss", "value"), [(squared_distance, 29.0), (inner_product, -1.0)])
def test_what_is_frozen_or_not_named_is_left_out(loss: object, value: float) -> None:
    model = plane()
    model[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
    with torch.no_grad():
        model[1].weight.fill_(float("nan"))  # type: ignore[index, operator, union-attr]
    found = loss(model, OTHER)  # type: ignore[operator]
    assert found.shape == ()
    assert found.item() == value
    assert loss(model, {}).item() == 0  # type: ignore[operator]


def test_cross_entropy_is_the_mean_over_the_batch() -> None:
    # scores (0, x) with e^x = 1 and 3
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0], [1.0]]))
    inputs = torch.log(torch.tensor([[1.0], [3.0]]))
    value = cross_entropy(model, Batch(inputs, torch.tensor([0, 0]), torch.arange(2)))
    assert torch.exp(value).item() == pytest.approx((2 * 4) ** 0.5)
