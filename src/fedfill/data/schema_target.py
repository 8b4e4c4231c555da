"""The target of a schema: classes, a number, or a time with an event, and how cells of a table become it."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedfill.data.cells import as_word, empty_cell, finite_number, positions, told_cell
from fedfill.data.schema_columns import MOST_CELLS, ROUNDING, Codes, Column
from fedfill.data.survival import cell_names, cells, drawn
from fedfill.errors import FedfillError

_EVENT = {"1": True, "0": False, "true": True, "false": False}
"""How a table may tell whether an event came."""


class Target(BaseModel):
    """What is to be told of a row."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    column: str
    """Its name; of survival that of the times."""
    kind: Literal["classes", "number", "survival"] = "classes"
    """A class, a number, or a time with an event."""
    values: tuple[str, ...] = ()
    """Of classes: all of them, in order."""
    low: float | None = None
    """Of a number: the public lower bound."""
    high: float | None = None
    """Its upper bound."""
    bins: int = Field(default=16, ge=2, le=MOST_CELLS)
    """Of a number: cells of equal width between its bounds, which counts over rows are made of."""
    event: str | None = None
    """Of survival: the column that is 1 where the event came at that time, and 0 where the row was censored then."""
    grid: tuple[float, ...] = ()
    """Of survival: the public times, increasing, above 0."""

    @property
    def half_width(self) -> float:
        """Of a number: half of the way between its bounds, by which errors on the scale of -1..1 become errors in its own unit."""
        return ((self.high or 0.0) - (self.low or 0.0)) / 2

    def in_unit(self, x: Tensor) -> Tensor:
        """Numbers on the scale of -1..1, of any shape, in the target's own unit."""
        return (x + 1) * self.half_width + (self.low or 0.0)

    def numbers(self, cells: list[Any], where: str) -> NDArray[np.float64]:
        """A target's numbers, brought from its bounds to -1..1.

        Args:
            cells: Of Arrow's ``to_pylist``.
            where: The beginning of an error's sentence.

        Returns:
            ``[n]``.

        Raises:
            FedfillError: Where a cell is empty, no number, or beyond the bounds: an error there could not be told.
        """
        low, high = self.low or 0.0, self.high or 0.0
        found = np.empty(len(cells))
        for k, cell in enumerate(cells):
            value = None if empty_cell(cell) else finite_number(cell)
            if value is None or not low <= value <= high:
                raise FedfillError(
                    f"{where}: column '{self.column}' holds {told_cell(cell)} in row {k + 1:,}; allowed by the schema: numbers from {low:g} "
                    f"to {high:g}"
                )
            found[k] = value
        return (found - low) / self.half_width - 1

    @model_validator(mode="after")
    def _fits(self) -> Self:
        has = {
            "classes": bool(self.values),
            "number": self.low is not None and self.high is not None,
            "survival": self.event is not None and bool(self.grid),
        }
        some = {
            "classes": bool(self.values),
            "number": self.low is not None or self.high is not None or "bins" in self.model_fields_set,
            "survival": self.event is not None or bool(self.grid),
        }
        if not has[self.kind] or any(given for kind, given in some.items() if kind != self.kind):
            needed = {"classes": "values", "number": "low and high", "survival": "event and grid"}[self.kind]
            raise ValueError(f"a target of the kind '{self.kind}' needs {needed} and nothing of the others")
        if len(set(self.values)) < len(self.values) or (self.kind == "classes" and len(self.values) < 2):
            raise ValueError("values must be two or more, and differ")
        if "" in self.values:
            raise ValueError("values hold '', which an empty cell is; allowed: words")
        if self.low is not None and self.high is not None and not 0 < self.high - self.low < np.inf:
            raise ValueError(
                f"found low = {self.low} and high = {self.high}; allowed: finite numbers, low below high, with a finite difference"
            )
        if self.grid and not all(a < b for a, b in zip((0.0, *self.grid), self.grid, strict=False)):
            raise ValueError("the times of grid must be above 0 and increase")
        if 2 * len(self.grid) + 1 > 2 * MOST_CELLS + 1 or not np.isfinite(self.grid).all():
            raise ValueError(f"found {len(self.grid):,} times of grid; allowed: up to {MOST_CELLS:,}, all finite")
        return self

    @property
    def classes(self) -> tuple[str, ...]:
        """What a row may be, by name: its classes, or the cells of its time and event; nothing of a number."""
        return cell_names(self.grid) if self.kind == "survival" else self.values

    @property
    def class_names(self) -> tuple[str, ...]:
        """What a federation has for its classes: `classes`, and of a number its column alone."""
        return self.classes or (self.column,)

    @property
    def cells(self) -> tuple[str, ...]:
        """What its cells are called, in their order: `classes`, or of a number from where to where."""
        return tuple(self._bins.labels()) if self.kind == "number" else self.classes

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that hold it."""
        return (self.column,) if self.event is None else (self.column, self.event)

    def strata(self, labels: Codes) -> Codes:
        """What a stratified choice among rows of these classes keeps the shares of: of survival whether the event came."""
        return (labels >= len(self.grid)).astype(np.int64) if self.kind == "survival" else labels

    def labels(self, rows: dict[str, list[Any]], where: str) -> Codes:
        """The classes of rows.

        Args:
            rows: The cells of `columns`, of Arrow's ``to_pylist``.
            where: The beginning of an error's sentence.

        Returns:
            ``[n]``, positions in `classes`.

        Raises:
            FedfillError: Where a cell is none of what is allowed.
        """
        if self.kind == "survival":
            return cells(self._times(rows[self.column], where), self._events(rows[str(self.event)], where), self.grid)
        places = positions(rows[self.column], self.values)
        if -1 in places:
            row = places.index(-1)
            raise FedfillError(
                f"{where}: column '{self.column}' holds {told_cell(rows[self.column][row])} in row {row + 1:,}; allowed by the schema: "
                f"{', '.join(self.values)}"
            )
        return np.array(places, dtype=np.int64)

    def codes(self, labels: Tensor) -> Codes:
        """The cells of rows with these labels.

        Args:
            labels: ``[n]``: int64 positions in `classes`; of a number float32 between -1 and 1.

        Returns:
            ``[n]``, positions in `cells`.
        """
        if self.kind != "number":
            return labels.cpu().numpy().astype(np.int64)
        numbers = self.in_unit(labels.double()).cpu().numpy()
        # float32 may have moved the first number of a bin by its last digits
        return self._bins.codes(numbers + 2 * self.half_width * ROUNDING)

    def places(self, labels: Tensor) -> NDArray[np.float64]:
        """Where labels lie, for distances between rows: a number from 0 at its lower bound to 1 at its upper one, and else the cell.

        Args:
            labels: As for `codes`.

        Returns:
            ``[n]``.
        """
        found: NDArray[np.float64] = labels.double().cpu().numpy()
        return np.clip((found + 1) / 2, 0, 1) if self.kind == "number" else found

    def drawn(self, cells: Codes, generator: np.random.Generator) -> dict[str, list[Any]]:
        """Values of `columns` for rows of these cells.

        Numbers are drawn uniformly within their cell, and times uniformly between two of the grid; events lie on it.

        Args:
            cells: ``[n]``, positions in `cells`.
            generator: For the draws.

        Returns:
            By column n values.
        """
        if self.kind == "survival":
            times, events = drawn(cells, self.grid, generator)
            return {self.column: times.tolist(), str(self.event): events.astype(np.int64).tolist()}
        if self.kind == "number":
            # the last digit of a sum may lie beyond the bound
            return {self.column: np.clip(self._bins.drawn(cells, generator), self.low, self.high).tolist()}
        return {self.column: [self.values[cell] for cell in cells]}

    @property
    def _bins(self) -> Column:
        """A number's cells: those of any other column of real numbers."""
        return Column(kind="real", low=self.low, high=self.high, bins=self.bins, missing=False)

    def _times(self, found: list[Any], where: str) -> NDArray[np.float64]:
        times = [finite_number(cell) for cell in found]
        for k, (time, cell) in enumerate(zip(times, found, strict=True)):
            if time is None or time < 0:
                raise FedfillError(
                    f"{where}: column '{self.column}' holds {told_cell(cell)} in row {k + 1:,}; allowed: a time of 0 or more"
                )
        return np.array(times, dtype=np.float64)

    def _events(self, found: list[Any], where: str) -> NDArray[np.bool_]:
        for k, cell in enumerate(found):
            if as_word(cell).lower() not in _EVENT:
                raise FedfillError(
                    f"{where}: column '{self.event}' holds {told_cell(cell)} in row {k + 1:,}; allowed: 1 for an event and 0 for none"
                )
        return np.array([_EVENT[as_word(cell).lower()] for cell in found])
