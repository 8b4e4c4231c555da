"""Local Mixup: Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018.

At every client, and averaged: a baseline of SDA-FL's semi-supervised experiments (Li et al. 2022, figure 2).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch, Samples, draw
from fedfill.protocol.client import Client, client_handler
from fedfill.training.fit import Context, Loss
from fedfill.training.mixup import draw_lambda, mixup_loss
from fedfill.training.pseudo_labels import confident


class Mixup(FedAvg):
    """FedAvg of clients that train on mixtures of their own samples, and of those without labels that the global model is sure of.

    Use it when you want a simple augmentation with a client's own samples; with unlabelled ones it collapsed here.
    """

    name = "mixup"
    draws_beside = True
    paper: ClassVar = {
        "": {"local_steps": 40, "batch_size": 16, "optimizer": "sgd", "learning_rate": 0.03, "lr_decay": 1.0}
    }

    weighting: Literal["samples", "uniform"] = "uniform"
    """Weights of the average: all equal, or each client's number of labelled samples."""
    mixup_alpha: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Mixing shares come from Beta(alpha, alpha); 0: samples as they are."""
    unlabelled_batch_size: int = Field(default=64, ge=0)
    """Samples with the global model's label in a mini-batch; 0: labelled ones alone."""
    tau: float = Field(default=0.95, ge=0, le=1)
    """Probability above which the global model's word is taken for a label."""

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """Local steps on mixtures."""
        sure = client.unlabelled
        if self.unlabelled_batch_size:
            sure = confident(client.model(message.weights), sure, self.tau)
        return self.contribute(client, message, self.mixed(sure)).reply(Update)

    def mixed(self, confident: Samples) -> Loss:
        """Mixup of a mini-batch with itself in another order.

        Args:
            confident: Samples with a model's labels, of which some join each mini-batch; perhaps none.

        Returns:
            The loss of a mini-batch of labelled samples.
        """

        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            inputs, labels, generator = batch.inputs, batch.labels, context.generator
            if len(confident) and self.unlabelled_batch_size:
                more, guessed = draw(confident, self.unlabelled_batch_size, generator)
                inputs, labels = torch.cat([inputs, more]), torch.cat([labels, guessed])
            order = torch.randperm(len(labels), generator=generator, device=generator.device)
            share = draw_lambda(self.mixup_alpha, generator)
            return mixup_loss(model, inputs, labels, inputs[order], labels[order], share)

        return loss
