"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedfill.algorithms import Algorithm
from fedfill.engines.contract import Client, Message, Server, client_handler
from fedfill.privacy.ledger import unbounded
from fedfill.tree import Weights


@dataclass(frozen=True)
class Broadcast(Message):
    """Server to client: the global model."""

    weights: Weights


@dataclass(frozen=True)
class Update(Message):
    """Client to server: the trained model and the number of samples behind it."""

    declared: ClassVar = {
        "weights": unbounded("model update, sent as it is"),
        "samples": unbounded("number of samples, sent as it is"),
    }

    weights: Weights
    samples: int


class FedAvg(Algorithm):
    """The weighted average of models that clients trained on their own data (algorithm 1)."""

    name = "fedavg"

    weighting: Literal["samples", "uniform"] = "samples"
    """Weights of the average: each client's number of samples, or all equal."""

    def round(self, server: Server, t: int) -> None:
        """Select a cohort, train on each client, average."""
        server.state.weights = self.average(server, server.select(t))

    def average(self, server: Server, cohort: Sequence[int]) -> Weights:
        """The average of the models that a cohort trains from the global one.

        Args:
            server: What the algorithm sees.
            cohort: Clients to call.

        Returns:
            Weights of the whole model.
        """
        weights = server.state.weights
        by = "samples" if self.weighting == "samples" else None
        _, mean = server.average(cohort, self.train, Broadcast(weights), of={"weights": weights}, by=by)
        return mean["weights"]

    @client_handler
    async def train(self, client: Client, message: Broadcast) -> Update:
        """ClientUpdate: local epochs from the global model."""
        fitted = await client.fit(message.weights, self.loss, self.training(client.round))
        return Update(fitted.weights, len(client.data))
