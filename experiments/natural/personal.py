"""Methods of a finished benchmark side by side, over all its tables.

``python experiments/natural/personal.py runs/natural-personal/natural.csv`` prints a table in Markdown.
"""

from __future__ import annotations

import sys

import pandas as pd

from fedfill.studies.comparison import paired_difference

FIGURES = {"auc": "AUC, all rows", "auc_within_clients": "within sites"}


def main() -> None:
    """One line for each method that ran on all tables: mean AUC over the tables, and on how many it is surely above or below."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python experiments/natural/personal.py NATURAL.CSV")
    found = pd.read_csv(sys.argv[1])
    found["method"] += found["model"].map({"linear": ", linear"}).fillna("")
    areas = {name: part.pivot_table("value", ["set", "seed"], "method") for name, part in found.groupby("figure")}
    seconds, tables = areas["seconds"].mean(), found["set"].nunique()
    print(f"{tables} tables, seeds {', '.join(map(str, sorted(found['seed'].unique())))}\n")
    over = [f"{words} | above `local` | below | above `fedavg` | below" for words in FIGURES.values()]
    print(f"| method | {' | '.join(over)} | seconds |\n|---|{'---:|' * 11}")
    whole = areas["auc"].dropna(axis=1).mean()  # methods that ran on all tables
    for method in sorted(whole.index, key=lambda name: -whole[name]):
        cells = [f"`{method}`"]
        for name in FIGURES:
            area = areas[name]
            cells.append(f"{area[method].groupby('set').mean().mean():.3f}")
            for base in ("local", "fedavg"):
                above, below = ("", "") if method == base else map(str, surely(area[method] - area[base]))
                cells += [above, below]
        print(f"| {' | '.join([*cells, f'{seconds[method]:.1f}'])} |")


def surely(difference: pd.Series) -> tuple[int, int]:
    """On how many tables the whole interval of 95 % of the mean over seeds is above 0, and on how many below."""
    found = [paired_difference(list(part.dropna())) for _, part in difference.groupby("set")]
    ends = [(one.mean - one.half_width, one.mean + one.half_width) for one in found if one.half_width is not None]
    return sum(low > 0 for low, _ in ends), sum(high < 0 for _, high in ends)


if __name__ == "__main__":
    main()
