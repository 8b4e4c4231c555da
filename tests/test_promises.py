"""Sentences that the documents promise: each is made to appear, and both are held to their words."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import scripted
from typer.core import TyperCommand
from typer.testing import CliRunner

import fedfill
from fedfill import tree
from fedfill.algorithms import Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.cli import app
from fedfill.runs.directory import RunDirectory, noise_key

ROOT = Path(__file__).parents[1]
EXPERIMENT = {"algorithm": "fedavg", "rounds": 5, "version": fedfill.__version__}

Patch = pytest.MonkeyPatch


def opened(path: Path, **changes: Any) -> RunDirectory:
    """The folder of a run that is not finished."""
    run = RunDirectory(path)
    run.open({**EXPERIMENT, **changes}, "abc")
    run.close()
    return run


def interrupted(run: Path, patch: Patch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    patch.setattr(TyperCommand, "invoke", interrupt)
    other = CliRunner().invoke(app, ["predict", "model", "photo.png"])
    assert (other.exit_code, other.stderr) == (130, "fedfill: stopped\n")  # nothing that could go on
    result = CliRunner().invoke(app, ["run", "fedavg"])
    assert result.exit_code == 130
    raise RuntimeError(result.stderr.strip())


def on_a_full_disk(run: Path, patch: Patch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    directory = opened(run)
    directory.write_checkpoint({"rounds": 1})
    patch.setattr(os, "fsync", full)
    directory.write_checkpoint({"rounds": 2})


def without_replies(run: Path, patch: Patch) -> None:
    def answer(i: int, message: Any, t: int) -> Update:
        if i == 0:
            return Update({"w": torch.zeros(1)}, 10)
        raise RuntimeError("boom")

    server, engine = scripted(clients=3, weights={"w": torch.zeros(1)})
    server._min_replies = 2
    engine.script["train"] = answer
    FedAvg().round(server, 0)


def diverged(run: Path, patch: Patch) -> None:
    server, engine = scripted(clients=3, weights={"w": torch.zeros(1)})
    engine.script["train"] = lambda i, message, t: Update({"w": torch.tensor([torch.nan])}, 10)
    FedAvg().round(server, 0)


def of_another_version(run: Path, patch: Patch) -> None:
    opened(run, version="0.1.0")
    fedfill.resume(run)


def without_its_key(run: Path, patch: Patch) -> None:
    place = run.with_name("run.noise.key")
    noise_key(place, "abc")
    place.unlink()
    noise_key(place, "abc", new=False)


def from_an_unfinished_run(run: Path, patch: Patch) -> None:
    opened(run)
    fedfill.run("fedavg", start_from=run)


def with_a_slip(run: Path, patch: Patch) -> None:
    fedfill.run("fedavg", learning_rat=1)


def pooled_on_flower(run: Path, patch: Patch) -> None:
    fedfill.run("central", engine="flower", out=run)


def of_unknown_bytes(run: Path, patch: Patch) -> None:
    data = tree.to_bytes(Update({"w": torch.zeros(1)}, 10))
    patch.delitem(tree.Record._kinds, next(kind for kind, known in tree.Record._kinds.items() if known is Update))
    tree.from_bytes(data)


@pytest.mark.parametrize(
    ("trigger", "sentence", "document", "promise"),
    [
        (
            interrupted,
            (
                "fedfill: stopped; finished rounds are kept, and the same command with the same --out or "
                "'fedfill resume' goes on from there"
            ),
            "docs/runs.md",
            "A run can be stopped at any moment, and `fedfill resume RUN` ends it with the same bits.",
        ),
        (
            without_replies,
            (
                "min_replies: in round 1 1 of 3 clients gave a good reply to 'train', but 2 were needed "
                "(RuntimeError: boom); finished rounds are kept, and 'fedfill resume' goes on from there"
            ),
            "docs/engines.md",
            (
                "With fewer good replies than `--min-replies` (1) to a whole cohort the run ends. "
                "`fedfill resume` goes on from its last checkpoint."
            ),
        ),
        (
            on_a_full_disk,
            (
                "out: can't write {run}/checkpoint/state.safetensors (No space left on device); the last checkpoint is "
                "intact: make room, then 'fedfill resume {run}' goes on from there"
            ),
            "docs/runs.md",
            "A kill at any moment leaves a folder that goes on",
        ),
        (
            diverged,
            "training diverged: in round 1 every client's reply held a NaN or an infinity; try a smaller learning_rate",
            "docs/words.md",
            "training runs away, until values are no numbers any more (NaN).",
        ),
        (
            of_another_version,
            f"resume: {{run}} was started with fedfill 0.1.0, and this is {fedfill.__version__}",
            "docs/engines.md",
            "A run of another version of fedfill is refused in one sentence",
        ),
        (
            without_its_key,
            (
                "noise: the key {run}.noise.key is gone, from which this run's noise came; put it back, or start in "
                "a new folder"
            ),
            "SECURITY.md",
            "Beside the server's run directory NAME lies `NAME.noise.key`",
        ),
        (
            from_an_unfinished_run,
            (
                "start_from: {run} is not finished (0 of 5 rounds); allowed: a finished run, and 'fedfill resume {run}' "
                "goes on with this one"
            ),
            "docs/runs.md",
            "* **Refused.** A run that is not finished",
        ),
        (
            with_a_slip,
            "setting: fedavg has no 'learning_rat'; did you mean 'learning_rate'?",
            "README.md",
            "A slip gets one sentence.",
        ),
        (
            pooled_on_flower,
            "engine: found flower with algorithm=central, which is no federation of hosts; allowed: local and ray",
            "docs/engines.md",
            "`central` pools all data in one place and is refused on `flower`.",
        ),
        (
            of_unknown_bytes,
            "these bytes hold a record of the unknown kind 'fedfill.algorithms._messages.Update'",
            "SECURITY.md",
            "Only records that the program has declared are ever built from such bytes; anything else is refused.",
        ),
    ],
)
def test_promised_sentences(
    trigger: Callable[[Path, Patch], None], sentence: str, document: str, promise: str, tmp_path: Path,
    monkeypatch: Patch,
) -> None:  # fmt: skip
    run = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(Exception) as caught:  # noqa: PT011  whatever the trigger raises
        trigger(run, patch)
    assert str(caught.value) == sentence.format(run=run)
    assert " ".join(promise.split()) in " ".join((ROOT / document).read_text().split())
