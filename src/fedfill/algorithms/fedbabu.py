"""FedBABU: Oh, Kim and Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms._keeping import KeepsAPart
from fedfill.models.views import part
from fedfill.protocol.client import Client, client_handler
from fedfill.tree import Weights


class FedBABU(KeepsAPart):
    """FedAvg of the body under a head that stays as it was drawn; each client fine-tunes a copy of the whole for itself.

    Use it when one body shall serve all, and new clients too, who fine-tune it on their own samples.
    """

    name = "fedbabu"
    parts: ClassVar[tuple[str, ...]] = ("classifier",)
    paper: ClassVar = {
        "": {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9, "batch_size": 50},
    }

    personal_epochs: int = Field(default=5, ge=0)
    """Epochs of the fine-tuning; 0: none, and clients are judged by the global model."""
    personal_part: Literal["all", "head"] = "all"
    """What is fine-tuned: the whole copy, or its head alone."""

    def kept(self, model: nn.Module, weights: Weights) -> Collection[str]:
        """The head, which everybody can draw."""
        return part(weights, "classifier").keys()

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """ClientBodyUpdate of algorithm 1, with the head fixed; beside it a copy of what was received is fine-tuned."""
        head = self.drawn(client, message.weights)
        done = self.contribute(client, message, self.loss, fixed=head)
        if self.personal_epochs:
            training = replace(self.training(client.round), epochs=self.personal_epochs, steps=None)
            moving, fixed = (
                (head, message.weights) if self.personal_part == "head" else ({**message.weights, **head}, {})
            )
            client.state.own = {**fixed, **client.fit(moving, self.loss, training, fixed=fixed).weights}
        return done.reply(Update)
