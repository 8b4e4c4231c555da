"""What crosses between a Flower server and its hosts.

A message is a RecordDict: one array with the tree's safetensors bytes, and a few words on whose, when and which
experiment's it is. Nothing is pickled, and everything that arrives is checked before it is used.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_type_hints

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedfill import tree
from fedfill.errors import FedfillError
from fedfill.privacy.masking import SumKey
from fedfill.privacy.releases import Release, public, unbounded
from fedfill.protocol.messages import Lost, Message
from fedfill.tree import Record, Tree, Weights

PROTOCOL = 2
PATIENCE = 3600.0
"""Seconds that a host has for one call where the experiment sets none."""
STYPE = "fedfill.safetensors"
STRUCTURE = 2**22
"""Bytes of a message's structure at the most: some twenty thousand tensors, or half a million numbers outside of tensors."""

DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
DTYPES |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
"""What tensors in a message may be."""

HELLO, EVALUATE, SUM_KEY = "query.hello", "query.evaluate", "query.sum_key"

APP_ERRORS = (1, 2)
"""Flower's codes for a host's program that can't be loaded or raises; the others are about nodes and the wire."""
GONE = {
    3: "the message, or the reply to it, is no longer there",
    4: "the reply is no longer there",
    5: "its node is gone, and a reply may lie with it",
}
"""Flower's codes behind which a reply may be that nobody has read, in words that also hold of one that came too late."""

UNREAD = (("a reply that could not be read", unbounded("it may have been seen on its way")),)
"""What is released by a reply of which nobody knows what it held."""


class Unread(Lost):
    """A reply that may have left its host, and been seen by others, without having been read here."""


class Mistaken(Lost):
    """A refusal of a message that was meant for another client, or another experiment's."""


@dataclass(frozen=True)
class Hello(Message):
    """Host to server: which client it is, and what it runs.

    Attributes:
        client: Its number.
        protocol: Of this module.
        digest: Of the experiment: program version, settings, classes, initial weights and code.
        own_test: Whether it has a test split of its own.
    """

    client: int
    protocol: int
    digest: str
    own_test: bool


@dataclass(frozen=True)
class Evaluate(Message):
    """Server to host: the global weights."""

    weights: Weights


@dataclass(frozen=True)
class AskKey(Message):
    """Server to host: the request for a key with which its part of one sum is hidden.

    Attributes:
        handler: That will be called.
        question: SHA-256 of the message that it will get.
    """

    handler: str
    question: str


@dataclass(frozen=True)
class GivenKey(Message):
    """Host to server: its key for one sum."""

    declared = MappingProxyType(
        {"key": public("a fresh key, and whether the answer will be one that was given before")}
    )
    key: SumKey


@dataclass(frozen=True)
class Hidden(Record):
    """Server to host: a message, and whose answers are summed with its own.

    Attributes:
        message: For the handler.
        circle: A key of each, in ascending order of clients.
    """

    message: Message
    circle: list[SumKey]


@dataclass(frozen=True)
class Answer(Record):
    """Host to server: what came of a handler.

    Attributes:
        reply: The answer, or None.
        error: One line in its place.
        releases: What the reply gives away, by field.
        fit_seconds: Seconds in local training.
        train_samples: Samples passed through local training.
        mistaken: Whether the error is that the message was for another client or experiment.
    """

    reply: Message | None = None
    error: str | None = None
    releases: tuple[tuple[str, Release], ...] = ()
    fit_seconds: float = 0.0
    train_samples: int = 0
    mistaken: bool = False


def pack(body: Array, **words: str | int) -> RecordDict:
    """A Flower message's content."""
    return RecordDict({"tree": ArrayRecord({"safetensors": body}), "words": ConfigRecord(dict(words))})


def encode(value: Tree) -> Array:
    """A tree as Flower carries it."""
    data = tree.to_bytes(value)
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)


def unpack(content: RecordDict, limit: int) -> tuple[Tree, dict[str, Any]]:
    """What `pack` packed, from anyone."""
    try:
        body, words = content.array_records["tree"]["safetensors"], dict(content.config_records["words"])
    except (KeyError, AttributeError, TypeError) as missing:
        raise ValueError(f"malformed message: it has no {missing}") from missing
    if not isinstance(body.data, bytes) or body.stype != STYPE:
        raise ValueError(f"malformed message: its array is of the kind '{body.stype}', not '{STYPE}'")
    if len(body.data) > limit:
        raise ValueError(f"oversized message: {len(body.data):,} bytes, and max-message-bytes is {limit:,}")
    try:
        value = tree.from_bytes(body.data, STRUCTURE)
    except Exception as broken:  # a record's own check may raise anything
        raise ValueError(f"malformed message: {broken}") from broken
    if tree.size(value) > limit:  # one tensor may stand in many places
        raise ValueError(f"oversized message: {tree.size(value):,} bytes unpacked, and max-message-bytes is {limit:,}")
    strange = {tensor.dtype for tensor in tree.tensors(value)} - DTYPES
    if strange:
        raise ValueError(f"malformed message: it holds tensors of the type {strange.pop()}")
    return value, words


def handlers_of(program: Any) -> dict[str, tuple[Any, Any]]:
    """The client handlers of an algorithm: by name, the kinds of message that they take and of reply that they give."""
    found = {}
    for name in dir(type(program)):
        function = inspect.getattr_static(type(program), name)
        if getattr(function, "is_client_handler", False):
            try:
                hints = get_type_hints(function)
            except NameError as unknown:
                raise FedfillError(
                    f"algorithm: the handler '{name}' names a message that can't be found ({unknown}); "
                    "allowed with engine=flower: messages on the top level of a module"
                ) from unknown
            message = [hint for argument, hint in hints.items() if argument not in ("client", "return")]
            found[name] = (message[0] if message else Any, hints.get("return", Any))
    return found


def first_line(text: str | None) -> str:
    """The first line of a text from elsewhere, of a length that a record bears."""
    lines = (text or "").strip().splitlines()
    return "".join(c for c in lines[0] if c.isprintable())[:300] if lines else ""
