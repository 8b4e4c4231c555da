"""What rows of ``mst`` give away of a table's rows, beside a copy of the training rows: figures of ``fedfill measure``, three seeds.

``python experiments/tables/risks.py fair.csv --label affairs --above 0``
"""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedfill
from fedfill.data import sources
from fedfill.data.schema import Schema, read_schema
from fedfill.privacy.risk import Excess, Rows, risks
from run import asked

NAMES = ("nearest", "membership_auc", "membership_tpr", "attribute", "singling_out")
TABLES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {}),
    ("1, secure", {"target_epsilon": 1.0, "trust": "secure"}),
)


def copied(folder: Path, schema: Schema, seed: int) -> dict[str, Excess]:
    """Figures of the training rows as a synthetic table."""
    source = sources.load(str(folder), None, None, schema)
    training, test = (
        Rows(schema.codes_of(part.inputs, part.labels), schema.places_of(part.inputs, part.labels))
        for part in (source.train, source.test)
    )
    found = risks(training, training, test, schema.ordered, schema.sizes, seed)
    return {name: getattr(found, name) for name in NAMES}


def main() -> None:
    """Three seeds of everything, as a table in Markdown."""
    frame, _ = asked(__doc__)
    found: dict[tuple[str, str], list[dict[str, Excess]]] = {}
    with tempfile.TemporaryDirectory() as place:
        agreed = Path(place) / "schema.toml"
        fedfill.describe(frame, target="label", out=agreed)
        for seed in (0, 1, 2):
            folder = Path(place) / f"rows-{seed}"
            folder.mkdir()
            order = np.random.default_rng(seed).permutation(len(frame))
            for name, part in zip(("test", "train"), np.split(order, [int(0.3 * len(frame))]), strict=True):
                frame.iloc[part].to_csv(folder / f"{name}.csv", index=False)
            found.setdefault(("a copy of the training rows", ""), []).append(copied(folder, read_schema(agreed), seed))
            for structure in ("star", "augmented"):
                for words, noise in TABLES:
                    result = fedfill.run(
                        "mst", data=folder, schema_file=agreed, partition="dirichlet:0.5", client_test=0.0, seed=seed,
                        structure=structure, classifier_epochs=1, out=folder / f"{structure}-{words[0]}", quiet=True, **noise,
                    )  # fmt: skip
                    told = fedfill.measure(result).document["risks"]
                    found.setdefault((structure, words), []).append({name: Excess(**told[name]) for name in NAMES})
    print(f"{len(frame):,} rows; {platform.machine()}, torch {torch.__version__}\n")
    print(f"| rows from | epsilon, noise | {' | '.join(n.replace('_', ' ') for n in NAMES)} | intervals without 0 |")
    print(f"|{'---|' * (len(NAMES) + 3)}")
    for (what, words), each in found.items():
        cells = [f"{np.mean([one[n].value for one in each]):+.4f}" for n in NAMES]
        missed = sum(not one[n].low <= 0 <= one[n].high for one in each for n in NAMES)
        print(f"| {what} | {words} | {' | '.join(cells)} | {missed} of {len(each) * len(NAMES)} |")


if __name__ == "__main__":
    main()
