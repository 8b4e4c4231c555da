"""A study: which method suits these clients; looked at, screened, compared, and answered in plain words."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fedfill import __version__
from fedfill.algorithms import known_algorithms, parse_variant
from fedfill.data.partitions import Partition, is_function
from fedfill.errors import A_FUNCTION, FedfillError, checked, expect, path_of
from fedfill.experiment.own import Network
from fedfill.experiment.prepare import arrange, divide, given_parts
from fedfill.experiment.settings import Experiment, in_words, over, whole_numbers
from fedfill.files import read_regular
from fedfill.options import Shared
from fedfill.runs.directory import to_json, write_atomically
from fedfill.runs.shown import html_table
from fedfill.studies.compare import shared_settings, taken
from fedfill.studies.comparison import Comparison
from fedfill.studies.look import Look, look
from fedfill.studies.recommend import Asked, Candidate, Recommendation, candidates, choose, document, recommend
from fedfill.studies.rules import REFERENCES, SUMS, Entry, Goal, entries, goal_of, left_out, validation_share
from fedfill.studies.run import OnRun
from fedfill.studies.stages import (
    FINAL,
    PROBE,
    REFERENCE,
    SCREEN,
    Plan,
    Stages,
    parse_budget,
    plan_for,
    plan_of,
    screened_rounds_of,
)

if TYPE_CHECKING:
    import pandas

RECORD = "study.json"


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
        references: ``local`` and ``central``; with a guarantee, the recommended method without noise.
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

    def __repr__(self) -> str:
        """What it recommends."""
        answer = self.recommendation
        return f"<study: {'nothing came to its end' if answer is None else f'take {answer.label}'}; {self.directory}>"

    def __str__(self) -> str:
        """The recommendation in sentences, and the commands that train and use it."""
        sentences = () if self.recommendation is None else self.recommendation.sentences
        said = [f"* {sentence[:1].upper()}{sentence[1:]}." for sentence in sentences]
        return "\n".join([*said, *(f"    {command}" for command in self.commands)]) or repr(self)

    def _repr_html_(self) -> str:
        rows = [[*row.values()] for row in self._rows()]
        return html_table(repr(self)[1:-1], [*self._rows()[0]] if rows else [], rows)

    def to_frame(self) -> pandas.DataFrame:
        """A row for each finalist, with means over seeds of what decided and of the test figures."""
        import pandas

        return pandas.DataFrame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        def mean(values: Sequence[float | None]) -> float | None:
            known = [value for value in values if value is not None]
            return sum(known) / len(known) if known else None

        return [
            {
                "method": one.label, "validation": one.mean, "accuracy": mean(one.accuracy), "own": mean(one.own),
                "rounds": one.rounds, "bytes": one.bytes, "seconds": one.seconds,
            }
            for one in self.finalists
        ]  # fmt: skip


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

    Example::

        answer = fedfill.study(data="digits", clients=10, budget="10m")
        print(answer)

    Args:
        data: As in `fedfill.run`.
        partition: As in `fedfill.run`.
        model: As in `fedfill.run`.
        seeds: Of the last stage; the screening takes the first.
        goal: Where the model will be used: ``everyone`` (samples like those of all clients), ``own`` (each client's own, where
            personal models may serve) or ``auto`` (own where clients' inputs look different).
        budget: Seconds, or ``"90s"``, ``"10m"``, ``"2h"``: rounds and seeds are fewer where they would take longer; None: no limit. It is a wish: a run
            that began is finished, and methods on sums run whole.
        out: Folder of the stages.
        on_run: Called before each run with its label and seed; returns what to call after each of its rounds.
        on_stage: Called before each stage with its name and its number of runs.
        quiet: As in `fedfill.compare`.
        **settings: As in `fedfill.run`: ``rounds`` (50) are those of the last stage; ``target_epsilon`` leaves those methods
            alone that give a guarantee.

    Returns:
        The answer, and how it came about.

    Raises:
        FedfillError: Where anything is not allowed, or nothing came to its end.
    """
    options: dict[str, Any] = {**settings}
    data = given_parts(data, partition, model)
    numbers = tuple(whole_numbers(seeds))
    if not numbers or len(set(numbers)) < len(numbers):
        raise FedfillError(f"seeds: found {list(numbers)}; allowed: at least one, each once")
    if goal not in ("auto", "everyone", "own"):
        raise FedfillError(f"goal: found '{goal}'; allowed: auto, everyone or own")
    for name in ("seed", "algorithm", "evaluate_every", "start_from"):
        if name in options:
            raise FedfillError(f"{name}: found {options[name]!r}; a study sets it by itself")
    seconds = parse_budget(budget)
    folder = path_of("out", out)
    for name, call in (("on_run", on_run), ("on_stage", on_stage)):
        expect(name, call, Callable | None, A_FUNCTION)
    words = in_words(options)
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
    where: Goal = goal_of(seen, bool(federation.domains) and isinstance(partition, str)) if goal == "auto" else goal  # type: ignore[assignment]
    private = words.get("target_epsilon") is not None
    if options.get("client_validation") is None:
        options["client_validation"] = validation_share(seen.samples)
    if not options["client_validation"]:
        raise FedfillError("client_validation: found 0 in a study, which chooses by it; allowed: above 0")
    rounds = options.pop("rounds", 20 if private else 50)
    given = {"data": data, "partition": partition, "model": model, **options}
    tried, refused = _suitable(entries(seen, where, federation.shape, private, federation.times > 0), numbers[0], given)
    beside, _ = _suitable(() if private else REFERENCES, numbers[0], given)
    if held is None:
        write_atomically(folder / RECORD, to_json({"version": __version__, "request": request}))
    stages = Stages(folder, numbers, on_run, on_stage, given, quiet)

    plan = plan_of(held) if held is not None else None
    probed = None if plan or seconds is None or private else stages.seconds_per_round()
    screened_rounds = (
        plan.screened_rounds if plan else screened_rounds_of(rounds, seconds, probed, tried, stages.beside)
    )
    labels = [entry.label for entry in (*tried, *beside)]
    screening = stages.run(SCREEN, labels, numbers[:1], rounds if private else screened_rounds)
    screened = candidates(screening, where)
    if where == "everyone":  # a client alone is judged on its own split, and not comparable
        screened = [candidate for candidate in screened if candidate.label != "local"]
    eligible = [candidate for candidate in screened if candidate.label != "central"]
    if plan is None:
        plan = plan_for(
            screening,
            eligible,
            tried,
            rounds,
            screened_rounds,
            numbers,
            seconds,
            private,
            stages.elapsed,
            stages.beside,
        )
    if not plan.labels:
        raise FedfillError(f"study: every method diverged in the screening below {folder}; try a smaller learning_rate")
    record: dict[str, Any] = {
        "version": __version__, "request": request, "look": {**seen.document(), "sentences": seen.sentences()}, "goal": where,
        "entries": [asdict(entry) for entry in tried], "plan": asdict(plan), "screened": [document(c) for c in screened],
    }  # fmt: skip
    write_atomically(folder / RECORD, to_json(record))

    final = stages.run(FINAL, plan.labels, plan.seeds, plan.rounds)
    finalists = candidates(final, where)
    references = references_of(stages, plan, finalists, where, private, [entry.label for entry in beside])
    asked = Asked(rounds, len(numbers), seconds, stages.elapsed, private, str(words.get("trust", "site")))
    answer = recommend(finalists, references, where, asked)
    commands: Sequence[str] = ()
    if answer is not None:
        once = {entry.label for entry in tried if entry.kind == SUMS}
        took = next(candidate.rounds for candidate in finalists if candidate.label == answer.label)
        train = took if answer.label in once else max(took, rounds)  # a budget cuts the study and not the model in use
        commands = commands_for(answer.label, train, {**words, **_shown(data, partition, model)})
    missing = {**refused, **left_out(tried, known_algorithms(), private)}
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


def _suitable(tried: Sequence[Entry], seed: int, given: Mapping[str, Any]) -> tuple[list[Entry], dict[str, str]]:
    """Those methods that can take what all are given, and why the others can't; where none can, the first one's refusal is raised."""
    options = {name: value for name, value in given.items() if name not in ("data", "partition", "model")}
    if any(entry in REFERENCES for entry in tried):  # what the methods alone have is no slip
        options = taken([parse_variant(entry.label)[0] for entry in tried], options)
    variants = {entry.label: parse_variant(entry.label) for entry in tried}
    shared = shared_settings([name for name, _ in variants.values()], options) if variants else {}
    fit: list[Entry] = []
    refusals: dict[str, str] = {}
    first: dict[str, str] = {}
    refusal: FedfillError | None = None
    for entry in tried:
        name, own = variants[entry.label]
        try:
            prepared = arrange(
                name, data=given["data"], partition=given["partition"], model=given["model"], seed=seed, needs={},
                **over(shared[name], own),
            )  # fmt: skip
        except FedfillError as error:
            refusals[entry.label], refusal = f"it can't take these settings ({error})", refusal or error
            continue
        if (other := first.setdefault(prepared.digest, entry.label)) == entry.label:
            fit.append(entry)
        else:
            refusals[entry.label] = f"with these settings it is {other}"
    if refusal is not None and not fit:
        raise refusal
    return fit, refusals


def references_of(
    stages: Stages, plan: Plan, finalists: Sequence[Candidate], where: Goal, private: bool, beside: Sequence[str]
) -> dict[str, Candidate]:
    """What the answer is held against, on one seed: a client alone and all data in one place, or the recommended method without noise."""
    if not private:
        found = candidates(stages.run(REFERENCE, beside, plan.seeds[:1], plan.rounds), where) if beside else []
        return {candidate.label: candidate for candidate in found}
    chosen = choose(finalists)
    if chosen is None:
        return {}
    plain = stages.without("target_epsilon", "target_delta", "trust", "honest")
    (candidate,) = candidates(plain.run(REFERENCE, [chosen.label], plan.seeds[:1], plan.rounds), where)
    return {"without noise": candidate}


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
        held: dict[str, Any] = json.loads(read_regular(place))
        asked, version = held["request"], held["version"]
        plan_of(held)
    except OSError as error:
        raise FedfillError(f"out: can't read {place} ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise FedfillError(f"out: {place} is damaged; start again in a new folder") from error
    if version != __version__:
        raise FedfillError(
            f"out: {folder} holds a study of fedfill {version}, and this is {__version__}; choose another folder"
        )
    now = json.loads(json.dumps(request, default=str))
    if asked != now:
        before, after = ({**given.pop("options", {}), **given} for given in (dict(asked), dict(now)))
        unlike = [
            f"{name} {before.get(name)}, not {after.get(name)}"
            for name in {**before, **after}
            if before.get(name) != after.get(name)
        ]
        raise FedfillError(
            f"out: {folder} holds another study ({'; '.join(unlike[:3])}); choose another folder or remove it"
        )
    return held


def _named(data: Any, partition: Any) -> dict[str, Any]:
    given = {"data": data, "partition": partition}
    named = {name: value if isinstance(value, str) else "python" for name, value in given.items()}
    drawn = isinstance(partition, str) or is_function(partition)
    return named if drawn and not isinstance(data, list) else {**named, "clients": None}


def _shown(data: Any, partition: Any, model: Any) -> dict[str, Any]:
    """Data, partition and network as they were given, in words where they can be typed again; `...` where they came from Python."""
    given = {"data": data, "partition": partition, "model": model}
    words = {name: value if isinstance(value, str) else ... for name, value in given.items()}
    return {name: word for name, word in words.items() if word != "auto"}


def commands_for(label: str, rounds: int, given: Mapping[str, Any]) -> list[str]:
    """How to train the method, none of the samples kept for validation, and how to use it."""
    name, _, rest = label.partition(":")
    own = dict(pair.split("=", 1) for pair in re.split(r",(?![^(]*\))", rest) if pair)
    dropped = {"client_validation", "rounds"}
    options = {key: value for key, value in given.items() if key not in dropped and value is not None}
    if ... in options.values():
        words = {**options, "rounds": rounds, **own, "out": "runs/model"}
        shown = ", ".join(f"{key}={'...' if value is ... else repr(value)}" for key, value in words.items())
        return [
            f'fedfill.run("{name}", {shown})',
            'fedfill.export("runs/model", to="model")',
            'fedfill.load("model").predict(...)',
        ]
    line = ["fedfill", "run", name]
    for key, value in {**options, "rounds": rounds}.items():
        if key in Experiment.model_fields:
            line += [f"--{key.replace('_', '-')}", str(value)]
        else:
            line += ["--set", f"{key}={value}"]
    for key, value in own.items():
        line += ["--set", f"{key}={value}"]
    return [
        shlex.join([*line, "--out", "runs/model"]),
        "fedfill export runs/model --to model",
        "fedfill predict model PATH",
    ]
