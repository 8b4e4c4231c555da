"""What the table of the field compares: divisions, last layers, methods, and of each the runs with the chosen learning rate."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from stored import BASELINE, FOLDER

from fedfill.algorithms import find
from fedfill.runs.directory import read_toml

PARTITIONS = {"dirichlet:0.5": "Dirichlet .5", "dirichlet:0.1": "Dirichlet .1", "classes:1": "one class per client"}
HEADS = {"trained": "as trained", "ccvr": "with `ccvr`"}
NORMALISED = "cnn2bn"
"""The network of methods that need batch norm, which stands in their names; all others have one network."""
GRIDS = ("trained.toml", "sums.toml", "normalised.toml")


@dataclass(frozen=True)
class Asked:
    """What a grid's file asks for of a method.

    Attributes:
        algorithm: Its name on the command line.
        options: Of all its runs, the method's own settings among them; as text.
        rates: Whether the learning rate is chosen.
    """

    algorithm: str
    options: dict[str, str]
    rates: bool


@functools.cache
def asked() -> dict[str, Asked]:
    """All methods that the grids' files name, in their order.

    Where a file names an algorithm again, with other settings, these stand in its name.
    """
    found: dict[str, Asked] = {}
    for file in GRIDS:
        grid = read_toml(FOLDER / file, "grid")
        shared = {name: str(value) for name, value in grid["options"].items()}
        for text in grid["algorithms"]:
            algorithm, _, settings = text.partition(":")
            own = dict(part.split("=") for part in settings.split(",") if part)
            rates = own.pop("learning_rate", None) is not None
            name = with_network(algorithm, shared.get("model", ""))
            once = {"rounds": "1"} if find(algorithm).single_round else {}  # no more are run, whatever the file says
            found[f"{name}, {', '.join(own.values())}" if name in found else name] = Asked(
                algorithm, shared | own | once, rates
            )
    return found


def with_network(algorithm: str, model: str) -> str:
    """A method's name in the table."""
    return f"{algorithm}, {NORMALISED}" if model == NORMALISED else algorithm


def baseline_of(name: str) -> str:
    """FedAvg on the same network."""
    return with_network(BASELINE, NORMALISED if NORMALISED in name.split(", ")[1:] else "")


def methods(lines: list[dict[str, Any]], partition: str) -> list[str]:
    """Those with a run in a division."""
    return list(dict.fromkeys(line["algorithm"] for line in lines if line["partition"] == partition))


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


def apart(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> list[float]:
    """Differences in points, for each seed that both have."""
    of_seed = {run["seed"]: accuracy for run, accuracy in zip(base, accuracies(base), strict=True)}
    pairs = zip(runs, accuracies(runs), strict=True)
    return [accuracy - of_seed[run["seed"]] for run, accuracy in pairs if run["seed"] in of_seed]
