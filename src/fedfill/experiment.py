"""Experiments: what to run, and the loop that runs it, records it, and goes on after a kill."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from fedfill import __version__, tree
from fedfill.algorithms.base import Algorithm, find
from fedfill.data.federation import Federation, federate
from fedfill.data.samples import Samples, normalise
from fedfill.engines.contract import Books, Server, State
from fedfill.engines.local import LocalEngine, choose_device
from fedfill.errors import FedfillError, did_you_mean
from fedfill.models.layers import with_streams
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import require_parts, weights_of
from fedfill.privacy.ledger import Ledger
from fedfill.runs.directory import RunDirectory, to_json, writing
from fedfill.streams import derive
from fedfill.tree import Weights

OnRound = Callable[[dict[str, Any], int], None]
"""Called after each round with its record and the number of rounds of the run."""


class Experiment(BaseModel):
    """What to run. ``experiment.toml`` holds these fields, with the settings resolved."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

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
    clients: int | None = Field(default=10, ge=1)
    """Number of clients (K); none: as many as a list of data sets or a partitioner object makes."""
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
    workers: int | None = Field(default=None, ge=1, le=1024)
    """Threads over clients, each with a model of its own; none: one for each processor."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """Delta at which the privacy account gives epsilon."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the algorithm and its local training."""
    model_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the built-in networks."""


PYTHON = "python"
"""Stands in ``experiment.toml`` for what came from Python, where the name of its type may follow: ``python:Net``."""

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
        resumed_after: Rounds that had been done before this call: all of them where the run was finished and only read.
    """

    directory: Path
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    weights: Weights
    resumed_after: int = 0

    @property
    def was_finished(self) -> bool:
        """Whether every round had been done before, so that nothing was trained."""
        return self.resumed_after == len(self.rounds)


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
    # a truth value is no number: Python and pydantic would read True as 1
    given = {
        name: str(value) if isinstance(value, bool) and kind.model_fields[name].annotation is not bool else value
        for name, value in values.items()
    }
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else what
    optional = name in given and type(None) in get_args(kind.model_fields[name].annotation)
    if optional and str(given[name]).lower() == "none":
        return checked(kind, {**given, name: None}, what)
    raise FedfillError(f"{name}: found {first['input']!r}; allowed: {_allowed(first)}")


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
        "dict_type": "a table of settings",
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
    for what, word, given in (
        ("data", experiment.data, data),
        ("partition", experiment.partition, partition),
        ("model", experiment.model, model),
    ):
        if given is None and word.split(":")[0] == PYTHON:
            raise FedfillError(
                f"{what}: this experiment's {what} came from Python; give the same again to fedfill.resume or fedfill.run there"
            )
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
            raise FedfillError(
                f"model setting: found {', '.join(models)}; these go with the built-in networks, and the model is a module of your own"
            )
        _require_fit(network, federation)
    require_parts(network, kind.parts, kind.name)
    settings = settings.resolved(rounds=experiment.rounds, model=network)
    final = experiment.model_copy(
        update={
            "clients": len(federation.clients),
            "settings": settings.model_dump(),
            "model_settings": {} if model is not None else model_settings.model_dump(),
        }
    )
    return Prepared(final, settings, federation, network, weights_of(network))


def _require_fit(model: nn.Module, federation: Federation) -> None:
    """Try a user's own network on one sample, so that a misfit shows before anything is written."""
    try:
        with torch.inference_mode():
            scores = copy.deepcopy(model).eval()(normalise(federation.test.inputs[:1]))
        found = list(scores.shape)
    except Exception as error:  # whatever a foreign module may raise
        raise FedfillError(
            f"model: {type(model).__name__} can't take a sample of shape {list(federation.shape)} ({str(error).splitlines()[0]})"
        ) from error
    if found != [1, federation.classes]:
        raise FedfillError(
            f"model: {type(model).__name__} makes scores of shape {found} for one sample; allowed: [1, {federation.classes}], "
            "one for each class"
        )


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
    directory.open(_document(prepared.experiment), prepared.digest)
    try:
        summary = directory.summary()
        if summary is not None:
            return _recorded(prepared, directory, summary)
        return _loop(prepared, directory, device, on_round)
    finally:
        directory.close()


def _document(experiment: Experiment) -> dict[str, Any]:
    """What ``experiment.toml`` holds. TOML has no null: an empty setting is the word that `checked` reads as one."""
    document = {key: value for key, value in experiment.model_dump().items() if value is not None}
    for table in ("settings", "model_settings"):
        document[table] = {key: "none" if value is None else value for key, value in document[table].items()}
    return {"version": __version__, **document}


def _recorded(prepared: Prepared, directory: RunDirectory, summary: dict[str, Any]) -> Result:
    checkpoint, rounds = _checkpoint(prepared, directory), prepared.experiment.rounds
    if (
        checkpoint is None
        or checkpoint["rounds"] != rounds
        or summary.get("weights_sha256") != tree.sha256(checkpoint["weights"])
    ):
        raise FedfillError(
            f"out: summary.json and checkpoint in {directory.path} don't belong together; remove summary.json and resume the run"
        )
    return Result(directory.path, summary, directory.cut_rounds(rounds), checkpoint["weights"], rounds)


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
            if not math.isfinite(evaluation.loss):
                raise FedfillError(
                    f"training diverged: after round {t + 1} the loss on the test set is {evaluation.loss}; try a smaller learning_rate"
                )
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
        _picture(
            algorithm.synthetic(server), federation, directory.path / "samples" / f"round-{experiment.rounds:04d}.png"
        )
        summary = summarise(prepared, server, records, seconds, engine.workers, str(device), weights)
        directory.write("summary.json", to_json(summary))
        return Result(directory.path, summary, records, tree.to(weights, "cpu"), done)
    finally:
        engine.close()


def _picture(images: Samples | None, federation: Federation, path: Path) -> None:
    if images is None or not len(images) or images.inputs.dim() != 4:
        return
    from fedfill.runs.pictures import image_grid  # here: matplotlib costs every start a third of a second

    with writing(path):
        path.parent.mkdir(exist_ok=True)
        image_grid(images.to("cpu"), federation.class_names, path)


def _checkpoint(prepared: Prepared, directory: RunDirectory) -> dict[str, Any] | None:
    checkpoint = directory.read_checkpoint()
    if checkpoint is not None and checkpoint.get("digest") != prepared.digest:
        raise FedfillError(
            f"resume: the checkpoint in {directory.path} is another experiment's; start again in a new folder"
        )
    return checkpoint


def _restore(
    prepared: Prepared, directory: RunDirectory, server: Server, engine: LocalEngine, device: torch.device
) -> tuple[int, float]:
    checkpoint = _checkpoint(prepared, directory)
    if checkpoint is None:
        return 0, 0.0
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
    words = [experiment.algorithm, experiment.data, experiment.partition, f"seed{experiment.seed}", prepared.digest[:8]]
    return Path("runs") / "-".join(re.sub(r"[^\w.+-]", "", word) for word in words)


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
    if isinstance(data, list) or not isinstance(partition, str):
        fields.setdefault("clients", None)  # the list or the partitioner says how many
    experiment = checked(
        Experiment,
        {
            "algorithm": kind.name,
            "data": data if isinstance(data, str) else PYTHON,
            "partition": "given" if isinstance(data, list) else _named(partition),
            "model": _named(model),
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


def _named(thing: Any) -> str:
    return thing if isinstance(thing, str) else f"{PYTHON}:{type(thing).__name__}"


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
    prepared = prepare(experiment, data=data, partition=partition, model=model, algorithm=algorithm)
    if prepared.digest != digest:
        raise FedfillError(f"resume: data, model or settings are not the ones that {directory} was started with")
    return execute(prepared, folder.path, on_round)
