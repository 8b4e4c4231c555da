"""Schemas: cells by hand, there and back, tables read by them, and slips in one sentence."""

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from bench.same_bits import times
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import refused

import fedfill
from fedfill.data.schema import Schema, from_document, from_toml, read_schema
from fedfill.data.schema_columns import Column
from fedfill.deployment.app import PACKAGE, init_app
from fedfill.deployment.host_data import load_host
from fedfill.deployment.programs import read_task

TOML = """
site = "hospital"

[target]
column = "died"
values = ["no", "yes"]

[columns.age]
kind = "integer"
low = 18
high = 100
bins = 4

[columns.sex]
kind = "category"
values = ["f", "m"]
missing = false

[columns.stage]
kind = "ordered"
values = ["low", "middle", "high"]

[columns.bmi]
kind = "real"
low = 10
high = 60
bins = 5

[columns.admitted]
kind = "date"
low = 2020-01-01
high = 2020-12-31
bins = 12
"""
ROWS = pa.table(
    {
        "age": [18, 100, None, 7, 59],
        "sex": ["f", "m", "x", "f", "m"],
        "stage": ["low", "high", None, "middle", "odd"],
        "bmi": [10.0, 60.0, float("nan"), 19.99, 20.0],
        "admitted": ["2020-01-01", "2020-12-31", "", "2020-06-30 12:00", None],
        "died": ["no", "yes", "yes", "no", "no"],
        "hospital": ["north", "south", "north", "south", "north"],
    }
)


def agreed() -> Schema:
    return from_toml(TOML, "schema.toml")


def people(n: int = 240, seed: int = 0) -> pd.DataFrame:
    """Rows of three hospitals, some cells of which are empty."""
    draw = np.random.default_rng(seed)
    age = draw.integers(18, 95, n).astype(float)
    stage = draw.choice(np.array(["low", "middle", "high", None], dtype=object), n)
    died = np.where(age + 20 * (stage == "high") + draw.normal(0, 8, n) > 62, "yes", "no")
    age[::17] = np.nan
    return pd.DataFrame(
        {
            "hospital": draw.choice(["north", "south", "east"], n), "age": age, "sex": draw.choice(["f", "m"], n),
            "stage": stage, "bmi": draw.normal(26, 4, n).round(1),
            "admitted": [date(2020, 1 + k % 12, 3) for k in range(n)], "died": died,
        }
    )  # fmt: skip


def test_cells_by_hand() -> None:
    # 83 whole numbers in 4 cells, of 20.75: from 18, 39, 60 and 81 on; five cells of 10; months of a leap year
    expected = np.array(
        [
            [0, 0, 0, 0, 0, 0],
            [3, 1, 2, 4, 11, 1],
            [4, 2, 3, 5, 12, 1],  # empty: the last cell of each; a word that nobody knows is "other"
            [0, 0, 1, 0, 5, 0],  # 7 counts as 18
            [1, 1, 3, 1, 12, 0],
        ]
    )
    assert agreed().codes(ROWS, "data").tolist() == expected.tolist()
    assert agreed().sizes == (5, 3, 4, 6, 13, 2)
    assert agreed().names == ("age", "sex", "stage", "bmi", "admitted", "died")


def test_inputs_by_hand() -> None:
    schema = agreed()
    encoding = schema.encoding()
    inputs = encoding.scaled(encoding.values(schema.prepared(ROWS, "data"), Path("x")))
    assert encoding.numbers[:4] == ("age", "age is missing", "stage", "stage is missing")
    first, third = inputs[0].tolist(), inputs[2].tolist()
    assert first == [-1, 0, -1, 0, -1, 0, -1, 0, 1, 0, 0]  # age, stage, bmi, day, each with its indicator; f, m, other
    assert third == [0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 1]
    assert inputs.abs().max() == 1, "nothing lies beyond the bounds"


def test_records_of_an_algorithm_have_the_cells_of_the_rows() -> None:
    schema = agreed()
    table = pa.Table.from_pandas(people(), preserve_index=False)
    encoding = schema.encoding()
    ready = schema.prepared(table, "data")
    inputs = encoding.scaled(encoding.values(ready, Path("x")))
    labels = torch.tensor([schema.target.values.index(word) for word in table.column("died").to_pylist()])
    assert schema.codes_of(inputs, labels).tolist() == schema.codes(table, "data").tolist()


def test_places_between_the_bounds_by_hand() -> None:
    schema = agreed()
    encoding = schema.encoding()
    inputs = encoding.scaled(encoding.values(schema.prepared(ROWS, "data"), Path("x")))
    found = schema.places_of(inputs, torch.tensor([0, 1, 1, 0, 0]))
    assert schema.ordered == (True, False, True, True, True, False)
    assert found[1].tolist() == pytest.approx([1, 1, 1, 1, 1, 1])
    third, fourth = found[2].tolist(), found[3].tolist()
    assert third == pytest.approx([np.nan, 2, np.nan, np.nan, np.nan, 1], nan_ok=True)
    # 7 counts as the lower bound; the middle word of three; bmi 19.99 of 10 to 60; the 182nd day of 366
    assert fourth == pytest.approx([0, 0, 0.5, 9.99 / 50, 181 / 365, 0], abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_value_drawn_from_a_cell_lies_in_it(data: st.DataObject) -> None:
    low = data.draw(st.integers(-50, 50))
    kind = data.draw(st.sampled_from(["integer", "real"]))
    column = Column(kind=kind, low=low, high=low + data.draw(st.integers(1, 40)), bins=data.draw(st.integers(1, 50)))
    schema = from_document(
        {"target": {"column": "y", "values": ["a", "b"]}, "columns": {"x": column.model_dump(exclude_defaults=True)}},
        "here",
    )
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    codes = np.stack([draw.integers(0, size, 200) for size in schema.sizes], axis=1)
    table = schema.frame(codes, draw)
    assert schema.codes(table, "drawn").tolist() == codes.tolist()
    encoding = schema.encoding()
    inputs = encoding.scaled(encoding.values(schema.prepared(table, "drawn"), Path("x")))
    if kind == "integer":  # every whole number is in the cell it was in, whatever float32 does to it
        assert schema.codes_of(inputs, torch.from_numpy(codes[:, 1])).tolist() == codes.tolist()


def test_a_schema_goes_through_its_file_and_its_document() -> None:
    schema = agreed()
    assert from_toml(schema.toml(), "again") == schema
    assert from_document(schema.document(), "again") == schema
    names = from_document(
        {
            "target": {"column": 'a "b"', "values": ["ä", "ö"]},
            "columns": {"with blank": {"kind": "category", "values": ["x.y", 'q"']}},
        },
        "here",
    )
    assert from_toml(names.toml(), "again") == names


@pytest.mark.parametrize("form", ["csv", "parquet", "pandas", "arrow", "by client", "by domain"])
def test_every_form_of_a_table_is_read_by_it(form: str, tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(TOML)
    frame = people()
    data: Any = frame
    if form == "csv":
        data = str(tmp_path / "people.csv")
        frame.to_csv(data, index=False)
    elif form == "parquet":
        data = str(tmp_path / "people.parquet")
        frame.to_parquet(data, index=False)
    elif form == "arrow":
        data = pa.Table.from_pandas(frame)
    elif form == "by client":
        data = [frame[frame.hospital == name] for name in ("east", "north", "south")]
    elif form == "by domain":
        data = {name: frame[frame.hospital == name] for name in ("east", "north", "south")}
    more = {} if form == "by client" else {"partition": "domain"}
    result = fedfill.run(
        "fed3r", data=data, schema_file=tmp_path / "schema.toml", clients=None, out=tmp_path / "run", **more
    )
    assert result.summary["accuracy"] > 0.7
    assert not any("scaled" in line for line in result.summary["privacy"].get("not_in_the_account", []))
    # a new table has empty cells too, and neither target nor site
    rows = people(9, seed=1).drop(columns=["died", "hospital"])
    assert len(fedfill.predict(result, rows).classes) == 9


def test_csv_and_parquet_are_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(TOML)
    people().to_csv(tmp_path / "people.csv", index=False)
    people().to_parquet(tmp_path / "people.parquet", index=False)
    found = [
        fedfill.run(
            "fedavg", data=str(tmp_path / name), schema_file=tmp_path / "schema.toml", rounds=1, clients=3,
            out=tmp_path / f"run{name}",
        ).summary["weights_sha256"]
        for name in ("people.csv", "people.parquet")
    ]  # fmt: skip
    assert found[0] == found[1]


def test_nothing_in_the_inputs_depends_on_other_records(tmp_path: Path) -> None:
    schema = agreed()
    table = pa.Table.from_pandas(people(), preserve_index=False)
    encoding = schema.encoding()
    whole = encoding.scaled(encoding.values(schema.prepared(table, "data"), Path("x")))
    part = encoding.scaled(encoding.values(schema.prepared(table.slice(0, 5), "data"), Path("x")))
    assert torch.equal(whole[:5], part)


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ("kind = \"integer\"", "kind = \"whole\"", ["whole", "integer"]),
        ("low = 18", "", ["low and high"]),
        ("low = 18", "low = 100", ["low below high"]),
        ("low = 18", "low = 18.5", ["whole"]),
        ("low = 2020-01-01", "low = 3", ["dates"]),
        ("low = 10\n", "low = 2020-01-01\n", ["dates"]),
        ('values = ["f", "m"]', 'values = ["f", "f"]', ["differ"]),
        ('values = ["f", "m"]', 'values = ["f", "other"]', ["other"]),
        ('values = ["f", "m"]', "bins = 3", ["values"]),
        ("bins = 4", "bins = 0", ["bins"]),
        ("bins = 4", "bin = 4", ["bin"]),
        ('values = ["no", "yes"]', 'values = ["no"]', ["two or more"]),
        ('values = ["no", "yes"]', 'kind = "number"', ["low and high"]),
        ('values = ["no", "yes"]', 'kind = "survival"\nevent = "e"\ngrid = [3, 2]', ["increase"]),
        ('column = "died"', 'column = "age"', ["age", "twice"]),
        ('site = "hospital"', 'site = "sex"', ["sex", "twice"]),
        ('site = "hospital"', "site = ", ["TOML"]),
        ("[target]", "[goal]", ["goal", "target"]),
        ("low = 18", 'low = "x"', ["columns.age.low: found 'x'; allowed: a number or a date such as 2020-01-31, in '"]),
        ('values = ["no", "yes"]', 'values = ["no", 3]', ["target.values.1: found 3;"]),
        ('values = ["f", "m"]', 'values = [true, "m"]', ["columns.sex.values.0: found True;"]),
    ],
)  # fmt: skip
def test_a_schema_that_is_not_sound_is_a_sentence(old: str, new: str, facts: list[str], tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(TOML.replace(old, new, 1))
    with refused("schema_file", *facts) as caught:
        read_schema(tmp_path / "schema.toml")
    assert "\n" not in str(caught.value)


def test_a_schema_that_is_no_table_at_all_is_a_sentence() -> None:
    with refused("schema", "all of it", "'the card'"):
        from_document([1], "the card")  # type: ignore[arg-type]  # a file that was edited


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"age": None}, ["no column 'age'"]),
        ({"died": None}, ["no column 'died'"]),
        ({"hospital": None}, ["no column 'hospital'"]),
        ({"age": ["18", "19", "old", "20", "21"]}, ["age", "old", "row 3", "a number"]),
        ({"admitted": ["2020-01-01", "soon", None, None, None]}, ["admitted", "soon", "row 2", "a date"]),
        ({"sex": ["f", None, "m", "m", "m"]}, ["sex", "1 empty", "missing = false"]),
        ({"died": ["no", "yes", "perhaps", "no", "no"]}, ["died", "perhaps", "row 3", "no, yes"]),
        ({"died": ["no", "yes", None, "no", "no"]}, ["died", "row 3", "no, yes"]),
        ({"hospital": ["north", None, "north", "south", "north"]}, ["hospital", "1 empty"]),
    ],
)
def test_a_table_that_does_not_fit_is_a_sentence(change: dict[str, Any], facts: list[str], tmp_path: Path) -> None:
    columns = {name: ROWS.column(name).to_pylist() for name in ROWS.column_names}
    columns = {name: cells for name, cells in {**columns, **change}.items() if cells is not None}
    (tmp_path / "schema.toml").write_text(TOML)
    with refused("data", *facts) as caught:
        fedfill.run(
            "fedavg", data=pd.DataFrame(columns), schema_file=tmp_path / "schema.toml", clients=2, out=tmp_path / "run"
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_where_no_schema_belongs(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(TOML)
    with refused("schema_file", "digits", "no table"):
        fedfill.run("fedavg", data="digits", schema_file=tmp_path / "schema.toml", out=tmp_path / "run")
    with refused("schema_file", "no table"):
        images = np.zeros((4, 8, 8), dtype=np.uint8), np.arange(4) % 2
        fedfill.run("fedavg", data=images, schema_file=tmp_path / "schema.toml", out=tmp_path / "run")
    with refused("schema_file", "no.toml", "can't be read"):
        fedfill.run("fedavg", data=people(), schema_file=tmp_path / "no.toml", out=tmp_path / "run")
    with refused("data", "a table"):
        fedfill.run(
            "fedavg", data=(people(), people().died), schema_file=tmp_path / "schema.toml", out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_hosts_bring_tables_where_a_schema_is_agreed_on(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(TOML)
    app = init_app(tmp_path / "app", "fedavg", schema_file=str(tmp_path / "schema.toml"), data="people", clients=3)
    task = read_task(app / PACKAGE)
    assert (task.class_names, task.shape, task.agreed) == (("no", "yes"), (11,), agreed())
    assert "schema.toml" not in (app / PACKAGE / "experiment.toml").read_text(), "a place that hosts don't have"
    frame = people()
    rows = frame[(frame.hospital == "north") & (frame.died == "no")]
    rows.to_csv(tmp_path / "north.csv", index=False)
    own = load_host(tmp_path / "north.csv", "table", task, share=0.2)
    assert (len(own.train) + len(own.test), set(own.train.labels.tolist())) == (len(rows), {0})
    encoding = agreed().encoding()
    ready = agreed().prepared(pa.Table.from_pandas(frame, preserve_index=False), "data")
    whole = encoding.scaled(encoding.values(ready, Path("x")))
    pooled = {tuple(row) for row in whole.tolist()}
    assert all(tuple(row) in pooled for row in own.train.inputs.tolist()), "a host alone makes the inputs that all make"
    with refused("data", "schema"):
        load_host(tmp_path / "north.csv", "table", replace(task, schema=""))
    with refused("schema", "shape"):
        replace(task, shape=(12,))


def test_a_draft_is_a_schema_that_reads_its_table(tmp_path: Path) -> None:
    people().to_csv(tmp_path / "people.csv", index=False)
    drafted = fedfill.describe(tmp_path / "people.csv", target="died", site="hospital", out=tmp_path / "schema.toml")
    assert read_schema(tmp_path / "schema.toml") == drafted
    kinds = {name: column.kind for name, column in drafted.columns.items()}
    assert kinds == {"age": "integer", "sex": "category", "stage": "category", "bmi": "real", "admitted": "date"}
    assert drafted.target.values == ("no", "yes")
    assert (drafted.columns["age"].low, drafted.columns["age"].high) == (10, 100)
    assert drafted.columns["admitted"].high == date(2020, 12, 31)
    assert "private until" in (tmp_path / "schema.toml").read_text()
    result = fedfill.run(
        "fedavg", data=str(tmp_path / "people.csv"), schema_file=tmp_path / "schema.toml", partition="domain", rounds=1,
        out=tmp_path / "run",
    )  # fmt: skip
    assert len(result.by_client()) == 3


def test_a_draft_of_odd_tables(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "label": [True, False, True], "whole": [3, 4, 5], "truth": [True, False, None], "one": [1, 1, 1],
            "none": [None, None, None], "name": ["a", "b", "c"],
        }
    )  # fmt: skip
    drafted = fedfill.describe(frame)
    assert set(drafted.columns) == {"whole", "truth", "name"}
    assert drafted.target.values == ("False", "True")
    assert fedfill.describe(frame, target="whole").target.values == ("3", "4", "5")
    many = pd.DataFrame({"label": np.arange(50) / 7, "x": np.arange(50)})
    assert fedfill.describe(many).target.kind == "number"
    for more, setting, facts in (
        ({"target": "lable"}, "target", ["lable", "label"]),
        ({"site": "where"}, "site", ["where"]),
        ({"site": "label"}, "site", ["label", "target"]),
        ({"target": "one"}, "target", ["one", "two or more"]),
        ({"out": tmp_path}, "out", ["there already"]),
    ):
        with refused(setting, *facts):
            fedfill.describe(frame, **more)
    with refused("data", "nothing at"):
        fedfill.describe(tmp_path / "no.csv")
    with refused("data", "beside target"):
        fedfill.describe(frame[["label", "one"]])


def test_a_draft_of_times_to_an_event(tmp_path: Path) -> None:
    rows = times()
    drafted = fedfill.describe(rows, target="weeks", event="relapse", site="hospital", out=tmp_path / "schema.toml")
    assert read_schema(tmp_path / "schema.toml") == drafted
    assert (drafted.target.kind, drafted.target.event, drafted.site) == ("survival", "relapse", "hospital")
    assert {*drafted.columns} == {"age", "arm", "grade"}
    grid = np.array(drafted.target.grid)
    assert len(grid) == 12
    assert np.allclose(np.diff(grid), grid[0])
    seen = (rows["weeks"] <= grid[-1]).mean()
    assert 0.7 <= seen <= 0.9, "and some are there after its last time"
    result = fedfill.run(
        "kaplanmeier", data=rows, schema_file=tmp_path / "schema.toml", partition="domain", out=tmp_path / "run"
    )
    assert result.summary["findings"]["groups"]["all"]["survival_at_the_end"] < 0.5
    small = fedfill.describe(rows.assign(weeks=rows["weeks"] / 1000), target="weeks", event="relapse")
    assert small.target.grid == pytest.approx(grid / 1000)
    for more, setting, facts in (
        ({"target": "weeks", "event": "relapsed"}, "event", ["relapsed", "relapse"]),
        ({"target": "weeks", "event": "weeks"}, "event", ["weeks"]),
        ({"target": "arm", "event": "relapse"}, "target", ["arm", "times"]),
        ({"target": "weeks", "event": "relapse", "site": "relapse"}, "site", ["relapse"]),
    ):
        with refused(setting, *facts):
            fedfill.describe(rows, **more)
    one = rows.assign(weeks=rows["weeks"].where(rows.index != 6, -1.5))
    with refused("target", "column 'weeks'", "-1.5", "row 7", "0 or more"):
        fedfill.describe(one, target="weeks", event="relapse")
    with refused("target", "no times"):
        fedfill.describe(rows.assign(weeks=0), target="weeks", event="relapse")
    with refused("data", "relapse", "2", "0"):
        fedfill.describe(rows.assign(relapse=2), target="weeks", event="relapse")
