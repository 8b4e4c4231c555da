"""Losses that several algorithms share, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedfill.data.samples import Batch
from fedfill.training.losses import cross_entropy


def test_cross_entropy_is_the_mean_over_the_batch() -> None:
    # scores (0, x) with e^x = 1 and 3
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0], [1.0]]))
    inputs = torch.log(torch.tensor([[1.0], [3.0]]))
    value = cross_entropy(model, Batch(inputs, torch.tensor([0, 0]), torch.arange(2)))
    assert torch.exp(value).item() == pytest.approx((2 * 4) ** 0.5)
