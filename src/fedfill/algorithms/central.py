"""Pooled data: one model trained on everybody's samples, the ceiling that no federation is expected to break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfill.algorithms import Algorithm
from fedfill.errors import FedfillError
from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.tree import Weights


@dataclass(frozen=True)
class Turn(Message):
    """To the one place that holds all data: the model, and which share of the samples makes an epoch."""

    weights: Weights
    share: float


@dataclass(frozen=True)
class Trained(Message):
    """The trained model."""

    declared: ClassVar = {"weights": unbounded("model trained on the pooled data, which were handed over before")}

    weights: Weights


class Central(Algorithm):
    """All training data in one place, with as many samples per round as FedAvg's cohort passes through in its epochs.

    Use it as the ceiling: all data lie in one place, and no federation is expected to do better.
    """

    name = "central"
    numbers = True
    pooled = True

    def round(self, server: Server, t: int) -> None:
        """Train on the pooled data."""
        share = len(server.select(t)) / server.clients
        replies = server.call([0], self.train, Turn(server.state.weights, share))
        if not replies:
            raise FedfillError(
                f"engine: the pooled data could not be trained on in round {t + 1} ({server.lost[0]['reason']})"
            )
        server.state.weights = replies[0].weights

    @client_handler
    def train(self, client: Client, message: Turn) -> Trained:
        """Epochs over a share of the pooled data, drawn anew for each."""
        samples = max(1, round(message.share * len(client.data)))
        fitted = client.fit(message.weights, self.loss, self.training(client.round), samples_per_epoch=samples)
        return Trained(fitted.weights)
