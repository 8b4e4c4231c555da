"""The table of the field: every method of one global model, with the last layer that it trained and with one from sums.

``fedfill grid experiments/field/trained.toml --data-dir DATA --out RUNS`` makes the runs, and ``sums.toml`` in its place those that
stand beside, in a folder of their own. ``python experiments/field/table.py RUNS RUNS2`` takes their figures to ``runs.csv``: a run's
figures take the place of those that are stored of the same run, and what is stored of other runs stays. So folders may be given one
by one, before all their runs are finished. Without folders the figures in ``runs.csv`` are shown again, in ``README.md`` and
``bytes.png``, with the counts behind the page's sentences.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from choice import GRIDS, HEADS, PARTITIONS, accuracies, apart, asked, baseline_of, chosen, methods, with_network
from counts import counted, gains, totals
from picture import draw
from stored import BASELINE, FOLDER, amount, between, read, spread, store, summary_of

from fedfill.runs.directory import RunDirectory, read_toml

FILE = FOLDER / "runs.csv"
KEY = ("partition", "algorithm", "learning_rate", "seed", "head")
COLUMNS = (*KEY, "validation", "accuracy", "megabytes", "seconds")


def main() -> None:
    """Collect where folders of runs are named, then show."""
    if folders := sys.argv[1:]:
        store(FILE, COLUMNS, KEY, [line for folder in folders for line in collected(Path(folder))], place)
    lines = read(FILE)
    show(lines)
    draw(lines)


def collected(runs: Path) -> Iterator[dict[str, Any]]:
    """A line of each finished run for each last layer that it has: as trained, and from sums.

    The validation accuracy is over all clients' validation records. The seconds of a method as trained hold the head's sums, a
    second or less; its bytes do not.
    """
    finished = sorted(runs.glob("*/*/summary.json"))
    if not finished:
        raise SystemExit(f"{runs}: no finished run of a grid")
    for path in finished:
        summary, last = summary_of(path), RunDirectory(path.parent).rounds()[-1]
        document = read_toml(path.parent / "experiment.toml", "run")
        name = name_of(path.parent, summary["algorithm"], summary["partition"], document)
        rate = document["settings"].get("learning_rate", "") if asked()[name].rates else ""
        sent = summary["bytes_up"] + summary["bytes_down"]
        of_head = sum(summary["bytes_by_handler"].get("head_sums", {}).values())
        found = [("ccvr" if of_head else "trained", last["validation_by_client"], last["accuracy"], sent)]
        if of_head:
            trained = last["validation_of_trained_head"], last["accuracy_of_trained_head"], sent - of_head
            found.insert(0, ("trained", *trained))
        for head, shares, accuracy, much in found:
            judged = over_records(shares, summary["validation_samples"])
            values = (
                summary["partition"], name, rate, summary["seed"], head, round(judged, 6), accuracy,
                round(much / 1e6, 3), round(summary["seconds"], 1),
            )  # fmt: skip
            yield dict(zip(COLUMNS, map(str, values), strict=True))


def name_of(run: Path, algorithm: str, partition: str, document: dict[str, Any]) -> str:
    """A run's name in the table.

    Runs that no grid's file asks for would stand beside the others as if they were like them, and are refused. Of several names that
    fit a run it is the one with most settings.
    """
    network = with_network(algorithm, document["model"]).removeprefix(algorithm)
    named = [n for n, of in asked().items() if of.algorithm == algorithm and n.startswith(algorithm + network)]
    if not named or partition not in PARTITIONS:
        raise SystemExit(
            f"{run}: found {algorithm} with partition {partition}; allowed: what {', '.join(GRIDS)} ask for"
        )
    strays = {name: others_of(name, document) for name in named}
    fitting = [name for name in named if not strays[name]]
    if not fitting:
        raise SystemExit(f"{run}: {strays[named[0]][0]}, as the grid's file says")
    return max(fitting, key=lambda name: len(asked()[name].options))


def others_of(name: str, document: dict[str, Any]) -> list[str]:
    """What of a run's options is not as a method's grid asks."""
    strays = []
    for option, value in asked()[name].options.items():
        found = str(document["settings"].get(option, document.get(option)))
        if value not in (found, found.partition(":")[0]):  # a head is written down with its own settings
            strays.append(f"{option}: found {found}; allowed: {value}")
    return strays


def over_records(shares: Iterable[float | None], samples: Iterable[int]) -> float:
    """A share of all records from the clients' own."""
    pairs = [(share, n) for share, n in zip(shares, samples, strict=True) if share is not None]
    return sum(share * n for share, n in pairs) / sum(n for _, n in pairs)


def place(line: dict[str, str]) -> tuple[Any, ...]:
    """Where a line stands in the file."""
    partition, algorithm = list(PARTITIONS).index(line["partition"]), list(asked()).index(line["algorithm"])
    return partition, algorithm, float(line["learning_rate"] or 0), int(line["seed"]), line["head"] != "trained"


def show(lines: list[dict[str, Any]]) -> None:
    """One table for each division, methods by their accuracy as trained, or as sent; then what the page's sentences count."""
    parts = [shown(lines, partition) for partition in PARTITIONS if BASELINE in methods(lines, partition)]
    parts.append(f"### Counts\n\n{counted(lines)}\n\n{gains(lines)}\n\n{totals(lines)}")
    between("table.py", "\n\n".join(parts))


def shown(lines: list[dict[str, Any]], partition: str) -> str:
    """The table of a division."""
    names, words = methods(lines, partition), PARTITIONS[partition]
    found = {name: {head: chosen(lines, partition, name, head) for head in HEADS} for name in names}
    bases = {name: found[baseline_of(name)] for name in found}
    header = ["method", *(f"{text} | learning rate | − `{BASELINE}`" for text in HEADS.values()), "MB", "seconds"]
    rows = [f"### {words[0].upper()}{words[1:]}\n", f"| {' | '.join(header)} |", f"|---|{'---:|' * 8}"]
    for name in sorted(found, key=lambda name: -fmean(accuracies(found[name]["trained"]) or [0])):
        cells = [f"`{name}`"]
        for head in HEADS:
            runs = found[name][head]
            rate = runs[0]["learning_rate"] or "–" if runs else "–"
            gap = "" if name == baseline_of(name) else spread(apart(runs, bases[name][head]), signed=True)
            cells += [spread(accuracies(runs)), rate, gap]
        runs = found[name]["trained"]
        cells += [amount(float(run[figure]) for run in runs) for figure in ("megabytes", "seconds")]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
