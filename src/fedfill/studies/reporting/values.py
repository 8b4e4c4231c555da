"""What the page of a report is filled with: tables, charts and sections, and how figures are written in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What comes of a file that was edited or torn, where it gets past the checks."""


@dataclass(frozen=True)
class Room:
    """How much of the details a page has room for; what is left out is said where it is.

    Attributes:
        rows: Of one table of figures.
        clients: Of a heat map.
        picture: Bytes of one picture of synthetic samples.
        pictures: So many of these.
    """

    rows: int = 200
    clients: int = 40
    picture: int = 60_000
    pictures: int = 4


ROOMS = (Room(), Room(60, 40, 40_000, 2), Room(30, 24, 24_000, 1), Room(12, 16, 0, 0), Room(0, 10, 0, 0))
"""From generous to narrow."""


@dataclass(frozen=True)
class Table:
    """A table; the first cell of each row names it.

    Attributes:
        caption: What it shows.
        header: Names of the columns.
        rows: Their cells.
        strong: ``(row, column)`` of cells to make stand out.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Chart:
    """A drawing with its title and the table of the same figures.

    Attributes:
        title: What it shows.
        note: How to read it; data set and partition.
        drawing: The SVG.
        table: The same figures; None: they stand in the drawing or beside it.
        legend: For each curve its swatch and name.
        wide: Whether it takes the page's whole width, and scrolls where that is too small.
    """

    title: str
    note: str
    drawing: Markup
    table: Table | None
    legend: Sequence[tuple[Markup, str]] = ()
    wide: bool = False


@dataclass(frozen=True)
class Picture:
    """A picture of samples.

    Attributes:
        title: Whose.
        source: ``data:image/png;base64,...``.
        width: Pixels.
        height: Pixels.
    """

    title: str
    source: str
    width: int
    height: int


@dataclass(frozen=True)
class Section:
    """One section.

    Attributes:
        key: Of its address in the page.
        title: Its heading.
        lead: What it says, in a sentence or two.
        charts: Drawings.
        tables: In sight.
        folded: Tables to be opened.
        texts: ``(label, paragraph)``; an empty label: none.
        code: ``(label, command)``.
        pictures: Of samples.
    """

    key: str
    title: str
    lead: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    texts: Sequence[tuple[str, str]] = ()
    code: Sequence[tuple[str, str]] = ()
    pictures: Sequence[Picture] = ()


def percent(share: float | None, digits: int = 1) -> str:
    """A share in percent, such as ``80.2 %``; a dash where there is none."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation of shares, in percent."""
    mean = 100 * sum(values) / len(values) if values else None
    if mean is None:
        return "–"
    if len(values) < 2:
        return f"{mean:.1f} %"
    deviation = (sum((100 * v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.1f} ± {deviation:.1f} %"


def amount(count: float | None) -> str:
    """Bytes in a readable unit."""
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float | None) -> str:
    """A time in readable units."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def many(count: int, noun: str) -> str:
    """For example ``1 class`` or ``1,797 samples``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def sentence(text: str) -> str:
    """A capital letter at the front where a word of ours stands there, and a full stop at the end."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def quantiles(values: Sequence[float]) -> list[float]:
    """The least, the quartiles and the largest."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return [at(share) for share in (0, 0.25, 0.5, 0.75, 1)]
