"""How much ridge a number needs under noise: R² of ``fed3r`` by lambda, in shares of the noise's edge, on made-up tables.

``python bench/number_noise.py`` prints a line for each number of rows and epsilon: the mean over four tables. On these stands the half
that `fedfill.statistics.number_ridge.STRENGTH` is.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import fedfill

INPUTS = 8
SHARES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)


def rows(seed: int, n: int) -> pd.DataFrame:
    """Eight uniform numbers, some of which count, one of them not in a straight line, and a target within a third of its bounds."""
    draw = np.random.default_rng(seed)
    x = draw.uniform(0, 1, (n, INPUTS))
    weights = draw.normal(size=INPUTS) * (draw.random(INPUTS) < 0.6)
    y = x @ weights + 0.5 * np.sin(4 * x[:, 0]) * draw.normal() + draw.normal(0, 0.3 * draw.integers(1, 4), n)
    frame = pd.DataFrame({f"x{k}": x[:, k] for k in range(INPUTS)})
    return frame.assign(y=((y - y.mean()) / (3 * y.std()) * 20 + 20).clip(0, 40), site=draw.choice(list("abcd"), n))


def main() -> None:
    """Run all of it."""
    columns = "".join(f'[columns.x{k}]\nkind = "real"\nlow = 0\nhigh = 1\nmissing = false\n' for k in range(INPUTS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        schema = folder / "schema.toml"
        schema.write_text(f'site = "site"\n[target]\ncolumn = "y"\nkind = "number"\nlow = 0\nhigh = 40\n{columns}')
        for n in (2000,):
            tables = [rows(seed, n) for seed in range(4)]
            for epsilon in (10.0, 3.0, 1.0):
                found = []
                for share in SHARES:
                    runs = [
                        fedfill.run(
                            "fed3r", data=table, schema_file=schema, partition="domain", model="features", target_epsilon=epsilon,
                            trust="secure", honest=4, ridge_lambda=share, seed=seed, out=folder / f"{n}-{epsilon}-{share}-{seed}",
                        )
                        for seed, table in enumerate(tables)
                    ]  # fmt: skip
                    found.append(f"{share:g}: {statistics.fmean(run.summary['r2'] for run in runs):+.3f}")
                print(f"{n:,} rows, epsilon {epsilon:g}   {'   '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
