"""Cells of a table that are not as its schema has them: other words, and numbers beyond the bounds, which are read without an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfill.data.cells import empty_cell, positions
from fedfill.data.schema import Schema
from fedfill.data.schema_columns import EMPTY, Column

SHARE = 0.05
"""More than this share of a column's cells is told of."""
MOST = 0.5
"""And more than this share of those of one site, with the site's name."""
NAMED = 3
"""How many sites are named for one column."""


def strays(schema: Schema, table: Any) -> dict[str, NDArray[np.bool_]]:
    """Which cells are not as the schema has them.

    Args:
        schema: Of the table.
        table: An Arrow table that `Schema.prepared` reads.

    Returns:
        ``[n]`` by column: True where a word is none of its values, or a number or a date lies beyond its bounds. Empty cells never are.
    """
    return {name: _strayed(column, table, name) for name, column in schema.columns.items()}


def told(schema: Schema, found: Sequence[tuple[NDArray[np.str_], Mapping[str, NDArray[np.bool_]]]]) -> str:
    """A sentence on columns of many such cells; none where there are no such columns.

    Args:
        schema: Of the tables.
        found: Of each table the names of its rows' sites, ``[n]``, and its `strays`.

    Returns:
        Shares in per cent, and no cell.
    """
    said = []
    sites = np.concatenate([own for own, _ in found])
    for name, column in schema.columns.items():
        strayed = np.concatenate([masks[name] for _, masks in found])
        shares = {str(site): float(strayed[sites == site].mean()) for site in np.unique(sites)}
        many = [f"{site}: {share:.0%}" for site, share in shares.items() if share > MOST] if len(shares) > 1 else []
        if (share := float(strayed.mean())) > SHARE or many:
            which = f" ({', '.join(many[:NAMED])}{', ...' if len(many) > NAMED else ''})" if many else ""
            said.append(f"{share:.0%} of '{name}'{which} {_becoming(column)}")
    return f"Not as the schema has it: {'; '.join(said)}." if said else ""


def _becoming(column: Column) -> str:
    if column.kind in ("category", "ordered"):
        return f"are words that it lacks, and count as {'other' if column.is_words else 'empty'}"
    return "lie beyond its bounds, and count as these"


def _strayed(column: Column, table: Any, name: str) -> NDArray[np.bool_]:
    cells = table.column(name).to_pylist()
    if column.kind in ("category", "ordered"):
        unknown = np.array(positions(cells, column.values)) < 0
        for row in np.flatnonzero(unknown):
            unknown[row] = not (empty_cell(cells[row]) or cells[row] in EMPTY)
        return unknown
    numbers, (low, high) = column.unclipped(cells, name, "data"), column.bounds
    return np.asarray((numbers < low) | (numbers > high))
