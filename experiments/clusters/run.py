"""Clients of a few kinds: one model for all, or a model for each cluster. scikit-learn's digits, three seeds.

``python experiments/clusters/run.py``
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits

import fedfill

SETTINGS = {"rounds": 20, "local_epochs": 2, "batch_size": 32, "client_validation": 0.1, "evaluate_every": 20}
"""Of all methods: local training is theirs to share, and a tenth of each client's samples chooses a variant."""
FIGURE = "mean_client_accuracy"
KINDS = {"labels": (2, 5), "rotated": (4, 3)}
"""By world: how many kinds of clients there are, and how many clients of each."""


def world(name: str, kinds: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images and labels by kind: no image is of two kinds.

    ``labels``: the second kind calls the digits by other numbers, a permutation of all ten. ``rotated``: each kind has its
    images turned by another multiple of 90 degrees.
    """
    digits = load_digits()
    images, labels = (digits.images * 255 / 16).astype(np.uint8), digits.target
    other = np.random.default_rng(0).permutation(10)
    found = {}
    for k in range(kinds):
        own, called = images[k::kinds], labels[k::kinds]
        if name == "labels":
            found[f"kind {k}"] = (own, other[called] if k else called)
        else:
            found[f"kind {k}"] = (np.rot90(own, k, axes=(1, 2)).copy(), called)
    return found


def rows(name: str, kinds: int) -> list[str]:
    """What is compared; of settings behind ``|`` the clients' validation splits choose one."""
    found = ["fedavg", f"ifca:clusters={kinds},spread=10", f"fesem:clusters={kinds}", "cfl:warm_rounds=5"]
    found += ["cfl:when=once,warm_rounds=5"]
    if name == "rotated":
        return [*found, "cfl:warm_rounds=5,gamma=0"]
    found[1:2] = ["local", "pfedavg", "ifca:clusters=2,spread=1|10"]
    return [*found, "cfl:warm_rounds=5,still=0.25,gamma=0", "cfl:when=once,warm_rounds=5,clusters=2"]


def table(found: fedfill.Comparison) -> str:
    """Mean accuracy of clients' models on their own test splits, its difference to FedAvg's, and how many models there were."""
    lines = ["| method | own test splits | difference to `fedavg` | models by seed |", "|---|---|---|---|"]
    for row in found.rows:
        mean, deviation = row.figure(FIGURE)
        apart = found.difference(row, FIGURE)
        used = [len(set(result.rounds[-1].get("clusters", {}).values())) or "" for result in row.finished]
        difference = "" if apart is None else f"{100 * apart.mean:+.1f} ± {100 * (apart.half_width or 0):.1f}"
        models = " ".join(map(str, used)).strip()
        lines.append(f"| `{row.label}` | {100 * mean:.1f} ± {100 * deviation:.1f} | {difference} | {models} |")
    return "\n".join(lines)


def main() -> None:
    """Print a table for each world."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/clusters")
    parser.add_argument("--worlds", nargs="*", default=list(KINDS))
    asked = parser.parse_args()
    for name in asked.worlds:
        kinds, each = KINDS[name]
        found = fedfill.compare(
            rows(name, kinds),
            data=world(name, kinds),
            partition=f"domain:{each}",
            out=f"{asked.out}/{name}",
            **SETTINGS,
        )
        print(f"\n{name}\n\n{table(found)}", flush=True)


if __name__ == "__main__":
    main()
