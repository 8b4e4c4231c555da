"""What a comparison found: rows of runs, paired differences, and the folder that holds them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scipy import special

from fedfill.errors import FedfillError
from fedfill.experiment.summary import Result
from fedfill.files import read_regular
from fedfill.runs.directory import RunDirectory, to_json
from fedfill.runs.shown import headline_of, html_table

if TYPE_CHECKING:
    import pandas

RECORD = "comparison.json"
ALIKE = 1e-9
"""Deviations of shares below this are rounding, and none."""


@dataclass(frozen=True)
class Sweep:
    """A setting that validation splits chose.

    Attributes:
        asked: As it was asked for: ``"fedprox:mu=0.001|0.01"``.
        validation: By candidate, such as ``"fedprox:mu=0.01"``, the mean over seeds of the accuracy on the clients'
            validation splits in the best round by these; None for one of which a run diverged.
    """

    asked: str
    validation: Mapping[str, float | None]

    @property
    def chosen(self) -> str:
        """The candidate of the highest figure, the first of several; the first of all where every one diverged."""
        return max(self.validation, key=lambda label: -math.inf if (v := self.validation[label]) is None else v)


@dataclass(frozen=True)
class Row:
    """One algorithm's runs.

    Attributes:
        label: The algorithm, with its own settings where it was given some; of a sweep, those that were chosen.
        results: For each seed the finished run, or None where its training diverged.
        sweep: How its settings were chosen, where they were.
    """

    label: str
    results: tuple[Result | None, ...]
    sweep: Sweep | None = None

    def figure(self, name: str) -> tuple[float | None, float | None]:
        """Mean and sample standard deviation over seeds; no deviation for a single seed, and nothing where a run has no figure."""
        values = self.values(name)
        if any(value is None for value in values):
            return None, None
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None

    def values(self, name: str) -> list[Any]:
        """A figure of each run, in the order of the seeds; None for one that diverged or that has no such figure."""
        return [result.summary.get(name) if result is not None else None for result in self.results]

    @property
    def finished(self) -> list[Result]:
        """The runs that came to their end, in the order of the seeds."""
        return [result for result in self.results if result is not None]


@dataclass(frozen=True)
class Difference:
    """How far one mean is from another, seed by seed: the same clients, data and initial weights on both sides.

    Attributes:
        mean: Of the differences.
        half_width: Of the 95 % confidence interval of their mean (Student's t over the seeds); None for a single seed, and where
            all seeds differ alike.
    """

    mean: float
    half_width: float | None

    @property
    def within_noise(self) -> bool:
        """Whether the interval holds zero; so does one that has no end."""
        return self.half_width is None or abs(self.mean) <= self.half_width


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        rows: In the order asked for.
        seeds: Of each row's runs.
        directory: Where the runs lie, each in its own folder, with tables, curves and pictures.
        baseline: The row that differences are taken to: the first FedAvg, or the first row where there is none.
        notes: Where a row could not share network, initial weights or local budget with the baseline.
        diverged: A sentence for each run that diverged; the pictures leave its row out.
    """

    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    directory: Path
    baseline: Row
    notes: tuple[str, ...] = ()
    diverged: tuple[str, ...] = field(default=())

    @property
    def headline(self) -> tuple[str, str]:
        """What methods are compared by: its name for people, and the figure's."""
        return headline_of(self.first)

    def difference(self, row: Row, name: str, other: Row | None = None, missed: float = 0.05) -> Difference | None:
        """The paired difference of a row's figure to the baseline's.

        Args:
            row: Whose.
            name: Of the figure.
            other: A row in place of the baseline.
            missed: With which probability the interval may miss the mean.

        Returns:
            None where a run has no such figure, or the two are the same row.
        """
        other = other or self.baseline
        pairs = list(zip(row.values(name), other.values(name), strict=True))
        if row is other or any(value is None for pair in pairs for value in pair):
            return None
        return paired_difference([own - base for own, base in pairs], missed)

    def to_frame(self) -> pandas.DataFrame:
        """A line for each run, with algorithm, seed and figures; of one that diverged there are none."""
        import pandas  # here: it takes half a second

        lines = []
        for row in self.rows:
            for seed, result in zip(self.seeds, row.results, strict=True):
                found = result.summary if result is not None else {}
                figures = {name: found.get(name) for name in self._figures()}
                lines.append({"algorithm": row.label, "seed": seed, **figures})
        return pandas.DataFrame(lines)

    def _figures(self) -> list[str]:
        """Names of the figures that are numbers, in the order of a summary, without what all runs share."""
        shared = {"clients", "rounds", "seed", "workers"}
        return [k for k, v in self.first.items() if isinstance(v, int | float) and k not in shared]

    def __repr__(self) -> str:
        rows = ", ".join(f"{row.label} {_percent(row, self.headline[1])}" for row in self.rows)
        return f"<Comparison: {self.title}, in {self.directory}:\n {rows}>"

    def _repr_html_(self) -> str:
        name, figure = self.headline
        cells = [(row.label, _percent(row, figure), _versus(self.difference(row, figure))) for row in self.rows]
        header = ("algorithm", f"{name}, %", f"difference to {self.baseline.label}")
        return html_table(self.title, header, cells)

    @property
    def first(self) -> dict[str, Any]:
        """The summary of the first run that came to its end: what all runs share stands in it."""
        return next(result for row in self.rows for result in row.finished).summary

    @property
    def title(self) -> str:
        """Data, partition and size, for tables and pictures."""
        first, several = self.first, len(self.seeds) > 1
        most = max(
            result.summary["rounds"] for row in self.rows for result in row.finished
        )  # some take one round alone
        rounds = f"{most} round{'s' if most > 1 else ''}"
        seeds = f"seed{'s' if several else ''} {', '.join(map(str, self.seeds))}"
        return f"{first['dataset']}, {first['partition']}, {first['clients']} clients, {rounds}, {seeds}"


def paired_difference(differences: Sequence[float], missed: float = 0.05) -> Difference:
    """Mean of paired differences, and the confidence interval that misses theirs with this probability.

    Seeds that all differ alike have no interval: their deviation of zero says that a test set of finite size has so few
    possible figures, and not that the next seed is known.
    """
    n = len(differences)
    mean = statistics.fmean(differences)
    if n < 2 or (deviation := statistics.stdev(differences)) < ALIKE:
        return Difference(mean, None)
    return Difference(mean, float(special.stdtrit(n - 1, 1 - missed / 2)) * deviation / math.sqrt(n))


def record(comparison: Comparison) -> bytes:
    """What ``comparison.json`` holds: which runs make which row, and what no run of its own says."""
    rows = [
        {
            "label": row.label,
            "folders": [None if result is None else result.directory.name for result in row.results],
            **({} if row.sweep is None else {"asked": row.sweep.asked, "validation": dict(row.sweep.validation)}),
        }
        for row in comparison.rows
    ]
    return to_json(
        {
            "title": comparison.title,
            "seeds": list(comparison.seeds),
            "baseline": comparison.baseline.label,
            "rows": rows,
            "notes": list(comparison.notes),
            "diverged": list(comparison.diverged),
        }
    )


def read_comparison(path: str | Path) -> Comparison:
    """A comparison as its folder holds it; nothing is run, and no weights are read.

    Args:
        path: Its folder.

    Returns:
        Its rows, whose results have no weights.

    Raises:
        FedfillError: Where the folder holds no comparison, or it is damaged.
    """
    folder = Path(path)
    place = folder / RECORD
    try:
        document = json.loads(read_regular(place))
        rows = tuple(_row(folder, row) for row in document["rows"])
        baseline = next(row for row in rows if row.label == document["baseline"])
        seeds = tuple(int(seed) for seed in document["seeds"])
        notes, diverged = (tuple(map(str, document[name])) for name in ("notes", "diverged"))
    except FileNotFoundError:
        raise FedfillError(f"comparison: {folder} holds none (there is no {RECORD})") from None
    except OSError as error:
        raise FedfillError(f"comparison: can't read {place} ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise FedfillError(f"comparison: {place} is damaged; run the same comparison again") from error
    if any(len(row.results) != len(seeds) for row in rows) or not any(row.finished for row in rows):
        raise FedfillError(f"comparison: {place} is damaged; run the same comparison again")
    return Comparison(rows, seeds, folder, baseline, notes, diverged)


def _row(folder: Path, document: Mapping[str, Any]) -> Row:
    # names alone: a record may not lead out of its folder
    folders = [None if name is None else folder / Path(str(name)).name for name in document["folders"]]
    sweep = Sweep(str(document["asked"]), dict(document["validation"])) if "asked" in document else None
    return Row(str(document["label"]), tuple(None if one is None else read_figures(one) for one in folders), sweep)


def read_figures(path: Path) -> Result:
    """A finished run's figures, without its weights.

    Args:
        path: Its folder.

    Returns:
        The run.

    Raises:
        FedfillError: Where there is none, or it is not finished.
    """
    place = RunDirectory(path)
    summary = place.summary()
    if summary is None:
        raise FedfillError(f"run: {path} holds no finished run; allowed: a folder with a summary.json")
    rounds = place.rounds()
    return Result(path, summary, rounds, {}, len(rounds))


def _percent(row: Row, figure: str) -> str:
    mean, deviation = row.figure(figure)
    if mean is None:
        return "diverged"
    return f"{100 * mean:.2f}" + (f" ± {100 * deviation:.2f}" if deviation is not None else "")


def _versus(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    width = f" ± {100 * difference.half_width:.2f}" if difference.half_width is not None else ""
    return f"{100 * difference.mean:+.2f}{width}"
