"""Times to an event on a public grid: each record is one cell, of its event or of the time up to which nothing had come.

With the grid's times t_1 < ... < t_G, an event in (t_{k-1}, t_k] is told at t_k. A record that is censored at c was at risk at all
grid times up to c, and at no later one. So counts of cells give the Kaplan-Meier curve of the records themselves, to the last digit,
where the grid holds all times of events. The cells are events at t_1, ..., t_G, and then records censored before t_1, in [t_1, t_2),
..., from t_G on: 2 G + 1. What comes after t_G is censored there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def cells(times: NDArray[np.float64], events: NDArray[np.bool_], grid: Sequence[float]) -> NDArray[np.int64]:
    """The cells of some records.

    Args:
        times: ``[n]``, 0 or more: of the event, or up to which there was none.
        events: ``[n]``, whether the event came then.
        grid: G times above 0, increasing.

    Returns:
        ``[n]``, 0..2G.
    """
    ends, size = np.asarray(grid, dtype=np.float64), len(grid)
    at = np.searchsorted(ends, times, side="left")  # the first grid time that is not before
    seen = np.searchsorted(ends, times, side="right")  # grid times at which the record was at risk, if it was censored
    return np.where(events & (at < size), at, size + seen).astype(np.int64)


def cell_names(grid: Sequence[float]) -> tuple[str, ...]:
    """What the cells are called, in their order."""
    words = [f"{time:.10g}" for time in grid]
    return (
        *(f"event by {word}" for word in words),
        f"left before {words[0]}",
        *(f"none by {word}" for word in words),
    )


def drawn(
    found: NDArray[np.int64], grid: Sequence[float], generator: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Times and events of rows with these cells, which `cells` gives back.

    Args:
        found: ``[n]``, 0..2G.
        grid: G times.
        generator: For the draws.

    Returns:
        Events at times of the grid; censored rows at times drawn uniformly between two of them, those after the last one at it.
    """
    ends, size = np.asarray(grid, dtype=np.float64), len(grid)
    events, seen = found < size, np.clip(found - size, 0, size)
    before, after = np.concatenate([[0.0], ends])[seen], np.append(ends, ends[-1])[seen]
    left = before + (after - before) * generator.random(len(found))
    left = np.where(after > before, np.minimum(left, np.nextafter(after, 0)), before)  # rounding may reach the next
    return np.where(events, ends[np.clip(found, 0, size - 1)], left), events


def grid_size(classes: int) -> int | None:
    """G of so many cells; None where they are the cells of no grid."""
    return classes // 2 if classes % 2 and classes >= 3 else None
