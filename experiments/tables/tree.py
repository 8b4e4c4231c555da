"""Where the error of the tree comes from under noise, and what was tried against it: ``mst``'s own parts on one table, many draws.

``python experiments/tables/tree.py fair.csv --label affairs --above 0``. Epsilon 3 with the noise in the sum, as ``trust=server`` has it.
The counts and their noise are made here, so that each part can be left out; the rest is the library's.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pyarrow as pa
import torch

import fedfill
from fedfill.data.schema import read_schema
from fedfill.privacy.accountant import std_for
from fedfill.statistics import marginals
from fedfill.statistics.marginals import Clique, Codes, Noisy
from fedfill.statistics.sums import summed
from run import asked

EPSILON, DELTA = 3.0, 1e-5
DRAWS = 10
"""Of the noise, for each of three seeds, which have other training rows."""
Fit = Callable[[Sequence[Noisy], float], list[Noisy]]


@dataclass(frozen=True)
class Way:
    """How the table is made.

    Attributes:
        mu: Of Gaussian differential privacy, for all counts together; 0: no noise.
        shares: Of the squared budget: single columns, the choice of pairs, tables.
        choice: Whether the counts that pairs are chosen by have noise.
        tables: Whether the columns and the chosen pairs have noise.
        merged: Whether what pairs were chosen by is used for their tables too.
        fit: How tables are made to agree.
    """

    mu: float
    shares: tuple[float, float, float] = (0.2, 0.3, 0.5)
    choice: bool = True
    tables: bool = True
    merged: bool = False
    fit: Fit = marginals.consistent


def counted(
    codes: Codes, sizes: Sequence[int], cliques: Sequence[Clique], std: float, draw: np.random.Generator
) -> list[Noisy]:
    """Tables with noise."""
    records = torch.from_numpy(codes).double(), torch.zeros(len(codes))
    counts = summed(marginals.marginal_counts(sizes, cliques), [records])["counts"]
    exact = marginals.tables_of(counts, sizes, cliques, std)
    return [replace(table, counts=table.counts + std * draw.normal(size=table.counts.shape)) for table in exact]


def error(way: Way, codes: Codes, sizes: Sequence[int], seed: int) -> float:
    """The workload error of as many rows of one tree."""
    draw, d = np.random.default_rng(seed), len(sizes)
    ones, pairs = [(k,) for k in range(d)], list(itertools.combinations(range(d), 2))

    def ask(cliques: Sequence[Clique], share: float, noise: bool) -> list[Noisy]:
        std = math.sqrt(len(cliques) / share) / way.mu if noise and way.mu else 0.0
        return counted(codes, sizes, cliques, std, draw)

    of_one, of_choice, of_tables = way.shares
    chosen_by = ask(pairs, of_choice, way.choice)
    edges = marginals.spanning_tree(marginals.dependence(chosen_by, ask(ones, of_one, way.choice)), range(d))
    parents = {d - 1: (), **{child: (parent,) for parent, child in marginals.directed(edges, d - 1)}}
    tables = ask(sorted(tuple(sorted(edge)) for edge in edges), of_tables, way.tables)
    if way.merged:
        tables = [averaged(table, next(t for t in chosen_by if t.clique == table.clique)) for table in tables]
    tables = [*ask(ones, of_one, way.tables), *tables]
    total = marginals.total_of(tables)
    made = marginals.network(sizes, parents, way.fit(tables, total), total)
    return marginals.workload_error(made.sample(len(codes), draw), codes, sizes)


def averaged(a: Noisy, b: Noisy) -> Noisy:
    """Two counts of one clique, weighted by how exact each is."""
    of_a, of_b = a.std**-2, b.std**-2
    return Noisy(a.clique, (of_a * a.counts + of_b * b.counts) / (of_a + of_b), (of_a + of_b) ** -0.5)


def least_squares(tables: Sequence[Noisy], total: float) -> list[Noisy]:
    """The nearest tables, in l2 weighted by precision, that agree and are not negative (Dykstra): not one of them, as by turns."""
    shared = {tuple(sorted({*a.clique} & {*b.clique})) for a, b in itertools.combinations(tables, 2)}
    found, off = list(tables), [np.zeros_like(table.counts) for table in tables]
    for _ in range(300):
        for columns in sorted(shared - {()}, key=lambda columns: (-len(columns), columns)):
            found = marginals.agreed(found, columns)
        before = [table.counts + more for table, more in zip(found, off, strict=True)]
        found = [replace(table, counts=marginals.simplex(x, total)) for table, x in zip(found, before, strict=True)]
        off = [x - table.counts for table, x in zip(found, before, strict=True)]
    return marginals.consistent(found, total)


def main() -> None:
    """A line for each way: the error, and how many times that without noise it is."""
    frame, _ = asked(__doc__)
    mu = 1 / std_for(1.0, EPSILON, DELTA)
    ways = {
        "no noise": Way(0.0),
        "as `mst` has it": Way(mu),
        "noise in the choice of pairs alone": Way(mu, tables=False),
        "noise in the tables alone": Way(mu, choice=False),
        "shares .3, .1, .6": Way(mu, (0.3, 0.1, 0.6)),
        "shares .4, .1, .5": Way(mu, (0.4, 0.1, 0.5)),
        "shares .1, .1, .8": Way(mu, (0.1, 0.1, 0.8)),
        "the counts of the choice used again": Way(mu, merged=True),
        "tables by least squares": Way(mu, fit=least_squares),
        "least squares, shares .4, .1, .5": Way(mu, (0.4, 0.1, 0.5), fit=least_squares),
    }
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        fedfill.describe(frame, target="label", out=Path(place) / "schema.toml")
        schema = read_schema(Path(place) / "schema.toml")
    for seed in (0, 1, 2):
        train = frame.iloc[np.random.default_rng(seed).permutation(len(frame))[int(0.3 * len(frame)) :]]
        codes = schema.codes(pa.Table.from_pandas(train, preserve_index=False), "the table")
        judge = partial(mean_error, seed=seed)
        for words, way in ways.items():
            found.setdefault(words, []).append(judge(way, codes, schema.sizes))
        for times in (2, 4):
            words = f"{times} times the rows, each as often"
            found.setdefault(words, []).append(judge(Way(mu), np.repeat(codes, times, axis=0), schema.sizes))
    base = found["no noise"]
    print("| way | workload error | times that without noise |\n|---|---|---|")
    for words, errors in found.items():
        ratios = [error / exact for error, exact in zip(errors, base, strict=True)]
        print(f"| {words} | {spread(errors, 4)} | {spread(ratios, 2)} |")


def mean_error(way: Way, codes: Codes, sizes: Sequence[int], seed: int) -> float:
    """Over the draws of the noise."""
    return fmean(error(way, codes, sizes, DRAWS * seed + k) for k in range(DRAWS))


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation over the seeds."""
    return f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f}"


if __name__ == "__main__":
    main()
