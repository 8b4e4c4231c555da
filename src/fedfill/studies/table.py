"""A paper's table: what it holds, the runs that have filled it, and its page.

A table is a folder with ``table.toml``: the options that all rows share, and for each row an algorithm, options of its
own and the paper's figure. Finished runs are collected in ``results.json`` beside it, and ``README.md`` shows them between two
marks.
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fedfill.errors import FedfillError, checked, did_you_mean
from fedfill.experiment.settings import INCIDENTAL
from fedfill.experiment.summary import OF_TRAINED_HEAD
from fedfill.files import read_regular
from fedfill.runs.directory import read_toml, write_atomically, writing
from fedfill.training.evaluation import FAIRNESS

BEGIN, END = "<!-- figures: written by fedfill reproduce -->", "<!-- end of figures -->"
FIGURES = (
    "accuracy", "best_accuracy", *FAIRNESS, "selected_accuracy", "selected_mean_client_accuracy",
    *OF_TRAINED_HEAD, "epsilon", "epsilon_added", "part_epsilon_added", "client_epsilon", "synthetic_accuracy",
)  # fmt: skip
"""What a table may compare, beside ``client:K`` and ``selected_client:K``, the accuracy on client K's own test split."""
LISTS = {"client": "accuracy_by_client", "selected_client": "selected_accuracy_by_client"}
REQUIRED = (
    "accuracy",
    "best_accuracy",
    *FAIRNESS,
    "best_round",
    "bytes_up",
    "bytes_down",
    "seconds",
    "machine",
    "weights_sha256",
)
KEPT = (
    *REQUIRED,
    "selected_accuracy",
    "selected_mean_client_accuracy",
    "selected_round",
    *OF_TRAINED_HEAD,
    "epsilon",
    "epsilon_added",
    "part_epsilon_added",
    "client_epsilon",
    "synthetic_accuracy",
    *LISTS.values(),
    "curve",
    "diverged",
    "version",
)
COSTS = ("epsilon_added", "epsilon", "part_epsilon_added", "client_epsilon", "bytes_up", "seconds")
PICTURE, AGAINST = "accuracy.png", "against.png"


class TableRow(BaseModel):
    """One row of a table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """As the README shows it."""
    algorithm: str
    """Its name in fedfill."""
    paper: dict[str, float] = Field(default_factory=dict)
    """The paper's figures, by the names in summary.json; none for a row that the paper lacks."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of this row alone."""
    series: str | None = None
    """The line of the picture of accuracy against a cost that this row is a point of; none: it is no point."""
    shows: str | None = None
    """Which of the table's figures the point has; none: the first."""
    cost: str | None = None
    """What the point costs, of `COSTS`; none: what the table's others cost."""


class TableFile(BaseModel):
    """What ``table.toml`` holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    """Of the README."""
    source: str
    """Paper and table."""
    figures: list[str] = Field(min_length=1)
    """Which figures of summary.json the paper reports, the first of them first."""
    seeds: list[int] = Field(default_factory=lambda: [0, 1, 2], min_length=1)
    """Seeds that are run where none are asked for."""
    per_class: int | None = Field(default=None, ge=1)
    """How many synthetic samples of each class are made for synthetic_accuracy, the accuracy of a classifier that saw them alone;
    none: those that each run's picture shows."""
    curves: bool = False
    """Whether the README has a picture of the accuracy per round."""
    against: str | None = None
    """The cost that the first figure, or what a row ``shows``, is drawn against, of `COSTS`; none: there is no such picture."""
    titles: dict[str, str] = Field(default_factory=dict)
    """Words for figures, in place of their names."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of all rows."""
    rows: list[TableRow] = Field(min_length=1)
    """In the order of the README."""


@dataclass(frozen=True)
class Entry:
    """One run of a row that is finished, or whose training diverged.

    Attributes:
        row: Its name.
        seed: Of the run.
        digest: Identifies the run: settings, data, initial weights and version, but not the machine.
        figures: Those of `KEPT`; ``curve`` has the accuracy on the test set by round, ``diverged`` the sentence of a run that
            diverged, which has a curve up to there and nothing else.
    """

    row: str
    seed: int
    digest: str
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class Reproduction:
    """A table with what is known of it.

    Attributes:
        folder: Where table.toml, results.json and README.md lie.
        table: The table.
        entries: Of all rows, as far as they were run with the present settings, data and version.
        others: What else ``results.json`` holds.
    """

    folder: Path
    table: TableFile
    entries: tuple[Entry, ...]
    others: tuple[Entry, ...] = ()

    def of(self, row: TableRow) -> list[Entry]:
        """The runs of a row, by seed."""
        return sorted((entry for entry in self.entries if entry.row == row.name), key=lambda entry: entry.seed)


def read_table(folder: Path) -> TableFile:
    """What a table's folder holds in ``table.toml``.

    Slips are found here that would otherwise show when the first run has ended.
    """
    table = checked(TableFile, read_toml(folder / "table.toml", "table"), "table.toml")
    names = [row.name for row in table.rows]
    if twice := [name for k, name in enumerate(names) if name in names[:k]]:
        raise FedfillError(f"rows: the name '{twice[0]}' is given twice")
    for name in [*table.figures, *table.titles, *(figure for row in table.rows for figure in row.paper)]:
        if name not in FIGURES and not _OF_CLIENT.fullmatch(name):
            raise FedfillError(f"figures: found '{name}'; {did_you_mean(name, FIGURES)}")
    for name, cost in (("against", table.against), *(("cost", row.cost) for row in table.rows)):
        if cost not in (None, *COSTS):
            raise FedfillError(f"{name}: found '{cost}'; {did_you_mean(str(cost), COSTS)}")
    for row in table.rows:
        if row.shows not in (None, *table.figures):
            raise FedfillError(f"shows: found '{row.shows}'; {did_you_mean(str(row.shows), table.figures)}")
    for given in (table.options, *(row.options for row in table.rows)):
        for name in given.keys() & {"seed", "algorithm", "engine", *INCIDENTAL}:
            raise FedfillError(f"options: found '{name}', which no table may set; leave it out")
    return table


_OF_CLIENT = re.compile(r"(selected_client|client):(\d+)")


def find_table(table: str | Path) -> Path:
    """The folder of a table."""
    for folder in (Path(table), Path("experiments") / table):
        if (folder / "table.toml").is_file():
            return folder
    known = sorted(path.parent.name for path in Path("experiments").glob("*/table.toml"))
    hint = (
        did_you_mean(str(table), known)
        if known
        else "allowed: a folder that holds a table.toml; names are those below 'experiments' in the root of a clone"
    )
    raise FedfillError(f"table: found no table.toml in '{table}'; {hint}")


def write(found: Reproduction) -> None:
    """Write ``results.json`` and the figures in ``README.md``; whatever else the README says stays."""
    order = {row.name: k for k, row in enumerate(found.table.rows)}
    entries = sorted(found.entries, key=lambda entry: (order[entry.row], entry.seed))
    document = [
        {"row": e.row, "seed": e.seed, "digest": e.digest}
        | {name: value for name, value in e.figures.items() if name in REQUIRED or value not in (None, {})}
        for e in (*entries, *found.others)
    ]
    lines = ",\n".join(map(json.dumps, document))  # one for each run
    write_atomically(found.folder / "results.json", f"[\n{lines}\n]\n".encode())
    if curves := _curves(found):
        from fedfill.runs.pictures import accuracy_curves  # here: matplotlib costs every start a third of a second

        accuracy_curves(curves, found.folder / PICTURE)
    if points := _points(found):
        from fedfill.runs.pictures import accuracy_against

        accuracy_against(points, _cost(found.table), found.folder / AGAINST, found.table.title)
    head, tail = frame(found.folder, found.table)
    write_atomically(found.folder / "README.md", f"{head}{BEGIN}\n{markdown(found)}{END}{tail}".encode())


def _curves(found: Reproduction) -> dict[str, list[dict[int, float]]]:
    """Accuracies by round of the rows that have some, where the table wants a picture of them."""
    rows = found.table.rows if found.table.curves else []
    runs = {row.name: found.of(row) for row in rows}
    curves = {name: [run.figures["curve"] for run in of] for name, of in runs.items() if not _diverged(of)}
    return {name: seeds for name, seeds in curves.items() if seeds and all(seeds)}


def _points(found: Reproduction) -> dict[str, list[tuple[float, list[float]]]]:
    """Cost and first figure of all rows that are points of a series, by series."""
    series: dict[str, list[tuple[float, list[float]]]] = {}
    for row in found.table.rows if found.table.against else []:
        runs, figure = found.of(row), row.shows or found.table.figures[0]
        cost, values = _mean(runs, row.cost or str(found.table.against)), [_value(run, figure) for run in runs]
        if row.series and cost and _mean(runs, figure) is not None and not _diverged(runs):
            series.setdefault(row.series, []).append((cost, [value for value in values if value is not None]))
    return series


def _cost(table: TableFile) -> str:
    return table.titles.get(str(table.against), _title(str(table.against)))


def frame(folder: Path, table: TableFile) -> tuple[str, str]:
    """What the README says before the figures and behind them."""
    path = folder / "README.md"
    with writing(path):
        text = path.read_text() if path.exists() else f"# {table.title}\n\n{_wrapped(table.source)}\n\n{BEGIN}\n{END}\n"
    head, _, rest = text.partition(BEGIN)
    if text.count(BEGIN) != 1 or text.count(END) != 1 or END in head:
        raise FedfillError(f"out: {path} must hold the line '{BEGIN}' and behind it the line '{END}', once each")
    return head, rest.partition(END)[2]


def markdown(found: Reproduction) -> str:
    """The figures as a Markdown table."""
    titles = {
        name: found.table.titles.get(name, _title(name)) for name in (*found.table.figures, "accuracy", "best_accuracy")
    }
    compared = any(row.paper for row in found.table.rows)
    heads = [f"{titles[name]}: paper | ours | difference" if compared else titles[name] for name in found.table.figures]
    # without a paper nobody asks for its best round
    others = [name for name in ("accuracy", "best_accuracy") if compared and name not in found.table.figures]
    columns = ["", *heads, *(titles[name] for name in others), "seeds", "MB up + down", "seconds", "machine"]
    lines = ["| " + " | ".join(columns) + " |"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for row in found.table.rows:
        runs = found.of(row)
        cells = [row.name]
        for name in found.table.figures:
            ours, paper = _mean(runs, name), row.paper.get(name)
            apart = "–" if ours is None or paper is None else _number(ours - paper, name, "+")
            beside = ["–" if paper is None else _number(paper, name), _spread(runs, name), apart]
            cells += beside if compared else beside[1:2]
        cells += [_spread(runs, name) for name in others]
        finished = [run for run in runs if not _diverged([run])]
        megabytes = [(run.figures["bytes_up"] + run.figures["bytes_down"]) / 1e6 for run in finished]
        cells += [
            ", ".join(str(run.seed) for run in runs) or "–",
            f"{statistics.fmean(megabytes):,.0f}" if finished else "–",
            f"{statistics.fmean(run.figures['seconds'] for run in finished):,.0f}" if finished else "–",
            "; ".join(dict.fromkeys(run.figures["machine"] for run in finished)) or "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    words = "best: the best round, chosen on the test set" if "best_accuracy" in (*found.table.figures, *others) else ""
    versions = " and ".join(
        dict.fromkeys(run.figures["version"] for run in found.entries if run.figures.get("version"))
    )
    note = "; ".join(
        part
        for part in (
            versions and f"Version {versions}",
            "means over seeds ± standard deviation",
            "seconds per run",
            words,
        )
        if part
    )
    note = f"{note[0].upper()}{note[1:]}."
    against = ["", f"![accuracy against {_cost(found.table)}]({AGAINST})"] if _points(found) else []
    picture = ["", f"![accuracy per round]({PICTURE})"] if _curves(found) else []
    if picture and (out := [row.name for row in found.table.rows if _diverged(found.of(row))]):
        picture += ["", f"Not in the picture, since a run diverged: {', '.join(out)}."]
    ends = [f"{run.row}, seed {run.seed}: {run.figures['diverged']}." for run in found.entries if _diverged([run])]
    prose = [note, *(line for end in ends for line in ("", end)), *picture, *against]
    return "\n".join([*lines, "", *map(_wrapped, prose)]) + "\n"


def _wrapped(prose: str) -> str:
    """A paragraph in lines of at most 120."""
    return textwrap.fill(prose, 120, break_long_words=False, break_on_hyphens=False)


def _title(figure: str) -> str:
    return {"accuracy": "last round", "best_accuracy": "best round"}.get(figure, figure.replace("_", " "))


def _number(value: float, figure: str, sign: str = "") -> str:
    return f"{value:{sign}.1f}" if figure.endswith("variance") else f"{value:{sign}.4f}"


def _value(run: Entry, figure: str) -> float | None:
    of_client = _OF_CLIENT.fullmatch(figure)
    if of_client is None:
        return run.figures.get(figure)
    values = run.figures.get(LISTS[of_client[1]]) or []
    return values[int(of_client[2])] if int(of_client[2]) < len(values) else None


def _mean(runs: Sequence[Entry], figure: str) -> float | None:
    values = [value for run in runs if (value := _value(run, figure)) is not None]
    return statistics.fmean(values) if values and len(values) == len(runs) else None


def _diverged(runs: Sequence[Entry]) -> bool:
    """Whether any did: the mean of those that did not would flatter the row."""
    return any(run.figures.get("diverged") for run in runs)


def _spread(runs: Sequence[Entry], figure: str) -> str:
    if _diverged(runs):
        return "diverged"
    mean = _mean(runs, figure)
    if mean is None:
        return "–"
    values = [value for run in runs if (value := _value(run, figure)) is not None]
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return _number(mean, figure) + ("" if deviation is None else f" ± {_number(deviation, figure)}")


def read_entries(folder: Path) -> list[Entry]:
    """The runs that ``results.json`` holds, of the present settings or not."""
    path = folder / "results.json"
    if not path.exists():
        return []
    try:
        document = json.loads(read_regular(path))
        return [
            Entry(
                item["row"],
                item["seed"],
                item["digest"],
                {
                    **{name: item.get(name) for name in KEPT},
                    **{name: item[name] for name in REQUIRED},
                    "curve": {int(t): float(accuracy) for t, accuracy in item.get("curve", {}).items()},
                },
            )
            for item in document
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FedfillError(
            f"table: {path} is damaged ({type(error).__name__}: {error}); remove it and run the table again"
        ) from error
