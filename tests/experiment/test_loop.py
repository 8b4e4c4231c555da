"""The loop: rounds, evaluation, checkpoints, what a run does on any number of workers."""

from __future__ import annotations

import gc
import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.experiment.world import EACH, TINY, Stop, lines, stop, without_times
from tests.helpers import refused

import fedfill
from fedfill import tree
from fedfill.algorithms import Broadcast
from fedfill.algorithms.fedavg import FedAvg
from fedfill.protocol.server import Server
from fedfill.runs.directory import RunDirectory
from fedfill.training.evaluation import FAIRNESS


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


@pytest.mark.parametrize("limit", ["checkpoint", "rounds"])
def test_full_disk_leaves_the_last_checkpoint(limit: str, whole: dict[str, fedfill.Result], tmp_path: Path) -> None:
    """The kernel refuses what goes beyond a size: a checkpoint, or the second half of a line."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(record: dict[str, Any], rounds: int) -> None:
        size = 30_000 if limit == "checkpoint" else (tmp_path / "rounds.jsonl").stat().st_size + 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    try:
        with refused("out", "can't write", "File too large", f"'fedfill resume {tmp_path}'"):
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


def test_a_checkpoint_without_what_the_algorithm_keeps_is_another_ones(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        fedfill.run("scaffold", **TINY, out=tmp_path, on_round=stop)
    place = RunDirectory(tmp_path)
    whole = place.read_checkpoint()
    assert whole is not None
    last = max(whole["clients"])
    cases = [("the server", name) for name in whole["server"]] + [
        (f"client {last}", name) for name in whole["clients"][last]
    ]
    assert len(cases) > 2
    for who, name in cases:
        part = tree.copy(whole)
        state = part["server"] if who == "the server" else part["clients"][last]
        state["other"] = state.pop(name)
        place.write_checkpoint(part)
        with refused("resume", "another state of fedfill", who, f"'{name}'", "scaffold"):
            fedfill.resume(tmp_path)
    place.write_checkpoint(whole)
    assert fedfill.resume(tmp_path).resumed_after == 1


def test_samples_are_drawn_where_the_algorithm_has_some(whole: dict[str, fedfill.Result]) -> None:
    assert not (whole["fedavg"].directory / "samples").exists()
    pictures = list((whole["feddpms"].directory / "samples").iterdir())
    assert [picture.name for picture in pictures] == ["round-0005.png"]
    assert pictures[0].read_bytes().startswith(b"\x89PNG")


def test_two_processes_do_not_share_a_folder(stopped: Path) -> None:
    holder = RunDirectory(stopped)
    holder.lock()
    with refused("out", "another process", stopped):
        fedfill.resume(stopped)
    holder.close()
    assert fedfill.resume(stopped).resumed_after == 1
    assert os.path.exists(stopped / "summary.json")


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
    with refused("augmentation", "shift", "[4]"):
        fedfill.run("fedavg", data=(*rows, *rows), clients=2, rounds=1, augmentation="shift", out=tmp_path / "r")
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


@pytest.mark.parametrize("number", [0, -1, "often"])
def test_rounds_between_evaluations_that_are_none(number: Any, tmp_path: Path) -> None:
    with refused("evaluate_every", "found", "allowed"):
        fedfill.run("fedavg", **TINY, evaluate_every=number, out=tmp_path / "r")


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
    assert max(found[1:]) == 0
