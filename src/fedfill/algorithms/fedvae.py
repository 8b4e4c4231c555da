"""FedVAE: FedAvg on FedDPMS's whole auto-encoder, with no synthetic data (Chen and Vikalo 2023, supplement)."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch, Samples
from fedfill.protocol.server import Server
from fedfill.synthesis.vae import VAEOptions, accepted_codes, decode, latent_size, require_vae
from fedfill.training.fit import Context

CANDIDATES = 200
"""Draws for each wanted image, at the most, until the classifier recognises its class."""


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

    def synthetic(self, server: Server, per_class: int | None = None) -> Samples | None:
        """Images of codes drawn from the prior that the classifier recognises; none where no number is asked for.

        Of a class that it hardly recognises there may be fewer.
        """
        if per_class is None:
            return None
        model = server.model(server.state.weights)
        size = latent_size(model, server.sample)
        # behind a sigmoid codes lie in 0..1
        middle = 0.5 if isinstance(getattr(model.encoder, "activation", None), nn.Sigmoid) else 0.0
        centre, stream = torch.full((size,), middle, device=server.sample.labels.device), server.stream("samples")
        codes = [
            accepted_codes(
                model,
                centre,
                1.0,
                c,
                quota=per_class,
                candidates=CANDIDATES * per_class,
                exhaust=False,
                generator=stream,
            )[0]
            for c in range(server.classes)
        ]
        sizes = torch.tensor([len(own) for own in codes], device=centre.device)
        labels = torch.arange(server.classes, device=centre.device).repeat_interleave(sizes)
        return Samples(decode(model, torch.cat(codes)), labels)

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        """FedDPMS's preliminary loss l1 + lambda (l2 + l3), in all rounds."""
        return self.vae_loss(model, batch, context)
