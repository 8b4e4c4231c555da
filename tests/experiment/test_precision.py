"""The setting `precision`: what is another experiment, what is refused before anything is written, and a run's bits."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import refused

import fedfill
from fedfill.engines.local import LocalEngine
from fedfill.experiment.loop import make_engine, make_server
from fedfill.experiment.prepare import arrange
from fedfill.training import precision

WORDS = {"data": "digits", "data_fraction": 0.3, "partition": "dirichlet:0.5", "model": "cnn2"}
SHORT: dict[str, Any] = {
    "data_fraction": 0.3,
    "clients": 3,
    "rounds": 3,
    "local_epochs": 1,
    "batch_size": 16,
    "seed": 1,
}
LOW: dict[str, Any] = {**SHORT, "model": "cnn2bn", "precision": "bfloat16", "quiet": True}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that is fast at bfloat16, as far as it says so itself."""
    monkeypatch.setattr(precision, "slowdown", lambda: 0.5)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "slowdown", lambda: 12.34)


def test_the_default_leaves_experiments_what_they_were() -> None:
    plain, named, low = (
        arrange("fedavg", **WORDS, **given) for given in ({}, {"precision": "float32"}, {"precision": "bfloat16"})
    )
    assert plain.digest == named.digest != low.digest
    assert "precision" not in plain.experiment.model_dump()
    assert low.experiment.model_dump()["precision"] == "bfloat16"


def test_a_run_in_bfloat16(fast: None, tmp_path: Path) -> None:
    """It is recorded, has the bits of any number of workers and after a resume, and comes near to float32."""
    whole = fedfill.run("fedavg", **LOW, out=tmp_path / "whole", workers=2)
    document = tomllib.loads((tmp_path / "whole" / "experiment.toml").read_text())
    assert document["precision"] == "bfloat16"
    assert {tensor.dtype for tensor in whole.weights.values() if tensor.is_floating_point()} == {torch.float32}

    class Stop(KeyboardInterrupt):
        pass

    def stop(record: dict[str, Any], rounds: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        fedfill.run("fedavg", **LOW, out=tmp_path / "stopped", workers=1, on_round=stop)
    resumed = fedfill.resume(tmp_path / "stopped", workers=1, quiet=True)
    assert not resumed.was_finished
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]

    full = fedfill.run("fedavg", **{**LOW, "precision": "float32"}, out=tmp_path / "full")
    assert full.summary["weights_sha256"] != whole.summary["weights_sha256"]
    assert full.summary["bytes_up"] == whole.summary["bytes_up"]
    assert abs(full.summary["accuracy"] - whole.summary["accuracy"]) < 0.05


def test_it_is_refused_before_anything_is_written(slow: None, tmp_path: Path) -> None:
    with refused("precision", "bfloat16", "12 times", "float32"):
        fedfill.run("fedavg", **LOW, out=tmp_path / "run")
    words = {name: value for name, value in LOW.items() if name != "seed"}
    with refused("precision", "bfloat16", "12 times"):
        fedfill.compare(["fedavg", "local"], seeds=[0], **words, out=tmp_path / "compared")
    with refused("precision", "bfloat16", "12 times"):
        fedfill.run("fedavg", **LOW, engine="flower", out=tmp_path / "rehearsed")
    assert list(tmp_path.iterdir()) == []


def test_what_is_finished_can_be_read_anywhere(fast: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fedfill.run("fedavg", **LOW, out=tmp_path)
    monkeypatch.setattr(precision, "slowdown", lambda: 12.34)
    assert fedfill.resume(tmp_path, quiet=True).was_finished
    with refused("precision", "12 times"):
        fedfill.resume(tmp_path, rounds=4, quiet=True)


def test_what_a_cluster_s_workers_are_is_theirs_to_say(
    slow: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr("fedfill.studies.run.execute", lambda prepared, *_: begun.append(prepared.experiment.engine))
    fedfill.run("fedavg", **LOW, engine="ray", ray_address="127.0.0.1:1", out=tmp_path / "run")
    with refused("precision", "12 times"):
        fedfill.run("fedavg", **LOW, engine="ray", out=tmp_path / "run")
    assert begun == ["ray"]


def test_an_unknown_precision() -> None:
    with refused("precision", "float16", "float32", "bfloat16"):
        arrange("fedavg", **WORDS, precision="float16")


def test_it_is_not_stacked() -> None:
    with refused("stack", "2", "precision=bfloat16"):
        arrange("fedavg", **WORDS, precision="bfloat16", stack=2)
    arrange("fedavg", **WORDS, precision="bfloat16", stack=1)


@pytest.mark.parametrize(("kind", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_the_server_trains_in_it_too(kind: Any, dtype: torch.dtype) -> None:
    prepared = arrange("fedavg", **WORDS, precision=kind)
    engine = make_engine(prepared, torch.device("cpu"))
    assert isinstance(engine, LocalEngine)
    try:
        for resident in (make_server(prepared, engine, torch.device("cpu"))._resident, *engine._residents):
            with resident.autocast():
                assert torch.nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == dtype
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("algorithm", "facts"),
    [("fed3r", "does not read this"), ("fraug", "all its networks in float32"), ("fedcvae", "VAEs in float32")],
)
def test_who_trains_otherwise_says_so(algorithm: str, facts: str) -> None:
    words = {**WORDS, "model": "auto"}
    (note,) = [n for n in arrange(algorithm, **words, precision="bfloat16").federation.notes if "precision" in n]
    assert facts in note
    assert not [n for n in arrange(algorithm, **words).federation.notes if "precision" in n]
