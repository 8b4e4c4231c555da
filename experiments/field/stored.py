"""Figures of runs that are stored beside this page, and the place of what is made of them in the page."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedfill.runs.directory import write_atomically
from fedfill.runs.shown import csv_text

FOLDER = Path(__file__).parent
BASELINE = "fedavg"
END = "<!-- end of figures -->"


def read(file: Path) -> list[dict[str, str]]:
    """Stored figures."""
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def summary_of(file: Path) -> dict[str, Any]:
    """A finished run's ``summary.json``."""
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
        return found
    except ValueError as error:
        raise SystemExit(f"{file}: not the summary of a finished run ({error})") from None


def store(
    file: Path,
    columns: Sequence[str],
    key: Sequence[str],
    found: Iterable[dict[str, str]],
    place: Callable[[dict[str, str]], Any],
) -> None:
    """Put figures of runs into a file, in one step.

    Args:
        file: Where they are stored.
        columns: Of the file.
        key: Columns that name a run. What was stored under the same names is replaced; all other lines stay.
        found: Lines of runs.
        place: By which the file is sorted.
    """
    lines = {tuple(line[name] for name in key): line for line in (*(read(file) if file.exists() else []), *found)}
    rows = ([line[name] for name in columns] for line in sorted(lines.values(), key=place))
    write_atomically(file, csv_text(columns, rows).encode())


def between(script: str, text: str) -> None:
    """Put what a script has to show into the page, between its two comments."""
    page = FOLDER / "README.md"
    before, begin, rest = page.read_text().partition(f"<!-- figures: written by {script} -->")
    if not begin:
        raise SystemExit(f"{page}: no place for the figures of {script}")
    _, end, after = rest.partition(END)
    write_atomically(page, (before + begin + "\n" + text + "\n" + end + after).encode())


def amount(values: Iterable[float]) -> str:
    """A mean of megabytes, say: whole, below 10 with one decimal, and 0 where it is nothing at all."""
    mean = fmean(values)
    return f"{mean:.1f}" if 0 < mean < 9.95 else f"{mean:.0f}"


def spread(values: list[float], signed: bool = False) -> str:
    """Mean and standard deviation, in percent or points."""
    if not values:
        return "–"
    mean = f"{fmean(values):+.1f}" if signed else f"{fmean(values):.1f}"
    return mean if len(values) < 2 else f"{mean} ± {stdev(values):.1f}"
