"""A program whose clients send sums of their points, in good order or spoilt in one of many ways."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedfill.algorithms import Algorithm
from fedfill.data.federation import ClientData, Federation
from fedfill.data.samples import Samples
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Collected, Sums, collect, contribute
from fedfill.statistics.noise import NoisySums
from fedfill.statistics.sums import Statistic, as_joined, as_sent, class_moments, summed
from fedfill.tree import Weights

Points = list[tuple[list[list[float]], list[int]]]
"""For each client its points, and their classes."""

BY_HAND: Points = [([[1, 0], [0.6, 0.8]], [0, 1]), ([[0, 1], [0.8, 0.6], [0.8, -0.6]], [1, 0, 0])]
"""Two clients with five unit vectors."""


@dataclass(frozen=True)
class Question(Message):
    """What is asked, and who answers badly in which way."""

    clients: int
    bad: list[int]
    how: str = ""
    purpose: str = "sums"


class Summer(NoisySums, Algorithm):
    """Asks for G, M and N of points of two classes."""

    share: float = 1.0
    d: int = 2

    @property
    def statistic(self) -> Statistic:
        return class_moments(self.d, 2)

    @client_handler
    def sums(self, client: Client, message: Question) -> Sums:
        points, how = client.data.inputs, message.how if client.id in message.bad else ""
        if how == "raises":
            raise ValueError("no power")
        if how == "no features":
            points = points.clone()
            points[-1, 0] = float("nan")
        statistic, noise = self.statistic, self.noise(self.statistic, self.share)
        # in chunks, as features come
        records = ((points[k : k + 2], client.data.labels[k : k + 2]) for k in range(0, len(points), 2))
        reply = contribute(client, statistic, records, noise, message.clients, message.purpose)
        return replace(reply, sums=spoilt(reply.sums, how))

    def ask(self, server: Server, *, purpose: str = "sums", bad: list[int] | None = None, how: str = "") -> Collected:
        message = Question(server.clients, bad or [], how, purpose)
        noise = self.noise(self.statistic, self.share)
        return collect(server, self.sums, message, self.statistic, noise, purpose)


def spoilt(sums: Weights, how: str) -> Weights:
    """What a client sends that has gone mad."""
    moments: Any = sums["moments"]
    if how == "other shape":
        return {**sums, "moments": moments[:1]}
    if how == "other names":
        return {**sums, "more": moments}
    if how == "a block less":
        return {"moments": moments}
    if how == "int16":
        return {**sums, "moments": moments.to(torch.int16)}
    if how == "float64":
        return {**sums, "moments": moments.to(torch.float64)}
    if how in ("huge", "least"):
        value = 2**53 + 1 if how == "huge" else -(2**63)
        return {**sums, "moments": torch.full(moments.shape, value, dtype=torch.int64)}
    if how == "below 0":
        return {**sums, "counts": torch.tensor([7, -1], dtype=sums["counts"].dtype)}
    if how == "infinite":
        return {**sums, "moments": torch.full_like(moments, float("inf"))}
    if how == "nan":
        return {**sums, "moments": torch.full_like(moments, float("nan"))}
    return sums


def federation_of(points: Points) -> Federation:
    clients = [Samples(matrix(z, points), torch.tensor(y, dtype=torch.int64)) for z, y in points]
    members = tuple(ClientData(samples, samples[:1]) for samples in clients)
    return Federation("points", members, clients[0], ("first", "second"), (), "no fingerprint")


def matrix(rows: list[list[float]], points: Points) -> Tensor:
    """Rows as a matrix, also where there are none."""
    d = next((len(z[0]) for z, _ in points if z), 2)
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, d)


def drawn(*sizes: int, seed: int = 0, d: int = 2) -> Points:
    """Clients with so many random points of length 1."""
    stream = torch.Generator().manual_seed(seed)
    found = []
    for n in sizes:
        z = torch.nn.functional.normalize(torch.randn(n, d, generator=stream))
        found.append((z.tolist(), torch.randint(0, 2, (n,), generator=stream).tolist()))
    return found


def pooled(points: Points, *but: int) -> Weights:
    """The sums in one place, over all clients but some, packed, without any noise."""
    rows = [row for i, (z, _) in enumerate(points) if i not in but for row in z]
    labels = [y for i, (_, classes) in enumerate(points) if i not in but for y in classes]
    z = matrix(rows, points)
    statistic = class_moments(z.shape[1], 2)
    return as_joined(statistic, as_sent(statistic, summed(statistic, [(z, torch.tensor(labels, dtype=torch.int64))])))
