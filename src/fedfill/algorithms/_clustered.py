"""Several models in place of one: each client has the model of its cluster, and each is averaged over its own clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Composable, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.errors import FedfillError
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.server import Server
from fedfill.training.aggregation import Mean, combined
from fedfill.tree import Tree, Weights

MEMBERS = "clusters"
"""The tensor beside the models of all clusters that says which client is in which, ``[clients]``."""


class Clustered(FedAvg):
    """FedAvg of several models, each over the clients of its own cluster."""

    personal = True

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse what is of one global model."""
        if self.aggregation is not None:
            raise FedfillError(
                f"aggregation: found {self.aggregation.name} with {self.name}, which averages each cluster by itself; allowed: none"
            )
        if self.local is not None and type(self.local).down is not Composable.down:
            raise FedfillError(
                f"local: found {self.local.name} with {self.name}, whose server has no single model to send it something beside; "
                "allowed: fedprox, moon, none"
            )
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The models of all clusters; None before the first round."""
        return {**super().server_state(initial), "models": None}

    def global_weights(self, server: Server) -> Weights:
        """All models, as ``<cluster>.<name>``."""
        return {f"{j}.{name}": tensor for j, model in enumerate(self.models(server)) for name, tensor in model.items()}

    @staticmethod
    def model_of(j: int, weights: Weights) -> Weights:
        """One cluster's model, out of those of all."""
        start = f"{j}."
        return {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}

    def models(self, server: Server) -> list[Weights]:
        """The models of all clusters, which begin as one: the initial model."""
        found: list[Weights] = server.state.models or [server.state.weights]
        return found

    def averaged(
        self, models: Sequence[Weights], replies: Mapping[int, Any], clusters: Mapping[int, int]
    ) -> list[Weights]:
        """Each cluster's mean of its clients' tensors; a model of which no reply came stays.

        Args:
            models: Before the round.
            replies: With ``weights`` and ``samples``, in client order.
            clusters: Of these clients.

        Returns:
            As many models.
        """
        members: list[list[Mean]] = [[] for _ in models]
        for i, reply in replies.items():
            n = float(reply.samples if self.by else 1)
            members[clusters[i]].append(Mean(reply.weights, n, n))
        means = [combined(own) for own in members]
        return [model if mean is None else mean.tensors for model, mean in zip(models, means, strict=True)]


class Assigned(Clustered):
    """Clusters that the server finds. It sends each client the model of its own alone, and sees what each of them sends."""

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """Beside the models the cluster of each client that has one."""
        return {**super().server_state(initial), "clusters": {}}

    def client_state(self) -> dict[str, Tree]:
        """The client's number, by which it finds its cluster; None before its first training."""
        return {**super().client_state(), "number": None}

    def global_weights(self, server: Server) -> Weights:
        """All models, as ``<cluster>.<name>``, and who is in which cluster; those without one are in the first."""
        members = [server.state.clusters.get(i, 0) for i in range(server.clients)]
        return {**super().global_weights(server), MEMBERS: torch.tensor(members)}

    def personal_weights(self, state: Mapping[str, Tree], weights: Weights) -> Weights:
        """The model of the client's cluster, and the first one for a client that has never trained."""
        number = state.get("number")
        return self.model_of(0 if number is None else int(weights[MEMBERS][number]), weights)

    def trained_from(self, server: Server, starts: Mapping[int, Weights]) -> dict[int, Update]:
        """Let clients train, each from a model of its own.

        Args:
            server: What the algorithm sees.
            starts: By client; the same model for those of one cluster.

        Returns:
            The good replies.
        """
        messages = {id(start): Broadcast(start) for start in starts.values()}
        any_model = next(iter(starts.values()))
        replies, _ = server.average(
            list(starts), self.train, {i: messages[id(start)] for i, start in starts.items()},
            of={"weights": any_model}, by=self.by, whole=True,
        )  # fmt: skip
        return replies

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """Local epochs from the model of the client's cluster."""
        client.state.number = client.id
        return self.contribute(client, message, self.loss).reply(Update)
