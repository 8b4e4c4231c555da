"""Cells of an Arrow table's columns as numbers or words, or one sentence on what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfill.errors import FedfillError, first_line

LABEL = "label"
DOMAIN_COLUMN = "domain"

LARGEST = 1e100
"""The largest size of a number: the squares of larger ones have no place in a float."""

SHORT = 60
"""Letters that are told of a cell at the most: a quotation mark that is left open takes the rest of a row into one."""

_TORN = re.compile(r"CSV parse error: (?:Row #(\d+): )?Expected (\d+) columns, got (\d+): ", re.DOTALL)
"""What Arrow says of a row with too many cells or too few, before the whole of it."""

_NUMBER = re.compile(r"([+-])?([0-9]+)(?:\.([0-9]*))?")
"""A number as tables write one that is a code or a class."""


def is_number(table: Any, name: str) -> bool:
    """Whether a column holds numbers or truth values."""
    import pyarrow as pa

    kind = table.schema.field(name).type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def is_index(table: Any, name: str) -> bool:
    """Whether a column holds whole numbers, perhaps as categories."""
    import pyarrow as pa

    kind = table.schema.field(name).type
    return bool(pa.types.is_integer(kind.value_type if pa.types.is_dictionary(kind) else kind))


def is_text(table: Any, name: str) -> bool:
    """Whether a column holds words, perhaps as categories."""
    import pyarrow as pa

    kind = table.schema.field(name).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    # the last is what Polars gives; not every Arrow has a function that knows it
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view")


def cell_numbers(table: Any, name: str, file: Path) -> NDArray[np.float64]:
    """The numbers of a column, ``[n]``.

    Args:
        table: An Arrow table.
        name: The column's.
        file: Where the table came from, for errors.

    Returns:
        Truth values are 0 and 1.

    Raises:
        FedfillError: Where a cell is empty, or is no number that can be computed with.
    """
    if not is_number(table, name):
        kind = table.schema.field(name).type
        raise FedfillError(
            f"data: column '{name}' of '{file}' is of type {kind}, but the training table has numbers there"
        )
    _check_whole(table.column(name).null_count, name, file)
    values: NDArray[np.float64] = table.column(name).to_numpy().astype(np.float64)
    if not np.isfinite(values).all():
        raise FedfillError(f"data: column '{name}' of '{file}' holds NaN or infinite values")
    if (largest := float(np.abs(values).max())) > LARGEST:
        raise FedfillError(
            f"data: column '{name}' of '{file}' holds a number of size {largest:.4g}; allowed: up to {LARGEST:.0g}"
        )
    return values


def cell_words(table: Any, name: str, file: Path) -> NDArray[np.str_]:
    """The words of a column, ``[n]``, as `cell_numbers`; whole numbers and truth values are read as words."""
    import pyarrow as pa

    kind = table.schema.field(name).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(table, name)):
        needed = "words or whole numbers" if name in (LABEL, DOMAIN_COLUMN) else "words or numbers"
        hint = "; is the file's text in UTF-8?" if pa.types.is_binary(kind) and file.suffix.lower() == ".csv" else ""
        raise FedfillError(f"data: column '{name}' of '{file}' is of type {kind}, but {needed} are needed{hint}")
    cells = table.column(name).to_pylist()
    if name == DOMAIN_COLUMN:  # blanks around a name would make another domain of it
        cells = [cell.strip() if isinstance(cell, str) else cell for cell in cells]
    # an empty cell among words is read as a word of no letters
    _check_whole(sum(cell is None or cell == "" for cell in cells), name, file)
    return np.array([str(cell) for cell in cells])


def _check_whole(empty: int, name: str, file: Path) -> None:
    if empty:
        raise FedfillError(
            f"data: column '{name}' of '{file}' has {empty:,} empty cell{'s' if empty > 1 else ''}; fill them or leave their rows out"
        )


def told_cell(cell: Any) -> str:
    """A cell in an error, or its beginning: an error may be read by whom the rest of the row is none of their business."""
    if empty_cell(cell):
        return "nothing"
    return f"'{_cut(as_word(cell))}'"


def without_rows(error: Exception) -> str:
    """What Arrow says of a table that it can't read, without the content of a row.

    Args:
        error: Arrow's, or the operating system's.

    Returns:
        A part of a sentence: of a torn row its number, where Arrow tells it, and how many cells it has; of anything else the first
        line, with a value in it cut.
    """
    if torn := _TORN.match(str(error)):
        number, columns, cells = torn.groups()
        row = "a row" if number is None else f"row {int(number):,}, the header being the first,"
        return (
            f"{row} has {int(cells):,} cell{'s' if int(cells) != 1 else ''}, and the header {int(columns):,}; allowed: as many as the "
            "header, and a cell with a comma in it in quotation marks"
        )
    text = first_line(error)
    head, quoted, rest = text.partition("'")
    if isinstance(error, OSError) or not quoted:
        return text
    value, closed, tail = rest.rpartition("'")  # a value may hold such marks, and the line may end within it
    return f"{head}'{_cut(value if closed else rest)}'{tail if closed else ''}"


def _cut(text: str) -> str:
    line, *more = text.splitlines() or [""]
    return line if len(line) <= SHORT and not more else f"{line[:SHORT]}..."


def empty_cell(cell: Any) -> bool:
    """Whether a cell is empty: none, no letters, or NaN."""
    return cell is None or cell == "" or cell != cell  # NaN alone differs from itself


def as_word(cell: Any) -> str:
    """A cell as a word; a number that is whole has no point, as CSV and Parquet may differ in that."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def plain_word(word: str) -> str:
    """A word as it is compared where its spelling is none of those allowed: truth values in small letters, numbers by their value."""
    if (small := word.lower()) in ("true", "false"):
        return small
    if (found := _NUMBER.fullmatch(word)) is None:
        return word
    sign, whole, part = found.groups("")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    number = f"{whole}.{part}" if part else whole
    return f"-{number}" if sign == "-" and number != "0" else number


def positions(cells: Iterable[Any], values: Sequence[str]) -> list[int]:
    """Where the words of cells stand among those that are allowed.

    Args:
        cells: Of Arrow's ``to_pylist``.
        values: What is allowed.

    Returns:
        One for each cell: of the same word, or else of the only one that is the same as a `plain_word`, as R writes ``TRUE`` and Python
        ``True``, and CSV has ``1.0`` or ``01`` where Parquet has 1; -1 of an empty cell, and where there is none.
    """
    exact = {value: k for k, value in enumerate(values)}
    plain: dict[str, int] = {}
    for k, value in enumerate(values):
        word = plain_word(value)
        plain[word] = -1 if word in plain else k
    found: dict[str, int] = {}
    places = []
    for cell in cells:
        word = "" if empty_cell(cell) else as_word(cell)
        if word not in found:
            found[word] = exact[word] if word in exact else plain.get(plain_word(word), -1)
        places.append(found[word])
    return places


def finite_number(cell: Any) -> float | None:
    """A cell as a number; None where it is none, or infinite, or NaN."""
    try:
        value = float(cell)
    except (TypeError, ValueError):
        return None
    return value if np.isfinite(value) else None


def days_of(cell: Any) -> float | None:
    """Days since the year 1 of a date, of a moment, or of a text that begins with one; None of anything else."""
    if isinstance(cell, date):  # a moment is one, too
        return float(cell.toordinal())
    try:
        return float(date.fromisoformat(str(cell)[:10]).toordinal())
    except ValueError:
        return None
