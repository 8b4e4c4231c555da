"""Runs on Flower: a rehearsal of a whole federation on this machine, and going on with a deployment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedfill.data.federation import ClientData
from fedfill.deployment.app import PACKAGE, write_app
from fedfill.deployment.commands import flwr
from fedfill.deployment.host_data import Task, save_host
from fedfill.deployment.processes import LocalFederation, Setting, local_federation
from fedfill.engines import require
from fedfill.errors import FedfillError, told
from fedfill.experiment.loop import OnRound, document_of, recorded
from fedfill.experiment.prepare import Prepared
from fedfill.experiment.settings import PYTHON
from fedfill.experiment.summary import Result
from fedfill.own_parts import entry_points
from fedfill.runs.directory import RunDirectory, read_toml, writing

log = logging.getLogger("fedfill")

FOLDER = "deployment"
"""The folder in a run directory with keys, logs, and each host's data and state."""
_TICK = 0.5
_ASK = 30.0


def rehearse(prepared: Prepared, path: Path, on_round: OnRound | None = None) -> Result:
    """Run an experiment as a federation of real Flower processes on this machine.

    A SuperLink and one SuperNode for each client run on 127.0.0.1, over TLS and with a key for each node. Each client's
    data lie in a folder of its own, as they would on a host. Whatever happens, nothing is left running.
    """
    require("flower")
    experiment = prepared.experiment
    _require_names(prepared)
    directory, folder = RunDirectory(path), RunDirectory((path / FOLDER).resolve())
    directory.open(document_of(experiment), prepared.digest)
    try:
        done = _done(directory)
        summary = directory.summary()
        if summary is not None:
            return recorded(prepared.digest, experiment.rounds, directory, summary)
        with writing(folder.path):
            folder.path.mkdir(exist_ok=True)
        folder.lock()
    finally:
        directory.close()  # the server's program opens it
    try:
        error = folder.path / "error.txt"
        nodes = _write_parties(prepared, path, folder.path, error)
        log.info("starting Flower with %d hosts", len(nodes))
        with local_federation(folder.path / "flower", nodes, folder.path / "app") as federation:
            _follow(directory, done, experiment.rounds, on_round, _watch(federation, error))
    finally:
        folder.close()
    return _finished(prepared.digest, experiment.rounds, directory, done)


def _write_parties(prepared: Prepared, path: Path, folder: Path, error: Path) -> Sequence[Mapping[str, Setting]]:
    """Write each host's data, the server's and the app, and tell what each node has to know."""
    experiment = prepared.experiment
    with writing(folder):
        error.unlink(missing_ok=True)
        nodes: list[dict[str, Setting]] = []
        for i, data in enumerate(prepared.federation.clients):
            place = folder / f"host{i}"
            save_host(place / "data.safetensors", data)
            nodes.append(
                {
                    "client": i,
                    "data": str(place / "data.safetensors"),
                    "format": "safetensors",
                    "state-dir": str(place / "state"),
                    # a rehearsal is a simulation: it can be repeated to the bit
                    "noise": "seed",
                    "key": str(folder / "flower" / f"node{i}.key"),
                    "peers": str(folder / "flower"),
                    "device": experiment.device,
                }
            )
        test = ClientData(prepared.federation.test, prepared.federation.test[:0])
        save_host(folder / "server" / "test.safetensors", test)
    server = {
        "out": str(path.resolve()),
        "test-data": str(folder / "server" / "test.safetensors"),
        "test-format": "safetensors",
        "log": str(folder / "server" / "fedfill.log"),
        "error-file": str(error),
        "noise": "seed",
    }
    task = Task.of(prepared.federation)
    if experiment.start_from is not None:  # its processes stand elsewhere
        there = str(Path(experiment.start_from).expanduser().resolve())
        experiment = experiment.model_copy(update={"start_from": there})
    write_app(folder / "app", experiment, task, name="rehearsal", server=server)
    return nodes


def resubmit(path: Path, on_round: OnRound | None = None) -> Result:
    """Go on with a deployment: submit its app again, and follow it to its end."""
    require("flower")
    document = read_toml(path / "deployment.toml")
    app, connection = Path(str(document.get("app"))), str(document.get("connection"))
    if not (app / PACKAGE / "experiment.toml").exists():
        raise FedfillError(
            f"resume: the deployment's app is not in {app}; submit it again with 'flwr run APP {connection}'"
        )
    directory = RunDirectory(path)
    digest, rounds = directory.digest(), int(directory.read_experiment()["rounds"])
    summary = directory.summary()
    if summary is not None:
        return recorded(digest, rounds, directory, summary)
    done = _done(directory)
    run = int(flwr("run", str(app), connection)["run-id"])
    asked = time.monotonic()

    def failure() -> str | None:
        nonlocal asked
        if time.monotonic() - asked < _ASK:
            return None
        asked = time.monotonic()
        (found,) = flwr("list", connection, "--run-id", str(run))["runs"]
        return _ended(str(found["status"]), str(found["status-details"]))

    _follow(directory, done, rounds, on_round, failure)
    return _finished(digest, rounds, directory, done)


def _require_names(prepared: Prepared) -> None:
    """Other processes find networks and algorithms by name, or in the file that the experiment names."""
    experiment, kind = prepared.experiment, type(prepared.algorithm)
    if experiment.model.split(":")[0] == PYTHON and "model" not in experiment.own:
        own = f"model: found a {type(prepared.model).__name__}"
    elif (
        kind.__module__.split(".")[0] != "fedfill"
        and "algorithm" not in experiment.own
        and kind.name not in entry_points("algorithms")
    ):
        own = f"algorithm: found {kind.__qualname__}"
    else:
        return
    raise FedfillError(
        f"{own} of your own, which a rehearsal's processes can't be given; allowed with engine=flower: names, FILE.py:NAME, or an app "
        "of 'fedfill deploy init' to whose two programs you give it"
    )


def _done(directory: RunDirectory) -> int:
    """Rounds that the checkpoint vouches for."""
    checkpoint = directory.read_checkpoint()
    return int(checkpoint["rounds"]) if checkpoint is not None else 0


def _follow(
    directory: RunDirectory, done: int, rounds: int, on_round: OnRound | None, failure: Callable[[], str | None]
) -> None:
    """Report rounds as they are recorded, until the summary is there."""
    while True:
        finished = directory.summary() is not None  # asked first: then all rounds are recorded
        for record in directory.rounds()[done:]:
            done += 1
            if on_round is not None:
                on_round(record, rounds)
        if finished:
            return
        problem = failure()
        if problem is None:
            time.sleep(_TICK)
        elif directory.summary() is None:  # it may have come while Flower was asked, which takes seconds
            raise told(problem)


def _watch(federation: LocalFederation, error: Path) -> Callable[[], str | None]:
    """Why the rehearsal can't go on, or None; Flower's own word costs a second of processor time and is asked for rarely."""
    asked = time.monotonic()

    def failure() -> str | None:
        nonlocal asked
        if error.exists():
            return error.read_text()
        federation.check()
        if time.monotonic() - asked < _ASK:
            return None
        asked = time.monotonic()
        return None if federation.run is None else _ended(*federation.status(federation.run))

    return failure


def _ended(status: str, details: str) -> str | None:
    if not status.startswith("finished"):
        return None
    time.sleep(2 * _TICK)  # the last files may be on their way
    return f"engine: the Flower run ended as '{status}' {details}".rstrip()


def _finished(digest: str, rounds: int, directory: RunDirectory, done: int) -> Result:
    summary = directory.summary()
    if summary is None:
        raise FedfillError(f"out: {directory.path} holds no summary after the run")
    return replace(recorded(digest, rounds, directory, summary), resumed_after=done)
