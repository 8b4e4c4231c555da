"""Comparisons: several algorithms over several seeds on the same partitions."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import nn

from fedfill.algorithms import find, parse_variant
from fedfill.errors import DivergedError, FedfillError, checked
from fedfill.experiment.loop import OnRound
from fedfill.experiment.prepare import Prepared, arrange, split_settings
from fedfill.experiment.settings import Experiment, over, whole_numbers
from fedfill.experiment.summary import Result, collapse
from fedfill.runs.directory import RunDirectory, write_atomically, writing
from fedfill.studies.run import launch
from fedfill.training.evaluation import FAIRNESS

FIGURES = ("accuracy", "best_accuracy", *FAIRNESS, "bytes_up", "bytes_down", "train_samples", "seconds")


@dataclass(frozen=True)
class Row:
    """One algorithm's runs.

    Attributes:
        label: The algorithm, with its own settings where it was given some.
        results: For each seed the finished run, or None where its training diverged.
    """

    label: str
    results: tuple[Result | None, ...]

    def figure(self, name: str) -> tuple[float | None, float | None]:
        """Mean and sample standard deviation over seeds; no deviation for a single seed, and nothing where a run has no figure."""
        values = self.values(name)
        if any(value is None for value in values):
            return None, None
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None

    def values(self, name: str) -> list[Any]:
        """A figure of each run, in the order of the seeds; None for one that diverged."""
        return [result.summary[name] if result is not None else None for result in self.results]

    @property
    def finished(self) -> list[Result]:
        """The runs that came to their end, in the order of the seeds."""
        return [result for result in self.results if result is not None]


@dataclass(frozen=True)
class Difference:
    """How far a row is from the baseline, seed by seed: the same clients, data and initial weights on both sides.

    Attributes:
        mean: Of the differences.
        half_width: Of the 95 % confidence interval of their mean (Student's t over the seeds); None for a single seed.
    """

    mean: float
    half_width: float | None


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        rows: In the order asked for.
        seeds: Of each row's runs.
        directory: Where the runs lie, each in its own folder, with ``comparison.csv`` and two pictures.
        baseline: The row that differences are taken to: the first FedAvg, or the first row where there is none.
        notes: Where a row could not share network, initial weights or local budget with the baseline.
        diverged: A sentence for each run that diverged; the pictures leave its row out.
        collapsed: A sentence for each run whose model learnt nothing.
    """

    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    directory: Path
    baseline: Row
    notes: tuple[str, ...]
    diverged: tuple[str, ...] = ()
    collapsed: tuple[str, ...] = ()

    def difference(self, row: Row, name: str) -> Difference | None:
        """The paired difference of a row's figure to the baseline's; None where a run has no such figure, or it is the baseline."""
        pairs = list(zip(row.values(name), self.baseline.values(name), strict=True))
        if row is self.baseline or any(value is None for pair in pairs for value in pair):
            return None
        return paired_difference([own - base for own, base in pairs])


def paired_difference(differences: Sequence[float]) -> Difference:
    """Mean and 95 % confidence interval of paired differences."""
    n = len(differences)
    mean = statistics.fmean(differences)
    if n < 2:
        return Difference(mean, None)
    return Difference(mean, float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n))


def compare(
    algorithms: Sequence[str],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    out: str | Path = "runs/compare",
    data: Any = "digits",
    partition: Any = "dirichlet:0.5",
    model: str | nn.Module = "auto",
    on_run: Callable[[str, int], OnRound | None] | None = None,
    **options: Any,
) -> Comparison:
    """Run several algorithms over several seeds; every algorithm sees the same clients and the same data for a seed.

    Args:
        algorithms: Names, or names with settings of their own: ``"fedavg:latent_activation=none"``.
        seeds: One run of each algorithm for each.
        out: Folder of the runs; runs that are finished there are read and not run again, others go on where they stopped. One
            whose training diverges has no figures and does not end the comparison.
        data: As in `fedfill.run`.
        partition: As in `fedfill.run`.
        model: As in `fedfill.run`.
        on_run: Called before each run with its label and seed; returns what to call after each of its rounds.
        **options: As in `fedfill.run`; a setting is given to those algorithms that have it.

    Returns:
        All runs, with means and deviations.

    Raises:
        FedfillError: Where anything is not allowed, nobody has a setting, or every run diverged.
    """
    if len(algorithms) == 0 or len(seeds) == 0:  # numpy's arrays have no truth value
        raise FedfillError("compare: needs at least one algorithm and one seed")
    if "seed" in options:
        raise FedfillError("seed: a comparison has seeds, a list of them")
    if isinstance(algorithms, str) or isinstance(seeds, str):
        raise FedfillError("compare: found a text; allowed: a list of algorithms and a list of seeds")
    seeds = whole_numbers(seeds)
    for label in algorithms:
        if not isinstance(label, str):
            raise FedfillError(f'compare: found the algorithm {label!r}; allowed: names, such as "fedavg"')
    for what, items in (("algorithm", algorithms), ("seed", seeds)):
        twice = [item for k, item in enumerate(items) if item in list(items)[:k]]
        if twice:
            raise FedfillError(f"compare: the {what} '{twice[0]}' is given twice")
    variants = [(label, *parse_variant(label)) for label in algorithms]
    shared = _shared_settings([name for _, name, _ in variants], options)

    given = {label: over(shared[name], own) for label, name, own in variants}
    needs = {need: name for label, name, _ in reversed(variants) for need in _needs(name, given[label])}

    def arranged(label: str, name: str, seed: int) -> Prepared:
        return arrange(name, data=data, partition=partition, model=model, seed=seed, needs=needs, **given[label])

    # everything is checked before anything runs
    for _, name, own in variants:
        split_settings(find(name), own)  # an option of the experiment, such as rounds, must be the same for all
    base = next((k for k, (_, name, _) in enumerate(variants) if name == "fedavg"), 0)
    notes: list[str] = []
    for seed in seeds:
        baseline = arranged(*variants[base][:2], seed)
        for label, name, _ in variants:
            prepared = arranged(label, name, seed)
            RunDirectory(_folder(out, label, seed)).check(prepared.digest)
            if seed == seeds[0]:
                notes += [f"{label}: {what}" for what in unshared(prepared, baseline)]

    results: dict[str, list[Result | None]] = {label: [] for label in algorithms}
    diverged: list[str] = []
    for seed in seeds:
        for label, name, _ in variants:
            follow = on_run(label, seed) if on_run else None
            try:
                results[label].append(launch(arranged(label, name, seed), _folder(out, label, seed), follow))
            except DivergedError as error:
                results[label].append(None)
                diverged.append(f"{label}, seed {seed}: {error}")
    if len(diverged) == len(algorithms) * len(seeds):
        raise FedfillError(f"compare: no run came to its end; {diverged[0]}")
    rows = tuple(Row(label, tuple(results[label])) for label in algorithms)
    collapsed = [
        f"{row.label}, seed {seed}: {sentence}"
        for row, (_, name, _) in zip(rows, variants, strict=True)
        for seed, result in zip(seeds, row.results, strict=True)
        if result is not None and (sentence := collapse(result.rounds[-1], find(name).personal))
    ]
    write_atomically(Path(out) / "comparison.csv", _csv(rows).encode())
    _draw(rows, Path(out))
    return Comparison(rows, tuple(seeds), Path(out), rows[base], tuple(notes), tuple(diverged), tuple(collapsed))


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


def _draw(rows: Sequence[Row], folder: Path) -> None:
    from fedfill.runs.pictures import (
        accuracy_bars,
        accuracy_curves,
    )  # here: matplotlib costs every start a third of a second

    whole = [row for row in rows if None not in row.results]  # the mean of those seeds that survive would flatter
    if not whole:
        return
    curves = {row.label: [result.curve for result in row.finished] for row in whole}
    finals = {row.label: (row.values("accuracy"), row.values("worst_client_accuracy")) for row in whole}
    with writing(folder):
        accuracy_curves(curves, folder / "accuracy.png")
        accuracy_bars(finals, folder / "final.png")


def _folder(out: str | Path, label: str, seed: int) -> Path:
    return Path(out) / f"{label.replace(':', '-').replace(',', '-')}-seed{seed}"


def _needs(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """What an algorithm with these options needs in a network."""
    settings, _ = split_settings(find(name), {k: v for k, v in options.items() if k not in Experiment.model_fields})
    return checked(find(name), settings).needs()


def _shared_settings(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
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


def _csv(rows: Sequence[Row]) -> str:
    """One line for each run and figure: tidy, for any plotting program."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["algorithm", "seed", "figure", "value"])
    for row in rows:
        for result in row.finished:
            for name in FIGURES:
                writer.writerow([row.label, result.summary["seed"], name, result.summary[name]])
    return text.getvalue()
