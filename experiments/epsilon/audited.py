"""Every row of this table, attacked: what an audit finds at least, beside what the account says.

``python experiments/epsilon/audited.py`` audits each row's own settings on the bundled digits, at four clients with equal shares,
and writes ``audited.csv`` and ``audited.png``. Rows that ``audited.csv`` holds are not audited again.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib import pyplot

import fedfill
from fedfill.privacy.audit import Finding
from fedfill.runs.directory import write_atomically
from fedfill.runs.shown import csv_text
from fedfill.studies.table import TableRow, read_entries, read_table

FOLDER = Path(__file__).parent
FILE = FOLDER / "audited.csv"
SEEDS = (0,)
REPEATS = {0.5: 4000, 1.0: 2000, 3.0: 800, 8.0: 400}
"""The less epsilon, the more repeats it takes to tell releases apart."""
CANARIES = {"sdafl": 1000, "dpfedavg": 5000}
NEIGHBOURS = {
    "epsilon_added": "a record is added or removed",
    "part_epsilon_added": "a record's gradient is replaced by the opposite one",
    "client_epsilon": "a client is added or removed",
}
"""What is attacked, by the row's cost. Canaries of DP-SGD are replaced records: the account of these is compared."""
COLUMNS = ("row", "series", "epsilon", "seed", "neighbours", "account", "found", "verdict", "canaries", "seconds")


def main() -> None:
    """Audit what is missing, then draw."""
    torch.set_num_threads(1)
    done = list(read())
    for seed in SEEDS:
        for row in (row for row in read_table(FOLDER).rows if row.series):
            if any(line["row"] == row.name and int(line["seed"]) == seed for line in done):
                continue
            done.append(audited(row, seed))
            write(done)
            print(*done[-1].values(), sep=" | ", flush=True)
    draw(done)


def audited(row: TableRow, seed: int) -> dict[str, Any]:
    """One row with one seed."""
    epsilon, began = epsilon_of(row), time.perf_counter()
    options: dict[str, Any] = {"clients": 4, "partition": "iid", **row.options}
    repeats = REPEATS[epsilon]
    if "honest" in options:  # all clients answer in every repeat, not the attacked one alone
        options, repeats = {**options, "honest": options["clients"]}, max(200, repeats // 5)
    if row.cost == "client_epsilon":
        options |= {"clients": 3, "data_fraction": 0.2}  # beside the canaries, which are clients too
    found = fedfill.audit(
        row.algorithm, seed=seed, repeats=repeats, canaries=CANARIES.get(row.algorithm, 1000), **options
    )
    finding = attacked(found.findings, NEIGHBOURS[row.cost or "epsilon_added"])
    return dict(
        zip(
            COLUMNS,
            (
                row.name, row.series, epsilon, seed, finding.neighbours, round(finding.ledger_epsilon or 0, 4),
                round(finding.found_epsilon, 4), finding.verdict, finding.canaries, round(time.perf_counter() - began),
            ),
            strict=True,
        )
    )  # fmt: skip


def epsilon_of(row: TableRow) -> float:
    """That its name ends with."""
    return float(row.name.rsplit(" ", 1)[1])


def attacked(findings: tuple[Finding, ...], neighbours: str) -> Finding:
    """The claim about these neighbours."""
    claims = [one for one in findings if one.ledger_epsilon is not None]
    return next(one for one in claims if one.neighbours == neighbours)


def read() -> Iterator[dict[str, Any]]:
    """What was found so far."""
    if FILE.exists():
        with FILE.open(newline="") as file:
            yield from csv.DictReader(file)


def write(lines: list[dict[str, Any]]) -> None:
    """All of it, in one step."""
    write_atomically(FILE, csv_text(COLUMNS, ([line[name] for name in COLUMNS] for line in lines)).encode())


def draw(lines: list[dict[str, Any]]) -> None:
    """Two panels over the account's epsilon: the rows' accuracy, and the share of the account that was found at least."""
    table, entries = read_table(FOLDER), read_entries(FOLDER)
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(6.4, 7.2), sharex=True)
    for k, series in enumerate(dict.fromkeys(row.series for row in table.rows if row.series)):
        style = {"marker": "os^DvPX<"[k % 8], "markersize": 4.5, "linewidth": 1.6, "capsize": 2, "label": series}
        accuracies: dict[float, list[float]] = {}
        shares: dict[float, list[float]] = {}
        for row in (row for row in table.rows if row.series == series):
            runs = [entry.figures[row.shows or table.figures[0]] for entry in entries if entry.row == row.name]
            accuracies[epsilon_of(row)] = [100 * run for run in runs]
            found = [line for line in lines if line["row"] == row.name]
            shares[epsilon_of(row)] = [float(line["found"]) / float(line["account"]) for line in found]
        for axes, values in ((top, accuracies), (bottom, shares)):
            middle = [mean(of) for of in values.values()]
            ends = [[m - min(of) for m, of in zip(middle, values.values(), strict=True)],
                    [max(of) - m for m, of in zip(middle, values.values(), strict=True)]]  # fmt: skip
            axes.errorbar(list(values), middle, ends, **style)
    top.set_ylabel("accuracy on the test set, percent")
    bottom.set_ylabel("found at least / account")
    bottom.set_xlabel("epsilon of the account")
    bottom.set_xscale("log")
    bottom.set_xticks([0.5, 1, 3, 8], ["0.5", "1", "3", "8"])
    bottom.minorticks_off()
    bottom.set_ylim(0, 1)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    top.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1.01))
    figure.savefig(FOLDER / "audited.png", dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
