"""Figures and tables as text: for notebooks, pages and papers. Whatever stands in a cell is text, and no mark-up."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

NOTHING = "-"
"""In place of a figure that there is not."""

_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "±": r"$\pm$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "²": r"\textsuperscript{2}",
}  # fmt: skip

_MARKS = re.compile(r"[\\`*\[\]<>|~$]|&(?=#|\w+;)|(?<![^\W_])_|_(?![^\W_])|^#")
"""What Markdown would read; an underscore within a word is none, and the first sign of a line may be."""


def headline_of(document: Mapping[str, Any]) -> tuple[str, str]:
    """The headline figure of what is learnt, by which runs are judged, and settings and methods chosen.

    Under the names with ``accuracy`` a round's record has this figure, whatever it is: R² where a number is learnt, the C-index where
    it is the time to an event.

    Args:
        document: A summary, or a round's record; its ``target`` says what is learnt, classes where there is none.

    Returns:
        Its name for people, and under which name a summary has it.
    """
    own = {"number": ("R²", "accuracy"), "survival": ("C-index", "c_index")}
    return own.get(str(document.get("target")), ("accuracy", "accuracy"))


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table; whatever stands in it is text.

    Args:
        caption: Above it.
        header: Of the columns.
        rows: Cells, each shown as ``str`` has it.

    Returns:
        One element.
    """

    def line(kind: str, cells: Iterable[object]) -> str:
        return f"<tr>{''.join(f'<{kind}>{escape(str(cell))}</{kind}>' for cell in cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return (
        f"<table><caption>{escape(caption)}</caption><thead>{line('th', header)}</thead><tbody>{body}</tbody></table>"
    )


def one_line(text: str) -> str:
    """The same without line breaks and other signs that can't be seen: a name of one's own may hold any."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def latex(text: str) -> str:
    """Text as LaTeX shows it."""
    return "".join(_TEX.get(letter, letter) for letter in one_line(text))


def markdown(text: str) -> str:
    """Text as Markdown shows it, in a cell too."""
    return _MARKS.sub(lambda match: f"\\{match[0]}", one_line(text))


def csv_text(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A table as CSV.

    Args:
        header: Of the columns.
        rows: Their cells.

    Returns:
        A line for the header and one for each row, each with its end.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table in Markdown.

    Args:
        header: Of the columns.
        rows: Their cells.
        left: So many columns are words; the others are figures, and end at the right.

    Returns:
        A line for each row, below two for the header.
    """
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    lines = [[_cell(cell) for cell in header], rule, *([_cell(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return "–" if text == NOTHING else markdown(text)


def percent(mean: float | None, deviation: float | None) -> str:
    """A share in percent, with its deviation where there is one."""
    if mean is None:
        return NOTHING
    return f"{100 * mean:.2f}" if deviation is None else f"{100 * mean:.2f} ± {100 * deviation:.2f}"


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
