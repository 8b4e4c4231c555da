"""Federated moments: those of all rows together, what noise does to them, and a schema that scales by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from tests.engines.in_process import InProcessEngine
from tests.experiment.test_numbers import TOML as STAYS
from tests.experiment.test_numbers import stays
from tests.helpers import refused

import fedfill
from fedfill.algorithms.moments import by_bounds, moment_sums
from fedfill.data.schema import Schema, from_toml, read_schema
from fedfill.errors import FedfillError
from fedfill.experiment.loop import execute
from fedfill.experiment.prepare import arrange

TOML = """
site = "site"
[target]
column = "ill"
values = ["no", "yes"]
[columns.lab]
kind = "real"
low = 0
high = 100
[columns.day]
kind = "date"
low = 2020-01-01
high = 2029-12-31
missing = false
[columns.sex]
kind = "category"
values = ["f", "m"]
[columns.age]
kind = "integer"
low = 0
high = 120
missing = false
"""


def rows(n: int = 600) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    lab = draw.lognormal(0, 0.6, n)
    return pd.DataFrame(
        {
            "lab": np.where(draw.random(n) < 0.1, np.nan, lab), "age": draw.integers(20, 90, n), "day": "2024-05-01",
            "sex": draw.choice(["f", "m"], n), "ill": np.where(draw.random(n) < lab / 3, "yes", "no"),
            "site": draw.choice(list("abcd"), n),
        }
    )  # fmt: skip


def run(folder: Path, data: pd.DataFrame | None = None, **more: Any) -> tuple[fedfill.Result, Schema]:
    (folder.parent / "given.toml").write_text(TOML)
    options = {"schema_file": folder.parent / "given.toml", "partition": "domain", "client_test": 0.0, **more}
    result = fedfill.run("moments", data=rows() if data is None else data, out=folder, **options)
    return result, read_schema(folder / "schema.toml")


def halves(folder: Path) -> tuple[str, pd.DataFrame]:
    """A folder with training and test rows, so that it is known which are summed; and the former."""
    folder.mkdir()
    data = rows()
    data[:500].to_csv(folder / "train.csv", index=False)
    data[500:].to_csv(folder / "test.csv", index=False)
    return str(folder), data[:500]


@pytest.mark.parametrize(
    "split", [{}, {"partition": "iid", "clients": 7, "workers": 2}, {"partition": "iid", "clients": 1}]
)
def test_they_are_those_of_all_rows_whoever_holds_them(split: dict[str, Any], tmp_path: Path) -> None:
    data, train = halves(tmp_path / "data")
    result, schema = run(tmp_path / "run", data=data, **split)  # type: ignore[arg-type]
    for name in ("lab", "age"):
        column, known = schema.columns[name], train[name].dropna()
        assert column.mean == pytest.approx(
            known.mean(), abs=0.02
        )  # values are truncated to 1 / 4,096 of half the bounds
        assert column.deviation == pytest.approx(known.std(ddof=0), abs=0.02)
        assert result.summary["findings"]["columns"][name]["rows"] == len(known)
    assert schema.columns["day"] == from_toml(TOML, "").columns["day"]
    assert [*schema.columns] == ["lab", "day", "sex", "age"]
    assert result.summary["privacy"]["total_epsilon"] is None


@pytest.mark.parametrize("more", [{}, {"trust": "secure", "honest": 4}, {"trust": "server"}])
def test_noise_has_an_epsilon_and_a_deviation_is_not_the_noises(more: dict[str, Any], tmp_path: Path) -> None:
    result, schema = run(tmp_path / "run", target_epsilon=1.0, **more)
    account = result.summary["privacy"]
    if more.get("trust") != "server":
        assert account["total_epsilon_added"] == pytest.approx(1.0, rel=1e-6)
        assert account["total_epsilon"] < 2.01
    exact = run(tmp_path / "exact")[1].columns
    for name, column in schema.columns.items():
        if not column.is_number:
            continue
        assert column.mean is not None
        assert column.deviation is not None
        assert column.mean == pytest.approx(exact[name].mean, abs=12)
        assert column.deviation >= 0.8 * (exact[name].deviation or 0)
    assert (schema.columns["lab"].deviation or 0) > 3 * (exact["lab"].deviation or 0), (
        "noise is larger than what there is"
    )


def test_sums_and_their_bounds_by_hand() -> None:
    statistic = moment_sums(2, exact=False)
    whole = {name: torch.zeros(block.shape, dtype=torch.float64) for name, block in statistic.blocks.items()}
    z = torch.tensor([[0.5, -1.0, 0, 0, 1.0, 1.0], [0.25, 0.0, 0, 0, 1.0, 0.0]], dtype=torch.float64)
    statistic.add(whole, z, torch.zeros(2))
    assert {name: x.tolist() for name, x in whole.items()} == {
        "total": [0.75, -1.0], "squares": [0.3125, 1.0], "present": [2.0, 1.0],
    }  # fmt: skip
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0])] * 2).double()
    each: dict[str, list[torch.Tensor]] = {name: [] for name in statistic.blocks}
    for x in corners:
        for there in torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 2).double():
            own = {name: torch.zeros(block.shape, dtype=torch.float64) for name, block in statistic.blocks.items()}
            statistic.add(own, torch.cat([x * there, 0 * x, there])[None], torch.zeros(1))
            for name, found in own.items():
                each[name].append(found)
    for name, block in statistic.blocks.items():
        found = torch.stack(each[name])
        assert float(found.norm(dim=1).max()) == pytest.approx(block.bound.bound)
        assert float(torch.cdist(found, found).max()) == pytest.approx(block.bound.replaced)


def test_a_schema_that_scales_by_moments_gives_inputs_of_mean_0_and_deviation_1(tmp_path: Path) -> None:
    data = rows()
    _, schema = run(tmp_path / "run", data=data)
    prepared = schema.prepared(pa.Table.from_pandas(data, preserve_index=False), "")
    encoding = schema.encoding()
    inputs = encoding.scaled(encoding.values(prepared, Path("x")))
    places = {name: k for k, name in enumerate(encoding.numbers)}
    for name in ("lab", "age"):
        own = inputs[:, places[name]]
        empty = torch.tensor(data[name].isna().tolist())
        assert float(own[~empty].mean()) == pytest.approx(0, abs=0.1)
        assert float(own[~empty].std()) == pytest.approx(1, abs=0.1)
        assert float(own[empty].abs().sum()) < 1e-4, "an empty cell is the mean"
    # cells are those of the bounds, and moments of rows that are scaled by moments are the same
    given = from_toml(TOML, "")
    plain = given.encoding()
    before = plain.scaled(plain.values(given.prepared(pa.Table.from_pandas(data, preserve_index=False), ""), Path("x")))
    labels = torch.zeros(len(data), dtype=torch.int64)
    assert np.array_equal(schema.codes_of(inputs, labels), given.codes_of(before, labels))
    assert torch.allclose(by_bounds(schema, inputs, False), by_bounds(given, before, False), atol=1e-5)


def test_it_is_learnt_better(tmp_path: Path) -> None:
    data = rows(2000)
    run(tmp_path / "run", data=data)
    auc = {
        name: fedfill.run(
            "fedavg", data=data, schema_file=schema, partition="domain", model="mlp", rounds=3, local_epochs=1,
            out=tmp_path / name,
        ).summary["auc"]
        for name, schema in (("bounds", tmp_path / "given.toml"), ("moments", tmp_path / "run" / "schema.toml"))
    }  # fmt: skip
    assert auc["moments"] > auc["bounds"] + 0.02


def test_columns_that_tell_nothing(tmp_path: Path) -> None:
    """One that is always empty keeps its bounds, and one that never changes has the least deviation."""
    result, schema = run(tmp_path / "run", data=rows().assign(lab=np.nan, age=50))
    assert schema.columns["lab"].mean is None
    assert result.summary["findings"]["columns"]["lab"] == {"mean": None, "why": "no row tells it"}
    assert schema.columns["age"].mean == pytest.approx(50, rel=1e-5)
    assert schema.columns["age"].deviation == 60, "it never changes: half the way between its bounds"


@pytest.mark.parametrize("high", [10, 1000, 100_000])
def test_without_noise_they_are_exact_however_wide_the_bounds(high: int, tmp_path: Path) -> None:
    (tmp_path / "wide.toml").write_text(TOML.replace("high = 100\n", f"high = {high}\n"))
    data = rows()
    _, schema = run(tmp_path / "run", data=data, schema_file=tmp_path / "wide.toml", partition="iid", clients=1)
    seen = fedfill.run(
        "moments",
        data=data,
        schema_file=tmp_path / "given.toml",
        partition="iid",
        clients=1,
        client_test=0.0,
        out=tmp_path / "usual",
    )
    known = read_schema(seen.directory / "schema.toml").columns["lab"]
    assert schema.columns["lab"].mean == pytest.approx(
        known.mean, rel=3e-3
    )  # inputs are float32, of 1e-7 of the bounds
    assert schema.columns["lab"].deviation == pytest.approx(known.deviation, rel=3e-3)


def test_noise_is_no_mean(tmp_path: Path) -> None:
    """Of a column that no row tells, and where noise is larger than what there is."""
    for seed in range(6):
        data = rows().assign(lab=np.nan)
        result, schema = run(tmp_path / str(seed), data=data, target_epsilon=1.0, seed=seed)
        assert schema.columns["lab"].mean is None
        assert "noise" in result.summary["findings"]["columns"]["lab"]["why"]
    result, schema = run(tmp_path / "most", target_epsilon=1e-6)
    assert schema.standardised == ()
    told = run(tmp_path / "some", target_epsilon=5.0)[0].summary["findings"]["columns"]["age"]
    assert 0 < told["std_of_noise_in_mean"] < 10


def test_it_hands_out_no_model_and_its_schema_says_where_it_comes_from(tmp_path: Path) -> None:
    result, _ = run(tmp_path / "run", target_epsilon=5.0)
    for use in (lambda: fedfill.export(result, tmp_path / "model"), lambda: fedfill.predict(result, rows())):
        with pytest.raises(FedfillError, match="moments, which trains no model"):
            use()
    text = (tmp_path / "run" / "schema.toml").read_text()
    assert "target_epsilon = 5," in text
    assert "trust = site" in text
    exact, _ = run(tmp_path / "exact")
    assert "no guarantee" in (exact.directory / "schema.toml").read_text()
    # and the account of a model names it, as a condition and beside the total
    trained = fedfill.run(
        "fed3r", data=rows(), schema_file=exact.directory / "schema.toml", partition="domain", model="features", target_epsilon=3.0,
        out=tmp_path / "fed3r",
    )  # fmt: skip
    conditions = [words for entry in trained.summary["privacy"]["entries"] for words in entry["conditions"]]
    assert any("mean and deviation" in words for words in conditions)
    assert "lab, age" in str(trained.summary["privacy"])


def test_a_number_as_target_and_a_second_time(tmp_path: Path) -> None:
    (tmp_path / "stays.toml").write_text(STAYS)
    options = {"data": stays(), "partition": "domain", "client_test": 0.0}
    fedfill.run("moments", schema_file=tmp_path / "stays.toml", out=tmp_path / "once", **options)
    fedfill.run("moments", schema_file=tmp_path / "once" / "schema.toml", out=tmp_path / "twice", **options)
    once, twice = (read_schema(tmp_path / name / "schema.toml").columns["age"] for name in ("once", "twice"))
    assert once.mean == pytest.approx(twice.mean, rel=1e-4)
    assert once.deviation == pytest.approx(twice.deviation, rel=1e-4)


def test_it_says_that_it_trains_nothing(tmp_path: Path) -> None:
    (warning,) = run(tmp_path / "run")[0].summary["warnings"]
    assert "trains nothing" in warning
    assert "schema.toml" in warning


def test_nobody_compares_it(tmp_path: Path) -> None:
    (tmp_path / "given.toml").write_text(TOML)
    with refused("compare", "moments", "fedfill run moments"):
        fedfill.compare(
            ["fedavg", "moments"],
            data=rows(),
            partition="domain",
            schema_file=tmp_path / "given.toml",
            out=tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()


def test_hosts_tell_nothing_but_their_sums(tmp_path: Path) -> None:
    """No host scores the network as drawn, so that its account has the sums alone."""
    (tmp_path / "given.toml").write_text(TOML)
    options: dict[str, Any] = {
        "schema_file": tmp_path / "given.toml",
        "client_test": 0.2,
        "client_validation": 0.2,
        "target_epsilon": 1.0,
    }
    prepared = arrange("moments", data=rows(), partition="domain", model="auto", engine="flower", **options)
    parts = (
        prepared.algorithm,
        replace(prepared.federation, test=prepared.federation.test[:0]),
        prepared.model,
        prepared.initial,
    )
    places = tmp_path / "hosts"
    summary = execute(
        prepared, tmp_path / "run", connect=lambda *_: InProcessEngine(*parts, folder=places, validate_clients=True)
    ).summary
    account = summary["privacy"]
    assert {entry["released"] for entry in account["entries"]} == {"Sums.sums"} or len(account["entries"]) == 1
    assert account["total_epsilon"] is not None
    assert set(summary["accuracy_by_client"]) == {None}


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ("mean = 5.0", ("deviation",)),
        ("mean = 500.0\ndeviation = 1.0", ("500", "low to high")),
        ("mean = 5.0\ndeviation = 0.0", ("0",)),
        ("mean = nan\ndeviation = 1.0", ("nan",)),
    ],
)
def test_slips_in_a_schema_are_a_sentence(change: str, facts: tuple[str, ...]) -> None:
    with refused("schema", *facts):
        from_toml(TOML.replace("high = 100", f"high = 100\n{change}"), "x")
    with refused("schema", "integer and real"):
        from_toml(
            TOML.replace('values = ["f", "m"]', 'values = ["f", "m"]\nmean = 1.0\ndeviation = 1.0'), "schema_file: x"
        )


def test_slips_are_one_sentence_and_nothing_is_written(tmp_path: Path) -> None:
    words = TOML.replace('kind = "real"\nlow = 0\nhigh = 100', 'kind = "category"\nvalues = ["1"]')
    words = words.replace('kind = "integer"\nlow = 0\nhigh = 120', 'kind = "category"\nvalues = ["50"]')
    (tmp_path / "words.toml").write_text(words)
    for more, setting in (
        ({"schema_file": tmp_path / "words.toml"}, "schema_file"), ({"trust": "secure"}, "trust"), ({"schema_file": None}, "data"),
    ):  # fmt: skip
        with refused(setting):
            run(tmp_path / "run", **more)
        assert not (tmp_path / "run").exists()
