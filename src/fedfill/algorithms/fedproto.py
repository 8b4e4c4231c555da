"""FedProto: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Algorithm
from fedfill.data.samples import Batch
from fedfill.errors import FedfillError
from fedfill.models.layers import inputs_of
from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import HEAVIEST, Message, are_classes
from fedfill.protocol.server import Server
from fedfill.training.evaluation import in_chunks
from fedfill.training.fit import Context, Loss
from fedfill.tree import Tree, Weights

FAR = 1e6
"""How much further away a class without a prototype is than any that has one."""


@dataclass(frozen=True)
class Prototypes(Message):
    """Server to client: the global prototypes ``[classes, l]``, and which classes have one ``[classes]``."""

    prototypes: Tensor
    present: Tensor


@dataclass(frozen=True)
class OwnPrototypes(Message):
    """Client to server: mean embeddings of its classes ``[own classes, l]``, which these are, and of how many samples."""

    declared: ClassVar = {
        "means": unbounded("mean embedding of each class, exact"),
        "classes": unbounded("which classes there are, exact"),
        "counts": unbounded("samples of each class, exact"),
    }

    means: Tensor
    classes: list[int]
    counts: list[int]


class FedProto(Algorithm):
    """Clients share no weights but the mean embedding of each class, towards which all pull theirs (algorithm 1).

    Use it when clients want models of their own and bytes are dear: a few numbers for each class are all that is sent.
    """

    name = "fedproto"
    personal = True
    parts: ClassVar[tuple[str, ...]] = ("classifier",)

    proto_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the distance to the prototypes (lambda); 0: each client alone."""
    proto_distance: Literal["mean", "squared"] = "mean"
    """The mean of the squared differences over coordinates, for which the authors chose lambda, or their sum (squared)."""
    predict: Literal["prototypes", "classifier"] = "prototypes"
    """How a client's model decides: by the nearest global prototype, or by its own classifier."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that the nearest prototype can stand in the place of the last layer."""
        if not isinstance(last := model.get_submodule("classifier"), nn.Linear) or last.bias is None:
            raise FedfillError(
                f"model: {self.name} needs a linear layer with biases as its classifier, and {type(model).__name__} has another; "
                "allowed: torch.nn.Linear"
            )
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The initial model, and the global prototypes; None before the first round."""
        return {**super().server_state(initial), "prototypes": None, "present": None}

    def client_state(self) -> dict[str, Tree]:
        """The client's model; None before its first training."""
        return {"weights": None}

    def global_weights(self, server: Server) -> Weights:
        """The initial model, and beside it the prototypes."""
        found = self.known(server)
        return {**server.state.weights, "prototypes": found.prototypes, "present": found.present}

    def personal_weights(self, state: Mapping[str, Tree], weights: Weights) -> Weights:
        """The client's model; the nearest prototype as a linear layer: 2 <c_k, z> - |c_k|^2 is largest where z is nearest."""
        model = {name: tensor for name, tensor in weights.items() if name not in ("prototypes", "present")}
        model |= state.get("weights") or {}
        c, present = weights["prototypes"], weights["present"]
        if self.predict == "classifier" or not bool(present.any()):
            return model
        bias = (-c.square().sum(1)).masked_fill(~present, -FAR)
        return {**model, "classifier.weight": 2 * c, "classifier.bias": bias}

    def known(self, server: Server) -> Prototypes:
        """The global prototypes, of which there are none at first."""
        if server.state.prototypes is None:
            weight = server.state.weights["classifier.weight"]  # [classes, l]
            server.state.prototypes = torch.zeros_like(weight)
            server.state.present = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        return Prototypes(server.state.prototypes, server.state.present)

    def round(self, server: Server, t: int) -> None:
        """C_k = sum n_ik c_ik / sum n_ik over those that have class k (equation 6); where nobody has, it stays."""
        before = self.known(server)
        sums = torch.zeros_like(before.prototypes, dtype=torch.float64)  # [classes, l]
        counts = sums.new_zeros(len(sums))  # [classes]
        for i, reply in server.call(server.select(t), self.train, before).items():
            if not sound(reply, *sums.shape):
                server.lose(i, "train", "its prototypes are none of this task's classes")
                continue
            n = torch.tensor(reply.counts, dtype=torch.float64, device=sums.device)
            sums[reply.classes] += n[:, None] * reply.means.double()
            counts[reply.classes] += n
        new = counts > 0
        means = (sums / counts.clamp(min=1)[:, None]).to(before.prototypes)
        server.state.prototypes = torch.where(new[:, None], means, before.prototypes)
        server.state.present = before.present | new

    @client_handler
    def train(self, client: Client, message: Prototypes) -> OwnPrototypes:
        """LocalUpdate: epochs from the client's own model, and then the means of its classes' embeddings."""
        before = client.initial if client.state.weights is None else client.state.weights
        trained = client.fit(before, self.near(message), self.training(client.round)).weights
        client.state.weights = trained
        labels = client.data.labels
        classes = sorted(set(labels.tolist()))
        if not classes:
            return OwnPrototypes(message.prototypes[:0], [], [])
        z = in_chunks(embedding(client.model(trained)), client.data).double()  # [n, l]
        means = torch.stack([z[labels == k].mean(0) for k in classes]).to(message.prototypes)
        return OwnPrototypes(means, classes, [int((labels == k).sum()) for k in classes])

    def near(self, known: Prototypes) -> Loss:
        """The loss and lambda times the mean of d(f(x), C_y), 0 where class y has no prototype yet (equation 7)."""
        if not self.proto_weight or not bool(known.present.any()):
            return self.loss

        def pulled(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            with inputs_of(model.get_submodule("classifier")) as seen:
                supervised = self.loss(model, batch, context)
            away = (seen[-1] - known.prototypes[batch.labels]).square()  # [b, l]
            d = away.sum(1) if self.proto_distance == "squared" else away.mean(1)
            return supervised + self.proto_weight * (d * known.present[batch.labels]).mean()

        return pulled


def sound(reply: OwnPrototypes, classes: int, size: int) -> bool:
    """Whether these can be means ``[own classes, size]`` of some of the classes, over so many samples."""
    shapes = reply.means.shape == (len(reply.classes), size) and len(reply.counts) == len(reply.classes)
    return shapes and are_classes(reply.classes, classes) and all(0 <= n <= HEAVIEST for n in reply.counts)


def embedding(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """What a model's classifier receives, as a function of the inputs: ``[b, ...]`` to ``[b, l]``."""

    def f(inputs: Tensor) -> Tensor:
        with inputs_of(model.get_submodule("classifier")) as seen:
            model(inputs)
        return seen[-1]

    return f
