"""Which classes clients give and lack, and who serves whom: FedDPMS's matching (Chen and Vikalo 2023, supplement)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.relay import match
from fedfill.protocol.server import Server
from fedfill.synthesis.dose import SCARCE, Dose


@dataclass(frozen=True)
class Skew(Message):
    """Client to server: how many of its classes are scarce (n_i), and the number of its records."""

    declared: ClassVar = {
        "scarce": unbounded("how many classes are scarce, exact"),
        "samples": unbounded("number of samples, sent as it is"),
    }

    scarce: int
    samples: int


@dataclass(frozen=True)
class Seek(Message):
    """Server to client: the request for what it has or lacks; n and alpha, where clients agreed on them."""

    agreed: list[int] | None


@dataclass(frozen=True)
class Scarce(Message):
    """Client to server: H_i, its n least abundant classes, or all that it lacks."""

    declared: ClassVar = {"classes": unbounded("the n least abundant classes, exact")}

    classes: list[int]


class Matching(Dose):
    """Which classes clients give and lack, and who serves whom: settings and exchanges of an algorithm that relays by class.

    It keeps ``agreed``, at first None, in ``server.state``.
    """

    # settings of variants are left out where they have their defaults, so that digests of runs without them stay as they were
    want: Literal["rarest", "missing"] = Field(default="rarest", exclude_if=lambda value: value == "rarest")
    """What a client lacks: its n rarest classes (rarest), or all of which it has fewer than alpha records (missing)."""
    only_scarce: bool = False
    """Whether a recipient keeps only the classes that it asked for."""
    n_assistants: Annotated[int, Field(ge=1)] | Literal["cover"] = 1
    """Assisting clients for each recipient, chosen greedily to cover its scarce classes; cover: as many as that takes."""

    # n and alpha that all clients share

    def agree(self, server: Server) -> Self:
        """These settings with numbers for auto, from one exchange with everybody (FedDPMS, supplement, sections 2 and 7).

        Args:
            server: What the algorithm sees.

        Returns:
            What `agreed` gives.
        """
        if "auto" in (self.n_classes, self.alpha) and server.state.agreed is None:
            found: list[Skew] = list(server.call(range(server.clients), self.skew, Seek(None)).values())
            told = [skew.scarce for skew in found], [skew.samples for skew in found]
            server.state.agreed = self.agreement(*told, server.classes)
            server.note(agreed=dict(zip(("n_classes", "alpha"), server.state.agreed, strict=True)))
        return self.agreed(server.state.agreed)

    @client_handler
    def skew(self, client: Client, message: Seek) -> Skew:
        """Tell n_i and the number of records."""
        counts = client.data.counts(client.classes)
        return Skew(sum(k < SCARCE * len(client.data) for k in counts), len(client.data))

    # Who serves whom

    def abundant(self, counts: Sequence[int]) -> list[int]:
        """The n classes with the most records, the most abundant first; ties by number, and no class without any."""
        return sorted((c for c, k in enumerate(counts) if k), key=lambda c: (-counts[c], c))[: self.n]

    def scarce(self, client: Client) -> list[int]:
        """What a client lacks (H_i), missing classes first, ties by number."""
        counts = client.data.counts(client.classes)
        rarest = sorted(range(client.classes), key=lambda c: (counts[c], c))
        return rarest[: self.n] if self.want == "rarest" else [c for c in rarest if counts[c] < self.quota]

    @client_handler
    def scarce_classes(self, client: Client, message: Seek) -> Scarce:
        """Tell H_i."""
        return Scarce(self.agreed(message.agreed).scarce(client))

    def matched(
        self, server: Server, seekers: Sequence[int], offers: Mapping[int, Sequence[int]]
    ) -> dict[int, list[int]]:
        """Ask what the seekers lack, and find who gives it (FedDPMS, supplement, algorithm 1).

        Args:
            server: What the algorithm sees.
            seekers: Clients that have received nothing yet.
            offers: What each client gives, such as classes.

        Returns:
            By seeker the clients that serve it, the best first; without those whom nobody can serve.
        """
        if not offers or not seekers:
            return {}
        replies: dict[int, Scarce] = server.call(seekers, self.scarce_classes, Seek(server.state.agreed))
        most = len(offers) if self.n_assistants == "cover" else self.n_assistants
        found = {i: match(i, reply.classes, offers, most) for i, reply in replies.items()}
        found = {i: assistants for i, assistants in found.items() if assistants}
        server.note(assistants={str(i): assistants for i, assistants in found.items()})
        return found
