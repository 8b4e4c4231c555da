"""A benchmark's tables, the same on a terminal and in files, and the files themselves."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedfill.errors import FedfillError
from fedfill.files import read_regular
from fedfill.runs.directory import write_atomically
from fedfill.runs.shown import NOTHING, csv_text, markdown_table, size
from fedfill.studies.benchmark import NEAR, WORTH, Benchmark, central_and_local, difference, goals
from fedfill.studies.comparison import Difference, Row

FIGURES = (
    "auc", "auc_within_clients", "accuracy", "brier", "calibration_error", "mean_client_accuracy", "worst_client_accuracy",
    "bytes_up", "bytes_down", "seconds",
)  # fmt: skip
TABLE, SITES, PAGE = "natural.csv", "sites.csv", "natural.md"
"""Files of a benchmark's folder."""
HEADER = ("set", "model", "method", "score", "- central", "within sites", "- local", "sent up", "sec.")
SCORES = {
    "auc": "AUC", "auc_within_clients": "AUC within sites", "accuracy": "accuracy", "mean_client_accuracy": "accuracy within sites",
}  # fmt: skip
"""What the figures are called that methods are judged by."""


def table_of(found: Benchmark) -> list[tuple[str, ...]]:
    """The cells below `HEADER`."""
    lines: list[tuple[str, ...]] = []
    for name, rows in found.rows.items():
        score, within = found.sets[name].score, found.sets[name].within
        central, _ = central_and_local(found, name, score)
        _, local = central_and_local(found, name, within)
        for (model, method), row in rows.items():
            to_central = None if central is None else difference(row, central[1], score)
            to_local = None if local is None else difference(row, local[1], within)
            up, seconds = row.figure("bytes_up")[0], row.figure("seconds")[0]
            clients = row.finished[0].summary["clients"] if row.finished else 1
            lines.append(
                (
                    name, model, method, _spread(row, score), shown(to_central), _spread(row, within), shown(to_local),
                    NOTHING if up is None or method == "central" else size(up / clients),
                    NOTHING if seconds is None else f"{seconds:.1f}",
                )
            )  # fmt: skip
    return lines


GOALS = ("set", "score", "central", "local", "best federated", "its score", "- central", "- local", "goal")


def goal_lines(found: Benchmark) -> list[tuple[str, ...]]:
    """The cells below `GOALS`."""
    return [
        (
            goal.name, SCORES[goal.figure], _spread(goal.central[1], goal.figure), _spread(goal.local[1], goal.figure),
            f"{goal.best[1].label}, {goal.best[0]}", _spread(goal.best[1], goal.figure),
            shown(goal.to_central), shown(goal.to_local), goal.sentence,
        )
        for goal in goals(found)
    ]  # fmt: skip


def meanings(found: Benchmark) -> str:
    """What the tables show, in sentences."""
    several = len(found.seeds) > 1
    spread = f"Mean ± deviation over {len(found.seeds)} seeds" if several else "One seed, so no deviation"
    interval = ", with the 95 % interval of its mean (Student's t)" if several else ""
    noise = (
        ""
        if found.epsilon is None
        else f"fed3r: with noise in the sum, epsilon {found.epsilon:g} for one record that is added or removed, at delta 1e-5; central and "
        "local have no noise. "
    )
    return (
        f"{noise}{_of_scores(found)}. {spread}. Of methods with a model for each site, each sample is judged by its site's. - central, "
        f"- local: the difference, seed by seed, to the better of these rows{interval}; the first over all samples, the second within "
        "sites. Sent up: by one site in the whole run; sec.: of one run. The "
        f"goal: the best federated method is at most {NEAR} below central, and above local with its whole interval where central is "
        f"{WORTH} or more above local. The best is picked by these same figures, so it is a little too good."
    )


def _of_scores(found: Benchmark) -> str:
    """What the sets are judged by."""
    by_accuracy = [name for name in found.rows if found.sets[name].score == "accuracy"]
    area = "AUC over all test samples; within sites: the mean of the sites' own AUC, by their test samples"
    accuracy = (
        "accuracy over all test samples; within sites: the mean of the sites' own accuracy, each site counted once"
    )
    if not by_accuracy:
        return f"Score: {area}"
    whole = len(by_accuracy) == len(found.rows)
    return f"Score: {accuracy}" if whole else f"Score: {area}. Of {', '.join(by_accuracy)} {accuracy}"


def _spread(row: Row, figure: str) -> str:
    mean, deviation = row.figure(figure)
    if mean is None:
        return "diverged" if None in row.results else NOTHING
    return f"{mean:.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")


def shown(found: Difference | None) -> str:
    """A difference of scores with its interval."""
    if found is None:
        return NOTHING
    return f"{found.mean:+.3f}" + ("" if found.half_width is None else f" ± {found.half_width:.3f}")


def write_files(found: Benchmark) -> None:
    """Write `PAGE`, `TABLE` and `SITES` into the benchmark's folder."""
    parts = [markdown_table(HEADER, table_of(found), left=3), markdown_table(GOALS, goal_lines(found), left=2)]
    sets = "".join(f"* {name}: {found.sets[name].title}. Label: {found.sets[name].label}.\n" for name in found.rows)
    page = f"{parts[0]}\n{meanings(found)}\n\n{parts[1]}\n{sets}"
    run = ("set", "model", "method", "seed", "epsilon")
    for name, columns, lines in (
        (TABLE, ("figure", "value"), _figures(found)),
        (SITES, ("site", "test_rows", "auc", "accuracy"), _sites(found)),
    ):
        write_atomically(found.directory / name, csv_text(run + columns, lines).encode())
    write_atomically(found.directory / PAGE, page.encode())


def epsilon_of(folder: Path) -> str | None:
    """The guarantee of the benchmark in a folder.

    Args:
        folder: Of the benchmark.

    Returns:
        As its tables have it, empty where it has none; None: there is no benchmark, or one without runs.

    Raises:
        FedfillError: Where `TABLE` is not what a benchmark writes.
    """
    if not (folder / TABLE).is_file():
        return None
    text = read_regular(folder / TABLE).decode("utf-8", "replace")
    try:
        lines = csv.DictReader(io.StringIO(text, newline=""))
        known, first = "epsilon" in (lines.fieldnames or ()), next(lines, {})
    except csv.Error:
        known = False
    if not known:
        raise FedfillError(
            f"out: {folder / TABLE} is damaged, or another program's; if it is a benchmark's, remove it with {PAGE} and {SITES}: they are "
            "made again"
        )
    return first.get("epsilon")


def _runs(found: Benchmark) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for name, rows in found.rows.items():
        for (model, method), row in rows.items():
            for seed, result in zip(found.seeds, row.results, strict=True):
                if result is not None:
                    yield (
                        (name, model, method, seed, "" if found.epsilon is None else f"{found.epsilon:g}"),
                        result.summary,
                    )


def _figures(found: Benchmark) -> Iterator[Sequence[Any]]:
    """One line for each run and figure."""
    for key, summary in _runs(found):
        yield from ((*key, name, summary[name]) for name in FIGURES if summary.get(name) is not None)


def _sites(found: Benchmark) -> Iterator[Sequence[Any]]:
    """One line for each run and site that has test rows; no AUC where these are of one class."""
    for key, summary in _runs(found):
        columns = (
            summary["client_names"],
            summary["own_test_samples"],
            summary["auc_by_client"],
            summary["accuracy_by_client"],
        )
        for site, rows, area, accuracy in zip(*columns, strict=True):
            if rows:
                yield (*key, site, rows, "" if area is None else area, accuracy)
