"""A benchmark's tables, the same on a terminal and in files, and the files themselves."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedfill.data.natural import known_tables
from fedfill.files import read_regular
from fedfill.runs.directory import write_atomically
from fedfill.runs.shown import NOTHING, csv_text, markdown_table, size
from fedfill.studies.benchmark import AREAS, NEAR, WORTH, Benchmark, central_and_local, difference, goals
from fedfill.studies.comparison import Difference, Row

FIGURES = (
    "auc", "auc_within_clients", "accuracy", "brier", "calibration_error", "worst_client_accuracy", "bytes_up", "bytes_down",
    "seconds",
)  # fmt: skip
TABLE, SITES, PAGE = "natural.csv", "sites.csv", "natural.md"
"""Files of a benchmark's folder."""
HEADER = ("set", "model", "method", "AUC", "- central", "within sites", "- local", "sent up", "sec.")


def table_of(found: Benchmark) -> list[tuple[str, ...]]:
    """The cells below `HEADER`."""
    lines: list[tuple[str, ...]] = []
    for table, rows in found.rows.items():
        central, _ = central_and_local(found, table, "auc")
        _, local = central_and_local(found, table, "auc_within_clients")
        for (model, method), row in rows.items():
            to_central = None if central is None else difference(row, central[1], "auc")
            to_local = None if local is None else difference(row, local[1], "auc_within_clients")
            up, seconds = row.figure("bytes_up")[0], row.figure("seconds")[0]
            clients = row.finished[0].summary["clients"] if row.finished else 1
            lines.append(
                (
                    table, model, method, _area(row, "auc"), shown(to_central), _area(row, "auc_within_clients"), shown(to_local),
                    NOTHING if up is None or method == "central" else size(up / clients),
                    NOTHING if seconds is None else f"{seconds:.1f}",
                )
            )  # fmt: skip
    return lines


GOALS = ("set", "AUC over", "central", "local", "best federated", "its AUC", "- central", "- local", "goal")


def goal_lines(found: Benchmark) -> list[tuple[str, ...]]:
    """The cells below `GOALS`."""
    return [
        (
            goal.table, AREAS[goal.figure], _area(goal.central[1], goal.figure), _area(goal.local[1], goal.figure),
            f"{goal.best[1].label}, {goal.best[0]}", _area(goal.best[1], goal.figure),
            shown(goal.to_central), shown(goal.to_local), goal.sentence,
        )
        for goal in goals(found)
    ]  # fmt: skip


def meanings(found: Benchmark) -> str:
    """What the tables show, in sentences."""
    several = len(found.seeds) > 1
    spread = f"mean ± deviation over {len(found.seeds)} seeds" if several else "one seed, so no deviation"
    interval = ", with the 95 % interval of its mean (Student's t)" if several else ""
    noise = (
        ""
        if found.epsilon is None
        else f"fed3r: with noise in the sum, epsilon {found.epsilon:g} for one record that is added or removed, at delta 1e-5; central and "
        "local have no noise. "
    )
    return (
        f"{noise}AUC: {spread}, over all test rows; of methods with a model for each site, each row by its site's. Within sites: the mean of "
        f"the sites' own AUC, by their test rows. - central, - local: the difference, seed by seed, to the better of these rows{interval}; "
        "the first of AUC, the second within sites. Sent up: by one site in the whole run; sec.: of one run. The goal: the best "
        f"federated method is at most {NEAR} below central, and above local with its whole interval where central is {WORTH} or more above "
        "local. The best is picked by these same figures, so it is a little too good."
    )


def _area(row: Row, figure: str) -> str:
    mean, deviation = row.figure(figure)
    if mean is None:
        return "diverged" if None in row.results else NOTHING
    return f"{mean:.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")


def shown(found: Difference | None) -> str:
    """A difference of areas with its interval."""
    if found is None:
        return NOTHING
    return f"{found.mean:+.3f}" + ("" if found.half_width is None else f" ± {found.half_width:.3f}")


def write_files(found: Benchmark) -> None:
    """Write `PAGE`, `TABLE` and `SITES` into the benchmark's folder."""
    known = known_tables()
    parts = [markdown_table(HEADER, table_of(found), left=3), markdown_table(GOALS, goal_lines(found), left=2)]
    sets = "".join(f"* {name}: {known[name].title}. Label: {known[name].label}.\n" for name in found.rows)
    page = f"{parts[0]}\n{meanings(found)}\n\n{parts[1]}\n{sets}"
    run = ("set", "model", "method", "seed", "epsilon")
    for name, columns, lines in (
        (TABLE, ("figure", "value"), _figures(found)),
        (SITES, ("site", "test_rows", "auc", "accuracy"), _sites(found)),
    ):
        write_atomically(found.directory / name, csv_text(run + columns, lines).encode())
    write_atomically(found.directory / PAGE, page.encode())


def epsilon_of(folder: Path) -> str | None:
    """The guarantee of the benchmark in a folder, as its tables have it, empty where it has none; None: there is no benchmark."""
    if not (folder / TABLE).is_file():
        return None
    first = next(csv.DictReader(io.StringIO(read_regular(folder / TABLE).decode("utf-8", "replace"))), {})
    return first.get("epsilon")


def _runs(found: Benchmark) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for table, rows in found.rows.items():
        for (model, method), row in rows.items():
            for seed, result in zip(found.seeds, row.results, strict=True):
                if result is not None:
                    yield (
                        (table, model, method, seed, "" if found.epsilon is None else f"{found.epsilon:g}"),
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
