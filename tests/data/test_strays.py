"""Cells that are not as the schema has them are read, and the run says so, with the sites where most are so."""

from datetime import date
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from tests.helpers import refused

import fedfill
from fedfill.data.frames import from_frames
from fedfill.data.schema import Schema, from_document, from_toml
from fedfill.data.schema_columns import Column
from fedfill.data.tables import read_tables, rows_of

TOML = """
site = "hospital"
target = { column = "died", values = ["no", "yes"] }
[columns]
sex = { kind = "category", values = ["f", "m"] }
stage = { kind = "ordered", values = ["low", "high"] }
height = { kind = "real", low = 100, high = 220 }
when = { kind = "date", low = 2020-01-01, high = 2020-12-31 }
"""


def agreed() -> Schema:
    return from_toml(TOML, "schema.toml")


def rows(n: int = 100) -> pd.DataFrame:
    """Rows of four sites, all as the schema has them; some are empty."""
    k = np.arange(n)
    return pd.DataFrame(
        {
            "hospital": np.array(list("abcd"))[k % 4], "sex": np.array(["f", "m", None], dtype=object)[k % 3],
            "stage": np.array(["low", "high", "NA"])[k % 3], "height": 150.0 + k % 60, "when": "2020-05-05",
            "died": np.array(["no", "yes"])[k // 4 % 2],
        }
    )  # fmt: skip


def note(frame: pd.DataFrame) -> str:
    found = from_frames(frame, "x", None, agreed())
    assert not isinstance(found, list)
    return found.note


def test_nothing_is_said_of_tables_as_the_schema_has_them() -> None:
    frame = rows()
    frame.loc[:4, "height"] = 99.0  # 5 %, which is not more than that
    assert "Not as the schema" not in note(frame)
    frame.loc[5, "height"] = 99.0
    assert "6% of 'height' lie beyond its bounds" in note(frame)


@pytest.mark.parametrize(
    ("column", "cell", "told"),
    [
        ("sex", "F", "25% of 'sex' (b: 100%) are words that it lacks, and count as other"),
        ("stage", "mid", "25% of 'stage' (b: 100%) are words that it lacks, and count as empty"),
        ("height", 1.8, "25% of 'height' (b: 100%) lie beyond its bounds"),
        ("when", "2021-01-01", "25% of 'when' (b: 100%) lie beyond its bounds"),
    ],
)
def test_a_site_with_other_words_or_units_is_named(column: str, cell: object, told: str, tmp_path: Path) -> None:
    frame = rows()
    frame.loc[frame.hospital == "b", column] = cell
    assert told in note(frame)
    frame.to_csv(tmp_path / "people.csv", index=False)
    assert told in read_tables(tmp_path / "people.csv", None, "data", agreed())[3]
    apart = from_frames(dict(iter(frame.groupby("hospital"))), "x", None, agreed())
    assert not isinstance(apart, list)
    assert told.replace("b: ", "domain 'b': ") in apart.note
    clients = from_frames([part for _, part in frame.groupby("hospital")], "x", None, agreed())
    assert told.replace("b: ", "client 1: ") in clients[0].note  # type: ignore[index]


def test_a_run_and_a_prediction_say_it(tmp_path: Path) -> None:
    frame = rows().assign(height=1.75)
    (tmp_path / "schema.toml").write_text(TOML)
    result = fedfill.run(
        "fed3r", data=frame, schema_file=tmp_path / "schema.toml", partition="domain", out=tmp_path / "r"
    )
    assert any("100% of 'height' (a: 100%, b: 100%, c: 100%, ...) lie" in one for one in result.summary["notes"])
    columns = agreed().encoding()
    _, said = rows_of(pa.Table.from_pandas(frame, preserve_index=False), columns, Path("new.csv"))
    assert said == ["new.csv: Not as the schema has it: 100% of 'height' lie beyond its bounds, and count as these."]
    assert rows_of(pa.Table.from_pandas(rows(), preserve_index=False), columns, Path("new.csv"))[1] == []


def test_bounds_hold_what_rounds_to_them() -> None:
    document = {
        "target": {"column": "died", "values": ["no", "yes"]},
        "columns": {"height": {"kind": "integer", "low": 150, "high": 200}},
    }
    found = from_frames(rows().assign(height=200.4), "x", None, from_document(document, "x"))
    assert "Not as" not in found.note  # type: ignore[union-attr]


def test_numbers_are_what_stands_there_within_the_bounds() -> None:
    columns = agreed().columns | {"days": Column(kind="integer", low=0, high=10)}
    cases: list[tuple[str, list[object], list[float]]] = [
        ("days", [10.4, "10.6", None, -3, ""], [10, 11, np.nan, -3, np.nan]),
        ("height", [99.5, "300", np.nan], [99.5, 300, np.nan]),
        ("when", ["2019-12-31", date(2021, 1, 1)], [737424, 737791]),
    ]
    for name, cells, found in cases:
        assert columns[name].unclipped(cells, name, "data") == pytest.approx(found, nan_ok=True)
        within = np.clip(found, *columns[name].bounds)
        assert columns[name].numbers(cells, name, "data") == pytest.approx(within, nan_ok=True)


def test_plain_numbers_are_read_as_words_of_them_are() -> None:
    column = Column(kind="integer", low=0, high=10)
    cells = [1, 2.6, None, float("nan"), -7, 1e9]
    words = ["" if cell is None or cell != cell else str(cell) for cell in cells]
    found = column.unclipped(cells, "days", "data")
    assert found.tolist() == pytest.approx([1, 3, np.nan, np.nan, -7, 1e9], nan_ok=True)
    assert found.tolist() == pytest.approx(column.unclipped(words, "days", "data").tolist(), nan_ok=True)
    with refused("data", "days", "inf", "row 2"):
        column.unclipped([1.0, float("inf")], "days", "data")
