"""What a notebook and a Python prompt show of runs and comparisons, and progress of calls from Python."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedfill
from fedfill.runs import progress
from fedfill.runs.shown import html_table

QUICK: dict[str, Any] = {"clients": 3, "rounds": 2, "local_epochs": 1}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> fedfill.Comparison:
    out = tmp_path_factory.mktemp("runs") / "<b>"
    return fedfill.compare(["fedavg", "local"], seeds=[0, 1], out=out, evaluate_every=2, **QUICK)


def test_a_result_at_a_glance(comparison: fedfill.Comparison) -> None:
    result = comparison.rows[0].finished[0]
    accuracy = result.summary["accuracy"]
    text = repr(result)
    assert text.startswith("<Result: fedavg on digits, dirichlet:0.5, 3 clients, seed 0: ")
    assert f"accuracy {accuracy:.4f} after 2 rounds" in text
    assert "\n" not in text
    html = result._repr_html_()
    assert f"<td>accuracy</td><td>{accuracy:.4f}</td>" in html
    assert "<b>" not in html
    assert "&lt;b&gt;" in html


def test_the_rounds_as_a_frame(comparison: fedfill.Comparison) -> None:
    result = comparison.rows[0].finished[0]
    frame = result.to_frame()
    assert frame.index.tolist() == [1, 2]
    assert frame.loc[2, "accuracy"] == result.summary["accuracy"]
    assert frame["accuracy"].isna().tolist() == [True, False]
    assert frame["seconds"].tolist() == [record["seconds"] for record in result.rounds]
    assert not frame.map(lambda cell: isinstance(cell, list | dict)).any().any()


def test_a_comparison_at_a_glance(comparison: fedfill.Comparison) -> None:
    text = repr(comparison)
    assert text.count("\n") == 1
    means = [100 * row.figure("accuracy")[0] for row in comparison.rows]  # type: ignore[operator]
    assert all(f"{row.label} {mean:.2f} ± " in text for row, mean in zip(comparison.rows, means, strict=True))
    html = comparison._repr_html_()
    assert f"{means[1] - means[0]:+.2f} ± " in html
    assert html.count("<tr>") == 3


def test_a_comparison_as_a_frame(comparison: fedfill.Comparison) -> None:
    frame = comparison.to_frame()
    assert frame["algorithm"].tolist() == ["fedavg", "fedavg", "local", "local"]
    assert frame["seed"].tolist() == [0, 1, 0, 1]
    for row in comparison.rows:
        mine = frame[frame["algorithm"] == row.label]
        assert mine["accuracy"].tolist() == row.values("accuracy")
        assert mine["bytes_up"].tolist() == row.values("bytes_up")
    assert "clients" not in frame


def test_what_stands_in_a_table_is_text() -> None:
    assert html_table("a & b", ["<"], [["<script>", 1]]) == (
        "<table><caption>a &amp; b</caption><thead><tr><th>&lt;</th></tr></thead>"
        "<tbody><tr><td>&lt;script&gt;</td><td>1</td></tr></tbody></table>"
    )


@pytest.mark.parametrize(
    ("terminal", "quiet", "shown"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_progress_is_shown_where_a_line_can_move(
    terminal: bool, quiet: bool, shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(progress, "err", Console(file=written, force_terminal=terminal, width=100))
    seen: list[int] = []
    run = fedfill.run(
        "fedavg", out=tmp_path / "a", quiet=quiet, on_round=lambda record, rounds: seen.append(record["round"]), **QUICK
    )
    assert seen == [1, 2]  # a follower of one's own is called in any case
    assert ("fedavg" in written.getvalue()) is shown
    written.truncate(0)
    fedfill.resume(run.directory, rounds=3, quiet=quiet)
    fedfill.compare(["fedavg"], seeds=[0], out=tmp_path / "b", quiet=quiet, **QUICK)
    assert ("1/3" in written.getvalue() or "fedavg, seed 0" in written.getvalue()) is shown
