"""MixStyle: Zhou et al., "Domain Generalization with MixStyle", ICLR 2021; here as the local objective of a federation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch
from fedfill.errors import FedfillError
from fedfill.models.residual import BasicBlock
from fedfill.training.fit import Context, Loss
from fedfill.training.mixup import draw_lambdas

STAGES = (nn.MaxPool2d, nn.AvgPool2d, BasicBlock)
"""Layers behind which a stage of convolutions ends."""


class MixStyle(FedAvg):
    """FedAvg whose clients mix the styles of their images: means and deviations of channels inside the network.

    Use it when the model shall serve looks that no client has, and each client's own images look different enough to mix.
    """

    name = "mixstyle"

    mix_alpha: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Mixing shares come from Beta(mix_alpha, mix_alpha): a small one leaves most styles nearly as they are, or swaps them."""
    mix_probability: float = Field(default=0.5, ge=0, le=1)
    """In which share of the mini-batches styles are mixed; 0: in none."""
    mix_stages: int = Field(default=1, ge=1)
    """Behind how many of the network's first stages; a stage ends with a pooling layer, or is a residual block."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that the network has stages."""
        stages(model, self.mix_stages)
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def objective(self, start: Start, loss: Loss) -> Loss:
        """The algorithm's own loss, of a network whose first stages pass on mixed styles."""
        if not self.mix_probability:
            return loss

        def mixed(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            with ExitStack() as stack:
                for stage in stages(model, self.mix_stages):
                    stack.enter_context(self.mixing(stage, context.generator))
                return loss(model, batch, context)

        return mixed

    @contextmanager
    def mixing(self, stage: nn.Module, generator: torch.Generator) -> Iterator[None]:
        """Let a layer pass on mixed styles for a while, in training mode; in each pass a coin says whether."""

        def hook(layer: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            if not layer.training:
                return output
            coin = torch.rand((), generator=generator, device=generator.device)
            if float(coin) >= self.mix_probability:
                return output
            shares = draw_lambdas(self.mix_alpha, len(output), generator)
            order = torch.randperm(len(output), generator=generator, device=generator.device)
            return with_mixed_styles(output, shares, order)

        handle = stage.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def stages(model: nn.Module, n: int) -> list[nn.Module]:
    """The layers behind which a network's first n stages end.

    Args:
        model: Any.
        n: How many; where there are fewer, all of them.

    Returns:
        One at the least, in the model's order.

    Raises:
        FedfillError: Where there is none.
    """
    found: list[nn.Module] = [layer for layer in model.modules() if isinstance(layer, STAGES)]
    if not found:
        raise FedfillError(
            f"model: mixstyle mixes what stages of convolutions pass on, and {type(model).__name__} has none that end with a pooling "
            "layer; allowed: cnn2, cnn4, cnn2bn, cnn2fc, digits6, resnet18, or a module with such layers"
        )
    return found[:n]


def with_mixed_styles(x: Tensor, shares: Tensor, order: Tensor, eps: float = 1e-6) -> Tensor:
    """Feature maps with mixtures of two samples' means and deviations (equations 4 to 6), which are taken as constants.

    Args:
        x: ``[b, channels, h, w]``.
        shares: Of each sample's own style, ``[b]``.
        order: Whose style is mixed in, ``[b]``.
        eps: Added to variances.

    Returns:
        Of x's shape.
    """
    mean = x.mean((2, 3), keepdim=True).detach()  # [b, channels, 1, 1]
    deviation = (x.var((2, 3), correction=0, keepdim=True) + eps).sqrt().detach()
    own = shares.to(x.dtype).view(-1, 1, 1, 1)
    beta = own * mean + (1 - own) * mean[order]
    gamma = own * deviation + (1 - own) * deviation[order]
    return gamma * (x - mean) / deviation + beta
