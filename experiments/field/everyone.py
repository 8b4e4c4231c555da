"""How well each client's model of ``personal.toml`` does on the test sets of all four sources, and not on its own alone.

``python experiments/field/everyone.py RUNS --data-dir DATA`` loads the models of the finished runs there, scores each on each source's
whole test set, and takes the mean over models and sources to ``everyone.csv``, where it takes the place of what is stored of the same
run. ``personal.py`` shows it. A model's share of its own source has to be the one that the run wrote down.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from personal import DOMAINS, EVERYONE, KEY, finished, place
from stored import FOLDER, store, summary_of
from torch import Tensor, nn

import fedfill
from fedfill.data.division import federate
from fedfill.runs.directory import read_toml

COLUMNS = (*KEY, "everyone")
TestSets = dict[str, tuple[Tensor, Tensor]]  # inputs [n, 3, 32, 32] and labels [n] of a source


def main() -> None:
    """Score, store, and say how far it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", help="folder of the grid's runs")
    parser.add_argument("--data-dir", required=True, help="folder with the data sets")
    given = parser.parse_args()
    tests = test_sets(given.data_dir)
    for line in scored(Path(given.runs), tests):
        store(EVERYONE, COLUMNS, KEY, [line], place)
        print(*line.values(), flush=True)


def test_sets(data_dir: str) -> TestSets:
    """The whole test set of each source, as the runs have it."""
    options = read_toml(FOLDER / "personal.toml", "grid")["options"]
    shares = {"fraction": options["data_fraction"], "domain_fractions": options["domain_fractions"]}
    found = federate(options["data"], data_dir=data_dir, partition=options["partition"], seed=0, **shares)
    tests = (client.test for client in found.clients)
    return {name: (test.inputs, test.labels) for name, test in zip(found.domains, tests, strict=True)}


def scored(runs: Path, tests: TestSets) -> Iterator[dict[str, str]]:
    """A line of each finished run."""
    for path, name in finished(runs).items():
        summary = summary_of(path)
        shares = []
        for client, own in zip(summary["client_names"], summary["accuracy_by_client"], strict=True):
            model = fedfill.load(path.parent, client if summary["personal"] else None)
            of_source = {domain: accuracy(model, *tests[domain]) for domain in DOMAINS}
            if not math.isclose(of_source[client], own, abs_tol=1e-3):  # another processor may round otherwise
                raise SystemExit(
                    f"{path.parent}: {client}: found {of_source[client]:.4f} on its own source; allowed: {own:.4f}"
                )
            shares.append(fmean(of_source.values()))
        yield dict(zip(COLUMNS, (name, str(summary["seed"]), str(fmean(shares))), strict=True))


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """The share of images that a model recognises."""
    batches = zip(inputs.split(500), labels.split(500), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in batches) / len(labels)


if __name__ == "__main__":
    main()
