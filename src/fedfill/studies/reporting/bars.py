"""Drawings of a report in rows: bars with dots, strips, intervals on both sides of zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from fedfill.studies.reporting.drawings import (
    LETTER,
    STYLES,
    marker,
    names_at_left,
    number,
    svg,
    text,
    tick_words,
    ticks,
)

DOTS = 60
"""Of one row of a strip; more become quantiles."""


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart or a strip.

    Attributes:
        label: What it is of.
        value: How long it is, or where its mean stands; None: there is no figure.
        dots: Single values, such as one for each seed.
        interval: Around the value; None: none.
        style: Its colour.
        text: The value in words, at its right.
    """

    label: str
    value: float | None
    dots: Sequence[float] = ()
    interval: tuple[float, float] | None = None
    style: int = 0
    text: str = ""


def bars_of(
    rows: Sequence[Bar],
    *,
    title: str,
    description: str,
    x_label: str,
    high: float = 100.0,
    width: int = 460,
    row: int = 24,
) -> Markup:
    """Horizontal bars from zero, with a dot for each single value and a whisker for the interval.

    Args:
        rows: From top to bottom.
        title: For people who hear the page.
        description: What it shows, for the same.
        x_label: Under the axis.
        high: Where the axis ends.
        width: Pixels.
        row: Pixels from one bar to the next.

    Returns:
        The SVG.
    """
    left, names = names_at_left([one.label for one in rows], 26)
    right = 12 + LETTER * max((len(one.text) for one in rows), default=0)
    top, height = 6.0, 6.0 + row * len(rows) + 38

    def px(value: float) -> float:
        return left + min(max(value, 0.0), high) / high * (width - left - right)

    body = _scale(px, high, top, height - 38, height, x_label)
    for k, (one, name) in enumerate(zip(rows, names, strict=True)):
        middle = top + (k + 0.5) * row
        body.append(text(left - 8, middle + 4, name, "end"))
        if one.value is not None:
            thick = min(16.0, row * 0.62)
            body.append(
                Markup('<path class="bar s{}" d="M{} {}H{}v{}H{}z"/>').format(
                    one.style % STYLES, number(left), number(middle - thick / 2), number(max(px(one.value), left + 0.5)), number(thick), number(left)
                )
            )  # fmt: skip
        if one.interval is not None:
            low, up = map(px, one.interval)
            body.append(
                Markup('<path class="whisker" d="M{} {}H{}M{} {}v8M{} {}v8"/>').format(
                    number(low), number(middle), number(up), number(low), number(middle - 4), number(up), number(middle - 4)
                )
            )  # fmt: skip
        body += [
            Markup('<circle class="dot" cx="{}" cy="{}" r="2.6"/>').format(number(px(v)), number(middle))
            for v in one.dots
        ]
        body.append(text(width - right + 8, middle + 4, one.text, kind="value"))
    return svg(width, height, title, description, body, "bars")


def strip(
    rows: Sequence[Bar], *, title: str, description: str, x_label: str, width: int = 460, row: int = 30
) -> Markup:
    """For each row its single values as dots beside each other, and a stroke at their mean; of many values quantiles.

    Args:
        rows: From top to bottom; `Bar.value` is the mean.
        title: For people who hear the page.
        description: What it shows, for the same.
        x_label: Under the axis.
        width: Pixels.
        row: Pixels from one row to the next.

    Returns:
        The SVG.
    """
    left, names = names_at_left([one.label for one in rows], 26)
    right = 12 + LETTER * max((len(one.text) for one in rows), default=0)
    top, height = 6.0, 6.0 + row * len(rows) + 38

    def px(value: float) -> float:
        return left + min(max(value, 0.0), 100.0) / 100.0 * (width - left - right)

    body = _scale(px, 100.0, top, height - 38, height, x_label)
    for k, (one, name) in enumerate(zip(rows, names, strict=True)):
        middle, style = top + (k + 0.5) * row, one.style % STYLES
        body.append(text(left - 8, middle + 4, name, "end"))
        if len(one.dots) > DOTS:
            least, low, quarter, half, three, up = (
                px(float(q)) for q in np.quantile(one.dots, [0, 0.05, 0.25, 0.5, 0.75, 0.95])
            )
            body.append(
                Markup('<path class="c s{}" d="M{} {}H{}"/>').format(style, number(low), number(middle), number(up))
            )
            body.append(
                Markup('<path class="box s{}" d="M{} {}H{}v14H{}z"/>').format(
                    style, number(quarter), number(middle - 7), number(three), number(quarter)
                )
            )
            body.append(Markup('<path class="whisker" d="M{} {}v14"/>').format(number(half), number(middle - 7)))
            body.append(marker(style, least, middle))
        else:
            # the same value many times spreads upward and downward
            seen: dict[int, int] = {}
            for value in sorted(one.dots):
                place = round(px(value) / 4)
                seen[place] = seen.get(place, 0) + 1
                aside = (seen[place] // 2) * 3.0 * (-1) ** seen[place]
                body.append(
                    Markup('<circle class="spot s{}" cx="{}" cy="{}" r="3.2"/>').format(
                        style, number(px(value)), number(middle + max(-row / 2 + 4, min(row / 2 - 4, aside)))
                    )
                )
            if one.value is not None:
                body.append(
                    Markup('<path class="mean" d="M{} {}v{}"/>').format(
                        number(px(one.value)), number(middle - row * 0.36), number(row * 0.72)
                    )
                )
        body.append(text(width - right + 8, middle + 4, one.text, kind="value"))
    return svg(width, height, title, description, body, "strip")


def _scale(
    px: Callable[[float], float], high: float, top: float, base: float, height: float, x_label: str
) -> list[Markup]:
    body = []
    for tick in ticks(0, high, 6):
        body.append(Markup('<path class="grid" d="M{} {}V{}"/>').format(number(px(tick)), number(top), number(base)))
        body.append(text(px(tick), base + 15, tick_words(tick), "middle"))
    body.append(Markup('<path class="axis" d="M{} {}V{}"/>').format(number(px(0)), number(top), number(base)))
    body.append(text((px(0) + px(high)) / 2, height - 4, x_label, "middle", "label"))
    return body


def forest(
    rows: Sequence[Bar], *, title: str, description: str, x_label: str, width: int = 460, row: int = 30
) -> Markup:
    """Differences as points with their intervals, on both sides of a line at zero.

    Args:
        rows: From top to bottom; `Bar.value` is the difference.
        title: For people who hear the page.
        description: What it shows, for the same.
        x_label: Under the axis.
        width: Pixels.
        row: Pixels from one row to the next.

    Returns:
        The SVG.
    """
    left, names = names_at_left([one.label for one in rows], 26)
    right = 12 + LETTER * max((len(one.text) for one in rows), default=0)
    top, base = 6.0, 6.0 + row * len(rows)
    ends: list[float] = [0.0, *(v for one in rows for v in (one.value, *(one.interval or ())) if v is not None)]
    low, high = min(ends), max(ends)
    room = 0.06 * (high - low) or 1.0
    low, high = low - room, high + room

    def px(value: float) -> float:
        return left + (value - low) / (high - low) * (width - left - right)

    body = []
    for tick in ticks(low, high, 6):
        body.append(Markup('<path class="grid" d="M{} {}V{}"/>').format(number(px(tick)), number(top), number(base)))
        body.append(text(px(tick), base + 15, tick_words(tick), "middle"))
    body.append(Markup('<path class="axis" d="M{} {}V{}"/>').format(number(px(0)), number(top), number(base)))
    body.append(text((px(low) + px(high)) / 2, base + 34, x_label, "middle", "label"))
    for k, (one, name) in enumerate(zip(rows, names, strict=True)):
        middle = top + (k + 0.5) * row
        body.append(text(left - 8, middle + 4, name, "end"))
        if one.value is None:
            continue
        if one.interval is not None:
            least, most = map(px, one.interval)
            body.append(
                Markup('<path class="c s{}" d="M{} {}H{}"/>').format(
                    one.style % STYLES, number(least), number(middle), number(most)
                )
            )
        body += [
            Markup('<circle class="dot" cx="{}" cy="{}" r="2"/>').format(number(px(v)), number(middle + 7))
            for v in one.dots
        ]
        body.append(marker(one.style, px(one.value), middle))
        body.append(text(width - right + 8, middle + 4, one.text, kind="value"))
    return svg(width, base + 38, title, description, body, "forest")
