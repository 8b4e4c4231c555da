"""What was tried against the loss of the star under noise: ``mst``'s own parts on the bundled tables of many sites, many draws.

``python experiments/tables/star.py`` with epsilon 1 and the noise in the sum. The counts and their noise are made here, so that other
ways to spend the budget can be tried; the rest is the library's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from tree import averaged, counted

from fedfill.data.natural import divide, known_tables, read
from fedfill.privacy.accountant import std_for
from fedfill.statistics import marginals
from fedfill.statistics.marginals import Codes, Network, Noisy
from fedfill.synthesis.tables import samples_of
from natural import WITHIN
from run import judged, prepared

EPSILON, DELTA = 1.0, 1e-5
DRAWS = 3
"""Of the noise, for each of three seeds, which have other training rows."""


@dataclass(frozen=True)
class Way:
    """How the table is made.

    Attributes:
        shares: Of the squared budget: single columns, the choice of columns, the label with each of these.
        columns: So many are counted with the label, those that noisy counts say tell most of it; None: all, and there is no choice.
        shrunk: Whether what a column tells of the label is shrunk by what noise adds to it (James and Stein, not below 0).
    """

    shares: tuple[float, float, float] = (0.2, 0.0, 0.8)
    columns: int | None = None
    shrunk: bool = False


def learned(way: Way, codes: Codes, sizes: Sequence[int], draw: np.random.Generator) -> Network:
    """The distribution of one star."""
    d, mu = len(sizes), 1 / std_for(1.0, EPSILON, DELTA)
    label, pairs = d - 1, [(column, d - 1) for column in range(d - 1)]

    def ask(cliques: Sequence[marginals.Clique], share: float) -> list[Noisy]:
        return counted(codes, sizes, cliques, math.sqrt(len(cliques) / share) / mu, draw)

    ones = ask([(k,) for k in range(d)], way.shares[0])
    if way.columns is None or way.columns >= len(pairs):
        tables = ask(pairs, 1 - way.shares[0])
    else:
        first = {table.clique: table for table in ask(pairs, way.shares[1])}
        scores = marginals.dependence(list(first.values()), ones)
        kept = sorted(sorted(scores, key=lambda pair: -scores[pair])[: way.columns])
        tables = [averaged(table, first[table.clique]) for table in ask(kept, way.shares[2])]
    total = marginals.total_of([*ones, *tables])
    if way.shrunk:
        own = {table.clique[0]: table.counts for table in marginals.consistent(ones, total)}
        tables = [shrink(table, np.outer(own[table.clique[0]], own[label]) / total) for table in tables]
    known = {table.clique[0] for table in tables}
    parents = {label: (), **{column: (label,) if column in known else () for column in range(label)}}
    tables = [*ones, *tables]
    return marginals.network(sizes, parents, marginals.consistent(tables, total), total)


def shrink(table: Noisy, apart: np.ndarray) -> Noisy:
    """A table whose interaction is nearer to that of independent columns."""
    gap = table.counts - apart
    gap = gap - gap.mean(0) - gap.mean(1, keepdims=True) + gap.mean()
    added = table.std**2 * math.prod(size - 1 for size in gap.shape)
    return replace(table, counts=table.counts - min(1.0, added / max(float((gap**2).sum()), 1e-12)) * gap)


def main() -> None:
    """A line for each table, and how many are within the goal."""
    ways = {
        "as `mst` has it": Way(),
        "share_one .05": Way((0.05, 0.0, 0.95)),
        "share_one .4": Way((0.4, 0.0, 0.6)),
        "shrunk": Way(shrunk=True),
        "3 columns": Way((0.2, 0.3, 0.5), 3),
        "5 columns": Way((0.2, 0.3, 0.5), 5),
        "8 columns": Way((0.2, 0.3, 0.5), 8),
    }
    print(f"| table | {' | '.join(ways)} |\n|---|{'---|' * len(ways)}")
    losses: dict[str, list[float]] = {words: [] for words in ways}
    for name, known in known_tables().items():
        if known.sha256 is None:
            continue
        schema, whole, found = known.schema, read(known), {words: [] for words in ways}
        for seed in (0, 1, 2):
            train, test = (part.to_pandas() for part in divide(whole, schema, seed))
            held, (inputs, codes) = prepared(schema, test), prepared(schema, train)
            real = judged(inputs, codes[:, -1], held)[0]
            for words, way in ways.items():
                for k in range(DRAWS):
                    draw = np.random.default_rng(100 * seed + k)
                    made = learned(way, codes, schema.sizes, draw).sample(len(codes), draw)
                    found[words].append(
                        judged(samples_of(schema, made, draw).inputs.numpy(), made[:, -1], held)[0] - real
                    )
        for words, values in found.items():
            losses[words].append(fmean(values))
        print(f"| {name} | {' | '.join(f'{losses[words][-1]:+.3f}' for words in ways)} |", flush=True)
    print(f"| mean | {' | '.join(f'{fmean(values):+.3f}' for values in losses.values())} |")
    met = [sum(value >= -WITHIN for value in values) for values in losses.values()]
    print(f"| within {WITHIN} | {' | '.join(map(str, met))} |")


if __name__ == "__main__":
    main()
