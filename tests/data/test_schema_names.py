"""Tables with a schema whose columns are called what others call something else, and tables of one site."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from tests.helpers import refused

import fedfill
from fedfill.data.frames import from_frames
from fedfill.data.schema import Schema, from_document
from fedfill.data.tables import read_tables
from fedfill.deployment.host_data import Task, load_host


def rows(n: int = 200, seed: int = 0) -> pd.DataFrame:
    """Rows whose target says nothing, with columns that have other meanings elsewhere."""
    draw = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "label": draw.choice(["p", "q"], n), "domain": draw.normal(5, 1, n), "age": draw.uniform(0, 9, n),
            "age is missing": draw.uniform(0, 9, n), "died": draw.choice(["no", "yes"], n),
            "hospital": draw.choice(["north", "south"], n),
        }
    )  # fmt: skip


def agreed(*columns: str, target: str = "died", site: str = "hospital") -> Schema:
    """A schema of some of these columns."""
    number = {"kind": "real", "low": 0, "high": 10}
    kinds = {"label": {"kind": "category", "values": ["p", "q"]}}
    values = ["no", "yes"] if target == "died" else ["p", "q"]
    document = {
        "site": site,
        "target": {"column": target, "values": values},
        "columns": {name: kinds.get(name, number) for name in columns},
    }
    return from_document(document, "schema.toml")


def test_columns_that_are_called_label_and_domain_are_inputs_like_others(tmp_path: Path) -> None:
    frame = rows()
    schema = agreed("label", "domain")
    renamed = agreed("kind", "place")
    renamed = Schema({"kind": schema.columns["label"], "place": schema.columns["domain"]}, renamed.target, "hospital")
    other = frame.rename(columns={"label": "kind", "domain": "place"})
    frame.to_csv(tmp_path / "a.csv", index=False)
    other.to_csv(tmp_path / "b.csv", index=False)
    for mine, theirs in (
        (from_frames(frame, "x", None, schema), from_frames(other, "x", None, renamed)),
        (
            from_frames(dict(iter(frame.groupby("hospital"))), "x", None, schema),
            from_frames(dict(iter(other.groupby("hospital"))), "x", None, renamed),
        ),
    ):
        assert not isinstance(mine, list)
        assert not isinstance(theirs, list)
        assert mine.domains is not None
        assert mine.domains.names == ("north", "south")
        assert torch.equal(mine.train.inputs, theirs.train.inputs)
        assert torch.equal(mine.train.labels, theirs.train.labels)
    ours, _, _, _ = read_tables(tmp_path / "a.csv", None, "data", schema)
    read, _, _, _ = read_tables(tmp_path / "b.csv", None, "data", renamed)
    assert torch.equal(ours.samples.inputs, read.samples.inputs)
    assert ours.samples.labels.tolist() == (frame.died == "yes").astype(int).tolist()
    assert ours.domains is not None
    assert ours.domains.tolist() == frame.hospital.tolist()


def test_a_target_called_label_and_a_site_called_domain_are_drafted_and_run(tmp_path: Path) -> None:
    frame = rows()[["label", "age", "hospital"]].rename(columns={"hospital": "domain"})
    drafted = fedfill.describe(frame, out=tmp_path / "schema.toml")
    assert (drafted.target.column, drafted.site, *drafted.columns) == ("label", "domain", "age")
    result = fedfill.run(
        "fed3r", data=frame, schema_file=tmp_path / "schema.toml", partition="domain", out=tmp_path / "run"
    )
    assert {*result.summary["client_names"]} == {"north", "south"}


def test_a_column_called_as_the_sign_of_an_empty_cell_is_a_column_of_its_own() -> None:
    schema = agreed("age", "age is missing")
    frame = rows()
    frame.loc[3, "age"] = np.nan
    encoding = schema.encoding()
    assert encoding.numbers == ("age", "(age is missing)", "age is missing", "age is missing is missing")
    table = pa.Table.from_pandas(frame, preserve_index=False)
    inputs = encoding.scaled(encoding.values(schema.prepared(table, "data"), Path("x")))
    assert inputs[:, 1].nonzero().flatten().tolist() == [3]
    assert inputs[:, 2].tolist() == pytest.approx((frame["age is missing"] / 5 - 1).tolist(), abs=1e-6)
    labels = torch.from_numpy((frame.died == "yes").to_numpy().astype(np.int64))
    assert schema.codes_of(inputs, labels).tolist() == schema.codes(table, "data").tolist()
    assert agreed("age").encoding().numbers == ("age", "age is missing"), "and else it is called as ever"


def test_a_table_of_one_site_needs_no_column_of_the_site(tmp_path: Path) -> None:
    frame, schema = rows(), agreed("age", "label")
    apart = {name: part.drop(columns="hospital") for name, part in frame.groupby("hospital")}
    found, whole = (
        from_frames(apart, "x", None, schema),
        from_frames(dict(iter(frame.groupby("hospital"))), "x", None, schema),
    )
    assert not isinstance(found, list)
    assert not isinstance(whole, list)
    assert torch.equal(found.train.inputs, whole.train.inputs)
    clients = from_frames([*apart.values()], "x", None, schema)
    assert isinstance(clients, list)
    assert len(clients) == 2
    apart["north"].to_csv(tmp_path / "north.csv", index=False)
    host = load_host(tmp_path / "north.csv", "table", Task.by(schema, "people", 2))
    assert len(host.train) == len(apart["north"])
    with refused("data", "no column 'hospital'"):
        from_frames(frame.drop(columns="hospital"), "x", None, schema)


@pytest.mark.parametrize("empty", [None, "", "  "])
def test_an_empty_cell_of_the_site_names_the_user_s_column(empty: str | None) -> None:
    frame = rows()
    frame.loc[[2, 5], "hospital"] = empty
    with refused("data", "column 'hospital' has 2 empty cells"):
        from_frames(frame, "x", None, agreed("age"))
    with refused("data", "without rows"):
        from_frames(frame[:0], "x", None, agreed("age"))
