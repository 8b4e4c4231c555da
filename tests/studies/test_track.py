"""Trackers: real ones, which get the figures of each round."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers import refused

import fedfill
from fedfill.runs.progress import both
from fedfill.studies.track import numbers, track

TINY: dict[str, Any] = {"data": "digits", "clients": 3, "rounds": 2, "local_epochs": 1, "data_fraction": 0.3}


def test_the_figures_of_a_round() -> None:
    record = {
        "round": 3, "accuracy": 0.5, "loss": 1, "accuracy_by_class": [0.5], "mean_client_accuracy": None, "lost": [],
        "privacy": {"total_epsilon": 3.0},
    }  # fmt: skip
    assert numbers(record) == {"accuracy": 0.5, "loss": 1.0, "epsilon": 3.0}
    assert "epsilon" not in numbers({**record, "privacy": {"total_epsilon": None}})


def test_tensorboard_has_them(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = fedfill.run("fedavg", **TINY, out=tmp_path / "run", on_round=track("tensorboard", "fed avg:x", tmp_path))
    found = events.EventAccumulator(str(tmp_path / "tensorboard" / "fed-avg-x")).Reload()
    shown = {event.step: event.value for event in found.Scalars("accuracy")}
    assert shown == pytest.approx({record["round"]: record["accuracy"] for record in result.rounds})


def test_mlflow_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    follow = track("mlflow", "run", tmp_path)
    result = fedfill.run("fedavg", **TINY, out=tmp_path / "run", on_round=follow)
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'fedfill'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    shown = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "accuracy")}
    assert shown == {record["round"]: record["accuracy"] for record in result.rounds}


def test_mlflow_has_each_run_of_a_comparison_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    options = {**TINY, "optimizer": "sgd", "out": tmp_path / "runs", "seeds": [0]}
    for _ in range(2):  # the second time finished runs are read, and the one that diverges comes first
        fedfill.compare(
            ["fedavg:learning_rate=1e30", "fedavg", "fedprox"],
            on_run=lambda label, seed: track("mlflow", label, tmp_path),
            **options,
        )
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'fedfill'")
    runs = client.search_runs([experiment.experiment_id])
    finished = sorted(run.info.run_name for run in runs if run.info.status == "FINISHED")
    assert finished == ["fedavg", "fedprox"]


def test_all_three_begin_with_the_first_round_and_end_with_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    run = SimpleNamespace(log=lambda figures, step: seen.append((step, figures)), finish=lambda: seen.append("end"))
    begin = {"init": lambda **given: seen.append(given["name"]) or run}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(**begin))
    follow = track("wandb", "a:b", tmp_path)
    follow({"step": 1, "steps": 1, "loss": 2.0}, 2)
    assert seen == []  # so a run that is read leaves nothing
    for number in (1, 2):
        follow({"round": number, "accuracy": number / 4}, 2)
    assert seen == ["a-b", (1, {"accuracy": 0.25}), (2, {"accuracy": 0.5}), "end"]


def test_an_unknown_or_missing_tracker_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with refused("track", "tensorbord", "tensorboard"):
        track("tensorbord", "x", tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refused("track", "wandb", "fedfill[wandb]"):
        track("wandb", "x", tmp_path)


def test_two_callbacks_are_one() -> None:
    seen: list[str] = []
    follow = both(lambda record, rounds: seen.append("a"), lambda record, rounds: seen.append("b"))
    assert follow is not None
    follow({}, 1)
    assert seen == ["a", "b"]
