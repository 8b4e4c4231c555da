"""A comparison's files: tidy figures, tables for papers, curves, pictures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from scipy import special

from fedfill.runs.directory import write_atomically, writing
from fedfill.runs.shown import NOTHING, csv_text, latex, markdown, markdown_table
from fedfill.statistics.survival import FIGURES as SURVIVAL
from fedfill.studies.comparison import ALIKE, RECORD, Comparison, Difference, record
from fedfill.studies.comparison_table import Table, table_of
from fedfill.training.evaluation import FAIRNESS
from fedfill.training.probabilities import FIGURES as PROBABILITIES
from fedfill.training.regression import FIGURES as NUMBERS

FIGURES = (
    "accuracy", "balanced_accuracy", *PROBABILITIES, *NUMBERS, *SURVIVAL, "best_accuracy", *FAIRNESS, "selected_accuracy", "selected_mean_client_accuracy",
    "bytes_up", "bytes_down", "train_samples", "seconds",
)  # fmt: skip
CURVES = ("accuracy", "loss", "mean_client_accuracy", "worst_client_accuracy", "bytes_up", "bytes_down", "seconds")
PAIRED = ("accuracy", "mean_client_accuracy")
"""Figures of which every pair of rows is told."""


def write_files(comparison: Comparison) -> None:
    """Write ``comparison.json``, the tables and the pictures; docs/comparing.md names all files."""
    folder, table = comparison.directory, table_of(comparison)
    for name, text in (
        ("comparison.csv", _tidy(comparison)),
        ("table.csv", _table(comparison)),
        ("curves.csv", _curves(comparison)),
        ("pairs.csv", _pairs(comparison)),
        ("table.md", _markdown(table)),
        ("table.tex", _latex(table)),
    ):
        write_atomically(folder / name, text.encode())
    write_atomically(folder / RECORD, record(comparison))
    _draw(comparison)


def _tidy(comparison: Comparison) -> str:
    """One line for each run and figure, for any plotting program."""
    return csv_text(
        ("algorithm", "seed", "figure", "value"),
        (
            (row.label, seed, name, result.summary[name])
            for row in comparison.rows
            for seed, result in zip(comparison.seeds, row.results, strict=True)
            if result is not None
            for name in FIGURES
            if result.summary.get(name) is not None
        ),
    )


def _table(comparison: Comparison) -> str:
    """One line for each row and figure: mean, standard deviation and 95 % interval of the mean (Student's t), and n."""

    def lines() -> Iterable[Sequence[object]]:
        for row in comparison.rows:
            for name in FIGURES:
                mean, deviation = row.figure(name)
                if mean is None:
                    continue
                n, low, high = len(row.results), "", ""
                if (
                    deviation is not None and deviation >= ALIKE
                ):  # as of differences: none follows from seeds that are alike
                    half = float(special.stdtrit(n - 1, 0.975)) * deviation / math.sqrt(n)
                    low, high = str(mean - half), str(mean + half)
                yield row.label, name, mean, "" if deviation is None else deviation, low, high, n

    return csv_text(("algorithm", "figure", "mean", "deviation", "low", "high", "n"), lines())


def _curves(comparison: Comparison) -> str:
    """One line for each run and round."""
    return csv_text(
        ("algorithm", "seed", "round", *CURVES),
        (
            (row.label, seed, one["round"], *("" if one.get(name) is None else one[name] for name in CURVES))
            for row in comparison.rows
            for seed, result in zip(comparison.seeds, row.results, strict=True)
            if result is not None
            for one in result.rounds
        ),
    )


def _pairs(comparison: Comparison) -> str:
    """One line for each pair of rows and figure: the paired difference, its 95 % interval, and that which holds for all pairs of this figure.

    The second one is Bonferroni's, for each figure by itself: each of its m intervals, one for each pair, holds with 1 - .05/m, so that all
    m hold with .95 or more. Of the intervals of both figures together nothing is said.
    """
    pairs = list(itertools.combinations(comparison.rows, 2))

    def lines() -> Iterable[Sequence[object]]:
        for name in PAIRED:
            for row, other in pairs:
                found = comparison.difference(row, name, other)
                wide = comparison.difference(row, name, other, missed=0.05 / len(pairs))
                if found is not None and wide is not None:
                    yield row.label, other.label, name, found.mean, *_ends(found), *_ends(wide), len(row.results)

    return csv_text(("algorithm", "other", "figure", "mean", "low", "high", "low_of_all", "high_of_all", "n"), lines())


def _ends(found: Difference) -> tuple[object, object]:
    half = found.half_width
    return ("", "") if half is None else (found.mean - half, found.mean + half)


def _markdown(table: Table) -> str:
    notes = [_sentence("; ".join((*table.meanings, *table.budgets))), *map(_sentence, table.footnotes)]
    lines = "".join(f"* {markdown(note)}\n" for note in notes)
    return f"{markdown(table.title)}\n\n{markdown_table(table.header, table.rows)}\n{lines}"


def _latex(table: Table) -> str:
    """A table for the package booktabs, and below it what has to be known of it."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join("--" if cell == NOTHING else latex(cell) for cell in cells) + r" \\"

    body = [r"\toprule", line(table.header), r"\midrule", *map(line, table.rows), r"\bottomrule"]
    first = f"{table.title}: {'; '.join((*table.meanings, *table.budgets))}."
    notes = [first, *map(_sentence, table.footnotes)]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}",
            *body,
            r"\end{tabular}",
            "",
            r"\medskip",
            r"{\footnotesize",
            *map(latex, notes),
            r"\par}",
            "",
        ]
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."


def _draw(comparison: Comparison) -> None:
    from fedfill.runs.pictures import (
        accuracy_bars,
        accuracy_curves,
    )  # here: matplotlib costs every start a third of a second

    folder = comparison.directory
    whole = [
        row for row in comparison.rows if None not in row.results
    ]  # the mean of those seeds that survive would flatter
    if not whole:
        return
    curves = {row.label: [result.curve for result in row.finished] for row in whole}
    finals = {row.label: (row.values("accuracy"), row.values("worst_client_accuracy")) for row in whole}
    with writing(folder):
        accuracy_curves(curves, folder / "accuracy.png", comparison.title, ("png", "svg", "pdf"))
        accuracy_bars(finals, folder / "final.png", comparison.title)
