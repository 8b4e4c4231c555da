"""The command that writes a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fedfill
from fedfill.cli import terminal


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN|COMPARISON|GRID|STUDY...", help="Folders. Several runs stand side by side."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The HTML file. [default: report.html in the folder; of several, runs/report.html]"),
    ] = None,
) -> None:
    """Write one page on runs, comparisons, a grid or a study.

    It is there to be sent to others: the file is whole in itself, and asks for nothing. Runs may be unfinished.
    """
    terminal.tell(f"Report: {fedfill.report(*paths, out=out)}")
