"""Charts of a report: final accuracies, who holds what, learning curves, traffic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from fedfill.studies.reporting import drawings
from fedfill.studies.reporting.drawings import Curve
from fedfill.studies.reporting.heat import heat
from fedfill.studies.reporting.parts import Holdings, Line, Part
from fedfill.studies.reporting.values import Chart, Room, Section, Table, many, percent, quantiles

TOGETHER = 6
"""Curves in one chart; of more each has a small chart of its own, with the others behind it."""
COLUMNS = 50
"""Of a heat map of classes."""


def holdings(part: Part, where: str, room: Room) -> Section | None:
    """Who holds what."""
    trial = next((trial for trial in part.trials if trial.holdings is not None and trial.holdings.counts), None)
    held = trial.holdings if trial is not None else None
    if trial is None or held is None:
        return None
    sizes = [sum(row) for row in held.counts]
    kinds = [sum(count > 0 for count in row) for row in held.counts]
    total = sum(sizes)
    lacking = sum(kind < len(held.class_names) for kind in kinds)
    lead = (
        f"{many(total, 'training sample')} lie with {many(len(sizes), 'client')}: {min(sizes):,} with the smallest, {max(sizes):,} "
        f"with the largest. {lacking:,} of {many(len(sizes), 'client')} lack at least one of the {many(len(held.class_names), 'class')}."
    )
    if len(part.seeds) > 1:
        lead += f" Drawn here are the clients of seed {trial.experiment.get('seed')}; each seed divides the data anew."
    if part.apart:
        lead += f" Drawn here are the clients of {part.lines[0].label} alone."
    most = min(40, room.clients)
    shown, how = _some_clients(sizes, most)
    names, columns = _grouped(held.class_names, COLUMNS)
    counts = [[sum(held.counts[i][c] for c in group) for group in columns] for i in shown]
    note = f"{where}. The stronger the colour, the more.{how}"
    if len(columns) < len(held.class_names):
        note += f" Each column stands for {len(columns[0])} classes in their order."
    title = "Training samples of each class at each client"
    drawing = heat(
        counts, [held.client_names[i] for i in shown], names,
        title=f"{title}: {where}", description=lead, x_label="class", y_label="client", totals=[f"{sizes[i]:,}" for i in shown],
    )  # fmt: skip
    listed = shown[: room.rows]
    table = Table(
        f"{title}{how}", ("client", *names, "all"),
        [(held.client_names[i], *(f"{n:,}" for n in row), f"{sizes[i]:,}") for i, row in zip(listed, counts, strict=False)],
    )  # fmt: skip
    charts = [Chart(title, note, drawing, table if room.rows else None, wide=True)]
    return Section("holdings", "Who holds what", lead, charts, [_quantile_table(held)] if len(sizes) > 10 else [])


def _some_clients(sizes: Sequence[int], most: int) -> tuple[list[int], str]:
    """All clients, or some from the smallest to the largest, and a sentence that says so."""
    if len(sizes) <= most:
        return list(range(len(sizes))), ""
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], i))
    shown = [order[round(k * (len(order) - 1) / (most - 1))] for k in range(most)]
    return shown, f" Shown are {most} of {len(sizes):,} clients, evenly from the smallest to the largest."


def _grouped(names: Sequence[str], most: int) -> tuple[list[str], list[range]]:
    """Names of columns, and the items in each."""
    size = math.ceil(len(names) / most)
    groups = [range(k, min(k + size, len(names))) for k in range(0, len(names), size)]
    return [names[g[0]] if len(g) == 1 else f"{names[g[0]]} … {names[g[-1]]}" for g in groups], groups


def _quantile_table(held: Holdings) -> Table:
    sizes = [sum(row) for row in held.counts]
    shares = [max(row) / size if size else 0.0 for row, size in zip(held.counts, sizes, strict=True)]
    kinds = [sum(count > 0 for count in row) for row in held.counts]
    rows = [
        ("samples", *(f"{q:,.0f}" for q in quantiles(sizes))),
        ("classes held", *(f"{q:,.0f}" for q in quantiles(kinds))),
        ("share of its largest class", *(percent(q, 0) for q in quantiles(shares))),
    ]
    header = (
        "over all clients",
        "smallest",
        "a quarter has at most",
        "half have at most",
        "three quarters have at most",
        "largest",
    )
    return Table(f"How far apart the {len(sizes):,} clients are", header, rows)


def learning(part: Part, where: str, room: Room) -> Section | None:
    """Learning curves: everyone's test set, and the clients' own splits."""
    if not any(len(trial.curve("accuracy")) > 1 for trial in part.trials):
        return None  # a point is no curve
    several = len(part.seeds) > 1
    lead = (
        "Each curve is the mean over seeds; the band reaches from the lowest to the highest seed. " if several else ""
    )
    if not several and len(part.lines) > 1:
        lead = "One seed each: another one would give other curves. "
    charts: list[Chart] = []
    figures = (
        ("accuracy", f"{part.score} on everyone's test set", "test set"),
        ("mean_client_accuracy", f"{part.score} on clients' own test splits, mean", "own splits"),
    )
    for name, title, _ in figures:
        curves = {line.label: _by_round(line, name) for line in part.lines}
        curves = {label: found for label, found in curves.items() if found}
        if not curves:
            continue
        if len(part.lines) == 1 and name == "mean_client_accuracy":
            charts.append(_of_clients(part, where, room))
            continue
        table = _curve_table(title, curves, room)
        if len(curves) <= TOGETHER:
            charts.append(_together(part, title, where, curves, table))
        else:
            charts += _apart(part, title, where, curves, table)
    if len({len(trial.rounds) > 1 for trial in part.trials}) > 1:
        lead += "A method of one round is a point, with a thin line at its height. "
    same = _identical(part)
    lead += " ".join(f"{', '.join(labels[:-1])} and {labels[-1]} have the same curve." for labels in same)
    return Section("learning", "Learning curves", lead.strip(), charts)


def _by_round(line: Line, name: str) -> dict[int, list[float]]:
    """A figure of all runs by round, of the rounds that all have."""
    curves = [trial.curve(name) for trial in line.known]
    if not curves:
        return {}
    rounds = [t for t in curves[0] if all(t in curve for curve in curves)]
    return {t: [curve[t] for curve in curves] for t in rounds}


def _curve(label: str, found: Mapping[int, Sequence[float]], style: int, faint: bool = False) -> Curve:
    points = [(float(t), 100 * statistics.fmean(values)) for t, values in found.items()]
    several = any(len(values) > 1 for values in found.values())
    band = [(float(t), 100 * min(values), 100 * max(values)) for t, values in found.items()] if several else []
    return Curve(label, points, band, style, faint)


def axis_of(curves: Sequence[Curve]) -> tuple[float, float]:
    """A vertical axis in percent that holds all curves, from and to round numbers."""
    ys = [y for c in curves for _, y in c.points] + [y for c in curves for _, low, high in c.band for y in (low, high)]
    low, high = max(0.0, min(ys)), min(100.0, max(ys))
    step = next(one for one in (1, 2, 5, 10, 20) if math.ceil(high / one) - math.floor(low / one) <= 5)
    first, last = step * math.floor(low / step), step * math.ceil(high / step)
    if first == last:
        first, last = (first - step, last) if last == 100 else (first, last + step)
    return float(first), float(last)


def style_of(part: Part, label: str) -> int:
    """Colour, dash and marker of a method: the same in all charts of a part."""
    return next(k for k, line in enumerate(part.lines) if line.label == label)


def ends_of(curves: Sequence[Curve]) -> str:
    """Where curves end, in words."""
    ends = sorted(((c.points[-1][1], c.label) for c in curves), reverse=True)
    return "At the last round: " + ", ".join(f"{label} {y:.1f} percent" for y, label in ends[:12]) + "."


def _together(
    part: Part, title: str, where: str, found: Mapping[str, Mapping[int, Sequence[float]]], table: Table
) -> Chart:
    curves = [_curve(label, by_round, style_of(part, label)) for label, by_round in found.items()]
    drawing = drawings.lines(
        curves,
        title=f"{title}: {where}",
        description=ends_of(curves),
        x_label="round",
        y_label="percent",
        y_range=axis_of(curves),
    )
    legend = [(drawings.swatch(c.style), c.label) for c in curves] if len(curves) > 1 else []
    return Chart(title, f"{where}.", drawing, table, legend)


def _apart(
    part: Part, title: str, where: str, found: Mapping[str, Mapping[int, Sequence[float]]], table: Table
) -> list[Chart]:
    curves = {label: _curve(label, by_round, style_of(part, label)) for label, by_round in found.items()}
    whole = axis_of(list(curves.values()))
    charts = []
    for k, (label, curve) in enumerate(curves.items()):
        others = [Curve(c.label, c.points, faint=True) for name, c in curves.items() if name != label]
        drawing = drawings.lines(
            [*others, curve], title=f"{label}, {title}: {where}", description=ends_of([curve]), x_label="round", y_label="percent",
            y_range=whole, width=460, height=200,
        )  # fmt: skip
        note = f"{title}, {where}. Grey: the others."
        charts.append(Chart(label, note, drawing, table if k == len(curves) - 1 else None))
    return charts


def _of_clients(part: Part, where: str, room: Room) -> Chart:
    """One method's clients over the rounds: mean, the middle half, the worst."""
    line = part.lines[0]
    quarter: dict[int, list[float]] = {}
    for trial in line.known:
        for record in trial.rounds:
            known = [share for share in record.get("accuracy_by_client") or [] if share is not None]
            if known:
                quarter.setdefault(record["round"], []).extend(known)
    spans = {t: quantiles(values) for t, values in quarter.items()}
    mean = [(float(t), 100 * statistics.fmean(values)) for t, values in quarter.items()]
    worst = [(float(t), 100 * q[0]) for t, q in spans.items()]
    band = [(float(t), 100 * q[1], 100 * q[3]) for t, q in spans.items()]
    curves = [Curve("mean over clients", mean, band, 0), Curve("worst client", worst, (), 1)]
    title = f"{part.score} on clients' own test splits"
    drawing = drawings.lines(
        curves,
        title=f"{title}: {where}",
        description=ends_of(curves),
        x_label="round",
        y_label="percent",
        y_range=axis_of(curves),
    )
    rows = [
        (f"{t:,}", f"{m:.1f}", *(f"{100 * q:.1f}" for q in spans[t])) for (_, m), t in zip(mean, spans, strict=True)
    ]
    header = ("round", "mean", "worst", "lower quarter", "middle", "upper quarter", "best")
    table = thin(Table(f"{title}, percent", header, rows), room)
    return Chart(
        title,
        f"{where}. The band holds the middle half of the clients.",
        drawing,
        table,
        [(drawings.swatch(c.style), c.label) for c in curves],
    )


def _curve_table(title: str, found: Mapping[str, Mapping[int, Sequence[float]]], room: Room) -> Table:
    rounds = sorted({t for by_round in found.values() for t in by_round})
    rows = [
        (
            f"{t:,}",
            *(f"{100 * statistics.fmean(by_round[t]):.1f}" if t in by_round else "–" for by_round in found.values()),
        )
        for t in rounds
    ]
    return thin(Table(f"{title}, percent, mean over seeds", ("round", *found), rows), room)


def thin(table: Table, room: Room, most: int = 60) -> Table:
    """The table with so many rows at the most, evenly, and a word on it in its caption."""
    most = min(most, room.rows)
    if len(table.rows) <= most:
        return table
    rows = [table.rows[round(k * (len(table.rows) - 1) / (most - 1))] for k in range(most)] if most > 1 else []
    return Table(f"{table.caption}; {most} of {len(table.rows):,} rows, evenly", table.header, rows)


def _identical(part: Part) -> list[list[str]]:
    """Labels whose curves are the same."""
    seen: dict[tuple[object, ...], list[str]] = {}
    for line in part.lines:
        found = _by_round(line, "accuracy")
        if found:
            seen.setdefault(tuple((t, *values) for t, values in found.items()), []).append(line.label)
    return [labels for labels in seen.values() if len(labels) > 1]
