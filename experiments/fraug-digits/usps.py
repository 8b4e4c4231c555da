"""Is USPS's own test part harder than its training part? A finished run's model, scored on images of both.

``python experiments/fraug-digits/usps.py RUN --data-dir DATA`` takes the run directory of a row of this table with one model for all (by
default below ``runs/reproduce/fraug-digits``). It prints the share of USPS's images that the model recognises: of the official test
part, of those of the training part that no client has, and of both together. The paper's authors mix both parts and test on a tenth.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import fedfill
from fedfill.data.division import federate
from fedfill.errors import FedfillError
from fedfill.runs.directory import read_toml

USPS = 3  # the client
DIVISION = {"data_fraction": "fraction", "domain_fractions": "domain_fractions", "seed": "seed"}


def main() -> None:
    """Read the run, and print a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run directory of a finished run")
    parser.add_argument("--data-dir", required=True, help="folder with the data sets")
    given = parser.parse_args()

    try:
        model = fedfill.load(given.run)
    except FedfillError as error:
        raise SystemExit(f"run: {error}; needed: a finished run of a row with one model for all") from None
    document = read_toml(Path(given.run) / "experiment.toml", "run")
    options = {DIVISION[name]: value for name, value in document.items() if name in DIVISION}
    common = {"data_dir": given.data_dir, "partition": "domain", "seed": options["seed"], "client_test": 0.0}
    few = federate("digits-domains", **{**common, **options}).clients[USPS]
    whole = federate("digits-domains", **common).clients[USPS]
    own = {image.numpy().tobytes() for image in few.train.inputs}
    unused = [k for k, image in enumerate(whole.train.inputs) if image.numpy().tobytes() not in own]
    parts = {
        "official test part": (few.test.inputs, few.test.labels),
        "training part, no client's": (whole.train.inputs[unused], whole.train.labels[unused]),
    }
    counts = {name: (recognised(model, *part), len(part[1])) for name, part in parts.items()}
    counts["both"] = tuple(map(sum, zip(*counts.values(), strict=True)))
    for name, (right, images) in counts.items():
        print(f"{name}: {right / images:.4f} of {images:,}")


@torch.no_grad()
def recognised(model: nn.Module, inputs: Tensor, labels: Tensor) -> int:
    """How many of the images ``[n, 3, 32, 32]`` a model recognises."""
    batches = zip(inputs.split(500), labels.split(500), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)


if __name__ == "__main__":
    main()
