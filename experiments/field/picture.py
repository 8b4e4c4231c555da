"""Accuracy against bytes, as a picture of the table of the field."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from choice import HEADS, PARTITIONS, accuracies, chosen, methods
from matplotlib import pyplot
from stored import BASELINE, FOLDER


def draw(lines: list[dict[str, Any]]) -> None:
    """Accuracy against bytes: a panel for each partition, a cross as trained or sent, a dot with the last layer from sums."""
    shown = [partition for partition in PARTITIONS if chosen(lines, partition, BASELINE, "trained")]
    figure, panels = pyplot.subplots(1, len(shown), figsize=(4.4 * len(shown), 4.6), squeeze=False, sharey=True)
    for axes, partition in zip(panels[0], shown, strict=True):
        points: dict[str, dict[str, tuple[float, float]]] = {head: {} for head in HEADS}
        for name in methods(lines, partition):
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
