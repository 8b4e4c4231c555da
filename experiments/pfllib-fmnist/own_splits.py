"""Accuracy on all clients' own test splits together, as PFLlib's table counts it: right answers of all clients by all their images.

``python experiments/pfllib-fmnist/own_splits.py runs/reproduce/pfllib-fmnist`` prints it after ``fedfill reproduce pfllib-fmnist``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, stdev


def over_images(summary: dict[str, list[float | None]]) -> float:
    """The share of all clients' test images that is classified right; clients without such images are out."""
    pairs = zip(summary["accuracy_by_client"], summary["own_test_samples"], strict=True)
    judged = [(share, n) for share, n in pairs if share is not None and n]
    return sum(share * n for share, n in judged) / sum(n for _, n in judged)


def main() -> None:
    """A line for each row: mean and deviation over the seeds, and of the difference to each client alone, seed by seed."""
    if len(sys.argv) != 2:
        raise SystemExit("allowed: one folder of runs")
    found: dict[str, dict[int, float]] = {}
    for path in sorted(Path(sys.argv[1]).glob("*/summary.json")):
        summary = json.loads(path.read_bytes())
        found.setdefault(summary["algorithm"], {})[summary["seed"]] = over_images(summary)
    if not found:
        raise SystemExit(f"{sys.argv[1]}: no finished run")
    alone = found.get("local", {})
    for name, by_seed in found.items():
        apart = [value - alone[seed] for seed, value in by_seed.items() if seed in alone]
        print(
            f"{name}, seeds {', '.join(map(str, by_seed))}: {spread([*by_seed.values()])}; − local: {spread(apart, '+')}"
        )


def spread(values: list[float], sign: str = "") -> str:
    """Mean and standard deviation."""
    mean = f"{fmean(values):{sign}.4f}" if values else "–"
    return f"{mean} ± {stdev(values):.4f}" if len(values) > 1 else mean


if __name__ == "__main__":
    main()
