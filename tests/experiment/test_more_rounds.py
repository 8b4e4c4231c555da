"""More rounds for a run: the bits of one that had them from the start, or a sentence on why that can't be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.experiment.world import Stop, lines, without_times
from tests.helpers import refused

import fedfill
from fedfill.algorithms.fedavg import FedAvg
from fedfill.experiment.more_rounds import lengthen
from fedfill.experiment.prepare import arrange
from fedfill.protocol.server import Server
from fedfill.runs.directory import RunDirectory

SMALL: dict[str, Any] = {"clients": 4, "local_epochs": 1, "data_fraction": 0.3, "participation": 0.5}
PMS: dict[str, Any] = {"alpha": 5, "max_candidates": 50}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], fedfill.Result]:
    """Runs of four rounds by their algorithm."""
    folder, made = tmp_path_factory.mktemp("four"), dict[str, fedfill.Result]()

    def run(name: str) -> fedfill.Result:
        if name not in made:
            made[name] = fedfill.run(name, **SMALL, rounds=4, out=folder / name)
        return made[name]

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg after two rounds; to be copied."""
    return fedfill.run("fedavg", **SMALL, rounds=2, out=tmp_path_factory.mktemp("two") / "run").directory


@pytest.fixture
def two(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def same(run: fedfill.Result, whole: fedfill.Result) -> bool:
    """Whether two runs have the same record, figures and weights to the bit."""
    files = [result.directory / "experiment.toml" for result in (run, whole)]
    return (
        all(torch.equal(run.weights[name], tensor) for name, tensor in whole.weights.items())
        and without_times(run.summary) == without_times(whole.summary)
        and lines(run.directory) == lines(whole.directory)
        and files[0].read_text() == files[1].read_text()
    )


# cohorts of half the clients, control variates that clients keep, personal models, noise of the server
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedbn", "dpfedavg"])
def test_more_rounds_are_those_of_a_run_that_had_them_from_the_start(
    name: str, four: Callable[[str], fedfill.Result], tmp_path: Path
) -> None:
    before = fedfill.run(name, **SMALL, rounds=2, out=tmp_path)
    after = fedfill.resume(tmp_path, rounds=4)
    assert (after.resumed_after, len(after.rounds)) == (2, 4)
    assert after.summary["weights_sha256"] != before.summary["weights_sha256"]
    assert same(after, four(name))
    # from now on it is that experiment
    assert fedfill.run(name, **SMALL, rounds=4, out=tmp_path).was_finished
    with refused("out", "another experiment"):
        fedfill.run(name, **SMALL, rounds=2, out=tmp_path)


def test_twice_and_before_the_end(four: Callable[[str], fedfill.Result], tmp_path: Path) -> None:
    def stop(record: dict[str, Any], rounds: int) -> None:
        assert rounds == (3 if record["round"] == 2 else 2)
        raise Stop(record)

    with pytest.raises(Stop):
        fedfill.run("fedavg", **SMALL, rounds=2, out=tmp_path, on_round=stop)
    with pytest.raises(Stop):
        fedfill.resume(tmp_path, rounds=3, on_round=stop)
    assert same(fedfill.resume(tmp_path, rounds=4), four("fedavg"))
    assert fedfill.resume(tmp_path, rounds=4).was_finished


class Killed(BaseException):
    pass


WRITES = ["remove_summary", "write_checkpoint", "write"]
"""What changes the folder, in this order; the last one is that of experiment.toml."""


@pytest.mark.parametrize("how", ["resume", "again"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", WRITES)
def test_a_kill_between_two_writes_leaves_a_run_that_goes_on(
    at: str, when: str, how: str, two: Path, four: Callable[[str], fedfill.Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = json.loads((two / "summary.json").read_text())
    done: list[str] = []

    def watched(name: str) -> Callable[..., None]:
        real = getattr(RunDirectory, name)

        def call(self: RunDirectory, *words: Any) -> None:
            if name == "write" and words[0] != "experiment.toml":
                real(self, *words)
                return
            if (name, when) == (at, "before"):
                raise Killed
            real(self, *words)
            done.append(name)
            if name == at:
                raise Killed

        return call

    with monkeypatch.context() as patch:
        for name in WRITES:
            patch.setattr(RunDirectory, name, watched(name))
        with pytest.raises(Killed):
            fedfill.resume(two, rounds=4)
    assert done == WRITES[: WRITES.index(at) + (when == "after")]
    if how == "resume":
        result = fedfill.resume(two)
        if done == WRITES:
            assert same(result, four("fedavg"))
            return
        assert without_times(result.summary) == without_times(old)
        assert fedfill.resume(two).was_finished
    assert same(fedfill.resume(two, rounds=4), four("fedavg"))


def test_verdicts_are_on_the_new_end(tmp_path: Path) -> None:
    """A model of one round that knows nothing yet is no longer what the run ends with."""
    before = fedfill.run("fedavg", **SMALL, rounds=1, learning_rate=1.0, out=tmp_path / "a")
    assert f"accuracy {before.summary['accuracy']:.3f}" in str(before.summary["verdicts"])
    after = fedfill.resume(tmp_path / "a", rounds=2)
    assert same(after, fedfill.run("fedavg", **SMALL, rounds=2, learning_rate=1.0, out=tmp_path / "b"))
    assert f"accuracy {after.summary['accuracy']:.3f}" in str(after.summary["verdicts"])


def test_another_number_after_a_kill(
    two: Path, four: Callable[[str], fedfill.Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint then names the run with nine rounds, which never came to be."""
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "write", lambda self, name, data: _kill_at(self, name, data))
        with pytest.raises(Killed):
            fedfill.resume(two, rounds=9)
    assert same(fedfill.resume(two, rounds=4), four("fedavg"))


_write = RunDirectory.write


def _kill_at(directory: RunDirectory, name: str, data: bytes) -> None:
    if name == "experiment.toml":
        raise Killed
    _write(directory, name, data)


def test_a_round_that_was_the_last_keeps_its_evaluation(tmp_path: Path) -> None:
    fedfill.run("fedavg", **SMALL, rounds=1, evaluate_every=2, out=tmp_path / "a")
    more = fedfill.resume(tmp_path / "a", rounds=4)
    whole = fedfill.run("fedavg", **SMALL, rounds=4, evaluate_every=2, out=tmp_path / "b")
    assert (list(more.curve), list(whole.curve)) == ([1, 2, 4], [2, 4])
    assert more.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_what_was_given_stays_and_what_the_rounds_decided_does_not(tmp_path: Path) -> None:
    """Of two rounds FedDPMS takes one as preliminary ones, of three one, of four two."""
    options = {**SMALL, **PMS}
    fedfill.run("feddpms", **options, rounds=2, out=tmp_path / "open")
    with refused("rounds", 4, "preliminary_rounds", 2, 1):
        fedfill.resume(tmp_path / "open", rounds=4)
    assert fedfill.resume(tmp_path / "open").was_finished
    more = fedfill.resume(tmp_path / "open", rounds=3)
    assert same(more, fedfill.run("feddpms", **options, rounds=3, out=tmp_path / "three"))
    fedfill.run("feddpms", **options, preliminary_rounds=2, rounds=2, out=tmp_path / "given")
    more = fedfill.resume(tmp_path / "given", rounds=4)
    assert same(more, fedfill.run("feddpms", **options, preliminary_rounds=2, rounds=4, out=tmp_path / "four"))


class Scheduled(FedAvg):
    """FedAvg that looks at the number of rounds, when it is told to."""

    name = "scheduled-by-rounds"

    look_in: int = 0
    """Round that looks, from 0."""

    def round(self, server: Server, t: int) -> None:
        if t == self.look_in:
            server.note(share=t / server.rounds)
        super().round(server, t)


@pytest.mark.parametrize("look_in", [0, 1])
def test_an_algorithm_that_asks_for_the_rounds_is_refused_also_after_a_resume(look_in: int, tmp_path: Path) -> None:
    def stop(record: dict[str, Any], rounds: int) -> None:
        raise Stop(record)

    with pytest.raises(Stop):
        fedfill.run(Scheduled, **SMALL, rounds=2, look_in=look_in, out=tmp_path, on_round=stop)
    fedfill.resume(tmp_path, algorithm=Scheduled)
    with refused("rounds", 3, "scheduled-by-rounds"):
        fedfill.resume(tmp_path, algorithm=Scheduled, rounds=3)


def test_one_that_has_not_asked_yet_may_have_more(tmp_path: Path) -> None:
    fedfill.run(Scheduled, **SMALL, rounds=1, look_in=1, out=tmp_path)
    more = fedfill.resume(tmp_path, algorithm=Scheduled, rounds=2)
    assert more.rounds[1]["share"] == 0.5
    with refused("rounds", 3):
        fedfill.resume(tmp_path, algorithm=Scheduled, rounds=3)


def test_fraug_weighs_by_the_rounds_that_are_left(tmp_path: Path) -> None:
    fedfill.run("fraug", **{**SMALL, "participation": 1}, rounds=1, out=tmp_path)
    with refused("rounds", "fraug"):
        fedfill.resume(tmp_path, rounds=2)


@pytest.mark.parametrize(
    ("rounds", "facts"),
    [(1, (1, 2)), (0, (0,)), (-3, (-3,)), (2.5, (2.5,)), ("many", ("many",)), (True, ("True",))],
)
def test_numbers_that_are_none(rounds: Any, facts: tuple[Any, ...], two: Path) -> None:
    before = {path: path.read_bytes() for path in two.rglob("*.*")}
    with refused("rounds", *facts):
        fedfill.resume(two, rounds=rounds)
    assert {path: path.read_bytes() for path in two.rglob("*.*")} == before
    assert fedfill.resume(two, rounds=2).was_finished


def test_a_run_that_is_being_run_and_a_damaged_one(two: Path) -> None:
    other = RunDirectory(two)
    other.lock()
    try:
        with refused("out", two):
            fedfill.resume(two, rounds=4)
    finally:
        other.close()
    assert (two / "summary.json").exists()
    (two / "checkpoint" / "state.safetensors").write_bytes(b"torn")
    with refused("rounds", "damaged"):
        fedfill.resume(two, rounds=4)
    assert (two / "summary.json").exists()


def test_a_checkpoint_that_does_not_say_whether_the_rounds_were_asked_for(two: Path) -> None:
    directory = RunDirectory(two)
    state = directory.read_checkpoint()
    assert state is not None
    del state["asked_rounds"]
    directory.write_checkpoint(state)
    with refused("rounds", "release"):
        fedfill.resume(two, rounds=4)


def test_real_federations(two: Path) -> None:
    """A rehearsal's hosts keep states under the old digest; a deployment goes by its app."""
    prepared = arrange("fedavg", data="digits", partition="iid", model="auto", **SMALL, rounds=2, engine="flower")
    with refused("rounds", 4, two, "hosts"):
        lengthen(prepared, RunDirectory(two), 4)
    text = (two / "experiment.toml").read_text()
    (two / "deployment.toml").write_text('app = "nowhere"\nconnection = "none"\n')
    with refused("resume", "deployment"):
        fedfill.resume(two, rounds=4)
    assert (two / "experiment.toml").read_text() == text
