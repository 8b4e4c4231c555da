"""The one error that users meet, and the help with slips of the pen."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedfillError(Exception):
    """A slip or a circumstance that the user can mend: one sentence, printed without a traceback."""


class ContractError(Exception):
    """A mistake of the algorithm's author, such as changing a received message: it ends the run with a traceback."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The tail of an error sentence: the nearest right spelling where there is one, else all that is allowed.

    Args:
        word: What was found.
        known: What is allowed.

    Returns:
        For example ``"did you mean 'fedavg'?"`` or ``"allowed: fedavg, feddpms"``.
    """
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean '{near[0]}'?" if near else f"allowed: {', '.join(names)}"
