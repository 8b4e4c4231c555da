"""FedVAE: FedAvg on FedDPMS's whole auto-encoder, with no synthetic data (Chen and Vikalo 2023, supplement)."""

from __future__ import annotations

from typing import ClassVar, Self

from torch import Tensor, nn

from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch
from fedfill.synthesis.vae import VAEOptions, require_vae
from fedfill.training.fit import Context


class FedVAE(VAEOptions, FedAvg):
    """Encoder, classifier and decoder are trained and averaged together in every round.

    Use it as a control for FedDPMS: it shows what the auto-encoder alone does for the classifier.
    """

    name = "fedvae"
    parts = ("encoder", "classifier", "decoder")
    paper: ClassVar = {"": {"model.latent_activation": "sigmoid"}}

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Check that the network is an auto-encoder of these images."""
        require_vae(model, inputs, self.name)
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        """FedDPMS's preliminary loss l1 + lambda (l2 + l3), in all rounds."""
        return self.vae_loss(model, batch, context)
