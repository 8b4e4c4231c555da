"""Each client alone: no federation at all, the floor that a federated method has to rise above."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedfill.algorithms import Algorithm
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.tree import Tree, Weights


@dataclass(frozen=True)
class Turn(Message):
    """Server to client: it is your turn. Nothing else crosses, in either direction."""


class Local(Algorithm):
    """Every client trains a model of its own on its own data, with the budget of FedAvg.

    Use it as the floor: where a federated method is no better, there is no reason to federate.
    """

    name = "local"
    numbers = True
    personal = True

    def client_state(self) -> dict[str, Tree]:
        """The client's model; None before its first training."""
        return {"weights": None}

    def personal_weights(self, state: Mapping[str, Tree], weights: Weights) -> Weights:
        """The client's model, which begins with the initial weights."""
        own: Weights | None = state.get("weights")
        return weights if own is None else own

    def round(self, server: Server, t: int) -> None:
        """The clients that would take part in FedAvg's round train on."""
        server.call(server.select(t), self.train, Turn())

    @client_handler
    def train(self, client: Client, message: Turn) -> Turn:
        """Local epochs from where the client left off."""
        before = client.initial if client.state.weights is None else client.state.weights
        fitted = client.fit(before, self.loss, self.training(client.round))
        client.state.weights = fitted.weights
        return Turn()
