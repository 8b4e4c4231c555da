"""Tables on disk: CSV or Parquet with numbers and categories in columns, as float inputs ``[n, features]``.

The column `label` is the class and the column `domain`, where there is one, the domain. Every other column is an input: numbers
first, then each column of words as one input per word that the training table has (one-hot), both in the table's order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfill.data.cells import DOMAIN_COLUMN, LABEL, cell_words, is_index, is_number, is_text, told_cell, without_rows
from fedfill.data.columns import Columns
from fedfill.data.dataset import Part, Source, check_labels, in_order, numbered
from fedfill.data.parquet import IMAGE_COLUMNS
from fedfill.data.samples import Samples
from fedfill.data.schema import Schema
from fedfill.data.strays import strays, told
from fedfill.errors import FedfillError, did_you_mean
from fedfill.files import check_regular

MOST_WORDS = 1000
"""The most different words of one column; more are names or dates, not categories."""


def find_tables(place: Path) -> tuple[Path, Path | None] | None:
    """The training table at a place, and the test table where there is one; None where there is no table.

    Args:
        place: A file, or a folder with ``train.csv`` or ``train.parquet`` and perhaps the same for ``test``.

    Returns:
        The files.

    Raises:
        FedfillError: Where there are two of one name, or of two kinds.
    """
    if place.is_file():
        return place, None
    for split in ("train", "test"):
        shards = [*place.glob(f"{split}.parquet"), *sorted(place.glob(f"{split}-*-of-*.parquet"))]
        if shards and (place / f"{split}.csv").is_file():
            raise FedfillError(
                f"data: '{place / split}.csv' and '{shards[0].name}' lie side by side, which may be the same samples twice; remove one"
            )
    for suffix in (".csv", ".parquet"):
        train, test = (place / f"{split}{suffix}" for split in ("train", "test"))
        if train.is_file() and (suffix == ".csv" or _is_table(train)):
            other = place / ("test.parquet" if suffix == ".csv" else "test.csv")
            if other.is_file():
                raise FedfillError(
                    f"data: '{train}' and '{other.name}' are files of two kinds; allowed: both CSV or both Parquet"
                )
            return train, test if test.exists() else None
    return None


def read_tables(
    train: Path, test: Path | None, where: str, schema: Schema | None = None, sited: bool = True
) -> tuple[Part, Part | None, Columns, str]:
    """The samples of a training table and perhaps a test table.

    Args:
        train: A CSV or Parquet file.
        test: Another with the same columns.
        where: The beginning of an error sentence.
        schema: What the columns hold; None: as the training table says.
        sited: Whether the schema's column of the site is read; False where all rows are one site's.

    Returns:
        The parts, with float64 inputs in the table's own units, their columns, and a sentence on what these were taken for.

    Raises:
        FedfillError: Where a file can't be read, a cell is empty, or a column is neither numbers nor words.
    """
    files = [train] if test is None else [train, test]
    if schema is not None:
        parts = [part_by(schema, read_table(file, schema.words), f"data: '{file}'", sited) for file in files]
        return parts[0], parts[1] if len(parts) > 1 else None, schema.encoding(), note_of(schema, parts)
    tables = [read_table(train)]
    if test is not None:
        # types guessed from the test file alone would make numbers or truth values of the training table's words
        tables.append(read_table(test, [name for name in tables[0].column_names if is_text(tables[0], name)]))
    return of_tables(tables, files, where)


def of_tables(
    tables: Sequence[Any],
    files: Sequence[Path],
    where: str,
    class_names: Sequence[str] | None = None,
) -> tuple[Part, Part | None, Columns, str]:
    """`read_tables` of Arrow tables, the training table and perhaps the test table.

    Args:
        tables: One or two.
        files: Where they came from, for errors.
        where: The beginning of an error sentence.
        class_names: The classes in the order of their indices; whole numbers in the column `label` are then such indices. None: as
            the training table has them.

    Returns:
        As `read_tables`.

    Raises:
        FedfillError: Likewise.
    """
    train = files[0]
    columns = tables[0].column_names
    for file, table in zip(files, tables, strict=True):
        if LABEL not in table.column_names:
            near = next((name for name in table.column_names if name.strip().lower() == LABEL), None)
            hint = f"; did you mean '{near}'? Call it '{LABEL}'" if near else ""
            hint = hint or "; a schema (schema_file) says which column is to be told"
            raise FedfillError(f"data: '{file}' has no column '{LABEL}', only {', '.join(table.column_names)}{hint}")
        if set(table.column_names) != set(columns):
            odd = min(set(table.column_names) ^ set(columns))
            raise FedfillError(f"{where}: '{train}' and '{file}' must have the same columns, but only one has '{odd}'")
    inputs = [name for name in columns if name not in (LABEL, DOMAIN_COLUMN)]
    numeric = [name for name in inputs if is_number(tables[0], name)]
    words = {name: in_order(cell_words(tables[0], name, train)) for name in inputs if name not in numeric}
    for name, found in words.items():
        if len(found) > MOST_WORDS:
            raise FedfillError(
                f"data: column '{name}' of '{train}' has {len(found):,} different words, but a category has {MOST_WORDS:,} at "
                "most; leave the column out"
            )
    if not inputs:
        raise FedfillError(f"data: '{train}' has no column beside '{LABEL}' and '{DOMAIN_COLUMN}' to learn from")
    names = tuple(class_names or in_order(cell_words(tables[0], LABEL, train)))
    known = Columns(tuple(numeric), {name: tuple(found) for name, found in words.items()})
    parts: list[Part] = []
    for file, table in zip(files, tables, strict=True):
        for name in words:
            if is_text(tables[0], name) and is_number(table, name):
                raise FedfillError(
                    f"data: column '{name}' of '{file}' is of type {table.schema.field(name).type}, but the training "
                    "table has words there"
                )
        values = known.values(table, file)
        labels = cell_words(table, LABEL, file)
        if class_names is not None and is_index(table, LABEL):
            kind = table.schema.field(LABEL).type
            indices = table.column(LABEL).cast(getattr(kind, "value_type", kind)).to_numpy()
            check_labels(indices, names, f"data: '{file}'")
            indices = indices.astype(np.int64)
        else:
            indices = numbered(labels, names, f"data: '{file}'")
        samples = Samples(values, torch.from_numpy(indices))
        origin = cell_words(table, DOMAIN_COLUMN, file) if DOMAIN_COLUMN in columns else None
        parts.append(Part(samples, names, f"data: '{file}'", origin))
    said = [f"{len(numeric):,} of numbers ({_few(numeric)})"] if numeric else []
    counted = [f"{name}: {len(found):,}" for name, found in words.items()]
    said += [f"{len(words):,} of words ({_few(counted)})"] if words else []
    note = f"Columns: {' and '.join(said)}{', one input for each word' if words else ''}."
    return parts[0], parts[1] if len(parts) > 1 else None, known, note


def part_by(schema: Schema, table: Any, where: str, sited: bool = True) -> Part:
    """The samples of a table whose columns were agreed on before.

    Args:
        schema: What they hold.
        table: An Arrow table.
        where: The beginning of an error's sentence.
        sited: Whether the column of the site is read; False where all rows are one site's.

    Returns:
        The part, with float64 inputs.

    Raises:
        FedfillError: Where a column is missing, or a cell is empty or of another kind where it may not be.
    """
    ready, labels = schema.prepared(table, where), schema.labels(table, where)
    samples = Samples(schema.encoding().values(ready, Path("table")), torch.from_numpy(labels))
    origin = schema.sites(table, where) if sited else None
    of_numbers = np.issubdtype(labels.dtype, np.floating)
    strata = None if of_numbers else schema.target.strata(labels.astype(np.int64))
    return Part(samples, schema.target.class_names, where, origin, strata, strays(schema, table))


def note_of(schema: Schema, parts: Sequence[Part]) -> str:
    """What is told of the columns of tables with a schema."""
    found = [(_sites(part), part.strays) for part in parts]
    scaled = (
        f"{len(schema.standardised):,} of them scaled by its mean and deviation, the others by its bounds"
        if schema.standardised
        else "scaled by its public bounds"
    )
    return f"Columns: {len(schema.columns):,} of the schema ({_few(list(schema.columns))}), {scaled}. {told(schema, found)}".rstrip()


def _sites(part: Part) -> NDArray[np.str_]:
    """Where each row comes from, as far as it is known."""
    if part.domains is not None:
        return part.domains
    named = part.place.removesuffix(", test set")
    return np.full(len(part.samples), named.removeprefix("data of ") if named.startswith("data of ") else "")


def fitted(raw: Source, columns: Columns, note: str) -> Source:
    """A source of rows in their own units, scaled by its training samples."""
    columns = columns.fitted(raw.train.inputs)
    own, held = columns.samples(raw.train, "data"), columns.samples(raw.test, "data, test set")
    return replace(raw, train=own, test=held, note=f"{raw.note} {note}", columns=columns)


def _few(names: Sequence[str]) -> str:
    """The first of many names."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def read_rows(file: Path, columns: Columns) -> tuple[Tensor, list[str]]:
    """The rows of a new table, by the names of the columns that a model was trained on.

    Args:
        file: A CSV or Parquet file.
        columns: What the training table had.

    Returns:
        Inputs ``[n, size]`` float32, and sentences on what was left out.

    Raises:
        FedfillError: Where the file can't be read, a column is missing, or a cell is empty or of another kind.
    """
    words = tuple(columns.words) if columns.schema is None else columns.schema.words
    return rows_of(read_table(file, words), columns, file)


def rows_of(table: Any, columns: Columns, file: Path) -> tuple[Tensor, list[str]]:
    """`read_rows` of an Arrow table."""
    if columns.schema is not None:
        ready = columns.schema.prepared(table, f"data: '{file}'")
        inputs = columns.inputs(columns.values(ready, file), f"data: '{file}'")
        said = told(columns.schema, [(np.full(len(inputs), ""), strays(columns.schema, table))])
        return inputs, [f"{file}: {said}"] if said else []
    names, wanted = table.column_names, (*columns.numbers, *columns.words)
    for name in wanted:
        if name not in names:
            raise FedfillError(
                f"data: '{file}' has no column '{name}', which the model was trained on; {did_you_mean(name, names)}"
            )
    notes = []
    if others := [name for name in names if name not in (*wanted, LABEL, DOMAIN_COLUMN)]:
        notes.append(f"Not used of {file}, as the training table has no such columns: {_few(others)}.")
    for name, known in columns.words.items():
        found = cell_words(table, name, file)
        if len(strange := found[~np.isin(found, known)]):
            notes.append(
                f"Column '{name}' of {file}: {len(strange):,} row{'s have words' if len(strange) > 1 else ' has a word'} that "
                f"the training table lacks, such as {told_cell(strange[0])}, and that the model does not know."
            )
    return columns.inputs(columns.values(table, file), f"data: '{file}'"), notes


def _is_table(file: Path) -> bool:
    """Whether a Parquet file has no images and nothing that may be some; what can't be read is left to who reads it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_regular(file)
        schema = pq.read_schema(file)
    except (pa.ArrowException, OSError, UnicodeEncodeError):
        return False
    plain = not any(pa.types.is_struct(kind) or pa.types.is_binary(kind) for kind in schema.types)
    return plain and not any(name in schema.names for name in IMAGE_COLUMNS)


def read_table(file: Path, texts: Iterable[str] = ()) -> Any:
    """The table of a file; columns of CSV are of the types that their cells look like, but for `texts`, which are words."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    try:
        check_regular(file)
        if file.suffix.lower() == ".csv":
            table = _read_csv(file, pa.csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string())))
        else:
            table = pq.read_table(file)
        _ = table.column_names  # which decodes them
    except UnicodeDecodeError as error:
        raise FedfillError(f"data: the names of the columns of '{file}' are not in UTF-8; save it so") from error
    except (pa.ArrowException, OSError, UnicodeEncodeError) as error:  # the last of a path that is not in UTF-8
        hint = "; save it in UTF-8" if "UTF8" in str(error) else ""
        raise FedfillError(
            f"data: '{file}' can't be read as a table: {without_rows(error)}{hint}"
        ) from None  # Arrow has the row
    return sound(table, file)


def _read_csv(file: Path, options: Any) -> Any:
    import pyarrow as pa
    import pyarrow.csv

    try:
        return pa.csv.read_csv(file, convert_options=options)
    except pa.ArrowInvalid:
        # once more in one thread, in which Arrow counts rows and so says where it is
        return pa.csv.read_csv(file, pa.csv.ReadOptions(use_threads=False), convert_options=options)


def sound(table: Any, file: Path) -> Any:
    """An Arrow table whose columns have names, each its own; `file` says where it came from."""
    if not len(table):
        raise FedfillError(f"data: '{file}' holds no samples")
    # pandas writes its row numbers beside the data
    table = table.drop_columns([name for name in table.column_names if name.startswith("__index_level_")])
    if len(set(table.column_names)) < len(table.column_names):
        raise FedfillError(f"data: '{file}' has two columns of one name")
    # pandas calls a column without a name so when it reads it
    if nameless := [name for name in table.column_names if name == "" or re.fullmatch(r"Unnamed: \d+(\.\d+)*", name)]:
        called = f", '{nameless[0]}'," if nameless[0] else ","
        raise FedfillError(
            f"data: '{file}' has a column without a name{called} as pandas writes its row numbers; write it with index=False, "
            "or name it"
        )
    return table
