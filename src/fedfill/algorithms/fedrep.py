"""FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar

from pydantic import Field
from torch import nn

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms._keeping import KeepsAPart
from fedfill.models.views import part
from fedfill.protocol.client import Client, client_handler
from fedfill.tree import Weights


class FedRep(KeepsAPart):
    """FedAvg of the representation; each client first fits its own head to it, then the representation to this head.

    Use it when clients have few classes each and much in common in what their data look like.
    """

    name = "fedrep"
    parts: ClassVar[tuple[str, ...]] = ("classifier",)
    paper: ClassVar = {
        "": {
            "local_epochs": 1, "batch_size": 10, "optimizer": "sgd", "learning_rate": 0.01, "lr_decay": 1.0, "momentum": 0.5,
            "weight_decay": 1e-4,
        },
    }  # fmt: skip

    head_epochs: int = Field(default=10, ge=0)
    """Epochs on the head in a round, before the local epochs, which are the representation's."""

    def kept(self, model: nn.Module, weights: Weights) -> Collection[str]:
        """The head h_i."""
        return part(weights, "classifier").keys()

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """ClientUpdate of algorithm 1: h_i with the received representation fixed, then phi_i with h_i fixed."""
        head = self.own(client, message.weights)
        if self.head_epochs:
            training = replace(self.training(client.round), epochs=self.head_epochs, steps=None)
            head = client.fit(head, self.loss, training, fixed=message.weights).weights
        done = self.contribute(client, message, self.loss, fixed=head)
        client.state.own = head
        return done.reply(Update)
