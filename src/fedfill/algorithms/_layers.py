"""The last layer of a network, the features that it receives, and the request for sums over these."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedfill import tree
from fedfill.data.samples import normalise
from fedfill.errors import FedfillError
from fedfill.models.layers import inputs_of
from fedfill.models.quadratic import Quadratic
from fedfill.models.views import feature_range, last_linear, radius
from fedfill.protocol.client import Client
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.statistics.gaussian_heads import QuadraticHead
from fedfill.statistics.heads import LinearHead
from fedfill.statistics.noise import NoisySums
from fedfill.statistics.sums import GRID, within
from fedfill.tree import Weights

CHUNK = 500
"""Records whose features are computed at once."""


@dataclass(frozen=True)
class Ask(Message):
    """Server to client: the request for sums over a network's features, or over what comes before them.

    Attributes:
        weights: Those tensors of the network that are no longer what everybody has from the start.
        clients: How many clients are asked.
    """

    weights: Weights
    clients: int


@dataclass(frozen=True)
class Kept(Message):
    """Client to server: it has a last layer of its own, which stays where it is."""


@dataclass(frozen=True)
class Layer:
    """The last linear layer of a network.

    Attributes:
        path: Its name among the modules.
        features: Length d of what it receives.
        classes: How many scores it returns.
        radius: Length of the longest feature vector; infinite where nothing bounds it.
        range: Between which numbers every feature is.
    """

    path: str
    features: int
    classes: int
    radius: float
    range: tuple[float, float]

    @classmethod
    def of(cls, model: nn.Module, inputs: Tensor, algorithm: str) -> Layer:
        """That of a model, tried on one sample ``[1, ...]``."""
        path = last_linear(model, inputs, algorithm)
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear | Quadratic)
        return cls(path, linear.in_features, linear.out_features, radius(model, path, inputs), feature_range(model))

    def held_by(self, weights: Weights) -> LinearHead:
        """The layer as it is in a network's weights."""
        weight = weights[f"{self.path}.weight"].double().cpu()
        return LinearHead(
            weight,
            weights[f"{self.path}.bias"].double().cpu()
            if f"{self.path}.bias" in weights
            else weight.new_zeros(len(weight)),
        )

    def holding(self, head: LinearHead | QuadraticHead, like: Weights) -> Weights:
        """A head as the tensors of the layer, in the types of `like`."""
        found = {f"{self.path}.{name}": x for name, x in vars(head).items()}
        return {name: x.to(like[name]) for name, x in found.items() if name in like}


def features(client: Client, weights: Weights, layer: Layer, *, keep: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """What the last layer receives for each of a client's records, in evaluation mode, one pass over the data.

    Args:
        client: Whose records they are.
        weights: Of the network.
        layer: Its last.
        keep: Whether they are kept for the next pass over the same network, as 16-bit numbers; features that may be longer
            than these hold are computed again.

    Yields:
        Features ``[b, d]`` and labels ``[b]`` of some hundred records.
    """
    keep = keep and layer.radius < 2.0 ** (15 - GRID)
    labels = client.data.labels
    ends = [slice(start, start + CHUNK) for start in range(0, len(labels), CHUNK)]
    network = (
        tree.sha256({name: x for name, x in weights.items() if not name.startswith(f"{layer.path}.")}) if keep else ""
    )
    known = client.scratch.get("features", ("", []))
    if keep and known[0] == network:
        for end, z in zip(ends, known[1], strict=True):
            client.check()
            yield z.to(torch.float64).mul_(2.0**-GRID), labels[end]
        return
    model, kept = client.model(weights), []
    linear = model.get_submodule(layer.path)
    for end in ends:
        client.check()
        with torch.no_grad(), inputs_of(linear) as seen:
            model(normalise(client.data.inputs[end]))
        z = within(seen[0], layer.radius)
        if keep:
            kept.append((z * 2.0**GRID).trunc_().to(torch.int16))
        yield z, labels[end]
    if keep:
        client.scratch["features"] = (network, kept)


def layer_of(server: Server, weights: Weights, algorithm: str) -> Layer:
    """The last layer of a network at the server."""
    return Layer.of(server.model({**server.initial, **weights}), server.sample.inputs, algorithm)


def changed(server: Server, weights: Weights, but: Layer | None = None) -> Weights:
    """The tensors of a network that are not the initial ones, which everybody has: the others need not be sent."""
    return {
        name: x
        for name, x in weights.items()
        if not torch.equal(x, server.initial[name]) and (but is None or not name.startswith(f"{but.path}."))
    }


def bounded(settings: NoisySums, layer: Layer) -> None:
    """Refuse noise on sums of features that nothing bounds, and words on noise that would not be heeded."""
    settings.check_trust()
    if settings.target_epsilon is not None and not math.isfinite(layer.radius):
        raise FedfillError(
            f"target_epsilon: found {settings.target_epsilon:g} on features that nothing bounds, so that no noise gives a guarantee; "
            "allowed with --model features, or with latent_activation=sigmoid"
        )
