"""experiments/pfllib-fmnist: right answers of all clients by all their images, of runs of the table alone."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TABLE = Path(__file__).parents[2] / "experiments" / "pfllib-fmnist"


@pytest.fixture
def script(tmp_path: Path) -> ModuleType:
    """The script of a copy of the folder, so that it writes there."""
    folder = Path(shutil.copytree(TABLE, tmp_path / "table"))
    spec = importlib.util.spec_from_file_location("own_splits", folder / "own_splits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_of(place: Path, digest: str, seed: int, shares: list[float | None], sizes: list[int]) -> None:
    place.mkdir(parents=True)
    (place / "experiment.toml").write_text(f'digest = "{digest}"\n')
    summary: dict[str, Any] = {"seed": seed, "accuracy_by_client": shares, "own_test_samples": sizes}
    (place / "summary.json").write_text(json.dumps(summary))


def test_the_page_says_what_is_stored(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["own_splits.py"])
    before = (script.FOLDER / "README.md").read_text()
    script.main()
    assert (script.FOLDER / "README.md").read_text() == before


def test_right_answers_are_counted_by_hand(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script.FOLDER / "own_splits.csv").unlink()
    entries = [
        {"digest": "aa", "row": "each client alone"},
        {"digest": "bb", "row": "each client alone"},
        {"digest": "cc", "row": "X"},
        {"digest": "dd", "row": "Y"},
        {"digest": "ee", "row": "Y", "diverged": "training diverged"},
    ]
    (script.FOLDER / "results.json").write_text(json.dumps(entries))
    # 3 of 4 and 5 of 6; a client without a test split adds nothing
    run_of(tmp_path / "runs" / "a", "aa", 0, [0.75, 5 / 6, None], [4, 6, 0])
    run_of(tmp_path / "runs" / "b", "bb", 1, [0.5, 0.5], [4, 6])
    run_of(tmp_path / "runs" / "c", "cc", 0, [1.0, 0.5], [4, 6])
    run_of(tmp_path / "runs" / "d", "dd", 0, [1.0, 1.0], [4, 6])  # another seed of its row diverged
    assert script.finished(tmp_path / "runs") == {
        ("each client alone", 0): (8, 10), ("each client alone", 1): (5, 10), ("X", 0): (7, 10), ("Y", 0): (10, 10),
    }  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["own_splits.py", str(tmp_path / "runs")])
    script.main()
    written = (
        (script.FOLDER / "README.md").read_text().partition(script.BEGIN)[2].partition(script.END)[0].splitlines()[2:]
    )
    assert written == ["| X | 0 | 0.700 | -0.100 |", "| each client alone | 0, 1 | 0.650 ± 0.212 |  |"]
    assert script.read() == script.finished(tmp_path / "runs")


def test_runs_of_other_tables_are_refused_and_nothing_is_written(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (script.FOLDER / "own_splits.csv").read_bytes()
    run_of(tmp_path / "runs" / "a", "of another table", 0, [0.5], [4])
    monkeypatch.setattr(sys, "argv", ["own_splits.py", str(tmp_path / "runs")])
    with pytest.raises(SystemExit, match=r"a run that results\.json does not have"):
        script.main()
    assert (script.FOLDER / "own_splits.csv").read_bytes() == before
    with pytest.raises(SystemExit, match="no finished run"):
        script.finished(tmp_path)
