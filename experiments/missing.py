"""Which rows of the experiments' tables have fewer than three seeds, as their pages show them; and the runs that are missing.

``python experiments/missing.py`` counts and lists them, with the seconds that a run took where one is known. Most are too long for two
processors. On a machine with a GPU one command runs them all, some at the same time; it goes on where it was stopped::

    python experiments/missing.py --run --data-dir DATA --device cuda --at-once 8

The shortest come first; those whose time nobody knows yet come last, however short. The seconds are those of the page, in the mean over
its runs, on whatever machines these were. Pages without a ``table.toml`` are not counted.

Each finished run writes its figures into ``results.json`` and ``README.md`` of its table; what a page says about them is for its
authors to look through. Runs of one table may be at work at the same time: they add their figures one after another, under a lock.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from fedfill.errors import did_you_mean

FOLDER = Path(__file__).parent
SEEDS = (0, 1, 2)
STOPPED = 130


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


def tables() -> list[Path]:
    """All folders with a table."""
    return sorted(path.parent for path in FOLDER.glob("*/table.toml"))


def rows() -> Iterator[Row]:
    """All rows of all tables."""
    for place in tables():
        page = place / "README.md"
        text = page.read_text() if page.exists() else ""
        lines = text.partition("<!-- figures:")[2].partition("<!-- end")[0].splitlines()
        header, _, *shown = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")
        ] or [[], []]
        of_row = {cells[0]: dict(zip(header, cells, strict=True)) for cells in shown}
        for row in tomllib.loads((place / "table.toml").read_text())["rows"]:
            cells = of_row.get(row["name"], {})
            seeds = cells.get("seeds", "–").replace("–", "").replace(",", " ").split()
            seconds = cells.get("seconds", "–").replace(",", "")
            yield Row(place.name, row["name"], frozenset(map(int, seeds)), None if seconds == "–" else float(seconds))


def main() -> None:
    """Count, list, and run where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help="names of folders; none: all")
    parser.add_argument("--run", action="store_true", help="run what is missing, the shortest first")
    parser.add_argument("--data-dir", help="folder with the data sets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--at-once", type=int, default=1, help="how many runs at the same time")
    parser.add_argument("--out", default="runs/reproduce", help="folder of the runs")
    given = parser.parse_args()
    known = [place.name for place in tables()]
    for name in given.tables:
        if name not in known:
            parser.error(f"tables: found '{name}'; {did_you_mean(name, known)}")
    if given.at_once < 1:
        parser.error(f"--at-once: found {given.at_once}; allowed: whole numbers of at least 1")
    every = [row for row in rows() if not given.tables or row.table in given.tables]
    left = sorted((row for row in every if row.missing), key=lambda row: row.seconds or float("inf"))
    missing = sum(len(row.missing) for row in left)
    print(f"{len(every) - len(left)} of {len(every)} rows have three seeds; {missing} runs are missing")
    print("| table | row | seeds missing | seconds of a run |\n|---|---|---|---|")
    for row in left:
        seconds = "–" if row.seconds is None else f"{row.seconds:,.0f}"
        print(f"| {row.table} | {row.name} | {', '.join(map(str, row.missing))} | {seconds} |", flush=True)
    if given.run:
        where = ["--data-dir", given.data_dir] if given.data_dir else []
        words = ["--out", given.out, "--device", given.device, "--workers", "1", *where]
        run([(row, seed) for row in left for seed in row.missing], words, given.at_once)


def run(pairs: Sequence[tuple[Row, int]], words: Sequence[str], at_once: int) -> None:
    """Make all runs, in their order, and say of each how it ended; one that fails stops no other."""
    failed = 0
    pool = ThreadPoolExecutor(at_once)
    ends = {pool.submit(one, row, seed, words, at_once > 1): (row, seed) for row, seed in pairs}
    try:
        for k, end in enumerate(as_completed(ends), 1):
            row, seed = ends[end]
            failed += (wrong := end.result()[0]) is not None
            how = f"finished after {end.result()[1]:,.0f} s" if wrong is None else f"failed: {wrong}"
            print(f"{k} of {len(ends)}: {row.table}, {row.name}, seed {seed}: {how}", flush=True)
    except KeyboardInterrupt:
        # the runs at work were interrupted too, by the same keys, and keep their finished rounds
        pool.shutdown(cancel_futures=True)
        print("stopped; the same command goes on from there", file=sys.stderr)
        raise SystemExit(STOPPED) from None
    if failed:
        raise SystemExit(f"{failed} of {len(ends)} runs failed; the same command tries them again")


def one(row: Row, seed: int, words: Sequence[str], quiet: bool) -> tuple[str | None, float]:
    """Make a run, which writes its figures into its table.

    Args:
        row: Which row.
        seed: Of the run.
        words: Where it runs.
        quiet: Whether its progress is left out, as that of several runs would be mixed.

    Returns:
        What went wrong, None where nothing did; and the seconds.
    """
    command = [
        sys.executable,
        "-m",
        "fedfill",
        "reproduce",
        str(FOLDER / row.table),
        "--only",
        row.name,
        "--seeds",
        str(seed),
    ]
    begun = time.monotonic()
    ended = subprocess.run(
        [*command, *words],
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        check=False,
    )
    last = (ended.stderr or "").strip().splitlines()[-1:] or [f"exit status {ended.returncode}"]
    return (last[0] if ended.returncode else None), time.monotonic() - begun


if __name__ == "__main__":
    main()
