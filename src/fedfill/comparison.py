"""Comparisons: several algorithms over several seeds on the same partitions."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedfill.algorithms import find
from fedfill.errors import FedfillError
from fedfill.experiment import launch
from fedfill.loop import OnRound, Prepared, Result
from fedfill.preparation import arrange
from fedfill.runs.directory import RunDirectory, write_atomically
from fedfill.settings import Experiment, split_settings

FIGURES = ("accuracy", "best_accuracy", "worst_client_accuracy", "client_variance", "class_variance", "bytes_up",
           "bytes_down", "train_samples", "seconds")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One algorithm's runs.

    Attributes:
        label: The algorithm, with its own settings where it was given some.
        results: One finished run for each seed.
    """

    label: str
    results: tuple[Result, ...]

    def figure(self, name: str) -> tuple[float | None, float | None]:
        """Mean and sample standard deviation over seeds; no deviation for a single seed, neither where a run has no figure."""
        values = [result.summary[name] for result in self.results]
        if any(value is None for value in values):
            return None, None
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        rows: In the order asked for.
        seeds: Of each row's runs.
        directory: Where the runs lie, each in its own folder, and ``comparison.csv``.
    """

    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    directory: Path


def parse_variant(text: str) -> tuple[str, dict[str, str]]:
    """An algorithm with settings of its own.

    Args:
        text: ``"fedavg"`` or ``"fedavg:latent_activation=none,local_epochs=1"``.

    Returns:
        The name and its settings.

    Raises:
        FedfillError: Where a setting has no value.
    """
    name, _, rest = text.partition(":")
    settings: dict[str, str] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise FedfillError(
                f"algorithm: found '{pair}' in '{text}'; allowed: NAME or NAME:setting=value,setting=value"
            )
        settings[key.strip()] = value.strip()
    return name, settings


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
        out: Folder of the runs; runs that are finished there are read and not run again, others go on where they stopped.
        data: As in `fedfill.run`.
        partition: As in `fedfill.run`.
        model: As in `fedfill.run`.
        on_run: Called before each run with its label and seed; returns what to call after each of its rounds.
        **options: As in `fedfill.run`; a setting is given to those algorithms that have it.

    Returns:
        All runs, with means and deviations.

    Raises:
        FedfillError: Where anything is not allowed, or nobody has a setting.
    """
    if not algorithms or not seeds:
        raise FedfillError("compare: needs at least one algorithm and one seed")
    if "seed" in options:
        raise FedfillError("seed: a comparison has seeds, a list of them")
    seeds = [int(seed) for seed in seeds]
    for label in algorithms:
        if not isinstance(label, str):
            raise FedfillError(f'compare: found the algorithm {label!r}; allowed: names, such as "fedavg"')
    for what, items in (("algorithm", algorithms), ("seed", seeds)):
        twice = [item for k, item in enumerate(items) if item in list(items)[:k]]
        if twice:
            raise FedfillError(f"compare: the {what} '{twice[0]}' is given twice")
    variants = [(label, *parse_variant(label)) for label in algorithms]
    shared = _shared_settings([name for _, name, _ in variants], options)

    def arranged(name: str, own: Mapping[str, str], seed: int) -> Prepared:
        return arrange(name, data=data, partition=partition, model=model, seed=seed, **{**shared[name], **own})

    # everything is checked before anything runs
    for _, name, own in variants:
        split_settings(find(name), own)  # an option of the experiment, such as rounds, must be the same for all
    for seed in seeds:
        for label, name, own in variants:
            RunDirectory(_folder(out, label, seed)).check(arranged(name, own, seed).digest)

    results: dict[str, list[Result]] = {label: [] for label in algorithms}
    for seed in seeds:
        for label, name, own in variants:
            follow = on_run(label, seed) if on_run else None
            results[label].append(launch(arranged(name, own, seed), _folder(out, label, seed), follow))
    rows = tuple(Row(label, tuple(results[label])) for label in algorithms)
    write_atomically(Path(out) / "comparison.csv", _csv(rows).encode())
    return Comparison(rows, tuple(seeds), Path(out))


def _folder(out: str | Path, label: str, seed: int) -> Path:
    return Path(out) / f"{label.replace(':', '-').replace(',', '-')}-seed{seed}"


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
        for result in row.results:
            for name in FIGURES:
                writer.writerow([row.label, result.summary["seed"], name, result.summary[name]])
    return text.getvalue()
