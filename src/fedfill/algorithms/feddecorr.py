"""FedDecorr: Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning", ICLR 2023."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch
from fedfill.models.layers import inputs_of
from fedfill.training.fit import Context, Loss


class FedDecorr(FedAvg):
    """FedAvg whose clients keep the dimensions of their representations from saying the same, by their correlations.

    Use it when clients hold few classes each, so that representations fall into few dimensions; it is cheap.
    """

    name = "feddecorr"
    parts: ClassVar[tuple[str, ...]] = ("classifier",)

    beta: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Weight of the correlations; 0: none."""
    scale: Literal["paper", "code"] = "code"
    """Size of the term: as in the paper's formula, or as in the authors' program, with which beta was chosen: about a mini-batch's size times as large."""

    def objective(self, start: Start, loss: Loss) -> Loss:
        """L(w, x) + beta L_FedDecorr(w, x)."""
        if not self.beta:
            return loss

        def decorrelated(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            with inputs_of(model.get_submodule("classifier")) as seen:
                supervised = loss(model, batch, context)
            # not of a pass that guesses labels; and of a frozen encoder there is nothing to keep apart
            z = next((x.flatten(1).float() for x in seen if x.requires_grad), None)  # [b, l]
            return supervised if z is None else supervised + self.beta * correlations(z, self.scale)

        return decorrelated


def correlations(z: Tensor, scale: Literal["paper", "code"]) -> Tensor:
    """How much the dimensions of a representation are correlated over a mini-batch; 0 for one sample.

    Args:
        z: What the classifier receives, ``[b, l]``.
        scale: ``paper``: ||K||_F^2 / l^2 with the correlations K. ``code``: the mean of the squares off K's diagonal,
            with (b - 1) in the place of 1, divided by b.

    Returns:
        A scalar.
    """
    b, size = z.shape
    centred = z - z.mean(0)
    if scale == "paper":
        z = centred / (centred.square().mean(0) + 1e-8).sqrt()
        k = z.T @ z / b  # [l, l]
        return k.square().mean()
    z = centred / (centred.square().sum(0) / max(b - 1, 1) + 1e-8).sqrt()
    k = z.T @ z  # [l, l]
    off = k - torch.diag(k.diagonal())
    return off.square().sum() / max(size * (size - 1), 1) / b
