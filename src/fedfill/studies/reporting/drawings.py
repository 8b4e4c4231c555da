"""Drawings of a report as SVG: what all have in common, and line charts, in the colours of the page's style sheet.

Every drawing is an image with a title and a description for people who hear the page; what users named is escaped. Lengths
are pixels at the drawing's own size; the page scales it. Shares are drawn in percent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

STYLES = 8
"""Colours of the style sheet, each with a dash and a marker of its own."""
MOST_POINTS = 120
"""Of one curve; more are thinned."""

_DASHES = ("", "7 4", "2 3", "11 3 2 3", "5 2", "1 4", "9 2 1 2 1 2", "14 4")
WIDE = 8.0
"""Width of a letter of a name, which may be of settings: ``mu=0.01``, with wide signs."""

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


def marker(style: int, x: float, y: float) -> Markup:
    """A small shape, another one for each style."""
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
    ).format(style % STYLES, _dash(style), marker(style, 17, 6))


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
        if (
            len(shown) == 1 and not curve.faint and len(xs) > len(curves)
        ):  # a method of one round: its level, to compare
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
        body += [marker(curve.style, px(shown[k][0]), py(shown[k][1])) for k in places]
    return svg(width, height, title, description, body, "lines")


def names_at_left(labels: Sequence[str], most: int) -> tuple[float, list[str]]:
    """Room for names at the left, and these shortened to it."""
    short = [shorten(label, most) for label in labels]
    return 14 + WIDE * max(map(len, short), default=0), short
