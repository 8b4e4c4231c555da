"""Drafts of schemas: what one site's table looks like, for people to edit and to agree on.

A draft's bounds and values come from records. They are rounded outwards, and private until everybody has agreed on them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfill.data.cells import (
    DOMAIN_COLUMN,
    LABEL,
    LARGEST,
    as_word,
    days_of,
    empty_cell,
    is_number,
    is_text,
    plain_word,
)
from fedfill.data.frames import as_arrow, is_frame
from fedfill.data.schema import Schema, from_document
from fedfill.data.schema_columns import EMPTY, MOST_CELLS, OTHER
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
_PADDED = re.compile(r"0[0-9]+")
"""Digits with a zero before them: a code, perhaps, of which 1 is another one than 01."""
HEAD = """\
# A draft, made from one table. Its bounds, values and kinds come from records, rounded outwards: they are private until all
# sites have agreed on them. Put in what everybody knows without looking: the possible ages, the categories of the form.
# Columns that are left out are not used. bins: cells of equal width for counts. missing = false: no cell may be empty.
# grid, of a target of times: the times at which anything will be told. Make them those that a reader asks for.
"""


@dataclass(frozen=True)
class Draft:
    """A draft of a schema.

    Attributes:
        schema: The draft.
        left_out: By name of a column that it does not have why, in a few words.
        codes: Columns of digits with zeros before some of them, which are taken for words.
    """

    schema: Schema
    left_out: Mapping[str, str]
    codes: tuple[str, ...] = ()

    def toml(self) -> str:
        """The text of its file."""
        head = HEAD
        if self.codes:
            names = ", ".join(map(repr, self.codes))
            head += f"# Words, since zeros before digits may make them codes, so that 01 is not 1: {names}\n"
        if self.left_out:
            head += "# Left out:\n" + "".join(f"#   {name!r}: {why}\n" for name, why in self.left_out.items())
        return f"{head}\n{self.schema.toml()}"


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
        The draft: words and truth values as categories, or as ordered where the type says their order (pandas' ordered categories),
        numbers and dates within rounded bounds; a target of words, of truth values
        or of few whole numbers as classes, of others as a number. Whole numbers of a CSV file of which some have zeros before them, as
        01 has, are words, each as it is written. Columns of more than 998 different words, of what is neither a
        number, a date nor a word, of infinite numbers or such above 1e100, and those that are empty or hold one value alone, are left
        out. The words ``other``, ``missing`` and ``NA`` are no values.

    Raises:
        FedfillError: Where there is no such table or column, or nothing is left to learn from, or the file is there.
    """
    return draft(data, target=target, event=event, site=site, out=out).schema


def draft(
    data: Any,
    *,
    target: str | None = None,
    event: str | None = None,
    site: str | None = None,
    out: str | Path | None = None,
) -> Draft:
    """`describe`, with what it leaves out.

    Args:
        data: As for `describe`.
        target: Likewise.
        event: Likewise.
        site: Likewise.
        out: Likewise.

    Returns:
        The draft.

    Raises:
        FedfillError: Likewise.
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
    others = [name for name in names if name not in (target, event, site)]
    # a run reads words as they are written: TRUE and 01 are not what a guess at their type makes of them
    words = _as_written(data, table, [name for name in (target, *others) if _may_be_words(table, name)])
    told = _target(table, words, target, where) if event is None else _times(table, target, event, where)
    found = {name: _column(table, words, name) for name in others}
    columns = {name: one for name, one in found.items() if not isinstance(one, str)}
    if not columns:
        raise FedfillError(f"data: {where} has no column beside target and site that a schema can hold")
    document = {"site": site, "target": {"column": target, **told}, "columns": columns}
    schema = from_document({name: part for name, part in document.items() if part is not None}, where)
    if event is not None:  # every row has a time, and its event came or not
        schema.target.labels({name: table.column(name).to_pylist() for name in (target, event)}, f"data: {where}")
    codes = tuple(name for name in (target, *columns) if name in schema.words and _padded(table, words, name))
    made = Draft(schema, {name: one for name, one in found.items() if isinstance(one, str)}, codes)
    if place is not None:
        write_atomically(place, made.toml().encode())
    return made


def _table(data: Any) -> tuple[Any, str]:
    if is_frame(data):
        return sound(as_arrow(data, "data"), Path("table")), "the table"
    file = _file(data)
    return read_table(file), f"'{file}'"


def _file(data: Any) -> Path:
    """The file of a table, of a place that a user names."""
    path = path_of("data", data, "a CSV or Parquet file, or a data frame")
    if not path.exists():
        raise FedfillError(f"data: found nothing at {path}; allowed: a CSV or Parquet file, or a folder with train.csv")
    found = find_tables(path)
    if found is None or found[0].suffix.lower() not in (".csv", ".parquet"):
        raise FedfillError(
            f"data: found no table at {path}; allowed: a CSV or Parquet file, or a folder with train.csv"
        )
    return found[0]


def _may_be_words(table: Any, name: str) -> bool:
    """Whether a column may hold words: anything but lists, records and bytes."""
    import pyarrow as pa

    kind = table.schema.field(name).type
    return not (pa.types.is_nested(kind) or "binary" in str(kind) or pa.types.is_null(kind))


def _as_written(data: Any, table: Any, names: Sequence[str]) -> dict[str, list[str]]:
    """The words of columns, a list for each, without those of empty cells, as a run reads them: of CSV as they stand there."""
    written = table
    if not is_frame(data) and (file := _file(data)).suffix.lower() == ".csv":
        written = read_table(file, names)
    found = {}
    for name in names:
        pairs = zip(table.column(name).to_pylist(), written.column(name).to_pylist(), strict=True)
        found[name] = [as_word(word) for cell, word in pairs if not empty_cell(cell)]
    return found


def _column(table: Any, words: Mapping[str, list[str]], name: str) -> dict[str, Any] | str:
    """A column's entry; of one that tells nothing, or too much, or what is no cell, why it is left out."""
    if name not in words:
        kind = table.schema.field(name).type
        return f"holds no numbers, dates or words, but is of type {kind}" if str(kind) != "null" else "is empty"
    cells = [cell for cell in table.column(name).to_pylist() if not empty_cell(cell)]
    padded = _padded(table, words, name)
    if len(set(words[name] if padded else cells)) < 2:
        return "holds one value alone" if cells else "is empty"
    truths = all(isinstance(cell, bool) for cell in cells)
    if is_number(table, name) and not truths and not padded:
        numbers = np.array(cells, dtype=np.float64)
        if (why := _beyond(numbers)) is not None:
            return why
        low, high = _outward(float(numbers.min()), float(numbers.max()))
        whole = bool((numbers == np.round(numbers)).all())
        return {"kind": "integer" if whole else "real", "low": low, "high": high}
    days = [days_of(cell) for cell in cells] if not (truths or padded) else [None]
    if None not in days:
        first, last = (date.fromordinal(int(pick(day for day in days if day is not None))) for pick in (min, max))
        return {"kind": "date", "low": date(first.year, 1, 1), "high": date(last.year, 12, 31)}
    ordered = _in_order(table, name)
    values = [word for word in ordered or _values(table, words, name) if word not in (OTHER, *EMPTY)]
    if len(values) > MOST_CELLS - 2:
        return f"holds {len(values):,} different words, and a category has {MOST_CELLS - 2:,} at most"
    return (
        {"kind": "ordered" if ordered else "category", "values": values}
        if values
        else "holds no word but such as stand for others or for empty cells"
    )


def _values(table: Any, words: Mapping[str, list[str]], name: str) -> list[str]:
    """The different words of a column; where they are no text, those that mean the same are one."""
    found = sorted(set(words[name]))
    if not (is_text(table, name) or _padded(table, words, name)):
        found = sorted({plain_word(word): word for word in reversed(found)}.values())
    return found


def _in_order(table: Any, name: str) -> list[str]:
    """The words of a column whose type says their order, as pandas' ordered categories do; of another one none."""
    import pyarrow as pa

    kind = table.schema.field(name).type
    if not (pa.types.is_dictionary(kind) and kind.ordered):
        return []
    found = table.column(name).unify_dictionaries().chunk(0).dictionary.to_pylist()
    return list(dict.fromkeys(as_word(word) for word in found if not empty_cell(word)))


def _padded(table: Any, words: Mapping[str, list[str]], name: str) -> bool:
    """Whether a column that looks like numbers holds digits with zeros before them."""
    return is_number(table, name) and any(_PADDED.fullmatch(word) for word in words.get(name, ()))


def _beyond(numbers: NDArray[np.float64]) -> str | None:
    """Why some numbers can't be computed with; None where they can."""
    if not np.isfinite(numbers).all():
        return "holds an infinite number"
    if (largest := float(np.abs(numbers).max())) > LARGEST:
        return f"holds a number of size {largest:.4g}, and {LARGEST:.0g} is the largest"
    if float(numbers.max()) - float(numbers.min()) < 1 / LARGEST:
        return f"holds numbers that are less than {1 / LARGEST:.0g} apart"
    return None


def _target(table: Any, words: Mapping[str, list[str]], name: str, where: str) -> dict[str, Any]:
    cells = [cell for cell in table.column(name).to_pylist() if not empty_cell(cell)]
    padded = _padded(table, words, name)
    numbers = is_number(table, name) and not padded and not (cells and isinstance(cells[0], bool))
    if name not in words or not (
        numbers or padded or is_text(table, name) or isinstance(next(iter(cells), True), bool)
    ):
        raise FedfillError(
            f"target: column '{name}' of {where} holds {shown(cells[0]) if cells else 'nothing'}; allowed: words or numbers"
        )
    values = _values(table, words, name)
    if len(values) < 2:
        raise FedfillError(
            f"target: column '{name}' of {where} holds {shown(min(values, default=''))} alone; allowed: two or more"
        )
    if numbers and (why := _beyond(np.array(cells, dtype=np.float64))) is not None:
        raise FedfillError(f"target: column '{name}' of {where} {why}; allowed: words, or numbers of at most that size")
    if numbers and (len(values) > FEW or any(cell != int(cell) for cell in cells)):
        low, high = _outward(float(min(cells)), float(max(cells)))
        return {"kind": "number", "low": low, "high": high}
    return {"values": sorted(values, key=(lambda word: (float(word), word)) if numbers else None)}


def _times(table: Any, name: str, event: str, where: str) -> dict[str, Any]:
    """A target of times: even ones with few digits."""
    column = table.column(name).to_pylist()
    cells = [cell for cell in column if not empty_cell(cell)]
    if cells and is_number(table, name) and min(cells) < 0:
        row = next(k for k, cell in enumerate(column) if not empty_cell(cell) and cell < 0)
        raise FedfillError(
            f"target: column '{name}' of {where} holds {shown(column[row])} in row {row + 1:,}; allowed: a time of 0 or more"
        )
    if cells and is_number(table, name) and not np.isfinite(np.array(cells, dtype=np.float64)).all():
        raise FedfillError(f"target: column '{name}' of {where} holds an infinite number; allowed: times")
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
    below, above = math.floor(low / step) * step, math.ceil(high / step) * step
    for digits in (12, 17):  # few, unless the numbers are large and near each other
        ends = float(f"{below:.{digits}g}"), float(f"{above:.{digits}g}")
        if ends[0] <= low and high <= ends[1]:
            return ends
    return low, high
