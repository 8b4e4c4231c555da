"""Reports of what is judged by another figure than the share that is right: R² of numbers, the C-index of times to an event."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from bench.same_bits import GIVEN, times
from tests.algorithms.survival_world import run
from tests.experiment.test_numbers import TINY, TOML, stays
from tests.helpers import refused
from tests.studies.test_report import made

import fedfill
from fedfill.cli.terminal import print_result


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


def test_what_a_run_found_is_on_the_terminal_and_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cox, groups = run("cox", tmp_path / "cox"), run("kaplanmeier", tmp_path / "km", group="arm")
    row = next(row for row in cox.summary["findings"]["coefficients"] if row["name"] == "age")
    test = groups.summary["findings"]["log_rank"]
    (new,) = (one for name, one in groups.summary["findings"]["groups"].items() if name == "arm: new")
    wanted = {
        "cox": ("age", f"{row['hazard_ratio']:#.4g}", f"{row['low']:#.4g} to {row['high']:#.4g}", "95 % interval"),
        "km": ("arm: new", f"{new['rows_at_risk']:.0f}", f"{new['events']:.0f}", f"{new['median']:g}", f"{test['chi_square']:.4g}"),
    }  # fmt: skip
    for name, result in (("cox", cox), ("km", groups)):
        print_result(result)
        page, text = made(tmp_path, tmp_path / name), capsys.readouterr().out
        for words in wanted[name]:
            assert words in text
            assert words in page.text
        assert ("C-index" in text) == ("C-index" in page.text) == (name == "cox"), "curves rank nobody"
        assert ("nothing is scored" in page.text) == (name == "km")
        assert text.count("C-index, last round") == (name == "cox")
        assert "│ C-index  " not in text, "once is enough"
        assert "best C-index" not in text
        assert "variance over classes" not in text
        curves = pd.read_csv(tmp_path / name / "curves.csv")
        shown = page.table("Survival curves, percent")
        assert shown[0] == ["time", *curves["curve"].unique()]
        last = curves.groupby("curve", sort=False)["survival"].last()
        assert shown[-1] == ["36", *(f"{100 * s:.1f}" for s in last)]
    assert result.summary["tables"] == json.loads((tmp_path / "km" / "summary.json").read_text())["tables"]


@pytest.mark.parametrize("text", ["time,survival\n1,2\n", "curve,time,survival,low,high\na,x,1,,\n"])
def test_damaged_curves_are_named(text: str, tmp_path: Path) -> None:
    run("kaplanmeier", tmp_path / "km")
    (tmp_path / "km" / "curves.csv").write_text(text)
    with refused("report", "curves.csv", "damaged"):
        fedfill.report(tmp_path / "km", out=tmp_path / "page.html")


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
