"""Survival over ten sites against all rows in one place: Kaplan-Meier under noise, and Cox, on a table of one's own.

``python experiments/survival/run.py flchain.csv --time futime --event death --until 5000 --columns age,sex,kappa,lambda,mgus``
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from statsmodels.duration.hazard_regression import PHReg
from statsmodels.duration.survfunc import SurvfuncRight

import fedfill
from fedfill.algorithms.cox import design
from fedfill.data.schema import Schema, from_document, read_schema
from fedfill.experiment.prepare import arrange

SITES, STEPS = 10, 20
NOISE = (
    ("noise in the sum, as by a trusted server", "server", 3.0),
    ("noise at each site", "site", 3.0),
    ("noise in the sum, as by a trusted server", "server", 1.0),
    ("noise at each site", "site", 1.0),
)


def agreed(frame: pd.DataFrame, asked: argparse.Namespace, folder: Path) -> Path:
    """A schema with even grid times, whose bounds are the table's: public here, as everybody can have the table."""
    fedfill.describe(frame.drop(columns=asked.time), target=asked.event, out=folder / "draft.toml")
    document = read_schema(folder / "draft.toml").document()
    grid = [asked.until * (k + 1) / STEPS for k in range(STEPS)]
    document["target"] = {"kind": "survival", "column": asked.time, "event": asked.event, "grid": grid}
    (folder / "schema.toml").write_text(from_document(document, "").toml())
    return folder / "schema.toml"


def on_grid(schema: Schema, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times and events as the grid knows them: an event at its grid time, others at the last one before they left."""
    grid, event = np.array([0.0, *schema.target.grid]), cells < STEPS
    return np.where(event, grid[np.clip(cells + 1, 0, STEPS)], grid[np.clip(cells - STEPS, 0, STEPS)]), event


def survival(result: fedfill.Result) -> pd.DataFrame:
    """The curve of a run, from its first grid time on."""
    assert result.directory is not None
    found = pd.read_csv(result.directory / "curves.csv")
    return found[found["time"] > 0].reset_index(drop=True)


def beside(curve: pd.DataFrame, pooled: np.ndarray) -> tuple[float, float, float]:
    """Largest distance to the pooled curve, share of times at which the band holds it, and the band's mean width."""
    inside = (curve["low"] <= pooled + 1e-12) & (pooled - 1e-12 <= curve["high"])
    return (
        float(np.abs(curve["survival"] - pooled).max()),
        float(inside.mean()),
        float((curve["high"] - curve["low"]).mean()),
    )


def main() -> None:
    """Three seeds of everything, as tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--time", required=True)
    parser.add_argument("--event", required=True)
    parser.add_argument("--until", type=float, required=True, help="the last grid time")
    parser.add_argument("--columns", required=True, help="covariates, separated by commas")
    asked = parser.parse_args()
    frame = pd.read_csv(asked.file)[[asked.time, asked.event, *asked.columns.split(",")]]
    curves: dict[str, list[tuple[float, float, float]]] = {}
    regression: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as place:
        schema_file = agreed(frame, asked, Path(place))
        schema = read_schema(schema_file)
        for seed in (0, 1, 2):
            options: dict[str, Any] = {
                "data": frame, "schema_file": schema_file, "partition": "iid", "clients": SITES, "client_test": 0.0,
                "seed": seed, "workers": 1,
            }  # fmt: skip
            federation = arrange("cox", model="auto", **options).federation
            rows = [client.train for client in federation.clients]
            cells = torch.cat([part.labels for part in rows]).numpy()
            seen, events = on_grid(schema, cells)
            known = SurvfuncRight(seen, events)
            at = np.searchsorted(known.surv_times, schema.target.grid, "right") - 1
            pooled = np.where(at >= 0, known.surv_prob[at.clip(0)], 1.0)
            exact = survival(fedfill.run("kaplanmeier", **options, out=Path(place) / f"exact{seed}"))
            curves.setdefault("no noise", []).append(beside(exact, pooled))
            for k, (name, trust, epsilon) in enumerate(NOISE):
                noisy = {"trust": trust, "target_epsilon": epsilon, "out": Path(place) / f"noise{seed}-{k}"}
                curve = survival(fedfill.run("kaplanmeier", **options, **noisy))
                curves.setdefault(f"epsilon {epsilon:g}, {name}", []).append(beside(curve, pooled))
            run = fedfill.run("cox", **options, out=Path(place) / f"cox{seed}", fewest=1)
            found = {row["name"]: row for row in run.summary["findings"]["coefficients"]}
            inputs = torch.cat([part.inputs.flatten(1) for part in rows]).double().numpy()
            names = [name for name, row in found.items() if row["coefficient"] is not None]
            regression.append((*against(schema, inputs, seen, events, found, names), run.summary["c_index"]))
    print(f"{len(frame):,} rows, {len(cells):,} of them at {SITES} sites; {STEPS} grid times until {asked.until:g}\n")
    print(
        "| Kaplan-Meier | largest distance to the pooled curve | band holds it, share of times | mean width of band |"
    )
    print("|---|---|---|---|")
    for name, values in curves.items():
        far, inside, width = np.array(values).T
        print(f"| {name} | {shown(far)} | {inside.mean():.3f} | {width.mean():.3f} |")
    off, error, c = np.array(regression).T
    print(f"\nCox: largest distance to the pooled coefficients {off.max():.1e}, errors {error.max():.1e}; ", end="")
    print(f"C-index on the test set {c.mean():.4f}")
    print(f"\nVersion {fedfill.__version__}, torch {torch.__version__}, {platform.machine()}, seeds 0, 1, 2")


def against(
    schema: Schema,
    inputs: np.ndarray,
    seen: np.ndarray,
    events: np.ndarray,
    found: dict[str, Any],
    names: list[str],
) -> tuple[float, float]:
    """How far coefficients and standard errors are from those of statsmodels, on the inputs' own scale."""
    used = [one for one in design(schema) if one.name in names]
    x = inputs[:, [one.place for one in used]]
    unit = np.array([one.unit for one in used])
    own = np.array([[found[one.name]["coefficient"], found[one.name]["se"]] for one in used]).T / unit
    model = PHReg(seen, x, status=events.astype(int), ties="breslow")
    # from zero its full steps may go so far that nothing is a number; from anywhere they end at the one greatest likelihood
    fit = model.fit(tol=1e-13, start_params=own[0] + 0.1)
    return float(np.abs(own[0] - fit.params).max()), float(np.abs(own[1] - fit.bse).max())


def shown(values: np.ndarray) -> str:
    """Mean and deviation over seeds."""
    return f"{values.mean():.4f} ± {values.std(ddof=1):.4f}"


if __name__ == "__main__":
    main()
