"""The table of methods for clients whose images look different: accuracy on each domain's own test set, beside FedAvg's.

``fedfill grid experiments/field/personal.toml --data-dir DATA --out RUNS`` makes the runs. ``python experiments/field/personal.py RUNS``
takes their figures to ``personal.csv``; without a folder the figures there are shown again, in ``README.md``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from table import BASELINE, FOLDER, between, read, spread, write

from fedfill.runs.directory import read_toml

FILE = FOLDER / "personal.csv"
DOMAINS = ("mnist", "mnist_m", "svhn", "usps")
COLUMNS = ("algorithm", "seed", "mean", "worst", *DOMAINS, "megabytes", "seconds")


def main() -> None:
    """Collect where a folder of runs is named, then show."""
    if folders := sys.argv[1:]:
        write(FILE, COLUMNS, (line for folder in folders for line in collected(Path(folder))))
    show(read(FILE))


def collected(runs: Path) -> Iterator[dict[str, Any]]:
    """A line of each finished run, methods in the order of the grid's file."""
    for name in read_toml(FOLDER / "personal.toml", "grid")["algorithms"]:
        found = sorted(runs.glob(f"*/{name.replace(':', '-')}-seed*/summary.json"))
        for path in found:
            summary = json.loads(path.read_bytes())
            own = dict(zip(summary["client_names"], summary["accuracy_by_client"], strict=True))
            sent = (summary["bytes_up"] + summary["bytes_down"]) / 1e6
            values = (
                name, summary["seed"], fmean(own.values()), min(own.values()), *(own[domain] for domain in DOMAINS), sent, summary["seconds"],
            )  # fmt: skip
            yield dict(zip(COLUMNS, values, strict=True))


def show(lines: list[dict[str, str]]) -> None:
    """Methods by their mean over the domains."""
    runs: dict[str, dict[str, dict[str, str]]] = {}
    for line in lines:
        runs.setdefault(line["algorithm"], {})[line["seed"]] = line

    def percent(name: str, figure: str) -> list[float]:
        return [100 * float(line[figure]) for line in runs[name].values()]

    rows = []
    for name in sorted(runs, key=lambda name: -fmean(percent(name, "mean"))):
        cells = [f"`{name}`", spread(percent(name, "mean"))]
        for figure in ("mean", "worst"):
            base = {seed: 100 * float(line[figure]) for seed, line in runs[BASELINE].items()}
            apart = [100 * float(line[figure]) - base[seed] for seed, line in runs[name].items()]
            cells.append("" if name == BASELINE else spread(apart, signed=True))
            if figure == "mean":
                cells.append(spread(percent(name, "worst")))
        cells += [f"{fmean(percent(name, domain)):.1f}" for domain in DOMAINS]
        cells += [
            f"{fmean(float(line[figure]) for line in runs[name].values()):.0f}" for figure in ("megabytes", "seconds")
        ]
        rows.append(f"| {' | '.join(cells)} |")
    header = ["method", "mean", f"− `{BASELINE}`", "worst", f"− `{BASELINE}`", *DOMAINS, "MB", "seconds"]
    between("personal.py", "\n".join([f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}", *rows]))


if __name__ == "__main__":
    main()
