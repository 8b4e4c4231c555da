"""Clustered sampling: Fraboni et al., "Clustered Sampling: Low-Variance and Improved Representativity for Clients Selection", ICML 2021."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Request, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.errors import FedfillError
from fedfill.privacy.releases import public, unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.training.similarity import cosines, distances, movement, products
from fedfill.tree import Tree, Weights

Urn = list[tuple[int, int]]
"""Clients with whole numbers of balls: how likely each of them is to be drawn."""


@dataclass(frozen=True)
class Size(Message):
    """Client to server: how many training samples it has."""

    declared: ClassVar = {"samples": unbounded("number of samples, sent as it is")}

    samples: int


@dataclass(frozen=True)
class Drawn(Broadcast):
    """Server to client: beside the model how much the client counts in the mean."""

    draws: int


@dataclass(frozen=True)
class DrawnUpdate(Update):
    """Client to server: beside its update how much it counts, as the server said."""

    declared: ClassVar = {**Update.declared, "draws": public("the number that the server sent")}

    draws: int


class ClusteredSampling(FedAvg):
    """FedAvg whose cohort has a client from each of several groups of like clients, without a bias (algorithm 2).

    Use it when few of many clients take part in a round and they are of different kinds, each of which a round should see.
    """

    name = "clusteredsampling"

    weighting: Literal["uniform"] = "uniform"
    """Draws count alike: a client with more samples is drawn more often."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse means that weigh clients by another rule than the draws."""
        if self.aggregation is not None:
            raise FedfillError(
                f"aggregation: found {self.aggregation.name} with {self.name}, whose mean has to be that of its draws; allowed: none"
            )
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    @property
    def by(self) -> str:
        """How often a client was drawn."""
        return "draws"

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """Beside the model what is known of clients: their samples, and their last updates."""
        return {**super().server_state(initial), "sizes": {}, "updates": {}}

    def round(self, server: Server, t: int) -> None:
        """Draw a cohort, train, average by draws, and keep the updates for later draws."""
        state = server.state
        unknown = [i for i in range(server.clients) if i not in state.sizes]
        if unknown:
            state.sizes = {**state.sizes, **self.sizes(server, unknown)}
        draws = self.draws(server)
        messages = {i: Drawn(state.weights, n) for i, n in draws.items()}
        replies, mean = self.gather(server, list(draws), self.train_drawn, messages, individually=True)
        model = server.model(state.weights)
        found = {i: movement(model, reply.weights, state.weights) for i, reply in replies.items()}
        state.updates = {**state.updates, **found}
        state.weights = mean["weights"]
        server.note(draws={str(i): n for i, n in draws.items()})

    def sizes(self, server: Server, unknown: list[int]) -> dict[int, int]:
        """Numbers of samples of those who tell them."""
        replies = server.call(unknown, self.size, Request())
        sound = {i: reply.samples for i, reply in replies.items() if 0 <= reply.samples < 2**32}
        for i in replies.keys() - sound.keys():
            server.lose(i, "size", "its number of samples is none")
        if not any(sound.values()) and not any(server.state.sizes.values()):
            raise FedfillError("data: found no client with training samples; clusteredsampling draws clients by them")
        return sound

    def draws(self, server: Server) -> dict[int, int]:
        """How often each client is drawn, in ascending order of clients; where all take part, their samples."""
        sizes = {i: n for i, n in sorted(server.state.sizes.items()) if n}
        size = max(1, round(server.participation * server.clients))
        if size >= server.clients:
            return sizes
        urns = distributions(list(sizes.values()), size, self.apart(server, list(sizes)))
        balls, stream = sum(sizes.values()), server.stream("draws")
        places = torch.randint(balls, (size,), generator=stream, device=stream.device).tolist()
        clients = list(sizes)
        drawn = [clients[ball_of(urn, place)] for urn, place in zip(urns, places, strict=True)]
        return {i: drawn.count(i) for i in sorted(set(drawn))}

    def apart(self, server: Server, clients: Sequence[int]) -> Tensor:
        """Distances between the directions of clients' last updates, ``[n, n]``; none between those that sent nothing yet."""
        updates: Mapping[int, Weights] = server.state.updates
        model = server.model(server.state.weights)
        nothing = movement(model, server.state.weights, server.state.weights)
        found = distances(cosines(products([updates.get(i, nothing) for i in clients])))
        unseen = torch.tensor([i not in updates for i in clients])
        return found.masked_fill(unseen[:, None] & unseen[None, :], 0.0)

    @client_handler
    def size(self, client: Client, message: Request) -> Size:
        """How many samples there are."""
        return Size(len(client.data))

    @client_handler
    def train_drawn(self, client: Client, message: Drawn) -> DrawnUpdate:
        """Local epochs from the global model."""
        return self.contribute(client, message, self.loss).reply(DrawnUpdate, draws=message.draws)


def distributions(sizes: Sequence[int], draws: int, apart: Tensor) -> list[Urn]:
    """Urns from each of which one client is drawn, so that a client is drawn draws n_i / n times in the mean (algorithm 2).

    Each client has draws n_i balls, and each urn holds n. A client with more than an urn holds fills urns alone. Of the
    others, groups of like clients that fit into an urn are made, the largest of which get urns of their own; the balls of
    the smaller ones fill what is left.

    Args:
        sizes: n_i, samples of each client, above 0; n is their sum.
        draws: Number of urns.
        apart: Distances between clients, ``[clients, clients]``.

    Returns:
        The urns, each with n balls.
    """
    n = sum(sizes)
    urns: list[Urn] = []
    left = []
    for i, own in enumerate(sizes):
        urns += [[(i, n)]] * (draws * own // n)
        left.append(draws * own % n)
    groups = sorted(heaps(left, n, apart), key=lambda group: (-sum(left[i] for i in group), group))
    rest = draws - len(urns)
    open_urns = [[(i, left[i]) for i in group] for group in groups[:rest]]
    poured = [(i, left[i]) for group in groups[rest:] for i in group]
    for urn in open_urns:
        room = n - sum(balls for _, balls in urn)
        while room:
            i, balls = poured.pop(0)
            taken = min(balls, room)
            urn.append((i, taken))
            room -= taken
            if balls > taken:
                poured.insert(0, (i, balls - taken))
    return urns + open_urns


def heaps(masses: Sequence[int], capacity: int, apart: Tensor) -> list[list[int]]:
    """The largest branches of Ward's tree whose mass is within a capacity; those without a mass are in none.

    Args:
        masses: Of each leaf, at most the capacity.
        capacity: The largest mass of a branch.
        apart: Distances between leaves, ``[n, n]``.

    Returns:
        Their leaves, in ascending order.
    """
    from scipy.cluster.hierarchy import linkage  # here: it would make every start longer
    from scipy.spatial.distance import squareform

    leaves = [i for i, mass in enumerate(masses) if mass]
    found = {k: [i] for k, i in enumerate(leaves)}
    if len(leaves) > 1:
        tree = linkage(squareform(apart[leaves][:, leaves].numpy(), checks=False), "ward")
        for k, (a, b) in enumerate(tree[:, :2].astype(int).tolist()):
            if a in found and b in found and sum(masses[i] for i in found[a] + found[b]) <= capacity:
                found[len(leaves) + k] = sorted(found.pop(a) + found.pop(b))
    return sorted(found.values())


def ball_of(urn: Urn, place: int) -> int:
    """The client whose ball lies at a place, from 0, where balls lie in the urn's order."""
    for i, balls in urn:
        if place < balls:
            return i
        place -= balls
    raise ValueError(f"an urn has no ball at {place}")
