"""What rows of a synthetic table give away of the rows that they were made from, each figure beside held-out rows.

Four attacks that are simple and known: the nearest record, membership by that distance, attribute inference, singling out
(Giomi, Boenisch, Wehmeyer and Tasnádi, "A unified framework for quantifying privacy risk in synthetic data", 2023, has the last
two, and the control by rows that the generator never saw). Rows that resemble others tell much of them, and nothing of
themselves. So each figure is what an attack has on training rows beyond what it has on held-out rows of the same kind, and is
expected to be 0 where nothing was learned of single rows. Intervals are for other rows of both kinds, the synthetic ones given.

An attack that finds nothing shows nothing: `WORDS`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedfill.errors import FedfillError
from fedfill.streams import numpy_stream

Values = NDArray[np.float64]
Codes = NDArray[np.int64]

WORDS = "Distances are not a guarantee; the guarantee is epsilon."
LEVEL = 0.95
FALSE_POSITIVES = 0.01
"""Share of held-out rows that are taken for training rows, where the share of training rows that are found is told."""
MOST = 4000
"""Training rows, and held-out rows, whose nearest synthetic row is looked for."""
REFERENCES = 100_000
"""Synthetic rows among which it is."""
BLOCK = 1 << 16
"""Pairs of rows at a time: their distances fit into a processor's cache."""


@dataclass(frozen=True)
class Rows:
    """Rows of a table.

    Attributes:
        cells: ``[n, d]``, the cell of each row in each column.
        values: ``[n, d]``, of columns that have an order the place between the public bounds, 0..1, NaN where it is empty; of words
            the cell.
    """

    cells: Codes
    values: Values

    def __len__(self) -> int:
        """How many there are."""
        return len(self.cells)

    def __getitem__(self, index: NDArray[np.int64]) -> Rows:
        """The rows at these positions."""
        return Rows(self.cells[index], self.values[index])


@dataclass(frozen=True)
class Excess:
    """What an attack has on training rows beyond what it has on held-out rows.

    Attributes:
        training: Its figure on training rows.
        held_out: The same on held-out rows, the control.
        value: The difference, of some figures as a share of what it could be.
        low: Lower end of the interval of 95 % of `value`.
        high: Upper end.
    """

    training: float
    held_out: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Risks:
    """The figures of `risks`.

    Attributes:
        nearest: Share of training rows that are nearer to the synthetic table than the median of held-out rows, less .5.
        membership_auc: Area under the ROC curve of telling training rows from held-out ones by that distance, less .5.
        membership_tpr: Share of training rows that are found where .01 of the held-out rows are taken for some, less .01.
        attribute: How often a cell is told from the row's other cells by the nearest synthetic row, mean over columns.
        attributes: The same of each column; these intervals hold for all columns together.
        singling_out: Share of the predicates that match exactly one synthetic row which match exactly one training row.
        predicates: How many such predicates there are.
        searched: Training and held-out rows whose nearest was looked for, and synthetic rows among which it was.
    """

    nearest: Excess
    membership_auc: Excess
    membership_tpr: Excess
    attribute: Excess
    attributes: tuple[Excess, ...]
    singling_out: Excess
    predicates: int
    searched: tuple[int, int, int]


def risks(made: Rows, training: Rows, held: Rows, ordered: Sequence[bool], sizes: Sequence[int], seed: int) -> Risks:
    """All figures.

    Args:
        made: The synthetic rows, at least 1.
        training: The rows that it was made from, at least 2.
        held: Rows of the same kind that the generator never saw, at least 2.
        ordered: Of each column whether its values have an order and distances.
        sizes: Cells of each column.
        seed: Of the draws of rows, where there are more than `MOST` or `REFERENCES`.

    Returns:
        The figures.

    Raises:
        FedfillError: Where there are too few rows.
    """
    if not len(made) or min(len(training), len(held)) < 2:
        raise FedfillError(
            f"risk: found {len(made):,} synthetic, {len(training):,} training and {len(held):,} held-out rows; allowed: at least 1, 2 and 2"
        )
    # in any order: of equally near rows the first one counts
    known, asked, control = (
        _some(rows, most, seed, what)
        for rows, most, what in ((made, REFERENCES, "made"), (training, MOST, "training"), (held, MOST, "held"))
    )
    (near, told), (far, guessed) = (neighbours(rows, known, ordered) for rows in (asked, control))
    hits, others = told == asked.cells, guessed == control.cells
    singled, predicates = singling_out(
        made.cells, training.cells, held.cells, sizes, numpy_stream(seed, "risk", "replaced")
    )
    return Risks(
        nearest=found_at(near, far, 0.5),
        membership_auc=ranked(near, far),
        membership_tpr=found_at(near, far, FALSE_POSITIVES),
        attribute=_of_columns(hits, others),
        attributes=tuple(_of_column(own, other, len(sizes)) for own, other in zip(hits.T, others.T, strict=True)),
        singling_out=singled,
        predicates=predicates,
        searched=(len(asked), len(control), len(known)),
    )


def _some(rows: Rows, most: int, seed: int, what: str) -> Rows:
    return rows[numpy_stream(seed, "risk", what).permutation(len(rows))[:most]]


# Distances


def neighbours(rows: Rows, known: Rows, ordered: Sequence[bool]) -> tuple[Values, Codes]:
    """How far the nearest of other rows is by Gower's distance (1971), and what the nearest by all other columns says of each.

    The distance is the mean over columns: of words 0 or 1, of values with an order their difference, and 1 between an empty cell and
    one that is not (Gower leaves such columns out; here an empty cell is a value). Differences are rounded to whole numbers, 32,767
    for all columns together, so that copies have the distance 0 and equal distances are equal.

    Args:
        rows: ``[n, d]``.
        known: ``[m, d]``, at least one.
        ordered: Of each column, d of 2 or more.

    Returns:
        Distances ``[n]``, 0..1, and cells ``[n, d]``: in each column the cell of the row that is the nearest by the others, of several
        the first.
    """
    d, n = len(ordered), len(rows)
    scale = np.int16(np.iinfo(np.int16).max // d)
    here, there = (_whole(side.values, ordered, scale) for side in (rows, known))
    least, told = np.empty(n, dtype=np.int64), np.empty((n, d), dtype=np.int64)
    step = max(1, BLOCK // len(known))
    for start in range(0, n, step):
        part = here[:, start : start + step, None]
        apart = [_differences(part[j], there[j], ordered[j], scale) for j in range(d)]  # each [b, m]
        total = apart[0].copy()
        for differences in apart[1:]:
            total += differences
        least[start : start + step] = total.min(axis=1)
        for j, differences in enumerate(apart):
            np.subtract(total, differences, out=differences)
            told[start : start + step, j] = known.cells[differences.argmin(axis=1), j]
    return least / (int(scale) * d), told


def _whole(values: Values, ordered: Sequence[bool], scale: np.int16) -> NDArray[np.int16]:
    """Values as whole numbers, ``[d, n]``: an empty cell lies as far from all others as these may be apart."""
    steps = np.where(np.asarray(ordered), float(scale), 1.0)
    return np.ascontiguousarray(np.nan_to_num(np.rint(values * steps), nan=-float(scale)).T.astype(np.int16))


def _differences(a: NDArray[np.int16], b: NDArray[np.int16], ordered: bool, scale: np.int16) -> NDArray[np.int16]:
    """Of each with each, 0..scale; a is ``[n, 1]`` and b ``[m]``."""
    if not ordered:
        other: NDArray[np.int16] = np.multiply(a != b, scale, dtype=np.int16)
        return other
    found: NDArray[np.int16] = np.subtract(a, b)
    np.abs(found, out=found)
    np.minimum(found, scale, out=found)
    return found


# Membership


def found_at(near: Values, far: Values, share: float) -> Excess:
    """The share of training rows that are found where a share of held-out rows is mistaken for some.

    A row counts as found if its distance is small. With the share .5 these are the rows nearer than the median of held-out rows.
    The k-th nearest of m held-out rows stands for the share k / (m + 1), and equal distances for any order of them, so that rows of
    one kind have a difference of 0 in the mean. The interval is of two shares (Newcombe 1998, his method 10), where that of the
    mistaken ones is carried over by the curve where the curve is steeper than 1.

    Args:
        near: Distances of training rows, ``[n]``.
        far: Of held-out rows, ``[m]``.
        share: 0..1.

    Returns:
        The figure, less the share.
    """
    ours, theirs = np.sort(near), np.sort(far)
    m = len(theirs)
    first, last = np.searchsorted(theirs, theirs, side="left"), np.searchsorted(theirs, theirs, side="right")
    below = np.searchsorted(ours, theirs, side="left")
    equal = np.searchsorted(ours, theirs, side="right") - below
    # a training row that is as far as g held-out rows is before the i-th of them in i of g + 1 orders
    before = (below + equal * (np.arange(m) + 1 - first) / (last - first + 1)) / len(ours)
    places, heights = np.arange(m + 2) / (m + 1), np.concatenate([[0.0], before, [1.0]])

    def curve(at: float) -> float:
        return float(np.interp(at, places, heights))

    found = curve(share)
    (low, high), (less, more) = wilson(found, len(ours)), wilson(share, m)
    down = math.hypot(found - low, max(more - share, curve(more) - found))
    up = math.hypot(high - found, max(share - less, found - curve(less)))
    return _excess(found, share, found - share - down, found - share + up)


def ranked(near: Values, far: Values) -> Excess:
    """How often a training row is nearer than a held-out one, ties half, less .5; its interval is DeLong's (1988).

    Args:
        near: Distances of training rows, ``[n]``, n at least 2.
        far: Of held-out rows, ``[m]``, m at least 2.

    Returns:
        The area under the ROC curve, less .5.
    """

    def beyond(those: Values, others: Values) -> Values:
        """For each the share of the others that are farther, ties half."""
        order = np.sort(others)
        not_farther = np.searchsorted(order, those, side="left") + np.searchsorted(order, those, side="right")
        return 1 - not_farther / (2 * len(others))

    ours, theirs = beyond(near, far), 1 - beyond(far, near)
    area = float(ours.mean())
    wide = _z() * math.sqrt(ours.var(ddof=1) / len(near) + theirs.var(ddof=1) / len(far))
    return _excess(area, 0.5, area - 0.5 - wide, area - 0.5 + wide)


# Attributes


def _of_column(hits: NDArray[np.bool_], others: NDArray[np.bool_], columns: int) -> Excess:
    """One of several columns: the interval holds for all of them together (Bonferroni)."""
    ours, theirs = float(hits.mean()), float(others.mean())
    (low, high), (less, more) = (
        wilson(p, len(of), columns) for p, of in ((ours, hits), (theirs, others))
    )  # Newcombe's interval of the difference
    down, up = math.hypot(ours - low, more - theirs), math.hypot(high - ours, theirs - less)
    return _gain(ours, theirs, ours - theirs - down, ours - theirs + up)


def _of_columns(hits: NDArray[np.bool_], others: NDArray[np.bool_]) -> Excess:
    """All columns together: rows are independent, and their cells are not."""
    ours, theirs = hits.mean(axis=1), others.mean(axis=1)
    gap = float(ours.mean() - theirs.mean())
    wide = _z() * math.sqrt(ours.var(ddof=1) / len(ours) + theirs.var(ddof=1) / len(theirs))
    return _gain(float(ours.mean()), float(theirs.mean()), gap - wide, gap + wide)


def _gain(ours: float, theirs: float, low: float, high: float) -> Excess:
    """The difference of two hit rates as a share of what the control leaves; nothing is to be gained where that is nothing."""
    found, left = _excess(ours, theirs, low, high), 1 - theirs
    value, low, high = ((x / left if left > 0 else 0.0) for x in (found.value, found.low, found.high))
    return Excess(ours, theirs, value, low, high)


# Singling out


def singling_out(
    made: Codes, training: Codes, held: Codes, sizes: Sequence[int], draw: np.random.Generator
) -> tuple[Excess, int]:
    """Predicates that match exactly one synthetic row: how many of them match exactly one training row.

    A predicate says the cell of one column, or those of two. How many rows it matches depends on how many there are. So the control
    has as many rows: held-out ones, and training rows where these are too few. The interval is the jackknife's over real rows, which
    is rather too wide than too narrow (Efron and Stein 1981).

    Args:
        made: ``[s, d]``.
        training: ``[n, d]``.
        held: ``[m, d]``.
        sizes: Cells of each column.
        draw: For the training rows that held-out ones stand in for, or for n of the held-out ones.

    Returns:
        Shares of the predicates among training rows and in the control, and how many predicates there are; 0 where there is none.
    """
    n, m = len(training), len(held)
    kept, held = draw.permutation(n)[: max(0, n - m)], held[draw.permutation(m)[:n]]
    total, found, moved = 0, [0, 0], [np.zeros(n), np.zeros(len(held))]
    for single, places, others in _predicates(made, training, held, sizes):
        total += int(single.sum())
        counts = [_counted(some, single) for some in (places, np.concatenate([places[kept], others]))]
        # without a row there is one fewer where it was alone, and one more where it leaves another alone
        without = [(count == 2).astype(np.int64) - (count == 1) for count in counts]
        for k, count in enumerate(counts):
            found[k] += int((count == 1).sum())
        moved[0] += without[0][places]
        moved[0][kept] -= without[1][places[kept]]
        moved[1] -= without[1][others]
    ours, theirs = (count / max(1, total) for count in found)
    wide = _z() * math.sqrt(sum(float(((m - m.mean()) ** 2).sum()) for m in moved)) / max(1, total)
    return _excess(ours, theirs, ours - theirs - wide, ours - theirs + wide), total


def _predicates(
    made: Codes, training: Codes, held: Codes, sizes: Sequence[int]
) -> Iterator[tuple[NDArray[np.bool_], Codes, Codes]]:
    """For each column and each pair of columns: which of its cells have exactly one synthetic row, and the cells of real rows."""
    d = len(sizes)
    for a, b in itertools.combinations_with_replacement(range(d), 2):
        times, cells = (1, sizes[a]) if a == b else (sizes[b], sizes[a] * sizes[b])
        of_made, *of_real = (t[:, a] * times + (0 if a == b else t[:, b]) for t in (made, training, held))
        yield np.bincount(of_made, minlength=cells) == 1, *of_real


def _counted(places: Codes, single: NDArray[np.bool_]) -> Codes:
    """How many rows there are in each cell, of those that have exactly one synthetic row."""
    return np.bincount(places, minlength=len(single)) * single


# Intervals


def _excess(ours: float, theirs: float, low: float, high: float) -> Excess:
    """The difference of two shares, its interval within what it can be."""
    return Excess(ours, theirs, ours - theirs, max(low, -theirs), min(high, 1 - theirs))


def wilson(share: float, n: int, together: int = 1) -> tuple[float, float]:
    """The interval of 95 % of a share (Wilson 1927).

    Args:
        share: 0..1.
        n: Of how many, at least 1.
        together: Of how many intervals all shall hold.

    Returns:
        Its ends.
    """
    z = _z(together)
    middle, wide = share + z**2 / (2 * n), z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return (middle - wide) / (1 + z**2 / n), (middle + wide) / (1 + z**2 / n)


def _z(together: int = 1) -> float:
    return float(stats.norm.ppf(1 - (1 - LEVEL) / (2 * together)))
