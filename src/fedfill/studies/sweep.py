"""Sweeps: settings of which the clients' validation splits choose one, never the test set."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence

from fedfill.errors import FedfillError
from fedfill.experiment.summary import Result
from fedfill.studies.comparison import Sweep

_ALTERNATIVES = re.compile(r"=([^=,|]*(?:\|[^=,|]*)+)")
"""A value with alternatives: ``=0.001|0.01``."""


def candidates(asked: str) -> list[str]:
    """All settings that a label asks for.

    Args:
        asked: Such as ``"fedprox:mu=0.001|0.01,local_epochs=1|2"``.

    Returns:
        Every combination, the last setting moving first: ``["fedprox:mu=0.001,local_epochs=1", ...]``; the label itself
        where it has no alternatives.

    Raises:
        FedfillError: Where an alternative is empty or given twice.
    """
    parts = _ALTERNATIVES.split(asked)  # text and alternatives in turn
    choices = [part.split("|") for part in parts[1::2]]
    for values in choices:
        stripped = [value.strip() for value in values]
        if not all(stripped) or len(set(stripped)) < len(stripped):
            raise FedfillError(f"compare: found '{asked}'; allowed: alternatives that differ, such as mu=0.001|0.01")
    texts = parts[0::2]
    return [
        texts[0] + "".join(f"={value.strip()}{text}" for value, text in zip(values, texts[1:], strict=True))
        for values in itertools.product(*choices)
    ]


def validated(results: Sequence[Result | None]) -> float | None:
    """How good a candidate is on the validation splits: the mean over seeds, each in its best round by these; None where one diverged."""
    if any(result is None for result in results):
        return None
    return statistics.fmean(result.summary["selected_validation"] for result in results if result is not None)


def sentence(sweep: Sweep) -> str:
    """What was chosen among what, in words."""
    words = ", ".join(
        f"{label.partition(':')[2]} {'diverged' if value is None else f'{100 * value:.2f}'}"
        for label, value in sweep.validation.items()
    )
    return f"{sweep.chosen} was chosen among {len(sweep.validation)} by the clients' validation splits ({words}); the others' test figures were not looked at"
