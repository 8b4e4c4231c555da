"""FedRS: Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch
from fedfill.training.fit import Context, Loss
from fedfill.training.losses import adjusted_scores


class FedRS(FedAvg):
    """FedAvg whose clients scale down the scores of the classes that they lack, so that these are pushed away less.

    Use it when clients lack whole classes; where all have all it is FedAvg.
    """

    name = "fedrs"
    parts: ClassVar[tuple[str, ...]] = ("classifier",)

    rs_alpha: float = Field(default=0.5, ge=0, le=1)
    """Scale of the scores of missing classes (alpha); 1: FedAvg."""
    missing_below: int = Field(default=1, ge=1)
    """A class counts as missing at a client with fewer samples of it than this."""

    def objective(self, start: Start, loss: Loss) -> Loss:
        """The loss with the scores s_c z_c, s_c = alpha for missing classes and 1 for the others (the restricted softmax)."""
        n = torch.bincount(start.data.labels, minlength=start.client.classes)  # [classes]
        missing = n < self.missing_below
        if self.rs_alpha == 1 or not missing.any():
            return loss
        scale = torch.where(missing, self.rs_alpha, 1.0)  # [classes]

        def restricted(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            with adjusted_scores(model, scale=scale):
                return loss(model, batch, context)

        return restricted
