"""Experiments: what to run, and the loop that runs it, records it, and goes on after a kill."""

from __future__ import annotations

import copy
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from fedfill import __version__, tree
from fedfill.algorithms.base import Algorithm, find
from fedfill.data.federation import Federation, federate
from fedfill.engines.contract import Books, Server, State
from fedfill.engines.local import LocalEngine, choose_device
from fedfill.errors import FedfillError, did_you_mean
from fedfill.models.layers import with_streams
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import require_parts, weights_of
from fedfill.privacy.ledger import Ledger
from fedfill.runs.directory import RunDirectory, to_json
from fedfill.runs.pictures import image_grid
from fedfill.streams import derive
from fedfill.tree import Weights

OnRound = Callable[[dict[str, Any], int], None]
"""Called after each round with its record and the number of rounds of the run."""


class Experiment(BaseModel):
    """What to run. ``experiment.toml`` holds these fields, with the settings resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    algorithm: str
    """Name of the algorithm."""
    data: str = "digits"
    """Name of the data set, or of a folder below `data_dir`."""
    data_dir: str | None = None
    """Folder with data sets as Parquet or images; none: the environment variable FEDFILL_DATA."""
    data_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the training set that is used."""
    partition: str = "dirichlet:0.5"
    """How the training set is divided among the clients."""
    clients: int = Field(default=10, ge=1)
    """Number of clients (K)."""
    client_test: float = Field(default=0.1, ge=0, le=0.5)
    """Share of each client's samples that is kept as its own test split."""
    participation: float = Field(default=1.0, gt=0, le=1)
    """Share of the clients that take part in a round."""
    rounds: int = Field(default=50, ge=1)
    """Rounds (T)."""
    seed: int = Field(default=0, ge=0)
    """Seed of every stream of randomness."""
    model: str = "auto"
    """Name of the network."""
    engine: str = "local"
    """Engine that carries messages and runs clients."""
    device: str = "auto"
    """Where data and models live: auto, cpu, cuda, cuda:N."""
    workers: int | None = Field(default=None, ge=1)
    """Threads over clients; none: one for each processor."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """Delta at which the privacy account gives epsilon."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the algorithm and its local training."""
    model_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the built-in networks."""


# what may differ between two runs of the same experiment
_INCIDENTAL = {"data_dir", "device", "workers"}


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        directory: Where it lies.
        summary: The figures to quote, as in ``summary.json``.
        rounds: One record for each round.
        weights: The final global weights.
    """

    directory: Path
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    weights: Weights


B = TypeVar("B", bound=BaseModel)


def checked(kind: type[B], values: Mapping[str, Any], what: str = "setting") -> B:
    """An instance of settings from values of any origin, or one sentence on what is wrong.

    Args:
        kind: Settings class.
        values: By name; text is converted where the setting is a number or a truth value, ``none`` where it may be empty.
        what: What an unknown name is called in the sentence.

    Returns:
        The settings.

    Raises:
        FedfillError: Where a name is unknown or a value is not allowed.
    """
    for name in values:
        if name not in kind.model_fields:
            raise FedfillError(f"{what}: unknown name '{name}'; {did_you_mean(name, kind.model_fields)}")
    given = dict(values)
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        if str(given.get(name)).lower() == "none" and type(None) in getattr(
            kind.model_fields[name].annotation, "__args__", ()
        ):
            return checked(kind, {key: value for key, value in given.items() if key != name} | {name: None}, what)
        raise FedfillError(f"{name}: found {first['input']!r}; allowed: {_allowed(first)}") from None


def _allowed(error: Mapping[str, Any]) -> str:
    context = error.get("ctx", {})
    words = {
        "greater_than": "more than {gt}",
        "greater_than_equal": "at least {ge}",
        "less_than": "less than {lt}",
        "less_than_equal": "at most {le}",
        "literal_error": "{expected}",
        "int_parsing": "a whole number",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_parsing": "a number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_parsing": "true or false",
        "bool_type": "true or false",
        "string_type": "text",
    }
    kind = str(error["type"])
    return words[kind].format(**context) if kind in words else str(error["msg"])


def split_settings(algorithm: type[Algorithm], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Which settings are the algorithm's and which the model's.

    Args:
        algorithm: Its class.
        values: By name; ``model.NAME`` is always the model's, and so is a name that only the model knows.

    Returns:
        The algorithm's and the model's.

    Raises:
        FedfillError: Where nobody knows a name.
    """
    own: dict[str, Any] = {}
    models: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith("model."):
            models[name.removeprefix("model.")] = value
        elif name in algorithm.model_fields:
            own[name] = value
        elif name in ModelSettings.model_fields:
            models[name] = value
        else:
            known = [*algorithm.model_fields, *ModelSettings.model_fields]
            raise FedfillError(f"setting: {algorithm.name} has no '{name}'; {did_you_mean(name, known)}")
    return own, models


@dataclass(frozen=True)
class Prepared:
    """Everything that a run needs, checked, before anything is written.

    Attributes:
        experiment: With its settings resolved.
        algorithm: With its settings resolved.
        federation: The clients' data.
        model: The network with its initial weights.
        initial: These weights.
    """

    experiment: Experiment
    algorithm: Algorithm
    federation: Federation
    model: nn.Module
    initial: Weights

    @property
    def digest(self) -> str:
        """Identifies the experiment: version, settings, data and initial weights, but not where or how fast it runs."""
        settings = {k: v for k, v in self.experiment.model_dump().items() if k not in _INCIDENTAL}
        identity = [__version__, settings, self.federation.fingerprint, tree.sha256(self.initial)]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def prepare(
    experiment: Experiment, *, data: Any = None, partition: Any = None, model: nn.Module | None = None,
    algorithm: type[Algorithm] | None = None,
) -> Prepared:  # fmt: skip
    """Load the data, divide it, build the network and check that everything fits together.

    Args:
        experiment: What to run.
        data: Data from Python in place of the experiment's name.
        partition: A partitioner object in place of the experiment's words.
        model: A module in place of the experiment's name.
        algorithm: A class in place of the experiment's name.

    Returns:
        All parts, nothing written.

    Raises:
        FedfillError: Where a setting is not allowed or the parts don't fit.
    """
    kind = algorithm or find(experiment.algorithm)
    if experiment.engine != "local":
        raise FedfillError(f"engine: unknown name '{experiment.engine}'; {did_you_mean(experiment.engine, ['local'])}")
    own, models = dict(experiment.settings), dict(experiment.model_settings)
    settings = checked(kind, {**kind.presets.get(experiment.data, {}), **own})
    model_settings = checked(ModelSettings, models, "model setting")
    federation = federate(
        experiment.data if data is None else data,
        data_dir=Path(experiment.data_dir) if experiment.data_dir else None,
        fraction=experiment.data_fraction,
        partition=experiment.partition if partition is None else partition,
        clients=experiment.clients,
        seed=experiment.seed,
        client_test=experiment.client_test,
    )
    if model is None:
        network: nn.Module = build(
            experiment.model,
            federation.shape,
            federation.classes,
            model_settings,
            decoder="decoder" in kind.parts,
            seed=derive(experiment.seed, "initial weights"),
        )
    else:
        network = with_streams(copy.deepcopy(model))
        if models:
            raise FedfillError("model settings go with the built-in networks, and the model is a module of your own")
    require_parts(network, kind.parts, kind.name)
    settings = settings.resolved(rounds=experiment.rounds, model=network)
    final = experiment.model_copy(
        update={
            "clients": len(federation.clients),
            "settings": settings.model_dump(exclude_none=True),
            "model_settings": {} if model is not None else model_settings.model_dump(exclude_none=True),
        }
    )
    return Prepared(final, settings, federation, network, weights_of(network))


def execute(prepared: Prepared, path: Path, on_round: OnRound | None = None) -> Result:
    """Run an experiment in a folder, from its last checkpoint where there is one.

    Args:
        prepared: What to run.
        path: The run directory.
        on_round: Called after each round.

    Returns:
        The finished run; one that was finished before is read and not run again.

    Raises:
        FedfillError: Where the folder can't be used.
    """
    device = choose_device(prepared.experiment.device)
    directory = RunDirectory(path)
    directory.open({**prepared.experiment.model_dump(), "version": __version__}, prepared.digest)
    try:
        if directory.summary() is not None:
            return _recorded(directory)
        return _loop(prepared, directory, device, on_round)
    finally:
        directory.close()


def _recorded(directory: RunDirectory) -> Result:
    checkpoint = directory.read_checkpoint()
    summary = directory.summary()
    if checkpoint is None or summary is None:
        raise FedfillError(
            f"out: {directory.path} is marked as finished but has no checkpoint; remove summary.json and resume"
        )
    return Result(directory.path, summary, directory.rounds(), checkpoint["weights"])


def _loop(prepared: Prepared, directory: RunDirectory, device: torch.device, on_round: OnRound | None) -> Result:
    experiment, algorithm, federation = prepared.experiment, prepared.algorithm, prepared.federation
    engine = LocalEngine(
        algorithm, federation, prepared.model, prepared.initial,
        seed=experiment.seed, device=device, workers=experiment.workers,
    )  # fmt: skip
    try:
        spare = copy.deepcopy(prepared.model).to(device)

        def load(weights: Weights) -> nn.Module:
            spare.load_state_dict(weights, strict=False)
            return spare

        server = Server(
            engine,
            clients=len(federation.clients),
            classes=federation.classes,
            rounds=experiment.rounds,
            participation=experiment.participation,
            seed=experiment.seed,
            initial=tree.to(prepared.initial, device),
            model=load,
        )
        server.state = State(algorithm.server_state(server.initial))
        done, seconds = _restore(prepared, directory, server, engine, device)
        records = directory.cut_rounds(done)
        directory.write(
            "partition.json", to_json({"class_names": federation.class_names, "clients": federation.counts})
        )

        for t in range(done, experiment.rounds):
            start = time.perf_counter()
            before = copy.deepcopy(server.books)
            server.begin(t)
            algorithm.round(server, t)
            weights = algorithm.global_weights(server)
            evaluation = engine.evaluate(weights)
            account = server.ledger.account(experiment.delta)
            took = time.perf_counter() - start
            seconds += took
            record = {
                "round": t + 1,
                **asdict(evaluation),
                "bytes_up": server.books.bytes_up - before.bytes_up,
                "bytes_down": server.books.bytes_down - before.bytes_down,
                "train_samples": server.books.train_samples - before.train_samples,
                "seconds": round(took, 3),
                "privacy": {
                    "total_epsilon": account["total_epsilon"],
                    "entries": {entry["released"]: entry["epsilon"] for entry in account["entries"]},
                },
                "lost": server.lost,
                "warnings": server.warnings,
                **server.notes,
            }
            directory.append_round(record)
            directory.write_checkpoint(
                {
                    "digest": prepared.digest,
                    "rounds": t + 1,
                    "seconds": seconds,
                    "weights": weights,
                    "server": server.state.tree(),
                    "clients": engine.states(),
                    "ledger": server.ledger.state(),
                    "books": asdict(server.books),
                }
            )
            records.append(record)
            if on_round is not None:
                on_round(record, experiment.rounds)

        weights = algorithm.global_weights(server)
        images = algorithm.synthetic(server)
        if images is not None and len(images) and images.inputs.dim() == 4:
            picture = directory.path / "samples" / f"round-{experiment.rounds:04d}.png"
            picture.parent.mkdir(exist_ok=True)
            image_grid(images.to("cpu"), federation.class_names, picture)
        summary = summarise(prepared, server, records, seconds, engine.workers, str(device), weights)
        directory.write("summary.json", to_json(summary))
        return Result(directory.path, summary, records, tree.to(weights, "cpu"))
    finally:
        engine.close()


def _restore(
    prepared: Prepared, directory: RunDirectory, server: Server, engine: LocalEngine, device: torch.device
) -> tuple[int, float]:
    checkpoint = directory.read_checkpoint()
    if checkpoint is None:
        return 0, 0.0
    if checkpoint["digest"] != prepared.digest:
        raise FedfillError(
            f"resume: the checkpoint in {directory.path} is another experiment's; start again in a new folder"
        )
    server.state = State(tree.to(checkpoint["server"], device))
    engine.restore(checkpoint["clients"])
    server.ledger = Ledger.restore(checkpoint["ledger"])
    server.books = Books(**checkpoint["books"])
    return int(checkpoint["rounds"]), float(checkpoint["seconds"])


def summarise(
    prepared: Prepared,
    server: Server,
    records: list[dict[str, Any]],
    seconds: float,
    workers: int,
    device: str,
    weights: Weights,
) -> dict[str, Any]:
    """The figures to quote.

    Args:
        prepared: What was run.
        server: After the last round.
        records: Of all rounds.
        seconds: In rounds, evaluation included.
        workers: Threads over clients.
        device: Where it ran.
        weights: The final global weights.

    Returns:
        The document of ``summary.json``.
    """
    experiment, last = prepared.experiment, records[-1]
    best = max(records, key=lambda record: (record["accuracy"], -record["round"]))
    by_class = [value for value in last["accuracy_by_class"] if value is not None]
    by_client = [value for value in last["accuracy_by_client"] if value is not None]
    return {
        "algorithm": experiment.algorithm,
        "dataset": experiment.data,
        "partition": experiment.partition,
        "clients": experiment.clients,
        "rounds": experiment.rounds,
        "seed": experiment.seed,
        "engine": experiment.engine,
        "version": __version__,
        "accuracy": last["accuracy"],
        "loss": last["loss"],
        "best_accuracy": best["accuracy"],
        "best_round": best["round"],
        "accuracy_by_class": last["accuracy_by_class"],
        "accuracy_by_client": last["accuracy_by_client"],
        "class_variance": _variance(by_class),
        "client_variance": _variance(by_client),
        "worst_client_accuracy": min(by_client, default=None),
        "bytes_up": server.books.bytes_up,
        "bytes_down": server.books.bytes_down,
        "bytes_by_handler": {name: {"down": down, "up": up} for name, (down, up) in server.books.legs.items()},
        "train_samples": server.books.train_samples,
        "seconds": round(seconds, 3),
        "seconds_in_fit": round(server.books.fit_seconds / workers, 3),
        "workers": workers,
        "device": device,
        "weights_sha256": tree.sha256(weights),
        "lost_replies": sum(len(record["lost"]) for record in records),
        "warnings": [f"round {record['round']}: {sentence}" for record in records for sentence in record["warnings"]],
        "notes": list(prepared.federation.notes),
        "privacy": server.ledger.account(experiment.delta),
    }


def _variance(shares: list[float]) -> float | None:
    """Population variance of percentages, as in the Fed-ZDA paper."""
    return statistics.pvariance([100 * share for share in shares]) if shares else None


def default_directory(prepared: Prepared) -> Path:
    """``runs/<name>`` with a name that tells the experiment and never clashes with another's."""
    experiment = prepared.experiment
    words = [experiment.algorithm, experiment.data, experiment.partition.replace(":", ""), f"seed{experiment.seed}"]
    return Path("runs") / "-".join([*words, prepared.digest[:8]])


def run(
    algorithm: str | type[Algorithm],
    *,
    data: Any = "digits",
    partition: Any = "dirichlet:0.5",
    model: str | nn.Module = "auto",
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    **options: Any,
) -> Result:
    """Run one experiment.

    Args:
        algorithm: A name of ``fedfill list algorithms``, or an `Algorithm` class of your own.
        data: A name of ``fedfill list datasets``; or ``(inputs, labels)`` arrays, with ``(test inputs, test labels)``
            behind them where there are any; a ``datasets.Dataset`` or ``DatasetDict``; a list with one of these for each client.
        partition: Words such as ``"dirichlet:0.5"``, or a partitioner object of ``flwr_datasets``.
        model: A name of ``fedfill list models``, or a ``torch.nn.Module`` that has the parts which the algorithm names.
        out: The run directory; None: one below ``runs/`` with a name of its own.
        on_round: Called after each round with its record and the number of rounds.
        **options: Fields of `Experiment` (``clients``, ``rounds``, ``seed``, ``participation``, ``data_dir``, ``workers``, ...)
            and settings of the algorithm, its training and the model (``local_epochs``, ``alpha``, ``latent_activation``, ...).

    Returns:
        The finished run. The same experiment in the same folder is continued, or read where it was finished.

    Raises:
        FedfillError: Where anything that was given is not allowed.
    """
    prepared = arrange(algorithm, data=data, partition=partition, model=model, **options)
    return execute(prepared, Path(out) if out is not None else default_directory(prepared), on_round)


def arrange(
    algorithm: str | type[Algorithm], *, data: Any, partition: Any, model: str | nn.Module, **options: Any
) -> Prepared:
    """The parts of an experiment from the words of `run`, checked, nothing written.

    Args:
        algorithm: As in `run`.
        data: As in `run`.
        partition: As in `run`.
        model: As in `run`.
        **options: As in `run`.

    Returns:
        All parts.

    Raises:
        FedfillError: Where anything that was given is not allowed.
    """
    kind = find(algorithm) if isinstance(algorithm, str) else algorithm
    fields = {
        k: v for k, v in options.items() if k in Experiment.model_fields and k not in ("settings", "model_settings")
    }
    own, models = split_settings(kind, {k: v for k, v in options.items() if k not in fields})
    if fields.get("data_dir") is not None:
        fields["data_dir"] = str(fields["data_dir"])
    if isinstance(data, list | tuple) and isinstance(data, list) and "clients" not in fields:
        fields["clients"] = len(data)
    experiment = checked(
        Experiment,
        {
            "algorithm": kind.name,
            "data": data if isinstance(data, str) else "python",
            "partition": partition if isinstance(partition, str) else type(partition).__name__,
            "model": model if isinstance(model, str) else type(model).__name__,
            **fields,
            "settings": own,
            "model_settings": models,
        },
        "option",
    )
    return prepare(
        experiment,
        data=None if isinstance(data, str) else data,
        partition=None if isinstance(partition, str) else partition,
        model=None if isinstance(model, str) else model,
        algorithm=kind,
    )


def resume(
    directory: str | Path,
    *,
    data: Any = None,
    partition: Any = None,
    model: nn.Module | None = None,
    algorithm: type[Algorithm] | None = None,
    on_round: OnRound | None = None,
    workers: int | None = None,
    device: str | None = None,
    data_dir: str | Path | None = None,
) -> Result:
    """Continue a run that was stopped or killed; it ends with the same bits as one that was not.

    Args:
        directory: The run directory.
        data: Again what came from Python, where it did.
        partition: Likewise.
        model: Likewise.
        algorithm: Likewise.
        on_round: Called after each round.
        workers: Another number of threads than before.
        device: Another device than before.
        data_dir: Another folder with the same data.

    Returns:
        The finished run.

    Raises:
        FedfillError: Where the folder holds no run, or the data or the model are not the same.
    """
    folder = RunDirectory(Path(directory))
    document = folder.read_experiment()
    digest, version = document.pop("digest", ""), document.pop("version", "")
    if version != __version__:
        raise FedfillError(f"resume: {directory} was started with fedfill {version}, and this is {__version__}")
    changes = {"workers": workers, "device": device, "data_dir": str(data_dir) if data_dir is not None else None}
    document |= {key: value for key, value in changes.items() if value is not None}
    experiment = checked(Experiment, document, "option")
    if experiment.data == "python" and data is None:
        raise FedfillError("resume: this run's data came from Python; call fedfill.resume with the same data there")
    prepared = prepare(experiment, data=data, partition=partition, model=model, algorithm=algorithm)
    if prepared.digest != digest:
        raise FedfillError(f"resume: data, model or settings are not those that {directory} was started with")
    return execute(prepared, folder.path, on_round)
