"""A model of times to an event in use: risks and curves of new rows, the same as those that were fitted."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from bench.same_bits import times
from tests.algorithms.survival_world import GRID, run
from tests.helpers import refused
from typer.testing import CliRunner

import fedfill
from fedfill.cli import app
from fedfill.studies.model import Predictions


def test_a_row_is_told_the_curve_of_its_covariates(tmp_path: Path) -> None:
    result = run("cox", tmp_path / "run")
    exported = fedfill.export(result, tmp_path / "model")
    rows = pd.DataFrame({"age": [20, 90], "arm": ["new", "old"], "grade": ["low", "high"]})
    for place in (result, exported):
        found = fedfill.predict(place, rows)
        assert found.grid == tuple(GRID)
        assert found.survival.shape == (2, len(GRID))
        # Cox's own: S = exp(-sum of hazards, times exp of the risk)
        model = fedfill.load(place)
        net = model.network.classifier
        factor = net.risk(model.preprocess(rows)).exp().detach().double()
        hazard = net.log_hazard.exp().detach().double()
        assert found.survival.numpy() == pytest.approx(torch.exp(-factor * hazard.cumsum(0)).numpy(), abs=1e-5)
        assert found.risk[1] > found.risk[0]
    assert "times to an event on 9 grid times" in repr(model)
    assert repr(found) == "<2 predictions of times to an event>"


def test_medians_are_the_first_times_by_which_half_have_had_it() -> None:
    # events at 1 and 2, then none by 0, 1, 2
    chances = torch.tensor(
        [[0.5, 0.25, 0, 0, 0.25], [0.25, 0.25, 0, 0, 0.5], [0.1, 0.1, 0, 0, 0.8], [0, 0.3, 0, 0.4, 0.3]]
    )
    found = Predictions(tuple("abcde"), chances, grid=(1.0, 2.0))
    assert found.medians == [1.0, 2.0, None, 2.0]
    assert found.survival.numpy() == pytest.approx(np.array([[0.5, 0.25], [0.75, 0.5], [0.9, 0.8], [1.0, 0.5]]))
    assert found.risk.numpy() == pytest.approx(-np.log([0.25, 0.5, 0.8, 0.5]))
    header, first, *_, third, _ = found.table()
    assert header == ("file", "row", "risk", "median", "survival at 1", "survival at 2")
    assert first == ("", "0", "1.38629", "1", "0.500000", "0.250000")
    assert third[3] == ""
    with refused("top", "2", "1"):
        list(found.table(2))


def test_on_the_command_line(tmp_path: Path) -> None:
    run("kaplanmeier", tmp_path / "run")
    times().drop(columns=["weeks", "relapse"]).to_csv(tmp_path / "new.csv", index=False)
    run("cox", tmp_path / "ranks", strata="site")
    for _ in range(2):
        asked = ["predict", str(tmp_path / "ranks"), str(tmp_path / "new.csv"), "--out", str(tmp_path / "ranks.csv")]
        assert CliRunner().invoke(app, asked).exit_code == 0
    assert (tmp_path / "ranks.csv").read_text().startswith("file,row,risk\n")
    asked = ["predict", str(tmp_path / "run"), str(tmp_path / "new.csv")]
    printed = CliRunner().invoke(app, asked)
    rows = list(csv.reader(io.StringIO(printed.stdout)))
    assert printed.exit_code == 0
    assert len(rows) == 401
    assert len({tuple(row[2:]) for row in rows[1:]}) == 1, "one curve for everybody"
    for _ in range(2):  # its own file may be written again
        assert CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "found.csv")]).exit_code == 0
    assert (tmp_path / "found.csv").read_text().splitlines() == printed.stdout.splitlines()
    told = CliRunner().invoke(app, ["export", str(tmp_path / "run")]).stdout
    assert "tells times to an event on 9 grid times" in " ".join(told.split())
