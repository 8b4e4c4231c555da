"""Grids: the same comparison for every combination of some options, described in one TOML file."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fedfill.errors import FedfillError, checked
from fedfill.experiment.loop import OnRound
from fedfill.runs.directory import read_toml, write_atomically
from fedfill.runs.shown import markdown_table, percent
from fedfill.studies.compare import carry_out, plan
from fedfill.studies.comparison import Comparison
from fedfill.studies.comparison_files import FIGURES

NOT_OPTIONS = ("algorithm", "algorithms", "seed", "seeds", "out", "on_run", "quiet")
"""Words of a comparison that are the same for the whole grid, or that nobody may give it."""


class Grid(BaseModel):
    """What a grid's file holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    algorithms: list[str] = Field(min_length=1)
    """As for `fedfill.compare`, also with alternatives that validation chooses among."""
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1)
    """Of every comparison."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options and settings that all comparisons share, as for `fedfill.compare`."""
    grid: dict[str, list[Any]] = Field(min_length=1)
    """For options and settings the values that they take; every combination is a comparison."""


@dataclass(frozen=True)
class Cell:
    """One combination.

    Attributes:
        values: By option.
        comparison: Its comparison.
    """

    values: Mapping[str, Any]
    comparison: Comparison


def read_grid(path: str | Path) -> Grid:
    """A grid from its file.

    Args:
        path: A TOML file.

    Returns:
        The grid.

    Raises:
        FedfillError: Where it can't be read, or something in it is not allowed.
    """
    try:
        grid = checked(Grid, read_toml(Path(path), "grid"), "key")
        _check(grid)
    except FedfillError as error:
        words = str(error)
        raise FedfillError(words if str(path) in words else f"grid: in {path}, {words}") from None
    return grid


def _check(grid: Grid) -> None:
    """Refuse what no grid may have."""
    for table, names in (("options", grid.options), ("grid", grid.grid)):
        for name in NOT_OPTIONS:
            if name in names:
                raise FedfillError(
                    f"found {name} in [{table}]; allowed: options of an experiment and settings, with algorithms and seeds "
                    "above the tables"
                )
    for name, values in grid.grid.items():
        if not values or any(value in values[:k] for k, value in enumerate(values)):
            raise FedfillError(f"found {values} for {name}; allowed: values that differ, at least one")
        if name in grid.options:
            raise FedfillError(f"found {name} in [options] and in [grid]; allowed: one of the two")


def combinations(grid: Grid) -> list[dict[str, Any]]:
    """Every combination, the last option moving first."""
    return [dict(zip(grid.grid, values, strict=True)) for values in itertools.product(*grid.grid.values())]


def run_grid(
    path: str | Path,
    *,
    out: str | Path = "runs/grid",
    on_run: Callable[[str, int], OnRound | None] | None = None,
    quiet: bool = False,
    **options: Any,
) -> list[Cell]:
    """Run every comparison of a grid; those that are finished are read.

    Args:
        path: The TOML file.
        out: Folder of the comparisons, with ``grid.csv`` and ``grid.md``.
        on_run: Called before each run with its label and seed; returns what to call after each of its rounds.
        quiet: As in `fedfill.compare`.
        **options: Further options, over those of the file.

    Returns:
        The comparisons, with the options of each.

    Raises:
        FedfillError: Where something is not allowed.
    """
    grid, folder = read_grid(path), Path(out)
    cells = []
    named = {",".join(f"{name}={value}" for name, value in values.items()): values for values in combinations(grid)}
    # everything is checked before anything runs
    plans = {
        words: plan(
            grid.algorithms,
            seeds=grid.seeds,
            out=folder / re.sub(r"[^\w.=+-]+", "-", words),
            **{**grid.options, **values, **options},
        )
        for words, values in named.items()
    }
    for words, planned in plans.items():

        def follow(label: str, seed: int, words: str = words) -> OnRound | None:
            return on_run(f"{words}: {label}", seed) if on_run is not None else None

        cells.append(Cell(named[words], carry_out(planned, follow, quiet)))
        # after each, so that a grid that is stopped has its first figures
        write_atomically(folder / "grid.csv", _csv(cells).encode())
        write_atomically(folder / "grid.md", markdown(cells).encode())
    return cells


def _csv(cells: Sequence[Cell]) -> str:
    """One line for each combination, row and figure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*cells[0].values, "algorithm", "figure", "mean", "deviation", "n"])
    for cell in cells:
        for row in cell.comparison.rows:
            for name in FIGURES:
                mean, deviation = row.figure(name)
                if mean is not None:
                    writer.writerow(
                        [
                            *cell.values.values(),
                            row.label,
                            name,
                            mean,
                            "" if deviation is None else deviation,
                            len(row.results),
                        ]
                    )
    return text.getvalue()


def markdown(cells: Sequence[Cell], figure: str = "accuracy") -> str:
    """A line for each combination, a column for each algorithm: percent, mean ± standard deviation.

    Args:
        cells: At least one.
        figure: Which.

    Returns:
        The table. What validation chose may differ from line to line, and stands in the cell.
    """
    asked = [row.label if row.sweep is None else row.sweep.asked for row in cells[0].comparison.rows]
    lines = []
    for cell in cells:
        line = [str(value) for value in cell.values.values()]
        for row in cell.comparison.rows:
            text = "diverged" if None in row.results else percent(*row.figure(figure))
            line.append(text if row.sweep is None else f"{text} ({row.label.partition(':')[2]})")
        lines.append(line)
    of = f"{len(cells[0].comparison.seeds)} seeds" if len(cells[0].comparison.seeds) > 1 else "one seed"
    what = figure.replace("_", " ")
    return (
        markdown_table([*cells[0].values, *asked], lines, left=len(cells[0].values))
        + f"\n{what[:1].upper()}{what[1:]} in percent: mean ± standard deviation over {of}.\n"
    )
