"""Accuracy on all clients' own test splits together, as PFLlib's table counts it: right answers of all clients by all their images.

``python experiments/pfllib-fmnist/own_splits.py runs/reproduce/pfllib-fmnist`` takes the finished runs there into ``own_splits.csv``,
where they replace what is stored of the same runs, and prints the table; without a folder it prints what is stored.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from statistics import fmean, stdev

from fedfill.runs.directory import write_atomically
from fedfill.runs.shown import csv_text

STORED = Path(__file__).with_name("own_splits.csv")
COLUMNS = ("algorithm", "seed", "right", "images")
Counts = dict[tuple[str, int], tuple[int, int]]  # (algorithm, seed) -> right answers, images


def counts(summary: dict[str, list[float | None]]) -> tuple[int, int]:
    """Right answers of all clients on their own test splits, and how many images these have; clients without such images add none."""
    pairs = [
        (share, n)
        for share, n in zip(summary["accuracy_by_client"], summary["own_test_samples"], strict=True)
        if share is not None and n
    ]
    return sum(round(share * n) for share, n in pairs), sum(int(n) for _, n in pairs)


def main() -> None:
    """A line for each method: mean and deviation over the seeds, and of the difference to each client alone, seed by seed."""
    if len(sys.argv) > 2:
        raise SystemExit("allowed: at most one folder of runs")
    stored = read()
    if len(sys.argv) == 2:
        found = finished(Path(sys.argv[1]))
        if not found:
            raise SystemExit(f"{sys.argv[1]}: no finished run")
        stored |= found
        lines = ((*run, *of_run) for run, of_run in sorted(stored.items()))
        write_atomically(STORED, csv_text(COLUMNS, lines).encode())
    print("\n".join(table(stored)))


def read() -> Counts:
    """What ``own_splits.csv`` holds."""
    if not STORED.exists():
        return {}
    with STORED.open(newline="") as file:
        return {
            (line["algorithm"], int(line["seed"])): (int(line["right"]), int(line["images"]))
            for line in csv.DictReader(file)
        }


def finished(folder: Path) -> Counts:
    """The counts of a folder's finished runs."""
    summaries = [json.loads(path.read_bytes()) for path in sorted(folder.glob("*/summary.json"))]
    return {(summary["algorithm"], summary["seed"]): counts(summary) for summary in summaries}


def table(stored: Counts) -> list[str]:
    """The lines of the page's table, the best method first."""
    of: dict[str, dict[int, float]] = {}
    for (name, seed), (right, images) in sorted(stored.items()):
        of.setdefault(name, {})[seed] = right / images
    alone = of.get("local", {})
    lines = ["| own splits, all images together | seeds | | − each client alone |", "|---|---|---:|---:|"]
    for name, by_seed in sorted(of.items(), key=lambda pair: -fmean(pair[1].values())):
        apart = [value - alone[seed] for seed, value in by_seed.items() if seed in alone]
        difference = "" if name == "local" else spread(apart, "+")
        lines.append(f"| `{name}` | {', '.join(map(str, by_seed))} | {spread([*by_seed.values()])} | {difference} |")
    return lines


def spread(values: list[float], sign: str = "") -> str:
    """Mean and standard deviation."""
    mean = f"{fmean(values):{sign}.3f}" if values else "–"
    return f"{mean} ± {stdev(values):.3f}" if len(values) > 1 else mean


if __name__ == "__main__":
    main()
