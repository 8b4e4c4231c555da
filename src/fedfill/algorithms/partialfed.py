"""PartialFed: Sun et al., "PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization", NeurIPS 2021.

All clients send whole models, and at the download each decides, layer by layer, whether to begin with the global layer or with
its own of before: by a mask that is given (Fix), or by one that it learns (Adaptive).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms._keeping import KeepsItsOwn
from fedfill.errors import FedfillError
from fedfill.models.views import NORMALISATION, first_names, layers_of, normalisation, part, trainable
from fedfill.protocol.client import Client, client_handler
from fedfill.tree import Tree, Weights


class PartialFed(KeepsItsOwn):
    """FedAvg whose clients load a part of the global model alone.

    Use it when clients' data look different and each client needs a model of its own.
    """

    name = "partialfed"

    strategy: Literal["fixed", "adaptive"] = "adaptive"
    """Which layers are loaded: all but those of `keep`, or those that each client learns to load (section 3.3)."""
    keep: Literal["norm", "head", "norm_head"] | None = None
    """With strategy=fixed: what stays at the client: normalisation layers, the part `classifier`, or both (none too)."""
    policy_batches: int = Field(default=5, ge=0)
    """With strategy=adaptive: mini-batches on which the policy is trained before each local training."""
    policy_rate: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """With strategy=adaptive: step size of the policy's Adam."""
    policy_temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """With strategy=adaptive: temperature of the Gumbel-softmax."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that the mask names something, and that clients' models are averaged as they are."""
        if self.aggregation is not None:
            raise FedfillError(
                f"aggregation: found {self.aggregation.name} with {self.name}, whose clients begin elsewhere than at the global "
                "model, so that their steps are none from it; allowed: none"
            )
        if self.strategy == "adaptive" and self.keep is not None:
            raise FedfillError(
                f"keep: found {self.keep} with strategy=adaptive, which learns what to keep; allowed: none"
            )
        for name in ("policy_batches", "policy_rate", "policy_temperature") if self.strategy == "fixed" else ():
            default = type(self).model_fields[name].default  # which every record holds
            if (found := getattr(self, name)) != default:
                raise FedfillError(
                    f"{name}: found {found:g} with strategy=fixed, which learns no policy; allowed: {default:g}, or strategy=adaptive"
                )
        resolved = super().resolved(rounds=rounds, model=model, inputs=inputs)
        return resolved.model_copy(update={"keep": self.keep or "norm_head"}) if self.strategy == "fixed" else resolved

    def needs(self) -> tuple[str, ...]:
        """What stays at the client, where it is given."""
        if self.strategy == "adaptive":
            return super().needs()
        norm = (NORMALISATION,) if self.keep != "head" else ()
        head = ("classifier",) if self.keep != "norm" else ()
        return (*super().needs(), *norm, *head)

    def client_state(self) -> dict[str, Tree]:
        """Beside its last model the logits of the client's policy, ``[layers, 2]``: global and own."""
        return {**super().client_state(), "policy": None}

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """Load a part, train, send everything."""
        done = self.contribute(client, replace(message, weights=self.begin(client, message.weights)), self.loss)
        client.state.own = done.trained
        return done.reply(Update)

    def begin(self, client: Client, received: Weights) -> Weights:
        """What the local training starts from: the global model in a client's first round."""
        last = client.state.own
        if last is None:
            return received
        if self.strategy == "fixed":
            kept = self.kept(client.model(received), received)
            return {name: last[name] if name in kept else tensor for name, tensor in received.items()}
        return self.adapt(client, received, last)

    def kept(self, model: nn.Module, weights: Weights) -> set[str]:
        """Names of the tensors that stay at the client (strategy=fixed)."""
        head = set(part(weights, "classifier")) if self.keep != "norm" else set()
        return head | normalisation(model) if self.keep != "head" else head

    def adapt(self, client: Client, received: Weights, last: Weights) -> Weights:
        """Train the policy on a few mini-batches, and load what it prefers.

        A layer's weights are those of a hard draw from the Gumbel-softmax of its two logits; the gradient goes through the
        soft draw (the straight-through estimator).
        """
        groups = layers_of(received)
        stream = client.stream("policy")
        logits = client.state.policy
        if logits is None:
            logits = torch.zeros(len(groups), 2, device=stream.device)
        logits = logits.clone().requires_grad_()
        model = client.model(received)
        parameters = trainable(model, received)
        first = first_names(model)  # what layers share goes with the first of them
        optimizer = torch.optim.Adam([logits], self.policy_rate)
        training = replace(self.training(client.round), steps=self.policy_batches or None)
        for batch in islice(client.batches(training), self.policy_batches):
            uniform = torch.rand(logits.shape, generator=stream, device=stream.device).clamp(1e-9, 1 - 1e-7)
            gumbel = -torch.log(-torch.log(uniform))
            soft = functional.softmax((logits + gumbel) / self.policy_temperature, dim=1)  # [layers, 2]
            hard = functional.one_hot(soft.argmax(1), 2).to(soft)
            chosen = hard + soft - soft.detach()
            mixed = {}
            for layer, names in enumerate(groups):
                for name in (name for name in names if first.get(name, name) == name):
                    # a layer has no derivative with respect to its running statistics
                    either = chosen[layer] if name in parameters else hard[layer]
                    mixed[name] = received[name] * either[0] + last[name] * either[1]
            scores = functional_call(model, mixed, (batch.inputs,))
            loss = functional.cross_entropy(scores, batch.labels)
            optimizer.zero_grad()
            (logits.grad,) = torch.autograd.grad(loss, logits)
            optimizer.step()
        client.state.policy = logits.detach()
        own = {name for layer, names in enumerate(groups) if logits[layer, 1] > logits[layer, 0] for name in names}
        return {name: last[name] if first.get(name, name) in own else tensor for name, tensor in received.items()}
