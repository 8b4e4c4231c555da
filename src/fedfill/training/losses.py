"""Losses that several algorithms share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.data.samples import Batch
from fedfill.tree import Weights


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the model's class scores, a scalar."""
    return functional.cross_entropy(model(batch.inputs), batch.labels)


def squared_distance(model: nn.Module, weights: Weights) -> Tensor:
    """||w - v||^2 over those of the model's trainable parameters that are named in `weights`, a scalar."""
    own = [(p, weights[name]) for name, p in model.named_parameters() if p.requires_grad and name in weights]
    return sum(((p - other).square().sum() for p, other in own), torch.zeros(()))


def inner_product(model: nn.Module, weights: Weights) -> Tensor:
    """<w, v> over those of the model's trainable parameters that are named in `weights`, a scalar: its gradient is v."""
    own = [(p, weights[name]) for name, p in model.named_parameters() if p.requires_grad and name in weights]
    return sum(((p * other).sum() for p, other in own), torch.zeros(()))
