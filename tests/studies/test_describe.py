"""Drafts of schemas: what they draft is what a run reads, whatever wrote the table; what can't be read is left out and named."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.helpers import refused
from typer.testing import CliRunner

import fedfill
from fedfill.cli import app
from fedfill.data.schema import from_document, read_schema
from fedfill.data.tables import read_table

TRUTHS = np.array([True, False, False, True, False, True] * 20)


def rows(**more: Any) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"label": np.where(TRUTHS, "yes", "no"), "x": draw.normal(0, 1, len(TRUTHS))})
    return frame.assign(**more)


def counts(schema: Any, table: Any) -> dict[str, list[int]]:
    """How many rows are in each cell of each column."""
    codes = schema.codes(table, "data")
    return {
        name: np.bincount(codes[:, k], minlength=size).tolist()
        for k, (name, size) in enumerate(zip(schema.names, schema.sizes, strict=True))
    }


@pytest.mark.parametrize(
    ("false", "true"),
    [("FALSE", "TRUE"), ("false", "true"), ("False", "True"), ("0.0", "1.0"), ("01", "02"), ("0", "1")],
)
def test_words_of_a_csv_are_drafted_as_a_run_reads_them(false: str, true: str, tmp_path: Path) -> None:
    words = np.where(TRUTHS, true, false)
    rows(label=words, smoker=words, site="a").to_csv(tmp_path / "a.csv", index=False)
    schema = fedfill.describe(tmp_path / "a.csv", out=tmp_path / "schema.toml")
    assert schema.target.values == (false, true)
    found = counts(schema, read_table(tmp_path / "a.csv", schema.words))
    assert found["label"] == [60, 60]
    if "smoker" in schema.words:
        assert found["smoker"] == [60, 60, 0, 0]
    # the same as a frame, of types that pandas guesses
    assert counts(schema, pa.Table.from_pandas(pd.read_csv(tmp_path / "a.csv"), preserve_index=False)) == found


def test_digits_with_zeros_before_them_are_words(tmp_path: Path) -> None:
    codes = np.array(["01", "1", "001", "", "10", "1"] * 20)
    ids = [f"{k:04}" for k in range(len(TRUTHS))]
    rows(label=codes, code=codes, id=ids, few=np.where(TRUTHS, "07", "7"), age=np.where(TRUTHS, "-5", "0.5"), zero="0").query(
        "label != ''"
    ).to_csv(tmp_path / "a.csv", index=False)  # fmt: skip
    ran = CliRunner().invoke(app, ["describe", str(tmp_path / "a.csv"), "--out", str(tmp_path / "schema.toml")])
    assert ran.exit_code == 0, ran.output
    assert "--schema-file" in ran.output
    assert "--partition domain" not in ran.output
    for told in (ran.output.replace("\n", " "), (tmp_path / "schema.toml").read_text()):
        assert "'label', 'code', 'id', 'few'" in told
    schema = read_schema(tmp_path / "schema.toml")
    assert schema.target.values == schema.columns["code"].values == ("001", "01", "1", "10")
    assert schema.columns["few"].values == ("07", "7")
    assert schema.columns["age"].kind == schema.columns["x"].kind == "real"
    assert "zero" not in schema.columns
    found = counts(schema, read_table(tmp_path / "a.csv", schema.words))
    assert (found["label"], found["code"]) == ([20, 20, 40, 20], [20, 20, 40, 20, 0, 0])
    # what has more than twenty values is no number either
    assert len(fedfill.describe(tmp_path / "a.csv", target="id").target.values) == 100
    # frames know numbers from words
    assert fedfill.describe(pd.read_csv(tmp_path / "a.csv")).columns["code"].kind == "integer"


def test_categories_that_have_an_order_keep_it(tmp_path: Path) -> None:
    words, order = np.array(["low", "high", "middle", None] * 30, dtype=object), ["low", "middle", "high", "highest"]
    kinds = {
        "stage": pd.Categorical(words, order, ordered=True), "group": pd.Categorical(words, order), "odd": pd.Categorical(["low"] * 120, ["low"], ordered=True)
    }  # fmt: skip
    rows(**kinds).to_parquet(tmp_path / "a.parquet", row_group_size=50)
    for data in (rows(**kinds), tmp_path / "a.parquet"):
        schema = fedfill.describe(data)
        stage, group = schema.columns["stage"], schema.columns["group"]
        assert (stage.kind, stage.values) == ("ordered", ("low", "middle", "high", "highest"))
        assert (group.kind, group.values) == ("category", ("high", "low", "middle"))
        assert "odd" not in schema.columns, "one value alone"
        assert counts(schema, pa.Table.from_pandas(rows(**kinds), preserve_index=False))["stage"] == [30, 30, 30, 0, 30]


def test_a_draft_with_sites_is_used_by_site(tmp_path: Path) -> None:
    rows(site=np.where(TRUTHS, "a", "b")).to_csv(tmp_path / "a.csv", index=False)
    words = ["describe", str(tmp_path / "a.csv"), "--site", "site", "--out", str(tmp_path / "schema.toml")]
    assert "--partition domain" in CliRunner().invoke(app, words).output


def test_truth_values_of_parquet_and_of_frames_are_those_of_any_csv(tmp_path: Path) -> None:
    frame = rows(label=TRUTHS, smoker=TRUTHS)
    frame.to_parquet(tmp_path / "a.parquet")
    for data in (frame, tmp_path / "a.parquet"):
        schema = fedfill.describe(data)
        assert schema.target.values == schema.columns["smoker"].values == ("False", "True")
    for false, true in (("FALSE", "TRUE"), ("false", "true"), ("False", "True")):
        words = np.where(TRUTHS, true, false)
        rows(label=words, smoker=words).to_csv(tmp_path / "b.csv", index=False)
        found = counts(schema, read_table(tmp_path / "b.csv", schema.words))
        assert (found["label"], found["smoker"]) == ([60, 60], [60, 60, 0, 0])


def test_a_model_of_parquet_predicts_rows_of_r(tmp_path: Path) -> None:
    frame = rows(label=TRUTHS, smoker=TRUTHS)
    fedfill.describe(frame, out=tmp_path / "schema.toml")
    result = fedfill.run("fed3r", data=frame, schema_file=tmp_path / "schema.toml", clients=2, out=tmp_path / "run")
    assert result.summary["accuracy"] == 1.0
    frame.assign(smoker=np.where(TRUTHS, "TRUE", "FALSE")).drop(columns="label").to_csv(tmp_path / "r.csv", index=False)
    found = fedfill.load(tmp_path / "run").predict(str(tmp_path / "r.csv"))
    assert [str(name) for name in found.classes] == np.where(TRUTHS, "True", "False").tolist()


def test_a_word_that_only_looks_like_another_is_another() -> None:
    document = {
        "target": {"column": "label", "values": ["1", "01", "2"]},
        "columns": {"x": {"kind": "category", "values": ["a"]}},
    }
    schema = from_document(document, "x")
    table = pa.table({"label": ["1", "01", "2.0"], "x": ["a", "A", "a "]})
    assert schema.codes(table, "x").tolist() == [[0, 0], [1, 1], [1, 2]]
    with refused("data", "'001'", "1, 01, 2"):  # which of two it is, nobody knows
        schema.codes(pa.table({"label": ["001"], "x": ["a"]}), "data")
    with refused("data", "holds nothing"):
        schema.codes(pa.table({"label": [None], "x": ["a"]}), "data")


def test_words_that_stand_for_others_or_for_nothing_are_no_values(tmp_path: Path) -> None:
    kinds = np.array(["other", "missing", "NA", "f", "m", ""] * 20)
    rows(sex=kinds, odd=np.where(TRUTHS, "other", "missing")).to_csv(tmp_path / "a.csv", index=False)
    schema = fedfill.describe(tmp_path / "a.csv")
    assert schema.columns["sex"].values == ("f", "m")
    assert "odd" not in schema.columns
    found = counts(schema, read_table(tmp_path / "a.csv", schema.words))
    assert found["sex"] == [20, 20, 20, 60]  # f, m, other, and three that say that nothing is there
    given = schema.document() | {"columns": {"sex": {"kind": "category", "values": ["NA", "f"]}}}
    found = counts(from_document(given, "x"), read_table(tmp_path / "a.csv", schema.words))
    assert found["sex"] == [20, 20, 40, 40], "unless the schema has NA as a value"


def test_polars_words_are_words() -> None:
    class Polars:
        def __init__(self, table: Any) -> None:
            self.table, self.columns = table, table.column_names

        def __arrow_c_stream__(self, requested: Any = None) -> Any:
            return self.table.__arrow_c_stream__(requested)

    views = pa.array(["a", "b", None] * 40, pa.string_view())
    kinds = pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None] * 40, pa.uint32()), pa.array(["a", "b"], pa.string_view())
    )
    labels = pa.array(np.where(TRUTHS, "yes", "no").tolist(), pa.string_view())
    data = Polars(pa.table({"label": labels, "view": views, "kind": kinds, "x": np.arange(120.0)}))
    schema = fedfill.describe(data)
    assert schema.target.values == ("no", "yes")
    assert schema.columns["view"].values == schema.columns["kind"].values == ("a", "b")
    whole = Polars(
        data.table.drop_columns(["kind", "view"]).append_column("w", pa.array(["a", "b"] * 60, pa.string_view()))
    )
    assert fedfill.run("fed3r", data=whole, clients=2).summary["accuracy"] > 0


def test_what_can_not_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    n = len(TRUTHS)
    columns = {
        "label": rows().label.tolist(), "age": rows().x.tolist(), "inf": [np.inf, 1.0] * 60, "large": [1e308, -1e308] * 60, "list": [[1], [2]] * 60,
        "record": [{"a": 1}, {"a": 2}] * 60, "bytes": [b"\xff", b"b"] * 60, "none": [None] * n, "one": [1] * n,
        "near": (5e-324 * np.arange(n)).tolist(), "many": list(map("w{}".format, range(n))),
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    ran = CliRunner().invoke(app, ["describe", str(tmp_path / "a.parquet"), "--out", str(tmp_path / "schema.toml")])
    assert ran.exit_code == 0, ran.output
    assert {*read_schema(tmp_path / "schema.toml").columns} == {"age", "many"}
    text = (tmp_path / "schema.toml").read_text()
    for name in ("inf", "large", "list", "record", "bytes", "none", "one", "near"):
        assert f"Left out: '{name}', which " in ran.output.replace("\n", " ")
        assert f"#   '{name}': " in text
    for bad in (np.inf, 1e308):
        with refused("target", "column 'label'"):
            fedfill.describe(rows(label=rows().x.where(rows().index != 3, bad)))
    with refused("target", "infinite"):
        fedfill.describe(rows(t=rows().x.abs().where(rows().index != 3, np.inf), e=1), target="t", event="e")


@pytest.mark.parametrize(
    "numbers",
    [
        1.6e18 + 1024.0 * np.arange(120),
        1e17 + 64.0 * np.arange(120),
        np.tile([1.0, 1.0 + 1e-15], 60),
        np.tile([-3e99, 3e99], 60),
    ],
)
def test_bounds_lie_around_any_numbers(numbers: Any) -> None:
    column = fedfill.describe(rows(x=numbers)).columns["x"]
    low, high = column.bounds
    assert low <= numbers.min() < numbers.max() <= high


@pytest.mark.parametrize(("low", "high"), [(0, np.inf), (-1e308, 1e308), (np.nan, 1)])
def test_bounds_of_a_target_are_finite(low: float, high: float) -> None:
    target = {"column": "label", "kind": "number", "low": low, "high": high}
    with refused("schema", "target", "finite"):
        from_document({"target": target, "columns": {"x": {"kind": "real", "low": 0, "high": 1}}}, "x")
