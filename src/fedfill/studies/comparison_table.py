"""The table of a comparison, the same on a terminal and in files: columns, cells, and what has to be known to read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedfill.experiment.verdicts import uneven
from fedfill.runs.shown import NOTHING, one_line, percent, size
from fedfill.studies.comparison import Comparison, Row
from fedfill.studies.verdicts import points

MEANINGS = {
    "R²": "on everyone's test set after the last round, in percent; 0 is always saying the mean",
    "C-index": "share of pairs of rows on the test set of which the one with the earlier event has the higher risk, in percent",
    "RMSE": "root mean squared error on the test set, in the target's unit",
    "accuracy": "on everyone's test set after the last round, in percent",
    "balanced": "the same, each class counted alike",
    "AUC": "area under the ROC curve on the test set, in percent, over classes one against the rest",
    "own split": "mean over clients, each on its own test split",
    "by validation": "on the test set after the round that validation splits chose",
}
_FIGURES = {
    "accuracy": "accuracy",
    "balanced": "balanced_accuracy",
    "AUC": "auc",
    "own split": "mean_client_accuracy",
    "by validation": "selected_accuracy",
}


@dataclass(frozen=True)
class Table:
    """What is shown of a comparison.

    Attributes:
        title: Data, partition, size and seeds.
        header: Of the columns, the algorithm first.
        rows: Cells, in the order of the comparison.
        meanings: What the columns are, and what stands behind ±.
        budgets: Which rows have other rounds than most.
        footnotes: What else a reader of the table alone has to know of a row.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    meanings: tuple[str, ...]
    budgets: tuple[str, ...]
    footnotes: tuple[str, ...]


def table_of(comparison: Comparison) -> Table:
    """The table of a comparison with at least one finished run."""
    of_numbers = comparison.first.get("target") == "number"
    name, figure = comparison.headline
    figures = {name: figure}
    if uneven(comparison.first):
        figures["balanced"] = _FIGURES["balanced"]
        if any(row.figure("auc")[0] is not None for row in comparison.rows):  # of older runs nobody knows it
            figures["AUC"] = _FIGURES["AUC"]
    for name in ("own split", "by validation"):
        if any(row.figure(_FIGURES[name])[0] is not None for row in comparison.rows):
            figures[name] = _FIGURES[name]
    beside = ["RMSE"] if of_numbers else []
    versus = f"- {comparison.baseline.label.partition(':')[0]}"
    first, *others = figures
    return Table(
        comparison.title,
        ("algorithm", first, versus, *beside, *others, "traffic", "sec."),
        tuple(_cells(comparison, row, [*figures.values()]) for row in comparison.rows),
        tuple(_meanings(comparison, [first, *beside, *others], versus)),
        tuple(_budgets(comparison.rows)),
        (*(f"not shared by {note}" for note in comparison.notes), *comparison.diverged),
    )


def _cells(comparison: Comparison, row: Row, figures: Sequence[str]) -> tuple[str, ...]:
    up, down, seconds = (row.figure(name)[0] for name in ("bytes_up", "bytes_down", "seconds"))
    whole = None not in row.results
    accuracy, *others = (percent(*row.figure(name)) for name in figures)
    difference = comparison.difference(row, comparison.headline[1])
    return (
        one_line(row.label),
        accuracy if whole else "diverged",
        NOTHING if difference is None else points(difference),
        *([_plain(*row.figure("rmse"))] if comparison.first.get("target") == "number" else []),
        *others,
        NOTHING if up is None or down is None else size(up + down),
        NOTHING if seconds is None else f"{seconds:.1f}",
    )


def _plain(mean: float | None, deviation: float | None) -> str:
    """A figure that is no share, in four figures."""
    if mean is None:
        return NOTHING
    return f"{mean:.4g}" + (f" ± {deviation:.2g}" if deviation is not None else "")


def _meanings(comparison: Comparison, columns: Sequence[str], versus: str) -> list[str]:
    n = len(comparison.seeds)
    said = [f"mean ± standard deviation over {n} seeds" if n > 1 else "one seed, so no deviation"]
    said += [f"{name}: {MEANINGS[name]}" for name in columns]
    interval = ", with the 95 % confidence interval of its mean (Student's t)" if n > 1 else ""
    said.append(f"{versus}: difference of {columns[0]} to {comparison.baseline.label}, seed by seed{interval}")
    differences = [comparison.difference(row, comparison.headline[1]) for row in comparison.rows]
    if n > 1 and any(found is not None and found.half_width is None for found in differences):
        said.append(f"a difference without ± is the same on all {n} seeds, from which no interval follows")
    return [*said, "traffic: sent up and down in a run", "sec.: of a run"]


def _budgets(rows: Sequence[Row]) -> list[str]:
    """The rows whose runs have fewer rounds, by their number."""
    rounds = {row.label: row.finished[0].summary["rounds"] for row in rows if row.finished}
    most = max(rounds.values())
    fewer: dict[int, list[str]] = {}
    for label, count in rounds.items():
        if count < most:
            fewer.setdefault(count, []).append(label)
    return [
        f"{', '.join(labels)}: {count} round{'' if count == 1 else 's'}, not {most}"
        for count, labels in sorted(fewer.items())
    ]
