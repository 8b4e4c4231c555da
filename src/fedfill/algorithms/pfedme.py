"""pFedMe: Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Composable, Start, Update
from fedfill.algorithms._keeping import KeepsItsOwn
from fedfill.data.samples import Batch
from fedfill.errors import FedfillError
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.server import Server
from fedfill.training.fit import Context, Loss, Penalty
from fedfill.training.functional import loss_at
from fedfill.training.optimizers import OptimizerName
from fedfill.tree import Weights


class PFedMe(KeepsItsOwn):
    """FedAvg of models from each of which a client's own is a few held steps away (algorithm 1).

    Use it when each client needs a model of its own and you can tune two rates; Ditto is simpler.
    """

    name = "pfedme"
    unfair = "its steps are learning_rate times pfedme_lambda; give the others optimizer=sgd and a rate of their own"

    pfedme_lambda: float = Field(default=15.0, gt=0, allow_inf_nan=False)
    """How close a client's model is held to the one that it shares (lambda)."""
    personal_steps: int = Field(default=5, ge=1)
    """Steps towards the client's own model on each mini-batch (K)."""
    personal_rate: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    """Size of these steps."""
    server_mix: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """How far the server goes towards the average (beta)."""

    optimizer: OptimizerName = "sgd"
    """Of the local training: sgd, since a step is w - eta lambda (w - theta)."""
    learning_rate: float = Field(default=0.005, gt=0, allow_inf_nan=False)
    """Step size of the local training (eta), which lambda multiplies."""

    def check_compatible(self, whole: Composable) -> None:
        """The step of algorithm 1 is plain."""
        super().check_compatible(whole)
        if self.optimizer != "sgd" or self.momentum:
            raise FedfillError(
                f"optimizer: found {self.optimizer} with momentum={self.momentum:g} with pfedme, whose step is eta lambda (w - theta); "
                "allowed: optimizer=sgd and momentum=0"
            )

    def objective(self, start: Start, loss: Loss) -> Loss:
        """F_i(w), the Moreau envelope of the loss, on a mini-batch: its gradient is lambda (w - theta) (equation 3)."""
        lam = self.pfedme_lambda

        def envelope(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            w = {name: p for name, p in model.named_parameters() if p.requires_grad}
            theta = {name: p.detach() for name, p in w.items()}
            for _ in range(self.personal_steps):
                leaves = {name: x.detach().requires_grad_() for name, x in theta.items()}
                value = loss_at(loss, model, leaves, batch, context)
                g = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
                theta = {
                    name: (x - self.personal_rate * (step + lam * (x - w[name]))).detach()
                    for (name, x), step in zip(leaves.items(), g, strict=True)
                }
            away = torch.stack([(p - theta[name]).square().sum() for name, p in w.items()]).sum()
            return value.detach() + lam / 2 * away

        return envelope

    def combine(self, server: Server, weights: Weights, mean: Weights, replies: Sequence[Any]) -> Weights:
        """(1 - beta) w_t + beta mean(w_i); buffers are averaged."""
        if self.server_mix == 1:
            return mean
        moved = server.parameters(weights)
        return {**mean, **{name: w + self.server_mix * (mean[name] - w) for name, w in moved.items()}}

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """The local rounds, and K more steps from their end: theta_i of the model that is sent."""
        done = self.contribute(client, message, self.loss)
        training = replace(self.training(client.round), steps=self.personal_steps, learning_rate=self.personal_rate)
        near = Penalty(self.pfedme_lambda, done.trained)
        client.state.own = client.fit(done.trained, self.loss, training, penalty=near).weights
        return done.reply(Update)
