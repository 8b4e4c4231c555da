"""What runs found beside a model, in a report: their tables, and survival curves."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedfill.errors import FedfillError
from fedfill.files import read_regular
from fedfill.studies.reporting import drawings
from fedfill.studies.reporting.drawings import STYLES, Curve
from fedfill.studies.reporting.parts import Line, Part, Trial
from fedfill.studies.reporting.values import Chart, Room, Section, Table, many


@dataclass
class _Survival:
    """One curve of ``curves.csv``: its times, S there, and the limits where it has any."""

    times: list[float] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    band: list[tuple[float, float, float]] = field(default_factory=list)


def found(part: Part, where: str, room: Room) -> Section | None:
    """The tables that ``summary.json`` has of what was found, and the curves beside it; of several seeds those of the first."""
    tables: list[Table] = []
    charts: list[Chart] = []
    for line in part.lines:
        if not line.known:
            continue
        trial = line.known[0]
        whose = _whose(part, line, trial)
        for table in trial.figures.get("tables") or []:
            rows = table["rows"][: room.rows]
            cut = f"; {len(rows)} of {many(len(table['rows']), 'row')}" if len(rows) < len(table["rows"]) else ""
            tables += [Table(f"{whose}{table['title']}{cut}", table["header"], rows)] if rows else []
        charts += _chart(trial, whose, where, room)
    return Section("found", "What was found", charts=charts, tables=tables) if tables or charts else None


def _whose(part: Part, line: Line, trial: Trial) -> str:
    of = [line.label] if len(part.lines) > 1 else []
    of += [f"seed {trial.experiment.get('seed')}"] if len(line.known) > 1 else []
    return f"{', '.join(of)}: " if of else ""


def _chart(trial: Trial, whose: str, where: str, room: Room) -> list[Chart]:
    """The survival curves of a run; none where it left none."""
    place = trial.folder / "curves.csv"
    if not place.exists():
        return []
    try:
        read = _read(read_regular(place).decode())
    except (ValueError, KeyError, OSError, csv.Error) as error:
        raise FedfillError(f"report: {place} is damaged; remove it") from error
    shown = dict(list(read.items())[:STYLES])
    if not shown:
        return []
    title = f"{whose}Survival curves"
    curves = [
        Curve(label, _steps(curve.times, curve.survival), _band(curve.band), style)
        for style, (label, curve) in enumerate(shown.items())
    ]
    ends = "; ".join(f"{label}: {100 * curve.survival[-1]:.1f}" for label, curve in shown.items())
    note = f"{where}. Percent without the event over time; bands are the limits at each time."
    if len(shown) < len(read):
        note += f" Shown are {len(shown)} of {many(len(read), 'curve')}; curves.csv in the run's folder has all."
    drawing = drawings.lines(
        curves, title=f"{title}: {where}", description=f"At the end, in percent: {ends}.", x_label="time", y_label="percent",
        y_range=(0, 100), x_range=(0, max(curve.times[-1] for curve in shown.values())), whole=False, width=720, height=340,
    )  # fmt: skip
    legend = [(drawings.swatch(curve.style), curve.label) for curve in curves]
    return [Chart(title, note, drawing, _table(title, shown, room), legend, wide=True)]


def _read(text: str) -> dict[str, _Survival]:
    """The curves of a table as `fedfill.runs.curves` writes it."""
    curves: dict[str, _Survival] = {}
    for row in csv.DictReader(io.StringIO(text)):
        curve = curves.setdefault(row["curve"], _Survival())
        time = float(row["time"])
        curve.times.append(time)
        curve.survival.append(float(row["survival"]))
        if row["low"]:
            curve.band.append((time, 100 * float(row["low"]), 100 * float(row["high"])))
    return curves


def _steps(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Corners of a line that stays as it is up to each time."""
    before = [values[0], *values[:-1]]
    return [point for t, b, v in zip(times, before, values, strict=True) for point in ((t, 100 * b), (t, 100 * v))]


def _band(band: Sequence[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    before = [band[0], *band[:-1]] if band else []
    return [corner for (_, *b), now in zip(before, band, strict=True) for corner in ((now[0], b[0], b[1]), now)]


def _table(title: str, curves: dict[str, _Survival], room: Room) -> Table | None:
    times = sorted({time for curve in curves.values() for time in curve.times})[: room.rows]
    at = {label: dict(zip(curve.times, curve.survival, strict=True)) for label, curve in curves.items()}
    rows = [(f"{time:g}", *(f"{100 * own[time]:.1f}" if time in own else "–" for own in at.values())) for time in times]
    return Table(f"{title}, percent", ("time", *curves), rows) if rows else None
