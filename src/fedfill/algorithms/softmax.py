"""Softmax regression on the features of a frozen network, by sums of gradients over all records; ours.

Each round is one full-batch step, preconditioned by the features' second moments, which are asked for once before the
first round (Böhning 1992). It needs no learning rate, and without noise it never raises the loss. See
``docs/algorithms/softmax.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms._features import Featured
from fedfill.algorithms._layers import Ask, Layer, bounded, changed, features, layer_of
from fedfill.errors import FedfillError
from fedfill.privacy import sums as privacy
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Sums, collect, contribute
from fedfill.statistics.softmax import (
    FINE_GRADIENT,
    gradient_bound,
    gradient_sum,
    noisy_preconditioner,
    preconditioner,
    softmax_head,
    step,
)
from fedfill.statistics.sums import FINE, GRID, Block, Statistic, class_moments
from fedfill.tree import Tree, Weights


@dataclass(frozen=True)
class AskGradient(Ask):
    """Server to client: the request for a sum of gradients.

    Attributes:
        head: W, ``[d, classes]`` float32.
    """

    head: Tensor


class Softmax(Featured):
    """Multinomial logistic regression on frozen features: a step for each round, from sums of z (p - e_y)'.

    Use it in place of fed3r where some twenty cheap rounds are possible: it is better, under noise above all.
    """

    name = "softmax"

    penalty: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    """Ridge penalty for each record, without noise."""
    gram_share: float = Field(default=0.15, gt=0, lt=1)
    """Share of the privacy budget for the features' second moments; the steps have equal parts of the rest."""
    rough: float = Field(default=0.25, gt=0, allow_inf_nan=False)
    """What is added to noisy second moments, in multiples of the largest eigenvalue of their noise."""
    clip: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Norm to which each record's gradient is clipped; none: no clipping, as none is longer than the root of 2 times the longest feature vector."""
    steps: int | None = Field(default=None, ge=1)
    """Steps among which the budget is divided; none: as many as there are rounds."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse networks whose last layer can't be fitted, and fix among how many steps the budget is divided."""
        layer = Layer.of(model, inputs, self.name)
        bounded(self, layer)
        self.second_moments(layer)
        if self.target_epsilon is not None and self.steps is not None and self.steps < rounds:
            raise FedfillError(
                f"steps: found {self.steps}, among which the budget is divided, and {rounds} rounds; allowed: rounds or more"
            )
        checked = super().resolved(rounds=rounds, model=model, inputs=inputs)
        return checked if self.target_epsilon is None else checked.model_copy(update={"steps": self.steps or rounds})

    def second_moments(self, layer: Layer) -> Statistic:
        """G, and without noise N."""
        counts = self.target_epsilon is None
        return class_moments(layer.features, layer.classes, radius=layer.radius, moments=False, counts=counts)

    def gradients(self, layer: Layer, head: Tensor) -> Statistic:
        """The gradient of the cross-entropy at a head, ``[d, classes]``."""
        bound = gradient_bound(min(layer.radius, 1e30), self.clip)
        fine = FINE_GRADIENT if self.trust == "secure" else None  # whole numbers, as masks are for these
        bits = None if fine is None or layer.radius > FINE else GRID + fine
        block = Block(tuple(head.shape), privacy.other(bound, head.numel()), bits=bits)

        def add(sums: Weights, z: Tensor, labels: Tensor) -> None:
            sums["gradient"] += gradient_sum(head.to(z.device), z, labels, self.clip, fine)

        return Statistic({"gradient": block}, add, "gradients of the last layer")

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The network, W in float64, G, the noise on it off the diagonal, and N where it is known."""
        return {**super().server_state(initial), "head": None, "gram": None, "std": 0.0, "counts": None}

    def pretraining_steps(self) -> int:
        """What the features learn, and their second moments."""
        return super().pretraining_steps() + 1

    def pretrain(self, server: Server, step: int) -> None:
        """Ask for G, of which the preconditioner is made, once the features have learned what they can."""
        if step < super().pretraining_steps():
            super().pretrain(server, step)
            return
        layer = layer_of(server, server.state.weights, self.name)
        statistic = self.second_moments(layer)
        message = Ask(changed(server, server.state.weights), server.clients)
        collected = collect(
            server, self.gram_sums, message, statistic, self.noise(statistic, self.left * self.gram_share)
        )
        server.state.gram, server.state.std = collected.sums["gram"], collected.stds["gram"] / math.sqrt(2)
        server.state.counts = collected.sums.get("counts")
        server.state.head = torch.zeros(layer.features, layer.classes, dtype=torch.float64)

    @client_handler
    def gram_sums(self, client: Client, message: Ask) -> Sums:
        """The second moments of the client's features."""
        weights = {**client.initial, **message.weights}
        layer = Layer.of(client.model(weights), client.blank, self.name)
        statistic = self.second_moments(layer)
        records = features(client, weights, layer, keep=True)
        return contribute(
            client, statistic, records, self.noise(statistic, self.left * self.gram_share), message.clients
        )

    def round(self, server: Server, t: int) -> None:
        """W <- W - B^-1 (S + lambda W), with S the sum of all gradients at W."""
        state = server.state
        layer = layer_of(server, state.weights, self.name)
        head = state.head.float()
        statistic = self.gradients(layer, head)
        message = AskGradient(changed(server, state.weights, layer), server.clients, head)
        collected = collect(server, self.gradient_sums, message, statistic, self.noise(statistic, self.share))
        gradient = collected.sums["gradient"]
        if state.std:
            factor, lam = noisy_preconditioner(state.gram, state.std, self.rough), 0.0
        else:
            lam = self.penalty * float(state.counts.sum())
            factor = preconditioner(state.gram, lam)
        state.head = step(state.head, gradient, factor, lam)
        state.weights = {**state.weights, **layer.holding(softmax_head(state.head, state.counts), state.weights)}

    @property
    def share(self) -> float:
        """Of the budget, for one step."""
        return self.left * (1 - self.gram_share) / (self.steps or 1)

    @client_handler
    def gradient_sums(self, client: Client, message: AskGradient) -> Sums:
        """The gradient over the client's records."""
        weights = {**client.initial, **message.weights}
        layer = Layer.of(client.model(weights), client.blank, self.name)
        statistic = self.gradients(layer, message.head)
        records = features(client, weights, layer, keep=True)
        return contribute(client, statistic, records, self.noise(statistic, self.share), message.clients)
