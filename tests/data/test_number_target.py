"""A number as target of a schema: its cells by hand, there and back, distances, and slips in one sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import refused

from fedfill.data.schema import Schema, from_document, from_toml
from fedfill.synthesis.tables import samples_of

TOML = """
[target]
column = "stay"
kind = "number"
low = 0
high = 40
bins = 4

[columns.age]
kind = "real"
low = 0
high = 100
bins = 5
missing = false
"""


def agreed(text: str = TOML) -> Schema:
    return from_toml(text, "schema.toml")


def test_cells_by_hand() -> None:
    schema = agreed()
    table = pa.table({"age": [0.0, 20.0, 99.0, 100.0, 50.0], "stay": [0.0, 9.99, 10.0, 40.0, 30.0]})
    assert (schema.names, schema.sizes, schema.ordered) == (("age", "stay"), (5, 4), (True, True))
    assert schema.target.cells == ("0 to 10", "10 to 20", "20 to 30", "30 to 40")
    assert (schema.target.classes, schema.target.class_names) == ((), ("stay",)), "cells are no classes"
    assert schema.codes(table, "data").tolist() == [[0, 0], [1, 0], [4, 1], [4, 3], [2, 3]]
    # as a client has them: ages and stays from -1 to 1
    inputs = torch.tensor([[-1.0], [-0.6], [0.98], [1.0], [0.0]])
    labels = torch.from_numpy(schema.labels(table, "data"))
    assert schema.codes_of(inputs, labels).tolist() == schema.codes(table, "data").tolist()
    places = schema.places_of(inputs, labels)
    assert places[:, 1].tolist() == pytest.approx([0, 9.99 / 40, 0.25, 1, 0.75], abs=1e-6)


def test_the_first_number_of_a_cell_is_in_it_whatever_float32_does_to_it() -> None:
    schema = agreed(TOML.replace("high = 40\nbins = 4", "high = 10\nbins = 10"))
    table = pa.table({"age": [1.0] * 11, "stay": [float(k) for k in range(11)]})
    assert schema.codes(table, "data")[:, 1].tolist() == [*range(10), 9]


def test_cells_are_those_of_any_other_column_of_real_numbers() -> None:
    bounds = {"kind": "real", "low": -3, "high": 4, "missing": False}
    schema = from_document(
        {"target": {"column": "y", "kind": "number", "low": -3, "high": 4}, "columns": {"x": bounds}}, "here"
    )
    values = np.linspace(-3, 4, 113)
    codes = schema.codes(pa.table({"x": values, "y": values}), "data")
    assert schema.sizes == (16, 16)
    assert np.array_equal(codes[:, 0], codes[:, 1])


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 50), st.integers(0, 99))
def test_rows_that_are_drawn_have_their_cells_and_keep_within_the_bounds(
    low: float, width: float, bins: int, seed: int
) -> None:
    target = {"column": "y", "kind": "number", "low": low, "high": low + width, "bins": bins}
    column = {"kind": "category", "values": ["a", "b"]}
    schema, draw = from_document({"target": target, "columns": {"x": column}}, "here"), np.random.default_rng(seed)
    codes = np.stack([draw.integers(0, size, 200) for size in schema.sizes], axis=1)
    numbers = np.array(schema.frame(codes, draw)["y"].to_pylist())
    assert low <= numbers.min() <= numbers.max() <= low + width
    made = samples_of(schema, codes, draw)
    assert made.of_numbers
    assert len(made.labelled) == len(made), "a number below the middle of its bounds is a label too"
    # float32 may bring a number into the next cell, by its last digits
    moved = schema.codes_of(made.inputs, made.labels) - codes
    assert not moved[:, 0].any()
    assert np.abs(moved[:, 1]).max() <= 1
    assert (moved[:, 1] != 0).mean() < 0.05


def test_the_last_digit_of_a_sum_does_not_leave_the_bounds() -> None:
    class Last(np.random.Generator):
        def random(self, n: Any = None, *others: Any) -> Any:
            return np.full(n, np.nextafter(1, 0))

    schema = agreed(TOML.replace("low = 0\nhigh = 40\nbins = 4", "low = 0\nhigh = 7.7\nbins = 3"))
    [[number]] = schema.target.drawn(np.array([2]), Last(np.random.PCG64(0))).values()
    assert number == 7.7
    assert schema.labels(pa.table({"stay": [number]}), "drawn") == pytest.approx(1)


def test_it_goes_through_its_file_and_its_document() -> None:
    schema = agreed()
    assert from_toml(schema.toml(), "again") == schema
    assert from_document(schema.document(), "again") == schema
    plain = agreed(TOML.replace("bins = 4\n", ""))
    assert plain.sizes == (5, 16)
    assert "bins" not in plain.document()["target"], "a schema without bins has the digest that it had"


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ("high = 40\n", "", ["low and high"]),
        ("low = 0\nhigh = 40\n", "", ["low and high"]),
        ("high = 40", "high = 0", ["low = 0.0", "high = 0.0"]),
        ("high = 40", "high = inf", ["high = inf", "finite"]),
        ("bins = 4", "bins = 1", ["target.bins", 1, 2]),
        ("bins = 4", "bins = 1001", ["target.bins", 1001, 1000]),
        ("bins = 4", 'event = "left"', ["low and high"]),
        ('kind = "number"\nlow = 0\nhigh = 40', 'values = ["a", "b"]', ["classes", "values"]),
    ],
)
def test_slips(old: str, new: str, facts: list[Any]) -> None:
    with refused("schema", *facts):
        agreed(TOML.replace(old, new, 1))


@pytest.mark.parametrize(("cell", "told"), [(None, "nothing"), (41.0, "'41'"), (-1.0, "'-1'"), ("long", "'long'")])
def test_a_row_without_a_number_within_the_bounds_has_no_cell(cell: Any, told: str, tmp_path: Path) -> None:
    rows = pa.table({"age": [1.0, 2.0], "stay": ["3" if isinstance(cell, str) else 3.0, cell]})
    with refused("data", "stay", told, "row 2", "0 to 40"):
        agreed().codes(rows, "data")
