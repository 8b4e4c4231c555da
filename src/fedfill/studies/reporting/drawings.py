"""Drawings of a report: line charts, bars with dots, strips and intervals as SVG, in the colours of the page's style sheet.

Every drawing is an image with a title and a description for people who hear the page; what users named is escaped. Lengths
are pixels at the drawing's own size; the page scales it. Shares are drawn in percent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

STYLES = 8
"""Colours of the style sheet, each with a dash and a marker of its own."""
MOST_POINTS = 120
"""Of one curve; more are thinned."""
DOTS = 60
"""Of one row of a strip; more become quantiles."""

_DASHES = ("", "7 4", "2 3", "11 3 2 3", "5 2", "1 4", "9 2 1 2 1 2", "14 4")
LETTER = 7.0
"""Pixels of a letter, in a wide typeface."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Attributes:
        label: Whose it is.
        points: ``(x, y)`` in the order of x.
        band: ``(x, low, high)`` around it; empty: none.
        style: Its colour, dash and marker.
        faint: Whether it is only there to compare others with.
    """

    label: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    style: int = 0
    faint: bool = False


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


def svg(width: float, height: float, title: str, description: str, body: Sequence[Markup], kind: str) -> Markup:
    """An image of so many pixels."""
    return Markup(
        '<svg class="{} drawing" viewBox="0 0 {:.0f} {:.0f}" width="{:.0f}" height="{:.0f}" role="img">'
        "<title>{}</title><desc>{}</desc>{}</svg>"
    ).format(kind, width, height, width, height, title, description, Markup("\n").join(body))


def number(value: float) -> str:
    """A coordinate: one digit behind the point at the most."""
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")  # adding zero makes no -0


def ticks(low: float, high: float, most: int = 6, whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of ten.

    Args:
        low: Where the axis begins.
        high: Where it ends.
        most: No more ticks than that.
        whole: Whole numbers alone, such as of rounds.

    Returns:
        The numbers, at least one.
    """
    span = high - low
    if span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    steps = (factor * scale for scale in (power, 10 * power, 100 * power) for factor in (1, 2, 5))
    for step in steps:
        if whole and step < 1:
            continue
        first = math.ceil(low / step - 1e-9)
        found = [round(k * step, 10) for k in range(first, math.floor(high / step + 1e-9) + 1)]
        if len(found) <= most:
            return found or [low]
    return [low]


def powers_of_ten(low: float, high: float) -> list[float]:
    """Ticks of an axis whose steps are powers of ten: 1, 2 and 5 times these, or the powers alone where those are many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [float(f"{factor}e{k}") for k in exponents for factor in factors]
        found = [tick for tick in found if low * 0.999 <= tick <= high * 1.001]
        if len(found) <= 8:
            break
    return found


def tick_words(value: float) -> str:
    """A tick in few letters: ``0.5``, ``20``, ``1,000``."""
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def shorten(text: str, letters: int) -> str:
    """A name that leaves room for the drawing."""
    return text if len(text) <= letters else text[: max(1, letters - 1)] + "…"


def thinned(points: Sequence[tuple[float, ...]], most: int = MOST_POINTS) -> list[tuple[float, ...]]:
    """So many points at the most, evenly, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(k * (len(points) - 1) / (most - 1))] for k in range(most)]


def _marker(style: int, x: float, y: float) -> Markup:
    size = 3.4
    shapes = (
        f"M{number(x - size)} {number(y)}a{size} {size} 0 1 0 {2 * size} 0a{size} {size} 0 1 0 {-2 * size} 0z",
        f"M{number(x - 3)} {number(y - 3)}h6v6h-6z",
        f"M{number(x)} {number(y - 4)}l4 7h-8z",
        f"M{number(x)} {number(y - 4.4)}l4.4 4.4l-4.4 4.4l-4.4 -4.4z",
        f"M{number(x)} {number(y + 4)}l4 -7h-8z",
        f"M{number(x - 4)} {number(y - 1.4)}h8v2.8h-8z",
        f"M{number(x - 1.4)} {number(y - 4)}h2.8v8h-2.8z",
        f"M{number(x - 4)} {number(y - 4)}h8l-8 8h8z",
    )
    return Markup('<path class="m s{}" d="{}"/>').format(style % STYLES, shapes[style % len(shapes)])


def swatch(style: int) -> Markup:
    """A short piece of a curve, for a legend."""
    return Markup(
        '<svg class="swatch" viewBox="0 0 34 12" width="34" height="12" aria-hidden="true" focusable="false">'
        '<path class="c s{}" d="M1 6H33"{}/>{}</svg>'
    ).format(style % STYLES, _dash(style), _marker(style, 17, 6))


def _dash(style: int) -> Markup:
    dash = _DASHES[style % len(_DASHES)]
    return Markup(' stroke-dasharray="{}"').format(dash) if dash else Markup()


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> Markup:
    """Words that start, end or have their middle there."""
    return Markup('<text x="{}" y="{}" class="{}">{}</text>').format(
        number(x), number(y), f"a-{anchor} {kind}".strip(), words
    )


def lines(
    curves: Sequence[Curve],
    *,
    title: str,
    description: str,
    x_label: str,
    y_label: str,
    y_range: tuple[float, float],
    x_range: tuple[float, float] | None = None,
    whole: bool = True,
    powers: bool = False,
    width: int = 460,
    height: int = 270,
) -> Markup:
    """A line chart.

    Args:
        curves: At least one with a point; what is faint is drawn first.
        title: For people who hear the page.
        description: What it shows, for the same.
        x_label: Under the axis.
        y_label: Above the axis.
        y_range: Where the vertical axis begins and ends.
        x_range: Where the horizontal axis begins and ends; None: from the first to the last point.
        whole: Whether ticks of the horizontal axis are whole numbers.
        powers: Whether its steps are powers of ten, of numbers above zero.
        width: Pixels.
        height: Pixels.

    Returns:
        The SVG.
    """
    low, high = y_range
    xs = [x for curve in curves for x, _ in curve.points]
    first, last = x_range or (min(xs), max(xs))
    if first == last:
        first, last = first - 1, last + 1
    y_ticks = ticks(low, high, 6)
    left = 14 + LETTER * max(len(tick_words(t)) for t in y_ticks)
    right, top, bottom = 14.0, 26.0, 42.0

    def px(x: float) -> float:
        share = math.log(x / first) / math.log(last / first) if powers else (x - first) / (last - first)
        return left + share * (width - left - right)

    def py(y: float) -> float:
        return top + (high - min(max(y, low), high)) / (high - low) * (height - top - bottom)

    body = [text(0, 12, y_label, kind="label")]
    for tick in y_ticks:
        body.append(
            Markup('<path class="grid" d="M{} {}H{}"/>').format(number(left), number(py(tick)), number(width - right))
        )
        body.append(text(left - 6, py(tick) + 4, tick_words(tick), "end"))
    for tick in powers_of_ten(first, last) if powers else ticks(first, last, 7, whole):
        if min(xs) <= tick or x_range:
            body.append(Markup('<path class="axis" d="M{} {}v4"/>').format(number(px(tick)), number(height - bottom)))
            body.append(text(px(tick), height - bottom + 17, tick_words(tick), "middle"))
    body.append(
        Markup('<path class="axis" d="M{} {}H{}"/>').format(
            number(left), number(height - bottom), number(width - right)
        )
    )
    body.append(text((left + width - right) / 2, height - 6, x_label, "middle", "label"))
    drawn = sorted(curves, key=lambda curve: not curve.faint)
    for curve in drawn:
        if len(curve.band) > 1 and not curve.faint:
            band = thinned(curve.band)
            there = " ".join(f"{number(px(x))} {number(py(up))}" for x, _, up in band)
            back = " ".join(f"{number(px(x))} {number(py(down))}" for x, down, _ in reversed(band))
            body.append(Markup('<path class="b s{}" d="M{} {}z"/>').format(curve.style % STYLES, there, back))
    for curve in drawn:
        if not curve.points:
            continue
        shown = thinned(curve.points)
        if len(shown) == 1 and not curve.faint and len(xs) > len(curves):  # a method of one round: its level, to compare
            x, y = shown[0]
            body.append(
                Markup('<path class="level s{}" d="M{} {}H{}"/>').format(
                    curve.style % STYLES, number(px(x)), number(py(y)), number(width - right)
                )
            )
        path = " ".join(f"{number(px(x))} {number(py(y))}" for x, y in shown)
        if curve.faint:
            body.append(Markup('<path class="faint" d="M{}"/>').format(path))
            continue
        body.append(Markup('<path class="c s{}" d="M{}"{}/>').format(curve.style % STYLES, path, _dash(curve.style)))
        # markers of different curves stand at different places, so that a curve upon another one is seen
        every = max(1, math.ceil(len(shown) / 6))
        places = range((curve.style * max(1, every // 3)) % every, len(shown), every)
        body += [_marker(curve.style, px(shown[k][0]), py(shown[k][1])) for k in places]
    return svg(width, height, title, description, body, "lines")


def names_at_left(labels: Sequence[str], most: int) -> tuple[float, list[str]]:
    """Room for names at the left, and these shortened to it."""
    short = [shorten(label, most) for label in labels]
    return 14 + LETTER * max(map(len, short), default=0), short


def bars(
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
            body.append(_marker(style, least, middle))
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


def _scale(px: object, high: float, top: float, base: float, height: float, x_label: str) -> list[Markup]:
    assert callable(px)
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
    ends = [0.0, *(v for one in rows for v in (one.value, *(one.interval or ())) if v is not None)]
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
        body.append(_marker(one.style, px(one.value), middle))
        body.append(text(width - right + 8, middle + 4, one.text, kind="value"))
    return svg(width, base + 38, title, description, body, "forest")
