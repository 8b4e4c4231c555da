"""FRAug's motivation (section 3.2, table 1) on Digits: does a head that is fine-tuned on embeddings of more images do better?

Each client trains alone on its few images (`local`, the row "Single" of fraug-digits). Its extractor is then fixed, and its head
alone is trained further: on the embeddings of all training images of its domain, and, as a control of equal length, on those of
the images that it already had.
"""

from __future__ import annotations

import argparse
import copy
import tomllib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import fedfill
from fedfill.data.division import federate
from fedfill.data.samples import Samples
from fedfill.experiment.prepare import arrange
from fedfill.streams import torch_stream
from fedfill.synthesis.measures import features

TABLE = Path(__file__).parents[1] / "fraug-digits" / "table.toml"


def fine_tuned(head: nn.Linear, embeddings: Tensor, labels: Tensor, steps: int, stream: torch.Generator) -> nn.Linear:
    """A copy of a head after so many steps of SGD 0.01, momentum 0.5, on mini-batches of 64 embeddings ``[n, d]``."""
    head = copy.deepcopy(head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01, momentum=0.5)
    for _ in range(steps):
        index = torch.randint(len(labels), (64,), generator=stream)
        optimizer.zero_grad()
        functional.cross_entropy(head(embeddings[index]), labels[index]).backward()
        optimizer.step()
    return head


@torch.no_grad()
def accuracy(head: nn.Linear, embeddings: Tensor, labels: Tensor) -> float:
    """Share of the embeddings ``[n, d]`` that a head recognises."""
    return float((head(embeddings).argmax(1) == labels).double().mean())


def main() -> None:
    """Train, fine-tune, and print a line for each client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="folder with the data sets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10_000, help="mini-batches of the head's training")
    parser.add_argument("--out", help="run directory of the first training; one that is finished is read")
    given = parser.parse_args()

    options = tomllib.loads(TABLE.read_text())["options"]
    options |= {"data_dir": given.data_dir, "seed": given.seed}
    out = given.out or f"runs/fraug-motivation-seed{given.seed}"
    result = fedfill.run("local", out=out, on_round=lambda record, n: print(f"round {record['round']}/{n}"), **options)
    prepared = arrange("local", **options)
    everything = federate(
        "digits-domains", data_dir=given.data_dir, partition="domain", seed=given.seed, client_test=0.0
    )

    print(
        "\n| client | images | without | on its own images | on all of its domain | images there |\n|---|---|---|---|---|---|"
    )
    rows = []
    for i, (few, many) in enumerate(zip(prepared.federation.clients, everything.clients, strict=True)):
        model = prepared.model
        model.load_state_dict({n.removeprefix(f"{i}."): w for n, w in result.weights.items() if n.startswith(f"{i}.")})
        model.eval()
        head = model.classifier
        assert isinstance(head, nn.Linear)

        def embedded(samples: Samples, model: nn.Module = model) -> tuple[Tensor, Tensor]:
            return features(model, samples.inputs).clone(), samples.labels  # [n, d]

        own, rest, test = embedded(few.train), embedded(many.train), embedded(few.test)
        stream = torch_stream(given.seed, "fine-tuning", i)
        heads = [head, *(fine_tuned(head, *those, given.steps, stream) for those in (own, rest))]
        shares = [accuracy(h, *test) for h in heads]
        rows.append(shares)
        name = prepared.federation.domains[i]
        print(
            f"| {name} | {len(few.train):,} | {' | '.join(f'{s:.4f}' for s in shares)} | {len(many.train):,} |",
            flush=True,
        )
    means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    print(f"| average | | {' | '.join(f'{s:.4f}' for s in means)} | |")


if __name__ == "__main__":
    main()
