"""The command that runs a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from fedfill.cli import terminal
from fedfill.cli.commands import numbers_of
from fedfill.cli.options import Options, takes
from fedfill.errors import FedfillError, did_you_mean
from fedfill.runs.progress import progress

NAMES = ("natural",)


@takes({"data_dir", "device", "workers"})
def bench(
    options: Options,
    name: Annotated[str, typer.Argument(help="natural: real tables of many sites, and digits of four sources.")],
    sets: Annotated[
        str | None,
        typer.Option(
            help="Sets, separated by commas, such as digits-domains, for which --data-dir is needed. [default: all tables that are part of fedfill]"
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, separated by commas, also further personal ones. [default: those of every benchmark]"
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="fed3r with this epsilon in place of all federated methods. [default: no noise]"),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="Seeds, separated by commas. [default: 0,1,2]", show_default=False)
    ] = "0,1,2",
    tables: Annotated[
        Path | None,
        typer.Option(help="Folder with tables that are not part of fedfill, as NAME.csv. [default: none]"),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the runs; finished ones are not run again. [default: runs/natural]", show_default=False
        ),
    ] = Path("runs/natural"),
) -> None:
    """Run a benchmark: the same methods on real data of many sites."""
    if name not in NAMES:
        raise FedfillError(f"bench: found '{name}'; {did_you_mean(name, NAMES)}")
    from fedfill.studies import benchmark_files as files
    from fedfill.studies import natural

    names, some = (None if text is None else [part.strip() for part in text.split(",")] for text in (sets, methods))
    numbers = numbers_of(seeds)
    with progress(natural.count_runs(names, numbers, tables, some, epsilon, options.get("data_dir"))) as follow:
        found = natural.natural(
            names, seeds=numbers, out=out, tables=tables, methods=some, epsilon=epsilon, on_run=lambda label, seed: follow(f"{label}, seed {seed}"), quiet=True,
            **options,
        )  # fmt: skip
    _print(files.HEADER, files.table_of(found), 3)
    _print(files.GOALS, files.goal_lines(found), 2)
    terminal.paragraph(files.meanings(found))
    terminal.tell(f"\nTables: {out}/{files.PAGE}; each run: {files.TABLE}; each site: {files.SITES}")
    terminal.tell(f"Comparisons: {out}/SET/MODEL-seedN, the rows of a split: {out}/data/SET-seedN")


def _print(header: tuple[str, ...], lines: list[tuple[str, ...]], left: int) -> None:
    """A table, with a rule where the first column changes."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
    for k, column in enumerate(header):
        table.add_column(column, justify="left" if k < left else "right", overflow="fold")
    for k, line in enumerate(lines):
        if k and line[0] != lines[k - 1][0]:
            table.add_section()
        table.add_row(*line)
    terminal.out.print(table)
