"""The same where the target is a number: train on rows of ``mst`` or ``aim``, test on real rows; a client for each site.

``python experiments/tables/number_target.py`` has the mass of a penguin and the weight of a rodent; ``--aim`` the same of ``aim``.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import fedfill
from fedfill.data.natural import known_tables, read
from fedfill.data.schema import Schema
from fedfill.data.schema_columns import Column
from fedfill.data.schema_target import Target

TARGETS = {"penguins": ("body_mass_g", 2500.0, 6500.0), "rats": ("weight", 0.0, 300.0)}
"""By table the number that is told, with its public bounds."""
NOISE = (None, 3.0, 1.0)
COLUMNS = ("RMSE, linear", "R², linear", "RMSE, boosting", "R², boosting", "workload error")
MODELS = ("linear_regression", "gradient_boosting")


def agreed(name: str) -> Schema:
    """The bundled schema with a number as target; what was the target is one of the columns."""
    given, (column, low, high) = known_tables()[name].schema, TARGETS[name]
    others = {key: value for key, value in given.columns.items() if key != column}
    classes = Column(kind="category", values=given.target.values, missing=False)
    target = Target(column=column, kind="number", low=low, high=high)
    return replace(given, columns={**others, given.target.column: classes}, target=target)


def told(learnt: dict[str, Any]) -> list[float]:
    """RMSE and R² of both models."""
    return [learnt[model][key] for model in MODELS for key in ("rmse", "r2")]


def of_table(name: str, algorithm: str, place: Path) -> pd.DataFrame:
    """Three seeds of a table, each with another split of 70 to 30: figures of `fedfill measure`."""
    schema, rows = agreed(name), []
    whole = read(known_tables()[name]).to_pandas()
    whole = whole[whole[schema.target.column].notna()]
    sources = [{"structure": "star"}, {"structure": "augmented"}] if algorithm == "mst" else [{}]
    for seed in (0, 1, 2):
        folder = place / f"{name}-{seed}"
        folder.mkdir(exist_ok=True)
        (folder / "schema.toml").write_text(schema.toml())
        order = np.random.default_rng(seed).permutation(len(whole))
        for part, which in zip(np.split(order, [int(0.3 * len(whole))]), ("test", "train"), strict=True):
            whole.iloc[part].to_csv(folder / f"{which}.csv", index=False)
        for settings in sources:
            source = settings.get("structure", algorithm)
            for epsilon in NOISE if algorithm == "mst" else NOISE[1:]:
                sites = whole[schema.site].nunique()
                noise: dict[str, Any] = {"target_epsilon": epsilon, "trust": "secure", "honest": sites}
                result = fedfill.run(
                    algorithm, data=folder, schema_file=folder / "schema.toml", partition="domain", client_test=0.0, classifier_epochs=1,
                    seed=seed, out=folder / f"{source}-{epsilon}", quiet=True, **settings, **(noise if epsilon else {}),
                )  # fmt: skip
                found = fedfill.measure(result).document
                learnt, work = found["trained_on"], found["workload"]
                words = "none" if epsilon is None else f"{epsilon:g}"
                rows.append(("real rows", "", seed, *told(learnt["real"]), 0.0))
                rows.append(("columns apart", "", seed, *[np.nan] * 4, work["columns_apart"]))
                rows.append((source, words, seed, *told(learnt["synthetic"]), work["error"]))
    return pd.DataFrame(rows, columns=["rows from", "epsilon", "seed", *COLUMNS])


def main() -> None:
    """Both tables, as Markdown: means and standard deviations over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aim", action="store_true", help="aim in place of mst; needs its extra")
    parser.add_argument("names", nargs="*", default=list(TARGETS))
    given = parser.parse_args()
    print(f"{platform.machine()}, torch {torch.__version__}")
    for name in given.names:
        with tempfile.TemporaryDirectory() as place:
            found = of_table(name, "aim" if given.aim else "mst", Path(place))
        # what is the same in each run of a seed counts once
        once = found.drop_duplicates(["rows from", "epsilon", "seed"]).groupby(["rows from", "epsilon"], sort=False)
        mean, deviation = once[list(COLUMNS)].mean(), once[list(COLUMNS)].std()
        print(f"\n{name}: {TARGETS[name][0]}\n\n| rows from | epsilon | {' | '.join(COLUMNS)} |\n|{'---|' * 7}")
        for key in mean.index:
            both = [(mean.loc[key, column], deviation.loc[key, column]) for column in COLUMNS]
            cells = ["–" if np.isnan(a) else f"{a:.1f} ± {b:.1f}" if a > 10 else f"{a:.3f} ± {b:.3f}" for a, b in both]
            print(f"| {' | '.join([*key, *cells])} |")


if __name__ == "__main__":
    main()
