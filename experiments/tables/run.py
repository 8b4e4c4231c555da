"""Train on a synthetic table, test on real rows: ``mst`` with its structures, at several epsilons, on a table of one's own.

``python experiments/tables/run.py fair.csv --label affairs --above 0``; with ``--aim`` the same of ``aim``.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import fedfill
from fedfill.data.schema import Schema, read_schema
from fedfill.runs.directory import RunDirectory
from fedfill.statistics.marginals import Network, workload_error
from fedfill.synthesis.tables import samples_of

STRUCTURES = ("star", "tree", "augmented")
NOISE = ((None, "site"), (3.0, "server"), (3.0, "site"), (1.0, "server"), (1.0, "site"))


def read(file: Path, label: str, above: float | None) -> pd.DataFrame:
    """The rows, with a column ``label`` of classes."""
    frame = pd.read_csv(file)
    classes = frame[label] if above is None else pd.Series(np.where(frame[label] > above, "yes", "no"))
    return frame.drop(columns=[label]).assign(label=classes)


def prepared(schema: Schema, frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Inputs ``[n, features]`` and cells ``[n, d]``."""
    table, where = pa.Table.from_pandas(frame, preserve_index=False), Path("the table")
    encoding, codes = schema.encoding(), schema.codes(table, str(where))
    return encoding.scaled(encoding.values(schema.prepared(table, str(where)), where)).numpy(), codes


def drawn(schema: Schema, result: fedfill.Result, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and cells of rows from what a run has learned."""
    checkpoint = RunDirectory(result.directory).read_checkpoint()
    assert checkpoint is not None
    state = checkpoint["server"]
    tables = {int(column): x.double().numpy() for column, x in state["tables"].items()}
    parents = {column: tuple(above) for column, *above in state["parents"]}
    draw = np.random.default_rng(seed)
    codes = Network(schema.sizes, tuple(parents), parents, tables, float(n)).sample(n, draw)
    return samples_of(schema, codes, draw).inputs.numpy(), codes


def judged(x: np.ndarray, y: np.ndarray, test: tuple[np.ndarray, np.ndarray]) -> list[float]:
    """AUC of logistic regression and of gradient boosting on real rows."""
    models = (LogisticRegression(max_iter=2000), HistGradientBoostingClassifier(random_state=0))
    return [float(roc_auc_score(test[1][:, -1], m.fit(x, y).predict_proba(test[0])[:, 1])) for m in models]


def asked(words: str | None, parser: argparse.ArgumentParser | None = None) -> tuple[pd.DataFrame, argparse.Namespace]:
    """The table of the command line, and what else was given."""
    parser = parser or argparse.ArgumentParser(description=words)
    parser.add_argument("file", type=Path)
    parser.add_argument("--label", required=True)
    parser.add_argument("--above", type=float, help="the class is whether the label is above this")
    given = parser.parse_args()
    return read(given.file, given.label, given.above), given


def main() -> None:
    """Three seeds of everything, as a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aim", action="store_true", help="aim in place of mst; needs its extra")
    (frame, given), rows = asked(None, parser), []
    runs = [("mst", {"structure": structure}, noise) for structure in STRUCTURES for noise in NOISE]
    if given.aim:
        runs = [("aim", {}, noise) for noise in NOISE if noise[0] is not None]
    with tempfile.TemporaryDirectory() as place:
        fedfill.describe(frame, target="label", out=Path(place) / "schema.toml")
        schema = read_schema(Path(place) / "schema.toml")
        for seed in (0, 1, 2):
            order = np.random.default_rng(seed).permutation(len(frame))
            test, train = (frame.iloc[part] for part in np.split(order, [int(0.3 * len(frame))]))
            held, (inputs, cells) = prepared(schema, test), prepared(schema, train)
            rows.append(("real rows", "", *judged(inputs, cells[:, -1], held), 0.0))
            draw = np.random.default_rng(seed)
            apart = np.stack([draw.permutation(column) for column in cells.T], axis=1)
            rows.append(("columns shuffled apart", "", 0.5, 0.5, workload_error(apart, cells, schema.sizes)))
            for algorithm, settings, (epsilon, trust) in runs:
                noise: dict[str, Any] = {} if epsilon is None else {"target_epsilon": epsilon, "trust": trust}
                source = settings.get("structure", algorithm)
                result = fedfill.run(
                    algorithm, data=(train, test), schema_file=Path(place) / "schema.toml", partition="dirichlet:0.5", client_test=0.0,
                    classifier_epochs=1, seed=seed, out=Path(place) / f"{source}-{epsilon}-{trust}-{seed}", quiet=True, **settings, **noise,
                )  # fmt: skip
                x, codes = drawn(schema, result, len(cells), seed)
                words = "none" if epsilon is None else f"{epsilon:g}, {trust}"
                figures = judged(x, codes[:, -1], held)
                rows.append((source, words, *figures, workload_error(codes, cells, schema.sizes)))
    names = ["rows from", "epsilon, noise", "AUC, logistic", "AUC, boosting", "workload error"]
    found = pd.DataFrame(rows, columns=names).groupby(names[:2], sort=False)[names[2:]]
    mean, deviation = found.mean(), found.std()
    print(f"{len(frame):,} rows, {len(schema.columns)} columns; {platform.machine()}, torch {torch.__version__}\n")
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for key in mean.index:
        cells = [f"{mean.loc[key, name]:.4f} ± {deviation.loc[key, name]:.4f}" for name in names[2:]]
        print(f"| {' | '.join([*key, *cells])} |")


if __name__ == "__main__":
    main()
