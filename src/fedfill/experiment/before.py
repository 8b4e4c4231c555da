"""What records may have told before a run began: synthetic samples, and another run's weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedfill.data import synthetic
from fedfill.errors import FedfillError


def came_before(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Sentences on what a run was given that may have been made of records, perhaps of the same ones.

    Args:
        document: The experiment's settings: ``data``, ``data_dir``, ``extra`` and ``start_from`` count.

    Returns:
        One sentence each, for an account of privacy; none where the run had its clients' records alone.
    """
    told, folder = [], document.get("data_dir")
    if synthetic.is_file(name := str(document["data"])):
        told.append(f"The run itself trained on synthetic samples{_who(name, folder)}, whose account comes on top.")
    if document.get("start_from") is not None:
        told.append("The run began with another one's weights, whose account comes on top.")
    if (extra := document.get("extra")) is not None:
        told.append(
            f"The run's clients had the samples of a file{_who(str(extra), folder)} beside their own, whose account comes on top."
        )
    return tuple(told)


def _who(name: str, folder: str | Path | None) -> str:
    with suppress(FedfillError):  # the file may have gone since
        return f" ({synthetic.read(synthetic.locate(name, folder)).origin.words})"
    return ""
