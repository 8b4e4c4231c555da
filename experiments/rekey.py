"""Give the kept figures of tables the digests of today, where they are of the very same experiments.

Version 0.2.0 records an experiment otherwise than 0.1.0 did: a network's record leaves out what does not apply to it, ``auto``
is recorded as the network that it chose, and settings without an effect are none. A digest covers version, settings, data,
initial weights and code, so every kept figure would have been left out of its page. This program computes for each kept run
the digest that 0.1.0 would have given the experiment of today. Where it is the kept one, data, initial weights and all
settings are the same, and the run gets its new digest; every other one stays as it is. That the training of the same experiment
gives the same bits in both versions is what ``bench/same_bits.py`` shows.

    python experiments/rekey.py --data-dir DATA
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedfill.experiment.digest import digest
from fedfill.experiment.prepare import Prepared, arrange
from fedfill.models.networks import OF_THE_LATENT
from fedfill.studies.table import read_table

BEFORE = "0.1.0"
OF_ONE_SHAPE = {"width": "paper", "latent": None, "latent_activation": "sigmoid", "dropout": None}
"""What 0.1.0 recorded of networks that have no such thing: its defaults."""
WITHOUT_EFFECT = {"keep": "norm_head", "residual_gamma": 0.01, "latent_clip": 1.0}
"""Settings that are none today and had a default then, which did nothing, or does the same today."""


def document_of_before(prepared: Prepared, asked: str) -> dict[str, Any]:
    """The fields of an experiment as 0.1.0 recorded them; `asked` is the network that the table asks for."""
    fields = prepared.experiment.model_dump()
    models = fields["model_settings"]
    if not models.keys() & set(OF_THE_LATENT):
        models = {**OF_ONE_SHAPE, **models}
    settings = {k: WITHOUT_EFFECT.get(k) if v is None else v for k, v in fields["settings"].items()}
    return {**fields, "model": asked, "settings": settings, "model_settings": models}


def digests(table: Path, row: Any, options: dict[str, Any], seed: int) -> tuple[str, str]:
    """The digests that 0.1.0 and today give a row."""
    words = {"data": "digits", "partition": "dirichlet:0.5", "model": "auto", **options, "seed": seed}
    prepared = arrange(row.algorithm, **words)
    others = type(prepared.algorithm), prepared.model, prepared.federation.fingerprint, prepared.initial
    return digest(document_of_before(prepared, words["model"]), *others, version=BEFORE), prepared.digest


def main() -> None:
    """Go through all tables beside this file."""
    parser = argparse.ArgumentParser(description="Give the kept figures of tables the digests of today.")
    parser.add_argument("--data-dir", required=True, help="folder of the data sets")
    data_dir = parser.parse_args().data_dir
    moved = stayed = 0
    for table in sorted(path.parent for path in Path(__file__).parent.glob("*/table.toml")):
        results, content = table / "results.json", read_table(table)
        if not results.exists():
            continue
        rows, kept = {row.name: row for row in content.rows}, json.loads(results.read_text())
        for entry in kept:
            row = rows.get(entry["row"])
            if row is None:
                stayed += 1
                continue
            options = {**content.options, **row.options, "data_dir": data_dir}
            before, now = digests(table, row, options, entry["seed"])
            if entry["digest"] == before:
                entry |= {"digest": now, "version": BEFORE}
                moved += 1
            else:
                stayed += entry["digest"] != now
        lines = ",\n".join(map(json.dumps, kept))
        results.write_text(f"[\n{lines}\n]\n")
        print(f"{table.name}: {len(kept)} kept runs", flush=True)
    print(f"{moved} runs have the digests of today, {stayed} are of other experiments and stay as they were")


if __name__ == "__main__":
    main()
