"""Columns of a schema: kinds, public bounds and categories, and the cells that counts over records are made of."""

from __future__ import annotations

import itertools
import math
from datetime import date
from types import NoneType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedfill.data.cells import days_of, empty_cell, finite_number, positions, told_cell
from fedfill.errors import FedfillError

OTHER, MISSING = "other", "missing"
"""What stands for a word that the schema lacks, and for an empty cell."""
EMPTY = (MISSING, "NA")
"""Words that say that a cell is empty, where they are none of a column's values; the second is R's."""
MOST_CELLS = 1000
"""The most cells of one column."""
ROUNDING = 1e-6
"""By what share of the way between its bounds float32 may have moved a number."""

Kind = Literal["category", "ordered", "integer", "real", "date"]
Codes = NDArray[np.int64]
"""Cells, ``[n]`` of a column or ``[n, d]`` of a table."""


class Column(BaseModel):
    """One column that is learned from, and its cells.

    The cells of a category are its values in their order, then `OTHER`; those of ordered words are the values; those of numbers and
    dates are bins. An empty cell is one more, the last, unless ``missing`` is false.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    """What it holds; dates are counted in days."""
    values: tuple[str, ...] = ()
    """Of a category or of ordered words: all that may stand there."""
    low: float | date | None = None
    """Of numbers and dates: the public lower bound. What lies below counts as this."""
    high: float | date | None = None
    """The upper bound, likewise."""
    bins: int = Field(default=16, ge=1, le=MOST_CELLS)
    """Of numbers and dates: cells of equal width; whole numbers have no more than there are of them."""
    missing: bool = True
    """Whether cells may be empty."""
    mean: float | None = None
    """Of numbers: what they are scaled by in place of their bounds, together with `deviation`, once it is public (`moments`)."""
    deviation: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Likewise, above 0."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.mean is None) != (self.deviation is None) or (self.mean is not None and not self.is_number):
            raise ValueError("mean and deviation go together, in columns of the kinds integer and real")
        words = self.kind in ("category", "ordered")
        if words != bool(self.values) or words != (self.low is None) or words != (self.high is None):
            needed = "values" if words else "low and high"
            raise ValueError(
                f"a column of the kind '{self.kind}' needs {needed}, and nothing else of values, low and high"
            )
        if words:
            if len(set(self.values)) < len(self.values) or "" in self.values:
                raise ValueError("values must differ, and none may be empty")
            if reserved := {OTHER, MISSING} & set(self.values):
                raise ValueError(f"'{min(reserved)}' has a cell of its own and can't be a value")
            if len(self.values) > MOST_CELLS - 2:
                raise ValueError(f"found {len(self.values):,} values; allowed: up to {MOST_CELLS - 2:,}")
            return self
        if (self.kind == "date") != isinstance(self.low, date) or (self.kind == "date") != isinstance(self.high, date):
            raise ValueError("low and high are dates of a column of dates, such as 2020-01-31, and numbers elsewhere")
        low, high = self.bounds
        if not (np.isfinite([low, high, high - low]).all() and low < high):
            raise ValueError(f"found low = {self.low} and high = {self.high}; allowed: low below high")
        if self.kind == "integer" and (low % 1 or high % 1):
            raise ValueError("low and high of whole numbers must be whole")
        if self.mean is not None and not low <= self.mean <= high:
            raise ValueError(f"found mean = {self.mean:g}; allowed: from low to high")
        return self

    @property
    def is_number(self) -> bool:
        """Whether it holds numbers, which may be scaled by a mean and a deviation."""
        return self.kind in ("integer", "real")

    @property
    def scaling(self) -> tuple[float, float]:
        """What is taken from a value, and by what the rest is divided: mean and deviation, or the middle and half of the bounds."""
        if self.mean is not None and self.deviation is not None:
            return self.mean, self.deviation
        return self.middle_and_half

    @property
    def middle_and_half(self) -> tuple[float, float]:
        """The middle of the bounds, and half of the way between them."""
        low, high = self.bounds
        return (low + high) / 2, (high - low) / 2

    @property
    def is_words(self) -> bool:
        """Whether it holds words without an order."""
        return self.kind == "category"

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound as numbers: days since the year 1 of dates, positions of ordered words."""
        if self.kind == "ordered":
            return 0.0, max(1.0, len(self.values) - 1.0)
        ends = (self.low, self.high)
        low, high = (float(end.toordinal()) if isinstance(end, date) else float(end or 0) for end in ends)
        return low, high

    @property
    def whole(self) -> bool:
        """Whether its numbers are whole."""
        return self.kind != "real"

    @property
    def cells(self) -> int:
        """How many cells its values have, without the one for empty cells."""
        if self.kind in ("category", "ordered"):
            return len(self.values) + (self.kind == "category")
        low, high = self.bounds
        return min(self.bins, int(high - low) + 1) if self.whole else self.bins

    @property
    def size(self) -> int:
        """How many cells there are."""
        return self.cells + self.missing

    def words(self, cells: list[Any]) -> list[str]:
        """The values of a category.

        Args:
            cells: Of Arrow's ``to_pylist``.

        Returns:
            One of `values` for each cell, or `MISSING` where it is empty or says so, or `OTHER`.
        """
        places = positions(cells, self.values)
        return [
            self.values[k] if k >= 0 else MISSING if empty_cell(cell) or cell in EMPTY else OTHER
            for k, cell in zip(places, cells, strict=True)
        ]

    def numbers(self, cells: list[Any], name: str, where: str) -> NDArray[np.float64]:
        """The values of a column that is no category as numbers within its bounds, NaN where a cell is empty.

        Args:
            cells: Of Arrow's ``to_pylist``.
            name: The column's, for errors.
            where: The beginning of an error's sentence.

        Returns:
            ``[n]``. A word that an ordered column lacks counts as empty.

        Raises:
            FedfillError: Where a cell is no number, or no date.
        """
        return np.clip(self.unclipped(cells, name, where), *self.bounds)

    def unclipped(self, cells: list[Any], name: str, where: str) -> NDArray[np.float64]:
        """`numbers` as they stand there, also beyond the bounds; whole ones are rounded."""
        if self.kind == "ordered":
            places = np.array(positions(cells, self.values), dtype=np.float64)
            return np.where(places < 0, np.nan, places)
        # all at once, as most tables have it: ten times as fast
        if self.kind != "date" and all(type(cell) in (float, int, NoneType) for cell in cells):
            found = np.array(cells, dtype=np.float64)
            if not np.isinf(found).any():
                return np.round(found) if self.whole else found
        read = days_of if self.kind == "date" else finite_number
        found = np.empty(len(cells))
        for k, cell in enumerate(cells):
            value = np.nan if empty_cell(cell) else read(cell)
            if value is None:
                needed = "a date such as 2020-01-31" if self.kind == "date" else "a number"
                raise FedfillError(
                    f"{where}: column '{name}' holds {told_cell(cell)} in row {k + 1:,}, but {needed} is needed there"
                )
            found[k] = value
        return np.round(found) if self.whole else found

    def codes(self, numbers: NDArray[np.float64]) -> Codes:
        """The cells of numbers, ``[n]``, NaN where one is empty.

        Args:
            numbers: Within the bounds.

        Returns:
            ``[n]``; `cells` for an empty one.
        """
        low, high = self.bounds
        # bins of whole numbers divide the numbers themselves, of which the upper bound is one; of reals the way between the bounds
        span = high - low + 1 if self.whole else high - low
        cells = np.floor((np.nan_to_num(numbers, nan=low) - low) * (self.cells / span)).astype(np.int64)
        return np.where(np.isnan(numbers), self.cells, np.clip(cells, 0, self.cells - 1))

    def labels(self) -> list[str]:
        """What the cells are called, for people: a word, or from where to where; then `OTHER` and `MISSING` where they have a cell."""
        if self.kind in ("category", "ordered"):
            own = [*self.values, *([OTHER] if self.kind == "category" else [])]
        else:
            low, high = self.bounds
            # the first number of each cell, and of what would follow
            span = high - low + 1 if self.whole else high - low
            ends = [low + k * span / self.cells for k in range(self.cells + 1)]
            if self.whole:
                ends = [math.ceil(end - 1e-9) for end in ends]
            pairs = [(a, b - 1 if self.whole else b) for a, b in itertools.pairwise(ends)]
            own = [
                _number_word(a, self.kind) if a == b else " to ".join(_number_word(x, self.kind) for x in (a, b))
                for a, b in pairs
            ]
        return [*own, *([MISSING] if self.missing else [])]

    def drawn(self, codes: Codes, generator: np.random.Generator) -> list[Any]:
        """A value for each cell, uniform within it: a word, a number or a date; None for an empty one.

        Args:
            codes: ``[n]``.
            generator: For the draws.

        Returns:
            n values.
        """
        if self.kind in ("category", "ordered"):
            names = [*self.values, *([OTHER] if self.kind == "category" else []), None]
            return [names[code] for code in codes]
        low, high = self.bounds
        within = generator.random(len(codes))
        if self.whole:
            span = high - low + 1
            ends = np.ceil(
                np.arange(self.cells + 1) * (span / self.cells) - 1e-9
            )  # the first whole number of each cell
            known = np.clip(codes, 0, self.cells - 1)
            found = low + ends[known] + np.floor(within * (ends[known + 1] - ends[known]))
        else:
            found = low + (codes + within) * ((high - low) / self.cells)
        as_value = (lambda v: date.fromordinal(int(v))) if self.kind == "date" else int if self.whole else float
        return [None if code == self.cells else as_value(value) for code, value in zip(codes, found, strict=True)]


def _number_word(value: float, kind: Kind) -> str:
    return date.fromordinal(int(value)).isoformat() if kind == "date" else f"{value:.6g}"
