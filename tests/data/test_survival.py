"""Survival targets: rows as cells of a public grid, from a table to clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import refused

from fedfill.data.division import federate
from fedfill.data.schema import Schema, from_toml
from fedfill.data.survival import cell_names, cells, drawn
from fedfill.deployment.host_data import Task, load_host

TOML = """
site = "hospital"

[target]
kind = "survival"
column = "days"
event = "died"
grid = [10, 20, 30.5]

[columns.age]
kind = "integer"
low = 20
high = 80
missing = false

[columns.arm]
kind = "category"
values = ["old", "new"]
"""


def agreed(toml: str = TOML) -> Schema:
    return from_toml(toml, "schema.toml")


def people(n: int = 200) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "hospital": draw.choice(["north", "south"], n), "age": draw.integers(20, 80, n), "arm": draw.choice(["old", "new"], n),
            "days": draw.integers(0, 45, n), "died": draw.integers(0, 2, n),
        }
    )  # fmt: skip


def test_cells_by_hand() -> None:
    times = np.array([0, 10, 10.5, 30.5, 31, 0, 9, 10, 20, 30.5, 400.0])
    events = np.array([True] * 5 + [False] * 6)
    assert cells(times, events, (10, 20, 30.5)).tolist() == [0, 0, 1, 2, 6, 3, 3, 4, 5, 6, 6]
    assert cell_names((10, 20, 30.5)) == (
        "event by 10", "event by 20", "event by 30.5", "left before 10", "none by 10", "none by 20", "none by 30.5",
    )  # fmt: skip


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=9, unique=True), st.integers(0, 5))
def test_rows_that_are_drawn_of_cells_have_these_cells(ends: list[float], seed: int) -> None:
    grid = sorted(ends)
    found = np.arange(2 * len(grid) + 1)
    assert cells(*drawn(found, grid, np.random.default_rng(seed)), grid).tolist() == found.tolist()


def test_a_schema_counts_the_cells_of_times_as_those_of_a_column() -> None:
    schema = agreed()
    table = pa.table(
        {"days": [10, 25, 40], "died": [True, False, True], "age": [20, 50, 80], "arm": ["old", None, "x"]}
    )
    assert (schema.names, schema.sizes) == (("age", "arm", "days"), (16, 4, 7))
    codes = schema.codes(table, "data")
    assert codes.tolist() == [[0, 0, 0], [7, 3, 5], [15, 2, 6]]
    again = schema.frame(codes, np.random.default_rng(0))
    assert schema.codes(again, "drawn").tolist() == codes.tolist()
    assert agreed(schema.toml()) == schema


def test_clients_hold_cells_as_labels_and_keep_the_share_of_events() -> None:
    frame, schema = people(), agreed()
    federation = federate(
        frame, partition="domain", clients=None, seed=0, client_test=0.2, client_validation=0.2, schema=schema
    )
    assert federation.class_names == schema.target.classes
    assert federation.domains == ("north", "south")
    whole = [federation.test, *(part for client in federation.clients for part in (client.train, client.validation))]
    assert sum(map(len, whole)) == len(frame)
    found = np.concatenate([schema.codes_of(part.inputs, part.labels) for part in whole])
    known = schema.codes(pa.Table.from_pandas(frame), "data")
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, known.tolist()))
    # of many cells with few rows each, a share of every cell would be nothing
    assert len(federation.test) == pytest.approx(0.2 * len(frame), abs=2)
    for client in federation.clients:
        own, held = (float((part.labels < 3).double().mean()) for part in (client.train, client.validation))
        assert own == pytest.approx(held, abs=0.02)


def test_a_host_reads_its_own_table(tmp_path: Path) -> None:
    frame = people()
    frame.to_csv(tmp_path / "own.csv", index=False)
    task = Task.by(agreed(), "people", 2)
    own = load_host(tmp_path / "own.csv", "table", task, share=0.2, validation=0.1)
    assert task.class_names == agreed().target.classes
    assert len(own.train) + len(own.test) + len(own.validation) == len(frame)
    assert len(own.test) == pytest.approx(40, abs=2)


@pytest.mark.parametrize(
    ("column", "value", "found"),
    [
        ("days", -1, "'-1'"), ("days", "long", "'long'"), ("days", None, "nothing"),
        ("died", 2, "'2'"), ("died", "yes", "'yes'"), ("died", None, "nothing"),
    ],
)  # fmt: skip
def test_slips_are_named(column: str, value: object, found: str) -> None:
    rows = {"days": ["5", "10"], "died": ["1", "0"], "age": [30, 30], "arm": ["old", "new"]}
    rows[column] = ["1", None if value is None else str(value)]
    with refused("data", column, found, "row 2"):
        agreed().codes(pa.table(rows), "data")


def test_grids_that_are_none_are_refused() -> None:
    for grid in ("[]", "[0, 1]", "[2, 1]", "[1, inf]", f"[{', '.join(map(str, range(1, 1002)))}]"):
        with refused("schema", "target"):
            agreed(TOML.replace("[10, 20, 30.5]", grid))
