"""What is measured of synthetic samples beside real ones, with an oracle and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from fedfill import tree
from fedfill.data.dataset import Source
from fedfill.data.federation import Federation
from fedfill.data.samples import Batch, Samples
from fedfill.engines.runner import make_resident
from fedfill.models.networks import ModelSettings, build, choose
from fedfill.models.views import weights_of
from fedfill.streams import derive, torch_stream
from fedfill.synthesis.likeness import (
    FEATURES_SEED,
    MOST,
    NEIGHBOURS,
    data_free,
    data_free_features,
    exact_copies,
    frechet,
    nearer_to_training,
    precision_recall,
    some,
)
from fedfill.synthesis.measures import class_balance, features, frechet_distance, nearness, recognised
from fedfill.training.fit import Context, Fit, LocalTraining, fit
from fedfill.training.losses import cross_entropy

STEPS = 1000
"""Mini-batches of the classifier that is trained on synthetic samples, and on real ones beside it."""
FRECHET = 2560
"""Samples on each side of the Fréchet distance, at the most: ten for each feature."""
DRAWS = 40
"""Of the bootstrap."""
LISTED = 20
"""Copies whose positions are told."""


@contextmanager
def one_thread() -> Iterator[None]:
    """As runs compute: the same bits on a machine with more processors, and no waiting for each other where it is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Real:
    """The real data that synthetic samples are measured beside.

    Attributes:
        training: Labelled samples that somebody trained on.
        seen: These, and those without labels: a generator may have copied either.
        test: Samples that nobody trained on.
        class_names: In the order of their indices.
    """

    training: Samples
    seen: Samples
    test: Samples
    class_names: tuple[str, ...]

    @classmethod
    def of(cls, data: Federation | Source) -> Real:
        """All clients' data side by side, or those of a data set."""
        if isinstance(data, Source):
            return cls(data.train, data.train, data.test, data.class_names)
        pooled = data.pooled().clients[0]
        return cls(pooled.train, pooled.train + pooled.unlabelled, data.test, data.class_names)

    @property
    def classes(self) -> int:
        """How many there are."""
        return len(self.class_names)


def assess(samples: Samples, real: Real, seed: int) -> dict[str, Any]:
    """The measures that need no oracle and train nothing.

    Args:
        samples: Synthetic ones, at least one; -1 where one has no label.
        real: The real data.
        seed: Of the draws of as many real samples, and of the bootstrap.

    Returns:
        By name, as in ``measures.json``.
    """
    where = samples.labels.device
    near = nearness(samples.inputs, real.seen.inputs.to(where), real.test.inputs.to(where))
    copies = exact_copies(samples.inputs, real.seen.inputs)
    return {
        "samples": len(samples),
        "unlabelled": int((samples.labels < 0).sum()),
        "balance": asdict(class_balance(samples.labels, real.classes, seed)),
        "nearest": asdict(near),
        "exact_copies": {"count": len(copies), "first": copies[:LISTED]},
        "data_free": _data_free(samples, real, seed),
    }


def _data_free(samples: Samples, real: Real, seed: int) -> dict[str, Any]:
    """On features that need no data: sets that are compared have one size, as figures grow or shrink with it."""
    where = samples.labels.device

    def mapped(those: Samples, n: int, what: str) -> torch.Tensor:
        order = torch.randperm(len(those), generator=torch_stream(seed, "measure", "data free", what))[:n]
        return data_free_features(those.inputs[order.to(those.inputs.device)].to(where))

    made, seen, test = (
        mapped(samples, FRECHET, "synthetic"), mapped(real.seen, MOST, "seen"), mapped(real.test, 2 * FRECHET, "test"),
    )  # fmt: skip
    m = min(len(seen), len(test), MOST)
    n, half = min(len(made), m), min(len(made), len(test) // 2)
    found: dict[str, Any] = {
        "features": f"{data_free(tuple(samples.inputs.shape[1:]))[1]}, d={made.shape[1]}, features_seed {FEATURES_SEED}",
        "nearer_to_training": asdict(nearer_to_training(made[:MOST], seen[:m], test[:m])),
    }
    for name, those in (("", made), ("real_", test)):
        both = precision_recall(seen[:n], those[:n]) if n > NEIGHBOURS else (None, None)
        for what, estimate in zip(("precision", "recall"), both, strict=True):
            found[name + what] = estimate and asdict(estimate)
    for name, those in (("frechet", made), ("frechet_floor", test[half:])):
        estimate = frechet(those[:half], test[:half], seed, DRAWS) if half > 1 else None
        found[name] = estimate and asdict(estimate)
    return found


def judged(samples: Samples, real: Real, oracle: nn.Module, name: str, seed: int) -> dict[str, Any]:
    """The measures that need an oracle.

    Args:
        samples: Synthetic ones, at least one; -1 where one has no label.
        real: The real data.
        oracle: A classifier in evaluation mode, on the device of the samples.
        name: Whose it is, for the record.
        seed: Of the draws of as many real samples, and of the bootstrap.

    Returns:
        By name, as in ``measures.json``.
    """
    where = samples.labels.device
    by_class, overall = recognised(oracle, samples, real.classes)
    found: dict[str, Any] = {
        "recognised": overall and asdict(overall),
        "recognised_by_class": by_class,
        "frechet": None,
        "notes": [],
    }
    # a distance grows as samples get fewer: all three sets are of one size
    n = min(len(samples), len(real.training), len(real.test))
    if not isinstance(getattr(oracle, "encoder", None), nn.Module):
        found["notes"] = [f"No Fréchet distance: the oracle's {type(oracle).__name__} has no part 'encoder'."]
    elif n < 2:
        found["notes"] = ["No Fréchet distance: it needs at least 2 synthetic and 2 real images."]
    else:
        made, training, test = (
            features(oracle, some(those, n, seed, what).to(where).inputs)
            for what, those in (("synthetic", samples), ("training", real.training), ("test", real.test))
        )
        found["frechet"] = {
            "features": f"encoder of {name}, d={made.shape[1]}",
            "samples": n,
            "synthetic": asdict(frechet(made, training, seed, DRAWS)),
            "test": frechet_distance(test, training),
        }
    return found


def trained_on(samples: Samples, real: Real, ceiling: bool, steps: int | None = None) -> dict[str, Any] | None:
    """Train a classifier on synthetic samples and test it on real ones.

    Its network is what ``auto`` stands for, its budget and its seed are always the same, and the last step counts.

    Args:
        samples: Synthetic ones; those without a label are left out.
        real: The real data.
        ceiling: Whether the same classifier is trained on the real samples, and on both together, as well.
        steps: Mini-batches; None: `STEPS`.

    Returns:
        By name, as in ``measures.json``; None where there are fewer than two labelled samples.
    """
    samples = samples.labelled
    if len(samples) < 2:
        return None
    where, steps = samples.labels.device, STEPS if steps is None else steps
    shape = tuple(samples.inputs.shape[1:])
    name, settings = choose(shape, ModelSettings(), ())
    training = real.training.to(where)
    rows: dict[str, Callable[[], Samples]] = {"synthetic": lambda: samples}
    if ceiling:
        rows |= {"real": lambda: training, "both": lambda: training + samples}
    found: dict[str, Any] = {"network": name, "steps": steps}
    for what, those in rows.items():
        network = build(name, shape, real.classes, settings, needs=(), seed=derive(0, "measure", "initial weights"))
        model = _trained(network, those(), steps)
        by_class, overall = recognised(model, real.test.to(where), real.classes)
        found[what] = {"accuracy": overall and asdict(overall), "accuracy_by_class": by_class, "samples": len(those())}
    return found


def _trained(network: nn.Module, data: Samples, steps: int) -> nn.Module:
    """The network after so many mini-batches, in evaluation mode."""

    def loss(model: nn.Module, batch: Batch, context: Context) -> torch.Tensor:
        return cross_entropy(model, batch)

    where = data.labels.device
    resident = make_resident(network, where)
    order, draws = (torch_stream(0, "measure", what, device=where) for what in ("order", "draws"))
    request = Fit(tree.to(weights_of(network), where), loss, data, LocalTraining(steps=steps))
    return resident.load(fit(resident, request, order, draws).weights).eval()
