"""The table of methods for clients whose images look different: accuracy on each domain's own test set, beside FedAvg's.

``fedfill grid experiments/field/personal.toml --data-dir DATA --out RUNS`` makes the runs. ``python experiments/field/personal.py RUNS``
takes their figures to ``personal.csv``: they take the place of those that are stored of the same runs, and what is stored of other
runs stays. Without a folder the figures in ``personal.csv`` are shown again, in ``README.md``; beside them those that ``everyone.py``
makes of the same runs' models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from stored import BASELINE, FOLDER, amount, between, read, spread, store, summary_of

from fedfill.runs.directory import read_toml

FILE = FOLDER / "personal.csv"
EVERYONE = FOLDER / "everyone.csv"
DOMAINS = ("mnist", "mnist_m", "svhn", "usps")
KEY = ("algorithm", "seed")
COLUMNS = (*KEY, "mean", "worst", *DOMAINS, "megabytes", "seconds")


def main() -> None:
    """Collect where a folder of runs is named, then show."""
    if folders := sys.argv[1:]:
        store(FILE, COLUMNS, KEY, [line for folder in folders for line in collected(Path(folder))], place)
    show(read(FILE))


def asked() -> list[str]:
    """Methods in the order of the grid's file."""
    names: list[str] = read_toml(FOLDER / "personal.toml", "grid")["algorithms"]
    return names


def collected(runs: Path) -> Iterator[dict[str, str]]:
    """A line of each finished run."""
    for path, name in finished(runs).items():
        summary = summary_of(path)
        own = dict(zip(summary["client_names"], summary["accuracy_by_client"], strict=True))
        sent = (summary["bytes_up"] + summary["bytes_down"]) / 1e6
        values = (
            name, summary["seed"], fmean(own.values()), min(own.values()), *(own[domain] for domain in DOMAINS), sent, summary["seconds"],
        )  # fmt: skip
        yield dict(zip(COLUMNS, map(str, values), strict=True))


def finished(runs: Path) -> dict[Path, str]:
    """The summaries of a grid's finished runs, and their methods."""
    found = {
        path: name for name in asked() for path in sorted(runs.glob(f"*/{name.replace(':', '-')}-seed*/summary.json"))
    }
    if not found:
        raise SystemExit(f"{runs}: no finished run of personal.toml")
    return found


def place(line: dict[str, str]) -> tuple[int, int]:
    """Where a line stands in the file."""
    return asked().index(line["algorithm"]), int(line["seed"])


def show(lines: list[dict[str, str]]) -> None:
    """Methods by their mean over the domains."""
    runs: dict[str, dict[str, dict[str, str]]] = {}
    for line in lines:
        runs.setdefault(line["algorithm"], {})[line["seed"]] = line
    everyone: dict[str, list[float]] = {}
    for line in read(EVERYONE) if EVERYONE.exists() else []:
        everyone.setdefault(line["algorithm"], []).append(100 * float(line["everyone"]))

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
        cells.append(spread(everyone.get(name, [])))
        cells += [amount(float(line[figure]) for line in runs[name].values()) for figure in ("megabytes", "seconds")]
        rows.append(f"| {' | '.join(cells)} |")
    gap = f"− `{BASELINE}`"
    header = ["method", "mean", gap, "worst", gap, *DOMAINS, "everyone's", "MB", "seconds"]
    between("personal.py", "\n".join([f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}", *rows]))


if __name__ == "__main__":
    main()
