"""What a benchmark found: rows of runs by set, and whether federation is worth it on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedfill.studies.benchmark_sets import BenchmarkSet
from fedfill.studies.comparison import Difference, Row, paired_difference

NEAR, WORTH = 0.01, 0.02
"""How near to central the best federated method shall be; from which lead of central over local on it shall beat local."""
ALONE = ("central", "local")
"""Methods that are no federation."""


@dataclass(frozen=True)
class Benchmark:
    """What the benchmark found.

    Attributes:
        sets: What it ran on, by name; those without rows are still to come.
        rows: By set, and by model and method, the runs of all seeds.
        seeds: One run of each for each, and one split.
        directory: Where runs, tables and splits lie.
        epsilon: Of one record, for the federated method; None: without noise.
    """

    sets: Mapping[str, BenchmarkSet]
    rows: Mapping[str, Mapping[tuple[str, str], Row]]
    seeds: tuple[int, ...]
    directory: Path
    epsilon: float | None = None

    def best(self, name: str, figure: str, methods: Callable[[str], bool]) -> tuple[str, Row] | None:
        """The model and the row of the highest mean among some methods; None where no row has the figure."""
        found = [
            (mean, model, row)
            for (model, method), row in self.rows[name].items()
            if methods(method) and (mean := row.figure(figure)[0]) is not None
        ]
        return max(found, key=lambda one: one[0])[1:] if found else None


@dataclass(frozen=True)
class Goal:
    """Whether federation reached on a set what it shall reach.

    Attributes:
        name: Of the set.
        figure: Its score, over all samples or within sites.
        central: The model of the better of the rows ``central``, and its row.
        local: The same of ``local``.
        best: The same of the best federated method.
        to_central: Its difference to central.
        to_local: Its difference to local.
        lead: Mean lead of central over local.
    """

    name: str
    figure: str
    central: tuple[str, Row]
    local: tuple[str, Row]
    best: tuple[str, Row]
    to_central: Difference
    to_local: Difference
    lead: float

    @property
    def met(self) -> bool:
        """Near central, and above local with the whole interval where central is `WORTH` above it."""
        return self.to_central.mean >= -NEAR and (self.lead < WORTH or _above(self.to_local))

    @property
    def sentence(self) -> str:
        """The verdict, in a few words."""
        said = []
        if self.to_central.mean < -NEAR:
            said.append(f"{-self.to_central.mean:.3f} below central")
        if self.lead >= WORTH and not _above(self.to_local):
            said.append("not surely above local")
        if self.to_local.mean < 0:
            said.append("local wins")
        return f"{'met' if self.met else 'not met'}{': ' if said else ''}{', '.join(said)}"


def difference(row: Row, other: Row | None, figure: str) -> Difference | None:
    """The paired difference of two rows of one set, seed by seed; None of a row to itself, and where a run has no such figure."""
    if other is None or row is other:
        return None
    pairs = list(zip(row.values(figure), other.values(figure), strict=True))
    if any(value is None for pair in pairs for value in pair):
        return None
    return paired_difference([own - base for own, base in pairs])


def central_and_local(
    found: Benchmark, name: str, figure: str
) -> tuple[tuple[str, Row] | None, tuple[str, Row] | None]:
    """Of a set the better of the rows ``central`` and the better of the rows ``local``, by a figure, each with its model."""
    return found.best(name, figure, lambda m: m == "central"), found.best(name, figure, lambda m: m == "local")


def goals(found: Benchmark) -> list[Goal]:
    """Of each set, over all samples and within sites, whether federation reached what it shall; none where a figure is missing."""
    judged = []
    for name in found.rows:
        for figure in (found.sets[name].score, found.sets[name].within):
            central, local = central_and_local(found, name, figure)
            federated = found.best(name, figure, lambda m: m not in ALONE)
            if central is None or local is None or federated is None:
                continue
            to_central, to_local = (difference(federated[1], other[1], figure) for other in (central, local))
            lead = difference(central[1], local[1], figure)
            if to_central is not None and to_local is not None and lead is not None:
                judged.append(Goal(name, figure, central, local, federated, to_central, to_local, lead.mean))
    return judged


def _above(found: Difference) -> bool:
    return found.half_width is not None and found.mean > found.half_width
