"""Fed3R with personal heads: each client's own ridge regression around the shared one; ours.

W_i minimises the client's own squared error plus lambda_i ||W - W*||^2, with W* the head of all clients' sums. Nothing more is
sent. See ``docs/algorithms/fed3r.md``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field

from fedfill.algorithms._layers import Ask, Kept, Layer, changed, features
from fedfill.algorithms.fed3r import Fed3R
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.server import Server
from fedfill.statistics.heads import LinearHead
from fedfill.statistics.sums import class_moments, summed
from fedfill.tree import Tree, Weights


class PFed3R(Fed3R):
    """Ridge regression whose clients each keep a head of their own, close to the shared one.

    Use it where the same class looks different from client to client; as head=pfed3r with fedbn and fraug.
    """

    name = "pfed3r"
    personal = True

    scale: float = Field(default=1.0, ge=1, le=1)
    """The heads are as least squares has them: the clients' own sums are of labels of 0 and 1, and a sharper head would be none to stay close to."""
    nearness: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """How close a client's head stays to the shared one: lambda_i as a multiple of its number of records."""

    def client_state(self) -> dict[str, Tree]:
        """The client's head."""
        return {**super().client_state(), "own_head": None}

    def personal_weights(self, state: Mapping[str, Tree], weights: Weights) -> Weights:
        """The network with the client's head."""
        return {**weights, **(state.get("own_head") or {})}

    def round(self, server: Server, t: int) -> None:
        """The shared head, and around it everybody's own."""
        super().round(server, t)
        server.call(range(server.clients), self.own, Ask(changed(server, server.state.weights), server.clients))

    @client_handler
    def own(self, client: Client, message: Ask) -> Kept:
        """Make the client's head, which stays there."""
        return self.keep_own(client, {**client.initial, **message.weights})

    def keep_own(self, client: Client, weights: Weights) -> Kept:
        """W_i = (G_i + lambda_i I)^-1 (M_i + lambda_i W*), with the client's own sums."""
        layer = Layer.of(client.model(weights), client.blank, self.name)
        if len(client.data):
            shared = layer.held_by(weights)
            statistic = class_moments(layer.features, layer.classes, radius=layer.radius, counts=False)
            sums = {name: x.cpu() for name, x in summed(statistic, features(client, weights, layer)).items()}
            lam = self.nearness * len(client.data)
            ridge = sums["gram"] + lam * torch.eye(layer.features, dtype=torch.float64)
            weight = torch.linalg.solve(ridge, sums["moments"] + lam * shared.weight.T)
            client.state.own_head = layer.holding(LinearHead(weight.T, shared.bias), weights)
        return Kept()
