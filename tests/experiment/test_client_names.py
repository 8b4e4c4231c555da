"""What clients are called in the figures of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import refused

import fedfill
from fedfill.experiment.verdicts import LEFT_BEHIND, of_run

INPUTS = np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32)
LABELS = np.arange(120) % 2
ONE: dict[str, Any] = {"rounds": 1, "workers": 1, "quiet": True}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"clients": 3, "partition": "iid"}, ["client 0", "client 1", "client 2"]),
        ({"partition": {"north": range(50), "south": range(50, 96)}}, ["north", "south"]),
        ({"partition": [range(50), range(50, 96)]}, ["client 0", "client 1"]),
        ({"partition": "domain", "data": {"b": (INPUTS[:60], LABELS[:60]), "a": (INPUTS[60:], LABELS[60:])}}, ["b", "a"]),
        (
            {"partition": "domain:2", "data": {"b": (INPUTS[:60], LABELS[:60]), "a": (INPUTS[60:], LABELS[60:])}},
            ["0 b", "1 b", "2 a", "3 a"],
        ),
    ],
)  # fmt: skip
def test_clients_are_called_by_their_names(options: Any, names: list[str], tmp_path: Path) -> None:
    found = fedfill.run("fedavg", **{"data": (INPUTS, LABELS), **options, **ONE}, out=tmp_path / "run")
    assert found.summary["client_names"] == names
    frame = found.by_client()
    assert list(frame.index) == names
    assert frame["accuracy"].tolist() == found.summary["accuracy_by_client"]
    assert frame["own_test_samples"].tolist() == found.summary["own_test_samples"]


def test_a_client_s_model_is_found_by_its_name(tmp_path: Path) -> None:
    given = {"north": range(50), "south": range(50, 96)}
    run = fedfill.run("local", data=(INPUTS, LABELS), partition=given, **ONE, out=tmp_path / "run")
    assert fedfill.load(run, client="south").client == fedfill.load(run, client=1).client == "1 south"
    assert "1 south" in fedfill.report(run).read_text()


@pytest.mark.parametrize("names", [("a", " a"), ("a", ""), ("a", 1.5)])
def test_names_that_are_none(names: Any, tmp_path: Path) -> None:
    given = dict(zip(names, (range(50), range(50, 96)), strict=True))
    with refused("partition"):
        fedfill.run("fedavg", data=(INPUTS, LABELS), partition=given, **ONE, out=tmp_path / "run")


def test_who_is_left_behind_has_a_name() -> None:
    figures = {
        "algorithm": "fedavg", "accuracy": 0.9, "accuracy_by_class": [0.9, 0.9], "largest_class": 0.5, "balanced_accuracy": 0.9,
        "accuracy_by_client": [0.9, 0.9, 0.1], "own_test_samples": [99, 99, 99], "client_names": ["a", "b", "south"],
        "best_accuracy": 0.9, "best_round": 1, "personal": False, "mean_client_accuracy": 0.63, "loss": 0.1, "rounds": 1,
    }  # fmt: skip
    (said,) = [verdict.sentence for verdict in of_run(figures, []) if verdict.kind == LEFT_BEHIND]
    assert said.startswith("south is left behind")
