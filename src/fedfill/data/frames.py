"""Tables in memory: data frames with a column `label`, or with labels beside them, alone, one for each domain or for each client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedfill.data.cells import DOMAIN_COLUMN, LABEL, is_number, without_rows
from fedfill.data.columns import Columns
from fedfill.data.dataset import Part, Source, join, label_array, refuse_fraction, source_of, together, too_few
from fedfill.data.schema import Schema
from fedfill.data.tables import fitted, note_of, of_tables, part_by, sound
from fedfill.errors import FedfillError, first_line, shown

FILES = (Path("table"), Path("test table"))
"""What the tables are called in errors."""


def is_frame(data: Any) -> bool:
    """Whether it is a table in memory: a pandas DataFrame, an Arrow table, or what gives one, such as a Polars DataFrame."""
    return hasattr(data, "columns") and (hasattr(data, "iloc") or hasattr(data, "__arrow_c_stream__"))


def holds_frame(data: Any) -> bool:
    """Whether it is a table, or a tuple, list or dict with one in it."""
    if isinstance(data, list | dict):
        return any(map(holds_frame, data.values() if isinstance(data, dict) else data))
    return is_frame(data[0] if isinstance(data, tuple) and data else data)


def as_arrow(data: Any, where: str) -> Any:
    """The Arrow table of a table in memory; an index is no column of it."""
    import pyarrow as pa

    try:
        if hasattr(data, "iloc"):
            return pa.Table.from_pandas(data, preserve_index=False)
        return _with_strings(pa.table(data))
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise FedfillError(f"{where}: the rows can't be read as a table: {without_rows(error)}") from error


def _with_strings(table: Any) -> Any:
    """A table whose words are of a type that Arrow can join, compare and cast: those of Polars can't be, least of all as categories."""
    import pyarrow as pa

    for k, name in enumerate(table.column_names):
        kind = table.schema.field(k).type
        if str(kind.value_type if pa.types.is_dictionary(kind) else kind) == "string_view":
            table = table.set_column(k, name, pa.array(table.column(k).to_pylist(), pa.string()))
    return table


def from_frames(
    data: Any, name: str, class_names: Sequence[str] | None, schema: Schema | None = None,
    test_fraction: float | None = None,
) -> Source | list[Source]:  # fmt: skip
    """A source from tables, or for a list one source per client; columns, classes and scaling are those of all together.

    Args:
        data: A table with a column `label`; ``(table, test table)``; ``(table, labels)`` or ``(table, labels, test table, test
            labels)``; or a dict of these by domain, or a list of them by client.
        name: What to call it.
        class_names: As for `fedfill.data.tables.of_tables`.
        schema: What the columns hold, the target and the site among them; None: as the training table says.
        test_fraction: As for `fedfill.data.dataset.source_of`.

    Returns:
        The source or sources.

    Raises:
        FedfillError: Where the tables don't fit together, or one can't be read.
    """
    if isinstance(data, list):
        wheres = [f"data of client {client}" for client in range(len(data))]
        return _by_client(data, wheres, name, class_names, schema, test_fraction)
    if isinstance(data, dict):
        wheres = [f"data of domain '{domain}'" for domain in data]
        parts, columns, note = _parts([*data.values()], wheres, class_names, schema)
        domains = [str(domain).strip() for domain in data]
        if twice := next((domain for domain in domains if domains.count(domain) > 1), None):
            raise FedfillError(f"data: the domain '{twice}' is there twice")
        by_domain = dict(zip(domains, parts, strict=True))
        return fitted(join(name, "data", by_domain, test_fraction=test_fraction), columns, note)
    ((train, test),), columns, note = _parts([data], ["data"], class_names, schema, domains=True)
    return fitted(source_of(name, "data", train, test, test_fraction=test_fraction), columns, note)


def _parts(
    data: Sequence[Any],
    wheres: Sequence[str],
    class_names: Sequence[str] | None,
    schema: Schema | None,
    domains: bool = False,
) -> tuple[list[tuple[Part, Part | None]], Columns, str]:
    """The parts of each table, or of each with its test table; with their columns and a sentence on these."""
    items = list(zip(data, wheres, strict=True))
    if schema is None:
        return _read([_pair(item, where) for item, where in items], wheres, class_names, domains)
    parts = [_by_schema(item, where, schema, domains) for item, where in items]
    everything = [part for pair in parts for part in pair if part is not None]
    return parts, schema.encoding(), note_of(schema, everything)


def _by_schema(data: Any, where: str, schema: Schema, domains: bool) -> tuple[Part, Part | None]:
    """The parts of a table, alone or with its test table, whose columns were agreed on before."""
    pair = data if isinstance(data, tuple) and len(data) == 2 else (data,)
    if not all(map(is_frame, pair)):
        raise FedfillError(f"{where}: found {shown(data)} with a schema; allowed: a table, or (table, test table)")
    parts = []
    for frame, place in zip(pair, (where, f"{where}, test set"), strict=False):
        if not len(table := as_arrow(frame, place)):
            raise FedfillError(f"{place}: found a table without rows; allowed: one row or more")
        parts.append(part_by(schema, table, place, sited=domains))
    return parts[0], parts[1] if len(parts) > 1 else None


def _by_client(
    data: Sequence[Any],
    wheres: Sequence[str],
    name: str,
    class_names: Sequence[str] | None,
    schema: Schema | None,
    test_fraction: float | None,
) -> list[Source]:
    """One source for each client, scaled alike."""
    parts, columns, note = _parts(data, wheres, class_names, schema)
    everyone = sum(len(part.samples) for pair in parts for part in pair if part is not None)
    refuse_fraction(test_fraction, "data", [test for _, test in parts])
    raw = [
        source_of(name, where, *pair, everyone=everyone, test_fraction=test_fraction)
        for where, pair in zip(wheres, parts, strict=True)
    ]
    if not any(len(source.test) for source in raw):
        raise FedfillError(too_few("data", "samples of each client", test_fraction))
    columns = columns.fitted(together([source.train for source in raw]).inputs)
    return [
        replace(
            one, train=columns.samples(one.train, where), test=columns.samples(one.test, f"{where}, test set"),
            note=f"{one.note} {note}", columns=columns,
        )
        for one, where in zip(raw, wheres, strict=True)
    ]  # fmt: skip


def _pair(data: Any, where: str) -> tuple[Any, Any]:
    """The training table and, where there is one, the test table, as Arrow tables with a column `label`."""
    if is_frame(data):
        return as_arrow(data, where), None
    if isinstance(data, tuple) and is_frame(data[0] if data else None):
        if len(data) == 2 and is_frame(data[1]):
            first, second = as_arrow(data[0], where), as_arrow(data[1], f"{where}, test set")
            if LABEL in first.column_names and LABEL not in second.column_names:
                raise FedfillError(
                    f"{where}: found a table with a column '{LABEL}' and a second one without; allowed: a test table with a column '{LABEL}'"
                )
            if LABEL in second.column_names and (LABEL in first.column_names or len(second.column_names) > 1):
                return first, second
        if len(data) == 2:
            return _labelled(*data, where), None
        if len(data) == 4 and is_frame(data[2]):
            return _labelled(*data[:2], where), _labelled(*data[2:], f"{where}, test set")
    raise FedfillError(
        f"{where}: found {type(data).__name__} beside a table; allowed: a table with a column '{LABEL}', (table, test table), (table, "
        "labels) or (table, labels, test table, test labels), for each alike"
    )


def _labelled(frame: Any, labels: Any, where: str) -> Any:
    """A table and its labels as one."""
    import pyarrow as pa

    table = as_arrow(frame, where)
    if LABEL in table.column_names:
        raise FedfillError(f"{where}: found labels beside a table that has a column '{LABEL}'; allowed: one of the two")
    if is_frame(labels) and len((beside := as_arrow(labels, where)).column_names) == 1:
        labels = beside.column(0).to_numpy()
    array = label_array(labels, where)
    if array.shape != (len(table),):
        raise FedfillError(
            f"{where}: found labels of shape {list(array.shape)} for {len(table):,} rows; allowed: one for each"
        )
    try:
        return table.append_column(LABEL, pa.array(array, from_pandas=True))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise FedfillError(
            f"{where}: the labels can't be read ({first_line(error)}); allowed: words or whole numbers"
        ) from error


def _read(
    pairs: Sequence[tuple[Any, Any]],
    wheres: Sequence[str],
    class_names: Sequence[str] | None,
    domains: bool,
) -> tuple[list[tuple[Part, Part | None]], Columns, str]:
    """The parts of each table, read as one table, in their own units; with their columns and a sentence on these."""
    trains = [train for train, _ in pairs]
    tests = [test for _, test in pairs if test is not None]
    tested = [f"{where}, test set" for (_, test), where in zip(pairs, wheres, strict=True) if test is not None]
    joined = [_joined(tables, whose, domains) for tables, whose in ((trains, wheres), (tests, tested)) if tables]
    files = FILES[: len(joined)]
    tables = [sound(table, file) for table, file in zip(joined, files, strict=True)]
    try:
        train, test, columns, note = of_tables(tables, files, "data", class_names)
    except FedfillError:
        if len(pairs) > 1:
            _name_the_one(pairs, wheres, class_names)
        raise

    def cut(part: Part | None, sizes: Sequence[int]) -> list[Part]:
        ends = [0, *accumulate(sizes)]
        if part is None or len(sizes) == 1:
            return [] if part is None else [part]
        return [part.at(np.arange(a, b)) for a, b in pairwise(ends)]

    own, held = cut(train, list(map(len, trains))), iter(cut(test, list(map(len, tests))))
    found = [(one, None if pair[1] is None else next(held)) for one, pair in zip(own, pairs, strict=True)]
    return found, columns, note


def _name_the_one(pairs: Sequence[tuple[Any, Any]], wheres: Sequence[str], class_names: Sequence[str] | None) -> None:
    """Raise the error of the first of several tables that can't be read by itself, with its name; none where all can be."""
    for pair, where in zip(pairs, wheres, strict=True):
        for table, what in zip(pair, FILES, strict=True):
            if table is not None:
                file = Path(f"{what}{where.removeprefix('data')}")
                of_tables([sound(_plain(table), file)], [file], "data", class_names)


def _joined(tables: Sequence[Any], wheres: Sequence[str], domains: bool) -> Any:
    """One table below the other."""
    import pyarrow as pa

    if not domains:  # each is one domain's or one client's, whatever its rows say
        tables = [_plain(table) for table in tables]
    if len(tables) == 1:
        return tables[0]
    names = tables[0].column_names
    for table, where in zip(tables, wheres, strict=True):
        if odd := sorted(set(table.column_names) ^ set(names)):
            raise FedfillError(
                f"{where}: only this table or the first one has a column '{odd[0]}'; allowed: the same for all"
            )
        if not len(table):
            raise FedfillError(f"{where}: found a table without rows; allowed: one row or more")
        for name in names:
            if is_number(table, name) != is_number(tables[0], name):
                kinds = [one.schema.field(name).type for one in (table, tables[0])]
                raise FedfillError(
                    f"{where}: its column '{name}' is of type {kinds[0]}, and that of the first table of type {kinds[1]}; allowed: numbers "
                    "in all, or words in all"
                )
    plain = [pa.table([_decoded(table.column(name)) for name in names], names=names) for table in tables]
    try:
        return pa.concat_tables(plain, promote_options="permissive")
    except pa.ArrowException as error:
        raise FedfillError(f"data: the tables' columns are of different kinds: {without_rows(error)}") from error


def _plain(table: Any) -> Any:
    """A table without its column of domains."""
    return table.drop_columns([DOMAIN_COLUMN]) if DOMAIN_COLUMN in table.column_names else table


def _decoded(column: Any) -> Any:
    """Categories as their words: each table numbers its own."""
    import pyarrow as pa

    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
