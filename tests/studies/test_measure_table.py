"""Measuring synthetic tables: runs of mst with a guarantee and without, others' runs, files, copies, and slips."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from bench.same_bits import GIVEN, table, times
from PIL import Image
from tests.helpers import refused
from typer.testing import CliRunner

import fedfill
from fedfill.algorithms.mst import MST
from fedfill.cli import app
from fedfill.data import sources, synthetic
from fedfill.data.schema import Schema, read_schema
from fedfill.privacy.risk import WORDS
from fedfill.studies.assess import Real
from fedfill.studies.assess_table import require_rows
from fedfill.studies.measure import measure
from fedfill.studies.synthesise import synthesise

RISKS = ("nearest", "membership_auc", "membership_tpr", "attribute", "singling_out")


def schema(name: str = "its schema") -> Schema:
    return read_schema(GIVEN[name]())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on a table, with and without noise, of another algorithm and of another target, and files of them."""
    place = tmp_path_factory.mktemp("tables")
    table().to_csv(place / "people.csv", index=False)
    times().to_csv(place / "times.csv", index=False)
    options: dict[str, Any] = {"data": place / "people.csv", "schema_file": GIVEN["its schema"](), "quiet": True}
    fedfill.run("mst", out=place / "plain", partition="domain", client_test=0.0, structure="augmented", **options)
    fedfill.run("mst", out=place / "private", partition="iid", clients=3, target_epsilon=5.0, **options)
    fedfill.run("central", out=place / "central", rounds=1, local_steps=1, **options)
    few = {"start_round": 0, "images_per_class": 20, "inversion_steps": 2, "local_steps": 1}
    fedfill.run("fedzdas", out=place / "others", rounds=1, clients=2, partition="iid", **few, **options)
    survival = {"data": place / "times.csv", "schema_file": GIVEN["their schema"]()}
    fedfill.run("mst", out=place / "times", partition="domain", **{**options, **survival})
    fedfill.run("mst", out=place / "every", partition="domain", test_fraction=0, **options)
    fedfill.run("mst", out=place / "tenth", partition="domain", test_fraction=0.1, **options)
    for name in ("every", "tenth"):
        synthesise(place / name, out=place / f"{name}.parquet")
    synthesise(place / "plain", out=place / "made.parquet")
    synthesise(place / "plain", out=place / "each.parquet", per_class=20)
    synthesise(place / "plain", out=place / "made.safetensors", per_class=20)
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "tables"))


def real_of(place: Path, name: str = "people.csv", agreed: str = "its schema") -> Real:
    return Real.of(sources.load(str(place / name), None, None, schema(agreed)))


def test_the_command_measures_and_writes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(place)
    result = CliRunner().invoke(app, ["measure", "plain"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "320 rows, beside 320 training rows and 80 test rows" in text
    for words in (
        "synthetic rows, logistic regression", "real rows, gradient boosting", "workload error, 4 columns", "Cramér's V",
        "to the worst site", "singling out, ", f"{WORDS} Of this table: no differential-privacy guarantee.",
        "Written: plain/samples/measures.json, measures.csv, measures.png",
    ):  # fmt: skip
        assert words in text, words
    assert max(map(len, result.stdout.splitlines())) <= 100
    found = json.loads((place / "plain/samples/measures.json").read_text())
    assert f"{found['workload']['error']:.4f}" in text
    for kind in ("png", "svg"):
        assert (place / f"plain/samples/measures.{kind}").is_file()
    with Image.open(place / "plain/samples/measures.png") as picture:
        assert picture.format == "PNG"
    with (place / "plain/samples/measures.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["column"], line["other"]) for line in lines][:3] == [
        ("age", "sex"), ("age", "stage"), ("age", "died"),
    ]  # fmt: skip
    for key in ("error", "columns_apart", "test_rows"):
        assert np.mean([float(line[key]) for line in lines]) == pytest.approx(found["workload"][key])
    gaps = [abs(float(line["cramers_v_synthetic"]) - float(line["cramers_v_real"])) for line in lines]
    assert np.mean(gaps) == pytest.approx(found["workload"]["cramers_v"]["difference"])
    largest = max(lines, key=lambda line: float(line["error"]))
    assert found["workload"]["largest"]["columns"] == [largest["column"], largest["other"]]
    assert fedfill.resume(place / "plain").was_finished


def test_the_figures_of_a_run(made: Path, tmp_path: Path) -> None:
    found = measure(made / "plain", out=tmp_path).document
    assert (found["algorithm"], found["epsilon"], found["rows"]) == (
        "mst", None, {"synthetic": 320, "training": 320, "test": 80},
    )  # fmt: skip
    assert found["columns"] == ["age", "sex", "stage", "died"]
    work = found["workload"]
    assert work["error"] < work["columns_apart"], "what counts pairs beats columns apart"
    assert work["error"] <= work["largest"]["error"] <= 1
    assert max(found["marginals"].values()) < 0.01, "without noise columns are as they were"
    assert set(found["sites"]["by_site"]) == {"0", "1", "2", "3"}
    errors = {name: site["error"] for name, site in found["sites"]["by_site"].items()}
    assert errors[found["sites"]["worst"]] == max(errors.values())
    for what in ("synthetic", "real"):
        for model in ("logistic_regression", "gradient_boosting"):
            assert 0.85 < found["trained_on"][what][model]["auc"] <= 1
            assert 0 < found["trained_on"][what][model]["brier"] < 0.25
    assert found["risks"]["words"] == WORDS
    assert set(found["risks"]["attributes"]) == set(found["columns"])
    again = measure(made / "plain", out=tmp_path, ceiling=True).document
    assert again == found


def test_a_run_with_a_guarantee_says_so(made: Path, tmp_path: Path) -> None:
    found = measure(made / "private", out=tmp_path).document
    assert found["epsilon_added"] == pytest.approx(5.0, rel=1e-6)
    assert found["epsilon"] > 5
    assert "In total: " in found["privacy"]
    assert found["workload"]["error"] > 0
    assert list(found["sites"]["by_site"]) == ["client 0", "client 1", "client 2"]


def test_another_algorithms_rows_and_those_of_a_file(place: Path) -> None:
    other = measure(place / "others").document
    assert other["rows"]["training"] == 288  # each client has kept a tenth for itself
    assert other["workload"]["error"] > other["workload"]["columns_apart"]
    made = place / "made.parquet"
    # where the table lay is nobody's business, so it is looked for by its name
    assert json.loads(pq.read_schema(made).metadata[b"fedfill"])["data"] == "people.csv"
    with refused("measure", "made.parquet", "--data-dir"):
        measure(made)
    of_file, of_run = measure(made, data_dir=place).document, measure(place / "plain").document
    for key in ("algorithm", "rows", "workload", "marginals", "sites", "privacy", "epsilon", "class_names"):
        assert of_file[key] == of_run[key], key
    assert (place / "made.measures/measures.png").is_file()


@pytest.mark.parametrize(
    ("subject", "options", "setting", "facts"),
    [
        ("central", {}, "measure", ("run of central", "mst")),
        ("plain", {"per_class": 5}, "per_class", ("found 5", "shares")),
        ("plain", {"oracle": "central"}, "oracle", ("central", "plain")),
        ("made.parquet", {"per_class": 5}, "per_class", ("found 5", "made.parquet")),
        ("made.parquet", {"oracle": "central"}, "oracle", ("central", "made.parquet")),
        ("each.parquet", {}, "measure", ("each.parquet", "20 rows", "--per-class")),
        ("made.safetensors", {}, "measure", ("made.safetensors", ".parquet")),
        ("every", {}, "measure", ("every", "test_fraction 0")),
        ("every.parquet", {}, "measure", ("every.parquet", "test_fraction 0")),
        ("people.csv", {}, "measure", ("people.csv",)),
        ("nowhere.parquet", {}, "measure", ("nowhere.parquet", "fedfill synthesise")),
    ],
)
def test_slips(made: Path, subject: str, options: dict[str, Any], setting: str, facts: tuple[str, ...]) -> None:
    before = sorted(made.rglob("*"))
    if "oracle" in options:
        options = {"oracle": made / options["oracle"]}
    with refused(setting, *facts):
        measure(made / subject, **options)
    assert sorted(made.rglob("*")) == before


def test_a_file_is_measured_beside_the_test_rows_that_its_run_held_out(place: Path) -> None:
    metadata = {name: pq.read_schema(place / f"{name}.parquet").metadata[b"fedfill"] for name in ("made", "tenth")}
    assert [json.loads(text).get("test_fraction") for text in metadata.values()] == [None, 0.1]
    assert b"test_fraction" not in metadata["made"], "files are as they were"
    of_file, of_run = measure(place / "tenth.parquet", data_dir=place).document, measure(place / "tenth").document
    assert of_file["rows"] == of_run["rows"] == {"synthetic": 359, "training": 359, "test": 41}
    assert of_file["workload"] == of_run["workload"]


def without(key: bytes) -> Callable[[Any], Any]:
    return lambda rows: rows.replace_schema_metadata({k: v for k, v in rows.schema.metadata.items() if k != key})


@pytest.mark.parametrize(
    ("spoil", "facts"),
    [
        (without(b"fedfill"), ("'fedfill'", "metadata")),
        (without(b"schema"), ("'schema'", "metadata")),
        (lambda rows: rows.drop_columns(["sex"]), ("'sex'",)),
        (lambda rows: rows.replace_schema_metadata({**rows.schema.metadata, b"fedfill": b"{}"}), ("header",)),
        (lambda rows: rows.replace_schema_metadata({**rows.schema.metadata, b"schema": b"[x"}), ("measure: ", "TOML")),
        (lambda rows: rows.slice(0, 0), ("no samples",)),
    ],
)
def test_files_that_are_not_whole(place: Path, spoil: Callable[[Any], Any], facts: tuple[str, ...]) -> None:
    path = place / "made.parquet"
    rows = pq.read_table(path)
    pq.write_table(spoil(rows), path)
    with pytest.raises(fedfill.FedfillError) as caught:
        measure(path)
    assert all(fact in str(caught.value) for fact in facts), str(caught.value)
    assert not (place / "made.measures").exists()
    path.write_bytes(b"PAR1 and no more")
    with refused("measure", path, "Parquet"):
        measure(path)


def test_no_rows_to_be_measured_beside(made: Path) -> None:
    real = real_of(made)
    with refused("measure", "runs/x", "320 training and 1 test rows"):
        require_rows(replace(real, test=real.test[:1]), "measure", Path("runs/x"))


def test_a_run_that_has_made_no_rows_yet(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MST, "synthetic", lambda self, server, per_class=None: None)
    with refused("measure", "run of mst", "without synthetic"):
        measure(made / "plain", out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_read_is_what_was_drawn(made: Path) -> None:
    held, agreed = synthetic.read_table(made / "made.parquet", "measure")
    assert agreed == schema()
    rows = pq.read_table(made / "made.parquet")
    assert np.array_equal(agreed.codes_of(held.samples.inputs, held.samples.labels), agreed.codes(rows, "made"))


def test_its_rows_lie_beside_the_real_ones_of_the_same_schema(made: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 1, "local_steps": 1, "partition": "domain", "client_test": 0.0, "quiet": True}
    data = {"data": made / "people.csv", "schema_file": GIVEN["its schema"]()}
    extra = str(made / "each.parquet")
    plain = fedfill.run("fedavg", out=tmp_path / "plain", **options, **data)
    more = fedfill.run("fedavg", out=tmp_path / "more", extra=extra, **options, **data)
    counts = [json.loads((tmp_path / name / "partition.json").read_text())["clients"] for name in ("plain", "more")]
    assert (np.array(counts[1]) == np.array(counts[0]) + 20).all()  # so many of each class, for each client
    assert more.summary["weights_sha256"] != plain.summary["weights_sha256"]
    other = {"data": made / "times.csv", "schema_file": GIVEN["their schema"]()}
    with refused("extra", "each.parquet", "another schema"):
        fedfill.run("fedavg", out=tmp_path / "other", extra=extra, **options, **other)
    with refused("extra", "each.parquet", "a schema"):
        fedfill.run("fedavg", data="digits", extra=extra, out=tmp_path / "digits", rounds=1)
    with refused("extra", "nowhere.parquet", "found no file"):
        fedfill.run("fedavg", out=tmp_path / "none", extra="nowhere.parquet", **options, **data)
