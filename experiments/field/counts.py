"""How many methods are near FedAvg, below it and above it: what the page's sentences count."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from choice import HEADS, PARTITIONS, apart, asked, baseline_of, chosen, methods
from stored import BASELINE, spread

from fedfill.studies.comparison import paired_difference

SUMS = ("fed3r", "softmax")
RUN = ("partition", "algorithm", "learning_rate", "seed")


def counted(lines: list[dict[str, Any]]) -> str:
    """Methods that train a network in rounds, by their difference to FedAvg on the same network and with the same last layer.

    What is counted is the mean difference over the seeds, in points.
    """
    header = [
        "division", "last layer", "methods", "within 1 point", "within 2", "more than 1 below", "more than 1 above",
        "surely below", "surely above", "above with every seed",
    ]  # fmt: skip
    rows = [f"| {' | '.join(header)} |", f"|---|---|{'---:|' * 6}---|---|"]
    for partition, words in PARTITIONS.items():
        for head, last in HEADS.items():
            gaps = {name: gaps_of(lines, partition, name, head) for name in compared(lines, partition)}
            if not gaps:
                continue
            means = [fmean(found) for found in gaps.values()]
            cells = [
                words, last, len(gaps),
                sum(abs(mean) <= 1 for mean in means), sum(abs(mean) <= 2 for mean in means),
                sum(mean < -1 for mean in means), sum(mean > 1 for mean in means),
                sum(side(found) < 0 for found in gaps.values()),
                listed(name for name, found in gaps.items() if side(found) > 0),
                listed(name for name, found in gaps.items() if min(found) > 0),
            ]  # fmt: skip
            rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def gains(lines: list[dict[str, Any]]) -> str:
    """What a last layer from sums brings FedAvg, beside what the best choice of a method does; and how far sums alone are above both."""
    header = [
        "division", f"`{BASELINE}`: with `ccvr` − as trained", "best other as trained",
        *(f"`{name}` − `{BASELINE}` with `ccvr`" for name in SUMS),
    ]  # fmt: skip
    rows = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    for partition, words in PARTITIONS.items():
        trained, ccvr = (chosen(lines, partition, BASELINE, head) for head in HEADS)
        if not ccvr:
            continue
        gaps = {name: gaps_of(lines, partition, name, "trained") for name in compared(lines, partition)}
        best = max(gaps, key=lambda name: fmean(gaps[name]))
        above = (spread(apart(chosen(lines, partition, name, "trained"), ccvr), signed=True) for name in SUMS)
        cells = spread(apart(ccvr, trained), signed=True), f"`{best}` {spread(gaps[best], signed=True)}", *above
        rows.append(f"| {' | '.join((words, *cells))} |")
    return "\n".join(rows)


def compared(lines: list[dict[str, Any]], partition: str) -> list[str]:
    """Methods with a network trained in rounds, and so with a last layer from sums beside it, but FedAvg; those with all seeds."""
    others = (name for name in methods(lines, partition) if asked()[name].algorithm != BASELINE)
    return [name for name in others if seeds(lines, partition, name) == seeds(lines, partition, baseline_of(name))]


def seeds(lines: list[dict[str, Any]], partition: str, name: str) -> list[str]:
    """Of a method's runs with a last layer from sums."""
    return [run["seed"] for run in chosen(lines, partition, name, "ccvr")]


def gaps_of(lines: list[dict[str, Any]], partition: str, name: str, head: str) -> list[float]:
    """Differences to FedAvg in points, seed by seed."""
    return apart(chosen(lines, partition, name, head), chosen(lines, partition, baseline_of(name), head))


def side(gaps: list[float]) -> int:
    """1: surely above, -1: surely below, as the 95 % interval of the mean does not hold 0; else 0."""
    found = paired_difference(gaps)
    return 0 if found.within_noise else int(math.copysign(1, found.mean))


def listed(names: Iterable[str]) -> str:
    """How many, and which."""
    found = [f"`{name}`" for name in names]
    return f"{len(found)}: {', '.join(found)}" if found else "0"


def totals(lines: list[dict[str, Any]]) -> str:
    """How much was run, and how often the end of the list of learning rates was chosen."""
    runs = {tuple(line[name] for name in RUN): line for line in lines}.values()
    picks = [(partition, name, head) for partition in PARTITIONS for name in asked() for head in HEADS]
    taken = [
        (found[0], ends(lines, *pick))
        for pick in picks
        if (found := chosen(lines, *pick)) and found[0]["learning_rate"]
    ]
    last, first = (sum(float(run["learning_rate"]) == end[k] for run, end in taken) for k in (1, 0))
    hours = sum(float(line["seconds"]) for line in runs) / 3600
    rounds = sum(line["head"] == "ccvr" for line in lines)
    return (
        f"{len(runs)} finished runs, {rounds} of them of networks in rounds; {hours:.1f} hours.\n"
        f"In {last} of {len(taken)} cases the highest learning rate that was run there is taken, in {first} the lowest."
    )


def ends(lines: list[dict[str, Any]], partition: str, name: str, head: str) -> tuple[float, float]:
    """The lowest and the highest learning rate with which a method was run in a division."""
    of = {"partition": partition, "algorithm": name, "head": head}.items()
    rates = [float(line["learning_rate"]) for line in lines if line.items() >= of]
    return min(rates), max(rates)
