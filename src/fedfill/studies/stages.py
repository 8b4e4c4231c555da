"""The stages of a study, each a comparison, and what a budget leaves of them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedfill.algorithms import parse_variant
from fedfill.errors import FedfillError
from fedfill.studies.compare import compare, taken
from fedfill.studies.comparison import Comparison
from fedfill.studies.recommend import Candidate, ranked
from fedfill.studies.rules import REFERENCES, SUMS, TRAINED, Entry
from fedfill.studies.run import OnRun

SCREEN, FINAL, REFERENCE, PROBE = "screen", "final", "reference", "probe"
FINALISTS = 2
"""Trained methods that reach the last stage, beside FedAvg."""

CLOSE = 0.01
"""How near to the best of them on validation a second method on sums has to be to reach the last stage, too."""

SCREENED = 0.2
"""Share of the rounds that the screening has, and of a budget's seconds at the most 0.3."""


@dataclass(frozen=True)
class Plan:
    """What the last stage has; with a budget it follows from the seconds of the screening.

    Attributes:
        labels: The finalists.
        rounds: Of those that are trained.
        seeds: Of each.
        screened_rounds: Of the screening.
    """

    labels: tuple[str, ...]
    rounds: int
    seeds: tuple[int, ...]
    screened_rounds: int


@dataclass(frozen=True)
class Stages:
    """Runs one stage after the other, each a comparison in its own folder."""

    folder: Path
    seeds: tuple[int, ...]
    on_run: OnRun | None
    on_stage: Callable[[str, int], None] | None
    options: Mapping[str, Any]
    quiet: bool = False
    timed: list[tuple[float, float]] = field(default_factory=list)
    """Of each stage in this call its seconds, and those of a run beside its rounds."""

    @property
    def elapsed(self) -> float:
        """Seconds of all stages in this call."""
        return sum(seconds for seconds, _ in self.timed)

    @property
    def beside(self) -> float:
        """Seconds that a run of the last stage took beside its rounds: arranging, reading, writing."""
        return self.timed[-1][1] if self.timed else 0.0

    def without(self, *names: str) -> Stages:
        """The same without some options."""
        return replace(self, options={name: value for name, value in self.options.items() if name not in names})

    def run(self, name: str, labels: Sequence[str], seeds: Sequence[int], rounds: int) -> Comparison:
        """A stage; what of it was run already is read."""
        if self.on_stage is not None:
            self.on_stage(name, len(labels) * len(seeds))
        # ten evaluations tell whether a method still rises; of the screening the last one decides, and one before shows that it goes
        every = {FINAL: rounds // 10, SCREEN: math.ceil(rounds / 2), REFERENCE: rounds}.get(name, 1)
        begun = time.monotonic()
        found = compare(
            labels,
            seeds=seeds,
            out=self.folder / name,
            on_run=self.on_run,
            quiet=self.quiet,
            rounds=rounds,
            evaluate_every=max(1, every),
            **taken([parse_variant(label)[0] for label in labels], self.options),
        )
        took, seconds = time.monotonic() - begun, [r.summary["seconds"] for row in found.rows for r in row.finished]
        self.timed.append((took, max(0.0, took - sum(seconds)) / max(1, len(seconds))))
        return found

    def seconds_per_round(self) -> float:
        """Of FedAvg, from its second round; the first one has costs of its own."""
        (row,) = self.run(PROBE, ["fedavg"], self.seeds[:1], 2).rows
        return float(row.finished[0].rounds[-1]["seconds"]) if row.finished else 1.0


def parse_budget(text: str | float | None) -> float | None:
    """Seconds of a budget such as ``"10m"``."""
    if text is None or (
        isinstance(text, int | float) and not isinstance(text, bool) and math.isfinite(text) and text > 0
    ):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h)\s*", str(text))
    if match is None or not float(match[1]):
        raise FedfillError(f"budget: found {text!r}; allowed: a time such as 90s, 10m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def screened_rounds_of(
    rounds: int, seconds: float | None, per_round: float | None, tried: Sequence[Entry], beside: float = 0.0
) -> int:
    """Rounds of the screening, for the seconds of a round of FedAvg and those that a run takes beside its rounds."""
    wanted = max(1, math.ceil(SCREENED * rounds))
    if seconds is None or not per_round:
        return wanted
    trained = sum(entry.kind == TRAINED for entry in (*tried, *REFERENCES))
    share = 0.3 * seconds - trained * beside
    return max(1, min(wanted, int(share / (per_round * max(1, trained)))))


def plan_for(
    screening: Comparison, eligible: Sequence[Candidate], tried: Sequence[Entry], rounds: int, screened_rounds: int,
    seeds: tuple[int, ...], seconds: float | None, private: bool, elapsed: float = 0.0,
    beside: float = 0.0,
) -> Plan:  # fmt: skip
    """Who goes on, for how long: of the methods on sums the best and who is close, of the trained ones the best beside FedAvg."""
    rows = {row.label: row for row in screening.rows}

    def best_first(kind: str) -> list[tuple[str, float]]:
        mine = [entry.label for entry in tried if entry.kind == kind]
        if kind == TRAINED and any(candidate.label == "local" for candidate in eligible):
            mine.append("local")
        scores: dict[str, float] = {}
        for candidate in ranked(eligible):
            for label in mine:
                if candidate.label == label or (
                    label.startswith(candidate.label) and "head=" in label[len(candidate.label) :]
                ):
                    scores.setdefault(label, candidate.mean or 0)
        return sorted(scores.items(), key=lambda item: -item[1])

    sums, trained = best_first(SUMS), best_first(TRAINED)
    chosen = [label for label, value in sums[:2] if sums[0][1] - value <= CLOSE]
    chosen += [label for label, _ in trained[:FINALISTS]]
    chosen += [label for label, _ in trained[FINALISTS:] if label.startswith("fedavg")]
    if seconds is None or private:
        return Plan(tuple(chosen), rounds, seeds, screened_rounds)
    trained_for = sum(result.summary["seconds"] for row in screening.rows for result in row.finished)
    left = 0.9 * (seconds - max(trained_for, elapsed)) - len(REFERENCES) * beside

    def took(label: str) -> float:
        return float(rows[label].finished[0].summary["seconds"]) if label in rows and rows[label].finished else 0.0

    on_sums = [label for label, _ in sums if label in chosen]
    once = sum(map(took, on_sums))
    each = sum(took(label) for label in chosen if label not in on_sums) / screened_rounds
    reference = sum(took(entry.label) for entry in REFERENCES) / screened_rounds
    for n in range(len(seeds), 0, -1):
        most = int((left - n * (once + len(chosen) * beside)) / max(n * each + reference, 1e-9))
        if most >= min(rounds, 10) or n == 1:
            return Plan(tuple(chosen), max(min(rounds, most), min(screened_rounds, rounds)), seeds[:n], screened_rounds)
    raise AssertionError("one seed always has a plan")


def plan_of(held: Mapping[str, Any]) -> Plan | None:
    """The plan that a study has written down; None where it came to none."""
    if "plan" not in held:
        return None
    plan = held["plan"]
    return Plan(tuple(plan["labels"]), int(plan["rounds"]), tuple(plan["seeds"]), int(plan["screened_rounds"]))
