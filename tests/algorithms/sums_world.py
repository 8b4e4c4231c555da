"""Heads from sums in a plane: points are their own features, and clients hold as many of them as a test says."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from tests.helpers import prepare
from tests.protocol.sums_world import BY_HAND, Points, federation_of
from tests.protocol.world import ENGINES
from torch import Tensor, nn

from fedfill.algorithms import Algorithm
from fedfill.engines.runner import make_resident
from fedfill.models.views import weights_of
from fedfill.protocol.client import State
from fedfill.protocol.server import Server
from fedfill.statistics.sums import truncated

__all__ = ["BY_HAND", "Points", "bundles", "fitted", "head_of", "records", "split"]

CPU = torch.device("cpu")


class Unit(nn.Identity):
    """Says that features are of length 1, as they are in these tests."""

    radius = 1.0


class Plane(nn.Module):
    """A linear layer on the inputs."""

    def __init__(self, d: int = 2, classes: int = 2, *, bounded: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.encoder = Unit() if bounded else nn.Identity()
        self.classifier = nn.Linear(d, classes, bias=bias)
        nn.init.constant_(self.classifier.weight, 0.25)
        if bias:
            nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x))  # type: ignore[no-any-return]


def fitted(
    algorithm: Algorithm, points: Points = BY_HAND, *, model: nn.Module | None = None, rounds: int = 1, workers: int = 1,
    seed: int = 0, after: Any = None, engine: str = "local",
) -> Server:  # fmt: skip
    """The server after the rounds of an algorithm on these points."""
    federation, model = federation_of(points), model or Plane()
    initial = weights_of(model)
    settings = algorithm.resolved(rounds=rounds, model=model, inputs=federation.test.inputs[:1])
    carrier = ENGINES[engine](settings, federation, model, initial, seed, workers, None)
    server = Server(
        carrier, clients=len(points), classes=federation.classes, rounds=rounds, participation=1.0, seed=seed, initial=initial,
        resident=make_resident(model, CPU), sample=federation.sample,
    )  # fmt: skip
    server.state = State(settings.server_state(initial))
    try:
        prepare(settings, server)
        for t in range(rounds):
            server.begin(t)
            settings.round(server, t)
            settings.conclude(server, t)
            if after is not None:
                after(server)
    finally:
        server.client_states = carrier.states()  # type: ignore[attr-defined]
        carrier.close()
    return server


def head_of(server: Server) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """W ``[d, classes]`` and b of the network's last layer."""
    weights = server.state.weights
    return weights["classifier.weight"].T.double().numpy(), weights["classifier.bias"].double().numpy()


def records(points: Points) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """All clients' points as they are summed, ``[n, d]``, and their classes."""
    z = torch.tensor([row for rows, _ in points for row in rows], dtype=torch.float32)
    return truncated(z).numpy(), np.array([y for _, labels in points for y in labels])


def split(points: Points, *sizes: int) -> Points:
    """The same points with other clients, from behind."""
    z, y = [row for rows, _ in points for row in rows][::-1], [c for _, labels in points for c in labels][::-1]
    assert sum(sizes) == len(y)
    ends = np.cumsum((0, *sizes))
    return [(z[a:b], y[a:b]) for a, b in itertools.pairwise(ends)]


def bundles(*sizes: int, d: int = 4, seed: int = 0) -> Points:
    """Points around three centres, of length 1."""
    stream = np.random.default_rng(seed)
    centres, found = stream.normal(size=(3, d)), []
    for n in sizes:
        y = stream.integers(0, 3, n)
        z = centres[y] + 0.7 * stream.normal(size=(n, d))
        found.append(((z / np.linalg.norm(z, axis=1, keepdims=True)).tolist(), y.tolist()))
    return found
