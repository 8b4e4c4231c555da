"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

from torch import nn

from fedfill.algorithms._keeping import KeepsAPart
from fedfill.models.views import NORMALISATION, normalisation
from fedfill.tree import Weights


class FedBN(KeepsAPart):
    """FedAvg of everything but the normalisation layers, of which every client keeps its own (algorithm 1).

    Use it when clients have the same classes but their data look different; the network needs normalisation.
    """

    name = "fedbn"
    shares_head = True
    parts: ClassVar[tuple[str, ...]] = (NORMALISATION,)
    paper: ClassVar = {
        "": {"optimizer": "sgd", "learning_rate": 0.01, "lr_decay": 1.0, "batch_size": 32, "local_epochs": 1}
    }

    weighting: Literal["samples", "uniform"] = "uniform"
    """Weights of the average: all equal, or each client's number of samples."""

    def kept(self, model: nn.Module, weights: Weights) -> Collection[str]:
        """Scales, shifts and running statistics of normalisation layers, found by type and never by name."""
        return normalisation(model)


def without_normalisation(model: nn.Module, weights: Weights) -> Weights:
    """All tensors but those of normalisation layers."""
    local = normalisation(model)
    return {name: tensor for name, tensor in weights.items() if name not in local}
