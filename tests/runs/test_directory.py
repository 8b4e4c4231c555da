"""The run directory: whole files or none, one owner, and a record that never says more than the checkpoint."""

from __future__ import annotations

import errno
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import refused

from fedfill import __version__
from fedfill.runs.directory import RunDirectory, noise_key, read_toml, to_json, write_atomically, writing
from fedfill.tree import Record

EXPERIMENT = {"version": __version__, "algorithm": "fedavg", "rounds": 2, "settings": {"local_epochs": 1}}


def full(*args: Any, **others: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(frozen=True)
class Left(Record):
    x: int


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.open(EXPERIMENT, "abc")
    directory.close()
    return directory


def test_a_new_folder_holds_the_experiment(run: RunDirectory) -> None:
    assert run.read_experiment() == {**EXPERIMENT, "digest": "abc"}
    assert run.digest() == "abc"
    assert run.read_checkpoint() is None
    assert run.summary() is None
    assert run.rounds() == run.cut_rounds(0) == []


@pytest.mark.parametrize("place", ["write", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "file"
    write_atomically(path, b"old")
    if place == "write":
        monkeypatch.setattr(os, "fdopen", full)
    else:
        monkeypatch.setattr(os, place, full)
    with refused("out", "deep/file", "No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_ctrl_c_in_a_write_leaves_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"new")
    assert not list(tmp_path.iterdir())


def test_files_are_readable_by_all(run: RunDirectory) -> None:
    assert stat.S_IMODE((run.path / "experiment.toml").stat().st_mode) == 0o644


def test_where_there_is_a_checkpoint_the_sentence_says_so(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_checkpoint({"rounds": 1})
    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: run.write_checkpoint({"rounds": 2}), lambda: run.append_round({"round": 2})):
        with refused("out", "can't write", "checkpoint", f"'fedfill resume {run.path}'"):
            write()
    assert run.read_checkpoint() == {"rounds": 1}


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing(tmp_path):
        _ = 1 / 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [float("-inf")]}])
def test_json_has_no_nan(value: Any, run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="JSON"):
        to_json(value)
    with pytest.raises(ValueError, match="JSON"):
        run.append_round({"round": 1, "value": value})


def test_checkpoint_round_trip(run: RunDirectory) -> None:
    run.write_checkpoint({"rounds": 1, "weights": {"w": torch.tensor([1.5, 2.5])}, 3: [None, True, "x"]})
    state = run.read_checkpoint()
    assert state is not None
    assert state["weights"]["w"].tolist() == [1.5, 2.5]
    assert state[3] == [None, True, "x"]  # type: ignore[index]


@pytest.mark.parametrize("kept", range(0, 200, 7))
def test_a_checkpoint_that_is_cut_short_is_damaged(kept: int, run: RunDirectory) -> None:
    run.write_checkpoint({"rounds": 1, "weights": {"w": torch.arange(3.0)}})
    path = run.path / "checkpoint" / "state.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: min(kept, len(whole) - 1)])
    with refused("resume", path, "damaged"):
        run.read_checkpoint()


def test_a_checkpoint_that_can_t_be_read_is_not_called_damaged(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_checkpoint({"rounds": 1, "left": Left(1)})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", full)
        with refused("resume", "state.safetensors", "No space left") as refusal:
            run.read_checkpoint()
        assert "damaged" not in str(refusal.value)
    with monkeypatch.context() as patch:
        patch.delitem(Record._kinds, "tests.runs.test_directory.Left")
        with refused("resume", "state.safetensors", "'tests.runs.test_directory.Left'") as refusal:
            run.read_checkpoint()
        assert "damaged" not in str(refusal.value)
    assert run.read_checkpoint() == {"rounds": 1, "left": Left(1)}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"round": 1}\n{"round": 2}\n', 2),
        ('{"round": 1}\n{"round": 2}', 2),
        ('{"round": 1}\n{"round": 2', 1),
        ('{"round": 1}\n\n{"round": 2}\n', 1),
        ('{"round": 1}\n{"round": 3}\n', 1),
        ('{"round": 1}\n{"round": 1}\n', 1),
        ('{"round": 2}\n', 0),
        ("5\n", 0),
        ("[]\n", 0),
        ("\x00\x00\n", 0),
        ("", 0),
    ],
)
def test_rounds_end_before_the_first_line_that_is_none(text: str, kept: int, run: RunDirectory) -> None:
    (run.path / "rounds.jsonl").write_text(text)
    assert [record["round"] for record in run.rounds()] == list(range(1, kept + 1))


def test_cut_rounds(run: RunDirectory) -> None:
    for number in (1, 2, 3):
        run.append_round({"round": number, "loss": 0.1})
    path = run.path / "rounds.jsonl"
    before = path.stat().st_mtime_ns
    assert len(run.cut_rounds(3)) == 3
    assert path.stat().st_mtime_ns == before  # nothing to cut, nothing written
    assert run.cut_rounds(2) == [{"round": 1, "loss": 0.1}, {"round": 2, "loss": 0.1}]
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2]
    with refused("resume", "rounds.jsonl", "2 rounds", "checkpoint 3"):
        run.cut_rounds(3)
    run.append_round({"round": 3, "loss": 0.2})
    assert run.rounds()[2] == {"round": 3, "loss": 0.2}


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\xff"])
def test_a_damaged_summary(text: str, run: RunDirectory) -> None:
    (run.path / "summary.json").write_bytes(text.encode("latin-1"))
    with refused("out", "summary.json", "damaged"):
        run.summary()


@pytest.mark.parametrize(
    "text",
    ["", 'digest = "abc"\n', 'version = "1.2"\n', 'digest = ""\nversion = "1.2"\n', 'digest = "abc"\nversion = 1\n'],
)
def test_a_damaged_experiment(text: str, run: RunDirectory) -> None:
    (run.path / "experiment.toml").write_text(text)
    missing = "version" if 'digest = "abc"' in text else "digest"
    for attempt, setting in (
        (run.read_experiment, "resume"),
        (run.digest, "out"),
        (lambda: run.check("abc"), "out"),
        (lambda: run.open(EXPERIMENT, "abc"), "out"),
    ):
        with refused(setting, "experiment.toml", f"no {missing}"):
            attempt()
    assert (run.path / "experiment.toml").read_text() == text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("experiment.toml", "file"),
        ("rounds.jsonl", "file"),
        ("summary.json", "file"),
        ("partition.json", "file"),
        (".lock", "file"),
        ("checkpoint/state.safetensors", "file"),
        ("checkpoint", "folder"),
        ("samples", "folder"),
        ("model", "folder"),
    ],
)
def test_a_folder_in_place_of_a_file_and_a_file_in_place_of_a_folder(name: str, kind: str, run: RunDirectory) -> None:
    path = run.path / name
    path.unlink(missing_ok=True)
    if kind == "file":
        path.mkdir(parents=True)
    else:
        path.write_text("")
    with refused("resume", path, f"a {kind}"):
        run.read_experiment()
    for attempt in (lambda: run.check("abc"), lambda: run.open(EXPERIMENT, "abc")):
        with refused("out", path, f"a {kind}"):
            attempt()


def test_what_cannot_be_read(run: RunDirectory) -> None:
    (run.path / "rounds.jsonl").mkdir()
    for attempt in (run.rounds, lambda: run.cut_rounds(0)):
        with refused("out", "rounds.jsonl", "Is a directory"):
            attempt()
    (run.path / "summary.json").mkdir()
    with refused("out", "summary.json", "damaged"):
        run.summary()
    with refused("resume", "File name too long"):
        RunDirectory(run.path / ("x" * 300)).read_experiment()
    (run.path / "summary.json").rmdir()
    (run.path / "rounds.jsonl").rmdir()
    (run.path / ".stray.tmp").mkdir()
    with refused("out", "can't write"):
        run.open(EXPERIMENT, "abc")
    run.close()


def test_one_owner_at_a_time(run: RunDirectory) -> None:
    run.lock()
    other = RunDirectory(run.path)
    with refused("out", "another process", run.path):
        other.open(EXPERIMENT, "abc")
    other.close()  # which must not let go of the owner's lock
    with refused("out", "another process", run.path):
        other.lock()
    run.close()
    other.open(EXPERIMENT, "abc")
    other.close()


def test_half_written_files_of_a_killed_process_are_removed(run: RunDirectory) -> None:
    run.write_checkpoint({"rounds": 1})
    left = [run.path / ".experiment.toml.xyz.tmp", run.path / "checkpoint" / ".state.safetensors.abc.tmp"]
    for path in left:
        path.write_text("half")
    run.open(EXPERIMENT, "abc")
    run.close()
    assert not any(path.exists() for path in left)
    assert run.read_checkpoint() == {"rounds": 1}


def test_a_folder_of_another_version_is_called_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "old")
    run.open({**EXPERIMENT, "version": "0.1.0"}, "abc")
    run.write_checkpoint({"rounds": 1})
    run.close()
    with refused("out", "fedfill 0.1.0", f"this is {__version__}"):
        run.check("another")


def test_a_folder_in_which_nothing_was_kept_is_the_next_experiments(run: RunDirectory) -> None:
    run.write("partition.json", b"{}")
    (run.path / ".partition.json.x.tmp").write_text("half")
    run.check("other")
    assert run.digest() == "abc", "a check writes nothing"
    run.open({**EXPERIMENT, "rounds": 7}, "other")
    run.close()
    assert run.read_experiment() == {**EXPERIMENT, "rounds": 7, "digest": "other"}


@pytest.mark.parametrize(
    "kept",
    ["checkpoint", "samples", "model", "deployment", "deployment.toml", "rounds.jsonl", "summary.json", "curves.csv", "notes.txt"],
)  # fmt: skip
def test_a_folder_in_which_anything_was_kept_is_not(kept: str, run: RunDirectory) -> None:
    place = run.path / kept
    place.write_text("") if "." in kept else place.mkdir()
    with refused("out", run.path, "another experiment"):
        run.open(EXPERIMENT, "other")
    assert run.digest() == "abc"
    run.open(EXPERIMENT, "abc")
    run.close()


def test_a_folder_in_which_another_is_in_its_first_round_is_not(run: RunDirectory) -> None:
    run.lock()
    other = RunDirectory(run.path)
    with refused("out", run.path, "another process"):
        other.open(EXPERIMENT, "other")
    assert run.digest() == "abc"
    run.close()


def test_what_was_kept_while_the_lock_was_waited_for_is_left_alone(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = RunDirectory.lock

    def late(self: RunDirectory) -> None:
        run.write_checkpoint({"rounds": 1})
        lock(self)

    monkeypatch.setattr(RunDirectory, "lock", late)
    with refused("out", run.path, "another experiment"):
        RunDirectory(run.path).open(EXPERIMENT, "other")
    monkeypatch.undo()
    assert run.digest() == "abc"
    run.open(EXPERIMENT, "abc")  # nobody holds the lock
    run.close()


def test_what_is_not_ours_is_left_alone(run: RunDirectory, tmp_path: Path) -> None:
    run.write_checkpoint({"rounds": 1})
    with refused("out", run.path, "another experiment"):
        run.open(EXPERIMENT, "other")
    assert run.digest() == "abc"
    file = tmp_path / "file"
    file.write_text("mine")
    with refused("out", f"{file} is a file"):
        RunDirectory(file).open(EXPERIMENT, "abc")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    with refused("out", foreign, "no run", "thesis.tex"):
        RunDirectory(foreign).open(EXPERIMENT, "abc")
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]
    assert file.read_text() == "mine"


@pytest.mark.parametrize("place", ["/dev/null/run", "/proc/run", "x" * 300])
def test_a_place_that_cannot_be_written(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused("out", "can't write") as refusal:
        RunDirectory(Path(place)).open(EXPERIMENT, "abc")
    assert "resume" not in str(refusal.value)  # there is nothing to resume
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("content", "fact"), [(None, "No such file"), (b"a =", "not TOML"), (b"\xff", "not TOML")])
def test_read_toml(content: bytes | None, fact: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    with refused("config", path, fact):
        read_toml(path)
    with refused("config", tmp_path, "Is a directory"):
        read_toml(tmp_path)


def test_who_comes_second_takes_the_key_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "new" / "noise.key"
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: noise_key(path, "digest"), range(16)))
    assert len(keys) == 1
    assert [file.name for file in path.parent.iterdir()] == ["noise.key"]
    assert (path.stat().st_size, path.stat().st_mode & 0o777) == (32, 0o600)
    assert noise_key(path, "digest", new=False) in keys
    assert noise_key(path, "another") not in keys
    path.unlink()
    path.mkdir()
    with refused("noise", "noise.key", "Is a directory"):
        noise_key(path, "digest")
