"""A comparison's files: tidy figures, tables for papers, curves, pictures."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence

from scipy import stats

from fedfill.runs.directory import write_atomically, writing
from fedfill.studies.comparison import RECORD, Comparison, Row, record
from fedfill.studies.verdicts import points
from fedfill.training.evaluation import FAIRNESS

FIGURES = (
    "accuracy", "balanced_accuracy", "best_accuracy", *FAIRNESS, "selected_accuracy", "selected_mean_client_accuracy",
    "bytes_up", "bytes_down", "train_samples", "seconds",
)  # fmt: skip
CURVES = ("accuracy", "loss", "mean_client_accuracy", "worst_client_accuracy", "bytes_up", "bytes_down", "seconds")


def write_files(comparison: Comparison) -> None:
    """Write ``comparison.json``, ``comparison.csv``, ``table.csv``, ``table.md``, ``table.tex``, ``curves.csv`` and the pictures."""
    folder = comparison.directory
    for name, text in (
        ("comparison.csv", _tidy(comparison)),
        ("table.csv", _table(comparison)),
        ("curves.csv", _curves(comparison)),
        ("table.md", _markdown(comparison)),
        ("table.tex", _latex(comparison)),
    ):
        write_atomically(folder / name, text.encode())
    write_atomically(folder / RECORD, record(comparison))
    _draw(comparison)


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def _tidy(comparison: Comparison) -> str:
    """One line for each run and figure, for any plotting program."""
    return _csv(
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
                if deviation is not None:
                    half = float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)
                    low, high = str(mean - half), str(mean + half)
                yield row.label, name, mean, "" if deviation is None else deviation, low, high, n

    return _csv(("algorithm", "figure", "mean", "deviation", "low", "high", "n"), lines())


def _curves(comparison: Comparison) -> str:
    """One line for each run and round."""
    return _csv(
        ("algorithm", "seed", "round", *CURVES),
        (
            (row.label, seed, one["round"], *("" if one.get(name) is None else one[name] for name in CURVES))
            for row in comparison.rows
            for seed, result in zip(comparison.seeds, row.results, strict=True)
            if result is not None
            for one in result.rounds
        ),
    )


def _cells(comparison: Comparison, plus_minus: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table for a paper: percent, mean and standard deviation; differences with their 95 % interval."""

    def mean(row: Row, name: str) -> str:
        value, deviation = row.figure(name)
        if value is None:
            return "diverged" if None in row.results else "–"
        return f"{100 * value:.2f}" + ("" if deviation is None else f" {plus_minus} {100 * deviation:.2f}")

    def difference(row: Row) -> str:
        found = comparison.difference(row, "accuracy")
        return "–" if found is None else points(found).replace("±", plus_minus)

    def traffic(row: Row) -> str:
        up, down = row.figure("bytes_up")[0], row.figure("bytes_down")[0]
        return "–" if up is None or down is None else f"{(up + down) / 1e6:.1f}"

    header = ["algorithm", "everyone's test set", "own split", f"against {comparison.baseline.label}", "MB", "seeds"]
    rows = [
        [
            row.label,
            mean(row, "accuracy"),
            mean(row, "mean_client_accuracy"),
            difference(row),
            traffic(row),
            str(len(row.results)),
        ]
        for row in comparison.rows
    ]
    return header, rows


def _markdown(comparison: Comparison) -> str:
    header, rows = _cells(comparison, "±")
    # a bar in a cell would begin the next one
    lines = [
        [cell.replace("|", "\\|") for cell in line] for line in (header, ["---"] + ["---:"] * (len(header) - 1), *rows)
    ]
    return f"{comparison.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip


def _latex(comparison: Comparison) -> str:
    """A table for the package booktabs."""
    header, rows = _cells(comparison, "±")

    def line(cells: Sequence[str]) -> str:
        escaped = ("".join(_TEX.get(letter, letter) for letter in cell).replace("±", r"$\pm$") for cell in cells)
        return " & ".join(escaped) + r" \\"

    title = "".join(_TEX.get(letter, letter) for letter in comparison.title)
    body = [r"\toprule", line(header), r"\midrule", *map(line, rows), r"\bottomrule"]
    return "\n".join([f"% {title}", rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}", *body, r"\end{tabular}", ""])


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
        accuracy_curves(curves, folder / "accuracy.png", comparison.title)
        accuracy_bars(finals, folder / "final.png", comparison.title)
