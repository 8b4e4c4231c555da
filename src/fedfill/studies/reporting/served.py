"""Charts of a report: accuracy by class and by client."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from fedfill.studies.reporting.bars import DOTS, Bar, bars_of, strip
from fedfill.studies.reporting.charts import style_of
from fedfill.studies.reporting.heat import heat
from fedfill.studies.reporting.parts import Holdings, Line, Part
from fedfill.studies.reporting.values import Chart, Room, Section, Table, many, percent, quantiles

CLASSES = 20
"""Classes that are shown one by one for several methods."""
ONE_BY_ONE = 40
"""Classes or clients of one run that are shown one by one."""
WORST = 15
"""Of more, so many of the lowest are named."""


def served(part: Part, where: str, room: Room) -> Section | None:
    """Accuracy by class and by client."""
    lines = [line for line in part.lines if line.known]
    if not lines:
        return None
    held = next((trial.holdings for trial in part.trials if trial.holdings is not None), None)
    by_class = _by_class(part, lines, held, where, room) if part.score == "Accuracy" else []
    charts = [*by_class, *_by_client(part, lines, held, where, room)]
    by = "by class and by client" if part.score == "Accuracy" else "by client"
    return Section("served", f"{part.score} {by}", "", charts) if charts else None


def _by_class(part: Part, lines: Sequence[Line], held: Holdings | None, where: str, room: Room) -> list[Chart]:
    shares = {line.label: line.by_item("accuracy_by_class") for line in lines}
    shares = {label: values for label, values in shares.items() if any(v is not None for v in values)}
    if not shares:
        return []
    classes = max(map(len, shares.values()))
    names = (
        list(held.class_names)
        if held is not None and len(held.class_names) == classes
        else [str(c) for c in range(classes)]
    )
    title = "Accuracy by class, everyone's test set"
    if len(shares) == 1:
        return [_one_by_one(title, where, names, next(iter(shares.values())), "class", room)]
    values = list(shares.values())
    rows = [(name, *(_figure(v[c] if c < len(v) else None) for v in values)) for c, name in enumerate(names)]
    table = _worst_first(Table(f"{title}, percent, mean over seeds", ("class", *shares), rows), values, room)
    if classes <= CLASSES:
        drawing = heat(
            [[None if v is None else 100 * v for v in row] for row in values], list(shares), names,
            title=f"{title}: {where}", description=_extremes(shares, names), x_label="class", y_label="", most=100, even=True,
        )  # fmt: skip
        return [
            Chart(
                title,
                f"{where}. Percent of each class{', mean over seeds' if len(part.seeds) > 1 else ''}; the stronger the colour, the more.",
                drawing,
                table if room.rows else None,
                wide=True,
            )
        ]
    bars = [_spots(part, label, [v for v in row if v is not None]) for label, row in shares.items()]
    drawing = strip(bars, title=f"{title}: {where}", description=_extremes(shares, names), x_label="percent")
    return [Chart(title, f"{where}. {_how(classes, 'class')}", drawing, table)]


def _by_client(part: Part, lines: Sequence[Line], held: Holdings | None, where: str, room: Room) -> list[Chart]:
    title = f"{part.score} by client, own test splits"
    if len(lines) == 1 and len(lines[0].known) == 1:
        values = lines[0].by_item("accuracy_by_client")
        if all(v is None for v in values):
            return []
        named = held is not None and len(held.client_names) == len(values)
        names = list(held.client_names) if held is not None and named else [str(i) for i in range(len(values))]
        sizes = [sum(row) for row in held.counts] if held is not None and named and any(map(any, held.counts)) else []
        return [_one_by_one(title, where, names, values, "client", room, sizes)]
    pooled = {
        line.label: [v for trial in line.known for v in trial.figures.get("accuracy_by_client") or [] if v is not None]
        for line in lines
    }
    pooled = {label: values for label, values in pooled.items() if values}
    if not pooled:
        return []
    bars = [_spots(part, label, values) for label, values in pooled.items()]
    most = max(map(len, pooled.values()))
    lowest = min(pooled, key=lambda label: (min(pooled[label]), label))
    about = f"The lowest of all is a client of {lowest} with {percent(min(pooled[lowest]))}."
    drawing = strip(bars, title=f"{title}: {where}", description=about, x_label="percent")
    rows = [
        (label, str(len(values)), percent(statistics.fmean(values)), *(percent(q) for q in quantiles(values)))
        for label, values in pooled.items()
    ]
    header = ("method", "clients", "mean", "worst", "lower quarter", "middle", "upper quarter", "best")
    note = f"{where}. {_how(most, 'client')}{' Clients of all seeds together.' if len(part.seeds) > 1 else ''}"
    return [Chart(title, note, drawing, Table(title, header, rows))]


def _one_by_one(
    title: str,
    where: str,
    names: Sequence[str],
    values: Sequence[float | None],
    what: str,
    room: Room,
    sizes: Sequence[int] = (),
) -> Chart:
    """One bar for each class or client of one method; of many, quantiles and the lowest."""
    order = sorted((i for i, v in enumerate(values) if v is not None), key=lambda i: (values[i], i))
    worst = order[0]
    about = f"Lowest: {what} {names[worst]} with {percent(values[worst])}; highest: {names[order[-1]]} with {percent(values[order[-1]])}."
    few = len(values) <= min(ONE_BY_ONE, max(room.clients, WORST))
    shown = list(range(len(values))) if few else order[:WORST]
    note = f"{where}. {about}"
    if len(order) < len(values):
        note += f" {len(order):,} of {many(len(values), what)} {'has' if len(order) == 1 else 'have'} a figure."
    if len(shown) < len(order):
        middle = ", ".join(percent(q, 0) for q in quantiles([v for v in values if v is not None])[1:4])
        note += f" Shown are the {len(shown)} lowest; a quarter, half and three quarters of all have at most {middle}."
    bars = [
        Bar(names[i], None if (v := values[i]) is None else 100 * v, style=1 if i == worst else 0, text=_figure(values[i]) + (f" ({sizes[i]:,})" if sizes else ""))
        for i in shown
    ]  # fmt: skip
    if sizes:
        note += " In brackets: how many training samples the client has."
    drawing = bars_of(
        bars, title=f"{title}: {where}", description=about, x_label="percent", row=24 if len(shown) <= 20 else 17
    )
    header = (what, "percent", "training samples") if sizes else (what, "percent")
    rows = [
        (names[i], _figure(values[i]), *((f"{sizes[i]:,}",) if sizes else ()))
        for i in (*order, *(i for i, v in enumerate(values) if v is None))
    ]
    table = Table(title, header, rows[: room.rows])
    if len(rows) > room.rows:
        table = Table(f"{title}: the {room.rows} lowest of {len(rows):,}", header, rows[: room.rows])
    return Chart(title, note, drawing, table if table.rows else None)


def _worst_first(table: Table, values: Sequence[Sequence[float | None]], room: Room) -> Table:
    if len(table.rows) <= min(room.rows, 60):
        return table
    means = [statistics.fmean([v[c] or 0 for v in values if c < len(v)] or [0]) for c in range(len(table.rows))]
    order = sorted(range(len(means)), key=lambda c: (means[c], c))[: min(room.rows, 60)]
    return Table(
        f"{table.caption}; the {len(order)} lowest of {len(means):,}",
        table.header,
        [table.rows[c] for c in sorted(order)],
    )


def _figure(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _spots(part: Part, label: str, values: Sequence[float]) -> Bar:
    return Bar(
        label, 100 * statistics.fmean(values), [100 * v for v in values], style=style_of(part, label),
        text=f"{100 * statistics.fmean(values):.1f}, worst {100 * min(values):.0f}",
    )  # fmt: skip


def _how(count: int, what: str) -> str:
    if count <= DOTS:
        return f"Each dot is a {what}, the stroke their mean."
    return f"Of {count:,} {what}s: the line holds 90 %, the box the middle half, the stroke is the median, the mark the lowest."


def _extremes(shares: Mapping[str, Sequence[float | None]], names: Sequence[str]) -> str:
    found = []
    for label, values in shares.items():
        known = [(v, names[c]) for c, v in enumerate(values) if v is not None]
        if known:
            found.append(f"{label} is lowest on {min(known)[1]} with {percent(min(known)[0])}")
    return "; ".join(found) + "."
