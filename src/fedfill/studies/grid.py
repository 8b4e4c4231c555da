"""Grids: the same comparison for every combination of some options, described in one TOML file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fedfill.errors import DivergedError, FedfillError, checked, path_of
from fedfill.experiment.loop import OnRound
from fedfill.experiment.settings import Experiment
from fedfill.runs.directory import read_toml, write_atomically, writing
from fedfill.runs.shown import csv_text, markdown_table, percent
from fedfill.studies.compare import Plan, carry_out, plan
from fedfill.studies.comparison import Comparison
from fedfill.studies.comparison_files import FIGURES
from fedfill.studies.run import OnRun

TABLE = "grid.csv"
"""The file that tells a grid's folder."""
NOT_OPTIONS = ("algorithm", "algorithms", "seed", "seeds", "out", "on_run", "quiet")
"""Words of a comparison that are the same for the whole grid, or that nobody may give it."""


class Grid(BaseModel):
    """What a grid's file holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    algorithms: list[str] = Field(min_length=1)
    """As for `fedfill.compare`, also with alternatives that validation chooses among."""
    seeds: list[Annotated[int, Field(strict=True, ge=0)]] = Field(default=[0, 1, 2], min_length=1)
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
        asked: The algorithms, as the grid's file names them.
        comparison: Its comparison; None where every run diverged.
    """

    values: Mapping[str, Any]
    asked: tuple[str, ...]
    comparison: Comparison | None


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
        for name in names:
            if (plain := name.replace("-", "_")) != name and plain in Experiment.model_fields:
                raise FedfillError(f"found {name} in [{table}]; did you mean '{plain}'?")
    for name, values in grid.grid.items():
        # 0.01 and "0.01" are one value too, and would have one folder
        words = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
        if not values or len(set(words)) < len(words) or any(value in values[:k] for k, value in enumerate(values)):
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
    on_run: OnRun | None = None,
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
    grid, folder = read_grid(path), path_of("out", out)
    _check_folder(folder)
    # everything is checked before anything runs
    plans = _planned(grid, Path(path), folder, options)
    cells: list[Cell] = []
    diverged: list[str] = []
    for words, (values, planned) in plans.items():

        def follow(label: str, seed: int, words: str = words) -> OnRound | None:
            return on_run(f"{words}: {label}", seed) if on_run is not None else None

        found = None
        try:
            found = carry_out(planned, follow, quiet)
        except DivergedError as error:  # a finding about this combination, which does not end the others
            diverged.append(f"{words}: {error}")
        cells.append(Cell(values, tuple(planned.asked), found))
        # after each, so that a grid that is stopped has its first figures
        write_atomically(folder / TABLE, table(cells).encode())
        write_atomically(folder / "grid.md", markdown(cells).encode())
    if len(diverged) == len(cells):
        raise DivergedError(f"grid: no run of any combination came to its end; {diverged[0]}")
    return cells


def _planned(
    grid: Grid, path: Path, folder: Path, options: Mapping[str, Any]
) -> dict[str, tuple[dict[str, Any], Plan]]:
    """By what each combination is called its values and its comparison, checked."""
    plans: dict[str, tuple[dict[str, Any], Plan]] = {}
    names: set[str] = set()
    for values in combinations(grid):
        words = ",".join(f"{name}={value}" for name, value in values.items())
        plain = re.sub(r"[^\w.=+-]+", "-", words)
        # "./x y.csv" and "./x-y.csv" have one name; the first one keeps it, so that a grid may grow
        name = _free(plain, names)
        names.add(name)
        try:
            found = plan(grid.algorithms, seeds=grid.seeds, out=folder / name, **{**grid.options, **values, **options})
        except FedfillError as error:
            sentence = str(error)
            # what the folder holds, and what was given beside the file, is no fault of the file
            beside = sentence.partition(":")[0] in {"out", *options} or str(path) in sentence
            raise FedfillError(sentence if beside else f"grid: in {path}, {sentence}") from error
        plans[words] = values, found
    return plans


def _free(name: str, taken: set[str]) -> str:
    """A name that is not taken: itself, or with a number behind it."""
    return next(one for k in itertools.count(1) if (one := name if k == 1 else f"{name}-{k}") not in taken)


def _check_folder(folder: Path) -> None:
    """Refuse a folder with anything else than a grid, or the comparisons of one that was stopped."""
    with writing(folder):
        if folder.exists() and not folder.is_dir():
            raise FedfillError(f"out: {folder} is a file; choose a folder that is new or holds this grid")
        held = sorted(path for path in folder.iterdir() if path.suffix != ".tmp") if folder.exists() else []
    strangers = [path.name for path in held if not (path.is_dir() and re.match(r"\w+=", path.name))]
    if strangers and not (folder / TABLE).exists():
        raise FedfillError(
            f"out: {folder} is not empty and holds no grid ({strangers[0]} lies there); choose a folder that is new or holds "
            "this grid"
        )


def table(cells: Sequence[Cell]) -> str:
    """The text of the file `TABLE`.

    Args:
        cells: At least one.

    Returns:
        One line for each combination, row and figure, below a header.
    """
    return csv_text([*cells[0].values, "algorithm", "figure", "mean", "deviation", "n"], _lines(cells))


def _lines(cells: Sequence[Cell]) -> Iterator[list[Any]]:
    """One line for each combination, row and figure; of a row that diverged one line, without a mean."""
    for cell in cells:
        values = cell.values.values()
        if cell.comparison is None:
            yield from ([*values, label, FIGURES[0], "", "", 0] for label in cell.asked)
            continue
        for row in cell.comparison.rows:
            if None in row.results:
                yield [*values, row.label, FIGURES[0], "", "", len(row.finished)]
                continue
            for name in FIGURES:
                mean, deviation = row.figure(name)
                if mean is not None:
                    yield [*values, row.label, name, mean, "" if deviation is None else deviation, len(row.results)]


def markdown(cells: Sequence[Cell], figure: str = "accuracy") -> str:
    """A line for each combination, a column for each algorithm: percent, mean ± standard deviation.

    Args:
        cells: At least one.
        figure: Which.

    Returns:
        The table. What validation chose may differ from line to line, and stands in the cell.
    """
    lines = []
    for cell in cells:
        line = [str(value) for value in cell.values.values()]
        for row in cell.comparison.rows if cell.comparison is not None else ():
            text = "diverged" if None in row.results else percent(*row.figure(figure))
            line.append(text if row.sweep is None else f"{text} ({row.label.partition(':')[2]})")
        lines.append(line if cell.comparison is not None else [*line, *["diverged"] * len(cell.asked)])
    seeds = max(len(cell.comparison.seeds) if cell.comparison is not None else 0 for cell in cells)
    of = (
        f": mean ± standard deviation over {seeds} seeds"
        if seeds > 1
        else "; one seed, so no deviation"
        if seeds
        else ""
    )
    what = figure.replace("_", " ")
    return (
        markdown_table([*cells[0].values, *cells[0].asked], lines, left=len(cells[0].values))
        + f"\n{what[:1].upper()}{what[1:]} in percent{of}.\n"
    )
