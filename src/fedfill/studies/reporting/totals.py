"""Charts of a report: final accuracies and their differences, traffic, epsilon over the rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from fedfill.studies.comparison import paired_difference
from fedfill.studies.reporting import drawings
from fedfill.studies.reporting.bars import Bar, bars_of, forest
from fedfill.studies.reporting.charts import TOGETHER, axis_of, ends_of, style_of, thin
from fedfill.studies.reporting.drawings import Curve
from fedfill.studies.reporting.parts import Part, Trial
from fedfill.studies.reporting.values import Chart, Room, Section, Table, amount, spread


def finals(part: Part, where: str) -> list[Chart]:
    """Accuracies after the last round, with a dot for each seed, and paired differences."""
    charts = []
    for name, title in (
        ("accuracy", "Everyone's test set"),
        ("mean_client_accuracy", "Clients' own test splits, mean"),
    ):
        title = title if part.score == "Accuracy" else f"{part.score}: {title}"
        bars = []
        for k, line in enumerate(part.lines):
            values = [100 * v for v in line.values(name)]
            interval = None
            if len(values) > 1 and (half := paired_difference(values).half_width) is not None:
                middle = statistics.fmean(values)
                interval = (max(0.0, middle - half), min(100.0, middle + half))
            bars.append(
                Bar(
                    line.label,
                    statistics.fmean(values) if values else None,
                    values if len(values) > 1 else (),
                    interval,
                    k,
                    _short(line.values(name)),
                )
            )
        if not any(bar.value is not None for bar in bars):
            continue
        seeds = len(part.seeds) > 1
        note = f"{where}. Bars are means{', dots are seeds, whiskers the interval of 95 % of the mean' if seeds else ' of one seed'}."
        about = "; ".join(f"{bar.label} {bar.text}" for bar in bars if bar.value is not None) + "."
        charts.append(
            Chart(
                title,
                note,
                bars_of(bars, title=f"{title}: {where}", description=about, x_label="percent", row=30),
                None,
            )
        )
    if part.comparison is not None and len(part.lines) > 1:
        charts[1:1] = _differences(part, where)
    return charts


def _short(values: Sequence[float]) -> str:
    return spread(values).removesuffix(" %")


def _differences(part: Part, where: str) -> list[Chart]:
    comparison = part.comparison
    assert comparison is not None
    base = comparison.baseline
    rows = []
    for k, row in enumerate(comparison.rows):
        name = comparison.headline[1]
        found = comparison.difference(row, name)
        if found is None:
            continue
        half = found.half_width
        interval = None if half is None else (100 * (found.mean - half), 100 * (found.mean + half))
        pairs = zip(row.values(name), base.values(name), strict=True)
        dots = [100 * (own - other) for own, other in pairs] if half is not None else []
        text = f"{100 * found.mean:+.1f}" + ("" if half is None else f" ± {100 * half:.1f}")
        rows.append(Bar(row.label, 100 * found.mean, dots, interval, k, text))
    if not rows:
        return []
    title = f"Difference to {base.label}, everyone's test set"
    note = f"{where}. Seed by seed on the same clients and data" + (
        "; the line is the interval of 95 %, small dots are seeds. One that holds zero may be chance."
        if len(part.seeds) > 1
        else ". One seed tells nothing of chance."
    )
    about = "; ".join(f"{one.label} {one.text} points" for one in rows) + "."
    drawing = forest(rows, title=f"{title}: {where}", description=about, x_label="points")
    return [Chart(title, note, drawing, None)]


def traffic(part: Part, where: str, room: Room) -> Section | None:
    """Bytes: in all, by handler, and how far the accuracy is for them."""
    lines = [line for line in part.lines if line.known]
    if not lines:
        return None
    ups, downs = ({line.label: line.mean(name) or 0.0 for line in lines} for name in ("bytes_up", "bytes_down"))
    rows = [(label, amount(ups[label]), amount(downs[label]), amount(ups[label] + downs[label])) for label in ups]
    tables = (
        []
        if len(lines) == 1
        else [
            Table(
                "Sent by all clients together, mean over seeds",
                ("method", "up to the server", "down to clients", "both"),
                rows,
            )
        ]
    )
    most = max(ups[label] + downs[label] for label in ups)
    unit, word = next(((10.0**k, w) for k, w in ((9, "GB"), (6, "MB"), (3, "kB")) if most >= 10.0**k), (1.0, "B"))
    charts: list[Chart] = []
    curves = []
    for line in lines:
        points = _by_traffic(line.known[0], unit)
        if points and points[-1][0] > 0:
            curves.append(Curve(line.label, points, (), style_of(part, line.label)))
    if curves and any(len(c.points) > 1 for c in curves) and len(curves) <= TOGETHER:
        title = f"{part.score} for the traffic so far"
        ends = [curve.points[-1][0] for curve in curves]
        powers = max(ends) > 8 * min(ends)  # else the cheap ones would be a stroke at the left
        least = min(curve.points[0][0] for curve in curves)
        drawing = drawings.lines(
            curves, title=f"{title}: {where}", description=ends_of(curves), x_label=f"{word} up and down", y_label="percent, everyone's test set",
            y_range=axis_of(curves), x_range=(least if powers else 0.0, max(c.points[-1][0] for c in curves)), whole=False, powers=powers,
        )  # fmt: skip
        seed = f" Seed {part.seeds[0]}." if len(part.seeds) > 1 else ""
        seed += " The axis has steps of powers of ten." if powers else ""
        charts.append(
            Chart(
                title,
                f"{where}.{seed}",
                drawing,
                None,
                [(drawings.swatch(c.style), c.label) for c in curves] if len(curves) > 1 else [],
            )
        )
    if len(lines) > 1 and most > 0:
        bars = [
            Bar(
                line.label,
                (ups[line.label] + downs[line.label]) / unit,
                style=style_of(part, line.label),
                text=amount(ups[line.label] + downs[line.label]),
            )
            for line in lines
        ]
        about = "; ".join(f"{bar.label} {bar.text}" for bar in bars) + "."
        drawing = bars_of(
            bars, title=f"Traffic in all: {where}", description=about, x_label=word, high=most / unit, row=30
        )
        charts.append(Chart("Traffic in all", f"{where}. Up and down, mean over seeds.", drawing, None))
    if len(lines) == 1 and (handlers := lines[0].known[0].figures.get("bytes_by_handler")):
        found = [(name, amount(legs["up"]), amount(legs["down"])) for name, legs in handlers.items()]
        tables.append(
            Table("By exchange, all clients together", ("exchange", "up to the server", "down to clients"), found)
        )
    return Section("traffic", "Traffic", "", charts, tables)


def _by_traffic(trial: Trial, unit: float) -> list[tuple[float, float]]:
    sent = float(
        sum(step.get("bytes_up", 0) + step.get("bytes_down", 0) for step in trial.figures.get("preparation", []))
    )
    points = []
    for record in trial.rounds:
        sent += record.get("bytes_up", 0) + record.get("bytes_down", 0)
        if "accuracy" in record:
            points.append((sent / unit, 100 * record["accuracy"]))
    return points


def epsilons(part: Part, where: str, room: Room) -> list[Chart]:
    """How epsilon grows over the rounds, where it does."""
    curves = []
    for line in part.lines:
        for trial in line.known[:1]:
            by_round = [(r["round"], r.get("privacy", {}).get("total_epsilon")) for r in trial.rounds]
            points = [(float(t), float(epsilon)) for t, epsilon in by_round if epsilon is not None]
            if len({epsilon for _, epsilon in points}) > 1:
                curves.append(Curve(line.label, points, (), style_of(part, line.label)))
    if not curves or len(curves) > TOGETHER:
        return []
    most = max(y for curve in curves for _, y in curve.points)
    step = 10.0 ** math.floor(math.log10(most))
    title = "Epsilon over the rounds"
    about = "; ".join(f"{c.label}: {c.points[-1][1]:.3g} at the end" for c in curves) + "."
    drawing = drawings.lines(
        curves, title=f"{title}: {where}", description=about, x_label="round", y_label="epsilon, one record replaced",
        y_range=(0.0, step * math.ceil(most / step)),
    )  # fmt: skip
    rounds = sorted({t for c in curves for t, _ in c.points})
    rows = [
        (f"{t:,.0f}", *(f"{dict(c.points)[t]:.3g}" if t in dict(c.points) else "–" for c in curves)) for t in rounds
    ]
    table = thin(Table(title, ("round", *(c.label for c in curves)), rows), room)
    legend = [(drawings.swatch(c.style), c.label) for c in curves] if len(curves) > 1 else []
    return [Chart(title, f"{where}.", drawing, table, legend)]
