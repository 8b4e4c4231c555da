"""experiments/missing.py: what it lists is what the tables' pages lack."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from fedfill.studies.table import read_entries, read_table

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


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
