"""Flower's SuperNode as a rehearsal starts it: the same program, which looks for messages more often.

As Flower ships it, a SuperNode without a message sleeps for three seconds. On hosts of their own, whose rounds take minutes, that
is right; a rehearsal would spend most of its time on it.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode

LOOK = 0.3
"""Seconds from one look for messages to the next, at the most."""


def look_often() -> None:
    """Shorten the pauses of Flower's loop; those of its other parts stay."""
    start_client_internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, LOOK)))  # type: ignore[assignment, attr-defined]


if __name__ == "__main__":
    look_often()
    flower_supernode()
