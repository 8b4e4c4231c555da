"""The loop: rounds, evaluation, record and checkpoint, and going on after a kill."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

from fedfill import __version__, tree
from fedfill.algorithms import Algorithm
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.engines.contract import Costs, Engine, Server, State
from fedfill.engines.host import make_resident
from fedfill.engines.local import LocalEngine, choose_device, processors
from fedfill.errors import FedfillError
from fedfill.models.networks import ModelSettings
from fedfill.privacy.ledger import Ledger
from fedfill.runs.directory import RunDirectory, to_json, writing
from fedfill.settings import Experiment
from fedfill.training.evaluation import FAIRNESS, divergence, fairness
from fedfill.tree import Weights

OnRound = Callable[[dict[str, Any], int], None]
"""Called after each round with its record and the number of rounds of the run; a round without an evaluation has no figure of one, and a step before the first round has a record
with ``step`` and ``steps`` in place of ``round`` and of the figures of an evaluation."""

Connect = Callable[["Prepared", torch.device], Engine]
"""Makes the engine of a run."""


INCIDENTAL = {"data_dir", "device", "workers", "ray_address", "gpus_per_worker", "min_replies", "reply_timeout"}
"""What may be changed at a resume: where and how it runs, and how long it waits for whom."""


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

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the experiment: version, settings, data, initial weights and code of the user's own, but not where it runs."""
        given = self.experiment.model_dump().items()
        # one that is none counts as absent: a new setting leaves the experiments that don't use it what they were
        settings = {k: v for k, v in given if k not in INCIDENTAL and v is not None}
        modules = list(self.model.modules())
        code = [repr(self.model), *_programs(type(self.algorithm), *map(type, modules)), *_values(modules)]
        identity = [__version__, settings, self.federation.fingerprint, tree.sha256(self.initial), code]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _programs(*classes: type) -> list[str]:
    """The compiled functions and the constants of classes that neither fedfill nor torch vouches for, their bases included."""
    own = {base for kind in classes for base in kind.__mro__ if not _vouched(base)}
    found = []
    for kind in own:
        for name, value in vars(kind).items():
            parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
            found += [
                f"{kind.__qualname__}.{name}: {_instructions(f.__code__)}" for f in parts if inspect.isfunction(f)
            ]
            if not name.startswith("__") and _is_plain(value):
                found.append(f"{kind.__qualname__}.{name} = {value!r}")
    return sorted(found)


def _values(modules: Sequence[nn.Module]) -> list[str]:
    """Numbers and words that modules of the user's own hold beside their tensors, such as a factor that `forward` reads."""
    plain = vars(nn.Module())
    return [
        f"{i}.{name} = {value!r}"
        for i, module in enumerate(modules)
        if not _vouched(type(module))
        for name, value in sorted(vars(module).items())
        if name not in plain and _is_plain(value)
    ]


def _vouched(kind: type) -> bool:
    """Whether the version of fedfill or of a package says what it does."""
    return kind.__module__.split(".")[0] in _VOUCHED


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes)


def _instructions(code: CodeType) -> str:
    constants = [
        # a set's order is another one in each process
        _instructions(c)
        if isinstance(c, CodeType)
        else str(sorted(map(str, c)))
        if isinstance(c, frozenset)
        else str(c)
        for c in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


_VOUCHED = {"fedfill", "torch", "pydantic", "builtins", "abc", "typing"}


def accuracy_by_round(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Accuracy on the test set of the rounds that were evaluated.

    Args:
        records: Of a run's rounds.

    Returns:
        Shares, by round from 1 on.
    """
    return {record["round"]: record["accuracy"] for record in records if "accuracy" in record}


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        directory: Where it lies.
        summary: The figures to quote, as in ``summary.json``.
        rounds: One record for each round; those without an evaluation have no figure of one.
        weights: The final global weights; of an algorithm with personal models all of these, as ``<client>.<name>``, where
            they don't stay with their hosts.
        resumed_after: Rounds that had been done before this call: all of them where the run was finished and only read.
    """

    directory: Path
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    weights: Weights
    resumed_after: int = 0

    @property
    def curve(self) -> dict[int, float]:
        """Accuracy on the test set by round, of the rounds that were evaluated."""
        return accuracy_by_round(self.rounds)

    @property
    def was_finished(self) -> bool:
        """Whether every round had been done before, so that nothing was trained."""
        return self.resumed_after == len(self.rounds)


def make_engine(prepared: Prepared, device: torch.device) -> Engine:
    """The engine that an experiment names, for a simulation on this machine or a cluster.

    Args:
        prepared: What to run.
        device: Where data and models live.

    Returns:
        The engine, ready for the first call.

    Raises:
        FedfillError: Where it can't be started.
    """
    experiment = prepared.experiment
    parts = (prepared.algorithm, prepared.federation, prepared.model, prepared.initial)
    if experiment.engine == "ray":
        from fedfill.engines.ray import RayEngine  # here: it needs an extra

        return RayEngine(
            *parts, seed=experiment.seed, device=device, workers=experiment.workers, timeout=experiment.reply_timeout,
            address=experiment.ray_address, gpus_per_worker=experiment.gpus_per_worker,
        )  # fmt: skip
    return LocalEngine(
        *parts, seed=experiment.seed, device=device, workers=experiment.workers, timeout=experiment.reply_timeout
    )


def execute(
    prepared: Prepared,
    path: Path,
    on_round: OnRound | None = None,
    connect: Connect = make_engine,
    secret: Callable[[], bytes] | None = None,
) -> Result:
    """Run an experiment in a folder, from its last checkpoint where there is one.

    Args:
        prepared: What to run.
        path: The run directory.
        on_round: Called after each round.
        connect: Makes the engine.
        secret: Gives the server's key for noise that protects clients, where one is needed; None: such noise comes from the seed.

    Returns:
        The finished run; one that was finished before is read and not run again.

    Raises:
        FedfillError: Where the folder can't be used.
    """
    device = choose_device(prepared.experiment.device)
    directory = RunDirectory(path)
    directory.open(document_of(prepared.experiment), prepared.digest)
    try:
        summary = directory.summary()
        if summary is not None:
            return recorded(prepared.digest, prepared.experiment.rounds, directory, summary)
        return _loop(prepared, directory, device, on_round, connect, secret)
    finally:
        directory.close()


def document_of(experiment: Experiment) -> dict[str, Any]:
    """What ``experiment.toml`` holds. TOML has no null: an empty setting is the word that `checked` reads as one."""
    document = {key: value for key, value in experiment.model_dump().items() if value is not None}
    if document["model_settings"]:  # what a record of the model leaves out where it is none: from scratch, say
        document["model_settings"] = {**dict.fromkeys(ModelSettings.model_fields), **document["model_settings"]}
    for table in ("settings", "model_settings"):
        document[table] = {key: "none" if value is None else value for key, value in document[table].items()}
    return {"version": __version__, **document}


def recorded(digest: str, rounds: int, directory: RunDirectory, summary: dict[str, Any]) -> Result:
    """A finished run as its folder holds it.

    Args:
        digest: Of the experiment.
        rounds: How many it has.
        directory: Where it lies.
        summary: The document of ``summary.json``.

    Returns:
        The run.

    Raises:
        FedfillError: Where summary and checkpoint don't belong together.
    """
    checkpoint = _checkpoint(digest, directory)
    if (
        checkpoint is None
        or checkpoint["rounds"] != rounds
        or summary.get("weights_sha256") != tree.sha256(checkpoint["weights"])
    ):
        raise FedfillError(
            f"out: summary.json and checkpoint in {directory.path} don't belong together; remove summary.json and resume the run"
        )
    return Result(directory.path, summary, directory.cut_rounds(rounds), checkpoint["weights"], rounds)


def _loop(
    prepared: Prepared,
    directory: RunDirectory,
    device: torch.device,
    on_round: OnRound | None,
    connect: Connect,
    secret: Callable[[], bytes] | None,
) -> Result:
    experiment, algorithm, federation = prepared.experiment, prepared.algorithm, prepared.federation
    engine = connect(prepared, device)
    try:
        server = _server(prepared, engine, device, secret)
        done, seconds, preparation = _restore(prepared, directory, server, engine, device)
        records = directory.cut_rounds(done)
        counts = federation.counts if any(map(any, federation.counts)) else None  # None: they stay with the clients
        division = {"class_names": federation.class_names, "clients": counts}
        if federation.domains:
            division["domains"] = federation.domains
        directory.write("partition.json", to_json(division))

        def keep(rounds: int, weights: Weights) -> None:
            directory.write_checkpoint(
                {
                    "digest": prepared.digest,
                    "rounds": rounds,
                    "seconds": seconds,
                    "preparation": preparation,
                    "weights": weights,
                    "server": server.state.tree(),
                    "clients": engine.states(),
                    "origin": engine.origin,
                    "ledger": server.ledger.state(),
                    "costs": asdict(server.costs),
                }
            )

        steps = algorithm.preparations() if not done else 0
        for step in range(len(preparation), steps):
            start = time.perf_counter()
            before = copy.deepcopy(server.costs)
            server.begin(step - steps)
            algorithm.prepare(server, step)
            took = time.perf_counter() - start
            seconds += took
            record = {"step": step + 1, "steps": steps, **_cost(server, before, took)}
            preparation.append(record)
            keep(0, server.initial)
            if on_round is not None:
                on_round(record, experiment.rounds)

        for t in range(done, experiment.rounds):
            start = time.perf_counter()
            before = copy.deepcopy(server.costs)
            server.begin(t)
            algorithm.round(server, t)
            figures = {}
            if (t + 1) % (experiment.evaluate_every or 1) == 0 or t + 1 == experiment.rounds:
                figures = _evaluate(algorithm, server, engine, t)
            account = server.ledger.account(experiment.delta)
            took = time.perf_counter() - start
            seconds += took
            record = {
                "round": t + 1,
                **figures,
                "privacy": {
                    "total_epsilon": account["total_epsilon"],
                    "entries": _epsilons(account["entries"]),
                },
                **_cost(server, before, took),
            }
            weights = _models(algorithm, server, engine)
            directory.append_round(record)
            keep(t + 1, weights)
            records.append(record)
            if on_round is not None:
                on_round(record, experiment.rounds)

        weights = _models(algorithm, server, engine)
        _picture(
            _images(prepared, server), federation, directory.path / "samples" / f"round-{experiment.rounds:04d}.png"
        )
        summary = summarise(prepared, server, preparation, records, seconds, engine.workers, str(device), weights)
        directory.write("summary.json", to_json(summary))
        return Result(directory.path, summary, records, tree.to(weights, "cpu"), done)
    finally:
        engine.close()


def _evaluate(algorithm: Algorithm, server: Server, engine: Engine, t: int) -> dict[str, Any]:
    """The figures of an evaluation, with what the hosts' own part of it releases in the ledger."""
    evaluation = engine.evaluate(algorithm.global_weights(server), t)
    if engine.evaluation is not None:
        for i in engine.evaluated:
            server.ledger.add(i, "evaluation", engine.evaluation)
    if not math.isfinite(evaluation.loss):
        raise divergence(t, evaluation.loss)
    kept = {name: value for name, value in asdict(evaluation).items() if value != []}  # no validation, no list
    return {**kept, **fairness(evaluation)}


def _cost(server: Server, before: Costs, seconds: float) -> dict[str, Any]:
    """What a round, or a step before the first, took, and what the algorithm had to say about it."""
    return {
        "bytes_up": server.costs.bytes_up - before.bytes_up,
        "bytes_down": server.costs.bytes_down - before.bytes_down,
        "train_samples": server.costs.train_samples - before.train_samples,
        "seconds": round(seconds, 3),
        "lost": server.lost,
        "warnings": server.warnings,
        **server.notes,
    }


def synthetic_images(prepared: Prepared, directory: RunDirectory, device: torch.device) -> Samples | None:
    """The synthetic images of a finished run, those of which its picture shows the first.

    Args:
        prepared: What was run.
        directory: Where it lies, with its last checkpoint.
        device: Where they are made.

    Returns:
        What the algorithm gives, on that device.

    Raises:
        FedfillError: Where the checkpoint is another experiment's.
    """
    # no client is called; like a run it computes in one thread, so that the bits are the same
    engine = LocalEngine(
        prepared.algorithm, prepared.federation, prepared.model, prepared.initial, seed=prepared.experiment.seed,
        device=device, workers=1,
    )  # fmt: skip
    try:
        server = _server(prepared, engine, device)
        _restore(prepared, directory, server, engine, device)
        return _images(prepared, server)
    finally:
        engine.close()


def _server(
    prepared: Prepared, engine: Engine, device: torch.device, secret: Callable[[], bytes] | None = None
) -> Server:
    """The server as it is before the first round."""
    experiment, federation = prepared.experiment, prepared.federation
    server = Server(
        engine,
        clients=len(federation.clients),
        classes=federation.classes,
        rounds=experiment.rounds,
        participation=experiment.participation,
        seed=experiment.seed,
        initial=tree.to(prepared.initial, device),
        resident=make_resident(prepared.model, device),
        sample=federation.sample.to(device),
        min_replies=experiment.min_replies,
        secret=secret,
    )
    server.state = State(prepared.algorithm.server_state(server.initial))
    return server


def _images(prepared: Prepared, server: Server) -> Samples | None:
    # also after a kill behind the last round: the images' draws are that round's
    server.begin(prepared.experiment.rounds - 1)
    return prepared.algorithm.synthetic(server)


def _machine(device: str) -> str:
    """What it ran on, in a few words."""
    kind = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{processors()} processors"
    return f"{platform.machine()}, {kind}, torch {torch.__version__}"


def _models(algorithm: Algorithm, server: Server, engine: Engine) -> Weights:
    """The global model, or everybody's own as ``<client>.<name>``; those that stay with their hosts are not to be had."""
    weights, states = algorithm.global_weights(server), engine.states()
    if not algorithm.personal or not states:
        return weights
    own = {i: algorithm.personal_weights(state, weights) for i, state in states.items()}
    return {f"{i}.{name}": tensor for i, model in own.items() for name, tensor in model.items()}


def _epsilons(entries: list[dict[str, Any]]) -> dict[str, float | None]:
    """Epsilon by field; a field with several mechanisms has the worst of them, and none where one has none."""
    worst: dict[str, float | None] = {}
    for entry in entries:
        name, epsilon = entry["released"], entry["epsilon"]
        before = worst.get(name, 0.0)
        worst[name] = None if epsilon is None or before is None else max(before, epsilon)
    return worst


def _picture(images: Samples | None, federation: Federation, path: Path) -> None:
    if images is None or images.inputs.dim() != 4:
        return
    if images.inputs.dtype != torch.uint8 or images.inputs.shape[1] not in (1, 3):
        return  # floats have no range that a picture could show
    images = images[images.labels >= 0]
    if not len(images):
        return
    from fedfill.runs.pictures import image_grid  # here: matplotlib costs every start a third of a second

    with writing(path):
        path.parent.mkdir(exist_ok=True)
        image_grid(images.to("cpu"), federation.class_names, path)


def _checkpoint(digest: str, directory: RunDirectory) -> dict[str, Any] | None:
    checkpoint = directory.read_checkpoint()
    if checkpoint is not None and checkpoint.get("digest") != digest:
        raise FedfillError(
            f"resume: the checkpoint in {directory.path} is another experiment's; start again in a new folder"
        )
    return checkpoint


def _restore(
    prepared: Prepared, directory: RunDirectory, server: Server, engine: Engine, device: torch.device
) -> tuple[int, float, list[dict[str, Any]]]:
    checkpoint = _checkpoint(prepared.digest, directory)
    if checkpoint is None:
        return 0, 0.0, []
    server.state = State(tree.to(checkpoint["server"], device))
    engine.origin = checkpoint.get("origin", "")
    engine.restore(checkpoint["clients"])
    server.ledger = Ledger.restore(checkpoint["ledger"])
    server.costs = Costs(**checkpoint["costs"])
    return int(checkpoint["rounds"]), float(checkpoint["seconds"]), list(checkpoint.get("preparation", []))


def selected(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The round that the validation splits choose: of the highest mean over clients, the first of several.

    Args:
        records: Of all rounds.

    Returns:
        ``selected_round``, and what that round has on the test data; nothing where no client has a validation split.
    """
    judged = [r for r in records if any(share is not None for share in r.get("validation_by_client", []))]
    if not judged:
        return {}
    means = [statistics.fmean(share for share in r["validation_by_client"] if share is not None) for r in judged]
    best = judged[means.index(max(means))]
    figures = ("accuracy", "accuracy_by_client", "mean_client_accuracy")
    return {
        "selected_round": best["round"],
        "selected_validation": max(means),
        **{f"selected_{name}": best[name] for name in figures},
    }


def _when(record: dict[str, Any]) -> str:
    return f"round {record['round']}" if "round" in record else f"preparation, step {record['step']}"


def summarise(
    prepared: Prepared,
    server: Server,
    preparation: list[dict[str, Any]],
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
        preparation: Records of the steps before the first round.
        records: Of all rounds.
        seconds: In these steps and in rounds, evaluation included.
        workers: Threads over clients.
        device: Where it ran.
        weights: Those of the result.

    Returns:
        The document of ``summary.json``.
    """
    experiment, last = prepared.experiment, records[-1]
    judged = [record for record in records if "accuracy" in record]  # of rounds with an evaluation
    best = max(judged, key=lambda record: (record["accuracy"], -record["round"]))
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
        **selected(records),
        "accuracy_by_class": last["accuracy_by_class"],
        "accuracy_by_client": last["accuracy_by_client"],
        **{name: last[name] for name in FAIRNESS},
        "bytes_up": server.costs.bytes_up,
        "bytes_down": server.costs.bytes_down,
        "bytes_by_handler": {name: {"down": down, "up": up} for name, (down, up) in server.costs.legs.items()},
        "train_samples": server.costs.train_samples,
        "seconds": round(seconds, 3),
        "seconds_in_fit": round(server.costs.fit_seconds, 3),
        "workers": workers,
        "device": device,
        "machine": _machine(device),
        "weights_sha256": tree.sha256(weights),
        **({"preparation": preparation} if preparation else {}),
        "lost_replies": sum(len(record["lost"]) for record in (*preparation, *records)),
        "warnings": [f"{_when(record)}: {text}" for record in (*preparation, *records) for text in record["warnings"]],
        "notes": list(prepared.federation.notes),
        "privacy": server.ledger.account(experiment.delta),
    }
