"""What runs inside Flower's processes: the server's program, and a host's.

Both are made from an app's folder: ``experiment.toml`` says what to run, ``task.toml`` what all parties agreed on. What is
a host's own business - where its data and its state lie - it says itself when it starts its SuperNode.
"""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import nn

from fedfill import __version__
from fedfill.algorithms import Algorithm
from fedfill.data.federation import ClientData
from fedfill.deployment.host_data import Task, load_host
from fedfill.deployment.keys import read_parties
from fedfill.engines import flower, flower_host
from fedfill.engines.local import choose_device
from fedfill.errors import FedfillError, checked, did_you_mean
from fedfill.experiment.loop import execute
from fedfill.experiment.prepare import Prepared, divide, prepare
from fedfill.experiment.settings import PYTHON, Experiment
from fedfill.protocol.engine import Engine
from fedfill.runs.directory import RunDirectory, noise_key, read_toml, write_atomically, writing
from fedfill.runs.shown import headline_of
from fedfill.training.precision import require_fast

log = logging.getLogger("fedfill")

SERVER = {
    "out": "~/.fedfill/runs/deployment",
    "test-data": "",
    "test-format": "parquet",
    "wait": 300.0,
    "noise": "secret",
    "max-message-bytes": 2**30,
    "app": "",
    "connection": "",
    "log": "",
    "error-file": "",
}
"""The server's settings with their defaults: ``[tool.flwr.app.config]`` in the app's ``pyproject.toml``."""

HOST = {
    "client": -1,
    "data": "",
    "format": "parquet",
    "state-dir": "",
    "device": "auto",
    "noise": "secret",
    "key": "",
    "peers": "",
    "max-message-bytes": 2**30,
    "partition-id": -1,
    "num-partitions": 0,
}
"""A host's settings with their defaults: ``--node-config`` of its SuperNode."""


def server_app(
    folder: Path, *, model: nn.Module | None = None, algorithm: type[Algorithm] | None = None
) -> flower.ServerApp:
    """The server's program of an app.

    Args:
        folder: The app's.
        model: A network of your own, with its initial weights, in place of a named one; the same at every party.
        algorithm: An algorithm of your own.

    Returns:
        The app that Flower runs.
    """
    _speak()

    def main(grid: flower.Grid, context: flower.Context) -> None:
        config = _given(context.run_config, SERVER, "run-config")
        try:
            _serve(folder, grid, config, model, algorithm)
        except FedfillError as error:
            log.error("%s", error)
            if config["error-file"]:
                write_atomically(Path(config["error-file"]), str(error).encode())
            sys.tracebacklimit = 0  # Flower prints the traceback of what ends a run, and this is a sentence for people
            raise

    return flower.server_app(main)


def client_app(
    folder: Path, *, model: nn.Module | None = None, algorithm: type[Algorithm] | None = None
) -> flower_host.ClientApp:
    """A host's program of an app.

    Args:
        folder: The app's.
        model: As in `server_app`.
        algorithm: As in `server_app`.

    Returns:
        The app that Flower runs.
    """
    _speak()
    prepared = read_app(folder, model=model, algorithm=algorithm)
    return flower_host.client_app(prepared.algorithm, lambda context: _site(prepared, read_task(folder), context))


def read_app(
    folder: Path,
    *,
    model: nn.Module | None = None,
    algorithm: type[Algorithm] | None = None,
    test: tuple[str, str] | None = None,
) -> Prepared:
    """What an app says, checked, as a party sees it that holds nobody's data."""
    document = read_toml(folder / "experiment.toml")
    version = document.pop("version", __version__)
    if version != __version__:
        raise FedfillError(f"version: the app was written for fedfill {version}, and this is {__version__}")
    document["engine"] = "flower"
    if algorithm is not None:
        document["algorithm"] = algorithm.name
    if model is not None:
        document |= {"model": f"{PYTHON}:{type(model).__name__}", "model_settings": {}}
    if "algorithm" not in document:
        raise FedfillError("algorithm: experiment.toml names none; it needs one of 'fedfill list algorithms'")
    experiment = checked(Experiment, document, "experiment.toml")
    task = read_task(folder)
    if experiment.clients != task.clients:
        raise FedfillError(
            f"clients: found {experiment.clients} in experiment.toml and {task.clients} in task.toml; allowed: the same number"
        )
    samples = (
        load_host(*test, task, setting="test-data", size=experiment.image_size).train if test is not None else None
    )
    return prepare(experiment, federation=task.remote(samples), model=model, algorithm=algorithm)


def read_task(folder: Path) -> Task:
    """What an app's ``task.toml`` says."""
    document = read_toml(folder / "task.toml")
    unknown = document.keys() - Task.__dataclass_fields__.keys()
    if unknown:
        raise FedfillError(
            f"task.toml: unknown name '{min(unknown)}'; {did_you_mean(min(unknown), Task.__dataclass_fields__)}"
        )
    for name in ("class_names", "shape"):
        if not isinstance(document.get(name, []), list):
            raise FedfillError(f"{name}: found {document[name]!r} in task.toml; allowed: a list")
    try:
        document |= {name: tuple(document[name]) for name in ("class_names", "shape")}
        return Task(**document)
    except (KeyError, TypeError) as missing:
        raise FedfillError(f"task.toml: name, clients, class_names and shape are needed ({missing})") from missing


def _serve(
    folder: Path, grid: flower.Grid, config: dict[str, Any], model: nn.Module | None, algorithm: type[Algorithm] | None
) -> None:
    test = (config["test-data"], config["test-format"]) if config["test-data"] else None
    prepared = read_app(folder, model=model, algorithm=algorithm, test=test)
    experiment, federation = prepared.experiment, prepared.federation
    out = Path(config["out"]).expanduser()
    if not out.is_absolute():
        raise FedfillError(f"out: found '{out}'; allowed: an absolute path, or one that begins with ~")
    RunDirectory(out).check(prepared.digest)
    begun = (out / "checkpoint" / "state.safetensors").exists()

    @functools.cache
    def key() -> bytes:
        # beside the run directory, which others may be given; one for each, so that no two runs draw the same cohorts
        return noise_key(out.with_name(f"{out.name}.noise.key"), prepared.digest, new=not begun)

    secret = key if _secret(config) else None
    place = Path(config["log"] or out / "deployment" / "server.log")
    with writing(place):
        _speak(place)
    if config["app"]:
        again = {"app": config["app"], "connection": config["connection"]}
        write_atomically(out / "deployment.toml", tomli_w.dumps(again).encode())

    def connect(prepared: Prepared, device: torch.device) -> Engine:
        return flower.FlowerEngine(
            grid,
            prepared.algorithm,
            clients=len(federation.clients),
            classes=federation.classes,
            test=federation.test,
            template=prepared.model,
            digest=prepared.digest,
            device=device,
            timeout=experiment.reply_timeout,
            evaluate_clients=experiment.client_test > 0,
            validate_clients=bool(experiment.client_validation),
            limit=config["max-message-bytes"],
            wait=config["wait"],
            enough=experiment.min_replies,
            times=federation.times,
        )

    def on_round(record: dict[str, Any], rounds: int) -> None:
        if "round" in record:
            done = f"round {record['round']}/{rounds}"
            accuracy = f", {headline_of(record)[0]} {record['accuracy']:.4f}" if "accuracy" in record else ""
        else:
            done, accuracy = f"preparation {record['step']}/{record['steps']}", ""
        log.info("%s%s, %.1f s", done, accuracy, record["seconds"])
        for lost in record["lost"]:
            log.warning("lost client %d (%s): %s", lost["client"], lost["handler"], lost["reason"])

    if secret is None:
        log.warning("noise=seed: the server's noise comes from the seed, which every host knows, and protects nobody")
    result = execute(prepared, out, on_round, connect, secret)
    score, told = result.summary["accuracy"], headline_of(result.summary)[0]
    log.info("finished%s; the run lies in %s", "" if score is None else f": {told} {score:.4f}", result.directory)


def _site(prepared: Prepared, task: Task, context: flower.Context) -> flower_host.Site:
    config = _given(context.node_config, HOST, "node-config")
    experiment = prepared.experiment
    client, rehearsed = config["client"], config["partition-id"] >= 0
    if rehearsed:
        client = config["partition-id"]
    if not 0 <= client < task.clients:
        raise FedfillError(
            f"client: found {client}; allowed: 0 to {task.clients - 1}, given as --node-config 'client=0 data=\"...\"'"
        )
    secret = _secret(config)
    if config["data"]:
        data = load_host(
            config["data"], config["format"], task, client=client, share=experiment.client_test,
            labelled=experiment.labelled_per_client, validation=experiment.client_validation, size=experiment.image_size,
            seed=experiment.seed,
        )  # fmt: skip
    elif rehearsed:
        data = _divided(experiment, config["num-partitions"], client)
    else:
        raise FedfillError("data: this host names none; start its SuperNode with --node-config 'client=0 data=\"...\"'")
    device = choose_device(config["device"])
    if experiment.precision != "float32":
        require_fast(device)
    folder = Path(config["state-dir"] or f"~/.fedfill/node-{context.node_id}").expanduser()
    try:
        _speak(folder / "fedfill.log")
    except OSError as error:
        raise FedfillError(f"state-dir: can't write to {folder} ({error.strerror}); name another folder") from error
    return flower_host.Site(
        client=client,
        data=data,
        program=prepared.algorithm,
        template=prepared.model,
        initial=prepared.initial,
        classes=len(task.class_names),
        seed=experiment.seed,
        digest=prepared.digest,
        device=device,
        folder=folder,
        timeout=experiment.reply_timeout,
        secret=secret,
        limit=config["max-message-bytes"],
        parties=read_parties(config["key"], config["peers"], task.clients) if config["peers"] else None,
        precision=experiment.precision,
        schema=prepared.federation.schema,
    )


def _divided(experiment: Experiment, partitions: int, client: int) -> ClientData:
    """One part of a data set that is only divided for a rehearsal."""
    if partitions != experiment.clients:
        raise FedfillError(
            f"num-partitions: found {partitions}; allowed: the experiment's {experiment.clients} clients"
        )
    return divide(experiment).clients[client]


def _given(config: Any, defaults: dict[str, Any], what: str) -> dict[str, Any]:
    """Settings with their defaults, each of its default's type."""
    for name, value in config.items():
        if name not in defaults:
            raise FedfillError(f"{what}: unknown name '{name}'; {did_you_mean(name, defaults)}")
        kind = type(defaults[name])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise FedfillError(f"{name}: found {value!r}; allowed: {_WORDS[kind]}")
        if name in ("wait", "max-message-bytes") and value <= 0:
            raise FedfillError(f"{name}: found {value!r}; allowed: more than 0")
    return {**defaults, **config}


def _secret(config: dict[str, Any]) -> bool:
    """Whether a party's noise comes from a key of its own."""
    if config["noise"] not in ("secret", "seed"):
        raise FedfillError(f"noise: found '{config['noise']}'; allowed: secret, seed")
    return bool(config["noise"] == "secret")


_WORDS = {str: "text", int: "a whole number", float: "a number"}


def _speak(path: str | Path = "") -> None:
    """Let warnings and progress be seen in Flower's logs, and in a file where one is named."""
    handlers: list[logging.Handler] = [] if log.handlers else [logging.StreamHandler()]
    if path:
        Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(Path(path).expanduser()))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s fedfill: %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
