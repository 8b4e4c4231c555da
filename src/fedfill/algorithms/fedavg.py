"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedfill.algorithms import CONTRIBUTED, Composable
from fedfill.errors import FedfillError
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.tree import Weights


@dataclass(frozen=True)
class Broadcast(Message):
    """Server to client: the global model, and what the local objective needs beside it."""

    weights: Weights
    control: Weights | None = None


@dataclass(frozen=True)
class Update(Message):
    """Client to server: the trained model and the number of samples behind it.

    Attributes:
        weights: As the aggregation wants them; FedAvg takes the trained tensors as they are.
        samples: Number of samples behind them.
        scale: A number of the aggregation's.
        control: What the local objective sends beside the model.
    """

    declared: ClassVar = CONTRIBUTED

    weights: Weights
    samples: int
    scale: float | None = None
    control: Weights | None = None


class FedAvg(Composable):
    """The weighted average of models that clients trained on their own data (algorithm 1)."""

    name = "fedavg"

    weighting: Literal["samples", "uniform"] = "samples"
    """Weights of the average: each client's number of samples, or all equal."""

    def check_host(self, host: Composable) -> None:
        """Refuse weights that nobody would use."""
        if self is host and self.aggregation and self.weighting != type(self).model_fields["weighting"].default:
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
        message = Broadcast(state.weights, self.objective_of.down(server))
        _, mean = self.gather(server, self.cohort(server, t), self.train, message, state.weights)
        state.weights = mean["weights"]

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """ClientUpdate: local epochs from the global model."""
        done = self.contribute(client, message.weights, message.control, self.loss)
        return Update(done.weights, done.samples, done.scale, done.control)
