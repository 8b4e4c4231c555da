"""One run: killed, stopped, damaged and resumed; what comes out is what an uninterrupted run gives."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.experiment.world import EACH, TINY, Stop, lines, stop, without_times
from tests.helpers import refused

import fedfill
from fedfill import tree
from fedfill.runs.directory import RunDirectory

# A process whose children kill themselves, with no chance to tidy up, at a named moment of a round; each goes on in the
# folder of the one before, and what the kill left is copied. The parent imports all that is slow and starts no thread.
VICTIMS = """
import json, os, shutil, signal, sys
import torch
import fedfill.studies.run
from fedfill.algorithms import known_algorithms
from fedfill.data import sources
from fedfill.engines import together
from fedfill.protocol import server
from fedfill.runs import directory

known_algorithms()
torch.set_num_threads(1)
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
                before(together, "fit", second_fit)
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
    assert time.monotonic() - start < 20  # mostly far below one second; machines that run tests are shared
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


def damage(folder: Path, name: str, change: Any) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "setting", "fact"),
    [
        ("checkpoint/state.safetensors", lambda b: b[:1000], "resume", "damaged"),
        ("checkpoint/state.safetensors", lambda b: b"", "resume", "damaged"),
        ("checkpoint/state.safetensors", lambda b: b[:8] + b"x" + b[9:], "resume", "damaged"),
        ("checkpoint/state.safetensors", lambda b: tree.to_bytes([1, 2]), "resume", "damaged"),
        ("checkpoint/state.safetensors", lambda b: tree.to_bytes({"digest": "other"}), "resume", "another experiment"),
        ("experiment.toml", lambda b: b[: len(b) // 2] + b"\n= 3", "config", "not TOML"),
        ("experiment.toml", lambda b: b"\xff\xfe", "config", "not TOML"),
        ("experiment.toml", lambda b: b.replace(b"rounds = 5", b"rounds = 6"), "resume", "settings"),
        ("experiment.toml", lambda b: b.replace(b"rounds = 5", b"runds = 5"), "option", "'rounds'"),
        ("experiment.toml", lambda b: b.replace(b"rounds = 5", b"rounds = []"), "rounds", "a whole number"),
        ("experiment.toml", lambda b: b.replace(b'version = "', b'version = "9'), "resume", "fedfill 9"),
        ("experiment.toml", lambda b: b.replace(b"[settings]", b"[setings]"), "option", "'settings'"),
        ("rounds.jsonl", lambda b: b.splitlines(keepends=True)[0][:50], "resume", "0 rounds and the checkpoint 1"),
        ("rounds.jsonl", lambda b: b"5\n", "resume", "0 rounds and the checkpoint 1"),
    ],
)
def test_damaged_unfinished_run(name: str, change: Any, setting: str, fact: str, stopped: Path) -> None:
    damage(stopped, name, change)
    before = {path: path.read_bytes() for path in stopped.rglob("*.*")}
    with refused(setting, fact) as refusal:
        fedfill.resume(stopped)
    assert "\n" not in str(refusal.value)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    "change", [lambda b: b[:100], lambda b: b"[]", lambda b: b"{}", lambda b: b.replace(b'"weights_sha256": "', b"\\0")]
)
def test_damaged_summary(change: Any, tmp_path: Path) -> None:
    options = {**TINY, "rounds": 1}
    whole = fedfill.run("fedavg", **options, out=tmp_path)
    damage(tmp_path, "summary.json", change)
    for attempt in (lambda: fedfill.resume(tmp_path), lambda: fedfill.run("fedavg", **options, out=tmp_path)):
        with refused("out", tmp_path, "summary.json"):
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
    with refused("out", tmp_path, "summary.json", "checkpoint"):
        fedfill.resume(tmp_path)


def test_a_torn_last_line_is_cut_off(stopped: Path, whole: dict[str, fedfill.Result]) -> None:
    with (stopped / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "accur')
    fedfill.resume(stopped)
    assert lines(stopped) == lines(whole["fedavg"].directory)


def test_resume_needs_a_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing", Path(__file__)):
        with refused("resume", "holds no run"):
            fedfill.resume(folder)
    assert not list(tmp_path.iterdir())
