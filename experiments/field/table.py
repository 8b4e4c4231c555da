"""The table of the field: every method of one global model, with the last layer that it trained and with one from sums.

``fedfill grid experiments/field/trained.toml --data-dir DATA --out RUNS`` makes the runs, and ``sums.toml`` in its place those that
stand beside, in a folder of their own. ``python experiments/field/table.py RUNS RUNS2`` takes their figures to ``runs.csv``; without
folders the figures there are shown again, in ``README.md`` and ``bytes.png``.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib import pyplot

from fedfill.runs.directory import RunDirectory, read_toml, write_atomically
from fedfill.runs.shown import csv_text

FOLDER = Path(__file__).parent
FILE = FOLDER / "runs.csv"
PARTITIONS = {"dirichlet:0.5": "Dirichlet .5", "dirichlet:0.1": "Dirichlet .1", "classes:1": "one class per client"}
HEADS = {"trained": "as trained", "ccvr": "with `ccvr`"}
COLUMNS = (
    "partition", "algorithm", "learning_rate", "seed", "head", "validation", "accuracy", "megabytes", "seconds",
)  # fmt: skip
BASELINE = "fedavg"
NORMALISED = "cnn2bn"
"""The network of methods that need batch norm, which stands in their names; all others have one network."""
GRIDS = ("trained.toml", "sums.toml", "normalised.toml")


def main() -> None:
    """Collect where folders of runs are named, then show."""
    if folders := sys.argv[1:]:
        write(FILE, COLUMNS, sorted((line for folder in folders for line in collected(Path(folder))), key=place))
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
        summary, last = json.loads(path.read_bytes()), RunDirectory(path.parent).rounds()[-1]
        document = read_toml(path.parent / "experiment.toml", "run")
        name = with_network(summary["algorithm"], document["model"])
        rate = document["settings"].get("learning_rate", "") if asked()[name] else ""
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


@functools.cache
def asked() -> dict[str, bool]:
    """What the grids' files name, in their order, and whether the learning rate is chosen."""
    found = {}
    for file in GRIDS:
        grid = read_toml(FOLDER / file, "grid")
        for text in grid["algorithms"]:
            name = with_network(re.split("[:|]", text)[0], grid["options"].get("model", ""))
            found[name] = "learning_rate" in text
    return found


def with_network(algorithm: str, model: str) -> str:
    """A method's name in the table."""
    return f"{algorithm}, {NORMALISED}" if model == NORMALISED else algorithm


def baseline_of(name: str) -> str:
    """FedAvg on the same network."""
    return with_network(BASELINE, name.partition(", ")[2])


def over_records(shares: Iterable[float | None], samples: Iterable[int]) -> float:
    """A share of all records from the clients' own."""
    pairs = [(share, n) for share, n in zip(shares, samples, strict=True) if share is not None]
    return sum(share * n for share, n in pairs) / sum(n for _, n in pairs)


def place(line: dict[str, Any]) -> tuple[Any, ...]:
    """Where a line stands in the file."""
    partition, algorithm = list(PARTITIONS).index(line["partition"]), list(asked()).index(line["algorithm"])
    return partition, algorithm, float(line["learning_rate"] or 0), int(line["seed"]), line["head"] != "trained"


def read(file: Path) -> list[dict[str, str]]:
    """Stored figures."""
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def write(file: Path, columns: Sequence[str], lines: Iterable[dict[str, Any]]) -> None:
    """All of them, in one step."""
    write_atomically(file, csv_text(columns, ([line[name] for name in columns] for line in lines)).encode())


def between(script: str, text: str) -> None:
    """Put what a script has to show into the page, between its two comments."""
    page = FOLDER / "README.md"
    before, begin, rest = page.read_text().partition(f"<!-- figures: written by {script} -->")
    if not begin:
        raise SystemExit(f"{page}: no place for the figures of {script}")
    _, end, after = rest.partition("<!-- end of figures -->")
    write_atomically(page, (before + begin + "\n" + text + "\n" + end + after).encode())


def chosen(lines: list[dict[str, Any]], partition: str, algorithm: str, head: str) -> list[dict[str, Any]]:
    """The runs, by seed, with the learning rate that the clients' validation records choose; none where no run finished.

    A learning rate with which a seed's training diverged, and which so has fewer runs, is out.
    """
    by_rate: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if (line["partition"], line["algorithm"], line["head"]) == (partition, algorithm, head):
            by_rate.setdefault(line["learning_rate"], []).append(line)
    whole = max(map(len, by_rate.values()), default=0)
    full = [runs for runs in by_rate.values() if len(runs) == whole]
    best = max(full, key=lambda runs: fmean(float(run["validation"]) for run in runs), default=[])
    return sorted(best, key=lambda run: int(run["seed"]))


def accuracies(runs: list[dict[str, Any]]) -> list[float]:
    """In percent, by seed."""
    return [100 * float(run["accuracy"]) for run in runs]


def spread(values: list[float], signed: bool = False) -> str:
    """Mean and standard deviation, in percent or points."""
    if not values:
        return "–"
    mean = f"{fmean(values):+.1f}" if signed else f"{fmean(values):.1f}"
    return mean if len(values) < 2 else f"{mean} ± {stdev(values):.1f}"


def show(lines: list[dict[str, Any]]) -> None:
    """One table for each partition, methods by their accuracy as trained, or as sent."""
    parts = []
    for partition, words in PARTITIONS.items():
        names = dict.fromkeys(line["algorithm"] for line in lines if line["partition"] == partition)
        found = {name: {head: chosen(lines, partition, name, head) for head in HEADS} for name in names}
        if BASELINE not in found:
            continue
        bases = {name: found[baseline_of(name)] for name in found}
        header = [
            "method", *(f"{text} | learning rate | − `{BASELINE}`" for text in HEADS.values()), "MB", "seconds"
        ]  # fmt: skip
        parts.append(f"### {words[0].upper()}{words[1:]}\n\n| {' | '.join(header)} |\n|---|{'---:|' * 8}")
        for name in sorted(found, key=lambda name: -fmean(accuracies(found[name]["trained"]) or [0])):
            cells = [f"`{name}`"]
            for head in HEADS:
                runs, base = found[name][head], bases[name][head]
                of_seed = {run["seed"]: accuracy for run, accuracy in zip(base, accuracies(base), strict=True)}
                pairs = zip(runs, accuracies(runs), strict=True)
                apart = [accuracy - of_seed[run["seed"]] for run, accuracy in pairs if run["seed"] in of_seed]
                rate = runs[0]["learning_rate"] or "–" if runs else "–"
                cells += [
                    spread(accuracies(runs)),
                    rate,
                    "" if name == baseline_of(name) else spread(apart, signed=True),
                ]
            runs = found[name]["trained"]
            cells += [f"{fmean(float(run[figure]) for run in runs):.0f}" for figure in ("megabytes", "seconds")]
            parts[-1] += f"\n| {' | '.join(cells)} |"
    between("table.py", "\n\n".join(parts))


def draw(lines: list[dict[str, Any]]) -> None:
    """Accuracy against bytes: a panel for each partition, a cross as trained or sent, a dot with the last layer from sums."""
    shown = [partition for partition in PARTITIONS if chosen(lines, partition, BASELINE, "trained")]
    figure, panels = pyplot.subplots(1, len(shown), figsize=(4.4 * len(shown), 4.6), squeeze=False, sharey=True)
    for axes, partition in zip(panels[0], shown, strict=True):
        points: dict[str, dict[str, tuple[float, float]]] = {head: {} for head in HEADS}
        for name in dict.fromkeys(line["algorithm"] for line in lines if line["partition"] == partition):
            for head in HEADS:
                if (runs := chosen(lines, partition, name, head)) and name != "central":
                    points[head][name] = fmean(float(run["megabytes"]) for run in runs), fmean(accuracies(runs))
        for head, style in (("trained", "C0x"), ("ccvr", "C1o")):
            axes.plot(*zip(*points[head].values(), strict=True), style, markersize=5)
        trained = points["trained"]
        for name in named(trained):
            axes.annotate(name, trained[name], fontsize=7, xytext=(4, -3), textcoords="offset points")
        if central := accuracies(chosen(lines, partition, "central", "trained")):
            axes.axhline(fmean(central), color="0.6", linewidth=1, linestyle="--")
        axes.set(title=PARTITIONS[partition], xlabel="MB up and down, all clients", xscale="log", xlim=(0.2, 800))
    first = panels[0][0]
    first.set_ylabel("accuracy on the test set, %")
    first.plot([], [], "C0x", label="as trained, or as sent")
    first.plot([], [], "C1o", label="the same with a last layer from sums (ccvr)")
    first.plot([], [], color="0.6", linewidth=1, linestyle="--", label="central")
    first.legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(FOLDER / "bytes.png", dpi=120)
    pyplot.close(figure)


def named(points: dict[str, tuple[float, float]]) -> list[str]:
    """Those with a name in the picture: the best and the worst, and where bytes are not those of the baseline; none over another."""
    usual = points[BASELINE][0]
    ends = {min(points, key=lambda name: points[name][1]), max(points, key=lambda name: points[name][1])}
    found: list[str] = []
    for name in sorted(points, key=lambda name: (name not in {*ends, BASELINE}, -points[name][1])):
        much, accuracy = points[name]
        free = all(abs(accuracy - points[one][1]) > 3 or abs(math.log10(much / points[one][0])) > 0.6 for one in found)
        if free and (abs(much / usual - 1) > 0.1 or name in {*ends, BASELINE}):
            found.append(name)
    return found


if __name__ == "__main__":
    main()
