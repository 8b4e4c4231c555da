"""Fed3R, then FedAvg from its head: is the whole above its parts? Fashion-MNIST, Dirichlet .5, ten clients.

    python experiments/sums-then-fedavg/run.py --data-dir DATA --out RUNS

`fedavg` trains the last layer on the features that `fed3r` was solved for, from its head and from nothing. Finished
runs are read and not made again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import fedfill

HERE = Path(__file__).parent
ASKED: dict[str, Any] = {
    "data": "fashion_mnist",
    "partition": "dirichlet:0.5",
    "clients": 10,
    "client_test": 0.0,  # all 60,000 images are trained on
    "quiet": True,
}
TRAINING: dict[str, Any] = {"model": "features", "rounds": 5, "local_epochs": 1}
RATES = {"": {}, ", a tenth of the learning rate": {"learning_rate": 0.0001}}


def main() -> None:
    """Run all rows, three seeds each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/sums-then-fedavg"))
    given = parser.parse_args()
    asked = {**ASKED, "data_dir": given.data_dir}
    place = HERE / "results.json"
    found = json.loads(place.read_text()) if place.exists() else {}

    def keep(row: str, seed: int, algorithm: str, **options: Any) -> fedfill.Result:
        result = fedfill.run(algorithm, seed=seed, out=given.out / f"{row}, seed {seed}", **asked, **options)
        summary = result.summary
        found.setdefault(row, {})[str(seed)] = {
            "by_round": [record["accuracy"] for record in result.rounds],
            "megabytes": round((summary["bytes_up"] + summary["bytes_down"]) / 1e6, 1),
            "seconds": round(summary["seconds"]),
            "machine": summary["machine"],
        }
        place.write_text(json.dumps(found, indent=1) + "\n")
        print(row, seed, found[row][str(seed)], flush=True)
        return result

    for seed in range(3):
        first = keep("fed3r", seed, "fed3r")
        for words, rate in RATES.items():
            keep(f"fed3r, then fedavg{words}", seed, "fedavg", start_from=str(first.directory), **TRAINING, **rate)
        keep("fedavg on the same features", seed, "fedavg", **TRAINING)


if __name__ == "__main__":
    main()
