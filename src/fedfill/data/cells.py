"""Cells of an Arrow table's columns as numbers or words, or one sentence on what is wrong with them."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfill.errors import FedfillError

LABEL = "label"
DOMAIN_COLUMN = "domain"

LARGEST = 1e100
"""The largest size of a number: the squares of larger ones have no place in a float."""


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
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


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


def empty_cell(cell: Any) -> bool:
    """Whether a cell is empty: none, no letters, or NaN."""
    return cell is None or cell == "" or cell != cell  # NaN alone differs from itself


def as_word(cell: Any) -> str:
    """A cell as a word; a number that is whole has no point, as CSV and Parquet may differ in that."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


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
