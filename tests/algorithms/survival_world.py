"""Times to an event at four hospitals, and runs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from bench.same_bits import GIVEN, times

import fedfill

GRID = np.arange(4.0, 37, 4)
"""Of the schema."""


def run(algorithm: str, folder: Path, **more: Any) -> fedfill.Result:
    """A run on four hospitals, which keep all rows that the test set leaves."""
    options: dict[str, Any] = {"data": times(), "schema_file": GIVEN["their schema"](), "client_test": 0.0}
    return fedfill.run(algorithm, **{**options, "partition": "domain", **more}, out=folder)


def halves() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows to learn from, and rows to be tested on."""
    rows = times()
    held = np.arange(len(rows)) % 5 == 2
    return rows[~held].reset_index(drop=True), rows[held].reset_index(drop=True)


def given(folder: Path) -> tuple[str, pd.DataFrame]:
    """A folder with both, so that it is known which rows are learnt from, and these rows."""
    folder.mkdir()
    train, test = halves()
    train.to_csv(folder / "train.csv", index=False)
    test.to_csv(folder / "test.csv", index=False)
    return str(folder), train


def on_grid(rows: pd.DataFrame) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Times as the grid knows them, with events told at the next grid time and others at the last one before."""
    weeks, event = rows["weeks"].to_numpy(), rows["relapse"].to_numpy() == 1
    at = np.searchsorted(GRID, weeks, "left")
    event &= at < len(GRID)
    seen = np.concatenate([[0.0], GRID])[np.searchsorted(GRID, weeks, "right")]
    return np.where(event, GRID[np.clip(at, 0, len(GRID) - 1)], seen), event
