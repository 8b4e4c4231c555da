"""Local FixMatch: Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence", NeurIPS 2020.

At every client, and averaged: a baseline of SDA-FL's semi-supervised experiments (Li et al. 2022, figure 2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import UNKNOWN, Batch, Samples, draw
from fedfill.protocol.client import Client, client_handler
from fedfill.training.augmentation import flips, require_bytes, strong, weak
from fedfill.training.fit import Context, Loss


class FixMatch(FedAvg):
    """FedAvg of clients whose models must say the same of weakly and of strongly augmented samples without labels.

    Use it when clients have few labels and many images without; it did not beat FedAvg on the labels alone here.
    """

    name = "fixmatch"
    draws_beside = True
    paper: ClassVar = {
        "": {"local_steps": 40, "batch_size": 16, "optimizer": "sgd", "learning_rate": 0.03, "lr_decay": 1.0}
    }

    weighting: Literal["samples", "uniform"] = "uniform"
    """Weights of the average: all equal, or each client's number of labelled samples."""
    unlabelled_batch_size: int = Field(default=64, ge=1)
    """Samples without a label in a mini-batch."""
    tau: float = Field(default=0.95, ge=0, le=1)
    """Probability above which the model's word is taken for a label."""
    unlabelled_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the loss on samples without a label (lambda_u); 0 leaves them out."""
    flip: bool | None = None
    """Whether augmentation flips images; none: where they are in colour."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Choose whether to flip, and make sure that the data are images."""
        flip = flips(inputs, self.flip, self.name)
        require_bytes(inputs, self.name)
        return super().resolved(rounds=rounds, model=model, inputs=inputs).model_copy(update={"flip": flip})

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """Local steps on samples with and without labels."""
        return self.contribute(client, message, self.consistent(client.unlabelled)).reply(Update)

    def consistent(self, unlabelled: Samples) -> Loss:
        """l_s + lambda_u l_u (equations 3 and 4); l_s alone where there are no samples without labels.

        Args:
            unlabelled: The client's.

        Returns:
            The loss of a mini-batch of labelled samples.
        """

        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            generator, flip = context.generator, bool(self.flip)
            labelled = weak(batch.inputs, generator, flip)  # [b, c, h, w]
            if not len(unlabelled) or not self.unlabelled_weight:
                return self.loss(model, replace(batch, inputs=labelled), context)
            inputs, _ = draw(unlabelled, self.unlabelled_batch_size, generator)  # [u, c, h, w]
            parts = [labelled, weak(inputs, generator, flip), strong(inputs, generator, flip)]
            # one pass, so that batch norm sees all samples of the step together
            known, guess, scores = model(torch.cat(parts)).split([len(part) for part in parts])
            probabilities, classes = guess.detach().softmax(1).max(1)  # [u], [u]
            targets = torch.where(probabilities > self.tau, classes, UNKNOWN)
            # the mean over all of them, those that are left out included
            total = functional.cross_entropy(scores, targets, ignore_index=UNKNOWN, reduction="sum")
            return functional.cross_entropy(known, batch.labels) + self.unlabelled_weight * total / len(targets)

        return loss
