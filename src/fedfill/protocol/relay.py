"""What clients make and others receive: asked for until it is there, and sent once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fedfill.protocol.client import BoundHandler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.tree import Record

T = TypeVar("T")


@dataclass(frozen=True)
class Delivered(Record):
    """Clients that are known to hold what is sent once; who was not heard of gets it again.

    Attributes:
        clients: Their numbers, ascending.
    """

    clients: list[int] = field(default_factory=list)

    def once(self, client: int, thing: T) -> T | None:
        """What to send a client: the thing, or None where it holds it."""
        return None if client in self.clients else thing

    def acknowledged(self, replies: Iterable[int]) -> Delivered:
        """The same after these clients replied."""
        return Delivered(sorted({*self.clients, *replies}))


def collect(
    server: Server, handler: BoundHandler, message: Message, flaw: Callable[[Any], str | None], attempts: int = 3
) -> dict[int, Any]:
    """Ask every client for what it has to share, and those that were not heard of again.

    Args:
        server: What the algorithm sees.
        handler: Replies with what it shares.
        message: To each.
        flaw: Why a reply makes no sense, in a few words, or None; such a reply is left out and reported.
        attempts: How often a client is asked at the most.

    Returns:
        The sound replies by client, in ascending order.
    """
    found: dict[int, Any] = {}
    for _ in range(attempts):
        missing = [i for i in range(server.clients) if i not in found]
        if not missing:
            break
        for i, reply in server.call(missing, handler, message).items():
            if (why := flaw(reply)) is None:
                found[i] = reply
            else:
                server.lose(i, handler.__name__, why)
    return dict(sorted(found.items()))


def match(i: int, lacks: Sequence[int], offers: Mapping[int, Sequence[int]], most: int = 1) -> list[int]:
    """The clients whose offers cover most of what client i lacks: greedy maximum coverage (FedDPMS, supplement, algorithm 1).

    The next one is chosen for what is still uncovered. Ties go to the lowest number; a client never serves itself; where
    nobody covers anything there is none.

    Args:
        i: Who receives.
        lacks: What it lacks, such as classes (H_i).
        offers: What each client made (C_j of every client j in A).
        most: How many clients at the most.

    Returns:
        Client numbers, the best first (R_i).
    """
    uncovered, chosen = set(lacks), list[int]()
    while uncovered and len(chosen) < most:
        others = (j for j in sorted(offers) if j != i and j not in chosen)
        best = max(others, key=lambda j: len(uncovered & set(offers[j])), default=None)
        if best is None or not uncovered & set(offers[best]):
            break
        chosen.append(best)
        uncovered -= set(offers[best])
    return chosen
