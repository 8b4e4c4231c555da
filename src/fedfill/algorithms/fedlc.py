"""FedLC: Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch
from fedfill.training.fit import Context, Loss
from fedfill.training.losses import adjusted_scores

MASKED = 1e4
"""Margin of a class that takes no part: the exponential of minus this is 0, and sums of it are finite."""


class FedLC(FedAvg):
    """FedAvg whose clients train with a margin for each class, the larger the fewer samples they have of it.

    Use it when clients lack classes or have few samples of some; it costs nothing.
    """

    name = "fedlc"
    parts: ClassVar[tuple[str, ...]] = ("classifier",)

    tau: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Size of the margins; 0: none."""
    missing: Literal["mask", "one"] = "mask"
    """A class of which a client has no sample: it has no part in the loss (mask), or counts as one sample (one)."""

    def objective(self, start: Start, loss: Loss) -> Loss:
        """The loss with the scores z_c - tau n_c^(-1/4), n_c the client's samples of class c (the calibrated cross-entropy)."""
        if not self.tau:
            return loss
        n = torch.bincount(start.data.labels, minlength=start.client.classes)  # [classes]
        shift = -self.tau * n.clamp(min=1).double() ** -0.25
        if self.missing == "mask":
            shift = shift.masked_fill(n == 0, -MASKED)
        shift = shift.float()

        def calibrated(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            with adjusted_scores(model, shift=shift):
                return loss(model, batch, context)

        return calibrated
