"""Marginals of discrete records: sums of counts, made consistent, and a distribution that is drawn from.

McKenna, Miklau and Sheldon, "Winning the NIST contest" (2021) is the model: noisy one-way tables, a tree of pairs chosen from
noisy scores, noisy tables of these. Here all tables are sums over clients (`marginal_counts`), what they disagree on is averaged by
precision, and negative counts go by projection onto the simplex (`consistent`). A column's parents may be any one or two
others, so that a star around the label, a tree, and a tree whose edges know the label are one thing (`Network`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfill.errors import FedfillError
from fedfill.privacy.sums import BlockBound
from fedfill.statistics.sums import LARGEST, Block, Statistic
from fedfill.tree import Weights

Table = NDArray[np.float64]
Codes = NDArray[np.int64]
Clique = tuple[int, ...]
"""Columns whose joint table is counted, in the order of its axes."""

ROUNDS = 100
"""Of averaging and projection, at the most."""
CLOSE = 1e-6
"""How far tables may disagree, as a share of all records."""


@dataclass(frozen=True)
class Noisy:
    """Counts of a clique.

    Attributes:
        clique: Its columns.
        counts: One axis for each.
        std: Standard deviation of the noise on each cell; 0 without noise.
    """

    clique: Clique
    counts: Table
    std: float

    def over(self, columns: Clique) -> Table:
        """The counts of some of its columns, their axes in this order."""
        away = tuple(k for k, column in enumerate(self.clique) if column not in columns)
        kept = [column for column in self.clique if column in columns]
        found: Table = self.counts.sum(axis=away).transpose([kept.index(column) for column in columns])
        return found


@dataclass(frozen=True)
class Network:
    """A distribution over records: each column given its parents.

    Attributes:
        sizes: Cells of each column.
        order: The columns, parents first.
        parents: Of each column in `order`.
        tables: By column: consistent counts, one axis for each parent, then the column's own.
        total: How many records there are, at best knowledge.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    parents: Mapping[int, Clique]
    tables: Mapping[int, Table]
    total: float

    def sample(self, n: int, draw: np.random.Generator, root: Codes | None = None) -> Codes:
        """Records.

        Args:
            n: How many.
            draw: For the draws.
            root: The first column of each record, ``[n]``, where it is to be these values; None: as the distribution has it.

        Returns:
            ``[n, d]``. Counts of a column given its parents' values are within 1 of what is expected (`rounded`).
        """
        found = np.zeros((n, len(self.sizes)), dtype=np.int64)
        for column in self.order:
            table, parents = self.tables[column], self.parents[column]
            if column == self.order[0] and root is not None:  # others may have no parents either
                found[:, column] = root
                continue
            shape = table.shape[:-1]
            key = np.ravel_multi_index(tuple(found[:, parents].T), shape) if parents else np.zeros(n, dtype=np.int64)
            rows, flat = np.argsort(key, kind="stable"), table.reshape(-1, table.shape[-1])
            ends = np.searchsorted(key[rows], np.arange(len(flat) + 1)).tolist()
            for value, (start, end) in enumerate(itertools.pairwise(ends)):
                if end > start:
                    weights = flat[value] if flat[value].sum() > 0 else flat.sum(0)
                    counts = rounded((end - start) * weights / weights.sum(), draw)
                    found[rows[start:end], column] = draw.permutation(np.repeat(np.arange(len(counts)), counts))
        return found[draw.permutation(n)] if root is None else found


def marginal_counts(sizes: Sequence[int], cliques: Sequence[Clique]) -> Statistic:
    """Counts of records in the cells of some cliques, side by side.

    One record moves one cell of each table, so the sum by the root of their number; a replaced record moves two.

    Args:
        sizes: Cells of each column.
        cliques: Which tables.

    Returns:
        The statistic of ``counts`` ``[cells]``, of records whose features are their cells ``[b, d]``.

    Raises:
        FedfillError: Where the tables would not fit into memory.
    """
    shapes = [tuple(sizes[column] for column in clique) for clique in cliques]
    cells = [math.prod(shape) for shape in shapes]
    if sum(cells) > LARGEST:
        raise FedfillError(
            f"schema_file: its columns make tables of {sum(cells):,} cells; allowed: {LARGEST:,}, by fewer columns or bins"
        )
    bound = BlockBound(math.sqrt(len(cliques)), math.sqrt(2 * len(cliques)), sum(cells))
    starts = np.cumsum([0, *cells[:-1]]).tolist()

    def add(sums: Weights, z: Tensor, labels: Tensor) -> None:
        codes = z.long()
        for clique, shape, start, many in zip(cliques, shapes, starts, cells, strict=True):
            place = torch.zeros(len(codes), dtype=torch.int64, device=codes.device)
            for column, size in zip(clique, shape, strict=True):
                place = place * size + codes[:, column]
            sums["counts"][start : start + many] += torch.bincount(place, minlength=many).to(torch.float64)

    return Statistic({"counts": Block((sum(cells),), bound, bits=0)}, add, "counts of the table's cells")


def tables_of(counts: Tensor, sizes: Sequence[int], cliques: Sequence[Clique], std: float) -> list[Noisy]:
    """The sums of `marginal_counts` as tables, with the noise in each cell."""
    shapes = [tuple(sizes[column] for column in clique) for clique in cliques]
    parts = np.split(counts.double().cpu().numpy(), np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return [Noisy(c, part.reshape(shape), std) for c, part, shape in zip(cliques, parts, shapes, strict=True)]


def simplex(counts: Table, total: float) -> Table:
    """The nearest counts, in l2, that are not negative and add up to a total.

    Args:
        counts: Of any shape.
        total: Above 0.

    Returns:
        ``max(counts - shift, 0)``: the order of cells stays, and noise in empty cells makes no mass.
    """
    flat = np.sort(counts.reshape(-1))[::-1]
    shifts = (np.cumsum(flat) - total) / np.arange(1, len(flat) + 1)
    found: Table = np.maximum(counts - shifts[np.flatnonzero(flat > shifts)[-1]], 0)
    return found


def total_of(tables: Sequence[Noisy]) -> float:
    """How many records there are: the mean of the tables' sums, weighted by how exact each is."""
    weights = np.array([1 / (table.counts.size * max(table.std, 1e-9) ** 2) for table in tables])
    return max(float(weights @ [table.counts.sum() for table in tables] / weights.sum()), 1.0)


def agreed(tables: Sequence[Noisy], columns: Clique) -> list[Noisy]:
    """Tables that agree on the counts of some columns, which become their mean weighted by how exact each is.

    Args:
        tables: Of which some hold all of these columns.
        columns: Which.

    Returns:
        The tables; what a table is off by is spread evenly over the cells that add up to one.
    """
    inside = [set(columns) <= set(table.clique) for table in tables]
    shown = {k: tables[k].over(columns) for k, holds in enumerate(inside) if holds}
    if len(shown) < 2:
        return list(tables)
    spread = {k: tables[k].counts.size // counts.size for k, counts in shown.items()}
    weights = {k: 1 / (spread[k] * max(tables[k].std, 1e-9) ** 2) for k in shown}
    target = sum(weights[k] * shown[k] for k in shown) / sum(weights.values())
    found = []
    for k, table in enumerate(tables):
        if not inside[k]:
            found.append(table)
            continue
        kept = [column for column in table.clique if column in columns]
        off = ((target - shown[k]) / spread[k]).transpose([columns.index(column) for column in kept])
        shape = [
            size if column in columns else 1 for column, size in zip(table.clique, table.counts.shape, strict=True)
        ]
        found.append(Noisy(table.clique, table.counts + off.reshape(shape), table.std))
    return found


def consistent(tables: Sequence[Noisy], total: float) -> list[Noisy]:
    """Tables without negative counts that agree with each other.

    Args:
        tables: Noisy ones.
        total: How many records there are.

    Returns:
        The tables, agreeing to `CLOSE`, or after `ROUNDS` turns.
    """
    pairs = itertools.combinations([table.clique for table in tables], 2)
    shared = {tuple(sorted(set(a) & set(b))) for a, b in pairs}
    order = sorted((columns for columns in shared if columns), key=lambda columns: (-len(columns), columns))
    found = list(tables)
    for _ in range(ROUNDS):
        for columns in order:
            found = agreed(found, columns)
        found = [Noisy(table.clique, simplex(table.counts, total), table.std) for table in found]
        if _apart(found, order) <= CLOSE * total:
            break
    return found


def _apart(tables: Sequence[Noisy], order: Sequence[Clique]) -> float:
    """The largest difference between what two tables say of the same columns."""
    worst = 0.0
    for columns in order:
        shown = np.stack([table.over(columns) for table in tables if set(columns) <= set(table.clique)])
        worst = max(worst, float((shown.max(0) - shown.min(0)).max()))
    return worst


def dependence(pairs: Sequence[Noisy], ones: Sequence[Noisy]) -> dict[Clique, float]:
    """How far each pair is from independence, in deviations of what noise alone would show.

    Args:
        pairs: Tables of two columns.
        ones: A table of each column.

    Returns:
        By pair: the squared distance to the product of the one-way tables without what noise adds to it, over its deviation under
        independence. Without noise: the squared distance as a share of the squared number of records.
    """
    own = {table.clique[0]: table.counts / max(table.counts.sum(), 1e-12) for table in ones}
    total = total_of(ones)
    scores = {}
    for table in pairs:
        a, b = table.clique
        gap = float(((table.counts - total * np.outer(own[a], own[b])) ** 2).sum())
        if table.std:
            cells = table.counts.size
            scores[table.clique] = (gap - cells * table.std**2) / (table.std**2 * math.sqrt(2 * cells))
        else:
            scores[table.clique] = gap / total**2
    return scores


def spanning_tree(scores: Mapping[Clique, float], columns: Sequence[int], first: Sequence[Clique] = ()) -> list[Clique]:
    """The tree of pairs with the largest sum of scores (Kruskal); ties go by index.

    Args:
        scores: By pair.
        columns: What it connects.
        first: Pairs that are in it whatever they score.

    Returns:
        One pair fewer than there are columns.
    """
    group = {column: column for column in columns}
    found: list[Clique] = []
    for a, b in [*first, *sorted(scores, key=lambda pair: (-scores[pair], pair))]:
        if a in group and b in group and group[a] != group[b]:
            found.append((a, b))
            old, new = group[b], group[a]
            group = {column: new if own == old else own for column, own in group.items()}
    return found


def directed(edges: Sequence[Clique], root: int) -> Iterator[tuple[int, int]]:
    """Parent and child of each edge of a tree, from its root on, breadth first."""
    reached, left = [root], list(edges)
    for parent in reached:  # which grows
        for edge in [edge for edge in left if parent in edge]:
            child = edge[0] if edge[1] == parent else edge[1]
            left.remove(edge)
            reached.append(child)
            yield parent, child


def network(sizes: Sequence[int], parents: Mapping[int, Clique], tables: Sequence[Noisy], total: float) -> Network:
    """The distribution whose tables are given.

    Args:
        sizes: Cells of each column.
        parents: Of each column, in an order in which parents come first; the first has none.
        tables: Consistent ones, among them one for each column with its parents.
        total: How many records there are.

    Returns:
        The network.
    """
    found = {}
    for column, above in parents.items():
        wanted = {*above, column}
        table = min((t for t in tables if wanted <= set(t.clique)), key=lambda t: (len(t.clique), t.clique))
        found[column] = table.over((*above, column))
    return Network(tuple(sizes), tuple(parents), dict(parents), found, total)


def rounded(expected: Table, draw: np.random.Generator) -> Codes:
    """Whole numbers near the expected ones, none further away than 1, and right in the mean.

    Args:
        expected: Numbers from 0 whose sum is whole.
        draw: For one uniform draw, by which what is left over is laid out (systematic sampling on the fractions).

    Returns:
        Of the same shape and sum.
    """
    whole = np.floor(expected + 1e-9).astype(np.int64)
    places = np.cumsum(expected - whole)
    left = round(float(expected.sum())) - int(whole.sum())
    if left > 0:
        marks = (draw.random() + np.arange(left)) * (places[-1] / left)
        np.add.at(whole, np.minimum(np.searchsorted(places, marks, side="right"), len(whole) - 1), 1)
    return whole


def workload_error(made: Codes, real: Codes, sizes: Sequence[int]) -> float:
    """How far the two-way tables of two sets of records are apart: half the l1 distance of their shares, mean over all pairs.

    Args:
        made: ``[n, d]``.
        real: ``[m, d]``.
        sizes: Cells of each column.

    Returns:
        From 0 to 1.
    """
    pairs = zip(pair_shares(made, sizes), pair_shares(real, sizes), strict=True)
    return float(np.mean([float(np.abs(ours - theirs).sum()) / 2 for ours, theirs in pairs]))


def pair_shares(codes: Codes, sizes: Sequence[int]) -> Iterator[Table]:
    """Of each pair of columns, in the order of `itertools.combinations`, the share of records in each cell.

    Args:
        codes: ``[n, d]``, n at least 1.
        sizes: Cells of each column.

    Yields:
        ``[cells of the first, cells of the second]``.
    """
    for a, b in itertools.combinations(range(len(sizes)), 2):
        counts = np.bincount(codes[:, a] * sizes[b] + codes[:, b], minlength=sizes[a] * sizes[b])
        yield counts.reshape(sizes[a], sizes[b]) / len(codes)
