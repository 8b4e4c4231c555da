"""The benchmark ``natural``: real tables of many sites, the same methods on each, and whether federation is worth it there.

Of each seed a table is split anew, 70 to 30 within each site, the same for all methods. Settings are fixed for all tables, so that
nothing is chosen by a test row.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfill.data.natural import NaturalTable, divide, known_tables, read
from fedfill.errors import A_FUNCTION, DivergedError, FedfillError, did_you_mean, expect, path_of
from fedfill.experiment.settings import whole_numbers
from fedfill.experiment.summary import Result
from fedfill.files import read_regular
from fedfill.runs.directory import write_atomically, writing
from fedfill.studies.benchmark import Benchmark
from fedfill.studies.benchmark_files import TABLE, epsilon_of, write_files
from fedfill.studies.compare import carry_out, plan
from fedfill.studies.comparison import Row
from fedfill.studies.run import OnRun

FEW_SITES = 4
"""Tables with more sites go without FRAug, which takes ten times as long there as FedAvg."""
MODELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "linear": (
        ("central", "local", "fedavg", "fedprox", "scaffold"),
        {
            "model": "features", "model.features": "clip", "rounds": 20, "local_epochs": 2, "batch_size": 64, "optimizer": "sgd",
            "learning_rate": 2.0,
        },
    ),
    "mlp": (
        (
            "central", "local", "fedavg", "fedprox", "scaffold:learning_rate=0.02", "fedbn", "fraug", "fedavg:head=fed3r",
            "fedbn:head=pfed3r", "fed3r", "pfed3r",
        ),
        {"model": "auto", "rounds": 10, "local_epochs": 2, "batch_size": 64, "learning_rate": 0.003},
    ),
}  # fmt: skip
"""By model its methods and its settings. ``features`` with ``clip`` are the inputs themselves, so the model is logistic regression;
``auto`` is the network mlp. SCAFFOLD has plain SGD in both."""
PERSONAL = (
    "pfedavg", "ditto", "pfedme", "perfedavg", "fedper", "lgfedavg", "fedrep", "fedbabu", "fedrod", "fedproto", "partialfed",
    "ifca", "fesem", "cfl",
)  # fmt: skip
"""More methods with a model for each site, or for each cluster of sites, with the settings of ``mlp``. They are run where they are
asked for by name."""
PRIVATE = "fed3r:target_epsilon={:g},trust=secure"
"""With an epsilon: the noise is in the sum once. It is run on the inputs themselves, which are few, as each more has noise of its own."""
OF_SUMS = ("fed3r", "pfed3r")
"""Methods for which ``auto`` is no mlp, but features from a seed."""


def natural(
    sets: Sequence[str] | None = None,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    out: str | Path = "runs/natural",
    tables: str | Path | None = None,
    methods: Sequence[str] | None = None,
    epsilon: float | None = None,
    on_run: OnRun | None = None,
    quiet: bool = False,
    **options: Any,
) -> Benchmark:
    """Run the benchmark; runs that are finished in its folder are read.

    Args:
        sets: Names of tables; None: all that are bundled.
        seeds: One split and one run of each method for each.
        out: Folder of the comparisons, with ``natural.md``, ``natural.csv`` and ``sites.csv``.
        tables: Folder with tables that are not bundled, as ``NAME.csv`` or ``NAME.parquet``.
        methods: Those to run, of `MODELS` and `PERSONAL`; None: all of `MODELS`.
        epsilon: Of one record, at delta 1e-5: then `PRIVATE` stands in for all federated methods, and `out` has to be a folder of its
            own; None: nobody adds noise.
        on_run: Called before each run with its label and seed; returns what to call after each of its rounds.
        quiet: As in `fedfill.compare`.
        **options: ``workers`` and ``device``, as for `fedfill.run`.

    Returns:
        All runs.

    Raises:
        FedfillError: Where something is not allowed, or a table can't be read.
    """
    expect("on_run", on_run, Callable | None, A_FUNCTION)
    folder = path_of("out", out)
    place = None if tables is None else path_of("tables", tables)
    numbers = whole_numbers(seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise FedfillError(f"seeds: found {list(seeds)}; allowed: whole numbers, at least one, each once")
    chosen = _chosen(sets)
    _check_methods(methods, epsilon)
    _check_folder(folder, epsilon)
    # everything is read before anything runs
    read_tables = {table.name: read(table, place) for table in chosen}
    parts = {
        (table.name, seed): _written(folder, table, read_tables[table.name], seed)
        for table in chosen
        for seed in numbers
    }
    rows: dict[str, dict[tuple[str, str], Row]] = {}
    for table in chosen:
        rows[table.name] = dict(
            _run_table(
                table,
                _methods(table, read_tables[table.name], methods, epsilon),
                numbers,
                parts,
                folder,
                on_run,
                quiet,
                options,
            )
        )
        found = Benchmark(rows, tuple(numbers), folder, epsilon)
        write_files(found)  # after each, so that a benchmark that is stopped has its first figures
    return found


def count_runs(
    sets: Sequence[str] | None,
    seeds: Sequence[int],
    tables: str | Path | None = None,
    methods: Sequence[str] | None = None,
    epsilon: float | None = None,
) -> int:
    """How many runs there will be, for progress."""
    place = None if tables is None else path_of("tables", tables)
    _check_methods(methods, epsilon)
    found = (_methods(table, read(table, place), methods, epsilon) for table in _chosen(sets))
    return len(seeds) * sum(len(labels) for of_table in found for labels in of_table.values())


def _chosen(sets: Sequence[str] | None) -> list[NaturalTable]:
    known = known_tables()
    names = [name for name, table in known.items() if table.sha256 is not None] if sets is None else list(sets)
    for k, name in enumerate(names):
        if name not in known:
            raise FedfillError(f"sets: found '{name}'; {did_you_mean(str(name), known)}")
        if name in names[:k]:
            raise FedfillError(f"sets: found '{name}' twice; allowed: each once")
    if not names:
        raise FedfillError(f"sets: found none; allowed: {', '.join(known)}")
    return [known[name] for name in names]


def _check_methods(methods: Sequence[str] | None, epsilon: float | None) -> None:
    expect("epsilon", epsilon, int | float | None, "a number above 0, or none")
    if isinstance(epsilon, bool) or (epsilon is not None and not 0 < epsilon < math.inf):
        raise FedfillError(f"epsilon: found {epsilon}; allowed: a number above 0, or none")
    known = {_called(label) for labels in _labels(epsilon, more=True).values() for label in labels}
    for name in methods or ():
        if name not in known:
            raise FedfillError(f"methods: found '{name}'; {did_you_mean(str(name), known)}")
    if methods is not None and not methods:
        raise FedfillError(f"methods: found none; allowed: {', '.join(sorted(known))}")


def _labels(epsilon: float | None, more: bool = False) -> dict[str, tuple[str, ...]]:
    """By model all labels, with or without those that are asked for by name alone."""
    if epsilon is None:
        return {model: labels + (PERSONAL if more and model == "mlp" else ()) for model, (labels, _) in MODELS.items()}
    return {"linear": ("central", "local", PRIVATE.format(epsilon))}


def _methods(
    table: NaturalTable, rows: Any, methods: Sequence[str] | None, epsilon: float | None
) -> dict[str, tuple[str, ...]]:
    """By model its methods, of those that are asked for."""
    many = len(set(rows.column(table.schema.site).to_pylist())) > FEW_SITES
    found = {
        model: tuple(
            label
            for label in labels
            if not (many and label == "fraug") and (methods is None or _called(label) in methods)
        )
        for model, labels in _labels(epsilon, more=methods is not None).items()
    }
    return {model: labels for model, labels in found.items() if labels}


def _called(label: str) -> str:
    """A method without the rate, or the noise, that it has of its own."""
    return label.partition(":learning_rate")[0].partition(":target_epsilon")[0]


def _check_folder(folder: Path, epsilon: float | None) -> None:
    """Refuse a folder with anything else than this benchmark, or a part of one that was stopped."""
    with writing(folder):
        if folder.exists() and not folder.is_dir():
            raise FedfillError(f"out: {folder} is a file; choose a folder that is new or holds this benchmark")
        held = [path.name for path in folder.iterdir() if path.suffix != ".tmp"] if folder.exists() else []
        held_epsilon = epsilon_of(folder)
    if held and TABLE not in held and (strangers := sorted({*held} - {"data", *known_tables()})):
        raise FedfillError(
            f"out: {folder} is not empty and holds no benchmark ({strangers[0]} lies there); choose a folder that is new or holds "
            "this benchmark"
        )
    if held_epsilon is not None and held_epsilon != ("" if epsilon is None else f"{epsilon:g}"):
        words = f"epsilon {held_epsilon}" if held_epsilon else "no epsilon"
        raise FedfillError(f"out: {folder} holds a benchmark with {words}; choose another folder, or the same epsilon")


def _written(folder: Path, table: NaturalTable, rows: Any, seed: int) -> Path:
    """The folder of a split, as any command can read it."""
    import pyarrow.parquet as pq

    place = folder / "data" / f"{table.name}-seed{seed}"
    for name, part in zip(("train", "test"), divide(rows, table.schema, seed), strict=True):
        file, text = place / f"{name}.parquet", io.BytesIO()
        pq.write_table(part, text, compression="zstd")
        if not file.is_file() or read_regular(file) != text.getvalue():
            with writing(place):
                place.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text.getvalue())
    return place


def _run_table(
    table: NaturalTable, methods: Mapping[str, Sequence[str]], seeds: Sequence[int], parts: Mapping[tuple[str, int], Path],
    folder: Path, on_run: OnRun | None, quiet: bool, options: Mapping[str, Any],
) -> Iterator[tuple[tuple[str, str], Row]]:  # fmt: skip
    """Each model and method with its runs of all seeds."""
    for model, labels in methods.items():
        found: dict[str, list[Result | None]] = {label: [] for label in labels}

        def follow(label: str, seed: int, model: str = model) -> Any:
            return on_run(f"{table.name}, {model}: {label}", seed) if on_run is not None else None

        for seed in seeds:
            planned = plan(
                labels, seeds=[seed], out=folder / table.name / f"{model}-seed{seed}", data=f"{parts[table.name, seed].resolve()}",
                partition="domain", schema_file=str(table.schema_file), client_test=0.0, evaluate_every=MODELS[model][1]["rounds"],
                **MODELS[model][1], **options,
            )  # fmt: skip
            try:
                for row in carry_out(planned, follow, quiet).rows:
                    found[row.label].append(row.results[0])
            except DivergedError:  # all of them: a finding, which does not end the others
                for results in found.values():
                    results.append(None)
        for label, results in found.items():
            yield ("features" if label in OF_SUMS else model, _called(label)), Row(_called(label), tuple(results))
