"""A number is learnt: by training and from sums, with its own figures, and refused by what needs classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError
from tests.helpers import refused, without_mbi
from typer.testing import CliRunner

import fedfill
from fedfill.algorithms import known_algorithms
from fedfill.algorithms.fedavg import FedAvg
from fedfill.cli import app
from fedfill.data.division import federate
from fedfill.data.schema import from_toml
from fedfill.runs.records import Summary

TOML = """
site = "ward"
[target]
column = "stay"
kind = "number"
low = 0
high = 40
[columns.age]
kind = "integer"
low = 0
high = 100
missing = false
[columns.sex]
kind = "category"
values = ["f", "m"]
missing = false
"""
TINY = {"rounds": 2, "local_steps": 3, "partition": "domain", "batch_size": 8}


def stays(n: int = 300, noise: float = 1.0) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    age, sex = draw.integers(20, 90, n), draw.choice(["f", "m"], n)
    stay = np.clip(0.3 * age + 4 * (sex == "m") + draw.normal(0, noise, n), 0, 40)
    return pd.DataFrame({"ward": draw.choice(["a", "b", "c"], n), "age": age, "sex": sex, "stay": stay})


@pytest.fixture(name="options")
def _options(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "schema.toml").write_text(TOML)
    return {"data": stays(), "schema_file": str(tmp_path / "schema.toml"), "out": tmp_path / "run", **TINY}


def test_labels_by_hand_and_splits_are_even() -> None:
    frame = stays()
    federation = federate(frame, partition="iid", clients=3, seed=0, client_test=0.2, schema=from_toml(TOML, "x"))
    assert (federation.classes, federation.class_names, federation.of_numbers) == (1, ("stay",), True)
    everything = [federation.test, *(p for c in federation.clients for p in (c.train, c.test))]
    found = sorted(torch.cat([part.labels for part in everything]).tolist())
    assert found == pytest.approx(sorted((frame["stay"] / 20 - 1).tolist()), abs=1e-6)
    assert federation.counts == [[len(c.train)] for c in federation.clients]
    # of each ward a fifth of each tenth of the bounds, to the nearest
    tenths = np.minimum(np.floor(frame["stay"] / 4), 9).astype(int)
    wards = [np.bincount(tenths[frame["ward"] == ward], minlength=10) for ward in "abc"]
    expected = sum(np.floor(whole * 0.2 + 0.5).astype(int) for whole in wards)
    assert np.bincount(federation.test.strata, minlength=10).tolist() == expected.tolist()


def test_label_skew_is_skew_of_the_bins() -> None:
    schema = from_toml(TOML, "x")
    spread = {}
    for partition in ("iid", "dirichlet:0.1"):
        federation = federate(stays(2000), partition=partition, clients=4, seed=0, schema=schema)
        spread[partition] = np.std([float(c.train.labels.mean()) for c in federation.clients])
    assert spread["dirichlet:0.1"] > 5 * spread["iid"]


def test_from_sums_it_is_the_regression_of_all_records(options: dict[str, Any]) -> None:
    result = fedfill.run("fed3r", **{**options, "model": "features"}).summary
    assert result["r2"] > 0.9
    assert result["accuracy"] == pytest.approx(result["r2"], abs=1e-5)
    assert 0.5 < result["rmse"] < 2.5  # the noise has a deviation of 1
    assert result["calibration_slope"] == pytest.approx(1, abs=0.15)
    assert result["balanced_accuracy"] is None
    assert "auc" not in result
    Summary.model_validate(result)


@pytest.mark.parametrize("more", [{}, {"trust": "secure", "honest": 3}, {"trust": "server"}])
def test_from_sums_with_noise(more: dict[str, Any], options: dict[str, Any]) -> None:
    own = {**options, "data": stays(3000), "model": "features"}
    result = fedfill.run("fed3r", **own, target_epsilon=10, **more).summary
    assert 0.7 < result["r2"] < 1
    account = result["privacy"]
    told = account["total_epsilon_added"] if more.get("trust") != "server" else None
    assert told == (None if told is None else pytest.approx(10, rel=0.02))
    wide = fedfill.run("fed3r", **{**own, "out": options["out"].parent / "wide"}, target_epsilon=1e6).summary
    exact = fedfill.run("fed3r", **{**own, "out": options["out"].parent / "exact"}, ridge_lambda=1e-4).summary
    assert wide["r2"] == pytest.approx(exact["r2"], abs=0.01)


NAMES = sorted(name for name, kind in known_algorithms().items() if kind.numbers and name != "fed3r")


@pytest.mark.parametrize("name", NAMES)
def test_whoever_says_so_learns_a_number(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    without_mbi(monkeypatch)
    optimizer = {"optimizer": "sgd", "learning_rate": 0.05} if name in ("scaffold", "mofedsam") else {}
    # its noise falls on running variances, too, and may make them negative, whatever is learnt
    frozen = {"buffers": "frozen"} if name == "dpfedavg" else {}
    result = fedfill.run(name, **options, **optimizer, **frozen)
    if known_algorithms()[name].trains:
        assert np.isfinite(result.summary["rmse"])
    else:
        assert result.summary.keys() & {"rmse", "r2"} == set()
    assert result.summary["target"] == "number"
    Summary.model_validate(json.loads((result.directory / "summary.json").read_text()))


def test_only_a_run_without_scores_has_no_accuracy(options: dict[str, Any]) -> None:
    whole = json.loads((fedfill.run("fedavg", **options).directory / "summary.json").read_text())
    with pytest.raises(ValidationError, match="missing beside scores"):
        Summary.model_validate(whole | {"accuracy": None})
    bare = {"best_accuracy": None, "accuracy_by_class": [], "accuracy_by_client": [None] * whole["clients"]}
    Summary.model_validate(whole | {"accuracy": None} | bare)


def test_it_is_learnt(options: dict[str, Any]) -> None:
    result = fedfill.run("fedavg", **{**options, "rounds": 15, "local_steps": 20})
    assert result.summary["r2"] > 0.7
    assert result.curve[15] > result.curve[1]


def test_what_needs_classes_refuses(options: dict[str, Any]) -> None:
    for name in set(known_algorithms()) - set(NAMES) - {"fed3r"}:
        if name in ("fedrs", "fedlc", "moon", "fedproto", "ccvr", "feddpms", "fedgauss", "softmax"):
            with refused("algorithm"):
                fedfill.run(name, **options)
    for setting, value in (("local", "fedlc"), ("head", "ccvr")):
        with refused(setting):
            fedfill.run("fedavg", **options, **{setting: value})
    for setting, value in (("ridge_lambda", "loo"), ("column_norm", True), ("scale", 2)):
        with refused(setting):
            fedfill.run("fed3r", **{**options, "model": "features"}, **{setting: value})
    with refused("labelled_per_client"):
        fedfill.run("fedavg", **options, labelled_per_client=5)
    assert not options["out"].exists()


def test_a_subclass_says_it_anew() -> None:
    class NeedsClasses(FedAvg):
        name = "needs-classes-still"

    assert FedAvg.numbers
    assert not NeedsClasses.numbers


@pytest.mark.parametrize("stay", [-1.0, 41.0, None, "long"])
def test_a_number_beyond_its_bounds_is_a_sentence(stay: Any, options: dict[str, Any]) -> None:
    frame = stays().astype({"stay": object})
    frame.loc[3, "stay"] = stay
    frame["stay"] = frame["stay"].astype(str) if isinstance(stay, str) else frame["stay"].astype(float)
    with refused("data"):
        fedfill.run("fedavg", **{**options, "data": frame})


def test_a_comparison_says_what_it_shows(options: dict[str, Any], tmp_path: Path) -> None:
    own = {**options, "out": tmp_path / "compare", "rounds": 1}
    found = fedfill.compare(["fedavg", "local"], seeds=[0], **own)
    header = (found.directory / "table.md").read_text()
    assert "R²" in header
    assert "RMSE" in header
    assert "| accuracy" not in header


@pytest.mark.parametrize("name", ["fed3r", "fedavg", "local"])
def test_a_model_tells_numbers_in_their_own_unit(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    more = {"model": "features"} if name == "fed3r" else {"rounds": 3}
    result = fedfill.run(name, **{**options, **more})
    whose = {"client": 1} if name == "local" else {}
    exported = fedfill.export(result, tmp_path / "model", pt2=True, data=stays())
    rows = stays()[:7]
    model = fedfill.load(exported, **whose)
    with torch.no_grad():
        raw = model.network(model.preprocess(rows))[:, 0].double()
    found = fedfill.predict(exported, rows.drop(columns="stay"), **whose)
    assert found.numbers is not None
    assert found.numbers.tolist() == pytest.approx(((raw + 1) * 20).tolist(), abs=1e-4)
    if name == "fed3r":
        assert float((found.numbers - torch.tensor(rows["stay"].to_numpy())).abs().max()) < 5
    header, first, *_ = found.table()
    assert (header, first[1]) == (("file", "row", "value"), "0")
    assert float(first[2]) == pytest.approx(float(found.numbers[0]), rel=1e-5)
    assert repr(found) == "<7 predictions of stay>"
    assert "the number stay" in repr(model)
    with refused("classes", "stay", "number"):
        _ = found.classes
    with refused("top", "stay", "number"):
        [*found.table(2)]
    card = json.loads((exported.directory / "model.json").read_text())
    assert card["run"]["r2"] == result.summary["r2"]
    assert "accuracy" not in card["run"]
    assert card["programs"][0]["output"] == "a number"
    assert card["programs"][0]["largest_difference_of_scores"] < 1e-3


def test_a_file_of_numbers_on_the_command_line(options: dict[str, Any], tmp_path: Path) -> None:
    fedfill.run("fed3r", **{**options, "model": "features"})
    stays()[:4].drop(columns="stay").to_csv(tmp_path / "new.csv", index=False)
    asked = ["predict", str(options["out"]), str(tmp_path / "new.csv"), "--out", str(tmp_path / "found.csv")]
    for _ in range(2):
        assert CliRunner().invoke(app, asked).exit_code == 0
    lines = (tmp_path / "found.csv").read_text().splitlines()
    assert (lines[0], len(lines)) == ("file,row,value", 5)
    told = " ".join(CliRunner().invoke(app, ["export", str(options["out"])]).stdout.split())
    assert "tells the number stay, from 0 to 40 where it was learnt" in told
    assert "R² 0.9" in told
