"""FedMA: Wang et al., "Federated Learning with Matched Averaging", ICLR 2020; widths do not grow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from fedfill.algorithms import Broadcast
from fedfill.algorithms.pfnm import PFNM, OwnUnits, alike, in_full, share_moved
from fedfill.models.matching import match
from fedfill.models.units import layers_in_order, reordered
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.tree import Tree, Weights


@dataclass(frozen=True)
class MatchedLayer(Message):
    """Server to client: a layer that was matched.

    Attributes:
        number: Which, from 0.
        weights: Its tensors, for all clients the same.
        places: Which of its units each of the client's own is, int64 ``[L]``.
    """

    number: int
    weights: Weights
    places: Tensor


class FedMA(PFNM):
    """Layers are matched and averaged one after the other, and clients train what comes behind them in between.

    Use it when bytes are dear and a round may take an exchange for each layer; else fedavg with as many does as well.
    """

    name = "fedma"
    unfair = (
        "a client trains anew for each layer of the network in a round; give the others as many times its local_epochs"
    )

    retrain_epochs: int | None = Field(default=None, ge=0, le=1_000_000)
    """Passes over the data after each matched layer, with the layers up to it fixed; none: as in the first training of a round; 0: no training."""

    def client_state(self) -> dict[str, Tree]:
        """The client's network on its way through the layers; None between rounds."""
        return {**super().client_state(), "own": None}

    def round(self, server: Server, t: int) -> None:
        """Algorithm 1: match a layer, send it, let clients train what comes behind it; the last layer is averaged by class."""
        weights: Weights = server.state.weights
        layers = layers_in_order(server.model(weights), server.sample.inputs)
        first = replies = self.ask(
            server, self.cohort(server, t), self.train, Broadcast(weights), layers[0].of(weights)
        )
        found: Weights = {}
        moved: dict[str, float] = {}
        for n, layer in enumerate(layers[:-1]):
            if not replies:
                return
            own = [in_full(reply.weights) for reply in replies.values()]
            units = [torch.cat([layer.incoming(x), layer.biases(x)], 1) for x in own]
            places = match(units, [torch.ones_like(x[0]) for x in units], self.prior, self.sweeps)
            own = [{k: w[place.argsort()] for k, w in x.items()} for x, place in zip(own, places, strict=True)]
            matched = alike(self.mean(layer, own), weights)
            found |= matched
            moved[layer.path] = share_moved(places)
            device = server.sample.labels.device
            messages = {i: MatchedLayer(n, matched, x.to(device)) for i, x in zip(replies, places, strict=True)}
            wanted = layers[n + 1].of(weights)
            replies, _ = server.average(
                list(replies), self.retrain, messages, of={"weights": wanted}, by=None, whole=True
            )
        if replies:
            shares = self.precisions({i: first[i] for i in replies}, layers[-1])
            last = self.mean(layers[-1], [in_full(reply.weights) for reply in replies.values()], shares)
            server.state.weights = {**weights, **found, **alike(last, weights)}
            server.note(moved=moved)

    @client_handler
    def train(self, client: Client, message: Broadcast) -> OwnUnits:
        """Local epochs from the global model, or from a start of the client's own; the first layer is sent."""
        done = self.contribute(client, replace(message, weights=self.start(client, message.weights)), self.loss)
        layers = layers_in_order(client.model(done.trained), client.blank)
        client.state.own = done.trained if len(layers) > 1 else None
        return OwnUnits(layers[0].of(done.trained), client.data.counts(client.classes))

    @client_handler
    def retrain(self, client: Client, message: MatchedLayer) -> OwnUnits:
        """Local epochs on the layers behind the matched ones, which stay as they are; the first of them is sent."""
        n, weights = message.number, client.state.own
        layers = layers_in_order(client.model(weights), client.blank)
        weights = {**reordered(weights, layers, n, message.places.argsort()), **message.weights}
        behind = {name: w for layer in layers[n + 1 :] for name, w in layer.of(weights).items()}
        if self.retrain_epochs != 0:
            fixed = {name: w for name, w in weights.items() if name not in behind}
            behind = self.again().contribute(client, Broadcast(behind), self.loss, fixed=fixed).trained
        client.state.own = {**weights, **behind} if n + 2 < len(layers) else None
        return OwnUnits(layers[n + 1].of(behind), None)

    def again(self) -> Self:
        """These settings with the budget of a training between two layers."""
        if self.retrain_epochs is None:
            return self
        return self.model_copy(update={"local_epochs": self.retrain_epochs, "local_steps": None})
