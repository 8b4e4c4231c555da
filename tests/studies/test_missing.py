"""experiments/missing.py: what it lists is what the tables' pages lack, and what it runs fills them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fedfill.studies.table import BEGIN, END, read_entries, read_table

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TABLE = """
title = "Made up"
source = "Nobody."
figures = ["accuracy"]

[options]
data = "digits"
data_fraction = 0.2
clients = 2
rounds = 20
model = "mlp"

[[rows]]
name = "FedAvg"
algorithm = "fedavg"
"""


def test_it_lists_the_rows_of_a_table_that_lack_seeds() -> None:
    name = "sdafl-figure2-fmnist"
    found = subprocess.run(
        [sys.executable, str(EXPERIMENTS / "missing.py"), name], capture_output=True, text=True, check=True
    )
    first, _, _, *lines = found.stdout.splitlines()
    rows = [row.name for row in read_table(EXPERIMENTS / name).rows]
    entries = read_entries(EXPERIMENTS / name)
    kept = {row: {entry.seed for entry in entries if entry.row == row} for row in rows}
    lacking = {row: sorted({0, 1, 2} - kept[row]) for row in rows if kept[row] < {0, 1, 2}}
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {line[1]: line[2] for line in cells} == {row: ", ".join(map(str, seeds)) for row, seeds in lacking.items()}
    counts = [len(rows) - len(lacking), len(rows), sum(map(len, lacking.values()))]
    assert list(map(int, re.findall(r"\d+", first))) == counts


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the program and a table that nothing was run of yet."""
    (tmp_path / "made-up").mkdir()
    (tmp_path / "made-up" / "table.toml").write_text(TABLE)
    shutil.copy(EXPERIMENTS / "missing.py", tmp_path)
    return tmp_path


@pytest.fixture
def missing(place: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("missing", place / "missing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["missing"] = module  # where its dataclass is looked for
    spec.loader.exec_module(module)
    del sys.modules["missing"]
    return module


def test_runs_stop_at_ctrl_c_and_go_on_and_fill_the_page(place: Path, missing: ModuleType) -> None:
    command = [sys.executable, str(place / "missing.py"), "--run", "--out", str(place / "runs")]
    # a session of its own is a group of processes, and Ctrl-C reaches all of a group
    stopped = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while stopped.poll() is None and not any(file.stat().st_size for file in place.glob("runs/*/*/rounds.jsonl")):
        time.sleep(0.01)
    os.killpg(stopped.pid, signal.SIGINT)
    _, words = stopped.communicate()
    assert stopped.returncode == 130
    assert "Traceback" not in words
    assert words.splitlines()[-1].startswith("stopped")
    (begun,) = place.glob("runs/made-up/*")  # of three: none was begun after Ctrl-C
    assert not (begun / "summary.json").exists()

    done = subprocess.run([*command, "--at-once", "3"], capture_output=True, text=True, check=True)
    assert [entry.seed for entry in read_entries(place / "made-up")] == [0, 1, 2]
    assert "| 0, 1, 2 |" in (place / "made-up" / "README.md").read_text()
    assert sorted(re.findall(r"made-up, FedAvg, seed (\d): finished", done.stdout)) == ["0", "1", "2"]
    assert (begun / "summary.json").exists()
    assert [row.missing for row in missing.rows()] == [[]]


def test_a_run_that_fails_is_named_and_stops_no_other(
    missing: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **how: Any) -> SimpleNamespace:
        seen.append(command)
        wrong = command[command.index("--seeds") + 1] == "1"
        return SimpleNamespace(
            returncode=2 * wrong, stderr="much\nfedfill: data: found no 'digits'\n" if wrong else "much\n"
        )

    monkeypatch.setattr(missing.subprocess, "run", run)
    monkeypatch.setattr(
        sys, "argv", ["missing.py", "--run", "--data-dir", "DATA", "--device", "cuda", "--out", "OUT", "--at-once", "2"]
    )
    with pytest.raises(SystemExit, match="1 of 3 runs failed"):
        missing.main()
    out = capsys.readouterr().out
    assert "seed 1: failed: fedfill: data: found no 'digits'\n" in out
    assert len(re.findall(r"seed [02]: finished", out)) == 2
    start = ["-m", "fedfill", "reproduce", str(missing.FOLDER / "made-up"), "--only", "FedAvg", "--seeds"]
    end = ["--out", "OUT", "--device", "cuda", "--workers", "1", "--data-dir", "DATA"]
    assert sorted(seen) == [[sys.executable, *start, str(seed), *end] for seed in (0, 1, 2)]


def test_the_shortest_runs_come_first_and_unknown_ones_last(
    missing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = missing.tables()
    rows = "".join(f'\n[[rows]]\nname = "{name}"\nalgorithm = "fedavg"\n' for name in ("long", "short", "full"))
    (folder / "table.toml").write_text(TABLE + rows)
    lines = [
        "|  | seeds | seconds |",
        "|---|---|---|",
        "| long | 0 | 1,200 |",
        "| short | 0, 2 | 90 |",
        "| full | 0, 1, 2 | 5 |",
    ]
    (folder / "README.md").write_text("\n".join([BEGIN, *lines, END]))
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(
        missing, "run", lambda pairs, words, at_once: found.extend((row.name, seed) for row, seed in pairs)
    )
    monkeypatch.setattr(sys, "argv", ["missing.py", "--run"])
    missing.main()
    assert found == [("short", 1), ("long", 1), ("long", 2), ("FedAvg", 0), ("FedAvg", 1), ("FedAvg", 2)]


@pytest.mark.parametrize(
    ("words", "answer"), [(["made-upp"], "did you mean 'made-up'"), (["--at-once", "0"], "--at-once: found 0")]
)
def test_slips_are_answered_before_anything_runs(
    missing: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    answer: str,
) -> None:
    monkeypatch.setattr(missing, "run", None)
    monkeypatch.setattr(sys, "argv", ["missing.py", "--run", *words])
    with pytest.raises(SystemExit) as ended:
        missing.main()
    assert ended.value.code == 2
    assert answer in capsys.readouterr().err
