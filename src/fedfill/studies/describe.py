"""Drafts of schemas: what one site's table looks like, for people to edit and to agree on.

A draft's bounds and values come from records. They are rounded outwards, and private until everybody has agreed on them.
"""

from __future__ import annotations

import math
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from fedfill.data.cells import DOMAIN_COLUMN, LABEL, as_word, days_of, empty_cell, is_number, is_text
from fedfill.data.frames import as_arrow, is_frame
from fedfill.data.schema import Schema, from_document
from fedfill.data.schema_columns import MOST_CELLS
from fedfill.data.tables import find_tables, read_table, sound
from fedfill.errors import FedfillError, did_you_mean, path_of, shown
from fedfill.runs.directory import write_atomically

FEW = 20
"""Up to so many different whole numbers in the target are classes."""
TIMES = 12
"""Times of a survival target's grid."""
SEEN = 0.9
"""Share of the rows that need not be told of after the grid's last time: who is still there is too few."""
STEPS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
"""From one time of it to the next, times a power of ten."""
HEAD = """\
# A draft, made from one table. Its bounds, values and kinds come from records, rounded outwards: they are private until all
# sites have agreed on them. Put in what everybody knows without looking: the possible ages, the categories of the form.
# Columns that are left out are not used. bins: cells of equal width for counts. missing = false: no cell may be empty.
# grid, of a target of times: the times at which anything will be told. Make them those that a reader asks for.
"""


def describe(
    data: Any,
    *,
    target: str | None = None,
    event: str | None = None,
    site: str | None = None,
    out: str | Path | None = None,
) -> Schema:
    """A draft of a schema from one site's table.

    Example::

        fedfill.describe("people.csv", target="died", out="schema.toml")

    Args:
        data: A CSV or Parquet file, a folder with ``train.csv`` or ``train.parquet``, or a data frame.
        target: The column to be told of a row; None: ``label``.
        event: The column that is 1 where an event came, and 0 where the row left without it: then `target` is the time until then, and
            the draft's target is of the kind ``survival``, with even times as its grid; None: the target is a class or a number.
        site: The column that says where a row comes from; None: ``domain`` where there is one.
        out: The TOML file to write, which must not be there yet; None: none is written.

    Returns:
        The draft: words and truth values as categories, numbers and dates within rounded bounds; a target of words, of truth values
        or of few whole numbers as classes, of others as a number. Columns of more than 998 different words, and those that are empty
        or hold one value alone, are left out.

    Raises:
        FedfillError: Where there is no such table or column, or nothing is left to learn from, or the file is there.
    """
    place = None if out is None else path_of("out", out)
    if place is not None and place.exists():
        raise FedfillError(f"out: {place} is there already, and may have been edited; allowed: a new file")
    table, where = _table(data)
    names = table.column_names
    for setting, name in (("target", target), ("event", event), ("site", site)):
        if name is not None and name not in names:
            raise FedfillError(
                f"{setting}: found '{name}', and {where} has no such column; {did_you_mean(name, names)}"
            )
    if target is None and LABEL not in names:
        raise FedfillError(f"target: found no column '{LABEL}' in {where}; allowed: {', '.join(names)}")
    target = LABEL if target is None else target
    site = DOMAIN_COLUMN if site is None and DOMAIN_COLUMN in names else site
    if site is not None and site in (target, event):
        raise FedfillError(f"site: found '{site}', which is the target; allowed: another column, or none")
    if target == event:
        raise FedfillError(
            f"event: found '{event}', which is the target; allowed: the column that says whether it came"
        )
    told = _target(table, target, where) if event is None else _times(table, target, event, where)
    others = [name for name in names if name not in (target, event, site)]
    columns = {name: found for name in others if (found := _column(table, name)) is not None}
    if not columns:
        raise FedfillError(f"data: {where} has no column beside target and site that a schema can hold")
    document = {"site": site, "target": {"column": target, **told}, "columns": columns}
    schema = from_document({name: part for name, part in document.items() if part is not None}, where)
    if event is not None:  # every row has a time, and its event came or not
        schema.target.labels({name: table.column(name).to_pylist() for name in (target, event)}, f"data: {where}")
    if place is not None:
        write_atomically(place, f"{HEAD}\n{schema.toml()}".encode())
    return schema


def _table(data: Any) -> tuple[Any, str]:
    if is_frame(data):
        return sound(as_arrow(data, "data"), Path("table")), "the table"
    path = path_of("data", data, "a CSV or Parquet file, or a data frame")
    if not path.exists():
        raise FedfillError(f"data: found nothing at {path}; allowed: a CSV or Parquet file, or a folder with train.csv")
    found = find_tables(path)
    if found is None or found[0].suffix.lower() not in (".csv", ".parquet"):
        raise FedfillError(
            f"data: found no table at {path}; allowed: a CSV or Parquet file, or a folder with train.csv"
        )
    return read_table(found[0]), f"'{found[0]}'"


def _column(table: Any, name: str) -> dict[str, Any] | None:
    """A column's entry; None for one that tells nothing, or too much."""
    cells = [cell for cell in table.column(name).to_pylist() if not empty_cell(cell)]
    if len(set(cells)) < 2:
        return None
    truths = all(isinstance(cell, bool) for cell in cells)
    if is_number(table, name) and not truths:
        numbers = np.array(cells, dtype=np.float64)
        low, high = _outward(float(numbers.min()), float(numbers.max()))
        whole = bool((numbers == np.round(numbers)).all())
        return {"kind": "integer" if whole else "real", "low": low, "high": high}
    days = [days_of(cell) for cell in cells] if not truths else [None]
    if None not in days:
        first, last = (date.fromordinal(int(pick(day for day in days if day is not None))) for pick in (min, max))
        return {"kind": "date", "low": date(first.year, 1, 1), "high": date(last.year, 12, 31)}
    words = sorted(set(map(as_word, cells)))
    return {"kind": "category", "values": words} if len(words) <= MOST_CELLS - 2 else None


def _target(table: Any, name: str, where: str) -> dict[str, Any]:
    cells = [cell for cell in table.column(name).to_pylist() if not empty_cell(cell)]
    words = set(map(as_word, cells))
    if len(words) < 2:
        raise FedfillError(
            f"target: column '{name}' of {where} holds {shown(min(words, default=''))} alone; allowed: two or more"
        )
    numbers = is_number(table, name) and not isinstance(cells[0], bool)
    if numbers and (len(words) > FEW or any(cell != int(cell) for cell in cells)):
        low, high = _outward(float(min(cells)), float(max(cells)))
        return {"kind": "number", "low": low, "high": high}
    if not numbers and not is_text(table, name) and not isinstance(cells[0], bool):
        raise FedfillError(f"target: column '{name}' of {where} holds {shown(cells[0])}; allowed: words or numbers")
    return {"values": sorted(words, key=(lambda word: (float(word), word)) if numbers else None)}


def _times(table: Any, name: str, event: str, where: str) -> dict[str, Any]:
    """A target of times: even ones with few digits."""
    column = table.column(name).to_pylist()
    cells = [cell for cell in column if not empty_cell(cell)]
    if cells and is_number(table, name) and min(cells) < 0:
        row = next(k for k, cell in enumerate(column) if not empty_cell(cell) and cell < 0)
        raise FedfillError(
            f"target: column '{name}' of {where} holds {shown(column[row])} in row {row + 1:,}; allowed: a time of 0 or more"
        )
    if not cells or not is_number(table, name) or not any(cells):
        raise FedfillError(
            f"target: column '{name}' of {where} holds no times; allowed with event: numbers of 0 or more, not all of them 0"
        )
    last = float(np.quantile(np.array(cells, dtype=np.float64), SEEN)) or float(max(cells))
    unit = 10.0 ** math.floor(math.log10(last / TIMES))
    step = max(step for step in STEPS if step <= last / TIMES / unit + 1e-9) * unit
    return {"kind": "survival", "event": event, "grid": [float(f"{step * (k + 1):.12g}") for k in range(TIMES)]}


def _outward(low: float, high: float) -> tuple[float, float]:
    """Round bounds around two numbers: to steps of a power of ten that is at most as large as their distance."""
    step = 10.0 ** math.floor(math.log10(high - low))
    ends = math.floor(low / step) * step, math.ceil(high / step) * step
    return float(f"{ends[0]:.12g}"), float(f"{ends[1]:.12g}")
