"""Cox's model with a guarantee, on a simulated table: for each row by ``mst``, for each site by ``dpfedavg``.

``python experiments/survival/private.py`` prints hazard ratios of Cox on all rows' sums, and on tables that ``mst`` makes; then C-indices
of the network ``hazards`` at 300 sites, trained with and without noise.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fedfill

ROWS, SEEDS = 6000, (0, 1, 2)
SCHEMA = """
[target]
column = "weeks"
kind = "survival"
event = "relapse"
grid = {grid}

[columns.age]
kind = "integer"
low = 20
high = 90

[columns.arm]
kind = "category"
values = ["a", "b"]

[columns.marker]
kind = "real"
low = 0
high = 80
"""
COLUMNS = ("age", "marker", "arm: b against a")


def table(sites: int) -> pd.DataFrame:
    """Rows whose hazard ratios are exp(.03) for a year of age and for one of the marker, and exp(.5) for the arm."""
    draw = np.random.default_rng(0)
    age, arm = draw.integers(20, 90, ROWS), draw.choice(["a", "b"], ROWS)
    marker = draw.gamma(4, 5, ROWS).clip(0, 80).round(1)
    hazard = np.exp(0.03 * (age - 55) + 0.5 * (arm == "b") + 0.03 * (marker - 20)) / 40
    event, left = draw.exponential(1 / hazard), draw.uniform(0, 72, ROWS)
    told = {"weeks": np.minimum(event, left).round(2), "relapse": (event <= left).astype(int)}
    return pd.DataFrame({"site": draw.integers(0, sites, ROWS), "age": age, "arm": arm, "marker": marker, **told})


def schema(place: Path, times: int, site: bool = True) -> Path:
    """A file of the schema, with so many grid times."""
    file = place / f"schema-{times}-{site}.toml"
    grid = [round(float(time), 4) for time in np.linspace(0, 48, times + 1)[1:]]
    file.write_text(('site = "site"\n' if site else "") + SCHEMA.format(grid=grid))
    return file


def ratios(result: fedfill.Result) -> list[float]:
    """Hazard ratios of `COLUMNS`."""
    found = {row["name"]: row.get("hazard_ratio") for row in result.summary["findings"]["coefficients"]}
    return [found[name] for name in COLUMNS]


def main() -> None:
    """Both parts."""
    common: dict[str, Any] = {"partition": "domain", "client_test": 0.0, "quiet": True}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        rows, many = place / "ten.csv", place / "many.csv"
        table(10).to_csv(rows, index=False)
        table(300).to_csv(many, index=False)
        print(f"| | {' | '.join(COLUMNS)} |\n|---|---|---|---|")
        for times in (12, 48):
            found = fedfill.run(
                "cox", data=rows, schema_file=schema(place, times), out=place / f"cox-{times}", **common
            )
            print(f"| `cox`, {times} times | {' | '.join(f'{ratio:.3f}' for ratio in ratios(found))} |")
            for epsilon in (3.0, 1.0):
                of_seeds = []
                for seed in SEEDS:
                    name = f"mst-{times}-{epsilon}-{seed}"
                    fedfill.run(
                        "mst", data=rows, schema_file=schema(place, times), target_epsilon=epsilon, trust="secure", seed=seed,
                        out=place / name, **common,
                    )  # fmt: skip
                    made = place / f"{name}.parquet"
                    fedfill.synthesise(place / name, out=made)
                    one = {**common, "partition": "iid", "clients": 1, "test_fraction": 0.0}
                    of_seeds.append(
                        ratios(
                            fedfill.run(
                                "cox",
                                data=made,
                                schema_file=schema(place, times, False),
                                out=place / f"{name}-cox",
                                **one,
                            )
                        )
                    )
                cells = [f"{min(own):.3f} to {max(own):.3f}" for own in zip(*of_seeds, strict=True)]
                print(f"| `mst` with epsilon {epsilon:g}, then `cox` | {' | '.join(cells)} |", flush=True)
        options = {**common, "data": many, "schema_file": schema(place, 12), "model": "hazards"}
        noise = {"noise_multiplier": 4.0, "clip": 0.3, "learning_rate": 0.01, "participation": 0.3, "rounds": 30}
        print("\n| | C-index, seeds 0, 1, 2 | client_epsilon |\n|---|---|---|")
        for name, more in (
            ("fedavg", {"learning_rate": 0.01, "participation": 0.3, "rounds": 50}),
            ("dpfedavg", noise),
        ):
            results = [fedfill.run(name, seed=seed, out=place / f"{name}-{seed}", **options, **more) for seed in SEEDS]
            spent = results[0].rounds[-1].get("client_epsilon")
            scores = ", ".join(f"{result.summary['c_index']:.3f}" for result in results)
            print(f"| `{name}` | {scores} | {'–' if spent is None else f'{spent:.2f}'} |", flush=True)


if __name__ == "__main__":
    main()
