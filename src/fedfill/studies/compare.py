"""Comparisons: several algorithms over several seeds on the same partitions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch

from fedfill.algorithms import Algorithm, find, labels_of, parse_variant
from fedfill.data.partitions import Partition
from fedfill.errors import A_FUNCTION, DivergedError, FedfillError, checked, expect, path_of, shown
from fedfill.experiment.own import Network
from fedfill.experiment.prepare import Prepared, arrange, split_settings
from fedfill.experiment.settings import Experiment, over, whole_numbers
from fedfill.experiment.summary import Result
from fedfill.files import read_regular
from fedfill.options import Shared
from fedfill.runs.directory import RunDirectory, writing
from fedfill.runs.progress import both, watched
from fedfill.studies.comparison import RECORD, Comparison, Row, Sweep
from fedfill.studies.comparison_files import write_files
from fedfill.studies.run import OnRun, follower, launch
from fedfill.studies.sweep import candidates, validated

VALIDATION = 0.1
"""Share of each client's samples that a sweep keeps for validation where nothing else is asked for."""


def compare(
    algorithms: Sequence[str | type[Algorithm]],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    out: str | Path = "runs/compare",
    data: Any = "digits",
    partition: Partition = "dirichlet:0.5",
    model: Network = "auto",
    on_run: OnRun | None = None,
    quiet: bool = False,
    **settings: Unpack[Shared],
) -> Comparison:
    """Run several algorithms over several seeds; every algorithm sees the same clients and the same data for a seed.

    Example::

        found = fedfill.compare(["fedavg", "fedprox:mu=0.01|0.1"], seeds=[0, 1, 2], clients=10, rounds=20)
        found.to_frame()

    Args:
        algorithms: Names, ``"FILE.py:NAME"`` or classes of your own; texts may have settings behind them:
            ``"fedavg:latent_activation=none"``. A setting may have
            alternatives, ``"fedprox:mu=0.001|0.01"``: every combination is run, and the clients' validation splits choose one
            for all seeds. Where none are asked for, a tenth of each client's samples is kept for these, of all algorithms.
        seeds: One run of each algorithm for each.
        out: Folder of the runs; runs that are finished there are read and not run again, others go on where they stopped. One
            whose training diverges has no figures and does not end the comparison.
        data: As in `fedfill.run`.
        partition: As in `fedfill.run`.
        model: As in `fedfill.run`.
        on_run: Called before each run with its label and seed; returns what to call after each of its rounds.
        quiet: Show no progress. Without it one line moves on a terminal and in a notebook; elsewhere each run that ends is a line on
            standard error.
        **settings: As in `fedfill.run`; a setting is given to those algorithms that have it.

    Returns:
        All runs, with means and deviations; of alternatives, those of the chosen one.

    Raises:
        FedfillError: Where anything is not allowed, nobody has a setting, or every run diverged (`DivergedError`).
    """
    expect("on_run", on_run, Callable | None, A_FUNCTION)
    found = plan(algorithms, seeds=seeds, out=out, data=data, partition=partition, model=model, **settings)
    return carry_out(found, on_run, quiet)


@dataclass(frozen=True)
class Plan:
    """A comparison of which everything is checked and nothing has run.

    Attributes:
        asked: What was asked for, with all settings that it asks for: one, or alternatives.
        names: By label of a row or an alternative the algorithm's name.
        seeds: One run of each for each.
        out: Folder of the runs.
        baseline: The label that differences are taken to.
        unlike: By label what it does not share with the baseline.
        arranged: Prepares one run from its label, its algorithm's name and its seed.
    """

    asked: Mapping[str, Sequence[str]]
    names: Mapping[str, str]
    seeds: Sequence[int]
    out: Path
    baseline: str
    unlike: Mapping[str, Sequence[str]]
    arranged: Callable[[str, str, int], Prepared]


def plan(
    algorithms: Sequence[str | type[Algorithm]],
    *,
    seeds: Sequence[int],
    out: str | Path,
    data: Any = "digits",
    partition: Partition = "dirichlet:0.5",
    model: Network = "auto",
    **options: Any,
) -> Plan:
    """Check a comparison, whose arguments are those of `compare`, before anything of it runs."""
    out = path_of("out", out)
    algorithms, seeds = _checked(algorithms, seeds, options)
    asked = {label: candidates(label) for label in algorithms}
    labels = [label for expanded in asked.values() for label in expanded]
    _refuse_twice("algorithm", labels)
    swept = len(labels) > len(algorithms)
    if swept and not options.setdefault("client_validation", VALIDATION):
        raise FedfillError(
            f"client_validation: found {options['client_validation']!r} with alternatives, which are chosen by it; allowed: above 0"
        )
    variants = [(label, *parse_variant(label)) for label in labels]
    shared = shared_settings([name for _, name, _ in variants], options)

    given = {label: over(shared[name], own) for label, name, own in variants}
    needs = {need: name for label, name, _ in reversed(variants) for need in _needs(name, given[label])}

    def arranged(label: str, name: str, seed: int) -> Prepared:
        return arrange(name, data=data, partition=partition, model=model, seed=seed, needs=needs, **given[label])

    # everything is checked before anything runs
    for label, name, own in variants:
        if not find(name).trains:
            raise FedfillError(
                f"compare: found '{label}', which trains no model that could be judged; allowed: algorithms that do, and 'fedfill run {name}'"
            )
        _refuse_options(label, own)
        split_settings(find(name), own)
    _check_folder(Path(out))
    _refuse_fewer(Path(out), labels, seeds)
    base = next((k for k, (_, name, _) in enumerate(variants) if name == "fedavg"), 0)
    unlike: dict[str, list[str]] = {}
    same: dict[str, str] = {}
    places: dict[Path, str] = {}
    for seed in seeds:
        baseline = arranged(*variants[base][:2], seed)
        for label, name, _ in variants:
            prepared = arranged(label, name, seed)
            if (other := same.setdefault(prepared.digest, label)) != label:
                raise FedfillError(
                    f"compare: found '{other}' and '{label}', which are the same algorithm with the same settings; allowed: each once"
                )
            if (other := places.setdefault(_folder(out, label, seed), label)) != label:
                raise FedfillError(
                    f"compare: the runs of '{other}' and of '{label}' would lie in one folder; rename one"
                )
            RunDirectory(_folder(out, label, seed)).check(prepared.digest)
            unlike.setdefault(label, unshared(prepared, baseline))
            if swept and not any(len(client.validation) for client in prepared.federation.clients):
                raise FedfillError(
                    f"client_validation: found {options['client_validation']}, which leaves no client a sample for validation, by which "
                    "alternatives are chosen; allowed: a larger share, or fewer clients"
                )

    names = {label: name for label, name, _ in variants}
    return Plan(asked, names, seeds, out, labels[base], unlike, arranged)


def carry_out(found: Plan, on_run: OnRun | None, quiet: bool) -> Comparison:
    """Run a comparison that was checked, and write its files; arguments as for `compare`."""
    asked, labels, seeds, out = found.asked, list(found.names), found.seeds, found.out
    results: dict[str, list[Result | None]] = {label: [] for label in labels}
    diverged: dict[str, list[str]] = {label: [] for label in labels}
    with watched(quiet, len(seeds) * len(labels)) as watch:
        for seed in seeds:
            for label, name in found.names.items():
                follow = both(follower(on_run, label, seed), watch(f"{label}, seed {seed}"))
                try:
                    results[label].append(launch(found.arranged(label, name, seed), _folder(out, label, seed), follow))
                except DivergedError as error:
                    results[label].append(None)
                    diverged[label].append(f"{label}, seed {seed}: {error}")
    rows = tuple(_row(label, expanded, results) for label, expanded in asked.items())
    if not any(row.finished for row in rows):
        raise DivergedError(f"compare: no run came to its end; {next(filter(None, diverged.values()))[0]}")
    comparison = Comparison(
        rows, tuple(seeds), out, next(row for row, expanded in zip(rows, asked.values(), strict=True) if found.baseline in expanded),
        notes=tuple(f"{row.label}: {what}" for row in rows for what in found.unlike[row.label]),
        diverged=tuple(sentence for row in rows for sentence in diverged[row.label]),
    )  # fmt: skip
    write_files(comparison)
    return comparison


def _checked(
    algorithms: Sequence[str | type[Algorithm]], seeds: Sequence[int], options: Mapping[str, Any]
) -> tuple[list[str], list[int]]:
    """The algorithms by name and the seeds, where these are lists that can be compared."""
    if "algorithm" in options:
        raise FedfillError("algorithm: a comparison has algorithms, a list of them")
    if "seed" in options:
        raise FedfillError("seed: a comparison has seeds, a list of them")
    if isinstance(algorithms, str | type | Mapping) or not isinstance(algorithms, Iterable):
        raise FedfillError(f'algorithms: found {shown(algorithms)}; allowed: a list, such as ["fedavg", "fedprox"]')
    labels, numbers = labels_of(list(algorithms)), whole_numbers(seeds)
    if not labels or not numbers:
        raise FedfillError("compare: needs at least one algorithm and one seed")
    for label in labels:
        if not isinstance(label, str):
            raise FedfillError(f'compare: found the algorithm {label!r}; allowed: names, such as "fedavg", and classes')
    _refuse_twice("algorithm", labels)
    _refuse_twice("seed", numbers)
    return labels, numbers


def _refuse_twice(what: str, items: Sequence[object]) -> None:
    twice = [item for k, item in enumerate(items) if item in list(items)[:k]]
    if twice:
        raise FedfillError(f"compare: the {what} '{twice[0]}' is given twice")


def _refuse_options(label: str, own: Mapping[str, Any]) -> None:
    """Refuse what all of a comparison must have in common, such as rounds."""
    for name in own.keys() & Experiment.model_fields.keys():
        raise FedfillError(
            f"{name}: found in '{label}'; allowed: the same for all of a comparison, beside the algorithms: "
            f"--{name.replace('_', '-')} {own[name]}, or {name}={own[name]} in Python"
        )


def _check_folder(out: Path) -> None:
    """Refuse a folder with anything else than a comparison, or the runs of one that was stopped."""
    with writing(out):
        if out.exists() and not out.is_dir():
            raise FedfillError(f"out: {out} is a file; choose a folder that is new or holds this comparison")
        held = (
            sorted(path for path in out.iterdir() if path.suffix != ".tmp" and path.name != ".lock")
            if out.exists()
            else []
        )
    strangers = [path.name for path in held if not (path.is_dir() and re.search(r"-seed\d+$", path.name))]
    if strangers and not (out / RECORD).exists():
        raise FedfillError(
            f"out: {out} is not empty and holds no comparison ({strangers[0]} lies there); choose a folder that is new or holds "
            "this comparison"
        )


def _refuse_fewer(out: Path, labels: Sequence[str], seeds: Sequence[int]) -> None:
    """Refuse what would take rows or seeds out of the tables that are there; a comparison may grow."""
    try:
        held = json.loads(read_regular(out / RECORD))
        rows = [label for row in held["rows"] for label in row.get("validation", [row["label"]])]
        gone = [label for label in rows if label not in labels] or [
            f"seed {s}" for s in held["seeds"] if s not in seeds
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return  # there is none, or it is damaged, and running it again mends it
    if gone:
        raise FedfillError(
            f"out: {out} holds a comparison that has {', '.join(gone)} too; name all that it has, with more where you like, "
            "or choose another folder"
        )


def _row(asked: str, labels: Sequence[str], results: Mapping[str, Sequence[Result | None]]) -> Row:
    """The runs of one thing that was asked for: its own, or those of the candidate that validation chooses."""
    if len(labels) == 1:
        return Row(labels[0], tuple(results[labels[0]]))
    sweep = Sweep(asked, {label: validated(results[label]) for label in labels})
    return Row(sweep.chosen, tuple(results[sweep.chosen]), sweep)


BUDGET = (
    "local_epochs", "local_steps", "batch_size", "optimizer", "learning_rate", "momentum", "weight_decay", "lr_decay",
    "lr_decay_every", "buffers",
)  # fmt: skip
"""Settings of the local training that a fair comparison holds equal."""


def unshared(prepared: Prepared, baseline: Prepared) -> list[str]:
    """What an algorithm does not share with the baseline; clients, data and batch orders of a seed are always the same."""
    own, other = prepared.experiment.settings, baseline.experiment.settings
    budget = [f"{name}={own[name]} (not {other[name]})" for name in BUDGET if own[name] != other[name]]
    pooled = type(prepared.algorithm).pooled
    phrases = ["the clients' data and mini-batches: all training samples lie in one place"] if pooled else []
    if prepared.experiment.engine == "flower" and prepared.algorithm.personal != baseline.algorithm.personal:
        phrases.append("the test set: on flower personal models are judged by their hosts, each on its own test split")
    if budget:
        why = f" ({prepared.algorithm.unfair})" if prepared.algorithm.unfair else ""
        phrases.append(f"another local budget: {', '.join(budget)}{why}")
    name, theirs_name = prepared.experiment.model, baseline.experiment.model
    if name != theirs_name:
        return [*phrases, f"another network: {name} (not {theirs_name})"]
    shape, others = prepared.experiment.model_settings, baseline.experiment.model_settings
    network = [f"{name}={shape[name]} (not {others[name]})" for name in others if shape.get(name) != others[name]]
    if network:
        phrases.append(f"another network: {', '.join(network)}")
    mine, theirs = prepared.initial, baseline.initial
    common = [name for name in theirs if name in mine and mine[name].shape == theirs[name].shape]
    more, fewer = (sum(w[n].numel() for n in w if n not in common) for w in (mine, theirs))
    if (more or fewer) and not network:
        phrases.append(f"another network: {more:,} numbers that the baseline lacks, {fewer:,} that it has alone")
    if not all(torch.equal(mine[name], theirs[name]) for name in common):
        phrases.append("other initial weights")
    return phrases


def _folder(out: str | Path, label: str, seed: int) -> Path:
    name = re.sub(r"[^\w.=+-]+", "-", label)  # of a label with a feature map, too
    return Path(out) / f"{name}-seed{seed}"


def _needs(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """What an algorithm with these options needs in a network."""
    settings, _ = split_settings(find(name), {k: v for k, v in options.items() if k not in Experiment.model_fields})
    return checked(find(name), settings).needs()


def taken(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Of the options for all, those that any of these algorithms has."""
    found = {}
    for key, value in options.items():
        with suppress(FedfillError):
            shared_settings(names, {key: value})
            found[key] = value
    return found


def shared_settings(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of the options for all, those that each algorithm has; refused where none has one."""
    shared: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in options.items():
        refusal: FedfillError | None = None
        takers = 0
        for name in shared:
            try:
                if key not in Experiment.model_fields:
                    split_settings(find(name), {key: value})
            except FedfillError as error:
                refusal = error
                continue
            shared[name][key] = value
            takers += 1
        if not takers and refusal is not None:
            raise refusal
    return shared
