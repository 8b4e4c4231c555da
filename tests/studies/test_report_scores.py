"""Reports of what is judged by another figure than the share that is right: R² of numbers, the C-index of times to an event."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.same_bits import GIVEN, times
from tests.algorithms.survival_world import run
from tests.experiment.test_numbers import TINY, TOML, stays
from tests.studies.test_report import made

import fedfill


def test_times_to_an_event_are_judged_by_the_c_index(tmp_path: Path) -> None:
    cox = run("cox", tmp_path / "cox")
    fedavg = run("fedavg", tmp_path / "fedavg", model="hazards", rounds=3, local_epochs=1, client_test=0.2)
    index = f"{100 * fedavg.summary['c_index']:.1f}"
    page = made(tmp_path, tmp_path / "fedavg").text
    assert f"the C-index on everyone's test set is {index}" in page
    for word in ("Accuracy", "right order", "Worst client"):
        assert (word in page) is (word != "Accuracy"), word
    both = made(tmp_path, tmp_path / "cox", tmp_path / "fedavg").text
    assert f"{100 * cox.summary['c_index']:.1f}" in both
    assert index in both
    assert "Accuracy" not in both


def test_a_comparison_of_times(tmp_path: Path) -> None:
    options = {"data": times(), "schema_file": GIVEN["their schema"]()}
    found = fedfill.compare(
        ["fedavg", "local"],
        seeds=[0, 1],
        partition="domain",
        model="hazards",
        rounds=2,
        out=tmp_path / "compare",
        **options,
    )
    page = made(tmp_path, tmp_path / "compare").text
    difference = found.difference(found.rows[1], "c_index")
    assert difference is not None
    assert f"{100 * difference.mean:+.2f}" in page
    assert "C-index, in percent" in page
    assert "Accuracy" not in page


@pytest.mark.parametrize("name", ["fedavg", "local"])
def test_numbers_are_judged_by_r_squared(name: str, tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(TOML)
    result = fedfill.run(
        name, data=stays(), schema_file=tmp_path / "schema.toml", out=tmp_path / "run", **{**TINY, "rounds": 6}
    )
    page = made(tmp_path, tmp_path / "run").text
    assert f"the R² on everyone's test set is {100 * result.summary['accuracy']:.1f}" in page
    assert "R² on everyone's test set" in page
    assert "Accuracy" not in page
