"""A picture of a synthetic table beside the real one: each column's cells side by side, and the errors of pairs of columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedfill.errors import FedfillError
from fedfill.runs import pictures

Shares = NDArray[np.float64]

MOST = 12
"""Columns whose cells are drawn; of more those with the largest errors."""
ACROSS = 3
"""Columns beside each other."""
BARS = 24
"""Cells that have bars side by side; more are outlines."""
LETTERS = 24
"""Of the names of cells, which stand below if they have no more together; else the first and the last do."""
PANEL, GAP = (2.0, 1.1), (0.55, 0.75)
"""Width and height of what is drawn of a column, and of what lies between, in inches."""


def table_picture(
    names: Sequence[str],
    cells: Sequence[Sequence[str]],
    made: Sequence[Shares],
    real: Sequence[Shares],
    errors: Shares,
    path: Path,
    title: str,
) -> None:
    """Draw a synthetic table beside the real one.

    Args:
        names: Of the columns, d of 2 or more.
        cells: By column what its cells are called.
        made: By column the share of synthetic rows in each cell.
        real: The same of real rows.
        errors: ``[d, d]``: of pairs beside the diagonal, of single columns on it.
        path: The PNG file to write, with an SVG file beside it; replaced in one step where they exist.
        title: Of the picture.

    Raises:
        FedfillError: Where the parts don't fit together.
    """
    d = len(names)
    if d < 2 or {len(cells), len(made), len(real), *errors.shape} != {d}:
        raise FedfillError(f"table picture: errors of shape {list(errors.shape)} don't fit {d} columns")
    shown = sorted(np.argsort(-np.diag(errors), kind="stable")[:MOST].tolist())
    rows, side = -(-len(shown) // ACROSS), max(2.6, 0.36 * d)
    left = ACROSS * (PANEL[0] + GAP[0])
    width, height = left + 0.5 + side, max(rows * (PANEL[1] + GAP[1]), side)
    figure = Figure(figsize=(width, height), dpi=pictures.DPI)
    for k, column in enumerate(shown):
        row, place = divmod(k, ACROSS)
        corner = place * (PANEL[0] + GAP[0]), height - row * (PANEL[1] + GAP[1]) - PANEL[1]
        axes = _axes(figure, *corner, *PANEL)
        _column(axes, cells[column], 100 * made[column], 100 * real[column])
        axes.set_title(pictures._short(names[column]), loc="left", color=pictures.INK, fontsize=9, pad=4)
        if k == 0:
            axes.legend(
                frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(-0.1, 1.18), ncols=2, borderaxespad=0
            )
        if place == 0:
            axes.set_ylabel("percent", color=pictures.INK, fontsize=8)
    _matrix(_axes(figure, left + 0.5, height - side, side, side), names, errors)
    what = "" if d <= MOST else f" (the {MOST} columns with the largest errors of {d})"
    figure.text(
        0, 1 + 0.55 / height, f"{title}: shares of cells{what}", color=pictures.INK, fontsize=11, va="bottom"
    )  # fmt: skip
    pictures._save(figure, path)


def _axes(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
    """Axes at a place in inches."""
    across, up = figure.get_size_inches()
    axes = figure.add_axes((x / across, y / up, width / across, height / up))
    axes.tick_params(length=0, colors=pictures.INK, labelsize=7)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def _column(axes: Axes, cells: Sequence[str], made: Shares, real: Shares) -> None:
    n = len(cells)
    sides: tuple[tuple[Shares, str, int, float], ...] = (
        (real, "training rows", 0, -0.21),
        (made, "synthetic rows", 1, 0.21),
    )
    for values, label, colour, aside in sides:
        style: dict[str, Any] = {"color": pictures._colour(colour), "label": label}
        if n <= BARS:
            axes.bar(np.arange(n) + aside, values, 0.4, **style)
        else:
            axes.stairs(values, np.arange(n + 1) - 0.5, linewidth=1.2, **style)
    if sum(map(len, cells)) <= LETTERS:
        axes.set_xticks(range(n), cells)
    else:
        axes.set_xticks([0, n - 1], [_cell(cells[0]), _cell(cells[-1])])
        first, last = axes.get_xticklabels()  # which begin and end with their own cells
        first.set_horizontalalignment("left")
        last.set_horizontalalignment("right")
    axes.set_ylim(bottom=0)
    axes.grid(color="#dddddd", linewidth=0.6, axis="y")
    axes.set_axisbelow(True)


def _cell(name: str) -> str:
    return name if 2 * len(name) <= LETTERS else f"{name[: LETTERS // 2 - 1]}…"


def _matrix(axes: Axes, names: Sequence[str], errors: Shares) -> None:
    d = len(names)
    largest = max(0.01, float(errors.max()))
    axes.imshow(100 * errors, cmap="Blues", vmin=0, vmax=100 * largest, interpolation="nearest")
    words = [pictures._short(name) for name in names]
    axes.set_xticks(range(d), words, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(range(d), words, fontsize=8)
    if d <= 20:
        for (row, column), error in np.ndenumerate(errors):
            colour = "white" if error > 0.6 * largest else pictures.INK
            axes.text(column, row, f"{100 * error:.0f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_title(
        "errors of pairs of columns, percent\n(on the diagonal: of single columns)",
        loc="left",
        color=pictures.INK,
        fontsize=9,
        pad=6,
    )
