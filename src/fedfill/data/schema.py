"""Schemas of tables: what sites agree on before any data are read, so that no record sets a bound, a category or a bin.

A schema is a TOML file. It names the columns with their kinds, public bounds and categories, the target, and the column that says
where a row comes from. With it a table may have empty cells, ordered words and dates, and every row has a *cell*: one whole number
for each column, which is what counts over records are made of.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedfill.data.cells import as_word, empty_cell
from fedfill.data.columns import Columns
from fedfill.data.schema_columns import MISSING, OTHER, ROUNDING, Codes, Column
from fedfill.data.schema_target import Target
from fedfill.data.schema_text import text_of
from fedfill.errors import FedfillError, did_you_mean, first_line, shown
from fedfill.files import read_regular

LARGEST = 1 << 20
"""Bytes of the largest file."""


class SchemaFile(BaseModel):
    """What a schema's TOML file holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    site: str | None = None
    """The column that says where a row comes from; none: nothing does."""
    target: Target
    """What is to be told of a row."""
    columns: dict[str, Column] = Field(min_length=1)
    """What is learned from, by name, in this order."""


@dataclass(frozen=True)
class Schema:
    """A table's columns, cells and target, as sites agreed on them.

    Attributes:
        columns: By name, in order.
        target: What is to be told of a row.
        site: The column that says where a row comes from; None: nothing does.
    """

    columns: Mapping[str, Column]
    target: Target
    site: str | None = None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many cells each column has, the target last: its classes, the cells of its times, or the bins of its numbers."""
        return (*(column.size for column in self.columns.values()), len(self.target.cells))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the columns that `sizes` counts."""
        return (*self.columns, self.target.column)

    @property
    def standardised(self) -> tuple[str, ...]:
        """Columns that are scaled by a mean and a deviation, and not by their bounds."""
        return tuple(name for name, column in self.columns.items() if column.mean is not None)

    @property
    def words(self) -> tuple[str, ...]:
        """Columns that hold words, also where they look like numbers."""
        own = [name for name, column in self.columns.items() if column.kind in ("category", "ordered")]
        own += [self.target.column] if self.target.kind == "classes" else []
        return tuple(own if self.site is None else [*own, self.site])

    def document(self) -> dict[str, Any]:
        """The schema as plain values, from which `from_document` makes it again."""
        file = SchemaFile(site=self.site, target=self.target, columns=dict(self.columns))
        return file.model_dump(mode="json", exclude_defaults=True)

    def toml(self) -> str:
        """The schema as text of a TOML file."""
        return text_of(self.site, self.target, self.columns)

    def codes(self, table: Any, where: str) -> Codes:
        """The cells of a table's rows.

        Args:
            table: An Arrow table with all of `names`.
            where: The beginning of an error's sentence.

        Returns:
            ``[n, d]``, one column for each of `sizes`.

        Raises:
            FedfillError: Where a column is missing, or a cell is empty or of another kind where it may not be.
        """
        found = [_coded(column, values) for _, column, values in self._read(table, where)]
        found.append(self.target.codes(torch.from_numpy(self.labels(table, where))))
        return np.stack(found, axis=1)

    def prepared(self, table: Any, where: str) -> Any:
        """The columns that are learned from without empty cells, as `encoding` reads them.

        Numbers, dates and positions of ordered words lie within their bounds, with the middle (or the public mean) for an empty cell
        and a column of 1 and 0 beside it; a category has one of its words, `OTHER` or `MISSING`.

        Args:
            table: An Arrow table with these columns.
            where: The beginning of an error's sentence.

        Returns:
            An Arrow table.

        Raises:
            FedfillError: As for `codes`.
        """
        import pyarrow as pa

        found: dict[str, Any] = {}
        for name, column, values in self._read(table, where):
            if column.is_words:
                found[name] = values.tolist()
                continue
            found[name] = np.nan_to_num(values, nan=column.scaling[0])
            if column.missing:
                found[self.indicators[name]] = np.isnan(values)
        return pa.table(found)

    def labels(self, table: Any, where: str) -> NDArray[np.int64] | NDArray[np.float32]:
        """The target of a table's rows.

        Args:
            table: An Arrow table with the columns of the target.
            where: The beginning of an error's sentence.

        Returns:
            ``[n]``: positions in the target's classes; of a number what it is between -1 and 1, its bounds.

        Raises:
            FedfillError: Where a column is missing, or holds what the target does not allow.
        """
        if self.target.kind == "number":
            return self.target.numbers(_cells(table, self.target.column, where), where).astype(np.float32)
        return self.target.labels({name: _cells(table, name, where) for name in self.target.columns}, where)

    def sites(self, table: Any, where: str) -> NDArray[np.str_] | None:
        """Where a table's rows come from.

        Args:
            table: An Arrow table with the column of the site.
            where: The beginning of an error's sentence.

        Returns:
            ``[n]`` names without blanks around them; None where the schema has no such column.

        Raises:
            FedfillError: Where the column is missing, or a cell is empty.
        """
        if self.site is None:
            return None
        names = ["" if empty_cell(cell) else as_word(cell).strip() for cell in _cells(table, self.site, where)]
        if empty := names.count(""):
            raise FedfillError(
                f"{where}: column '{self.site}' has {empty:,} empty cell{'s' if empty > 1 else ''}, and says where a row comes from; "
                "fill them or leave their rows out"
            )
        return np.array(names)

    @cached_property
    def indicators(self) -> dict[str, str]:
        """By name of a number whose cells may be empty what the input beside it is called, which is 1 where one is: as no column is."""
        found: dict[str, str] = {}
        for name, column in self.columns.items():
            if column.missing and not column.is_words:
                called = f"{name} is missing"
                while called in self.columns or called in found.values():
                    called = f"({called})"
                found[name] = called
        return found

    def encoding(self) -> Columns:
        """How `prepared` rows become inputs: numbers by their public bounds or a public mean and deviation, and each word an input.

        Returns:
            Columns whose scaling comes from no record.
        """
        numbers: dict[str, tuple[float, float]] = {}
        for name, column in self.columns.items():
            if not column.is_words:
                numbers[name] = column.scaling
                if column.missing:
                    numbers[self.indicators[name]] = 0.0, 1.0
        words = {
            name: (*column.values, OTHER, *([MISSING] if column.missing else []))
            for name, column in self.columns.items()
            if column.is_words
        }
        mean, deviation = zip(*numbers.values(), strict=True) if numbers else ((), ())
        return Columns(tuple(numbers), words, mean, deviation, self)

    def codes_of(self, inputs: Tensor, labels: Tensor) -> Codes:
        """The cells of records as an algorithm has them: `codes` of the rows that became these inputs.

        Args:
            inputs: ``[n, features]`` float32, by `encoding`.
            labels: ``[n]``, as the client has them: int64 classes, or float32 numbers.

        Returns:
            ``[n, d]``.
        """
        found = [
            values.astype(np.int64) if column.is_words else column.codes(values)
            for column, values in zip(self.columns.values(), self._values_of(inputs), strict=True)
        ]
        found.append(self.target.codes(labels))
        return np.stack(found, axis=1)

    def places_of(self, inputs: Tensor, labels: Tensor) -> NDArray[np.float64]:
        """Where records lie in their columns, for distances between them.

        Args:
            inputs: As for `codes_of`.
            labels: Likewise.

        Returns:
            ``[n, d]``, one column for each of `sizes`: where it is one of `ordered` from 0 at its lower bound to 1 at its upper one, NaN
            where it is empty, and else the cell.
        """
        found = []
        for column, values in zip(self.columns.values(), self._values_of(inputs), strict=True):
            low, high = (0.0, 1.0) if column.is_words else column.bounds
            found.append((values - low) / (high - low))
        found.append(self.target.places(labels))
        return np.stack(found, axis=1)

    @property
    def ordered(self) -> tuple[bool, ...]:
        """Of each of `names` whether its values have an order and distances."""
        return (*(not column.is_words for column in self.columns.values()), self.target.kind == "number")

    def frame(self, codes: Codes, generator: np.random.Generator) -> Any:
        """A table of rows with these cells: each value is drawn uniformly within its cell.

        Args:
            codes: ``[n, d]``, as `codes` gives them.
            generator: For the draws.

        Returns:
            An Arrow table with the columns that are learned from, and those of the target.
        """
        import pyarrow as pa

        found = {name: column.drawn(codes[:, k], generator) for k, (name, column) in enumerate(self.columns.items())}
        return pa.table({**found, **self.target.drawn(codes[:, -1], generator)})

    def _read(self, table: Any, where: str) -> Iterator[tuple[str, Column, NDArray[Any]]]:
        """Each column's name, kind and values: numbers, NaN where empty, or words, of those that are allowed."""
        for name, column in self.columns.items():
            cells = _cells(table, name, where)
            if column.is_words:
                values: NDArray[Any] = np.array(column.words(cells))
                empty = values == MISSING
            else:
                values = column.numbers(cells, name, where)
                empty = np.isnan(values)
            if not column.missing and empty.any():
                raise FedfillError(
                    f"{where}: column '{name}' has {int(empty.sum()):,} empty cells, which the schema does not allow (missing = false)"
                )
            yield name, column, values

    def _values_of(self, inputs: Tensor) -> Iterator[NDArray[np.float64]]:
        """The values of each column from inputs by `encoding`: within the bounds, NaN where empty; of words the cell."""
        encoding, values = self.encoding(), inputs.double().cpu().numpy()
        places = {name: k for k, name in enumerate(encoding.numbers)}
        first = len(encoding.numbers)
        for name, column in self.columns.items():
            if column.is_words:
                yield values[:, first : first + column.size].argmax(1).astype(np.float64)
                first += column.size
                continue
            (low, high), (middle, unit) = column.bounds, column.scaling
            numbers = values[:, places[name]] * unit + middle
            # float32 may have moved a whole number, or the first of a bin, by its last digits
            numbers = np.round(numbers) if column.whole else numbers + (high - low) * ROUNDING
            if column.missing:
                numbers[values[:, places[self.indicators[name]]] > 0.5] = np.nan
            yield np.clip(numbers, low, high)


def read_schema(path: Path | str) -> Schema:
    """The schema of a TOML file.

    Args:
        path: The file.

    Returns:
        The schema.

    Raises:
        FedfillError: Where it can't be read, or is not sound.
    """
    setting = "schema_file"
    try:
        text = read_regular(Path(path), LARGEST).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        raise FedfillError(f"{setting}: '{path}' can't be read: {why}") from error
    return from_toml(text, str(path), setting)


def from_toml(text: str, where: str, setting: str = "schema") -> Schema:
    """The schema of a text in TOML; `where` it came from is told in errors, which begin with the setting."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FedfillError(f"{setting}: '{where}' is no TOML: {first_line(error)}") from error
    return from_document(document, where, setting)


def agreed(schema: Schema | None) -> Schema:
    """The schema of data that have one, as an algorithm with `tabular` or a check of its own has made sure of."""
    assert schema is not None
    return schema


def from_document(document: Mapping[str, Any], where: str, setting: str = "schema") -> Schema:
    """The schema of plain values; `where` they came from is told in errors, which begin with the setting."""
    try:
        file = SchemaFile.model_validate(document)
    except ValidationError as error:
        # an unknown name is why another is missing
        found = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        raise FedfillError(f"{setting}: {_told(found)} in '{where}'") from error
    others = [*file.target.columns, *([] if file.site is None else [file.site])]
    if twice := [name for name in (*file.columns, *others) if [*file.columns, *others].count(name) > 1]:
        raise FedfillError(f"{setting}: '{where}' uses the column '{twice[0]}' twice")
    return Schema(file.columns, file.target, file.site)


_EITHER = {"float": "a number", "date": "a date such as 2020-01-31"}
"""What pydantic calls the kinds of a value that may be of several, each of which has an error of its own."""


def _told(errors: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong first, and where."""
    error = errors[0]
    depth = 3 if error["loc"][:1] == ("columns",) else 2
    inner = error["loc"][depth:]  # places in a list, or a kind, which is no name in the file
    place = ".".join(map(str, [*error["loc"][:depth], *(part for part in inner if isinstance(part, int))]))
    what = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        kinds_of: dict[int, type[BaseModel]] = {1: SchemaFile, 2: Target, 3: Column}
        known = kinds_of[len(error["loc"])].model_fields
        return f"unknown name '{place}'; {did_you_mean(str(error['loc'][-1]), known)},"
    kinds = [str(one["loc"][-1]) for one in errors if inner and one["loc"][:-1] == error["loc"][:-1]]
    if set(kinds) == _EITHER.keys():
        what = f"allowed: {' or '.join(_EITHER[kind] for kind in kinds)}"
    found = "" if error["type"] == "missing" or isinstance(error["input"], dict) else f"found {shown(error['input'])}; "
    return f"{place or 'all of it'}: {found}{what[:1].lower()}{what[1:]},"


def _cells(table: Any, name: str, where: str) -> list[Any]:
    if name not in table.column_names:
        raise FedfillError(
            f"{where}: found no column '{name}', which the schema has; {did_you_mean(name, table.column_names)}"
        )
    if table.column_names.count(name) > 1:
        raise FedfillError(f"{where}: found two columns '{name}'; allowed: one")
    cells: list[Any] = table.column(name).to_pylist()
    return cells


def _coded(column: Column, values: NDArray[Any]) -> Codes:
    if not column.is_words:
        return column.codes(values)
    order = {word: k for k, word in enumerate((*column.values, OTHER, MISSING))}
    return np.array([order[word] for word in values], dtype=np.int64)
