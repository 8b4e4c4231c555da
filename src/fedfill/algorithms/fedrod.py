"""FedRoD: Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms._keeping import KeepsAPart
from fedfill.data.samples import Batch
from fedfill.errors import FedfillError
from fedfill.models.layers import inputs_of, output_of
from fedfill.models.views import part
from fedfill.protocol.client import Client, client_handler
from fedfill.training.fit import Context, Loss
from fedfill.tree import Tree, Weights

MASKED = 1e4
"""Margin of a class that a client lacks: the exponential of minus this is 0, and sums of it are finite."""


class FedRoD(KeepsAPart):
    """FedAvg under a loss that is fair to rare classes, and beside its head one for each client that it adds to it.

    Use it when clients lack classes and you want both: one model for everybody, and each client's own.
    """

    name = "fedrod"
    parts: ClassVar[tuple[str, ...]] = ("classifier", "personal")

    judged: Literal["personal", "generic"] = "personal"
    """Whether clients are judged by both heads together, or by the generic one alone, which is the same model for all."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that the two heads can be added up, and that scores are adjusted once."""
        if self.local is not None and self.local.name in ("fedlc", "fedrs"):
            raise FedfillError(
                f"local: found {self.local.name} with {self.name}, whose loss adjusts the scores of rare classes already; allowed: "
                "fedprox, none"
            )
        heads = [model.get_submodule(name) for name in ("classifier", "personal")]
        linear = [head for head in heads if isinstance(head, nn.Linear) and head.bias is not None]
        if len(linear) < 2 or linear[0].weight.shape != linear[1].weight.shape:
            raise FedfillError(
                f"model: {self.name} adds up two linear heads with biases and of one shape, classifier and personal, and "
                f"{type(model).__name__} has others; allowed: torch.nn.Linear"
            )
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def kept(self, model: nn.Module, weights: Weights) -> Collection[str]:
        """The personal head P_i."""
        return part(weights, "personal").keys()

    def personal_weights(self, state: Mapping[str, Tree], weights: Weights) -> Weights:
        """One head in the place of both: (G + P_i) f is G f + P_i f."""
        own: Weights | None = state.get("own")
        if own is None or self.judged == "generic":
            return weights
        both = {(name := f"classifier.{key}"): weights[name] + own[f"personal.{key}"] for key in ("weight", "bias")}
        return {**weights, **own, **both}

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """Local epochs on both risks at once (algorithm 1 of the supplement)."""
        counts = torch.tensor(client.data.counts(client.classes), device=client.data.labels.device)
        done = self.contribute(client, message, both_risks(counts), beside=self.own(client, message.weights))
        client.state.own = done.beside
        return done.reply(Update)


def both_risks(counts: Tensor) -> Loss:
    """CE(G f(x) + ln n, y), which trains f and G, and CE(sg[G f(x)] + P sg[f(x)], y), which trains P (equations 5 and 6).

    Args:
        counts: n, samples of each class, ``[classes]``; a class without any takes no part in the first.

    Returns:
        The loss of a model with the parts ``classifier`` (G) and ``personal`` (P).
    """
    prior = counts.clamp(min=1).double().log().masked_fill(counts == 0, -MASKED).float()  # [classes]

    def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        classifier, personal = model.get_submodule("classifier"), model.get_submodule("personal")
        with inputs_of(classifier) as features, output_of(classifier) as scores:
            model(batch.inputs)
        z, generic = features[-1], scores[-1]  # [b, l], [b, classes]
        own = generic.detach() + personal(z.detach())  # [b, classes]
        return functional.cross_entropy(generic + prior, batch.labels) + functional.cross_entropy(own, batch.labels)

    return loss
