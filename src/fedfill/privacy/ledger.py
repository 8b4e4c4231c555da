"""The ledger of releases: what clients sent, what of it is protected and by how much, in figures and in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fedfill.privacy import accountant
from fedfill.privacy.releases import Release
from fedfill.tree import Tree

UNIT = "one record of one client"
ADJACENCY = "replace one record by another of the same class; class sizes are taken as known"


class _Booking:
    """What one client released in one field by one mechanism, over all rounds so far."""

    __slots__ = ("bounded", "conditional", "conditional_bounded", "sampled", "square", "times")

    def __init__(
        self,
        square: float = 0.0,
        conditional: float = 0.0,
        bounded: bool = True,
        conditional_bounded: bool = True,
        times: int = 0,
    ) -> None:
        self.square = square  # sum of mu squared
        self.conditional = conditional  # the same, with the noise alone where there is no mu
        self.bounded = bounded
        self.conditional_bounded = conditional_bounded
        self.times = times
        self.sampled: dict[tuple[float, float], int] = {}  # steps by noise multiplier and probability


class _Entry:
    """The bookings of all clients for one field and one mechanism."""

    __slots__ = ("clients", "conditions", "latest")

    def __init__(self) -> None:
        self.clients: dict[int, _Booking] = {}
        self.conditions: dict[str, None] = {}  # a set that keeps its order
        self.latest: tuple[str, ...] = ()


class Ledger:
    """All releases of all clients, booked as running sums, so that it stays small however long a run is.

    All that a client releases is about the same records, so its mu squared adds up over fields and rounds. Clients hold
    different records, so the worst client counts. Not safe for use by several threads at once.
    """

    def __init__(self) -> None:
        """An empty ledger."""
        self._entries: dict[tuple[str, str], _Entry] = {}

    def add(self, client: int, released: str, release: Release) -> None:
        """Book one field of one reply.

        Args:
            client: Who sent it.
            released: Which field it is, such as "SecondaryReply.codes".
            release: What it gives away.
        """
        entry = self._entries.get((released, release.mechanism))
        if entry is None:
            entry = self._entries[released, release.mechanism] = _Entry()
        if release.conditions != entry.latest:
            entry.latest = release.conditions
            entry.conditions.update(dict.fromkeys(release.conditions))
        booking = entry.clients.get(client)
        if booking is None:
            booking = entry.clients[client] = _Booking()
        booking.times += 1
        if release.sampled is not None:
            noise, probability, steps = release.sampled
            booking.sampled[noise, probability] = booking.sampled.get((noise, probability), 0) + steps
        mu = release.mu
        if mu is not None:
            booking.square += mu * mu
            booking.conditional += mu * mu
            return
        booking.bounded = False
        mu = release.conditional_mu
        if mu is None:
            booking.conditional_bounded = False
        else:
            booking.conditional += mu * mu

    def state(self) -> Tree:
        """The ledger as a tree, for a checkpoint."""
        return {
            "entries": [
                {
                    "released": released,
                    "mechanism": mechanism,
                    "conditions": list(entry.conditions),
                    "clients": torch.tensor(list(entry.clients), dtype=torch.int64),
                    "times": _column(entry, "times", torch.int64),
                    "square": _column(entry, "square", torch.float64),
                    "conditional": _column(entry, "conditional", torch.float64),
                    "bounded": _column(entry, "bounded", torch.bool),
                    "conditional_bounded": _column(entry, "conditional_bounded", torch.bool),
                    "sampled": [_triples(booking.sampled) for booking in entry.clients.values()],
                }
                for (released, mechanism), entry in self._entries.items()
            ]
        }

    @classmethod
    def restore(cls, tree: Tree) -> Ledger:
        """The ledger that `state` described.

        Args:
            tree: What `state` returned.

        Returns:
            A ledger with the same account, to be continued.

        Raises:
            ValueError: Where the tree is no state of a ledger.
        """
        ledger = cls()
        try:
            for item in tree["entries"]:
                entry = ledger._entries[item["released"], item["mechanism"]] = _Entry()
                entry.conditions = dict.fromkeys(item["conditions"])
                columns = ("square", "conditional", "bounded", "conditional_bounded", "times")
                bookings = zip(*(item[name].tolist() for name in columns), strict=True)
                triples = item.get("sampled", [()] * len(item["clients"]))
                for client, values, sampled in zip(item["clients"].tolist(), bookings, triples, strict=True):
                    booking = entry.clients[client] = _Booking(*values)
                    booking.sampled = {(noise, probability): steps for noise, probability, steps in sampled}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"this tree is no state of a ledger: {error}") from error
        return ledger

    def account(self, delta: float = 1e-5) -> dict[str, Any]:
        """Everything released so far, in figures and in sentences.

        Args:
            delta: At which epsilon is told, between 0 and 1, both excluded.

        Returns:
            A dict ready for JSON: ``entries``, those without a guarantee first, each with ``released, mechanism,
            epsilon`` (of the worst client; None: no guarantee), ``conditional_epsilon`` (what the noise alone would
            cost under the conditions, where there is no guarantee), ``delta, clients`` (how many released it),
            ``times`` (the most that one client did) and ``conditions``; then ``total_epsilon`` (None: no guarantee),
            ``delta, unit, adjacency`` and ``statement``, the paragraph for people.

        Raises:
            FedfillError: Where `delta` is out of range.
        """
        accountant.epsilon(0.0, delta)  # refuses a wrong delta, also of an empty ledger
        entries = [
            _summary(released, mechanism, entry, delta) for (released, mechanism), entry in self._entries.items()
        ]
        entries.sort(key=_without_guarantee_first)
        total = self._total(delta)
        return {
            "entries": entries,
            "total_epsilon": total,
            "delta": delta,
            "unit": UNIT,
            "adjacency": ADJACENCY,
            "statement": _statement(entries, self._independent(), total, delta),
        }

    def _independent(self) -> set[tuple[str, str]]:
        """The entries with a mu of exactly 0, as opposed to an epsilon that is 0 because delta covers it."""
        return {
            key
            for key, entry in self._entries.items()
            if all(b.bounded and b.square == 0 and not b.sampled for b in entry.clients.values())
        }

    def _total(self, delta: float) -> float | None:
        squares: dict[int, float] = {}
        sampled: dict[int, dict[tuple[float, float], int]] = {}
        for entry in self._entries.values():
            for client, booking in entry.clients.items():
                if not booking.bounded:
                    return None
                squares[client] = squares.get(client, 0.0) + booking.square
                if booking.sampled:
                    steps = sampled.setdefault(client, {})
                    for mechanism, times in booking.sampled.items():
                        steps[mechanism] = steps.get(mechanism, 0) + times
        return _worst(((square, sampled.get(client, {})) for client, square in squares.items()), delta)


def _column(entry: _Entry, name: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([getattr(booking, name) for booking in entry.clients.values()], dtype=dtype)


def _triples(sampled: dict[tuple[float, float], int]) -> list[tuple[float, float, int]]:
    return [(noise, probability, steps) for (noise, probability), steps in sorted(sampled.items())]


def _worst(spent: Iterable[tuple[float, dict[tuple[float, float], int]]], delta: float) -> float | None:
    """The largest epsilon of sums of mu squared with sampled mechanisms; None where it is too large to be written down."""
    largest: dict[tuple[tuple[float, float, int], ...], float] = {}  # a larger square alone can only cost more
    for square, sampled in spent:
        triples = tuple(_triples(sampled))
        largest[triples] = max(square, largest.get(triples, 0.0))
    value = max((accountant.replaced_epsilon(math.sqrt(s), t, delta) for t, s in largest.items()), default=0.0)
    return value if value < math.inf else None


def _summary(released: str, mechanism: str, entry: _Entry, delta: float) -> dict[str, Any]:
    bookings = entry.clients.values()
    value = conditional = None
    if all(booking.bounded for booking in bookings):
        value = _worst(((booking.square, booking.sampled) for booking in bookings), delta)
    elif all(booking.conditional_bounded for booking in bookings):
        conditional = _worst(((booking.conditional, booking.sampled) for booking in bookings), delta)
    return {
        "released": released,
        "mechanism": mechanism,
        "epsilon": value,
        "conditional_epsilon": conditional,
        "delta": delta,
        "clients": len(entry.clients),
        "times": max(booking.times for booking in bookings),
        "conditions": list(entry.conditions),
    }


def _without_guarantee_first(item: dict[str, Any]) -> tuple[bool, float, str, str]:
    return item["epsilon"] is not None, -(item["epsilon"] or 0.0), item["released"], item["mechanism"]


def _statement(
    entries: Sequence[dict[str, Any]], independent: set[tuple[str, str]], total: float | None, delta: float
) -> str:
    """The account in a few plain sentences."""
    at = f"at delta {delta:g}"
    without = [item for item in entries if item["epsilon"] is None]
    hypothetical = [item for item in without if item["conditional_epsilon"] is not None]
    protected = [
        item
        for item in entries
        if item["epsilon"] is not None and (item["released"], item["mechanism"]) not in independent
    ]
    nothing = [item for item in entries if (item["released"], item["mechanism"]) in independent]

    text = ["The server sees everything that the clients send, and other clients see what it passes on."]
    if without:
        names = list(dict.fromkeys(item["released"] for item in without))
        text.append(
            f"No guarantee covers {_listed(names)}: whoever sees {'it' if len(names) == 1 else 'them'} may learn about "
            "any single record of the client."
        )
    for item in hypothetical:
        held = f", if these conditions held: {'; '.join(item['conditions'])}" if item["conditions"] else ""
        text.append(
            f"Judged by its noise alone, {item['released']} ({item['mechanism']}) would cost "
            f"epsilon {_figure(item['conditional_epsilon'])} {at}{_repeated(item)}{held}."
        )
    for item in protected:
        held = f", provided that these conditions hold: {'; '.join(item['conditions'])}" if item["conditions"] else ""
        text.append(
            f"{item['released']} ({item['mechanism']}) is protected with "
            f"epsilon {_figure(item['epsilon'])} {at}{_repeated(item)}{held}."
        )
    if without and protected:
        text.append("What is protected in one part limits nothing that the parts without a guarantee give away.")
    if hypothetical or protected:
        text.append(
            "These figures are for one record of one client, replaced by another of the same class, with class sizes "
            "taken as known, and against anyone who can't reproduce the noise from the seed of the run. If the class "
            "of the record may change too, a figure for class means grows, as two of them move (mu by up to 1.42 "
            "times), and class sizes need protection of their own."
        )
    if nothing:
        listed = _listed([f"{item['released']} ({item['mechanism']})" for item in nothing])
        text.append(f"Independent of the client's own records: {listed}.")

    if total is None:
        text.append("In total: no differential-privacy guarantee.")
    elif protected:
        held = ", under the conditions above" if any(item["conditions"] for item in protected) else ""
        text.append(f"In total: epsilon {_figure(total)} {at}{held}.")
    elif nothing:
        text.append("In total: epsilon 0, as nothing that was sent depends on a client's own records.")
    else:
        text.append("In total: epsilon 0, as no client has sent anything.")
    return " ".join(text)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _repeated(item: dict[str, Any]) -> str:
    return f" after {item['times']} releases by one client" if item["times"] > 1 else ""


def _figure(value: float) -> str:
    """Three digits, and never a power of ten for what can be read without."""
    return f"{value:.3g}" if value < 100 or value >= 1e6 else f"{value:.0f}"
