"""What a terminal shows of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.table import Table

from fedfill.cli.terminal import out, paragraph, print_verdicts, tell
from fedfill.runs.shown import percent

if TYPE_CHECKING:
    from fedfill.studies.comparison import Comparison

LEAST = ("sec.", "traffic", "by validation", "AUC", "balanced", "RMSE", "own split")
"""What is left out of a table for want of room, in this order; the files have it."""
LONGEST_WORD = 32
"""Letters of a name that stand in one line at the least."""


def print_comparison(comparison: Comparison) -> None:
    """A row for each algorithm, with means over seeds and differences to the baseline; below what has to be known of it."""
    from fedfill.studies.comparison_table import table_of
    from fedfill.studies.sweep import sentence
    from fedfill.studies.verdicts import of_comparison

    results = [result for row in comparison.rows for result in row.finished]
    first, shown = comparison.first, table_of(comparison)
    left = left_out(shown.header, shown.rows, out.width)
    kept = [k for k, name in enumerate(shown.header) if name not in left]
    said = [one for one in (*shown.meanings, *shown.budgets) if one.partition(":")[0] not in left]
    if left:
        said.append(f"for want of room without {', '.join(left)}, which table.md has")
    table = _table([shown.header[k] for k in kept], shown.title, "; ".join(said))
    for cells in shown.rows:
        table.add_row(_broken(cells[0]), *(cells[k] for k in kept[1:]))
    out.print(table)
    out.print()
    _print_fairness(comparison)
    for row in comparison.rows:
        if row.sweep is not None:
            paragraph(f"{sentence(row.sweep)}.")
    if diverged := [row.label for row in comparison.rows if None in row.results]:
        paragraph(f"Not in the pictures, since a run diverged: {', '.join(diverged)}.")
    read = sum(result.was_finished for result in results)
    if read:
        paragraph(f"{read} of {len(results)} runs were finished before: they were read, and not run again.")
    for note in first["notes"]:
        paragraph(note)
    print_verdicts([verdict.sentence for verdict in of_comparison(comparison)])
    out.print(
        "\n[bold]Privacy[/bold] (what is protected, from whom, and what is not: each run's summary.json)", markup=True
    )
    for row in comparison.rows:
        # the last sentence is the sum of the account; seeds may differ in it
        totals = dict.fromkeys(result.summary["privacy"]["statement"].rsplit(". ", 1)[-1] for result in row.finished)
        if totals:
            paragraph(f"{row.label}: {' '.join(totals)}")
    folder = comparison.directory
    tell(f"\nRun directories: {folder}/<algorithm>-seed<seed>")
    tell(f"Tables: {folder}/table.md, table.tex, table.csv; all pairs: pairs.csv")
    tell(f"Each run and round: {folder}/comparison.csv, curves.csv; for 'fedfill report': comparison.json")
    if any(None not in row.results for row in comparison.rows):
        tell(f"Pictures: {folder}/accuracy.png, accuracy.svg, accuracy.pdf, final.png, final.svg")


def left_out(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The columns for which there is no room beside names that are not broken within a word.

    Args:
        header: Of the columns, the names' first.
        rows: Their cells.
        width: Of the terminal, in letters.

    Returns:
        The first of `LEAST`, so many as are needed, or all that the table has of these.
    """
    needed = {title: max(cell_len(row[k]) for row in (header, *rows)) for k, title in enumerate(header)}
    lines = [line for row in (header, *rows) for line in _broken(row[0]).splitlines()]
    needed[header[0]] = min(max(map(cell_len, lines)), LONGEST_WORD)
    left: list[str] = []
    # a blank stands on both sides of the table and between its columns
    while sum(needed.values()) + len(needed) + 1 > width and (least := [name for name in LEAST if name in needed]):
        left.append(least[0])
        del needed[least[0]]
    return left


def _print_fairness(comparison: Comparison) -> None:
    """Spread over clients and classes, where clients have test splits of their own."""
    if all(row.figure("mean_client_accuracy")[0] is None for row in comparison.rows):
        return
    score = comparison.headline[0]
    of_classes = score == "accuracy"
    table = _table(
        ["algorithm", "worst client", "worst tenth", "variance", *["class var."] * of_classes],
        "fairness",
        f"{score} of clients on their own test splits: the worst and the mean of the worst tenth in percent; variances are "
        f"means over seeds, in percent²{'; class var.: variance over classes of the test set' if of_classes else ''}",
    )
    for row in comparison.rows:
        table.add_row(
            _broken(row.label),
            percent(*row.figure("worst_client_accuracy")),
            percent(row.figure("worst_tenth_accuracy")[0], None),
            *(_variance(row.figure(name)[0]) for name in ("client_variance", *["class_variance"] * of_classes)),
        )
    out.print(table)
    out.print()


def _table(header: Sequence[str], title: str, caption: str) -> Table:
    """One without rows; names come first, and of them alone may lines be broken."""
    table = Table(
        title=title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=0, collapse_padding=True
    )  # fmt: skip
    table.add_column(header[0], overflow="fold")
    for column in header[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _broken(label: str) -> str:
    """A row's name, with each of its settings in a line of its own."""
    return label.replace(":", "\n ").replace(",", "\n ")


def _variance(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.1f}"
