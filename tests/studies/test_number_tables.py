"""Tables whose target is a number: made by mst and aim, with a guarantee and without, written, measured, put beside others."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression
from tests.helpers import refused, without_mbi
from typer.testing import CliRunner

import fedfill
from fedfill.cli import app
from fedfill.data import sources
from fedfill.data.schema import Schema, from_toml
from fedfill.data.synthetic import read_table
from fedfill.runs.directory import RunDirectory
from fedfill.studies.finished import finished, made_by
from fedfill.studies.measure import measure

TOML = """
site = "ward"
[target]
column = "stay"
kind = "number"
low = 0
high = 40
bins = 10
[columns.age]
kind = "integer"
low = 0
high = 100
bins = 10
missing = false
[columns.sex]
kind = "category"
values = ["f", "m"]
missing = false
"""
MODELS = {"linear_regression", "gradient_boosting"}


def agreed() -> Schema:
    return from_toml(TOML, "schema.toml")


def stays(n: int = 600) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    age, sex = draw.integers(20, 90, n), draw.choice(["f", "m"], n)
    stay = np.clip(0.3 * age + 4 * (sex == "m") + draw.normal(0, 1, n), 0, 40)
    return pd.DataFrame({"ward": draw.choice(["a", "b", "c"], n), "age": age, "sex": sex, "stay": stay})


def options(place: Path) -> dict[str, Any]:
    (place / "schema.toml").write_text(TOML)
    stays().to_csv(place / "stays.csv", index=False)
    data = {"data": place / "stays.csv", "schema_file": place / "schema.toml"}
    return {**data, "partition": "domain", "client_test": 0.0, "classifier_epochs": 20, "quiet": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs without noise, and files of one."""
    place = tmp_path_factory.mktemp("numbers")
    for structure in ("star", "augmented"):
        fedfill.run("mst", out=place / structure, structure=structure, **options(place))
    fedfill.synthesise(place / "augmented", out=place / "made.parquet")
    return place


@pytest.mark.parametrize("structure", ["star", "augmented"])
def test_without_noise_the_table_has_the_targets_own_shares(structure: str, made: Path, tmp_path: Path) -> None:
    found = measure(made / structure, out=tmp_path).document
    assert found["columns"] == ["age", "sex", "stay"]
    assert found["marginals"]["stay"] < 0.01
    assert found["workload"]["error"] < found["workload"]["columns_apart"]
    with (tmp_path / "measures.csv").open() as file:
        lines = pd.read_csv(file)
    errors = {(a, b): error for a, b, error in zip(lines["column"], lines["other"], lines["error"], strict=True)}
    # the target with each column was counted, so that only rounding to whole rows is left
    assert max(errors["age", "stay"], errors["sex", "stay"]) < 0.05
    assert set(found["risks"]["attributes"]) == {"age", "sex", "stay"}
    assert found["class_names"] == ["stay"]


def test_the_network_learns_the_number_of_drawn_rows(made: Path) -> None:
    summary = json.loads((made / "augmented/summary.json").read_text())
    assert summary["target"] == "number"
    assert summary["r2"] > 0.7
    assert summary["rmse"] < 4


def test_models_on_synthetic_rows_are_judged_on_real_ones(made: Path, tmp_path: Path) -> None:
    found = measure(made / "made.parquet", data_dir=made, out=tmp_path).document["trained_on"]
    assert set(found["synthetic"]) == set(found["real"]) == {"rows", *MODELS}
    for figures in (figures for what in found.values() for name, figures in what.items() if name in MODELS):
        assert set(figures) == {"rmse", "r2"}
        assert figures["r2"] > 0.8
    # in the target's own unit: the noise of real rows has a deviation of 1
    assert 0.8 < found["real"]["linear_regression"]["rmse"] < 1.3
    # by scikit-learn, from the file and from the test rows as the run has held them out
    held, schema = read_table(made / "made.parquet", "measure")
    kept = sources.load("stays.csv", made, None, schema)
    x, y = held.samples.inputs.numpy(), (held.samples.labels.numpy() + 1) * 20
    test, truth = kept.test.inputs.numpy(), (kept.test.labels.numpy() + 1) * 20
    assert float(np.abs(np.sort(y) - np.sort(pq.read_table(made / "made.parquet")["stay"].to_numpy())).max()) < 1e-4
    for name, model in (("linear_regression", LinearRegression()), ("gradient_boosting", HistGradientBoostingRegressor(random_state=0))):  # fmt: skip
        said = model.fit(x, y).predict(test)
        expected = math.sqrt(((said - truth) ** 2).mean())
        assert found["synthetic"][name]["rmse"] == pytest.approx(expected, rel=0.02)
        r2 = 1 - expected**2 / truth.var()
        assert found["synthetic"][name]["r2"] == pytest.approx(r2, abs=0.01)


def test_a_file_has_numbers_within_the_bounds(made: Path) -> None:
    rows, schema = pq.read_table(made / "made.parquet"), agreed()
    assert rows.column_names == ["age", "sex", "stay"]
    numbers = rows["stay"].to_numpy()
    assert numbers.dtype == np.float64
    assert 0 <= numbers.min() < numbers.max() <= 40
    assert len(np.unique(numbers)) > 0.9 * len(numbers), "drawn within cells, and not their middles"
    real = schema.codes(pq.read_table(made / "made.parquet"), "made")[:, -1]
    held, _ = read_table(made / "made.parquet", "measure")
    assert held.origin.class_names == ("stay",)
    assert np.array_equal(real, schema.codes_of(held.samples.inputs, held.samples.labels)[:, -1])
    again = made / "again.parquet"
    assert fedfill.synthesise(made / "augmented", out=again).path.read_bytes() == (made / "made.parquet").read_bytes()


def test_the_command_tells_rmse_and_r2(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(made)
    result = CliRunner().invoke(app, ["measure", "star"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    found = json.loads((made / "star/samples/measures.json").read_text())["trained_on"]["real"]["linear_regression"]
    assert "trained on RMSE R²" in text
    assert f"real rows, linear regression {found['rmse']:#.4g} {found['r2']:.4f}" in text
    assert (made / "star/samples/measures.png").is_file()


def test_its_rows_lie_beside_the_real_ones(made: Path, tmp_path: Path) -> None:
    own = {**options(made), "rounds": 1, "local_steps": 1}
    del own["classifier_epochs"]
    fedfill.run("fedavg", out=tmp_path / "plain", **own)
    fedfill.run("fedavg", out=tmp_path / "more", extra=str(made / "made.parquet"), **own)
    counts = [json.loads((tmp_path / name / "partition.json").read_text())["clients"] for name in ("plain", "more")]
    assert (np.array(counts[1]) == np.array(counts[0]) + pq.read_table(made / "made.parquet").num_rows).all()
    (tmp_path / "other.toml").write_text(TOML.replace("high = 40", "high = 50"))
    with refused("extra", "made.parquet", "another schema"):
        fedfill.run(
            "fedavg",
            out=tmp_path / "no",
            extra=str(made / "made.parquet"),
            **{**own, "schema_file": tmp_path / "other.toml"},
        )


def test_what_a_number_does_not_have(made: Path, tmp_path: Path) -> None:
    with refused("out", "made.safetensors", "number", ".parquet"):
        fedfill.synthesise(made / "star", out=tmp_path / "made.safetensors")
    with refused("per_class", 5, "number"):
        fedfill.synthesise(made / "star", out=tmp_path / "made.parquet", per_class=5)
    with refused("per_class", 5):
        measure(made / "star", per_class=5, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_who_asks_for_so_many_of_each_class_has_them_of_each_cell(made: Path) -> None:
    place = RunDirectory(made / "star")
    run, _ = finished(place, "test", None, None)
    samples = made_by(run, place, "test", torch.device("cpu"), 5)
    codes = agreed().codes_of(samples.inputs, samples.labels)
    assert np.bincount(codes[:, -1], minlength=10).tolist() == [5] * 10


@pytest.mark.parametrize("name", ["mst", "aim"])
@pytest.mark.parametrize("trust", ["site", "secure", "server"])
def test_with_noise_under_every_trust(name: str, trust: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_mbi(monkeypatch)
    more: dict[str, Any] = {"honest": 3} if trust == "secure" else {}
    more |= {"turns": 3} if name == "aim" else {}
    result = fedfill.run(name, out=tmp_path / "run", trust=trust, target_epsilon=20, **more, **options(tmp_path))
    found = measure(result).document
    assert found["epsilon_added"] == (None if trust == "server" else pytest.approx(20, rel=0.02))
    assert found["workload"]["error"] < found["workload"]["columns_apart"]
    assert found["trained_on"]["synthetic"]["linear_regression"]["r2"] > 0.5


@pytest.mark.parametrize("structure", ["star", "tree"])
def test_every_split_gives_the_same_bits(structure: str, tmp_path: Path) -> None:
    own = options(tmp_path)
    found = [
        fedfill.run("mst", out=tmp_path / partition, structure=structure, **{**own, "partition": partition, **more})
        for partition, more in (("iid", {"clients": 4}), ("domain", {}))
    ]
    assert len({result.summary["weights_sha256"] for result in found}) == 1


def test_a_site_with_one_row_and_a_number_that_never_changes(tmp_path: Path) -> None:
    own = options(tmp_path)
    lone = stays().assign(ward=lambda rows: np.where(np.arange(len(rows)) == 7, "alone", rows["ward"]))
    result = fedfill.run("mst", out=tmp_path / "alone", **{**own, "data": lone})
    assert result.summary["r2"] > 0.5
    stays().assign(stay=30.0).to_csv(tmp_path / "stays.csv", index=False)
    same = fedfill.run("mst", out=tmp_path / "same", **own)
    found = measure(same).document["trained_on"]
    # all rows are of the cell from 28 to 32
    assert found["synthetic"]["linear_regression"]["rmse"] < 2
    assert found["real"]["linear_regression"] == {"rmse": pytest.approx(0, abs=1e-4), "r2": None}
    assert "-" in CliRunner().invoke(app, ["measure", str(tmp_path / "same")]).stdout
