"""Which rows of the experiments' tables have fewer than three seeds, as their pages show them; and the runs that are missing.

``python experiments/missing.py`` counts and lists them, with the seconds that a run took where one is known. Most are too long for two
processors. On a machine with a GPU one command runs them all, some at the same time; it goes on where it was stopped::

    python experiments/missing.py --run --data-dir DATA --device cuda --at-once 8
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        table: Its folder's name.
        name: Of the row.
        seeds: Which its page shows.
        seconds: Of a run, in the mean; None: no run is known.
    """

    table: str
    name: str
    seeds: frozenset[int]
    seconds: float | None

    @property
    def missing(self) -> list[int]:
        """Seeds without a figure."""
        return [seed for seed in SEEDS if seed not in self.seeds]


def rows() -> Iterator[Row]:
    """All rows of all tables."""
    for place in sorted(path.parent for path in FOLDER.glob("*/table.toml")):
        lines = (place / "README.md").read_text().partition("<!-- figures:")[2].partition("<!-- end")[0].splitlines()
        header, _, *cells = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")
        )
        for line in cells:
            seeds, seconds = (line[header.index(column)].replace(",", " ") for column in ("seeds", "seconds"))
            known = float(seconds.replace(" ", "")) if seconds != "–" else None
            yield Row(place.name, line[0], frozenset(map(int, seeds.replace("–", "").split())), known)


def main() -> None:
    """Count, list, and run where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help="names of folders; none: all")
    parser.add_argument("--run", action="store_true", help="run what is missing, the shortest first")
    parser.add_argument("--data-dir", help="folder with the data sets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--at-once", type=int, default=1, help="how many runs at the same time")
    parser.add_argument("--out", default="runs/reproduce")
    given = parser.parse_args()
    every = [row for row in rows() if not given.tables or row.table in given.tables]
    left = sorted((row for row in every if row.missing), key=lambda row: row.seconds or float("inf"))
    print(
        f"{len(every) - len(left)} of {len(every)} rows have three seeds; {sum(len(row.missing) for row in left)} runs are missing"
    )
    print("| table | row | seeds missing | seconds of a run |\n|---|---|---|---|")
    for row in left:
        seconds = "–" if row.seconds is None else f"{row.seconds:,.0f}"
        print(f"| {row.table} | {row.name} | {', '.join(map(str, row.missing))} | {seconds} |")
    if not given.run:
        return
    where = ["--data-dir", given.data_dir] if given.data_dir else []

    def one(row: Row, seed: int) -> int:
        words = [
            "--only",
            row.name,
            "--seeds",
            str(seed),
            "--out",
            given.out,
            "--device",
            given.device,
            "--workers",
            "1",
            *where,
        ]
        return subprocess.run(
            [sys.executable, "-m", "fedfill", "reproduce", str(FOLDER / row.table), *words], check=False
        ).returncode

    with ThreadPoolExecutor(given.at_once) as pool:
        ends = list(pool.map(lambda pair: one(*pair), [(row, seed) for row in left for seed in row.missing]))
    if failed := sum(end != 0 for end in ends):
        raise SystemExit(f"{failed} of {len(ends)} runs failed; the same command tries them again")


if __name__ == "__main__":
    main()
