"""The benchmark ``natural``: data of many sites, the same methods on each, and whether federation is worth it there.

Of each seed a set is split anew, the same for all methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfill.errors import A_FUNCTION, DivergedError, FedfillError, did_you_mean, expect, path_of
from fedfill.experiment.settings import whole_numbers
from fedfill.experiment.summary import Result
from fedfill.runs.directory import writing
from fedfill.studies.benchmark import Benchmark
from fedfill.studies.benchmark_files import TABLE, epsilon_of, write_files
from fedfill.studies.benchmark_sets import (
    FEW_SITES,
    OF_SUMS,
    BenchmarkSet,
    chosen_names,
    known_sets,
    method_of,
    methods_of,
    open_set,
)
from fedfill.studies.compare import carry_out, plan
from fedfill.studies.comparison import Row
from fedfill.studies.run import OnRun


def natural(
    sets: Sequence[str] | None = None,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    out: str | Path = "runs/natural",
    tables: str | Path | None = None,
    data_dir: str | Path | None = None,
    methods: Sequence[str] | None = None,
    epsilon: float | None = None,
    on_run: OnRun | None = None,
    quiet: bool = False,
    **options: Any,
) -> Benchmark:
    """Run the benchmark; runs that are finished in its folder are read.

    Args:
        sets: Names of `benchmark_sets.known_sets`; None: all tables that are bundled.
        seeds: One split and one run of each method for each.
        out: Folder of the comparisons, with ``natural.md``, ``natural.csv`` and ``sites.csv``.
        tables: Folder with tables that are not bundled, as ``NAME.csv`` or ``NAME.parquet``.
        data_dir: Folder with the data sets of ``digits-domains``, as for `fedfill.run`.
        methods: Those to run, also further personal ones; None: those of every benchmark.
        epsilon: Of one record, at delta 1e-5: then ``fed3r`` with noise stands in for all federated methods, and `out` has to be a
            folder of its own; None: nobody adds noise.
        on_run: Called before each run with its label and seed; returns what to call after each of its rounds.
        quiet: As in `fedfill.compare`.
        **options: ``workers`` and ``device``, as for `fedfill.run`.

    Returns:
        All runs.

    Raises:
        FedfillError: Where something is not allowed, or a set can't be read.
    """
    expect("on_run", on_run, Callable | None, A_FUNCTION)
    folder = path_of("out", out)
    numbers = whole_numbers(seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise FedfillError(f"seeds: found {list(seeds)}; allowed: whole numbers, at least one, each once")
    names = chosen_names(sets)
    _check_methods(names, methods, epsilon)
    _check_folder(folder, epsilon)
    # everything is read, and every split written, before anything runs
    chosen = _opened(names, tables, data_dir, methods, epsilon)
    splits = {(name, seed): one.split(folder, seed) for name, one in chosen.items() for seed in numbers}
    rows: dict[str, dict[tuple[str, str], Row]] = {}
    for name, one in chosen.items():
        of_set = {seed: splits[name, seed] for seed in numbers}
        rows[name] = dict(_run_set(one, one.labels(methods, epsilon), of_set, folder, on_run, quiet, options))
        found = Benchmark(chosen, rows, tuple(numbers), folder, epsilon)
        write_files(found)  # after each, so that a benchmark that is stopped has its first figures
    return found


def count_runs(
    sets: Sequence[str] | None,
    seeds: Sequence[int],
    tables: str | Path | None = None,
    methods: Sequence[str] | None = None,
    epsilon: float | None = None,
    data_dir: str | Path | None = None,
) -> int:
    """How many runs there will be, for progress."""
    names = chosen_names(sets)
    _check_methods(names, methods, epsilon)
    found = [one.labels(methods, epsilon) for one in _opened(names, tables, data_dir, methods, epsilon).values()]
    return len(seeds) * sum(len(labels) for of_set in found for labels in of_set.values())


def _opened(
    names: Sequence[str], tables: str | Path | None, data_dir: str | Path | None, methods: Sequence[str] | None, epsilon: float | None,
) -> dict[str, BenchmarkSet]:  # fmt: skip
    """The sets by name, where at least one of them has a method to run."""
    place = None if tables is None else path_of("tables", tables)
    found = {name: open_set(name, place, data_dir) for name in names}
    if methods is not None and not any(one.labels(methods, epsilon) for one in found.values()):
        raise FedfillError(
            f"methods: found {', '.join(methods)}, which runs on none of {', '.join(names)}; allowed: sets of up to {FEW_SITES} sites, or "
            "other methods"
        )
    return found


def _check_methods(sets: Sequence[str], methods: Sequence[str] | None, epsilon: float | None) -> None:
    expect("epsilon", epsilon, int | float | None, "a number above 0, or none")
    if isinstance(epsilon, bool) or (epsilon is not None and not 0 < epsilon < math.inf):
        raise FedfillError(f"epsilon: found {epsilon}; allowed: a number above 0, or none")
    if epsilon is not None and float(f"{epsilon:g}") != epsilon:  # the folder's files and the runs have these digits
        raise FedfillError(f"epsilon: found {epsilon}; allowed: a number of at most six digits, such as {epsilon:g}")
    known = methods_of(sets, epsilon)
    for name in methods or ():
        if name not in known:
            raise FedfillError(f"methods: found '{name}'; {did_you_mean(name, known)}")
    if methods is not None and not methods:
        raise FedfillError(f"methods: found none; allowed: {', '.join(sorted(known))}")


def _check_folder(folder: Path, epsilon: float | None) -> None:
    """Refuse a folder with anything else than this benchmark, or a part of one that was stopped."""
    with writing(folder):
        if folder.exists() and not folder.is_dir():
            raise FedfillError(f"out: {folder} is a file; choose a folder that is new or holds this benchmark")
        held = [path.name for path in folder.iterdir() if path.suffix != ".tmp"] if folder.exists() else []
        held_epsilon = epsilon_of(folder)
    if held and TABLE not in held and (strangers := sorted({*held} - {"data", *known_sets()})):
        raise FedfillError(
            f"out: {folder} is not empty and holds no benchmark ({strangers[0]} lies there); choose a folder that is new or holds "
            "this benchmark"
        )
    if held_epsilon is not None and held_epsilon != ("" if epsilon is None else f"{epsilon:g}"):
        words = f"epsilon {held_epsilon}" if held_epsilon else "no epsilon"
        raise FedfillError(f"out: {folder} holds a benchmark with {words}; choose another folder, or the same epsilon")


def _run_set(
    one: BenchmarkSet, methods: Mapping[str, Sequence[str]], splits: Mapping[int, Mapping[str, Any]], folder: Path,
    on_run: OnRun | None, quiet: bool, options: Mapping[str, Any],
) -> Iterator[tuple[tuple[str, str], Row]]:  # fmt: skip
    """Each model and method with its runs of all seeds."""
    for model, labels in methods.items():
        settings = one.models[model].settings
        found: dict[str, list[Result | None]] = {label: [] for label in labels}

        def follow(label: str, seed: int, model: str = model) -> Any:
            return on_run(f"{one.name}, {model}: {label}", seed) if on_run is not None else None

        for seed, split in splits.items():
            planned = plan(
                labels, seeds=[seed], out=folder / one.name / f"{model}-seed{seed}", partition="domain",
                evaluate_every=settings["rounds"], **settings, **split, **options,
            )  # fmt: skip
            try:
                for row in carry_out(planned, follow, quiet).rows:
                    found[row.label].append(row.results[0])
            except DivergedError:  # all of them: a finding, which does not end the others
                for results in found.values():
                    results.append(None)
        for label, results in found.items():
            yield ("features" if label in OF_SUMS else model, method_of(label)), Row(method_of(label), tuple(results))
