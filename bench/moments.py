"""What standardising by federated moments brings on a skewed column: AUC of FedAvg by schema, on made-up rows.

``python bench/moments.py`` prints a table: mean and range over three draws of rows.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import fedfill

SCHEMA = """
site = "site"
[target]
column = "ill"
values = ["no", "yes"]
[columns.lab]
kind = "real"
low = 0
high = 100
[columns.age]
kind = "integer"
low = 0
high = 120
missing = false
"""
NOISE = {
    "by moments": {},
    "by moments, epsilon 1, noise shared by four": {"target_epsilon": 1.0, "trust": "secure", "honest": 4},
    "by moments, epsilon 1, noise at each site": {"target_epsilon": 1.0},
}


def rows(seed: int, n: int = 3000) -> pd.DataFrame:
    """A log-normal laboratory value, a tenth of them missing, and an age; the outcome depends on both."""
    draw = np.random.default_rng(seed)
    lab, age = draw.lognormal(0, 0.6, n).clip(0, 99), draw.integers(20, 90, n)
    ill = draw.random(n) < 1 / (1 + np.exp(-(1.5 * (lab - 1.2) + 0.02 * (age - 55))))
    seen = np.where(draw.random(n) < 0.1, np.nan, lab)
    return pd.DataFrame(
        {"lab": seen, "age": age, "ill": np.where(ill, "yes", "no"), "site": draw.choice(list("abcd"), n)}
    )


def main() -> None:
    """Run all of it."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "schema.toml").write_text(SCHEMA)
        for seed in range(3):
            common = {"data": rows(seed), "partition": "domain", "seed": seed}
            schemas = {"by bounds": folder / "schema.toml"}
            for words, noise in NOISE.items():
                out = folder / f"{words} {seed}"
                fedfill.run("moments", schema_file=folder / "schema.toml", out=out, **common, **noise)
                schemas[words] = out / "schema.toml"
            for words, schema in schemas.items():
                run = fedfill.run(
                    "fedavg", schema_file=schema, model="mlp", rounds=5, local_epochs=1, out=folder / f"run {words} {seed}", **common,
                )  # fmt: skip
                found.setdefault(words, []).append(run.summary["auc"])
    for words, values in found.items():
        print(f"{words:<45} {statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
