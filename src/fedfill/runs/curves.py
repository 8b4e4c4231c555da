"""Survival curves of a run: as a table, and as a picture with bands and those at risk beneath."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedfill.errors import FedfillError
from fedfill.runs.directory import write_atomically
from fedfill.runs.shown import csv_text

COLUMNS = ("curve", "time", "at_risk", "events", "survival", "se", "low", "high")
"""Of the table."""
MOST = 12
"""Curves in one picture; the table has all."""


@dataclass(frozen=True)
class StepCurve:
    """A share of survivors at increasing times, 1 before the first; each list has a number for each time, or nothing at all.

    Attributes:
        label: What it is called.
        times: Above 0.
        survival: From 1 downwards.
        se: Standard errors.
        low: Lower limits.
        high: Upper limits.
        at_risk: Just before each time.
        events: At each time.
        model: Whether it is what a model says, drawn without a band beside what was seen.
        rows: At risk at time 0; None: nobody tells.
    """

    label: str
    times: Sequence[float]
    survival: Sequence[float]
    se: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    at_risk: Sequence[float] = ()
    events: Sequence[float] = ()
    model: bool = False
    rows: float | None = None


@dataclass(frozen=True)
class FoundTable:
    """A table for people of what a run has found: on the terminal and in a report, and in ``summary.json``.

    Attributes:
        title: What it shows.
        header: Names of the columns; the first one has the rows' names.
        rows: Their cells.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def document(self) -> dict[str, Any]:
        """As ``summary.json`` has it."""
        return {"title": self.title, "header": list(self.header), "rows": [list(row) for row in self.rows]}


@dataclass(frozen=True)
class Findings:
    """What a finished run has found beside a model.

    Attributes:
        figures: Plain values for ``summary.json``.
        curves: Survival curves.
        level: Of confidence of their bands.
        schema: As TOML text: the table's, with what was found of its columns; "": none.
        tells: What the model tells of a row: all that such models do, no more than which of two comes first, or nothing.
        tables: The figures that a reader wants to see.
    """

    figures: Mapping[str, Any]
    curves: Sequence[StepCurve] = field(default_factory=tuple)
    level: float = 0.95
    tells: Literal["all", "ranks", "nothing"] = "all"
    schema: str = ""
    tables: Sequence[FoundTable] = field(default_factory=tuple)


def write_curves(curves: Sequence[StepCurve], path: Path, title: str, level: float = 0.95) -> None:
    """Write ``PATH.csv``, ``PATH.png`` and ``PATH.svg``, each whole or not at all.

    Args:
        curves: One or more.
        path: Without an ending.
        title: Of the picture.
        level: Of confidence of the bands.

    Raises:
        FedfillError: Where there is no curve, or a file can't be written.
    """
    if not curves:
        raise FedfillError("curves: found none; allowed: one or more")
    write_atomically(path.with_suffix(".csv"), table(curves).encode())
    picture(curves, path.with_suffix(".png"), title, level)


def table(curves: Sequence[StepCurve]) -> str:
    """The curves as CSV, one row for each time, and a first row at time 0."""
    rows: list[Sequence[object]] = []
    for curve in curves:
        first = "" if curve.rows is None else f"{curve.rows:.10g}"
        rows.append([curve.label, 0, first, 0 if curve.events else "", 1, *([0, 1, 1] if curve.se else ["", "", ""])])
        for k, time in enumerate(curve.times):
            cells = [
                f"{values[k]:.10g}" if values else ""
                for values in (curve.at_risk, curve.events, curve.survival, curve.se, curve.low, curve.high)
            ]
            rows.append([curve.label, f"{time:.10g}", *cells])
    return csv_text(COLUMNS, rows)


def picture(curves: Sequence[StepCurve], path: Path, title: str, level: float) -> None:
    """Draw the first `MOST` curves, as PNG and SVG."""
    from fedfill.runs import pictures  # here: matplotlib costs every start a third of a second

    shown = curves[:MOST]
    rows = [curve for curve in shown if curve.at_risk]
    figure, axes = pictures._page(7.5, 4.2)
    colours: dict[str, str] = {}
    for curve in shown:
        own = colours.setdefault(curve.label.removeprefix("model, "), pictures._colour(len(colours)))
        times, survival = _steps(curve.times, curve.survival)
        axes.step(
            times, survival, where="post", color=own, label=curve.label, linewidth=1.3 if curve.model else 1.8,
            linestyle="--" if curve.model else "-",
        )  # fmt: skip
        if curve.low:
            low, high = (_steps(curve.times, side)[1] for side in (curve.low, curve.high))
            axes.fill_between(times, low, high, step="post", color=own, alpha=0.15, linewidth=0)
    last = max(curve.times[-1] for curve in shown)
    axes.set_xlim(0, last * 1.01)
    axes.set_ylim(0, 1.02)
    axes.set_title(title, loc="left", color=pictures.INK, fontsize=11)
    pictures._chart(axes, "time", "without the event")
    ticks = [tick for tick in axes.get_xticks() if 0 <= tick <= last]
    for row, curve in enumerate(rows):
        style: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "fontsize": 7.5, "annotation_clip": False}
        own = colours[curve.label.removeprefix("model, ")]
        down = -0.2 - 0.055 * row
        axes.annotate(pictures._short(curve.label), (-0.03 * last, down), ha="right", color=own, **style)
        for tick in ticks:
            axes.annotate(f"{_at(curve, tick):,.0f}", (tick, down), ha="center", color=pictures.INK, **style)
    if rows:
        axes.annotate(
            "at risk", (0, -0.145), xycoords="axes fraction", fontsize=7.5, color=pictures.INK, annotation_clip=False
        )
    if any(curve.low for curve in shown):
        axes.plot([], [], color="#888888", linewidth=6, alpha=0.3, label=f"{level:.0%} band at each time")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    pictures._save(figure, path)


def _steps(times: Sequence[float], values: Sequence[float]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.concatenate([[0.0], times]), np.concatenate([[1.0], values])


def _at(curve: StepCurve, time: float) -> float:
    """Those at risk at the start, or just before the first of the curve's times that is not before `time`."""
    if time <= 0 and curve.rows is not None:
        return curve.rows
    k = int(np.searchsorted(curve.times, time, side="left"))
    return curve.at_risk[min(k, len(curve.at_risk) - 1)]
