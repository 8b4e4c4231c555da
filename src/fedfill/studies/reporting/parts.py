"""What a report tells, gathered from folders: runs, comparisons, grids and studies as plain frozen values, without data or weights."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedfill.errors import FedfillError
from fedfill.experiment.settings import DATA, INCIDENTAL, PLACES
from fedfill.experiment.summary import Result
from fedfill.experiment.verdicts import Verdict, of_run
from fedfill.files import read_regular
from fedfill.runs.directory import RunDirectory
from fedfill.runs.records import Division, Summary, require, require_rounds
from fedfill.runs.shown import headline_of
from fedfill.studies.compare import BUDGET
from fedfill.studies.comparison import RECORD, Comparison, Row, read_comparison
from fedfill.studies.grid import TABLE
from fedfill.studies.reporting.answer import Answer, read_answer
from fedfill.studies.reporting.grids import read_grid_table
from fedfill.studies.study import RECORD as STUDY
from fedfill.studies.verdicts import NOT_SHARED, of_comparison

OURS = ("experiment.toml", RECORD, TABLE, STUDY)
"""What a folder of a run, a comparison, a grid and a study has."""


@dataclass(frozen=True)
class Holdings:
    """Who holds what.

    Attributes:
        class_names: Of the classes.
        client_names: Of the clients: numbers, and domains where there are any.
        counts: ``[clients][classes]`` training samples.
    """

    class_names: tuple[str, ...]
    client_names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Trial:
    """One run as its folder holds it.

    Attributes:
        folder: The run directory.
        experiment: What ``experiment.toml`` says.
        figures: Those of ``summary.json``; of an unfinished run what its last evaluated round says, and nothing before.
        rounds: The records of the rounds that are done.
        holdings: Who holds what; None where it stays with the clients.
        picture: Of synthetic samples, the last one; None where there is none.
        finished: Whether all rounds are done.
        deployed: Whether it was a federation of real hosts.
    """

    folder: Path
    experiment: Mapping[str, Any]
    figures: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    holdings: Holdings | None
    picture: Path | None
    finished: bool
    deployed: bool

    @property
    def result(self) -> Result:
        """The run, without its weights."""
        return Result(self.folder, dict(self.figures), [dict(record) for record in self.rounds], {}, len(self.rounds))

    def curve(self, name: str) -> dict[int, float]:
        """A figure by round, of the rounds that have it."""
        return {r["round"]: float(r[name]) for r in self.rounds if r.get(name) is not None}


@dataclass(frozen=True)
class Line:
    """Runs that differ in their seed alone.

    Attributes:
        label: What they are called.
        trials: One for each seed; None where training diverged.
    """

    label: str
    trials: tuple[Trial | None, ...]

    @property
    def known(self) -> tuple[Trial, ...]:
        """The runs that have figures."""
        return tuple(trial for trial in self.trials if trial is not None and trial.figures)

    def values(self, name: str) -> list[float]:
        """A figure of each run that has it."""
        return [float(trial.figures[name]) for trial in self.known if trial.figures.get(name) is not None]

    def mean(self, name: str) -> float | None:
        """A figure's mean over the runs; None where one of these lacks it."""
        values = self.values(name)
        return statistics.fmean(values) if values and len(values) == len(self.known) else None

    def by_item(self, name: str) -> list[float | None]:
        """Of a figure with one value for each class, or each client, the means over the runs."""
        lists = [trial.figures.get(name) or [] for trial in self.known]
        if not lists or len({len(one) for one in lists}) != 1:
            return []
        columns = ([value for value in column if value is not None] for column in zip(*lists, strict=True))
        return [statistics.fmean(column) if column else None for column in columns]

    @property
    def scored(self) -> bool:
        """Whether its models tell records apart, so that they have scores."""
        return any(trial.figures.get("best_accuracy") is not None for trial in self.known)

    @property
    def personal(self) -> bool:
        """Whether clients have models of their own."""
        return any(trial.figures.get("personal") for trial in self.known)


@dataclass(frozen=True)
class Part:
    """One subject of a report: runs side by side.

    Attributes:
        title: Data, partition and size.
        lines: The runs, those of one method together.
        seeds: Of each line's runs; empty where they are not the same.
        verdicts: What to know, the first thing first.
        comparison: The same runs as a comparison, where they are one; None: no differences can be told.
        kind: ``run``, ``runs`` or ``comparison``.
        folder: Where a comparison lies; None: of runs each has its own.
        apart: In which words on the data the runs differ, so that their figures can't be compared.
    """

    title: str
    lines: tuple[Line, ...]
    seeds: tuple[int, ...]
    verdicts: tuple[Verdict, ...]
    comparison: Comparison | None
    kind: str
    folder: Path | None = None
    apart: tuple[str, ...] = ()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All runs."""
        return tuple(trial for line in self.lines for trial in line.trials if trial is not None)

    @property
    def score(self) -> str:
        """What the runs are judged by, at the beginning of a title."""
        word = headline_of(next((trial.figures for trial in self.trials if trial.figures), {}))[0]
        return word[:1].upper() + word[1:]

    @property
    def unfinished(self) -> tuple[Trial, ...]:
        """The runs that have rounds left."""
        return tuple(trial for trial in self.trials if not trial.finished)


@dataclass(frozen=True)
class Story:
    """All that a report tells.

    Attributes:
        parts: At least one where there is no answer.
        answers: Those of studies and grids.
    """

    parts: tuple[Part, ...]
    answers: tuple[Answer, ...] = ()


def gather(paths: Sequence[Path]) -> Story:
    """What folders hold.

    Args:
        paths: Of runs, comparisons, grids and studies.

    Returns:
        One part for all runs together, and one for each comparison.

    Raises:
        FedfillError: Where a folder holds none of these, or is damaged.
    """
    runs: list[Trial] = []
    parts: list[Part] = []
    answers: list[Answer] = []
    for path in dict.fromkeys(paths):
        if (path / STUDY).exists() or (path / TABLE).exists():
            answer, stages = read_answer(path) if (path / STUDY).exists() else read_grid_table(path)
            answers.append(answer)
            for stage, name in stages.items():
                part = _of_comparison(stage)
                parts.append(replace(part, title=f"{name}: {part.title}"))
        elif (path / RECORD).exists():
            parts.append(_of_comparison(path))
        elif (path / "experiment.toml").exists():
            runs.append(read_trial(path))
        else:
            below = sorted({str(found.parent) for name in OURS for found in path.glob(f"*/{name}")})[:3]
            raise FedfillError(
                f"report: {path} holds no run, comparison, grid or study; allowed: a folder with one of {', '.join(OURS)}"
                + (f", such as {' or '.join(below)}" if below else "")
            )
    if runs:
        parts.insert(0, _of_runs(runs))
    return Story(tuple(parts), tuple(answers))


def read_trial(folder: Path) -> Trial:
    """One run's folder, finished or not.

    Args:
        folder: The run directory.

    Returns:
        What it holds.

    Raises:
        FedfillError: Where a file of it is damaged.
    """
    place = RunDirectory(folder)
    experiment, rounds, summary = place.read_experiment("report"), place.rounds(), place.summary()
    require_rounds(rounds, folder / "rounds.jsonl", "report", "put back what the run wrote, or run it again")
    if summary is not None:
        require(Summary, summary, folder / "summary.json", "report", "remove it and resume the run")
        if len(rounds) < summary["rounds"]:
            raise FedfillError(
                f"report: {folder / 'rounds.jsonl'} is damaged (found {len(rounds)} rounds, and summary.json has {summary['rounds']}); "
                "put back what the run wrote, or run it again"
            )
    pictures = sorted((folder / "samples").glob("round-*.png")) if (folder / "samples").is_dir() else []
    figures = summary if summary is not None else _so_far(experiment, rounds)
    if headline_of(figures)[1] == "c_index" and summary is not None:
        figures = _by_pairs(figures)
    return Trial(
        folder,
        experiment,
        figures,
        rounds,
        _holdings(folder / "partition.json"),
        pictures[-1] if pictures else None,
        summary is not None,
        (folder / "deployment.toml").exists(),
    )


def _by_pairs(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of times to an event: nothing where no two rows can be compared, and within clients by pairs and not by clients."""
    shown = {"accuracy": "c_index", "mean_client_accuracy": "c_index_within_clients"}
    return {**figures, **{name: figures.get(own) for name, own in shown.items()}}


def _so_far(experiment: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures that an unfinished run has already."""
    judged = [record for record in rounds if "accuracy" in record]
    if not judged:
        return {}
    sums = {
        name: sum(r.get(name, 0) for r in rounds) for name in ("bytes_up", "bytes_down", "train_samples", "seconds")
    }
    best = max(judged, key=lambda record: (record["accuracy"], -record["round"]))
    names = ("algorithm", "partition", "clients", "rounds", "seed", "engine", "version")
    return {
        **{name: experiment.get(name) for name in names},
        "dataset": experiment.get("data"),
        **judged[-1],
        "best_accuracy": best["accuracy"],
        "best_round": best["round"],
        **sums,
        "rounds": experiment.get("rounds"),
        "notes": [],
        "warnings": [],
        "privacy": {**judged[-1]["privacy"], "entries": [], "statement": ""},
    }


def _holdings(path: Path) -> Holdings | None:
    hint = "resume the run, which writes it again"
    try:
        document = json.loads(read_regular(path)) if path.exists() else None
    except (ValueError, RecursionError, OSError) as error:
        raise FedfillError(f"report: {path} is damaged; {hint}") from error
    if document is None:
        return None
    require(Division, document, path, "report", hint)
    if document["clients"] is None:
        return None
    domains = document.get("domains", [])
    names = tuple(" ".join([str(i), *domains[i : i + 1]]) for i in range(len(document["clients"])))
    return Holdings(tuple(document["class_names"]), names, tuple(map(tuple, document["clients"])))


def _of_comparison(path: Path) -> Part:
    comparison = read_comparison(path)
    lines = tuple(
        Line(row.label, tuple(None if one is None else read_trial(one.directory) for one in row.results))
        for row in comparison.rows
    )
    return Part(comparison.title, lines, comparison.seeds, of_comparison(comparison), comparison, "comparison", path)


def _of_runs(trials: Sequence[Trial]) -> Part:
    """Runs side by side; those that differ in their seed alone stand together."""
    together: dict[str, list[Trial]] = {}
    for trial in trials:
        own = {k: v for k, v in trial.experiment.items() if k not in INCIDENTAL | PLACES | {"seed", "digest"}}
        key = json.dumps(own, sort_keys=True, default=str)
        while any(_seed(other) == _seed(trial) for other in together.get(key, ())):
            key += " again"  # the same seed twice is no second draw
        together.setdefault(key, []).append(trial)
    groups = [tuple(sorted(group, key=_seed)) for group in together.values()]
    labels = _labels(groups)
    lines = tuple(Line(label, group) for label, group in zip(labels, groups, strict=True))
    if len(trials) == 1:
        return Part(_title(trials[0]), lines, (_seed(trials[0]),), _of_one(trials[0]), None, "run")
    orders = {tuple(map(_seed, group)) for group in groups}
    seeds = next(iter(orders)) if len(orders) == 1 else ()
    base = next((k for k, group in enumerate(groups) if group[0].experiment.get("algorithm") == "fedavg"), 0)
    unlike = [_unlike(label, group[0], groups[base][0]) for label, group in zip(labels, groups, strict=True)]
    notes = [note for found in unlike for note in found]
    apart = tuple(
        name for name in sorted(DATA - INCIDENTAL) if len({str(group[0].experiment.get(name)) for group in groups}) > 1
    )
    if seeds and len(lines) > 1 and not apart and all(trial.finished for trial in trials):
        rows = tuple(
            Row(label, tuple(trial.result for trial in group)) for label, group in zip(labels, groups, strict=True)
        )
        comparison = Comparison(rows, seeds, trials[0].folder.parent, rows[base], tuple(notes))
        return Part(comparison.title, lines, seeds, of_comparison(comparison), comparison, "runs")
    verdicts = [Verdict(NOT_SHARED, f"not shared by {note}") for note in notes]
    verdicts += [
        Verdict(verdict.kind, f"{line.label}, seed {_seed(trial)}: {verdict.sentence}")
        for line in lines
        for trial in line.trials
        if trial is not None
        for verdict in _of_one(trial)
    ]
    return Part(_title(trials[0], seeds), lines, seeds, tuple(verdicts), None, "runs", apart=apart)


def _labels(groups: Sequence[Sequence[Trial]]) -> list[str]:
    """What methods are called: the algorithm, and where several runs have the same one, their folders too."""
    names = [str(group[0].experiment.get("algorithm")) for group in groups]
    for told in (lambda folder: folder.name, str):
        unique = [
            name if names.count(name) == 1 else f"{name} ({told(group[0].folder)})"
            for name, group in zip(names, groups, strict=True)
        ]
        if len(set(unique)) == len(unique):
            break
    return unique


def _unlike(label: str, trial: Trial, base: Trial) -> list[str]:
    """In which data, network and training one run differs from another."""

    def told(one: Trial) -> dict[str, Any]:
        held = one.experiment
        training = {name: held.get("settings", {}).get(name) for name in BUDGET}
        return {**{name: held.get(name) for name in names}, **training, "model settings": held.get("model_settings")}

    names = sorted((DATA | {"rounds", "participation", "model"}) - INCIDENTAL)
    own, other = told(trial), told(base)
    found = [f"{name}={own[name]} (not {other[name]})" for name in own if own[name] != other[name]]
    return [f"{label}: {', '.join(found)}"] if found else []


def _of_one(trial: Trial) -> tuple[Verdict, ...]:
    found = () if not trial.figures else of_run(trial.figures, trial.rounds)
    if trial.finished:
        return found
    done, asked = len(trial.rounds), trial.experiment.get("rounds")
    return (
        Verdict("not finished", f"{done} of {asked} rounds are done; 'fedfill resume {trial.folder}' goes on"),
        *found,
    )


def _seed(trial: Trial) -> int:
    return int(trial.experiment.get("seed", 0))


def _title(trial: Trial, seeds: Sequence[int] = ()) -> str:
    held = trial.experiment
    drawn = f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {held.get('seed')}"
    rounds = f"{held.get('rounds')} round{'s' if held.get('rounds') != 1 else ''}"
    return f"{held.get('data')}, {held.get('partition')}, {held.get('clients')} clients, {rounds}, {drawn}"
