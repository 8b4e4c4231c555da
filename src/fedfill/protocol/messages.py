"""Exchanges: messages, what comes of sending one, and means and sums over the replies, the same on every engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast, get_args, get_type_hints

import torch

from fedfill import tree
from fedfill.errors import ContractError, FedfillError
from fedfill.privacy.releases import Declared, Release, unbounded
from fedfill.training.aggregation import Mean, Part, Sum, combined, group_of
from fedfill.tree import Weights

UNDECLARED = unbounded("sent as it is")
HEAVIEST = 2**53
"""The largest weight of a reply, and the largest count from elsewhere: beyond it floats skip whole numbers."""
NOT_FINITE = "the reply holds a NaN or an infinity"


class Message(Declared):
    """Base of the messages: subclass it as a frozen dataclass whose fields are everything that crosses."""


class Lost(Exception):
    """In place of a reply: the client or its worker died, was late, or sent what makes no sense; the text says which."""


class RemoteError(Exception):
    """What a handler raised in another process; its traceback there is a note of this exception."""


@dataclass(frozen=True)
class Outcome:
    """What came of one call to one client.

    Attributes:
        reply: The answer, or None where there is none; without the fields that were averaged already.
        error: The exception in place of an answer; beside one where the answer can't be used.
        releases: What the reply gives away, by field.
        size: Bytes of the whole reply.
        fit_seconds: Seconds in local training.
        train_samples: Samples passed through local training.
    """

    reply: Message | None = None
    error: BaseException | None = None
    releases: tuple[tuple[str, Release], ...] = ()
    size: int = 0
    fit_seconds: float = 0.0
    train_samples: int = 0


@dataclass(frozen=True)
class Average:
    """Which fields of the replies the server needs only the weighted mean of, or only the sum.

    Attributes:
        shapes: By field, the type and shape of every tensor that it has to hold.
        by: By field, the field with a reply's weight; where there is none, all weigh the same.
        numbers: Further fields that have to hold a number of at least 0.
        total: Whether it is the sum, of whole numbers (int64 in `shapes`) or of others (float64), either of any width.
        least: Of how many replies at the least a sum may be known that the server gets no single part of; 0: it may see them.
        counts: Names of the tensors of a sum that count something, so that none of their numbers is below 0.
    """

    shapes: Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]
    by: Mapping[str, str]
    numbers: tuple[str, ...] = ()
    total: bool = False
    least: int = 0
    counts: tuple[str, ...] = ()

    def take(self, reply: Message) -> tuple[Message, dict[str, Part]]:
        """Part a reply into what is averaged, or summed, and what is not.

        Args:
            reply: A whole reply.

        Returns:
            The reply with None in these fields, and these as means or sums; a field that was None already has none.

        Raises:
            ValueError: Where a field doesn't hold the tensors or the number that it should, or the weight is none.
        """
        means: dict[str, Part] = {}
        for name in self.numbers:
            number = getattr(reply, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not number >= 0:
                raise ValueError(
                    f"'{name}' of the reply is {str(number)[:20]}, and a number of at least 0 was asked for"
                )
        for name, shapes in self.shapes.items():
            by = self.by.get(name)
            weight = 1.0 if by is None else getattr(reply, by)
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= HEAVIEST:
                raise ValueError(f"'{by}' of the reply is {str(weight)[:20]}, and a weight is a number from 0 to 2^53")
            tensors = getattr(reply, name)
            if tensors is None:
                continue
            found = shapes_of(tensors)
            if self.total:
                found = {key: (_WIDE.get(dtype, dtype), shape) for key, (dtype, shape) in found.items()}
            if found != shapes:
                raise ValueError(f"'{name}' of the reply has other names, types or shapes than were asked for")
            if not self.total:
                means[name] = Mean(tensors, float(weight), float(weight))
                continue
            whole = [x for x in tensors.values() if x.numel() and not x.is_floating_point()]
            # the least number of 64 bits has no absolute value
            if any(int(x.max()) > HEAVIEST or int(x.min()) < -HEAVIEST for x in whole):
                raise ValueError(f"'{name}' of the reply holds a whole number beyond 2^53")
            if any(bool((x < 0).any()) for key, x in tensors.items() if key in self.counts):
                raise ValueError(f"'{name}' of the reply holds a count below 0")
            means[name] = Sum(tensors)
        return self.rest(reply), means

    def rest(self, reply: Message) -> Message:
        """The reply with None in the averaged or summed fields."""
        return cast("Message", replace(cast("Any", reply), **dict.fromkeys(self.shapes)))


_WIDE = {torch.int32: torch.int64, torch.float32: torch.float64}
"""Narrower numbers that may stand in a reply where a sum's are asked for."""


def shapes_of(tensors: Weights) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of every tensor, by name."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def are_classes(found: Sequence[int], classes: int) -> bool:
    """Whether a reply names classes of the task, 0 to `classes` - 1, and none of them twice."""
    return len({*found}) == len(found) and all(0 <= c < classes for c in found)


class Averaging:
    """Takes the mean or the sum over replies in client order: within the clients' groups first, then over the groups.

    Args:
        average: What to take the mean of; None for a call without one.
        clients: Clients of the federation.
    """

    def __init__(self, average: Average | None, clients: int) -> None:
        self._average = average
        self._clients = clients
        self.groups: dict[int, dict[str, Part]] = {}

    def add(self, client: int, outcome: Outcome) -> Outcome:
        """Check a reply and add it to its group's mean; clients of one group come in ascending order.

        Args:
            client: Whose reply it is.
            outcome: With the whole reply.

        Returns:
            The outcome to pass on: without what was averaged, or with an error where the reply can't be used.
        """
        if outcome.reply is None or outcome.error is not None:
            return outcome
        reply = outcome.reply
        means: dict[str, Part] = {}
        error: Lost | None = None
        try:
            if self._average is not None:
                reply, means = self._average.take(reply)
            if not tree.is_finite((reply, [mean.tensors for mean in means.values()])):
                raise ValueError(NOT_FINITE)
        except ValueError as broken:
            error, means = Lost(str(broken)), {}
            if self._average is not None:
                reply = self._average.rest(reply)
        group = self.groups.setdefault(group_of(client, self._clients), {})
        for name, mean in means.items():
            group[name] = combined([group[name], mean]) if name in group else mean  # type: ignore[assignment]
        changed = error is not None or reply is not outcome.reply
        return replace(outcome, reply=reply, error=error) if changed else outcome

    def total(self) -> dict[str, Part]:
        """The mean or sum over all groups, by field; a field that no reply held is missing."""
        ordered = [self.groups[group] for group in sorted(self.groups)]
        names = {name: None for group in ordered for name in group}
        return {name: combined(group[name] for group in ordered if name in group) for name in names}  # type: ignore[misc]


@dataclass(frozen=True)
class Answers:
    """What came of one call.

    Attributes:
        outcomes: For every client that had a message, in no particular order.
        means: Means or sums by field, where the engine took them already; None: the server takes them from the replies.
    """

    outcomes: Mapping[int, Outcome]
    means: Mapping[str, Part] | None = None


def specified(of: Mapping[str, Weights], by: str | Mapping[str, str] | None, numbers: Sequence[str] = ()) -> Average:
    """What to average, from the words of ``server.average``.

    Args:
        of: By field, tensors with the names, types and shapes that every reply's must have.
        by: The field with a reply's weight, for all or for each; None: all weigh the same.
        numbers: Further fields that have to hold a number of at least 0.

    Returns:
        The same, by type and shape.
    """
    weighed = dict.fromkeys(of, by) if isinstance(by, str) else by or {}
    return Average({name: shapes_of(tensors) for name, tensors in of.items()}, weighed, tuple(numbers))


def tensors_of(means: Mapping[str, Part], spec: Average, handler: str) -> dict[str, Weights]:
    """The tensors of means, or sums, over the replies of a call.

    Args:
        means: By field.
        spec: What was averaged.
        handler: What was called.

    Returns:
        Tensors by field.

    Raises:
        FedfillError: Where no reply weighs anything.
    """
    for name, mean in means.items():
        if isinstance(mean, Mean) and not mean.weight > 0:
            raise FedfillError(
                f"engine: every reply to '{handler}' weighs nothing in '{spec.by[name]}', so there is no mean"
            )
    return {name: (part if isinstance(part, Mean) else part.begun()).tensors for name, part in means.items()}


def reason(error: BaseException) -> str:
    """Why there is no good reply, for the record."""
    return str(error) if isinstance(error, Lost | RemoteError) else f"{type(error).__name__}: {error}"


def releases_of(reply: Message, declared: Mapping[str, Release]) -> Iterator[tuple[str, Release]]:
    """What a reply gives away, field by field.

    Args:
        reply: The whole reply.
        declared: What the handler declared for this reply, by field, or by ``field.field`` within a `Declared` part; it comes before
            what the classes declare.

    Yields:
        ``Kind.field`` and its release; a field that is empty and not declared by the handler gives nothing away.

    Raises:
        ContractError: Where something is declared that is no field.
    """
    kind, given = type(reply).__name__, dict(declared)
    yield from ((f"{kind}.{path}", release) for path, release in _releases(reply, "", given))
    if given:
        raise ContractError(f"a release is declared for '{min(given)}', which is no field of {kind}")


def _releases(part: Declared, prefix: str, given: dict[str, Release]) -> Iterator[tuple[str, Release]]:
    for item in fields(part):  # type: ignore[arg-type]
        path, value = prefix + item.name, getattr(part, item.name)
        if path in given:
            yield path, given.pop(path)
        elif isinstance(value, Declared):
            yield from _releases(value, f"{path}.", given)
        elif value is None:
            # what was declared of a part that is not there: that there is none tells as much
            for inner in [name for name in given if name.startswith(f"{path}.")]:
                yield inner, given.pop(inner)
        else:
            yield path, part.declared.get(item.name) or UNDECLARED


def declarations(kind: type[Declared], prefix: str = "") -> Iterator[tuple[str, Release | None]]:
    """What the fields of a reply release by its class, those of its parts included.

    Args:
        kind: A message, or a part of one.
        prefix: Of the fields' names.

    Yields:
        ``field``, or ``field.field`` within a part, and its release; None where the handler decides.
    """
    hints = get_type_hints(kind)
    for item in fields(kind):  # type: ignore[arg-type]
        hint = hints[item.name]
        inner = [part for part in (hint, *get_args(hint)) if isinstance(part, type) and issubclass(part, Declared)]
        if inner:
            yield from declarations(inner[0], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, kind.declared.get(item.name)
