"""Real tables of many sites: those of the benchmark ``natural``, bundled or in a folder of the user's, and how they are split.

Each has a public schema beside it, ``NAME.toml``; ``sources.toml`` says where it comes from, under which licence, and what was left
out. ``tools/natural.py`` made the bundled ones.
"""

from __future__ import annotations

import functools
import hashlib
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedfill.data.cells import empty_cell
from fedfill.data.schema import Schema, read_schema
from fedfill.data.stratified import set_aside
from fedfill.data.tables import read_table
from fedfill.errors import FedfillError
from fedfill.streams import numpy_stream

PLACE = Path(__file__).parent / "natural_tables"
TEST = 0.3
"""Share of each site's rows that is its test."""
LEAST = 10
"""Sites with fewer rows are left out: what is trained on three rows, and tested on one, tells nothing."""


@dataclass(frozen=True)
class NaturalTable:
    """A table of several sites.

    Attributes:
        name: In fedfill.
        title: What is told of a row, and what the sites are.
        package: The R package that it comes from.
        item: Its name there.
        licence: In words.
        label: How the label was made.
        sha256: Of the bundled file; None: it is not bundled.
        above: The target is whether a number is above this; None: it has words.
    """

    name: str
    title: str
    package: str
    item: str
    licence: str
    label: str
    sha256: str | None
    above: float | None

    @property
    def schema_file(self) -> Path:
        """Its public schema."""
        return PLACE / f"{self.name}.toml"

    @property
    def schema(self) -> Schema:
        """The same, read."""
        return read_schema(self.schema_file)


@functools.cache
def known_tables() -> dict[str, NaturalTable]:
    """All tables by name, the bundled ones first."""
    document = tomllib.loads((PLACE / "sources.toml").read_text())
    fields = ("title", "package", "item", "licence", "label")
    return {
        name: NaturalTable(
            name, **{field: source[field] for field in fields}, sha256=source.get("sha256"), above=source.get("above")
        )
        for name, source in document.items()
    }


def read(table: NaturalTable, folder: Path | None = None) -> Any:
    """The rows of a table.

    Args:
        table: Which.
        folder: Where tables lie that are not bundled, as ``NAME.csv`` or ``NAME.parquet``.

    Returns:
        An Arrow table with the columns of its schema, with its site and its target; of sites with `LEAST` rows or more.

    Raises:
        FedfillError: Where there is none, it is damaged, or it lacks a column.
    """
    schema = table.schema
    if table.sha256 is not None:
        place = PLACE / f"{table.name}.parquet"
        if not place.is_file() or hashlib.sha256(place.read_bytes()).hexdigest() != table.sha256:
            raise FedfillError(f"sets: '{place}' is missing or damaged; install fedfill again")
        return _of_large_sites(read_table(place), schema)
    places = [] if folder is None else [folder / f"{table.name}{suffix}" for suffix in (".csv", ".parquet")]
    if (found := next((place for place in places if place.is_file()), None)) is None:
        where = "no folder was given" if folder is None else f"'{folder}' has neither {table.name}.csv nor .parquet"
        raise FedfillError(
            f"tables: '{table.name}' is not part of fedfill ({table.licence}), and {where}; allowed: a folder with "
            f"{table.item} of the R package {table.package} as {table.name}.csv, see the page on the benchmark"
        )
    return _of_large_sites(_of_user(table, schema, read_table(found), found), schema)


def _of_large_sites(rows: Any, schema: Schema) -> Any:
    """The rows of sites that have `LEAST` of them."""
    import pyarrow as pa

    sites = [str(cell) for cell in rows.column(schema.site).to_pylist()]
    sizes = Counter(sites)
    if not any(size >= LEAST for size in sizes.values()):
        raise FedfillError(f"tables: found no site with {LEAST} rows in column '{schema.site}'; allowed: one or more")
    return rows.filter(pa.array([sizes[site] >= LEAST for site in sites]))


def _of_user(table: NaturalTable, schema: Schema, rows: Any, place: Path) -> Any:
    """A table as its package has it, with names of columns as the schema writes them, and without rows of unknown target."""
    import pyarrow as pa

    rows = rows.rename_columns([re.sub(r"\W+", "_", name.lower()).strip("_") for name in rows.column_names])
    needed = [*([] if schema.site is None else [schema.site]), schema.target.column, *schema.columns]
    if missing := [name for name in needed if name not in rows.column_names]:
        raise FedfillError(
            f"tables: '{place}' has no column '{missing[0]}'; allowed: {table.item} of the R package {table.package}, "
            "with all its columns"
        )
    rows = rows.select(needed)
    cells = rows.column(schema.target.column).to_pylist()
    kept = [not (empty_cell(cell) or cell == "NA") for cell in cells]
    rows, cells = rows.filter(pa.array(kept)), [cell for cell, keep in zip(cells, kept, strict=True) if keep]
    if table.above is not None:
        no, yes = schema.target.values
        try:
            words = [yes if float(cell) > table.above else no for cell in cells]
        except (TypeError, ValueError):
            raise FedfillError(
                f"tables: column '{schema.target.column}' of '{place}' holds a word; allowed: numbers"
            ) from None
        at = rows.column_names.index(schema.target.column)
        rows = rows.set_column(at, schema.target.column, pa.array(words))
    return rows


def divide(rows: Any, schema: Schema, seed: int) -> tuple[Any, Any]:
    """Rows for training and for the test: of each site `TEST`, stratified by class; a class keeps a row for training.

    Args:
        rows: An Arrow table.
        schema: With a site.
        seed: Of the draws.

    Returns:
        Two Arrow tables.
    """
    sites = np.array([str(cell) for cell in rows.column(schema.site).to_pylist()])
    labels = schema.target.labels({schema.target.column: rows.column(schema.target.column).to_pylist()}, "data")
    held = np.zeros(len(sites), dtype=bool)
    for site in np.unique(sites):
        own = np.flatnonzero(sites == site)
        held[own[set_aside(labels[own], TEST, numpy_stream(seed, "natural", str(site)))[1]]] = True
    return rows.filter(~held), rows.filter(held)
