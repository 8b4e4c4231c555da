"""Sweeps: every combination is run, validation splits choose, and the others' test figures go nowhere."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from bench.same_bits import GIVEN, times
from tests.helpers import refused

from fedfill.experiment.loop import execute
from fedfill.experiment.prepare import arrange
from fedfill.experiment.summary import Result
from fedfill.runs.progress import figure_of
from fedfill.statistics.survival import concordance, total_hazard
from fedfill.studies.compare import compare
from fedfill.studies.comparison import Sweep
from fedfill.studies.sweep import candidates, validated
from fedfill.training.evaluation import in_chunks

TINY: dict[str, Any] = {"data": "digits", "clients": 4, "rounds": 2, "local_epochs": 1, "seeds": [0, 1]}


@pytest.mark.parametrize(
    ("asked", "expanded"),
    [
        ("fedavg", ["fedavg"]),
        ("fedprox:mu=0.1", ["fedprox:mu=0.1"]),
        ("fedprox:mu=0.1|1", ["fedprox:mu=0.1", "fedprox:mu=1"]),
        ("a:x=1| 2 ,y=u,z=p|q", ["a:x=1,y=u,z=p", "a:x=1,y=u,z=q", "a:x=2,y=u,z=p", "a:x=2,y=u,z=q"]),
        ("feddpms:local=fedprox:mu=1|2", ["feddpms:local=fedprox:mu=1", "feddpms:local=fedprox:mu=2"]),
    ],
)
def test_every_combination(asked: str, expanded: list[str]) -> None:
    assert candidates(asked) == expanded


@pytest.mark.parametrize(
    "asked", ["fedprox:mu=1|", "fedprox:mu=|1", "fedprox:mu=1||2", "fedprox:mu=1|1", "fedprox:mu=1| 1"]
)
def test_alternatives_must_differ(asked: str) -> None:
    with refused("compare", asked):
        candidates(asked)


def test_the_highest_is_chosen_the_first_of_several() -> None:
    assert Sweep("x", {"a": 0.5, "b": 0.75, "c": 0.75}).chosen == "b"
    assert Sweep("x", {"a": None, "b": 0.1}).chosen == "b"
    assert Sweep("x", {"a": None, "b": None}).chosen == "a"


def test_the_mean_over_seeds_decides() -> None:
    one, two = (Result(Path("nowhere"), {"selected_validation": value}, [], {}) for value in (0.5, 0.75))
    assert validated([one, two]) == 0.625
    assert validated([one, None]) is None


def test_validation_chooses_and_the_test_set_is_not_looked_at(tmp_path: Path) -> None:
    asked = "fedavg:learning_rate=0.00001|0.003"
    found = compare([asked, "fedprox"], out=tmp_path, **TINY)
    row, other = found.rows
    assert row.sweep is not None
    assert other.sweep is None
    good, bad = "fedavg:learning_rate=0.003", "fedavg:learning_rate=0.00001"
    assert (row.label, row.sweep.chosen) == (good, good)
    assert found.baseline is row
    means = {
        label: sum(
            json.loads((tmp_path / f"{label.replace(':', '-')}-seed{seed}" / "summary.json").read_text())[
                "selected_validation"
            ]
            for seed in (0, 1)
        )
        / 2
        for label in (bad, good)
    }
    assert row.sweep.validation == pytest.approx(means)
    assert means[good] > means[bad]
    for name in ("comparison.csv", "curves.csv", "table.csv", "table.md", "table.tex"):
        text = (tmp_path / name).read_text()
        assert good.replace("_", r"\_") in text.replace("learning_rate", r"learning\_rate").replace("\\\\", "\\")
        assert "0.00001" not in text
    # all rows kept the same samples for validation
    assert all("validation_by_client" in result.rounds[0] for one in found.rows for result in one.finished)
    assert other.figure("selected_accuracy")[0] is not None


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"client_validation": 0.0}, ("client_validation", "0.0")),
        (
            {"algorithms": ["fedavg:batch_size=8|16", "fedavg:batch_size=16"]},
            ("compare", "fedavg:batch_size=16", "twice"),
        ),
        ({"algorithms": ["fedavg:batch_size=8|x"]}, ("batch_size", "x")),
        ({"partition": "iid", "data_fraction": 0.02, "clients": 9}, ("client_validation", "0.1")),
    ],
)
def test_slips_are_found_before_anything_runs(given: dict[str, Any], facts: tuple[str, ...], tmp_path: Path) -> None:
    with refused(*facts):
        compare(**{"algorithms": ["fedavg:batch_size=8|16"], "out": tmp_path / "out", **TINY, **given})
    assert not (tmp_path / "out").exists()


def test_progress_shows_the_validation_splits_where_there_are_any() -> None:
    assert figure_of({"round": 1, "accuracy": 0.9, "validation_by_client": [0.5, None, 0.25]}) == "validation 0.3750"
    assert figure_of({"round": 1, "accuracy": 0.9, "validation_by_client": [None]}) == "accuracy 0.9000"
    assert figure_of({"round": 1, "accuracy": 0.9}) == "accuracy 0.9000"
    assert figure_of({"round": 1, "target": "number", "accuracy": -7.6}) == "R² -7.6000"
    assert figure_of({"round": 1, "target": "survival", "accuracy": 0.9}) == "C-index 0.9000"
    assert figure_of({"round": 1}) == "not evaluated"
    assert figure_of({"step": 1}) == "preparing"


def test_times_to_an_event_are_chosen_by_the_c_index(tmp_path: Path) -> None:
    """What decides is the C-index of each candidate's model on the validation splits, as it is worked out from the model anew."""
    options: dict[str, Any] = {
        "data": times(),
        "schema_file": GIVEN["their schema"](),
        "partition": "domain",
        "model": "hazards",
    }
    options |= {"client_validation": 0.3, "client_test": 0.0, "rounds": 1, "local_epochs": 2}
    found = compare(["fedavg:learning_rate=0.1|0.0001"], seeds=[0], out=tmp_path / "out", **options)
    (row,) = found.rows
    assert row.sweep is not None
    expected = {}
    for label in row.sweep.validation:
        rate = float(label.rpartition("=")[2])
        prepared = arrange("fedavg", seed=0, learning_rate=rate, **options)
        result = execute(prepared, tmp_path / label)
        model = prepared.model
        model.load_state_dict(result.weights)
        held = [client.validation for client in prepared.federation.clients]
        indices = [
            concordance(total_hazard(in_chunks(model.eval(), part).double().log_softmax(1)), part.labels, 9).index
            for part in held
        ]
        expected[label] = statistics.fmean(index for index in indices if index is not None)
    assert row.sweep.validation == pytest.approx(expected)
    assert len(set(expected.values())) == 2
    assert row.label == max(expected, key=lambda label: expected[label])
