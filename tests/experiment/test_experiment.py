"""Experiments: the same bits on any number of workers and after any kill, what a run leaves behind, and the Python API."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import fedfill
from fedfill import tree
from fedfill.algorithms import Broadcast
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fraug import FRAug
from fedfill.data.division import federate
from fedfill.engines.local import LocalEngine
from fedfill.errors import DivergedError, FedfillError, checked
from fedfill.experiment.prepare import Prepared, arrange
from fedfill.experiment.settings import Experiment
from fedfill.experiment.summary import selected
from fedfill.protocol.server import Server
from fedfill.runs.directory import RunDirectory
from fedfill.training.evaluation import FAIRNESS, Evaluation

TINY: dict[str, Any] = {"data": "digits", "clients": 4, "local_epochs": 1, "rounds": 5, "participation": 0.5}
EACH: dict[str, dict[str, Any]] = {
    "fedavg": TINY,
    "feddpms": {**TINY, "preliminary_rounds": 2, "alpha": 5, "max_candidates": 100},
}
INCIDENTAL = ("seconds", "seconds_in_fit", "workers")


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in INCIDENTAL}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [without_times(json.loads(line)) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fedfill.Result]:
    """An undisturbed run of each algorithm on one worker."""
    folder = tmp_path_factory.mktemp("whole")
    return {name: fedfill.run(name, **options, workers=1, out=folder / name) for name, options in EACH.items()}


# ---- the same bits


@pytest.mark.parametrize("name", EACH)
def test_workers_change_no_bit(name: str, whole: dict[str, fedfill.Result], tmp_path: Path) -> None:
    again = fedfill.run(name, **EACH[name], workers=2, out=tmp_path)
    assert again.summary["workers"] == 2
    assert without_times(again.summary) == without_times(whole[name].summary)
    assert lines(tmp_path) == lines(whole[name].directory)
    assert all(torch.equal(again.weights[key], whole[name].weights[key]) for key in again.weights)


def test_another_seed_gives_other_weights(whole: dict[str, fedfill.Result], tmp_path: Path) -> None:
    other = fedfill.run("fedavg", **TINY, seed=1, out=tmp_path)
    assert other.summary["weights_sha256"] != whole["fedavg"].summary["weights_sha256"]


# A process whose children kill themselves, with no chance to tidy up, at a named moment of a round; each goes on in the
# folder of the one before, and what the kill left is copied. The parent imports all that is slow and starts no thread.
VICTIMS = """
import json, os, shutil, signal, sys
import torch
import fedfill.studies.run
from fedfill.algorithms import known_algorithms
from fedfill.data import sources
from fedfill.engines import runner
from fedfill.protocol import server
from fedfill.runs import directory

known_algorithms()
torch.set_num_threads(1)
torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
sources.load("digits")
now, fits = 0, 0


def before(owner, attribute, fatal):
    original = getattr(owner, attribute)

    def wrapper(*args, **others):
        if fatal(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **others)

    setattr(owner, attribute, wrapper)


def begin(server, t):
    global now, fits
    now, fits = t + 1, 0
    return False


def second_fit(*args):
    global fits
    fits += 1
    return now == last and fits == 2


folder, names, kills = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
for name, options in names.items():
    for moment, last in kills:
        child = os.fork()
        if child == 0:
            before(server.Server, "begin", begin)
            if moment == "training":
                before(runner, "fit", second_fit)
            elif moment == "recorded":
                before(directory.RunDirectory, "write_checkpoint", lambda self, state: now == last)
            elif moment == "writing":
                before(os, "replace", lambda source, target: now == last and str(target).endswith("state.safetensors"))
            fedfill.run(name, **options, out=f"{folder}/{name}", workers=1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, (name, moment)
        shutil.copytree(f"{folder}/{name}", f"{folder}/{name}-{moment}")
"""
# for feddpms in its first phase, between its phases, and in its second: moment, round, then records and rounds that are left
KILLS = [("recorded", 2, 2, 1), ("training", 3, 2, 2), ("writing", 4, 4, 3)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that the victims leave."""
    folder = tmp_path_factory.mktemp("killed")
    words = [str(folder), json.dumps(EACH), json.dumps([kill[:2] for kill in KILLS])]
    child = subprocess.run([sys.executable, "-c", VICTIMS, *words], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return folder


@pytest.mark.parametrize("name", EACH)
def test_killed_three_times_and_resumed_gives_the_same_bits(
    name: str, whole: dict[str, fedfill.Result], killed: Path
) -> None:
    for moment, _, recorded, done in KILLS:
        left = killed / f"{name}-{moment}"
        assert len(lines(left)) == recorded
        checkpoint = RunDirectory(left).read_checkpoint()
        assert checkpoint is not None
        assert checkpoint["rounds"] == done
        assert bool(list(left.rglob("*.tmp"))) == (moment == "writing")  # a checkpoint that never took its place

        result = fedfill.resume(left, workers=2)
        assert result.resumed_after == done
        assert not list(left.rglob("*.tmp"))
        assert without_times(result.summary) == without_times(whole[name].summary)
        assert lines(left) == lines(whole[name].directory)


def test_killed_from_outside_and_run_again(tmp_path: Path) -> None:
    options = {**TINY, "rounds": 400}
    code = "import json, sys, fedfill; fedfill.run('fedavg', **json.loads(sys.argv[1]), out=sys.argv[2])"
    child = subprocess.Popen([sys.executable, "-c", code, json.dumps(options), str(tmp_path)])
    wait_for(tmp_path / "checkpoint" / "state.safetensors", child)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    with pytest.raises(Stop) as stopped:
        fedfill.run("fedavg", **options, out=tmp_path, on_round=stop)
    assert stopped.value.round > 1


class Stop(Exception):
    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__()
        self.round = record["round"]


def stop(record: dict[str, Any], rounds: int) -> None:
    raise Stop(record)


def wait_for(path: Path, child: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert child.poll() is None, "the process ended too early"
        assert time.monotonic() < end
        time.sleep(0.05)


# Ctrl-C; a shell that starts tests in the background lets its children ignore it, so the handler is put back
CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from fedfill.cli import main; main()"


def test_ctrl_c_ends_a_long_local_training_at_once(tmp_path: Path) -> None:
    words = [
        "run",
        "fedavg",
        "--clients",
        "4",
        "--rounds",
        "2",
        "--out",
        str(tmp_path),
        "--set",
        "local_epochs=1000000",
    ]
    child = subprocess.Popen([sys.executable, "-c", CTRL_C, *words], stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "partition.json", child)
    time.sleep(0.5)
    start = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert time.monotonic() - start < 5  # mostly far below one second; machines that run tests are shared
    assert child.returncode == 130
    assert errors.startswith("fedfill: stopped; ")
    assert errors.count("\n") == 1


def test_ctrl_c_between_rounds_keeps_what_is_finished(tmp_path: Path) -> None:
    words = ["run", "fedavg", "--clients", "4", "--rounds", "20", "--out", str(tmp_path), "--set", "local_epochs=1"]
    child = subprocess.Popen([sys.executable, "-c", CTRL_C, *words], stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "checkpoint" / "state.safetensors", child)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 130
    assert errors.splitlines()[-1].startswith("fedfill: stopped; finished rounds are kept")
    result = fedfill.resume(tmp_path)
    assert 1 <= result.resumed_after < 20
    assert [record["round"] for record in result.rounds] == list(range(1, 21))


# ---- a full disk


@pytest.mark.parametrize("limit", ["checkpoint", "rounds"])
def test_full_disk_leaves_the_last_checkpoint(limit: str, whole: dict[str, fedfill.Result], tmp_path: Path) -> None:
    """The kernel refuses what goes beyond a size: a checkpoint, or the second half of a line."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(record: dict[str, Any], rounds: int) -> None:
        size = 30_000 if limit == "checkpoint" else (tmp_path / "rounds.jsonl").stat().st_size + 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    try:
        with pytest.raises(FedfillError, match=r"can't write .*File too large.*fedfill resume"):
            fedfill.run("fedavg", **TINY, workers=1, out=tmp_path, on_round=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.rglob("*.tmp"))
    if limit == "rounds":
        assert not (tmp_path / "rounds.jsonl").read_text().endswith("\n")
    result = fedfill.resume(tmp_path)
    assert result.resumed_after == 1
    assert without_times(result.summary) == without_times(whole["fedavg"].summary)
    assert lines(tmp_path) == lines(whole["fedavg"].directory)


# ---- what a run leaves behind


@pytest.mark.parametrize("name", EACH)
def test_summary_and_rounds_hold_what_they_promise(name: str, whole: dict[str, fedfill.Result]) -> None:
    result = whole[name]

    def no_constant(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    summary = json.loads((result.directory / "summary.json").read_text(), parse_constant=no_constant)
    records = [
        json.loads(line, parse_constant=no_constant)
        for line in (result.directory / "rounds.jsonl").read_text().splitlines()
    ]
    assert summary == result.summary
    assert records == result.rounds
    assert {
        *("algorithm", "dataset", "partition", "clients", "rounds", "seed", "engine", "version", "accuracy"),
        *("best_accuracy", "best_round", "accuracy_by_class", "accuracy_by_client", "class_variance"),
        *("client_variance", "worst_client_accuracy", "bytes_up", "bytes_down", "train_samples", "seconds"),
        *("seconds_in_fit", "weights_sha256", "privacy"),
    } <= set(summary)
    assert {"entries", "total_epsilon", "statement"} <= set(summary["privacy"])
    assert all(
        {"released", "mechanism", "epsilon", "delta", "conditions"} <= set(e) for e in summary["privacy"]["entries"]
    )
    for number, record in enumerate(records, 1):
        assert record["round"] == number
        assert {
            *("accuracy", "loss", "accuracy_by_class", "accuracy_by_client", "bytes_up", "bytes_down"),
            *("train_samples", "seconds", "privacy", "lost", "warnings"),
        } <= set(record)
        assert len(record["accuracy_by_class"]) == 10
        assert len(record["accuracy_by_client"]) == 4
    assert (summary["algorithm"], summary["dataset"], summary["partition"]) == (name, "digits", "dirichlet:0.5")
    assert (summary["clients"], summary["rounds"], summary["seed"], summary["engine"]) == (4, 5, 0, "local")
    assert summary["version"] == fedfill.__version__
    assert summary["accuracy"] == records[-1]["accuracy"]
    for total in ("bytes_up", "bytes_down", "train_samples"):
        assert summary[total] == sum(record[total] for record in records)
    assert summary["bytes_up"] == sum(leg["up"] for leg in summary["bytes_by_handler"].values())
    assert summary["seconds"] == pytest.approx(sum(record["seconds"] for record in records), abs=0.01)
    assert 0 < summary["seconds_in_fit"] <= summary["seconds"]
    assert summary["weights_sha256"] == tree.sha256(result.weights)
    counts = json.loads((result.directory / "partition.json").read_text())
    assert counts["class_names"] == [str(digit) for digit in range(10)]


def test_bytes_and_samples_by_hand(tmp_path: Path) -> None:
    """FedAvg, one epoch: every client sends and gets all weights, one number beside them, and passes its data once."""
    result = fedfill.run("fedavg", **{**TINY, "rounds": 2, "participation": 1.0}, out=tmp_path)
    weights = 4 * sum(tensor.numel() for tensor in result.weights.values())
    held = sum(map(sum, json.loads((tmp_path / "partition.json").read_text())["clients"]))
    assert result.summary["bytes_down"] == 2 * 4 * weights
    assert result.summary["bytes_up"] == 2 * 4 * (weights + 8)
    assert result.summary["train_samples"] == 2 * held


def test_variances_and_the_best_round_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.25, 0.75, 0.75, 0.5])

    def evaluate(self: LocalEngine, weights: tree.Weights, t: int) -> Evaluation:
        return Evaluation(next(accuracies), 1.0, [0.5, 1.0, *[None] * 8], [0.2, None, 0.4, 0.6])

    monkeypatch.setattr(LocalEngine, "evaluate", evaluate)
    summary = fedfill.run("fedavg", **{**TINY, "rounds": 4}, out=tmp_path).summary
    assert (summary["accuracy"], summary["best_accuracy"], summary["best_round"]) == (0.5, 0.75, 2)
    assert summary["class_variance"] == pytest.approx(625)  # of 50 and 100
    assert summary["client_variance"] == pytest.approx(800 / 3)  # of 20, 40 and 60
    assert summary["worst_client_accuracy"] == 0.2


def test_no_own_test_split_is_null_and_not_zero(tmp_path: Path) -> None:
    summary = fedfill.run("fedavg", **{**TINY, "rounds": 1}, client_test=0, out=tmp_path).summary
    assert summary["accuracy_by_client"] == [None] * 4
    assert summary["client_variance"] is None
    assert summary["worst_client_accuracy"] is None


def test_a_loss_that_is_no_number_is_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        LocalEngine, "evaluate", lambda self, weights, t: Evaluation(0.1, math.nan, [None] * 10, [None] * 4)
    )
    with pytest.raises(DivergedError, match=r"diverged: after round 1 the loss on the test set is nan"):
        fedfill.run("fedavg", **TINY, out=tmp_path)
    assert not (tmp_path / "rounds.jsonl").exists()


def test_samples_are_drawn_where_the_algorithm_has_some(whole: dict[str, fedfill.Result]) -> None:
    assert not (whole["fedavg"].directory / "samples").exists()
    pictures = list((whole["feddpms"].directory / "samples").iterdir())
    assert [picture.name for picture in pictures] == ["round-0005.png"]
    assert pictures[0].read_bytes().startswith(b"\x89PNG")


# ---- run again


def test_a_finished_run_is_read_and_not_run_again(whole: dict[str, fedfill.Result]) -> None:
    first = whole["fedavg"]
    assert (first.resumed_after, first.was_finished) == (0, False)
    before = {path: path.stat().st_mtime_ns for path in first.directory.rglob("*.*") if path.name != ".lock"}
    called: list[Any] = []
    for again in (
        fedfill.run("fedavg", **TINY, workers=2, out=first.directory, on_round=lambda *args: called.append(args)),
        fedfill.resume(first.directory, on_round=lambda *args: called.append(args)),
    ):
        assert again.was_finished
        assert again.summary == first.summary
        assert again.rounds == first.rounds
        assert tree.sha256(again.weights) == first.summary["weights_sha256"]
    assert not called
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_an_unfinished_run_goes_on_when_run_again(whole: dict[str, fedfill.Result], tmp_path: Path) -> None:
    with pytest.raises(Stop):
        fedfill.run("fedavg", **TINY, out=tmp_path, on_round=stop)
    result = fedfill.run("fedavg", **TINY, out=tmp_path)
    assert result.resumed_after == 1
    assert result.summary["weights_sha256"] == whole["fedavg"].summary["weights_sha256"]


def test_killed_after_the_last_round_writes_the_summary(whole: dict[str, fedfill.Result], tmp_path: Path) -> None:
    finished = fedfill.run("fedavg", **TINY, out=tmp_path)
    (tmp_path / "summary.json").unlink()
    again = fedfill.resume(tmp_path)
    assert without_times(again.summary) == without_times(finished.summary)


def test_the_default_folder_is_the_experiments_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {**TINY, "rounds": 1}
    first, again = fedfill.run("fedavg", **options), fedfill.run("fedavg", **options, workers=1)
    other = fedfill.run("fedavg", **{**options, "learning_rate": 0.5})
    assert first.directory == again.directory != other.directory
    assert again.was_finished
    assert first.directory.parent == Path("runs")
    assert first.directory.name.startswith("fedavg-digits-dirichlet0.5-seed0-")


def test_an_empty_setting_survives_the_folder(tmp_path: Path) -> None:
    """TOML has no null, so a setting that was emptied must not come back as its preset."""
    with pytest.raises(Stop):
        fedfill.run("fedavg", **TINY, local_steps="none", out=tmp_path, on_round=stop)
    assert 'local_steps = "none"' in (tmp_path / "experiment.toml").read_text()
    assert fedfill.resume(tmp_path).resumed_after == 1


# ---- what can't be


def damage(folder: Path, name: str, change: Any) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("checkpoint/state.safetensors", lambda b: b[:1000], "checkpoint .* is damaged"),
        ("checkpoint/state.safetensors", lambda b: b"", "checkpoint .* is damaged"),
        ("checkpoint/state.safetensors", lambda b: b[:8] + b"x" + b[9:], "checkpoint .* is damaged"),
        ("checkpoint/state.safetensors", lambda b: tree.to_bytes([1, 2]), "checkpoint .* is damaged"),
        ("checkpoint/state.safetensors", lambda b: tree.to_bytes({"digest": "other"}), "is another experiment's"),
        ("experiment.toml", lambda b: b[: len(b) // 2] + b"\n= 3", "experiment.toml is not TOML"),
        ("experiment.toml", lambda b: b"\xff\xfe", "experiment.toml is not TOML"),
        ("experiment.toml", lambda b: b.replace(b"rounds = 5", b"rounds = 6"), "not the ones that .* was started with"),
        ("experiment.toml", lambda b: b.replace(b"rounds = 5", b"runds = 5"), "did you mean 'rounds'"),
        ("experiment.toml", lambda b: b.replace(b"rounds = 5", b"rounds = []"), "rounds: found .*a whole number"),
        ("experiment.toml", lambda b: b.replace(b'version = "', b'version = "9'), "was started with fedfill 9"),
        ("experiment.toml", lambda b: b.replace(b"[settings]", b"[setings]"), "did you mean 'settings'"),
        ("rounds.jsonl", lambda b: b.splitlines(keepends=True)[0][:50], "holds 0 rounds and the checkpoint 1"),
        ("rounds.jsonl", lambda b: b"5\n", "holds 0 rounds and the checkpoint 1"),
    ],
)
def test_damaged_unfinished_run(name: str, change: Any, sentence: str, stopped: Path) -> None:
    damage(stopped, name, change)
    before = {path: path.read_bytes() for path in stopped.rglob("*.*")}
    with pytest.raises(FedfillError, match=sentence) as refusal:
        fedfill.resume(stopped)
    assert "\n" not in str(refusal.value)
    assert {path: path.read_bytes() for path in before} == before


@pytest.fixture
def stopped(tmp_path: Path, whole: dict[str, fedfill.Result]) -> Path:
    """A run that was stopped after its first round."""
    with pytest.raises(Stop):
        fedfill.run("fedavg", **TINY, out=tmp_path, on_round=stop)
    return tmp_path


@pytest.mark.parametrize(
    "change", [lambda b: b[:100], lambda b: b"[]", lambda b: b"{}", lambda b: b.replace(b'"weights_sha256": "', b"\\0")]
)
def test_damaged_summary(change: Any, tmp_path: Path) -> None:
    options = {**TINY, "rounds": 1}
    whole = fedfill.run("fedavg", **options, out=tmp_path)
    damage(tmp_path, "summary.json", change)
    for attempt in (lambda: fedfill.resume(tmp_path), lambda: fedfill.run("fedavg", **options, out=tmp_path)):
        with pytest.raises(FedfillError, match=r"remove .* and resume the run"):
            attempt()
    (tmp_path / "summary.json").unlink()
    assert without_times(fedfill.resume(tmp_path).summary) == without_times(whole.summary)


def test_damaged_weights_of_a_finished_run(tmp_path: Path) -> None:
    options = {**TINY, "rounds": 1}
    fedfill.run("fedavg", **options, out=tmp_path)
    damage(tmp_path, "checkpoint/state.safetensors", lambda b: b[:-1] + bytes([b[-1] ^ 1]))
    state = RunDirectory(tmp_path).read_checkpoint()
    assert state is not None
    state["weights"] = {name: tensor + 1 for name, tensor in state["weights"].items()}
    RunDirectory(tmp_path).write_checkpoint(state)
    with pytest.raises(FedfillError, match="don't belong together"):
        fedfill.resume(tmp_path)


def test_a_torn_last_line_is_cut_off(stopped: Path, whole: dict[str, fedfill.Result]) -> None:
    with (stopped / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "accur')
    fedfill.resume(stopped)
    assert lines(stopped) == lines(whole["fedavg"].directory)


def test_resume_needs_a_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing", Path(__file__)):
        with pytest.raises(FedfillError, match=r"resume: .* holds no run"):
            fedfill.resume(folder)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("rounds", True, "rounds: found 'True'; allowed: a whole number"),
        ("rounds", None, "rounds: found None; allowed: a whole number"),
        ("rounds", 2.5, "rounds: found 2.5; allowed: a whole number"),
        ("rounds", "1e3", "rounds: found '1e3'; allowed: a whole number"),
        ("participation", math.inf, "participation: found inf; allowed: a finite number"),
        ("participation", 1.5, "participation: found 1.5; allowed: at most 1"),
        ("seed", -1, "seed: found -1; allowed: at least 0"),
        ("participation", math.nan, "participation: found nan; allowed: a finite number"),
        ("delta", 0, "delta: found 0; allowed: more than 0"),
        ("delta", 1, "delta: found 1; allowed: less than 1"),
        ("workers", 10**9, "workers: found 1000000000; allowed: at most 1024"),
        ("settings", 5, "settings: found 5; allowed: a table of settings"),
        ("roundz", 5, "option: unknown name 'roundz'; did you mean 'rounds'?"),
        ("zzz", 5, "option: unknown name 'zzz'; allowed: algorithm, "),
    ],
)
def test_checked_says_what_is_wrong(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(FedfillError) as refusal:
        checked(Experiment, {"algorithm": "fedavg", name: value}, "option")
    assert str(refusal.value).startswith(sentence)


def test_checked_reads_text() -> None:
    experiment = checked(Experiment, {"algorithm": "fedavg", "rounds": "7", "delta": "1e-3", "workers": "None"})
    assert (experiment.rounds, experiment.delta, experiment.workers) == (7, 1e-3, None)


# ---- from Python


class Net(nn.Module):
    """Two layers and no named parts but its own."""

    def __init__(self, features: int = 64, classes: int = 10) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(5)
        self.first, self.second = nn.Linear(features, 16), nn.Linear(16, classes)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1, generator=stream)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.flatten(1))))  # type: ignore[no-any-return]


def digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    bunch = load_digits()
    return (bunch.images * 15).astype(np.uint8), bunch.target.astype(np.int64)


PLAIN: dict[str, Any] = {"rounds": 2, "local_epochs": 1}


def test_own_arrays_and_own_module_and_resume_with_them(tmp_path: Path) -> None:
    images, labels = digits()
    own: dict[str, Any] = {"data": (images, labels), "model": Net()}
    untouched = {name: tensor.clone() for name, tensor in own["model"].state_dict().items()}
    whole = fedfill.run("fedavg", **own, **PLAIN, clients=4, out=tmp_path / "whole")
    assert whole.summary["dataset"] == "python"
    assert set(whole.weights) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in own["model"].state_dict().items())

    run = tmp_path / "run"
    with pytest.raises(Stop):
        fedfill.run("fedavg", **own, **PLAIN, clients=4, out=run, on_round=stop)
    with pytest.raises(FedfillError, match="data: this experiment's data came from Python"):
        fedfill.resume(run)
    with pytest.raises(FedfillError, match="model: this experiment's model came from Python"):
        fedfill.resume(run, data=own["data"])
    changed = images.copy()
    changed[0, 0, 0] ^= 1
    with pytest.raises(FedfillError, match="data, model or settings are not the ones"):
        fedfill.resume(run, data=(changed, labels), model=own["model"])
    other = Net()
    nn.init.zeros_(other.first.bias)
    with pytest.raises(FedfillError, match="data, model or settings are not the ones"):
        fedfill.resume(run, data=own["data"], model=other)
    result = fedfill.resume(run, **own)
    assert result.resumed_after == 1
    assert result.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_arrays_give_what_the_name_gives(tmp_path: Path) -> None:
    """The digits by name are their images times 255 / 16, rounded; the same arrays give the same bits."""
    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    by_hand = fedfill.run("fedavg", data=(images, bunch.target), clients=4, **PLAIN, out=tmp_path / "arrays")
    by_name = fedfill.run("fedavg", data="digits", clients=4, **PLAIN, out=tmp_path / "name")
    assert by_hand.summary["weights_sha256"] == by_name.summary["weights_sha256"]


def test_a_data_set_for_each_client(tmp_path: Path) -> None:
    images, labels = digits()
    parts = [(images[labels < 5], labels[labels < 5]), (images, labels), (images[:300], labels[:300])]
    result = fedfill.run("fedavg", data=parts, **PLAIN, out=tmp_path / "a")
    assert result.summary["clients"] == 3
    assert result.summary["partition"] == "given"
    counts = json.loads((tmp_path / "a" / "partition.json").read_text())["clients"]
    assert counts[0][5:] == [0] * 5
    assert fedfill.resume(tmp_path / "a", data=parts).was_finished
    with pytest.raises(FedfillError, match="clients: found 4"):
        fedfill.run("fedavg", data=parts, **PLAIN, clients=4, out=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_dataset_of_datasets(tmp_path: Path) -> None:
    images, labels = digits()
    features = datasets.Features(
        {"image": datasets.Array2D((8, 8), "uint8"), "label": datasets.ClassLabel(names=list("0123456789"))}
    )
    data = datasets.Dataset.from_dict({"image": list(images), "label": labels.tolist()}, features=features)
    result = fedfill.run("fedavg", data=data, clients=4, **PLAIN, out=tmp_path / "a")
    arrays = fedfill.run("fedavg", data=(images, labels), clients=4, **PLAIN, out=tmp_path / "b")
    assert result.summary["weights_sha256"] == arrays.summary["weights_sha256"]


class Halves:
    """A partitioner in the manner of flwr_datasets: even rows and odd rows."""

    def __init__(self) -> None:
        self.dataset: Any = None

    @property
    def num_partitions(self) -> int:
        return 2

    def load_partition(self, partition_id: int) -> Any:
        return self.dataset.select(range(partition_id, len(self.dataset), 2))


def test_a_partitioner_object_says_how_many_clients(tmp_path: Path) -> None:
    result = fedfill.run("fedavg", data="digits", partition=Halves(), **PLAIN, out=tmp_path)
    assert (result.summary["clients"], result.summary["partition"]) == (2, "python:Halves")
    with pytest.raises(FedfillError, match="partition: this experiment's partition came from Python"):
        fedfill.resume(tmp_path)
    assert fedfill.resume(tmp_path, partition=Halves()).was_finished


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Net(features=32), r"model: Net can't be evaluated on one sample of shape \[1, 8, 8\]"),
        (Net(classes=7), r"model: Net makes scores of shape \[1, 7\] for one sample; allowed: \[1, 10\]"),
        ("cnn3", "model: unknown name 'cnn3'; did you mean"),
    ],
)
def test_a_model_that_does_not_fit(model: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FedfillError, match=sentence):
        fedfill.run("fedavg", model=model, clients=4, **PLAIN, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def with_batch_norm() -> nn.Module:
    """The trial on one sample gets as far as the second batch norm, past one that follows it and a layer that draws."""
    first = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(64, 8))
    return nn.Sequential(first, nn.BatchNorm1d(8), nn.Linear(8, 2))


def with_sizes(*sizes: int) -> list[Any]:
    images = np.arange(1280, dtype=np.uint8).reshape(20, 8, 8)
    return [(images[:n], np.arange(n) % 2, images, np.arange(20) % 2) for n in sizes]


ONE = r"^On one labelled sample at a time the batch norm .*: clients with one training sample: 1 of 3 \(1\)\. Where"


@pytest.mark.parametrize(
    ("algorithm", "model"), [("fedavg", "mlp"), ("fedbn", "mlp"), ("fraug", "mlp"), ("fedavg", None)]
)
def test_a_client_with_one_sample_under_batch_norm_is_lost_and_counted(
    algorithm: str, model: str | None, tmp_path: Path
) -> None:
    given = {"data": with_sizes(20, 1, 20), "model": model or with_batch_norm(), "rounds": 1, "local_steps": 2}
    state = torch.get_rng_state()
    result = fedfill.run(algorithm, **given, out=tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(re.match(ONE, note) is not None for note in result.summary["notes"]) == 1
    (lost,) = lines(tmp_path / "run")[0]["lost"]
    assert lost["client"] == 1
    assert lost["reason"].startswith("batch norm can't be trained on one sample, but buffers=frozen or")
    frozen = fedfill.run(algorithm, **given, buffers="frozen", out=tmp_path / "frozen")
    assert frozen.summary["lost_replies"] == 0
    assert not any(re.match(ONE, note) for note in frozen.summary["notes"])


def test_trying_one_sample_leaves_the_network() -> None:
    model = with_batch_norm()
    initial = arrange("fedavg", data=with_sizes(20, 1, 20), partition="given", model=model, rounds=1).initial
    assert initial.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, initial[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("sizes", "given"),
    [((1, 1), {}), ((20, 1), {"participation": 0.5}), ((20, 20, 1), {"min_replies": 3}), ((20, 20), {"batch_size": 1})],
)
@pytest.mark.parametrize("own", [False, True])
def test_one_sample_is_refused_where_a_round_could_not_do_without(
    sizes: tuple[int, ...], given: dict[str, Any], own: bool, tmp_path: Path
) -> None:
    found = "batch_size=1" if "batch_size" in given else "clients with one training sample: "
    model = with_batch_norm() if own else "mlp"
    with pytest.raises(FedfillError, match=rf"^model: .* on one sample; found {found}.*; allowed: two samples"):
        fedfill.run("fedavg", data=with_sizes(*sizes), model=model, **given, rounds=1, out=tmp_path / "x")
    assert not list(tmp_path.iterdir())


class Contrasts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) < 2:
            raise ValueError("two are needed")
        return self.linear(x.flatten(1))


def test_a_network_that_takes_no_single_sample_for_another_reason() -> None:
    sentence = (
        r"^model: Contrasts can't be trained on one sample \(two are needed\), and client 1 has mini-batches of one"
    )
    with pytest.raises(FedfillError, match=sentence):
        fedfill.run("fedavg", data=with_sizes(20, 1, 20), model=Contrasts(), rounds=1)


FEW: dict[str, Any] = {"clients": 3, "rounds": 1, "data_fraction": 0.2, "labelled_per_client": 1, "model": "mlp"}


@pytest.mark.parametrize("algorithm", ["fedavg", "mixup"])
def test_where_all_lose_their_replies_to_batch_norm_the_run_ends_with_a_sentence(algorithm: str) -> None:
    with pytest.raises(FedfillError, match=r"^min_replies: .* \(batch norm can't be trained on one sample, but"):
        fedfill.run(algorithm, **FEW, local_steps=1)


def test_one_label_beside_samples_without_is_enough_for_fixmatch_and_semifl() -> None:
    assert fedfill.run("fixmatch", **FEW, local_steps=1).summary["lost_replies"] == 0
    assert fedfill.run("fixmatch", **FEW, local_steps=1, batch_size=1).summary["lost_replies"] == 0
    prepared = arrange("semifl", data="digits", partition="iid", **FEW)
    assert not any(note.startswith("On one labelled sample") for note in prepared.federation.notes)


@pytest.mark.parametrize(
    ("given", "epochs", "steps"),
    [
        ({}, 1, 7),
        ({"local_epochs": 3}, 3, None),
        ({"local_steps": 2}, 1, 2),
        ({"local_epochs": 3, "local_steps": 2}, 3, 2),
    ],
)
@pytest.mark.parametrize("preset", [{"local_steps": 7, "local_epochs": 1}, {"local_epochs": 1}])
def test_epochs_that_are_asked_for_stand_in_for_an_algorithms_mini_batches(
    preset: dict[str, int], given: dict[str, int], epochs: int, steps: int | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(FRAug, "paper", {"digits": preset})
    fedfill.run("fraug", model="cnn2bn", preset="paper", clients=2, rounds=1, data_fraction=0.1, **given, out=tmp_path)
    recorded = tomllib.loads((tmp_path / "experiment.toml").read_text())["settings"]
    expected = None if not given and "local_steps" not in preset else steps
    assert (recorded["local_epochs"], recorded["local_steps"]) == (epochs, expected or "none")
    fedfill.resume(tmp_path)


class InSteps(FedAvg):
    """FedAvg that counts in mini-batches."""

    name = "in-steps"

    local_steps: int = 2
    """Mini-batches in a round."""


def test_an_algorithm_that_knows_steps_alone_keeps_them(tmp_path: Path) -> None:
    fedfill.run(InSteps, clients=2, rounds=1, data_fraction=0.1, local_epochs=3, out=tmp_path)
    assert "\nlocal_steps = 2\n" in (tmp_path / "experiment.toml").read_text()


def test_a_module_without_the_named_parts(tmp_path: Path) -> None:
    with pytest.raises(FedfillError, match=r"feddpms needs the parts encoder, classifier, decoder, and Net has no"):
        fedfill.run("feddpms", model=Net(), clients=4, **PLAIN, out=tmp_path / "run")
    with pytest.raises(FedfillError, match="model setting: found latent"):
        fedfill.run("fedavg", model=Net(), clients=4, **PLAIN, latent=3, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_two_processes_do_not_share_a_folder(stopped: Path) -> None:
    holder = RunDirectory(stopped)
    holder.lock()
    with pytest.raises(FedfillError, match="another process is running in"):
        fedfill.resume(stopped)
    holder.close()
    assert fedfill.resume(stopped).resumed_after == 1
    assert os.path.exists(stopped / "summary.json")


class Noisy(Net):
    """Draws from the global generator behind the library's back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn(1) * self.training


class Hidden(Net):
    """Keeps a buffer that the state dict does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1), persistent=False)


def frozen() -> Net:
    net = Net()
    return net.requires_grad_(False)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return nn.Sequential(nn.Flatten(), torch.nn.utils.weight_norm(nn.Linear(64, 10)))


def test_a_network_with_dropout_is_taken_and_gives_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 10))
    sums = {
        fedfill.run(
            "fedavg",
            data="digits",
            model=net,
            clients=3,
            rounds=2,
            local_steps=2,
            workers=workers,
            out=tmp_path / str(workers),
        ).summary["weights_sha256"]
        for workers in (1, 2)
    }
    assert len(sums) == 1


class OnlyEvaluated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise NotImplementedError
        return self.linear(x.flatten(1))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Noisy(), "model: Noisy draws from torch's global generator"),
        (Hidden(), "model: Hidden keeps 'seen' as a buffer outside its state dict"),
        (frozen(), "model: Net has nothing to train"),
        (
            old_weight_norm(),
            r"model: Sequential can't be copied \(.*\); where .* use torch.nn.utils.parametrizations.weight_norm",
        ),
        (Net, "model: found <class .*Net'>; allowed: .* an instance of torch.nn.Module"),
        (None, "model: found None; leave it out"),
        (OnlyEvaluated(), "trained on the mini-batch of the smallest client"),
    ],
)
def test_models_whose_results_could_not_be_trusted_are_refused(model: Any, sentence: str, tmp_path: Path) -> None:
    images, labels = np.zeros((41, 8, 8), np.uint8), np.arange(41) % 10
    clients = [(images[:40], labels[:40], images, labels), (images[40:], labels[40:], images, labels)]
    with pytest.raises(FedfillError, match=sentence):
        fedfill.run("fedavg", data=clients, model=model, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_lazy_model_gets_its_shape_before_its_weights_are_taken(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10))
    result = fedfill.run("fedavg", model=net, clients=2, rounds=1, local_epochs=1, out=tmp_path / "run")
    assert result.weights["1.weight"].shape == (10, 64)


def test_a_setting_that_is_none_leaves_an_experiment_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """This digest is of the time before there was `labelled_per_client`; a release alone may change it."""
    monkeypatch.setattr("fedfill.experiment.digest.__version__", "0")
    inputs, labels = np.arange(6, dtype=np.float32)[:, None], np.arange(6) % 2
    clients = [(inputs, labels, inputs, labels)] * 2
    initial = {"weight": torch.ones(2, 1), "bias": torch.zeros(2)}

    def digest(number: int | None) -> str:
        federation = federate(clients, seed=0)
        experiment = Experiment(algorithm="fedavg", labelled_per_client=number)
        return Prepared(experiment, FedAvg(), federation, nn.Linear(1, 2), initial).digest

    assert digest(None) == "41a3ed242c72c05c"
    assert len({digest(number) for number in (None, 1, 100)}) == 3


def test_what_a_network_of_ones_own_holds_beside_its_tensors_makes_another_experiment(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        power = 1

        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor
            self.linear = nn.Linear(64, 10)
            nn.init.zeros_(self.linear.weight)

        @staticmethod
        def shaped(x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.shaped(x)) * self.factor**self.power

    class Powered(Scaled):
        power = 2

    class Reshaped(Scaled):
        @staticmethod
        def shaped(x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1).flip(1)

    Powered.__qualname__ = Reshaped.__qualname__ = Scaled.__qualname__
    Powered.__name__ = Reshaped.__name__ = Scaled.__name__
    nets = [Scaled(1.0), Scaled(1.0), Scaled(2.0), Powered(1.0), Reshaped(1.0)]
    for net in nets:
        net.linear.bias.data.zero_()
    runs = [
        fedfill.run("fedavg", model=net, clients=2, rounds=1, local_epochs=1, out=tmp_path / str(i))
        for i, net in enumerate(nets)
    ]
    digests = [tomllib.loads((run.directory / "experiment.toml").read_text())["digest"] for run in runs]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_augmentation_gives_the_same_bits_on_any_number_of_workers_and_after_a_resume(tmp_path: Path) -> None:
    plain = {**TINY, "rounds": 2, "local_steps": 2}
    options = {**plain, "augmentation": "crop_colour"}
    one = fedfill.run("fedavg", **options, workers=1, out=tmp_path / "one")
    with pytest.raises(Stop):
        fedfill.run("fedavg", **options, workers=2, out=tmp_path / "two", on_round=stop)
    assert fedfill.resume(tmp_path / "two").summary["weights_sha256"] == one.summary["weights_sha256"]
    without = fedfill.run("fedavg", **plain, out=tmp_path / "plain")
    assert without.summary["weights_sha256"] != one.summary["weights_sha256"]


def test_augmentation_of_what_is_no_image_is_refused(tmp_path: Path) -> None:
    rows = (np.zeros((60, 4), np.float32), np.arange(60) % 2)
    with pytest.raises(
        FedfillError, match=r"^augmentation: found shift with samples of shape \[4\]; allowed: none, or data of images"
    ):
        fedfill.run("fedavg", data=(*rows, *rows), clients=2, rounds=1, augmentation="shift", out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("word", ["crops", "", "true"])
def test_a_word_that_a_setting_does_not_know_is_answered_with_those_that_it_does(word: str) -> None:
    with pytest.raises(FedfillError) as error:
        checked(FedAvg, {"augmentation": word})
    allowed = "'shift', 'shift_flip', 'crop' or 'crop_colour', or none"
    assert str(error.value) == f"augmentation: found '{word}'; allowed: {allowed}"
    assert checked(FedAvg, {"augmentation": "none"}).augmentation is None


@pytest.mark.parametrize("number", [0, -1, 1.5, "many", True])
def test_a_number_of_labels_that_is_none(number: Any, tmp_path: Path) -> None:
    with pytest.raises(FedfillError, match=r"^labelled_per_client: found .*; allowed: (at least 1|a whole number)$"):
        fedfill.run("fedavg", **TINY, labelled_per_client=number, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_rounds_between_evaluations_have_no_figures_and_train_alike(tmp_path: Path) -> None:
    each = fedfill.run("fedavg", **TINY, out=tmp_path / "each")
    few = fedfill.run("fedavg", **TINY, evaluate_every=2, out=tmp_path / "few")
    assert few.curve == {t: each.curve[t] for t in (2, 4, 5)}
    assert few.summary["weights_sha256"] == each.summary["weights_sha256"]
    assert few.summary["accuracy"] == each.summary["accuracy"]
    assert few.summary["best_accuracy"] == max(few.curve.values())
    assert set(each.rounds[0]) - set(few.rounds[0]) == {
        "accuracy",
        "loss",
        "accuracy_by_class",
        "accuracy_by_client",
        "most_predicted",
        "largest_class",
        *FAIRNESS,
    }
    assert few.rounds[0]["bytes_up"] == each.rounds[0]["bytes_up"]


def test_the_round_is_chosen_among_those_that_were_evaluated(tmp_path: Path) -> None:
    result = fedfill.run(
        "fedavg", **{**TINY, "rounds": 3}, client_validation=0.2, evaluate_every=5, out=tmp_path / "run"
    )
    assert result.summary["selected_round"] == result.summary["best_round"] == 3


@pytest.mark.parametrize("number", [0, -1, "often"])
def test_rounds_between_evaluations_that_are_none(number: Any, tmp_path: Path) -> None:
    with pytest.raises(FedfillError, match=r"^evaluate_every: found .*; allowed: (at least 1|a whole number)$"):
        fedfill.run("fedavg", **TINY, evaluate_every=number, out=tmp_path / "r")


# ---- steps before the first round


class Rehearsed(FedAvg):
    """FedAvg after three steps in which clients draw numbers; the second one has something to say."""

    name = "rehearsed"

    def pretraining_steps(self) -> int:
        return 3

    def server_state(self, initial: tree.Weights) -> dict[str, tree.Tree]:
        return {**super().server_state(initial), "drawn": []}

    def pretrain(self, server: Server, step: int) -> None:
        replies = server.call([0, 2], self.train, Broadcast(server.state.weights))
        assert server.round == step - 3
        server.state.drawn = [*server.state.drawn, float(torch.rand((), generator=server.stream("drawn")))]
        server.note(replies=len(replies), drawn=server.state.drawn)
        if step == 1:
            server.warn("half of it is done")
            server.lose(1, "train", "it was not asked")


@pytest.fixture
def rehearsed(tmp_path: Path) -> Any:
    """Runs it, and remembers its records; ``stop_at`` ends the run behind a step, or behind a round (-1 is the first)."""

    def run(folder: str, stop_at: int | None = None, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
        seen: list[dict[str, Any]] = []

        def follow(record: dict[str, Any], rounds: int) -> None:
            assert rounds == 2
            seen.append(record)
            if stop_at is not None and stop_at in (record.get("step"), -record.get("round", 0)):
                raise KeyboardInterrupt

        try:
            result = fedfill.run(
                Rehearsed, clients=4, rounds=2, local_steps=1, out=tmp_path / folder, on_round=follow, **options
            )
        except KeyboardInterrupt:
            result = None
        return result, seen

    return run


def test_steps_before_the_first_round_are_in_the_summary(rehearsed: Any) -> None:
    result, seen = rehearsed("whole")
    steps = result.summary["preparation"]
    assert seen == [*steps, *result.rounds]
    assert [(step["step"], step["steps"], step["replies"]) for step in steps] == [(1, 3, 2), (2, 3, 2), (3, 3, 2)]
    assert [record["round"] for record in result.rounds] == [1, 2]
    assert json.loads((result.directory / "summary.json").read_text())["preparation"] == steps
    assert len((result.directory / "rounds.jsonl").read_text().splitlines()) == 2
    # what they cost is part of the whole
    for total in ("bytes_up", "bytes_down", "train_samples"):
        assert all(step[total] > 0 for step in steps)
        assert result.summary[total] == sum(record[total] for record in seen)
    assert result.summary["seconds"] == pytest.approx(sum(record["seconds"] for record in seen), abs=0.01)
    assert result.summary["warnings"] == ["preparation, step 2: half of it is done"]
    assert result.summary["lost_replies"] == 1


def test_they_leave_an_algorithm_without_any_as_it_was(whole: dict[str, fedfill.Result]) -> None:
    assert "preparation" not in whole["fedavg"].summary


@pytest.mark.parametrize("stop_at", [1, 2, 3, -1])
def test_a_run_that_is_stopped_goes_on_behind_the_last_step(stop_at: int, rehearsed: Any) -> None:
    whole, _ = rehearsed("whole")
    assert rehearsed("part", stop_at, workers=1)[0] is None
    again, seen = rehearsed("part", workers=2)
    first = seen[0]["step"] if stop_at in (1, 2) else 3 + seen[0]["round"]
    assert first == (stop_at + 1 if stop_at > 0 else 3 + 2)
    steps = [without_times(step) for step in again.summary["preparation"]]
    assert steps == [without_times(step) for step in whole.summary["preparation"]]
    assert without_times({**again.summary, "preparation": 0}) == without_times({**whole.summary, "preparation": 0})
    assert again.resumed_after == (1 if stop_at == -1 else 0)


def test_they_do_not_move_the_global_model(tmp_path: Path, rehearsed: Any) -> None:
    """Rounds have the draws that they have without any step before them."""
    result, _ = rehearsed("whole")
    plain = fedfill.run("fedavg", clients=4, rounds=2, local_steps=1, out=tmp_path / "plain")
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]


def test_another_program_is_another_experiment(tmp_path: Path) -> None:
    """What a user's own classes do is part of the experiment, not only their settings and weights."""
    from fedfill.algorithms.fedavg import FedAvg

    def program(factor: float) -> type[FedAvg]:
        class Mine(FedAvg):
            name = "mine"

        if factor != 1:

            class Mine(FedAvg):  # type: ignore[no-redef]
                name = "mine"

                def loss(self, model: Any, batch: Any, context: Any) -> Any:
                    return 2 * super().loss(model, batch, context)

        return Mine

    try:
        fedfill.run(program(1), clients=2, rounds=1, local_epochs=1, out=tmp_path / "run")
        with pytest.raises(FedfillError, match="holds another experiment"):
            fedfill.run(program(2), clients=2, rounds=1, local_epochs=1, out=tmp_path / "run")
        nets = [
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), kind())
            for kind in (torch.nn.ReLU, torch.nn.Tanh)
        ]
        nets[1].load_state_dict(nets[0].state_dict())
        fedfill.run("fedavg", model=nets[0], clients=2, rounds=1, local_epochs=1, out=tmp_path / "net")
        with pytest.raises(FedfillError, match="holds another experiment"):
            fedfill.run("fedavg", model=nets[1], clients=2, rounds=1, local_epochs=1, out=tmp_path / "net")
    finally:
        from fedfill.algorithms._base import _registry

        _registry.pop("mine", None)


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [(object, "algorithm: found <class 'object'>"), (3, "algorithm: found 3"), ("nope", "unknown name 'nope'")],
)
def test_what_is_no_algorithm_is_refused(algorithm: Any, sentence: str) -> None:
    with pytest.raises(FedfillError, match=sentence):
        fedfill.run(algorithm, rounds=1)


def test_an_algorithm_without_a_name_of_its_own_is_refused(tmp_path: Path) -> None:
    from fedfill.algorithms.fedavg import FedAvg

    class Nameless(FedAvg):
        pass

    with pytest.raises(FedfillError, match="Nameless has no name of its own"):
        fedfill.run(Nameless, rounds=1, out=tmp_path / "run")
    with pytest.raises(FedfillError, match=r"the name 'fedavg' of .*Thief is taken by FedAvg"):

        class Thief(FedAvg):
            name = "fedavg"


def test_a_field_without_a_guarantee_is_not_hidden_by_another_mechanism_of_the_same_field() -> None:
    from fedfill.experiment.loop import _epsilons

    rows = [("a", None), ("a", 0.0), ("b", 0.0), ("b", 2.0), ("b", 1.0)]
    assert _epsilons([{"released": name, "epsilon": epsilon} for name, epsilon in rows]) == {"a": None, "b": 2.0}


def test_validation_splits_choose_a_round(tmp_path: Path) -> None:
    options = {"data": "digits", "clients": 3, "rounds": 4, "data_fraction": 0.3, "local_epochs": 1, "batch_size": 16}
    result = fedfill.run("fedavg", **options, client_validation=0.3, out=tmp_path / "held")
    shares = [record["validation_by_client"] for record in result.rounds]
    assert all(len(each) == 3 and all(0 <= share <= 1 for share in each) for each in shares)
    means = [sum(each) / 3 for each in shares]
    chosen = result.rounds[means.index(max(means))]
    summary = result.summary
    assert summary["selected_round"] == chosen["round"]
    assert summary["selected_validation"] == pytest.approx(max(means))
    assert summary["selected_accuracy"] == chosen["accuracy"]
    assert summary["selected_accuracy_by_client"] == chosen["accuracy_by_client"]
    # nothing of the test data has a say: only validation is looked at
    moved = [{**record, "accuracy": 1 - record["accuracy"]} for record in result.rounds]
    assert selected(moved)["selected_round"] == chosen["round"]
    plain = fedfill.run("fedavg", **options, out=tmp_path / "plain")
    assert not any("selected" in name for name in plain.summary)
    assert "validation_by_client" not in plain.rounds[0]


def test_clients_without_validation_samples_have_no_say() -> None:
    rounds = [
        {"round": 1, "validation_by_client": [None, 0.5], "accuracy": 0.9, "accuracy_by_client": [None, 0.8], "mean_client_accuracy": 0.8},
        {"round": 2, "validation_by_client": [None, 0.7], "accuracy": 0.1, "accuracy_by_client": [None, 0.2], "mean_client_accuracy": 0.2},
        {"round": 3, "validation_by_client": [None, 0.7], "accuracy": 0.5, "accuracy_by_client": [None, 0.6], "mean_client_accuracy": 0.6},
    ]  # fmt: skip
    found = selected(rounds)
    assert found["selected_round"] == 2  # the first of two
    # its own figures, and neither the last round's nor the best on the test data
    assert (found["selected_accuracy"], found["selected_accuracy_by_client"]) == (0.1, [None, 0.2])
    assert (found["selected_mean_client_accuracy"], found["selected_validation"]) == (0.2, 0.7)
    assert selected([{"round": 1, "validation_by_client": [None]}]) == {}


@pytest.mark.parametrize("algorithm", ["fedavg", "fraug", "feddpms"])
def test_no_round_leaves_tensors_for_the_next_collection_of_cycles(algorithm: str, tmp_path: Path) -> None:
    """That may be many rounds away, since few objects hold the gigabytes of a large network."""
    found: list[int] = []

    def look(*_: Any) -> None:
        gc.collect()
        found.append(sum(thing.numel() for thing in gc.garbage if isinstance(thing, torch.Tensor)))
        gc.garbage.clear()

    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        fedfill.run(algorithm, clients=2, rounds=3, data_fraction=0.2, out=tmp_path, on_round=look)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert max(found[1:]) < 10  # importing optimizers leaves one number
