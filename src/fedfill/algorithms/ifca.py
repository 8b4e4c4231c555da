"""IFCA: Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms._clustered import Clustered
from fedfill.errors import FedfillError
from fedfill.models.views import first_names, trainable
from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.training.evaluation import mean_loss
from fedfill.tree import Tree, Weights


@dataclass(frozen=True)
class Models(Message):
    """Server to client: the models of all clusters."""

    models: list[Weights]


@dataclass(frozen=True)
class ClusterUpdate(Update):
    """Client to server: one of them, trained, and which it is."""

    declared: ClassVar = {**Update.declared, "cluster": unbounded("the model with the least loss on the client's data")}

    cluster: int


class IFCA(Clustered):
    """FedAvg of several models, of which each client trains the one that fits its data best (algorithm 1, model averaging).

    Use it when clients fall into a few kinds, whose data call for different models, and you know about how many.
    """

    name = "ifca"

    clusters: int = Field(default=2, ge=1)
    """How many models there are (k)."""
    spread: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """How far apart they start: how much noise all but the first have for one part of the initial values; large: fresh draws."""
    weighting: Literal["samples", "uniform"] = "uniform"
    """Weights of the averages: all equal, or each client's number of samples."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse what is of one global model, and models that start equal."""
        if self.clusters > 1 and not self.spread:
            raise FedfillError(
                f"spread: found 0 with clusters={self.clusters}, whose models would start equal, so that all clients chose the first "
                "for ever; allowed: above 0, or clusters=1"
            )
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def client_state(self) -> dict[str, Tree]:
        """The client's cluster; None before its first training."""
        return {**super().client_state(), "cluster": None}

    def personal_weights(self, state: Mapping[str, Tree], weights: Weights) -> Weights:
        """The model of the client's cluster, and of the first where it has none yet."""
        return self.model_of(state.get("cluster") or 0, weights)

    def models(self, server: Server) -> list[Weights]:
        """The models of all clusters, which begin with the initial one and with noisy copies of it."""
        if server.state.models is None:
            stream = server.stream("clusters")
            noisy = [self.moved(server, stream) for _ in range(self.clusters - 1)]
            server.state.models = [server.state.weights, *noisy]
        found: list[Weights] = server.state.models
        return found

    def moved(self, server: Server, stream: torch.Generator) -> Weights:
        """A mixture of the initial model and noise, each tensor's mean and deviation as they were; shared ones get one noise."""
        weights: Weights = server.state.weights
        model = server.model(weights)
        first, new = first_names(model), dict(weights)
        for name, w in trainable(model, weights).items():
            if first[name] != name:
                new[name] = new[first[name]]
                continue
            noise = torch.randn(w.shape, generator=stream, device=w.device) * w.std(correction=0)
            new[name] = w.mean() + (w - w.mean() + self.spread * noise) / math.sqrt(1 + self.spread**2)
        return new

    def round(self, server: Server, t: int) -> None:
        """Send all models; average those that come back by cluster. A model that nobody chose stays."""
        models = self.models(server)
        replies, _ = server.average(
            self.cohort(server, t), self.choose_and_train, Models(models), of={"weights": models[0]}, by=self.by, whole=True
        )  # fmt: skip
        good = {}
        for i, reply in replies.items():
            if 0 <= reply.cluster < len(models):
                good[i] = reply
            else:
                server.lose(i, "choose_and_train", "a cluster that there is not")
        server.state.models = self.averaged(models, good, {i: reply.cluster for i, reply in good.items()})
        server.note(clusters={str(i): reply.cluster for i, reply in good.items()})

    @client_handler
    def choose_and_train(self, client: Client, message: Models) -> ClusterUpdate:
        """The model with the least loss on the client's training samples, of equal ones the first; local epochs from it."""
        losses = [
            mean_loss(client.model(weights), client.data) if len(client.data) else 0.0 for weights in message.models
        ]
        j = losses.index(min(losses))
        done = self.contribute(client, Broadcast(message.models[j]), self.loss)
        client.state.cluster = j
        return done.reply(ClusterUpdate, cluster=j)
