"""FedVAE: FedAvg on FedDPMS's whole auto-encoder, with no synthetic data (Chen and Vikalo 2023, supplement)."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch
from fedfill.synthesis.vae import Reconstruction, require_vae, vae_loss
from fedfill.training.fit import Context


class FedVAE(FedAvg):
    """Encoder, classifier and decoder are trained and averaged together in every round.

    Use it as a control for FedDPMS: it shows what the auto-encoder alone does for the classifier.
    """

    name = "fedvae"
    parts = ("encoder", "classifier", "decoder")
    paper: ClassVar = {"": {"model.latent_activation": "sigmoid"}}

    vae_weight: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    """Weight of divergence and reconstruction loss beside the cross-entropy (lambda)."""
    reconstruction: Reconstruction = "mse"
    """Reconstruction loss: squared error averaged over pixels (the paper), summed, or binary cross-entropy summed."""
    kl: Literal["sum", "mean"] = "sum"
    """Divergence summed or averaged over the latent's coordinates."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Check that the network is an auto-encoder of these images."""
        require_vae(model, inputs, self.name)
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        """FedDPMS's preliminary loss l1 + lambda (l2 + l3), in all rounds."""
        return vae_loss(model, batch, weight=self.vae_weight, reconstruction=self.reconstruction, kl=self.kl)
