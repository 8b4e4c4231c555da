"""What stays at home: each client keeps tensors for itself, a model beside the global one or a part that nobody else has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar, Self

from torch import Tensor, nn

from fedfill.algorithms._messages import Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.errors import FedfillError
from fedfill.models.views import first_names
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.server import Server
from fedfill.tree import Tree, Weights


class KeepsItsOwn(FedAvg):
    """FedAvg whose clients are judged with what they keep as ``own``. A subclass says in `train` how a client comes by it."""

    personal = True

    def client_state(self) -> dict[str, Tree]:
        """The client's own tensors, of a whole model or of a part; None before its first training."""
        return {**super().client_state(), "own": None}

    def personal_weights(self, state: Mapping[str, Tree], weights: Weights) -> Weights:
        """The global model with the client's own tensors in their places."""
        return {**weights, **(state.get("own") or {})}


class KeepsAPart(KeepsItsOwn):
    """FedAvg of a part of the model. A subclass says in `kept` what stays with the clients, which train it along."""

    whole: ClassVar = {"local": ("moon", "scaffold", "fedcurv"), "aggregation": ("qffl",)}
    """What needs a whole model of the server's, and so is refused."""

    def kept(self, model: nn.Module, weights: Weights) -> Collection[str]:
        """Which tensors stay with the clients.

        Args:
            model: The network.
            weights: All its tensors.

        Returns:
            Their names.
        """
        raise NotImplementedError

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that nobody needs more than what is shared."""
        for axis, names in self.whole.items():
            method = getattr(self, axis)
            if method is not None and method.name in names:
                raise FedfillError(
                    f"{axis}: found {method.name} with {self.name}, which needs the whole model of the server's, and a part of it "
                    f"is shared; allowed: {'fedprox' if axis == 'local' else 'fednova, dpfedavg'}, none"
                )
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def personal_weights(self, state: Mapping[str, Tree], weights: Weights) -> Weights:
        """The global model with the client's own part, and its own last layer where one was fitted."""
        return {**super().personal_weights(state, weights), **(state.get("own_head") or {})}

    def round(self, server: Server, t: int) -> None:
        """FedAvg's, of the shared tensors alone."""
        state = server.state
        shared = self.shared(server.model(state.weights), state.weights)
        _, mean = self.gather(server, self.cohort(server, t), self.train, Broadcast(shared))
        state.weights = {**state.weights, **mean["weights"]}

    def shared(self, model: nn.Module, weights: Weights) -> Weights:
        """What crosses: the tensors that nobody keeps. One that two layers share stays as soon as one of them does."""
        first = first_names(model)
        kept = {first.get(name, name) for name in self.kept(model, weights)}
        return {name: tensor for name, tensor in weights.items() if first.get(name, name) not in kept}

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """Local epochs from the shared tensors and the client's own part."""
        done = self.contribute(client, message, self.loss, beside=self.own(client, message.weights))
        client.state.own = done.beside
        return done.reply(Update)

    @classmethod
    def own(cls, client: Client, shared: Weights) -> Weights:
        """The client's own part; the initial model's before its first training."""
        own: Weights | None = client.state.own
        return cls.drawn(client, shared) if own is None else own

    @staticmethod
    def drawn(client: Client, shared: Weights) -> Weights:
        """The part that is not shared, as everybody can draw it: the initial model's."""
        return {name: tensor for name, tensor in client.initial.items() if name not in shared}
