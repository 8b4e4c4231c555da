"""MOON: Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedfill.algorithms import Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch
from fedfill.models.layers import output_of
from fedfill.training.evaluation import in_chunks
from fedfill.training.fit import Context, Loss
from fedfill.tree import Tree, Weights

MODULE = {"projection": "projection", "latent": "encoder", "logits": "classifier"}
"""Whose output is contrasted."""


class Moon(FedAvg):
    """Local representations are pulled towards the global model's and away from the previous local model's.

    Use it when clients lack classes and take part often; in our field, three seeds, it ended below FedAvg.
    """

    name = "moon"

    mu: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the contrastive term."""
    temperature: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """Temperature of the contrastive term (tau)."""
    contrast: Literal["projection", "latent", "logits"] = "projection"
    """What is contrasted: the output of a projection head in front of the classifier (the paper), the latent code, or the class scores (the FedDPMS authors' variant)."""

    def needs(self) -> tuple[str, ...]:
        """The projection head, where it is contrasted."""
        own = ("projection",) if self.contrast == "projection" else ()
        return tuple(dict.fromkeys([*super().needs(), "encoder", *own, "classifier"]))

    def client_state(self) -> dict[str, Tree]:
        """The client's last model; None before its first training."""
        return {"previous": None}

    def objective(self, start: Start, loss: Loss) -> Loss:
        """l_sup + mu l_con (equation 4); no contrast in a client's first training, which has no previous model."""
        previous = start.client.state.previous
        if previous is None:
            return loss
        received = self.represent(start, start.weights)  # [n, d]
        last = self.represent(start, previous)  # [n, d]

        def contrastive(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            with output_of(getattr(model, MODULE[self.contrast])) as seen:
                supervised = loss(model, batch, context)
            # a loss may have seen other samples too, or none of these
            same = bool(seen) and len(seen[-1]) == len(batch.index) and not start.draws_beside
            z = seen[-1] if same else self.representation(model)(batch.inputs)  # [b, d]
            term = model_contrast(z, received[batch.index], last[batch.index], self.temperature)
            return supervised + self.mu * term

        return contrastive

    def up(self, start: Start, trained: Weights, steps: int) -> None:
        """Keep the local model; nothing is sent."""
        start.client.state.previous = trained

    def representation(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """What makes z, ``[b, ...]`` to ``[b, d]``: the output of one part, whatever the model does around it."""
        part = getattr(model, MODULE[self.contrast])

        def z(inputs: Tensor) -> Tensor:
            with output_of(part) as seen:
                part(inputs) if self.contrast == "latent" else model(inputs)
            return seen[-1]

        return z

    def represent(self, start: Start, weights: Weights) -> Tensor:
        """Z of all training samples by a model that stays fixed, once in place of in each epoch, ``[n, d]``."""
        return in_chunks(self.representation(start.client.model(weights)), start.data)


def model_contrast(z: Tensor, received: Tensor, previous: Tensor, temperature: float) -> Tensor:
    """-log of exp(sim(z, z_glob)/tau) / (exp(sim(z, z_glob)/tau) + exp(sim(z, z_prev)/tau)), the mean (equation 3).

    Args:
        z: Of the model in training, ``[b, d]``.
        received: z_glob, of the global model, ``[b, d]``.
        previous: z_prev, of the client's last model, ``[b, d]``.
        temperature: tau.

    Returns:
        A scalar.
    """
    near = functional.cosine_similarity(z, received) / temperature  # [b]
    far = functional.cosine_similarity(z, previous) / temperature  # [b]
    return functional.softplus(far - near).mean()
