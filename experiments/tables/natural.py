"""The same on the bundled tables of many sites: train on rows of ``mst``, test on real rows; a client for each site.

``python experiments/tables/natural.py`` runs all of them, ``python experiments/tables/natural.py opt penguins`` some.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

import fedfill
from fedfill.data.natural import divide, known_tables, read
from fedfill.statistics.marginals import workload_error
from run import drawn, judged, prepared

NOISE = ((None, "site"), (3.0, "secure"), (3.0, "site"), (1.0, "secure"), (1.0, "site"))
WITHIN = 0.03
"""Goal: so much AUC at the most below real rows."""


def of_table(name: str, place: Path) -> pd.DataFrame:
    """Three seeds of a table: AUC of both classifiers, and the workload error."""
    table, rows = known_tables()[name], []
    schema, whole = table.schema, read(table)
    for seed in (0, 1, 2):
        train, test = (part.to_pandas() for part in divide(whole, schema, seed))
        held, (inputs, cells) = prepared(schema, test), prepared(schema, train)
        rows.append((name, "real rows", "", seed, *judged(inputs, cells[:, -1], held), 0.0))
        for structure in ("star", "augmented"):
            for epsilon, trust in NOISE:
                noise: dict[str, Any] = {} if epsilon is None else {"target_epsilon": epsilon, "trust": trust}
                sites = train[schema.site].nunique()
                if trust == "secure" and epsilon is not None:
                    noise["honest"] = sites
                result = fedfill.run(
                    "mst", data=(train, test), schema_file=table.schema_file, partition="domain", client_test=0.0, structure=structure,
                    classifier_epochs=1, seed=seed, out=place / f"{name}-{structure}-{epsilon}-{trust}-{seed}", quiet=True, **noise,
                )  # fmt: skip
                x, codes = drawn(schema, result, len(cells), seed)
                words = (
                    "none"
                    if epsilon is None
                    else f"{epsilon:g}, {'in the sum' if trust == 'secure' else 'at each site'}"
                )
                figures = judged(x, codes[:, -1], held)
                rows.append((name, structure, words, seed, *figures, workload_error(codes, cells, schema.sizes)))
    return pd.DataFrame(
        rows, columns=["table", "rows from", "epsilon, noise", "seed", "logistic", "boosting", "workload"]
    )


def main() -> None:
    """All tables, as one table in Markdown: differences to real rows, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    bundled = [name for name, table in known_tables().items() if table.sha256 is not None]
    parser.add_argument("names", nargs="*", default=bundled)
    with tempfile.TemporaryDirectory() as place:
        found = pd.concat([of_table(name, Path(place)) for name in parser.parse_args().names])
    real = found[found["rows from"] == "real rows"].set_index(["table", "seed"])
    print(
        "| table | rows from | epsilon, noise | AUC, logistic | AUC, boosting | - real | - real, boosting | workload error |"
    )
    print("|---|---|---|---|---|---|---|---|")
    met: dict[tuple[str, str], int] = {}
    for (name, source, words), part in found.groupby(["table", "rows from", "epsilon, noise"], sort=False):
        base = real.loc[name].loc[part["seed"]]
        less = {
            kind: float((part[kind].to_numpy() - base[kind].to_numpy()).mean()) for kind in ("logistic", "boosting")
        }
        cells = [f"{part[kind].mean():.3f} ± {part[kind].std():.3f}" for kind in ("logistic", "boosting")]
        ends = [f"{less[kind]:+.3f}" if source != "real rows" else "–" for kind in ("logistic", "boosting")]
        print(
            f"| {name} | {source} | {words} | {' | '.join(cells)} | {' | '.join(ends)} | {part['workload'].mean():.3f} |"
        )
        if source != "real rows":
            met[source, words] = met.get((source, words), 0) + (less["logistic"] >= -WITHIN)
    print()
    for (source, words), count in met.items():
        print(
            f"* {source}, epsilon {words}: within {WITHIN} of real rows with logistic regression on {count} of {found['table'].nunique()} tables"
        )


if __name__ == "__main__":
    main()
