"""Markov random fields of a table's columns: the distribution of the largest entropy that fits some noisy tables best.

McKenna, Sheldon and Miklau, "Graphical-model based estimation and inference for differential privacy" (2019). The package ``mbi``
of its authors finds the factors, by mirror descent (`fitted`); it is loaded where it is used, as it takes seconds and is no part of
fedfill. What the factors say is worked out here: columns are eliminated one after the other (`elimination`), and what is
left is a network that is drawn from as any other (`network_of`).
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedfill.statistics.marginals import Clique, Network, Noisy, Table

STEPS = 1000
"""Of mirror descent."""


def elimination(sizes: Sequence[int], cliques: Sequence[Clique], root: int) -> dict[int, Clique]:
    """An order in which each column depends on few of those before it.

    Columns are eliminated greedily, the one whose table has the fewest cells first; ties go by index. The columns that one meets
    when it is eliminated are its parents, and become neighbours of each other.

    Args:
        sizes: Cells of each column.
        cliques: Columns that a factor ties together.
        root: The column that is eliminated last, and has no parents.

    Returns:
        The parents of each column, the root first and parents before children: for any factors on these cliques the distribution is
        the product of p(column given its parents).
    """
    near: dict[int, set[int]] = {k: set() for k in range(len(sizes))}
    for clique in cliques:
        for a, b in itertools.permutations(clique, 2):
            near[a].add(b)
    found: dict[int, Clique] = {}
    while near:
        column = min(
            (k for k in near if k != root or len(near) == 1),
            key=lambda k: (math.prod(sizes[j] for j in (k, *near[k])), k),
        )
        above = near.pop(column)
        found[column] = tuple(sorted(above))
        for a in above:
            near[a] = (near[a] | above) - {a, column}
    return dict(reversed(found.items()))


def cells(sizes: Sequence[int], parents: Mapping[int, Clique]) -> int:
    """Of the tables of all columns with their parents."""
    return sum(math.prod(sizes[k] for k in (*above, column)) for column, above in parents.items())


def network_of(
    sizes: Sequence[int], factors: Mapping[Clique, Table], parents: Mapping[int, Clique], total: float
) -> Network:
    """The network of a Markov random field.

    Args:
        sizes: Cells of each column.
        factors: By clique: logarithms, one axis for each column; p is proportional to exp of their sum.
        parents: Of each column, from `elimination` of these cliques.
        total: How many records there are.

    Returns:
        The same distribution, each column given its parents.
    """
    left, given = list(factors.items()), dict[int, Table]()
    for column in reversed(list(parents)):
        scope = (*parents[column], column)
        joint = np.zeros([sizes[k] for k in scope])
        for clique, factor in left:
            if column in clique:
                joint = joint + _aligned(factor, clique, scope)
        left = [(clique, factor) for clique, factor in left if column not in clique]
        peak = joint.max(-1, keepdims=True)
        summed = peak + np.log(np.exp(joint - peak).sum(-1, keepdims=True))
        given[column] = np.exp(joint - summed)
        left.append((parents[column], summed[..., 0]))
    tables: dict[int, Table] = {}
    for column, above in parents.items():
        mass: Table = np.array(total)
        if above:
            last = max(above, key=list(parents).index)  # whose parents are among the others'
            mass = Noisy((*parents[last], last), tables[last], 0.0).over(above)
        tables[column] = given[column] * mass[..., None]
    return Network(tuple(sizes), tuple(parents), dict(parents), tables, total)


def marginal(network: Network, columns: Clique) -> Table:
    """The expected counts of some columns.

    Args:
        network: Any.
        columns: Which.

    Returns:
        One axis for each, in this order.
    """
    needed, open_ = set(columns), list(columns)
    for column in open_:  # which grows
        more = [k for k in network.parents[column] if k not in needed]
        needed.update(more)
        open_.extend(more)
    axis = {column: k for k, column in enumerate(sorted(needed))}  # einsum knows 52 of them
    operands: list[Any] = []
    for column in axis:
        table = network.tables[column]
        sums = table.sum(-1, keepdims=True)
        operands += [
            np.divide(table, sums, out=np.zeros_like(table), where=sums > 0),
            [axis[k] for k in (*network.parents[column], column)],
        ]
    found: Table = network.total * np.einsum(*operands, [axis[k] for k in columns], optimize="greedy")
    return found


def fitted(sizes: Sequence[int], tables: Sequence[Noisy], total: float, root: int) -> Network:
    """The distribution of the largest entropy among those that fit tables best, in squares over the noise's variances.

    Args:
        sizes: Cells of each column.
        tables: Noisy ones, one for each clique; those without noise weigh the same.
        total: How many records there are.
        root: The column that drawing begins with.

    Returns:
        The network; the same on every call, as it starts from independent columns.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on float32, which is not in use here, and on caches
        import jax

        with jax.enable_x64(True):
            import mbi

            domain = mbi.Domain(tuple(range(len(sizes))), tuple(sizes))
            measured = [mbi.LinearMeasurement(x.counts.reshape(-1), x.clique, x.std or 1.0) for x in tables]
            model = mbi.estimation.MirrorDescent().estimate(domain, measured, known_total=total, iters=STEPS)
            factors = {
                tuple(clique): np.asarray(model.potentials[clique].values, dtype=np.float64)
                for clique in model.potentials.cliques
            }
    return network_of(sizes, factors, elimination(sizes, list(factors), root), total)


def _aligned(table: Table, clique: Clique, scope: Clique) -> Table:
    """A table with an axis for each column of the scope, of length 1 where it does not know the column."""
    order = [clique.index(column) for column in scope if column in clique]
    shape = [table.shape[clique.index(column)] if column in clique else 1 for column in scope]
    return table.transpose(order).reshape(shape)
