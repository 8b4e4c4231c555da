"""Losses that several algorithms share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fedfill.data.samples import Batch


def of_labels(model: nn.Module, batch: Batch) -> Tensor:
    """What is minimised where nothing else is said, a scalar: the cross-entropy of classes, the mean squared error of numbers."""
    if batch.labels.is_floating_point():
        return functional.mse_loss(model(batch.inputs)[:, 0], batch.labels)
    return cross_entropy(model, batch)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the model's class scores, a scalar."""
    return functional.cross_entropy(model(batch.inputs), batch.labels)


@contextmanager
def adjusted_scores(model: nn.Module, *, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0) -> Iterator[None]:
    """Let a model's classifier return scale z + shift in the place of its class scores z for a while (logit adjustment).

    So whatever loss uses these scores is an adjusted cross-entropy, and what it has beside stays. In evaluation mode, in which
    a loss may guess labels, the scores are what they are.

    Args:
        model: With the part ``classifier``, which returns ``[b, classes]``.
        scale: Of all classes, or of each, ``[classes]``.
        shift: Likewise.

    Yields:
        Nothing.
    """

    def adjust(module: nn.Module, inputs: Any, scores: Tensor) -> Tensor:
        return scores * scale + shift if module.training else scores

    hook = model.get_submodule("classifier").register_forward_hook(adjust)
    try:
        yield
    finally:
        hook.remove()
