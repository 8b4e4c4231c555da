"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.

As a setting SiloBN: Andreux et al., "Siloed Federated Learning for Multi-Centric Histopathology Datasets", 2020.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from fedfill.algorithms._keeping import KeepsAPart
from fedfill.models.views import NORMALISATION, first_names, normalisation
from fedfill.tree import Weights


class FedBN(KeepsAPart):
    """FedAvg of everything but the normalisation layers, of which every client keeps its own (algorithm 1).

    Use it when clients have the same classes but their data look different; the network needs normalisation.
    """

    name = "fedbn"
    numbers = True
    shares_head = True
    parts: ClassVar[tuple[str, ...]] = (NORMALISATION,)
    paper: ClassVar = {
        "": {"optimizer": "sgd", "learning_rate": 0.01, "lr_decay": 1.0, "batch_size": 32, "local_epochs": 1}
    }

    weighting: Literal["samples", "uniform"] = "uniform"
    """Weights of the average: all equal, or each client's number of samples."""

    # left out where it is as it comes, so that digests of runs without it stay as they were
    norm_shared: Literal["nothing", "affine"] = Field(default="nothing", exclude_if=lambda value: value == "nothing")
    """What of the normalisation layers is shared: nothing, or scales and shifts, so that running statistics alone stay (affine: SiloBN)."""

    def kept(self, model: nn.Module, weights: Weights) -> Collection[str]:
        """Scales, shifts and running statistics of normalisation layers, found by type and never by name."""
        own = normalisation(model)
        return own if self.norm_shared == "nothing" else own - first_names(model).keys()


def without_normalisation(model: nn.Module, weights: Weights) -> Weights:
    """All tensors but those of normalisation layers."""
    local = normalisation(model)
    return {name: tensor for name, tensor in weights.items() if name not in local}
