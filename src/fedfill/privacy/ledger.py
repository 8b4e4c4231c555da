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


class _Spent:
    """What was given away about one record, for one adjacency."""

    __slots__ = ("bounded", "conditional", "conditional_bounded", "square")

    def __init__(
        self,
        square: float = 0.0,
        conditional: float = 0.0,
        bounded: bool = True,
        conditional_bounded: bool = True,
    ) -> None:
        self.square = square  # sum of mu squared
        self.conditional = conditional  # the same, with the noise alone where there is no mu
        self.bounded = bounded
        self.conditional_bounded = conditional_bounded

    def add(self, mu: float | None, conditional_mu: float | None) -> None:
        if mu is not None:
            self.square += mu * mu
            self.conditional += mu * mu
            return
        self.bounded = False
        if conditional_mu is None:
            self.conditional_bounded = False
        else:
            self.conditional += conditional_mu * conditional_mu


class _Booking:
    """What one client released in one field by one mechanism, over all rounds so far."""

    __slots__ = ("added", "replaced", "sampled", "times")

    def __init__(self) -> None:
        self.replaced = _Spent()  # where one record is replaced by another of the same class
        self.added = _Spent()  # where one is added or removed
        self.sampled: dict[tuple[float, float], int] = {}  # steps by noise multiplier and probability
        self.times = 0


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
        booking.replaced.add(release.mu, release.conditional_mu)
        booking.added.add(release.added_mu, release.conditional_added_mu)

    def state(self) -> Tree:
        """The ledger as a tree, for a checkpoint."""
        return {
            "entries": [
                {
                    "released": released,
                    "mechanism": mechanism,
                    "conditions": list(entry.conditions),
                    "clients": torch.tensor(list(entry.clients), dtype=torch.int64),
                    "times": torch.tensor([b.times for b in entry.clients.values()], dtype=torch.int64),
                    **_columns("", [b.replaced for b in entry.clients.values()]),
                    **_columns("added_", [b.added for b in entry.clients.values()]),
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
                clients = item["clients"].tolist()
                replaced = _spent("", item)
                # an older ledger has no figures for a record added or removed, and so no bound
                added = (
                    _spent("added_", item)
                    if "added_square" in item
                    else [_Spent(0.0, 0.0, False, False) for _ in clients]
                )
                triples = item.get("sampled", [()] * len(clients))
                rows = zip(clients, item["times"].tolist(), replaced, added, triples, strict=True)
                for client, times, one, other, sampled in rows:
                    booking = entry.clients[client] = _Booking()
                    booking.times, booking.replaced, booking.added = times, one, other
                    booking.sampled = {(noise, probability): steps for noise, probability, steps in sampled}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"this tree is no state of a ledger: {error}") from error
        return ledger

    def account(self, delta: float = 1e-5, told: Sequence[str] = ()) -> dict[str, Any]:
        """Everything released so far, in figures and in sentences.

        Args:
            delta: At which epsilon is told, between 0 and 1, both excluded.
            told: Sentences on what is known of the records beside what was sent; a guarantee speaks of none of it.

        Returns:
            A dict ready for JSON: ``entries``, those without a guarantee first, each with ``released, mechanism,
            epsilon`` (of the worst client; None: no guarantee), ``conditional_epsilon`` (what the noise alone would
            cost under the conditions, where there is no guarantee), the same with ``_added`` for a record that is
            added or removed, ``delta, clients`` (how many released it), ``times`` (the most that one client did) and
            ``conditions``; then ``total_epsilon`` and ``total_epsilon_added`` (None: no guarantee), ``delta, unit,
            adjacency, not_in_the_account`` (`told`; adjacency of the figures without ``_added``) and ``statement``, the paragraph for people.

        Raises:
            FedfillError: Where `delta` is out of range.
        """
        accountant.epsilon(0.0, delta)  # refuses a wrong delta, also of an empty ledger
        entries = [
            _summary(released, mechanism, entry, delta) for (released, mechanism), entry in self._entries.items()
        ]
        entries.sort(key=_without_guarantee_first)
        total, total_added = self._total("replaced", delta), self._total("added", delta)
        return {
            "entries": entries,
            "total_epsilon": total,
            "total_epsilon_added": total_added,
            "delta": delta,
            "unit": UNIT,
            "adjacency": ADJACENCY,
            "not_in_the_account": list(told),
            "statement": _statement(entries, self._independent(), (total, total_added), delta, told),
        }

    def _independent(self) -> set[tuple[str, str]]:
        """The entries with a mu of exactly 0, as opposed to an epsilon that is 0 because delta covers it."""
        return {
            key
            for key, entry in self._entries.items()
            if all(b.replaced.bounded and b.replaced.square == 0 and not b.sampled for b in entry.clients.values())
            and not any(b.added.square for b in entry.clients.values())
        }

    def _total(self, adjacency: str, delta: float) -> float | None:
        squares: dict[int, float] = {}
        sampled: dict[int, dict[tuple[float, float], int]] = {}
        for entry in self._entries.values():
            for client, booking in entry.clients.items():
                spent: _Spent = getattr(booking, adjacency)
                if not spent.bounded:
                    return None
                squares[client] = squares.get(client, 0.0) + spent.square
                if booking.sampled:
                    steps = sampled.setdefault(client, {})
                    for mechanism, times in booking.sampled.items():
                        steps[mechanism] = steps.get(mechanism, 0) + times
        return _worst(((square, sampled.get(client, {})) for client, square in squares.items()), adjacency, delta)


_COLUMNS = {
    "square": torch.float64,
    "conditional": torch.float64,
    "bounded": torch.bool,
    "conditional_bounded": torch.bool,
}


def _columns(prefix: str, spent: Sequence[_Spent]) -> dict[str, torch.Tensor]:
    return {
        prefix + name: torch.tensor([getattr(one, name) for one in spent], dtype=dtype)
        for name, dtype in _COLUMNS.items()
    }


def _spent(prefix: str, item: Any) -> list[_Spent]:
    return [_Spent(*row) for row in zip(*(item[prefix + name].tolist() for name in _COLUMNS), strict=True)]


def _triples(sampled: dict[tuple[float, float], int]) -> list[tuple[float, float, int]]:
    return [(noise, probability, steps) for (noise, probability), steps in sorted(sampled.items())]


_EPSILON = {"replaced": accountant.replaced_epsilon, "added": accountant.added_epsilon}


def _worst(spent: Iterable[tuple[float, dict[tuple[float, float], int]]], adjacency: str, delta: float) -> float | None:
    """The largest epsilon of sums of mu squared with sampled mechanisms; None where it is too large to be written down."""
    largest: dict[tuple[tuple[float, float, int], ...], float] = {}  # a larger square alone can only cost more
    for square, sampled in spent:
        triples = tuple(_triples(sampled))
        largest[triples] = max(square, largest.get(triples, 0.0))
    epsilon = _EPSILON[adjacency]
    value = max((epsilon(math.sqrt(s), t, delta) for t, s in largest.items()), default=0.0)
    return value if value < math.inf else None


def _figures(entry: _Entry, adjacency: str, delta: float) -> tuple[float | None, float | None]:
    """Epsilon of the worst client; where there is none, what the noise alone would cost."""
    spent: list[tuple[_Spent, dict[tuple[float, float], int]]]
    spent = [(getattr(booking, adjacency), booking.sampled) for booking in entry.clients.values()]
    if all(one.bounded for one, _ in spent):
        return _worst(((one.square, sampled) for one, sampled in spent), adjacency, delta), None
    if all(one.conditional_bounded for one, _ in spent):
        return None, _worst(((one.conditional, sampled) for one, sampled in spent), adjacency, delta)
    return None, None


def _summary(released: str, mechanism: str, entry: _Entry, delta: float) -> dict[str, Any]:
    epsilon, conditional = _figures(entry, "replaced", delta)
    epsilon_added, conditional_added = _figures(entry, "added", delta)
    return {
        "released": released,
        "mechanism": mechanism,
        "epsilon": epsilon,
        "conditional_epsilon": conditional,
        "epsilon_added": epsilon_added,
        "conditional_epsilon_added": conditional_added,
        "delta": delta,
        "clients": len(entry.clients),
        "times": max(booking.times for booking in entry.clients.values()),
        "conditions": list(entry.conditions),
    }


def _without_guarantee_first(item: dict[str, Any]) -> tuple[bool, float, str, str]:
    return item["epsilon"] is not None, -(item["epsilon"] or 0.0), item["released"], item["mechanism"]


def _statement(
    entries: Sequence[dict[str, Any]],
    independent: set[tuple[str, str]],
    totals: tuple[float | None, float | None],
    delta: float,
    told: Sequence[str],
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
            f"{_cost(item['conditional_epsilon'], item['conditional_epsilon_added'], at)}{_repeated(item)}{held}."
        )
    for item in protected:
        held = f", provided that these conditions hold: {'; '.join(item['conditions'])}" if item["conditions"] else ""
        text.append(
            f"{item['released']} ({item['mechanism']}) is protected with "
            f"{_cost(item['epsilon'], item['epsilon_added'], at)}{_repeated(item)}{held}."
        )
    if without and protected:
        text.append("What is protected in one part limits nothing that the parts without a guarantee give away.")
    both = [_has_both(item) for item in hypothetical + protected]
    if both:
        text.append(_meaning(any(both), all(both)))
    if nothing:
        listed = _listed([f"{item['released']} ({item['mechanism']})" for item in nothing])
        text.append(f"Independent of the client's own records: {listed}.")

    total, total_added = totals
    if total is None:
        text.append("In total: no differential-privacy guarantee.")
    elif protected:
        held = ", under the conditions above" if any(item["conditions"] for item in protected) else ""
        if total_added is None and any(both):
            at += " for one record replaced by another of the same class, no guarantee for one added or removed"
        text.append(f"In total: {_cost(total, total_added, at)}{held}.")
    elif nothing:
        text.append("In total: epsilon 0, as nothing that was sent depends on a client's own records.")
    else:
        text.append("In total: epsilon 0, as no client has sent anything.")
    if protected or total is not None:
        text += told
    return " ".join(text)


def _meaning(some: bool, all_: bool) -> str:
    """What the figures are about, where some or all of them are told for a record added or removed as well."""
    if not some:
        return (
            "These figures are for one record of one client, replaced by another of the same class, with class sizes "
            "taken as known, and against anyone who can't reproduce the noise from the seed of the run. If the class "
            "of the record may change too, a figure for class means grows, as two of them move (mu by up to 1.42 "
            "times), and class sizes need protection of their own."
        )
    text = (
        "These figures are for one record of one client, and against anyone who can't reproduce the noise from the seed "
        "of the run. For a replaced record class sizes are taken as known. If its class may change too, mu is twice that "
        "of a record added or removed at the most."
    )
    if all_:
        return text
    return f"{text} Where a part has one figure alone, it is for a replaced record whose class stays."


def _has_both(item: dict[str, Any]) -> bool:
    return item["conditional_epsilon_added" if item["epsilon"] is None else "epsilon_added"] is not None


def _cost(replaced: float, added: float | None, at: str) -> str:
    if added is None:
        return f"epsilon {_figure(replaced)} {at}"
    return (
        f"epsilon {_figure(added, '#')} for one record added or removed, {_figure(replaced, '#')} for one replaced by "
        f"another of the same class, {at}"
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _repeated(item: dict[str, Any]) -> str:
    return f" after {item['times']} releases by one client" if item["times"] > 1 else ""


def _figure(value: float, fixed: str = "") -> str:
    """Three digits, zeros at the end too where `fixed` is "#"; never a power of ten for what can be read without."""
    if 99.95 <= value < 1e6:
        return f"{value:.0f}"
    return f"{value:{fixed}.3g}"
