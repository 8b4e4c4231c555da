"""A host's side of a sum whose parts nobody may see: a key of its own for each sum, used once, and the mask that follows."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedfill import tree
from fedfill.privacy.masking import Occasion, Parties, SumKey, checked, make_key, mask, masked
from fedfill.protocol.messages import Message
from fedfill.protocol.sums import Sums
from fedfill.runs.directory import write_atomically
from fedfill.tree import Record, Tree

NO_KEYS = (
    "peers: found none at this host, and trust=secure hides its sums with keys of its own and of all others; allowed: "
    'key="node.key" peers="FOLDER" in --node-config, a folder with node0.pub, node1.pub and so on'
)


@dataclass(frozen=True)
class Pending(Record):
    """A key for a sum that was not used yet, on its host's disk.

    Attributes:
        occasion: What it is for.
        key: What the server was told.
        secret: Its secret part, in hexadecimal digits.
    """

    occasion: Occasion
    key: SumKey
    secret: str


def state_name(noise_key: bytes | None, occasion: Occasion, made_of: Tree) -> str:
    """A keyed hash of all that an answer is made of, which tells nobody without the key what that is.

    Args:
        noise_key: From which the host's noise comes; None: from the seed, and then the name is the same for all.
        occasion: What is asked.
        made_of: Data and state.

    Returns:
        64 hexadecimal digits, or ``seed``.
    """
    if noise_key is None:
        return "seed"
    what = hashlib.sha256(repr(occasion).encode() + tree.to_bytes(made_of)).digest()
    return hmac.digest(noise_key, b"state of a sum" + what, "sha256").hex()


def promise(path: Path, occasion: Occasion, client: int, parties: Parties, state: str) -> SumKey:
    """A fresh key for one sum; the one before it, if it was not used, is forgotten.

    Args:
        path: Where its secret part lies until it is used.
        occasion: What it is for.
        client: Whose.
        parties: Keys.
        state: As in `SumKey`.

    Returns:
        What the server is told.
    """
    key, secret = make_key(occasion, client, state, parties.own)
    write_atomically(path, tree.to_bytes(Pending(occasion, key, secret.hex())), mode=0o600)
    return key


def redeemed(path: Path, occasion: Occasion, circle: Sequence[SumKey], parties: Parties) -> Pending:
    """The key that was made for this sum, which is gone from the disk from now on, and a circle that holds it.

    Args:
        path: As in `promise`.
        occasion: What is asked now.
        circle: Who takes part, as the server says.
        parties: Keys.

    Returns:
        The key.

    Raises:
        ValueError: Where there is none, it was made for something else, or the circle is not what it says.
    """
    try:
        pending = tree.from_bytes(path.read_bytes())
    except FileNotFoundError:
        raise ValueError("there is no key for this sum, or it was used before") from None
    finally:
        path.unlink(
            missing_ok=True
        )  # used once, whatever comes of it: two parts under one mask would show their difference
    tree.validated(pending, Pending)
    assert isinstance(pending, Pending)
    if pending.occasion != occasion:
        raise ValueError("the key for a sum was made for another one")
    checked(circle, pending.key, occasion, parties.all)
    return pending


def hidden(reply: Message, pending: Pending, circle: Sequence[SumKey]) -> Message:
    """A reply under its mask.

    Args:
        reply: Of the handler.
        pending: The key.
        circle: Who takes part.

    Returns:
        The reply to send.

    Raises:
        ValueError: Where it is more than sums of whole numbers.
    """
    if type(reply) is not Sums:
        raise ValueError(
            f"trust=secure hides sums alone, and this handler answers with a {type(reply).__name__}; nothing is sent"
        )
    numbers = sum(x.numel() for x in reply.sums.values())
    own = mask(bytes.fromhex(pending.secret), pending.key.client, circle, pending.occasion, numbers)
    return replace(reply, sums=masked(reply.sums, own))


def question_of(message: Message) -> str:
    """SHA-256 of a message, as server and hosts take it."""
    return hashlib.sha256(tree.to_bytes(message)).hexdigest()
