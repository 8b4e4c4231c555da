"""Small tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


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
