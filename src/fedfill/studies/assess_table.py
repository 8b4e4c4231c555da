"""What is measured of a synthetic table beside real rows: what can be learned of it, how like it is, what it gives away."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedfill.data.samples import Samples
from fedfill.data.schema import Schema
from fedfill.data.schema_target import Target
from fedfill.errors import FedfillError
from fedfill.privacy.risk import WORDS, Risks, Rows, risks
from fedfill.runs.directory import to_json, write_atomically, writing
from fedfill.runs.shown import csv_text
from fedfill.statistics.marginals import Table, workload_error
from fedfill.streams import numpy_stream
from fedfill.studies.assess import Real
from fedfill.synthesis.tables import apart, dependence, errors, pairs_of, shares
from fedfill.training.probabilities import auc, brier
from fedfill.training.regression import r_squared, rmse

FITTED = 50_000
"""Rows that a model is trained on, at the most."""
COLUMNS = ("column", "other", "error", "columns_apart", "test_rows", "cramers_v_synthetic", "cramers_v_real")
"""Of ``measures.csv``."""


@dataclass(frozen=True)
class Likeness:
    """How like a synthetic table is to the training rows: a matrix for each figure, columns by columns.

    Attributes:
        error: `fedfill.synthesis.tables.errors`.
        columns_apart: The same of a table that is right in each column and knows of no pair.
        test_rows: The same of the real test rows, as many as there are.
        dependence: Cramér's V in the synthetic table.
        real_dependence: The same in the training rows.
        test_dependence: The same in the test rows.
    """

    error: Table
    columns_apart: Table
    test_rows: Table
    dependence: Table
    real_dependence: Table
    test_dependence: Table


@dataclass(frozen=True)
class Assessed:
    """A synthetic table beside real rows.

    Attributes:
        figures: By name, as in ``measures.json``.
        likeness: Figures of each pair of columns.
        made: By column the share of synthetic rows in each cell.
        real: The same of training rows.
    """

    figures: dict[str, Any]
    likeness: Likeness
    made: list[Table]
    real: list[Table]


def require_rows(real: Real, setting: str, whose: Path) -> None:
    """Refuse what has nothing to be measured beside.

    Args:
        real: The real data.
        setting: What an error's sentence begins with.
        whose: The run or the file.

    Raises:
        FedfillError: Where there are too few rows.
    """
    if min(len(real.training), len(real.test)) < 2:
        raise FedfillError(
            f"{setting}: {whose} has {len(real.training):,} training and {len(real.test):,} test rows; allowed: at least 2 of each, "
            "as each figure needs rows that nobody trained on"
        )


def assess_table(samples: Samples, real: Real, schema: Schema, sites: Mapping[str, Samples], seed: int) -> Assessed:
    """All figures of a synthetic table.

    Args:
        samples: Its rows as a network takes them, on the CPU; those without a label are left out.
        real: The real data, as `require_rows` wants them.
        schema: Of the table.
        sites: By name the training rows of each site; empty where nobody knows.
        seed: Of the draws of rows where there are many.

    Returns:
        The figures.

    Raises:
        FedfillError: Where no synthetic row has a label.
    """
    samples = samples.labelled
    if not len(samples):
        raise FedfillError("measure: found no synthetic row with a label; allowed: at least one")
    made, training, test = (_rows(those, schema) for those in (samples, real.training, real.test))
    sizes, names, ours = schema.sizes, schema.names, training.cells
    likeness = Likeness(
        error=errors(made.cells, ours, sizes),
        columns_apart=apart(ours, sizes),
        test_rows=errors(test.cells, ours, sizes),
        dependence=dependence(made.cells, sizes),
        real_dependence=dependence(ours, sizes),
        test_dependence=dependence(test.cells, sizes),
    )
    learnt, notes = _trained_on(samples, real, schema, seed)
    figures: dict[str, Any] = {
        "rows": {"synthetic": len(made), "training": len(training), "test": len(test)},
        "columns": list(names),
        "trained_on": learnt,
        "workload": _workload(likeness, names),
        "marginals": dict(zip(names, np.diag(likeness.error).tolist(), strict=True)),
        "sites": _sites(made, ours, {name: _rows(those, schema) for name, those in sites.items()}, sizes),
        "risks": _told(risks(made, training, test, schema.ordered, sizes, seed), names),
        "notes": notes,
    }
    return Assessed(figures, likeness, shares(made.cells, sizes), shares(ours, sizes))


def _rows(samples: Samples, schema: Schema) -> Rows:
    inputs, labels = samples.inputs, samples.labels
    return Rows(schema.codes_of(inputs, labels), schema.places_of(inputs, labels))


def _workload(found: Likeness, names: Sequence[str]) -> dict[str, Any]:
    """Over all pairs of columns."""
    pairs = list(itertools.combinations(range(len(names)), 2))
    error = pairs_of(found.error)
    a, b = pairs[int(error.argmax())]
    real = pairs_of(found.real_dependence)
    return {
        "error": float(error.mean()),
        "columns_apart": float(pairs_of(found.columns_apart).mean()),
        "test_rows": float(pairs_of(found.test_rows).mean()),
        "largest": {
            "columns": [names[a], names[b]],
            "error": float(error.max()),
            "columns_apart": float(found.columns_apart[a, b]),
            "test_rows": float(found.test_rows[a, b]),
        },
        "cramers_v": {
            "difference": float(np.abs(pairs_of(found.dependence) - real).mean()),
            "test_rows": float(np.abs(pairs_of(found.test_dependence) - real).mean()),
        },
    }


def _sites(
    made: Rows, everybody: NDArray[np.int64], sites: Mapping[str, Rows], sizes: Sequence[int]
) -> dict[str, Any] | None:
    """The workload error to each site's rows, beside that of all training rows together; None where there are no two sites."""
    if len(sites) < 2:
        return None
    found = {
        name: {
            "rows": len(own),
            "error": workload_error(made.cells, own.cells, sizes),
            "training_rows": workload_error(everybody, own.cells, sizes),
        }
        for name, own in sites.items()
    }
    return {"worst": max(found, key=lambda name: found[name]["error"]), "by_site": found}


def _told(found: Risks, names: Sequence[str]) -> dict[str, Any]:
    figures = asdict(found)
    figures["attributes"] = dict(zip(names, figures["attributes"], strict=True))
    figures["searched"] = dict(zip(("training", "test", "synthetic"), found.searched, strict=True))
    return {"words": WORDS, **figures}


def _trained_on(samples: Samples, real: Real, schema: Schema, seed: int) -> tuple[dict[str, Any] | None, list[str]]:
    """Models that are trained on synthetic rows and on real ones, tested on the real test rows."""
    if schema.target.kind == "survival":
        return None, [
            "No classifier was trained, as the target is a time to an event; its cells are one column of the table."
        ]
    found: dict[str, Any] = {}
    notes = []
    for what, those in (("synthetic", samples), ("real", real.training)):
        kept = numpy_stream(seed, "measure", "fitted", what).permutation(len(those))[:FITTED]
        inputs, labels = those.inputs.numpy()[kept], those.labels.numpy()[kept]
        if those.of_numbers:
            found[what] = {"rows": len(kept), **_regressions(inputs, labels, real, schema.target)}
            continue
        if len(np.unique(labels)) < 2:
            found[what] = None
            notes.append(f"No classifier was trained on {what} rows, as all of them are of one class.")
            continue
        found[what] = {"rows": len(kept), **_classifiers(inputs, labels, real)}
    return found, notes


def _classifiers(inputs: NDArray[np.float32], labels: NDArray[np.int64], real: Real) -> dict[str, Any]:
    """AUC, accuracy and Brier score on the real test rows, by classifier."""
    from sklearn.ensemble import HistGradientBoostingClassifier  # here: scikit-learn costs every start a second
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    models = {
        "logistic_regression": LogisticRegression(max_iter=2000),
        "gradient_boosting": HistGradientBoostingClassifier(early_stopping=False, random_state=0),
    }
    truth, found = real.test.labels.numpy(), {}
    for name, model in models.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(inputs, labels)
        said = np.zeros((len(truth), real.classes))
        said[:, model.classes_] = model.predict_proba(real.test.inputs.numpy())
        found[name] = {
            "auc": auc(truth, said),
            "accuracy": float((said.argmax(1) == truth).mean()),
            "brier": brier(truth, said),
        }
    return found


def _regressions(
    inputs: NDArray[np.float32], labels: NDArray[np.float32], real: Real, target: Target
) -> dict[str, Any]:
    """RMSE in the target's own unit, and R², on the real test rows, by model."""
    from sklearn.ensemble import HistGradientBoostingRegressor  # here: scikit-learn costs every start a second
    from sklearn.linear_model import LinearRegression

    models = {
        "linear_regression": LinearRegression(),
        "gradient_boosting": HistGradientBoostingRegressor(early_stopping=False, random_state=0),
    }
    truth, found = target.in_unit(real.test.labels.double()), {}
    for name, model in models.items():
        model.fit(inputs.astype(np.float64), labels)
        said = target.in_unit(torch.from_numpy(model.predict(real.test.inputs.double().numpy())))
        found[name] = {"rmse": rmse(said, truth), "r2": r_squared(said, truth)}
    return found


def write_table(document: dict[str, Any], found: Assessed, schema: Schema, folder: Path) -> None:
    """Write ``measures.json``, ``measures.csv`` with a line for each pair of columns, and the picture.

    Args:
        document: What is told.
        found: What was found.
        schema: Of the table.
        folder: Made where it is not there.
    """
    from fedfill.runs.table_pictures import table_picture  # here: matplotlib costs every start a third of a second

    names = schema.names
    cells = [column.labels() for column in schema.columns.values()] + [list(schema.target.cells)]
    title = f"{document['algorithm']} on {Path(document['dataset']).name}, seed {document['seed']}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        table_picture(names, cells, found.made, found.real, found.likeness.error, folder / "measures.png", title)
    like = found.likeness
    matrices = (like.error, like.columns_apart, like.test_rows, like.dependence, like.real_dependence)
    pairs = itertools.combinations(range(len(names)), 2)
    lines = ([names[a], names[b], *(f"{matrix[a, b]:.10g}" for matrix in matrices)] for a, b in pairs)
    write_atomically(folder / "measures.csv", csv_text(COLUMNS, lines).encode())
    write_atomically(folder / "measures.json", to_json(document))
