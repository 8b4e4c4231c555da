"""A study: which method suits these clients; looked at, screened, compared, and answered in plain words."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

from fedfill import __version__
from fedfill.algorithms import known_algorithms
from fedfill.data.partitions import Partition, is_function
from fedfill.errors import FedfillError, checked
from fedfill.experiment.loop import OnRound
from fedfill.experiment.own import Network
from fedfill.experiment.prepare import divide
from fedfill.experiment.settings import Experiment, whole_numbers
from fedfill.options import Shared
from fedfill.runs.directory import to_json, write_atomically
from fedfill.studies.compare import compare
from fedfill.studies.comparison import Comparison
from fedfill.studies.look import Look, look
from fedfill.studies.recommend import Candidate, Recommendation, candidates, document, ranked, recommend
from fedfill.studies.rules import REFERENCES, SUMS, TRAINED, Entry, Goal, entries, goal_of, left_out, validation_share

RECORD = "study.json"
SCREEN, FINAL, REFERENCE, PROBE = "screen", "final", "reference", "probe"
FINALISTS = 2
"""Trained methods that reach the last stage, beside FedAvg."""

CLOSE = 0.01
"""How near to the best of them on validation a second method on sums has to be to reach the last stage, too."""

SCREENED = 0.2
"""Share of the rounds that the screening has, and of a budget's seconds at the most 0.3."""

OnRun = Callable[[str, int], OnRound | None]


@dataclass(frozen=True)
class Plan:
    """What the last stage has; with a budget it follows from the seconds of the screening.

    Attributes:
        labels: The finalists.
        rounds: Of those that are trained.
        seeds: Of each.
        screened_rounds: Of the screening.
    """

    labels: tuple[str, ...]
    rounds: int
    seeds: tuple[int, ...]
    screened_rounds: int


@dataclass(frozen=True)
class Study:
    """What `study` found.

    Attributes:
        directory: Where its stages lie, each a comparison.
        seen: A look at the clients.
        goal: Where the model will be used.
        entries: What was run in the screening.
        plan: Of the last stage.
        screened: Candidates of the screening, one seed.
        finalists: Candidates of the last stage.
        references: ``local`` and ``central``.
        recommendation: The answer; None where everything diverged.
        commands: How to train the recommended method on all samples, and to use it.
        not_tried: What was left out, and why.
        final: The last stage as a comparison.
    """

    directory: Path
    seen: Look
    goal: Goal
    entries: tuple[Entry, ...]
    plan: Plan
    screened: tuple[Candidate, ...]
    finalists: tuple[Candidate, ...]
    references: Mapping[str, Candidate]
    recommendation: Recommendation | None
    commands: tuple[str, ...]
    not_tried: Mapping[str, str]
    final: Comparison


def study(
    *,
    data: Any = "digits",
    partition: Partition = "dirichlet:0.5",
    model: Network = "auto",
    seeds: Sequence[int] = (0, 1, 2),
    goal: str = "auto",
    budget: str | float | None = None,
    out: str | Path = "runs/study",
    on_run: OnRun | None = None,
    on_stage: Callable[[str, int], None] | None = None,
    quiet: bool = False,
    **settings: Unpack[Shared],
) -> Study:
    """Find out which method suits some clients.

    It looks at them, screens a small set of methods that suit on one seed, runs the best on all seeds, and recommends one.
    Everything is chosen on the clients' validation splits. Called again with the same arguments it goes on where it stopped.

    Args:
        data: As in `fedfill.run`.
        partition: As in `fedfill.run`.
        model: As in `fedfill.run`.
        seeds: Of the last stage; the screening takes the first.
        goal: Where the model will be used: ``everyone`` (samples like those of all clients), ``own`` (each client's own, where
            personal models may serve) or ``auto`` (own where clients' inputs look different).
        budget: Seconds, or ``"90s"``, ``"10m"``, ``"2h"``: rounds and seeds are fewer where they would take longer; None: no limit.
        out: Folder of the stages.
        on_run: Called before each run with its label and seed; returns what to call after each of its rounds.
        on_stage: Called before each stage with its name and its number of runs.
        quiet: As in `fedfill.run`.
        **settings: As in `fedfill.run`: ``rounds`` (50) are those of the last stage; ``target_epsilon`` leaves those methods
            alone that give a guarantee.

    Returns:
        The answer, and how it came about.

    Raises:
        FedfillError: Where anything is not allowed, or nothing came to its end.
    """
    options: dict[str, Any] = {**settings}
    numbers = tuple(whole_numbers(seeds))
    if not numbers or len(set(numbers)) < len(numbers):
        raise FedfillError(f"seeds: found {list(seeds)}; allowed: at least one, each once")
    if goal not in ("auto", "everyone", "own"):
        raise FedfillError(f"goal: found '{goal}'; allowed: auto, everyone or own")
    for name in ("seed", "algorithm", "evaluate_every", "start_from"):
        if name in options:
            raise FedfillError(f"{name}: found {options[name]!r}; a study sets it by itself")
    seconds = parse_budget(budget)
    folder = Path(out)
    words = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    request = {
        "data": data if isinstance(data, str) else "python", "partition": partition if isinstance(partition, str) else "python",
        "model": model if isinstance(model, str) else "python", "seeds": list(numbers), "goal": goal, "budget": seconds, "options": words,
    }  # fmt: skip
    held = _held(folder, request)
    fields = {name: value for name, value in words.items() if name in Experiment.model_fields}
    first = checked(Experiment, {"algorithm": "", **_named(data, partition), **fields}, "option")
    federation = divide(
        first.model_copy(update={"seed": numbers[0]}),
        data=None if isinstance(data, str) else data,
        partition=None if isinstance(partition, str) else partition,
    )
    seen = look(federation)
    where: Goal = goal_of(seen, bool(federation.domains)) if goal == "auto" else goal  # type: ignore[assignment]
    private = words.get("target_epsilon") is not None
    tried = entries(seen, where, federation.shape, private)
    share = options.setdefault("client_validation", validation_share(seen.samples))
    if not share:
        raise FedfillError("client_validation: found 0 in a study, which chooses by it; allowed: above 0")
    rounds = options.pop("rounds", 20 if private else 50)
    stages = _Stages(
        folder,
        numbers,
        on_run,
        on_stage,
        {"data": data, "partition": partition, "model": model, "quiet": quiet, **options},
    )

    plan = _plan_of(held) if held is not None else None
    probed = None if plan or seconds is None or private else stages.seconds_per_round()
    screened_rounds = plan.screened_rounds if plan else _screened_rounds(rounds, seconds, probed, tried)
    labels = [entry.label for entry in tried] + [entry.label for entry in REFERENCES if not private]
    screening = stages.run(SCREEN, labels, numbers[:1], rounds if private else screened_rounds)
    screened = candidates(screening, where)
    if where == "everyone":  # a client alone is judged on its own split, and not comparable
        screened = [candidate for candidate in screened if candidate.label != "local"]
    eligible = [candidate for candidate in screened if candidate.label != "central"]
    if plan is None:
        plan = _plan(screening, eligible, tried, rounds, screened_rounds, numbers, seconds, private)
    if not plan.labels:
        raise FedfillError(f"study: every method diverged in the screening below {folder}; try a smaller learning_rate")
    record: dict[str, Any] = {
        "version": __version__, "request": request, "look": {**seen.document(), "sentences": seen.sentences()}, "goal": where,
        "entries": [asdict(entry) for entry in tried], "plan": asdict(plan), "screened": [document(c) for c in screened],
    }  # fmt: skip
    write_atomically(folder / RECORD, to_json(record))

    final = stages.run(FINAL, plan.labels, plan.seeds, plan.rounds)
    finalists = candidates(final, where)
    references: dict[str, Candidate] = {}
    if not private:
        compared = stages.run(REFERENCE, [entry.label for entry in REFERENCES], numbers[:1], plan.rounds)
        references = {c.label: c for c in candidates(compared, where)}
    answer = recommend(finalists, references, where, rounds)
    commands = () if answer is None else _commands(answer.label, plan, finalists, words, data, partition)
    missing = left_out(tried, known_algorithms())
    record |= {
        "finalists": [document(c) for c in finalists],
        "references": [document(c) for c in references.values()],
        "recommendation": None if answer is None else asdict(answer),
        "commands": list(commands),
        "not_tried": missing,
    }
    write_atomically(folder / RECORD, to_json(record))
    return Study(
        folder,
        seen,
        where,
        tuple(tried),
        plan,
        tuple(screened),
        tuple(finalists),
        references,
        answer,
        tuple(commands),
        missing,
        final,
    )


@dataclass(frozen=True)
class _Stages:
    """Runs one stage after the other, each a comparison in its own folder."""

    folder: Path
    seeds: tuple[int, ...]
    on_run: OnRun | None
    on_stage: Callable[[str, int], None] | None
    options: Mapping[str, Any]

    def run(self, name: str, labels: Sequence[str], seeds: Sequence[int], rounds: int) -> Comparison:
        if self.on_stage is not None:
            self.on_stage(name, len(labels) * len(seeds))
        # ten evaluations tell whether a method still rises; of the screening the last one decides, and one before shows that it goes
        every = {FINAL: rounds // 10, SCREEN: math.ceil(rounds / 2), REFERENCE: rounds}.get(name, 1)
        return compare(
            labels,
            seeds=seeds,
            out=self.folder / name,
            on_run=self.on_run,
            rounds=rounds,
            evaluate_every=max(1, every),
            **self.options,
        )

    def seconds_per_round(self) -> float:
        """Of FedAvg, from its second round; the first one has costs of its own."""
        (row,) = self.run(PROBE, ["fedavg"], self.seeds[:1], 2).rows
        return float(row.finished[0].rounds[-1]["seconds"]) if row.finished else 1.0


def parse_budget(text: str | float | None) -> float | None:
    """Seconds of a budget such as ``"10m"``."""
    if text is None or (
        isinstance(text, int | float) and not isinstance(text, bool) and math.isfinite(text) and text > 0
    ):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h)\s*", str(text))
    if match is None or not float(match[1]):
        raise FedfillError(f"budget: found {text!r}; allowed: a time such as 90s, 10m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _screened_rounds(rounds: int, seconds: float | None, per_round: float | None, tried: Sequence[Entry]) -> int:
    wanted = max(1, math.ceil(SCREENED * rounds))
    if seconds is None or not per_round:
        return wanted
    trained = sum(entry.kind == TRAINED for entry in (*tried, *REFERENCES))
    return max(1, min(wanted, int(0.3 * seconds / (per_round * max(1, trained)))))


def _plan(
    screening: Comparison, eligible: Sequence[Candidate], tried: Sequence[Entry], rounds: int, screened_rounds: int,
    seeds: tuple[int, ...], seconds: float | None, private: bool,
) -> Plan:  # fmt: skip
    """Who goes on, for how long: of the methods on sums the best and who is close, of the trained ones the best beside FedAvg."""
    rows = {row.label: row for row in screening.rows}

    def best_first(kind: str) -> list[tuple[str, float]]:
        mine = [entry.label for entry in tried if entry.kind == kind]
        if kind == TRAINED and any(candidate.label == "local" for candidate in eligible):
            mine.append("local")
        scores: dict[str, float] = {}
        for candidate in ranked(eligible):
            for label in mine:
                if candidate.label == label or (
                    label.startswith(candidate.label) and "head=" in label[len(candidate.label) :]
                ):
                    scores.setdefault(label, candidate.mean or 0)
        return sorted(scores.items(), key=lambda item: -item[1])

    sums, trained = best_first(SUMS), best_first(TRAINED)
    chosen = [label for label, value in sums[:2] if sums[0][1] - value <= CLOSE]
    chosen += [label for label, _ in trained[:FINALISTS]]
    chosen += [label for label, _ in trained[FINALISTS:] if label.startswith("fedavg")]
    if seconds is None or private:
        return Plan(tuple(chosen), rounds, seeds, screened_rounds)
    spent = sum(result.summary["seconds"] for row in screening.rows for result in row.finished)
    left = 0.9 * (seconds - spent)

    def took(label: str) -> float:
        return float(rows[label].finished[0].summary["seconds"]) if label in rows and rows[label].finished else 0.0

    on_sums = [label for label, _ in sums if label in chosen]
    once = sum(map(took, on_sums))
    each = sum(took(label) for label in chosen if label not in on_sums) / screened_rounds
    reference = sum(took(entry.label) for entry in REFERENCES) / screened_rounds
    for n in range(len(seeds), 0, -1):
        most = int((left - n * once) / max(n * each + reference, 1e-9))
        if most >= min(rounds, 10) or n == 1:
            return Plan(tuple(chosen), max(min(rounds, most), min(screened_rounds, rounds)), seeds[:n], screened_rounds)
    raise AssertionError("one seed always has a plan")


def _plan_of(held: Mapping[str, Any]) -> Plan | None:
    if "plan" not in held:
        return None
    plan = held["plan"]
    return Plan(tuple(plan["labels"]), int(plan["rounds"]), tuple(plan["seeds"]), int(plan["screened_rounds"]))


def _held(folder: Path, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a study that was begun in the folder has decided; None where there is none."""
    place = folder / RECORD
    if not place.exists():
        if folder.exists() and not folder.is_dir():
            raise FedfillError(f"out: {folder} is a file; choose a folder that is new or holds this study")
        strangers = sorted({path.name for path in folder.glob("*")} - {PROBE, SCREEN, FINAL, REFERENCE})
        if strangers:
            raise FedfillError(
                f"out: {folder} is not empty and holds no study ({strangers[0]} lies there); choose a folder that is new or holds this study"
            )
        return None
    try:
        held: dict[str, Any] = json.loads(place.read_text())
        asked, version = held["request"], held["version"]
        _plan_of(held)
    except OSError as error:
        raise FedfillError(f"out: can't read {place} ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise FedfillError(f"out: {place} is damaged; start again in a new folder") from error
    if version != __version__:
        raise FedfillError(
            f"out: {folder} holds a study of fedfill {version}, and this is {__version__}; choose another folder"
        )
    if asked != json.loads(json.dumps(request, default=str)):
        raise FedfillError(f"out: {folder} holds another study; choose another folder or remove it")
    return held


def _named(data: Any, partition: Any) -> dict[str, Any]:
    given = {"data": data, "partition": partition}
    named = {name: value if isinstance(value, str) else "python" for name, value in given.items()}
    return {
        **named,
        **(
            {"clients": None}
            if isinstance(data, list) or not (isinstance(partition, str) or is_function(partition))
            else {}
        ),
    }


def _commands(
    label: str, plan: Plan, finalists: Sequence[Candidate], words: Mapping[str, Any], data: Any, partition: Any
) -> list[str]:
    """How to train the method on all samples, none kept for validation, and how to use it."""
    name, _, rest = label.partition(":")
    own = [pair for pair in re.split(r",(?![^(]*\))", rest) if pair]
    rounds = next(candidate.rounds for candidate in finalists if candidate.label == label)
    if not isinstance(data, str) or not isinstance(partition, str):
        settings = ", ".join(f"{key}={value!r}" for key, value in (pair.split("=", 1) for pair in own))
        return [
            f'fedfill.run("{name}", data=..., partition=..., rounds={rounds}{", " if settings else ""}{settings}, out="runs/model")'
        ]
    given = {"data": data, "partition": partition, **words, "rounds": rounds}
    given.pop("client_validation", None)
    line = ["fedfill", "run", name]
    for key, value in given.items():
        if key in Experiment.model_fields:
            line += [f"--{key.replace('_', '-')}", str(value)]
        else:
            line += ["--set", f"{key}={value}"]
    for pair in own:
        line += ["--set", pair]
    return [shlex.join([*line, "--out", "runs/model"]), "fedfill export runs/model"]
