"""Losses that several algorithms share."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from fedfill.data.samples import Batch


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the model's class scores, a scalar."""
    return functional.cross_entropy(model(batch.inputs), batch.labels)
