"""The loop: rounds, evaluation, record and checkpoint, and going on after a kill."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedfill import __version__, tree
from fedfill.algorithms import Algorithm
from fedfill.data.federation import Federation
from fedfill.data.inputs import Inputs
from fedfill.data.samples import Samples
from fedfill.engines.local import LocalEngine, choose_device
from fedfill.engines.runner import make_resident
from fedfill.errors import FedfillError
from fedfill.experiment import checkpoints
from fedfill.experiment.prepare import Prepared
from fedfill.experiment.quality import quality
from fedfill.experiment.settings import Experiment
from fedfill.experiment.summary import Result, summarise, target_of
from fedfill.protocol.client import State
from fedfill.protocol.engine import Engine
from fedfill.protocol.server import Costs, Server
from fedfill.runs.curves import Findings, write_curves
from fedfill.runs.directory import RunDirectory, to_json, writing
from fedfill.runs.records import Summary, require, require_rounds
from fedfill.training.evaluation import divergence, fairness
from fedfill.tree import Weights

OnRound = Callable[[dict[str, Any], int], None]
"""Called after each round with its record and the number of rounds of the run; a round without an evaluation has no figure of one, and a step before the first round has a record
with ``step`` and ``steps`` in place of ``round`` and of the figures of an evaluation."""

Connect = Callable[["Prepared", torch.device], Engine]
"""Makes the engine of a run."""


def make_engine(prepared: Prepared, device: torch.device) -> Engine:
    """The engine that an experiment names, for a simulation on this machine or a cluster."""
    experiment = prepared.experiment
    parts = (prepared.algorithm, prepared.federation, prepared.model, prepared.initial)
    if experiment.engine == "ray":
        from fedfill.engines.ray import RayEngine  # here: it needs an extra

        return RayEngine(
            *parts, seed=experiment.seed, device=device, workers=experiment.workers, timeout=experiment.reply_timeout,
            address=experiment.ray_address, gpus_per_worker=experiment.gpus_per_worker, precision=experiment.precision,
        )  # fmt: skip
    return LocalEngine(
        *parts, seed=experiment.seed, device=device, workers=experiment.workers, timeout=experiment.reply_timeout,
        stack=experiment.stack, precision=experiment.precision,
    )  # fmt: skip


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
    for table in ("settings", "model_settings"):
        document[table] = {key: "none" if value is None else value for key, value in document[table].items()}
    return {"version": __version__, **document}


def recorded(digest: str, rounds: int, directory: RunDirectory, summary: dict[str, Any]) -> Result:
    """A finished run as its folder holds it, refused where a file of it is damaged."""
    require(Summary, summary, directory.path / "summary.json", "out", "remove it and resume the run")
    checkpoint = checkpoints.read(digest, directory)
    if (
        checkpoint is None
        or checkpoint["rounds"] != rounds
        or summary.get("weights_sha256") != tree.sha256(checkpoint["weights"])
    ):
        raise FedfillError(
            f"out: summary.json and checkpoint in {directory.path} don't belong together; remove summary.json and resume the run"
        )
    records = directory.cut_rounds(rounds)
    require_rounds(
        records, directory.path / "rounds.jsonl", "out", "put back what the run wrote, or start again in a new folder"
    )
    return Result(directory.path, summary, records, checkpoint["weights"], rounds)


def _loop(
    prepared: Prepared,
    directory: RunDirectory,
    device: torch.device,
    on_round: OnRound | None,
    connect: Connect,
    secret: Callable[[], bytes] | None,
) -> Result:
    experiment, algorithm, federation = prepared.experiment, prepared.algorithm, prepared.federation
    engine, begun = connect(prepared, device), False
    try:
        server = make_server(prepared, engine, device, secret)
        done, seconds, preparation = checkpoints.restore(prepared, directory, server, engine, device)
        begun = True
        records = directory.cut_rounds(done)
        counts = federation.counts if any(map(any, federation.counts)) else None  # None: they stay with the clients
        inputs = Inputs.of(federation, experiment.image_size).document()
        division = {"class_names": federation.class_names, "clients": counts, "inputs": inputs}
        if federation.domains:
            division["domains"] = federation.domains
        directory.write("partition.json", to_json(division))

        def keep(rounds: int, weights: Weights) -> None:
            checkpoints.keep(
                prepared, directory, server, engine, rounds=rounds, weights=weights, seconds=seconds, preparation=preparation
            )  # fmt: skip

        steps = algorithm.pretraining_steps() if not done else 0
        for step in range(len(preparation), steps):
            start = time.perf_counter()
            before = copy.deepcopy(server.costs)
            server.begin(step - steps)
            algorithm.pretrain(server, step)
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
            algorithm.conclude(server, t)
            figures = {}
            evaluated = (t + 1) % (experiment.evaluate_every or 1) == 0 or t + 1 == experiment.rounds
            if algorithm.trains and evaluated:
                figures = _evaluate(algorithm, server, engine, t)
            account = server.ledger.account(experiment.delta, prepared.told)
            took = time.perf_counter() - start
            seconds += took
            record = {
                "round": t + 1,
                **figures,
                "privacy": {
                    "total_epsilon": account["total_epsilon"],
                    "total_epsilon_added": account["total_epsilon_added"],
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
        found = _findings(algorithm, server, federation, directory)
        measured = _quality(prepared, server, engine, device) if algorithm.trains else {}
        summary = summarise(
            prepared, server, preparation, records, seconds, engine.workers, str(device), weights, measured
        )
        if found is not None:
            summary["findings"] = dict(found.figures) | ({} if found.tells == "all" else {"model_tells": found.tells})
            if found.tables:
                summary["tables"] = [table.document() for table in found.tables]
        directory.write("summary.json", to_json(summary))
        return Result(directory.path, summary, records, tree.to(weights, "cpu"), done)
    except BaseException:
        # what hosts have sent is out of their hands, and the next try may ask for it under other noise
        if begun and engine.origin:
            checkpoints.keep_account(prepared, directory, server, make_server(prepared, engine, device), engine)
        raise
    finally:
        engine.close()


def _evaluate(algorithm: Algorithm, server: Server, engine: Engine, t: int) -> dict[str, Any]:
    """The figures of an evaluation, with what the hosts' own part of it releases in the ledger."""
    trained, weights = algorithm.trained_weights(server), algorithm.result_weights(server)
    if trained is not None:
        before = engine.evaluate(trained, t)
        server.note(
            accuracy_of_trained_head=before.accuracy,
            mean_client_accuracy_of_trained_head=fairness(before)["mean_client_accuracy"],
            **({"validation_of_trained_head": before.validation_by_client} if before.validation_by_client else {}),
        )
    evaluation = engine.evaluate(weights, t)
    if engine.evaluation is not None:
        for i in engine.evaluated:
            server.ledger.add(i, "evaluation", engine.evaluation)
    if not math.isfinite(evaluation.loss):
        raise divergence(t, evaluation.loss)
    kept = {name: value for name, value in asdict(evaluation).items() if value != []}  # no validation, no list
    return {**target_of(server.schema), **kept, **fairness(evaluation)}


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


def synthetic_images(
    prepared: Prepared, directory: RunDirectory, device: torch.device, per_class: int | None = None
) -> Samples | None:
    """The synthetic images of a finished run, so many of each class, or those of which its picture shows the first."""
    # no client is called; like a run it computes in one thread, so that the bits are the same
    engine = LocalEngine(
        prepared.algorithm, prepared.federation, prepared.model, prepared.initial, seed=prepared.experiment.seed,
        device=device, workers=1,
    )  # fmt: skip
    try:
        server = make_server(prepared, engine, device)
        checkpoints.restore(prepared, directory, server, engine, device)
        return _images(prepared, server, per_class)
    finally:
        engine.close()


def make_server(
    prepared: Prepared, engine: Engine, device: torch.device, secret: Callable[[], bytes] | None = None
) -> checkpoints.Observed:
    """The server as it is before the first round."""
    experiment, federation = prepared.experiment, prepared.federation
    server = checkpoints.Observed(
        engine,
        clients=len(federation.clients),
        classes=federation.classes,
        rounds=experiment.rounds,
        participation=experiment.participation,
        seed=experiment.seed,
        initial=tree.to(prepared.initial, device),
        resident=make_resident(prepared.model, device, experiment.precision),
        sample=federation.sample.to(device),
        min_replies=experiment.min_replies,
        secret=secret,
        schema=federation.schema,
        names=federation.called,
    )
    server.state = State(prepared.algorithm.server_state(server.initial))
    return server


def _images(prepared: Prepared, server: Server, per_class: int | None = None) -> Samples | None:
    # also after a kill behind the last round: the images' draws are that round's
    server.begin(prepared.experiment.rounds - 1)
    return prepared.algorithm.synthetic(server, per_class)


def _findings(algorithm: Algorithm, server: Server, federation: Federation, directory: RunDirectory) -> Findings | None:
    """What the algorithm found beside a model, with its curves and its schema written down."""
    found = algorithm.findings(server)
    if found is not None and found.curves:
        with writing(directory.path):
            write_curves(found.curves, directory.path / "curves", f"{algorithm.name}, {federation.name}", found.level)
    if found is not None and found.schema:
        directory.write("schema.toml", found.schema.encode())
    return found


def _quality(prepared: Prepared, server: Server, engine: Engine, device: torch.device) -> dict[str, Any]:
    """What is measured of the result once, by the models that are evaluated after a round."""
    algorithm, states = prepared.algorithm, engine.states()
    weights = algorithm.result_weights(server)
    resident = make_resident(prepared.model, device)
    own = None
    if algorithm.personal:
        tested = [i for i, client in enumerate(prepared.federation.clients) if len(client.test)] if states else []
        own = {i: algorithm.personal_weights(states.get(i) or {}, weights) for i in tested}
    return quality(resident, prepared.federation, weights, own, device)


def _models(algorithm: Algorithm, server: Server, engine: Engine) -> Weights:
    """The global model, or everybody's own as ``<client>.<name>``; those that stay with their hosts are not to be had."""
    weights, states = algorithm.result_weights(server), engine.states()
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
