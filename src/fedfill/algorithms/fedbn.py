"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.errors import FedfillError
from fedfill.models.views import NORMALISATION, normalisation
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.server import Server
from fedfill.tree import Tree, Weights


class FedBN(FedAvg):
    """FedAvg of everything but the normalisation layers, of which every client keeps its own (algorithm 1).

    Use it when clients have the same classes but their data look different; the network needs normalisation.
    """

    name = "fedbn"
    personal = True
    shares_head = True
    parts: ClassVar[tuple[str, ...]] = (NORMALISATION,)
    paper: ClassVar = {
        "": {"optimizer": "sgd", "learning_rate": 0.01, "lr_decay": 1.0, "batch_size": 32, "local_epochs": 1}
    }
    whole: ClassVar = {"local": ("moon", "scaffold", "fedcurv"), "aggregation": ("qffl",)}
    """What needs a whole model of the server's, and so is refused."""

    weighting: Literal["samples", "uniform"] = "uniform"
    """Weights of the average: all equal, or each client's number of samples."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that there is something of one's own, and that nobody needs more than what is shared."""
        for axis, names in self.whole.items():
            method = getattr(self, axis)
            if method is not None and method.name in names:
                raise FedfillError(
                    f"{axis}: found {method.name} with {self.name}, which needs the whole model of the server's, and a part of it "
                    f"is shared; allowed: {'fedprox' if axis == 'local' else 'fednova, dpfedavg'}, none"
                )
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def client_state(self) -> dict[str, Tree]:
        """The client's normalisation layers; None before its first training."""
        return {**super().client_state(), "own": None}

    def personal_weights(self, state: Mapping[str, Tree], weights: Weights) -> Weights:
        """The global model with the client's own normalisation layers, and its own last layer where there is one."""
        return {**weights, **(state.get("own") or {}), **(state.get("own_head") or {})}

    def round(self, server: Server, t: int) -> None:
        """FedAvg's, of the shared tensors alone."""
        state = server.state
        shared = without_normalisation(server.model(state.weights), state.weights)
        _, mean = self.gather(server, self.cohort(server, t), self.train, Broadcast(shared))
        state.weights = {**state.weights, **mean["weights"]}

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """Local epochs from the shared tensors and the client's own layers."""
        done = self.contribute(client, message, self.loss, beside=self.own(client, message.weights))
        client.state.own = done.beside
        return done.reply(Update)

    @staticmethod
    def own(client: Client, shared: Weights) -> Weights:
        """The client's own layers; the initial model's before its first training."""
        if client.state.own is not None:
            return client.state.own  # type: ignore[no-any-return]
        return {name: tensor for name, tensor in client.initial.items() if name not in shared}


def without_normalisation(model: nn.Module, weights: Weights) -> Weights:
    """The tensors that are shared: all but those of normalisation layers, found by type and never by name."""
    local = normalisation(model)
    return {name: tensor for name, tensor in weights.items() if name not in local}
