"""Heat maps of a report as SVG, stronger for more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from fedfill.studies.reporting.drawings import LETTER, names_at_left, number, shorten, svg, text

LEVELS = 8
"""Shades of a heat map above an empty cell."""


def level(value: float, most: float, even: bool = False) -> int:
    """The shade of a value: 0 for nothing, up to `LEVELS`.

    Args:
        value: Not negative.
        most: That of the last shade.
        even: Whether shades are even steps. Else a square root keeps a handful apart from none beside thousands.

    Returns:
        Its number.
    """
    if value <= 0 or most <= 0:
        return 0
    share = min(1.0, value / most)
    return max(1, math.ceil(LEVELS * (share if even else math.sqrt(share)) - 1e-9))


def heat(
    table: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    description: str,
    x_label: str,
    y_label: str,
    most: float | None = None,
    even: bool = False,
    totals: Sequence[str] = (),
    width: int = 940,
) -> Markup:
    """A heat map, stronger for more; the figures stand in the cells where there is room.

    Args:
        table: ``[rows][columns]``, not negative; None: there is no figure.
        rows: Their names.
        columns: Their names.
        title: For people who hear the page.
        description: What it shows, for the same.
        x_label: What the columns are.
        y_label: What the rows are.
        most: The value of the last shade; None: the largest.
        even: Whether shades are even steps; else as of a square root.
        totals: Behind each row; empty: none.
        width: Pixels, at the most where cells are not made smaller than one can see.

    Returns:
        The SVG.
    """
    top_value = most if most is not None else max((v for line in table for v in line if v is not None), default=0) or 1
    left, names = names_at_left([*rows, y_label], 22)
    names = names[:-1]
    figures = [[None if v is None else f"{v:,.0f}" for v in line] for line in table]
    letters = max((len(figure) for line in figures for figure in line if figure), default=1)
    right = 14 + LETTER * max((len(total) for total in totals), default=0)
    cell = min(46.0, max(6.0, (width - left - right) / len(columns)))
    numbers = len(rows) <= 40 and cell >= 8 + 6.6 * letters
    tall = 24.0 if numbers else max(7.0, min(20.0, 520 / len(rows)))
    slanted = max(map(len, columns)) * LETTER > cell - 2
    heads = [shorten(name, 16) for name in columns]
    top = 30 + (0.72 * LETTER * max(map(len, heads)) if slanted else 14)
    full, height = left + cell * len(columns) + max(right, 90 if slanted else 0), top + tall * len(rows) + 10
    gap = 1.0 if cell > 10 else 0.0
    body = [text(left, 12, x_label, kind="label"), text(left - 8, top - 8, y_label, "end", "label")]
    step = max(1, math.ceil(12 / cell)) if slanted else 1
    for k, name in enumerate(heads):
        if k % step == 0:
            x = left + (k + 0.5) * cell
            if slanted:
                body.append(
                    Markup('<text transform="translate({} {}) rotate(-45)">{}</text>').format(
                        number(x + 3), number(top - 6), name
                    )
                )
            else:
                body.append(text(x, top - 8, name, "middle"))
    every = max(1, math.ceil(13 / tall))
    shades: dict[int, list[str]] = {}
    for r, line in enumerate(table):
        for c, value in enumerate(line):
            if value is None:
                continue
            x, y = left + c * cell, top + r * tall
            shades.setdefault(level(value, top_value, even), []).append(
                f"M{number(x)} {number(y)}h{number(cell - gap)}v{number(tall - gap)}h-{number(cell - gap)}z"
            )
    body += [
        Markup('<path class="h{}" d="{}"/>').format(shade, "".join(cells)) for shade, cells in sorted(shades.items())
    ]
    for r, name in enumerate(names):
        middle = top + (r + 0.5) * tall + 4
        if r % every == 0:
            body.append(text(left - 8, middle, name, "end"))
        if totals and numbers:
            body.append(text(full - 4, middle, totals[r], "end"))
        if numbers:
            body += [
                text(
                    left + (c + 0.5) * cell - gap / 2,
                    middle,
                    figure,
                    "middle",
                    f"n{level(table[r][c] or 0, top_value, even)}",
                )
                for c, figure in enumerate(figures[r])
                if figure is not None
            ]
    if totals and numbers:
        body.append(text(full - 4, top - 8, "all", "end", "label"))
    return svg(full, height, title, description, body, "heat")
