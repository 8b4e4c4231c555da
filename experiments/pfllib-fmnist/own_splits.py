"""Accuracy on all clients' own test splits together, as PFLlib's table counts it: right answers of all clients by all their images.

``python experiments/pfllib-fmnist/own_splits.py runs/reproduce/pfllib-fmnist`` takes the finished runs there into ``own_splits.csv``,
where they replace what is stored of the same runs, and writes the second table of ``README.md``; without a folder it writes what is
stored. Runs whose digest is not in ``results.json`` are refused.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedfill.runs.directory import read_toml, write_atomically
from fedfill.runs.shown import csv_text

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- own splits: written by own_splits.py -->\n", "<!-- end of own splits -->"
COLUMNS = ("row", "seed", "right", "images")
ALONE = "each client alone"
Counts = dict[tuple[str, int], tuple[int, int]]  # (row, seed) -> right answers, images


def main() -> None:
    """Collect where a folder of runs is named, then write."""
    if len(sys.argv) > 2:
        raise SystemExit("allowed: at most one folder of runs")
    stored = read()
    if len(sys.argv) == 2:
        stored |= finished(Path(sys.argv[1]))
        lines = ((*run, *of_run) for run, of_run in sorted(stored.items()))
        write_atomically(FOLDER / "own_splits.csv", csv_text(COLUMNS, lines).encode())
    page = FOLDER / "README.md"
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page}: no place for the figures")
    write_atomically(page, (before + begin + "\n".join(table(stored)) + "\n" + end + after).encode())


def read() -> Counts:
    """What ``own_splits.csv`` holds."""
    place = FOLDER / "own_splits.csv"
    if not place.exists():
        return {}
    with place.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return {(line["row"], int(line["seed"])): (int(line["right"]), int(line["images"])) for line in lines}


def finished(runs: Path) -> Counts:
    """The counts of a folder's finished runs, which are those of the table."""
    rows = {entry["digest"]: entry["row"] for entry in json.loads((FOLDER / "results.json").read_bytes())}
    found = {}
    for path in sorted(runs.glob("*/summary.json")):
        digest = read_toml(path.parent / "experiment.toml", "run").get("digest")
        if digest not in rows:
            raise SystemExit(f"{path.parent}: found a run that results.json does not have; allowed: runs of this table")
        summary = json.loads(path.read_bytes())
        found[rows[digest], int(summary["seed"])] = counts(summary)
    if not found:
        raise SystemExit(f"{runs}: no finished run")
    return found


def counts(summary: dict[str, Any]) -> tuple[int, int]:
    """Right answers of all clients on their own test splits, and how many images these have; clients without such images add none."""
    pairs = [
        (share, n)
        for share, n in zip(summary["accuracy_by_client"], summary["own_test_samples"], strict=True)
        if share is not None and n
    ]
    return sum(round(share * n) for share, n in pairs), sum(int(n) for _, n in pairs)


def table(stored: Counts) -> list[str]:
    """The lines of the page's table, the best row first: mean and deviation over the seeds, and of the difference seed by seed.

    Rows of which a run diverged are left out.
    """
    entries = json.loads((FOLDER / "results.json").read_bytes())
    diverged = {
        entry["row"] for entry in entries if "diverged" in entry
    }  # of which one seed less would be a luckier mean
    of: dict[str, dict[int, float]] = {}
    for (row, seed), (right, images) in sorted(stored.items()):
        if row not in diverged:
            of.setdefault(row, {})[seed] = right / images
    alone = of.get(ALONE, {})
    lines = [f"| own splits, all images together | seeds | | − {ALONE} |", "|---|---|---:|---:|"]
    for row, by_seed in sorted(of.items(), key=lambda pair: -fmean(pair[1].values())):
        apart = [value - alone[seed] for seed, value in by_seed.items() if seed in alone]
        gap = "" if row == ALONE else spread(apart, "+")
        lines.append(f"| {row} | {', '.join(map(str, by_seed))} | {spread([*by_seed.values()])} | {gap} |")
    return lines


def spread(values: list[float], sign: str = "") -> str:
    """Mean and standard deviation."""
    mean = f"{fmean(values):{sign}.3f}" if values else "–"
    return f"{mean} ± {stdev(values):.3f}" if len(values) > 1 else mean


if __name__ == "__main__":
    main()
