"""Synthetic tables: rows of drawn cells, and how like a real table they are: shares of cells and of pairs of cells, and how columns depend on each other.

Shares are compared by half the l1 distance, 0..1: how much of one distribution would have to move to become the other. The floor for
a method is `apart`, what a table has that is right in each column and knows of no pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from fedfill.data.samples import Samples
from fedfill.data.schema import Schema
from fedfill.statistics.marginals import Codes, Table, pair_shares


def samples_of(schema: Schema, codes: Codes, draw: np.random.Generator) -> Samples:
    """Rows with these cells as samples: each value is drawn within its cell."""
    encoding, where, table = schema.encoding(), Path("drawn rows"), schema.frame(codes, draw)
    values = encoding.values(schema.prepared(table, str(where)), where)
    return Samples(encoding.inputs(values, str(where)), torch.from_numpy(schema.labels(table, str(where))))


def shares(codes: Codes, sizes: Sequence[int]) -> list[Table]:
    """Of each column the share of records in each cell, ``[cells]``.

    Args:
        codes: ``[n, d]``, n at least 1.
        sizes: Cells of each column.

    Returns:
        One for each column.
    """
    return [np.bincount(codes[:, k], minlength=size) / len(codes) for k, size in enumerate(sizes)]


def errors(made: Codes, real: Codes, sizes: Sequence[int]) -> Table:
    """How far the shares of two tables are apart, for each column and each pair.

    Args:
        made: ``[n, d]``.
        real: ``[m, d]``.
        sizes: Cells of each column.

    Returns:
        ``[d, d]``, symmetric: pairs beside the diagonal, single columns on it.
    """
    pairs = zip(pair_shares(made, sizes), pair_shares(real, sizes), strict=True)
    found = _matrix((_gap(ours, theirs) for ours, theirs in pairs), len(sizes))
    np.fill_diagonal(
        found,
        [_gap(ours, theirs) for ours, theirs in zip(shares(made, sizes), shares(real, sizes), strict=True)],
    )
    return found


def apart(real: Codes, sizes: Sequence[int]) -> Table:
    """`errors` of the table whose columns are the real ones and do not depend on each other: the floor that a method must beat."""
    return _matrix((_gap(np.outer(x.sum(1), x.sum(0)), x) for x in pair_shares(real, sizes)), len(sizes))


def dependence(codes: Codes, sizes: Sequence[int]) -> Table:
    """How much columns depend on each other: Cramér's V (1946).

    Args:
        codes: ``[n, d]``, n at least 1.
        sizes: Cells of each column.

    Returns:
        ``[d, d]``, symmetric, 0..1, and 1 on the diagonal; 0 of a column with one value.
    """
    found = _matrix(map(_cramer, pair_shares(codes, sizes)), len(sizes))
    np.fill_diagonal(found, 1.0)
    return found


def pairs_of(matrix: Table) -> Table:
    """The entries of a symmetric matrix above its diagonal, ``[d (d - 1) / 2]``, in the order of `itertools.combinations`."""
    found: Table = matrix[np.triu_indices(len(matrix), 1)]
    return found


def _gap(ours: Table, theirs: Table) -> float:
    return float(np.abs(ours - theirs).sum()) / 2


def _cramer(table: Table) -> float:
    """sqrt(chi² / n / (the smaller number of values - 1)), over values that are there."""
    x = table[np.ix_(table.sum(1) > 0, table.sum(0) > 0)]
    expected, fewest = np.outer(x.sum(1), x.sum(0)), min(x.shape)
    return 0.0 if fewest < 2 else min(1.0, float(np.sqrt(((x - expected) ** 2 / expected).sum() / (fewest - 1))))


def _matrix(values: Iterator[float], d: int) -> Table:
    found = np.zeros((d, d))
    for (a, b), value in zip(itertools.combinations(range(d), 2), values, strict=True):
        found[a, b] = found[b, a] = value
    return found
