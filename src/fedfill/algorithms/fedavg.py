"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017."""

from __future__ import annotations

from typing import Literal

from fedfill.algorithms import Broadcast, Composable, Update
from fedfill.errors import FedfillError
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.server import Server


class FedAvg(Composable):
    """The weighted average of models that clients trained on their own data (algorithm 1).

    Use it first: it is simple and sends the least, and every other method has to beat it.
    """

    name = "fedavg"
    numbers = True

    weighting: Literal["samples", "uniform"] = "samples"
    """Weights of the average: each client's number of samples, or all equal."""

    def check_compatible(self, whole: Composable) -> None:
        """Refuse weights that nobody would use."""
        if self is whole and self.aggregation and self.weighting != type(self).model_fields["weighting"].default:
            raise FedfillError(
                f"weighting: found {self.weighting} with aggregation={self.aggregation.name}, which weighs clients by its own "
                "rule; leave one of them out"
            )

    @property
    def by(self) -> str | None:
        """Samples, or nothing."""
        return "samples" if self.weighting == "samples" else None

    def round(self, server: Server, t: int) -> None:
        """Select a cohort, train on each client, average."""
        state = server.state
        _, mean = self.gather(server, self.cohort(server, t), self.train, Broadcast(state.weights))
        state.weights = mean["weights"]

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """ClientUpdate: local epochs from the global model."""
        return self.contribute(client, message, self.loss).reply(Update)
