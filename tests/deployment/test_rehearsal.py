"""Rehearsals with real Flower processes: the bits of one process, and kills, crashes and nonsense in mid-round.

A federation is eleven Python processes, so that a test is mostly start-ups: the worlds are tiny and the tests few.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout
from tests.deployment.nodes import dismiss_node
from tests.deployment.test_processes import finish, running, wait_until_gone
from tests.helpers import refused, small_federation

import fedfill
from fedfill import tree
from fedfill.deployment import rehearsal
from fedfill.deployment.app import PACKAGE, write_app
from fedfill.deployment.host_data import Task, save_host
from fedfill.deployment.processes import LocalFederation, local_federation
from fedfill.engines.flower_host import Kept
from fedfill.errors import DivergedError, FedfillError
from fedfill.experiment.prepare import arrange
from fedfill.runs.directory import RunDirectory

TINY = {"local_epochs": 1, "batch_size": 8, "client_test": 0, "seed": 0}
DPMS = {"preliminary_rounds": 2, "n_classes": 1, "alpha": 4, "max_candidates": 40}


def bars() -> list[tuple[torch.Tensor, ...]]:
    """Four clients' data."""
    return [(c.train.inputs, c.train.labels, c.test.inputs, c.test.labels) for c in small_federation().clients]


def states(path: Path) -> dict[int, Kept]:
    """What lies on the hosts' disks, by client."""
    files = path.glob("deployment/host*/state/client-*.safetensors")
    return {int(file.name.split("-")[1]): tree.from_bytes(file.read_bytes()) for file in sorted(files)}


def records(path: Path) -> list[dict[str, Any]]:
    return RunDirectory(path).rounds()


def test_a_run_that_ends_while_flower_is_asked_is_finished(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    followed: list[int] = []

    def failure() -> str:
        directory.append_round({"round": 1})
        directory.write("summary.json", b"{}")
        return "the Flower run ended as 'finished:completed'"

    rehearsal._follow(directory, 0, 1, lambda record, rounds: followed.append(record["round"]), failure)
    assert followed == [1]
    with refused("the Flower run", "'x'"):
        rehearsal._follow(RunDirectory(tmp_path / "none"), 0, 1, None, lambda: "the Flower run ended as 'x'")
    with pytest.raises(DivergedError, match="so"):  # by the sentence alone, from another process
        rehearsal._follow(RunDirectory(tmp_path / "none"), 0, 1, None, lambda: "training diverged: so")


def test_a_second_rehearsal_in_a_folder_is_refused_before_anything_is_read_written_or_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    options = {**TINY, "data": bars(), "engine": "flower", "rounds": 1}
    prepared = arrange("fedavg", partition="iid", model="auto", **options)

    def never(*arguments: Any, **more: Any) -> None:
        raise AssertionError("data were prepared for a run that can't be")

    @contextmanager
    def in_place_of_the_processes(folder: Path, nodes: Any, app: Path) -> Iterator[LocalFederation]:
        before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
        with monkeypatch.context() as patch:
            patch.setattr(rehearsal, "local_federation", never)
            patch.setattr(sys.modules[fedfill.run.__module__], "arrange", never)
            patch.setattr(sys.modules[fedfill.run.__module__], "reopen", never)
            for engine in ("flower", "local"):
                with refused("out", str(path), "another process"):
                    fedfill.run("fedavg", out=path, **{**options, "engine": engine})
            with refused("out", str(path), "another process"):
                fedfill.resume(path, data=options["data"])
            with refused("out", str(path), "another process"):  # who has prepared meanwhile
                rehearsal.rehearse(prepared, path)
        assert before == {file: file.stat().st_mtime_ns for file in path.rglob("*")}
        raise FedfillError("enough")
        yield

    monkeypatch.setattr(rehearsal, "local_federation", in_place_of_the_processes)
    for _ in range(2):  # the first one has left the folder to the next
        with pytest.raises(FedfillError, match="enough"):
            fedfill.run("fedavg", out=path, **options)


@pytest.mark.deploy
@pytest.mark.parametrize(("algorithm", "options"), [("fedavg", {"rounds": 2}), ("feddpms", {"rounds": 4, **DPMS})])
def test_same_bits_as_in_one_process(algorithm: str, options: dict[str, Any], tmp_path: Path) -> None:
    options = {**TINY, "data": bars(), "participation": 0.5, **options}
    local = fedfill.run(algorithm, out=tmp_path / "local", workers=1, **options)
    followed: list[int] = []
    path = tmp_path / "flower"
    flower = fedfill.run(
        algorithm,
        out=path,
        engine="flower",
        on_round=lambda record, rounds: followed.append(record["round"]),
        **options,
    )
    assert not running(tmp_path)
    assert flower.summary["weights_sha256"] == local.summary["weights_sha256"]
    assert flower.summary["accuracy"] == local.summary["accuracy"]
    assert flower.summary["train_samples"] == local.summary["train_samples"]
    assert flower.summary["lost_replies"] == 0
    assert followed == list(range(1, options["rounds"] + 1))
    assert not flower.was_finished
    if algorithm == "feddpms":  # sharing and synthesis happened, and on the hosts' side of the wire
        synthetic = {i: kept.now["synthetic"] for i, kept in states(path).items()}
        assert any(samples is not None for samples in synthetic.values())
        simulated = RunDirectory(tmp_path / "local").read_checkpoint()
        assert simulated is not None
        for i, samples in synthetic.items():
            theirs = simulated["clients"][i]["synthetic"]
            assert (samples is None) == (theirs is None)
            assert samples is None or torch.equal(samples.inputs, theirs.inputs)
    # the same again reads what is there and starts nothing
    began = time.monotonic()
    assert fedfill.run(algorithm, out=path, engine="flower", **options).was_finished
    assert time.monotonic() - began < 5


@pytest.mark.deploy
def test_personal_models_of_hosts_have_the_bits_of_one_process(tmp_path: Path) -> None:
    options = {
        **TINY, "data": bars()[:2], "model": "cnn2bn", "participation": 0.5, "rounds": 2, "client_test": 0.1, "seed": 1,
    }  # fmt: skip
    local = fedfill.run("fedbn", out=tmp_path / "local", workers=1, **options)
    flower = fedfill.run("fedbn", out=tmp_path / "flower", engine="flower", **options)
    assert not running(tmp_path)
    simulated, kept = (RunDirectory(tmp_path / name).read_checkpoint() for name in ("local", "flower"))
    assert simulated is not None
    assert kept is not None
    assert kept["clients"] == {}
    assert flower.summary["weights_sha256"] == tree.sha256(simulated["server"]["weights"])
    on_disk = {i: state.now for i, state in states(tmp_path / "flower").items()}
    assert tree.to_bytes(on_disk) == tree.to_bytes(simulated["clients"])
    for ours, theirs in zip(flower.rounds, local.rounds, strict=True):
        assert ours["accuracy_by_client"] == theirs["accuracy_by_client"]
        assert None not in ours["accuracy_by_client"]
    assert flower.summary["lost_replies"] == 0


# Kills of the whole


@contextmanager
def command(*words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "fedfill", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as program:  # fmt: skip
        try:
            yield program
        finally:
            program.terminate()


def wait_for_the_middle_of_a_round(path: Path, runs: set[str], patience: float = 120) -> int:
    """Wait until a host of a new Flower run has committed its state in a round that is not finished.

    Args:
        path: The run directory.
        runs: Flower's runs of before; the new one is added.
        patience: Seconds.

    Returns:
        How many rounds are finished.
    """
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        done = len(records(path))
        now = {kept.run for kept in states(path).values() if kept.round == done} - runs
        if done and now:
            runs |= now
            return done
        time.sleep(0.02)
    raise AssertionError(f"no host was in the middle of a round within {patience} s")


def rounds_in_checkpoint(path: Path) -> int:
    checkpoint = RunDirectory(path).read_checkpoint()
    assert checkpoint is not None
    return int(checkpoint["rounds"])


@pytest.mark.faults
def test_a_rehearsal_that_is_stopped_or_killed_in_mid_round_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Once each: Ctrl-C, kill -9 of the SuperLink, kill -9 of fedfill itself; every time a host has committed already."""
    options = {**TINY, **DPMS, "preliminary_rounds": 1, "mechanism": "single_release"}
    options |= {"data_fraction": 0.15, "clients": 2, "partition": "dirichlet:0.3", "rounds": 12}
    expected = fedfill.run("feddpms", out=tmp_path / "local", workers=1, **options).summary
    config = tmp_path / "experiment.toml"
    settings = {key: options.pop(key) for key in ("local_epochs", "batch_size", "mechanism", *DPMS)}
    document = {"algorithm": "feddpms", "engine": "flower", **options}
    lines = [f"{key} = {json.dumps(value)}" for key, value in document.items()]
    lines += ["[settings]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    config.write_text("\n".join(lines))
    path = tmp_path / "run"

    runs: set[str] = set()

    with command("run", "--config", str(config), "--out", str(path)) as program:
        done = wait_for_the_middle_of_a_round(path, runs)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=60)
    assert program.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("fedfill: stopped; finished rounds are kept")
    assert not running(tmp_path)
    assert rounds_in_checkpoint(path) >= done

    with command("resume", str(path)) as program:
        done = wait_for_the_middle_of_a_round(path, runs)
        os.killpg(int((path / "deployment" / "flower" / "superlink.pid").read_text()), signal.SIGKILL)
        out, err = program.communicate(timeout=60)
    assert program.returncode == 2, err
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("fedfill: engine: the SuperLink of the Flower federation ended with status -9: ")
    assert "Traceback" not in err
    assert not running(tmp_path)
    assert rounds_in_checkpoint(path) >= done

    with command("resume", str(path)) as program:
        done = wait_for_the_middle_of_a_round(path, runs)
        program.kill()
        program.communicate()
    wait_until_gone(tmp_path)
    done = rounds_in_checkpoint(path)

    with command("resume", str(path)) as program:
        out, err = program.communicate(timeout=180)
    assert program.returncode == 0, err
    assert f"Rounds 1 to {done} had been done before" in out
    summary = RunDirectory(path).summary()
    assert summary is not None
    assert summary["weights_sha256"] == expected["weights_sha256"]
    assert summary["lost_replies"] == 0
    assert not running(tmp_path)


# Kills of nodes


Act = Callable[[LocalFederation, float], None]


@dataclass
class Killer:
    """Does something to the nodes of a rehearsal in mid-round, on a thread of its own; the next thing once that is done.

    Attributes:
        acts: What to do; each gets the usual seconds of a round.
        rounds: In which round each of them began.
    """

    acts: Sequence[Act]
    rounds: list[int] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    _times: list[float] = field(default_factory=list)
    _federation: LocalFederation | None = None
    _thread: threading.Thread | None = None

    @contextmanager
    def watch(self, folder: Path, nodes: Any, app: Path) -> Iterator[LocalFederation]:
        with local_federation(folder, nodes, app) as federation:
            self._federation = federation
            try:
                yield federation
            finally:
                if self._thread is not None:
                    self._thread.join()

    def on_round(self, record: dict[str, Any], rounds: int) -> None:
        if not record["lost"]:
            self._times.append(record["seconds"])
        if len(self.rounds) == len(self.acts) or (self._thread is not None and self._thread.is_alive()):
            return
        if record["lost"]:  # a round takes a second, and a node that starts again more
            return
        act = self.acts[len(self.rounds)]
        self.rounds.append(record["round"] + 1)
        self._thread = threading.Thread(target=self._do, args=(act, statistics.median(self._times)))
        self._thread.start()

    def _do(self, act: Act, usual: float) -> None:
        assert self._federation is not None
        try:
            act(self._federation, usual)
        except BaseException as error:
            self.errors.append(error)


def kill_a_handler(path: Path, k: int, worker: int, patience: float = 60) -> None:
    """Kill the process that handles a message on a node, and nothing else, while it holds the lock on the host's state."""
    (lock,) = path.glob(f"deployment/host{k}/state/client-*.lock")
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            FileLock(lock, timeout=0).acquire().lock.release()
        except Timeout:
            os.kill(worker, signal.SIGKILL)
            return
        time.sleep(0.001)
    raise AssertionError(f"node {k} handled no message within {patience} s")


MOMENTS = 10
HOSTS = 3


def lost_in(records: Sequence[Mapping[str, Any]]) -> dict[int, dict[int, str]]:
    """Reasons by round and client."""
    return {r["round"]: {entry["client"]: entry["reason"] for entry in r["lost"]} for r in records}


@pytest.mark.faults
def test_nodes_that_are_killed_at_ten_moments_of_a_round_are_lost_recorded_and_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kill is followed by the operator's remedy; a SuperLink left alone would miss the node only after 40 seconds."""

    def kill(moment: int) -> Act:
        def act(federation: LocalFederation, usual: float) -> None:
            k = moment % HOSTS
            time.sleep(usual * (moment + 0.5) / MOMENTS)
            federation.kill_node(k)
            dismiss_node(federation, k)
            federation.start_node(k)

        return act

    killer = Killer([kill(moment) for moment in range(MOMENTS)])
    monkeypatch.setattr(rehearsal, "local_federation", killer.watch)
    data, path, rounds = bars()[:HOSTS], tmp_path / "run", 400
    result = fedfill.run(
        "fedavg", data=data, engine="flower", out=path, rounds=rounds, on_round=killer.on_round, **TINY
    )
    assert killer.errors == []
    assert len(killer.rounds) == MOMENTS, "the run was over before everything was done"
    assert [record["round"] for record in result.rounds] == list(range(1, rounds + 1))
    lost = lost_in(result.rounds)
    for record in result.rounds:
        # who is not named as lost was counted, and the other way round
        there = set(range(HOSTS)) - lost[record["round"]].keys()
        assert record["train_samples"] == sum(len(data[i][1]) for i in there), record
    for moment, (first, then) in enumerate(itertools.pairwise([*killer.rounds, rounds])):
        named = {client for r in range(first, then) for client in lost[r]}
        # the one before may still be on its way back
        assert named <= {moment % HOSTS, (moment - 1) % HOSTS}, (moment, lost)
    assert sum(map(len, lost.values())) >= MOMENTS, lost
    assert all(reason for entries in lost.values() for reason in entries.values())
    assert lost[rounds] == {}, "everybody is back"
    assert {i: kept.round for i, kept in states(path).items()} == dict.fromkeys(range(HOSTS), rounds - 1)
    assert not running(tmp_path)


@pytest.mark.faults
def test_a_node_and_a_handler_that_nobody_dismisses_are_missed_within_two_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rounds = tmp_path / "run", 200

    def desert(federation: LocalFederation, usual: float) -> None:
        federation.kill_node(2)
        worker = federation.workers[1]
        assert worker is not None
        kill_a_handler(path, 1, worker.pid)
        time.sleep(75)  # until the SuperLink has missed both
        federation.start_node(2)

    killer = Killer([desert])
    monkeypatch.setattr(rehearsal, "local_federation", killer.watch)
    result = fedfill.run(
        "fedavg", data=bars()[:HOSTS], engine="flower", out=path, rounds=rounds, on_round=killer.on_round, **TINY
    )
    assert killer.errors == []
    lost = lost_in(result.rounds)
    (handler,) = [r for r, entries in lost.items() if 1 in entries]  # a killed handler is no killed host
    node = min(r for r, entries in lost.items() if 2 in entries)
    assert {handler, node} <= {killer.rounds[0], killer.rounds[0] + 1}, "a round may be over between the two"
    assert lost[handler][1].startswith("Flower error 8"), lost
    assert lost[node][2].startswith("Flower error 5"), lost
    for r in (handler, node):
        assert 30 < result.rounds[r - 1]["seconds"] < 120
    assert lost[rounds] == {}, "everybody is back"
    assert {i: kept.round for i, kept in states(path).items()} == dict.fromkeys(range(HOSTS), rounds - 1)
    assert not running(tmp_path)


# Hosts that misbehave

MISCHIEF = '''
"""FedAvg on hosts that misbehave, each in a round of its own."""

import time

from fedfill.algorithms.fedavg import Broadcast, FedAvg, Update
from fedfill.protocol.client import client_handler


class Mischief(FedAvg):
    """FedAvg with trouble."""

    name = "mischief"

    @client_handler
    def train(self, client, message: Broadcast) -> Update:
        """As FedAvg, but for some."""
        update = super().train(client, message)
        match (client.round, client.id):
            case (0, 0):
                raise ArithmeticError("no luck today")
            case (1, 1):
                return Update({name: value * float("nan") for name, value in update.weights.items()}, update.samples)
            case (2, 2):
                time.sleep(21)
            case (3, 0):
                return Update({name: value[:1] for name, value in update.weights.items()}, update.samples)
            case (4, 1 | 2):
                raise ArithmeticError("nor today")
        return update
'''


@pytest.mark.faults
def test_hosts_that_misbehave_are_left_out_and_asked_again_until_too_few_are_left(tmp_path: Path) -> None:
    path, app, error = tmp_path / "run", tmp_path / "app", tmp_path / "error.txt"
    data = bars()[:HOSTS]
    options = {**TINY, "rounds": 6, "min_replies": 2, "reply_timeout": 20}
    prepared = arrange("fedavg", data=data, partition="iid", model="auto", engine="flower", **options)
    nodes = []
    for i, own in enumerate(prepared.federation.clients):
        place = path / "deployment" / f"host{i}"
        save_host(place / "data.safetensors", own)
        nodes.append(
            {
                "client": i, "data": str(place / "data.safetensors"), "format": "safetensors",
                "state-dir": str(place / "state"),
            }
        )  # fmt: skip
    save_host(tmp_path / "test.safetensors", prepared.federation.clients[0])
    experiment = prepared.experiment.model_copy(update={"algorithm": "mischief"})
    server = {
        "out": str(path), "test-data": str(tmp_path / "test.safetensors"), "test-format": "safetensors",
        "error-file": str(error),
    }  # fmt: skip
    write_app(app, experiment, Task.of(prepared.federation), name="mischief", server=server)
    (app / PACKAGE / "mischief.py").write_text(MISCHIEF)
    for side in ("server", "client"):  # as the comment in these files invites to
        program = app / PACKAGE / f"{side}_app.py"
        text = program.read_text().replace("(Path(__file__).parent)", "(Path(__file__).parent, algorithm=Mischief)")
        program.write_text(text.replace("\nfrom pathlib", "\nfrom federation.mischief import Mischief\nfrom pathlib"))

    with local_federation(tmp_path / "flower", nodes) as federation:
        run = federation.submit(app)
        while not error.exists() and RunDirectory(path).summary() is None:
            federation.check()
            time.sleep(0.5)
        status, details = finish(federation, run)
    assert status == "finished:failed"
    sentence = (
        "min_replies: in round 5 1 of 3 clients gave a good reply to 'train', but 2 were needed "
        "(ArithmeticError: nor today); finished rounds are kept, and 'fedfill resume' goes on from there"
    )
    assert error.read_text() == sentence
    assert sentence in details
    assert rounds_in_checkpoint(path) == 4
    lost = [record["lost"] for record in records(path)]
    assert lost == [
        [{"client": 0, "handler": "train", "reason": "ArithmeticError: no luck today"}],
        [{"client": 1, "handler": "train", "reason": "the reply holds a NaN or an infinity"}],
        [{"client": 2, "handler": "train", "reason": "took longer than reply_timeout=20.0 s"}],
        [
            {
                "client": 0,
                "handler": "train",
                "reason": "'weights' of the reply has other names, types or shapes than were asked for",
            }
        ],
    ]
    assert all(
        torch.isfinite(weights).all()
        for weights in RunDirectory(path).read_checkpoint()["weights"].values()  # type: ignore[index]
    )
    log = (path / "deployment" / "server.log").read_text()
    assert log.count(sentence) == 1
    assert "lost client 2 (train): took longer than reply_timeout" in log
