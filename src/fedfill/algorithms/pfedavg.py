"""pFedAvg: FedAvg whose clients are judged by the global model after a training of their own (FRAug's baseline, section 4.2)."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms._keeping import KeepsItsOwn
from fedfill.protocol.client import Client, client_handler


class PFedAvg(KeepsItsOwn):
    """FedAvg, of whose global model each client fine-tunes a copy that it keeps to itself.

    Use it when each client needs a model of its own and has many samples to fine-tune it on.
    """

    name = "pfedavg"

    personal_epochs: int | None = Field(default=None, ge=1)
    """Epochs of the fine-tuning; none: as many, or as many steps, as the local training has."""

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """Fine-tune a copy of the received model, and train as FedAvg does.

        Without an epoch count of its own the fine-tuning is the local training: from the same weights, on the same
        mini-batches, so that one training serves as both.
        """
        done = self.contribute(client, message, self.loss)
        tuned = done.trained
        if self.personal_epochs is not None:
            training = replace(self.training(client.round), epochs=self.personal_epochs, steps=None)
            tuned = client.fit(message.weights, self.loss, training).weights
        client.state.own = tuned
        return done.reply(Update)
