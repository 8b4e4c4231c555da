"""Bring the methods' pages up to what is stored: their tables beside FedAvg, one line for each division.

``python experiments/field/pages.py`` writes the lines below each header of the form ``| | `fedlc` | with `ccvr` | `fedavg` | with `ccvr` |``
in ``docs/algorithms``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import fmean, stdev
from typing import Any

from choice import HEADS, NORMALISED, PARTITIONS, chosen, with_network
from stored import FOLDER, read

from fedfill.runs.directory import write_atomically

PAGES = FOLDER.parents[1] / "docs" / "algorithms"
TABLE = re.compile(r"(^\| \|(?: `[a-z0-9-]+` \| with `ccvr` \|)+\n\|[-|]+\n)((?:\|.*\n)+)", re.MULTILINE)


def main() -> None:
    """Write every page that has such a table."""
    lines = read(FOLDER / "runs.csv")
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text()
        if (found := brought_up(text, lines)) != text:
            write_atomically(page, found.encode())
            print(f"written: {page.name}")


def brought_up(text: str, lines: list[dict[str, Any]]) -> str:
    """A page with the stored figures in its tables."""

    def anew(table: re.Match[str]) -> str:
        network = NORMALISED if f"`{NORMALISED}`" in text[: table.start()].rpartition("\n\n**")[2] else ""
        names = re.findall(r"`([a-z0-9-]+)` \| with", table[1])
        return table[1] + "".join(f"{row}\n" for row in rows(lines, [with_network(name, network) for name in names]))

    return TABLE.sub(anew, text)


def rows(lines: list[dict[str, Any]], names: list[str]) -> Iterator[str]:
    """A line of each division in which the first of these methods ran."""
    for partition, words in PARTITIONS.items():
        found = [chosen(lines, partition, name, head) for name in names for head in HEADS]
        if found[0]:
            yield f"| {words[0].upper()}{words[1:]} | {' | '.join(map(share, found))} |"


def share(runs: list[dict[str, Any]]) -> str:
    """Mean and deviation of the accuracy, as parts of one."""
    values = [float(run["accuracy"]) for run in runs]
    return f"{fmean(values):.3f} ± {stdev(values):.3f}".replace("0.", ".") if len(values) > 1 else "–"


if __name__ == "__main__":
    main()
