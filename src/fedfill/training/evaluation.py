"""Evaluation in large batches, split into chunks that any number of workers may share without changing a bit."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.data.samples import Samples, normalise
from fedfill.training.local import Resident

CHUNK = 1000
FAIRNESS = (
    "mean_client_accuracy", "worst_client_accuracy", "worst_tenth_accuracy", "client_variance", "class_variance",
)  # fmt: skip
"""The figures that `fairness` gives."""


@dataclass(frozen=True)
class Scored:
    """Per-sample outcome of an evaluation.

    Attributes:
        correct: ``[n]`` bool.
        losses: ``[n]`` float32 cross-entropies.
    """

    correct: Tensor
    losses: Tensor


def score(resident: Resident, samples: Samples) -> Scored:
    """Score samples with the weights that `resident` holds, in evaluation mode.

    Args:
        resident: A worker's model, loaded.
        samples: At most a few thousand.

    Returns:
        Whether each sample was recognised, and its loss.
    """
    resident.model.eval()
    with torch.inference_mode():
        scores = resident.model(resident.inputs(samples, slice(None)))  # [n, classes]
        losses = functional.cross_entropy(scores, samples.labels, reduction="none")
        return Scored(scores.argmax(1) == samples.labels, losses)


def score_all(resident: Resident, samples: Samples) -> Scored:
    """Score any number of samples in the chunks in which every engine does it.

    Args:
        resident: A model, loaded.
        samples: ``[n, ...]``.

    Returns:
        The outcome of each, in their order.
    """
    if not len(samples):
        return Scored(samples.labels.new_empty(0, dtype=torch.bool), samples.labels.new_empty(0, dtype=torch.float32))
    parts = [score(resident, samples[start : start + CHUNK]) for start in range(0, len(samples), CHUNK)]
    return Scored(torch.cat([part.correct for part in parts]), torch.cat([part.losses for part in parts]))


@dataclass(frozen=True)
class Evaluation:
    """Accuracies and losses of one model, or of every client's own; all accuracies are shares in [0, 1].

    "The test set" is one of three things:

    * of one model, the data set's;
    * of personal models in a simulation, the data set's too: each client's own model is scored on all of it, and the figure
      is the plain mean over clients (`gather_personal`);
    * where nobody has both, in a federation of hosts whose server has no test set, or whose models are personal and never
      leave them: all hosts' own test splits together, each sample scored where it lies, there by its owner's model.

    Attributes:
        accuracy: On the test set.
        loss: Mean cross-entropy on the test set.
        accuracy_by_class: On the test set, by class; None for a class that it lacks.
        accuracy_by_client: On each client's own test split, of its own model where there is one; None for a client without one.
    """

    accuracy: float
    loss: float
    accuracy_by_class: list[float | None]
    accuracy_by_client: list[float | None]


def summarise(test: Scored, labels: Tensor, classes: int, own: Scored, owners: Tensor, clients: int) -> Evaluation:
    """Accuracies by class and by client from per-sample outcomes.

    Args:
        test: Outcomes on the test set, ``[n]``.
        labels: Labels of the test set, ``[n]``.
        classes: Number of classes.
        own: Outcomes on all clients' own test splits, ``[m]``.
        owners: Whose sample each is, ``[m]``.
        clients: Number of clients.

    Returns:
        The shares, as plain numbers.
    """
    return Evaluation(
        accuracy=float(test.correct.double().mean()),
        loss=float(test.losses.double().mean()),
        accuracy_by_class=shares(test.correct, labels, classes),
        accuracy_by_client=shares(own.correct, owners, clients),
    )


def gather(scored: Sequence[Scored], labels: Tensor, classes: int, owners: Tensor, clients: int) -> Evaluation:
    """Accuracies by class and by client from the outcomes of all chunks.

    Args:
        scored: Those of the test set in their order, then those of all clients' own test splits.
        labels: Labels of the test set, ``[n]``.
        classes: Number of classes.
        owners: Whose sample each of the clients' is, ``[m]``.
        clients: Number of clients.

    Returns:
        The shares, as plain numbers.
    """
    correct = torch.cat([part.correct for part in scored])
    losses = torch.cat([part.losses for part in scored])
    n = len(labels)
    return summarise(Scored(correct[:n], losses[:n]), labels, classes, Scored(correct[n:], losses[n:]), owners, clients)


def gather_personal(scored: Sequence[tuple[Scored, Scored]], labels: Tensor, classes: int) -> Evaluation:
    """Accuracies of personal models.

    Args:
        scored: For each client, the outcomes of its own model on the test set, and on its own test split.
        labels: Labels of the test set, ``[n]``.
        classes: Number of classes.

    Returns:
        The means over clients on the test set, and each client's accuracy on its own test split.
    """
    tests, owns = [test for test, _ in scored], [own for _, own in scored]
    by_class = [shares(test.correct, labels, classes) for test in tests]
    return Evaluation(
        accuracy=float(torch.stack([test.correct.double().mean() for test in tests]).mean()),
        loss=float(torch.stack([test.losses.double().mean() for test in tests]).mean()),
        accuracy_by_class=[
            None if None in column else sum(column) / len(column) for column in zip(*by_class, strict=True)
        ],
        accuracy_by_client=[float(own.correct.double().mean()) if len(own.correct) else None for own in owns],
    )


def fairness(evaluation: Evaluation) -> dict[str, float | None]:
    """How evenly an accuracy is spread over clients and over classes.

    Args:
        evaluation: Of one model, or of everybody's own.

    Returns:
        By name: ``mean_client_accuracy``, ``worst_client_accuracy`` and ``worst_tenth_accuracy`` (the mean of the worst
        tenth of the clients, at least of one) are shares; ``client_variance`` and ``class_variance`` are population
        variances of percentages, as in the Fed-ZDA paper. None where no client has a test split of its own.
    """
    clients = sorted(value for value in evaluation.accuracy_by_client if value is not None)
    worst = clients[: max(1, round(len(clients) / 10))]
    return {
        "mean_client_accuracy": statistics.fmean(clients) if clients else None,
        "worst_client_accuracy": min(clients, default=None),
        "worst_tenth_accuracy": statistics.fmean(worst) if worst else None,
        "client_variance": _variance(clients),
        "class_variance": _variance([value for value in evaluation.accuracy_by_class if value is not None]),
    }


def _variance(shares: list[float]) -> float | None:
    return statistics.pvariance([100 * share for share in shares]) if shares else None


def shares(correct: Tensor, group: Tensor, groups: int) -> list[float | None]:
    """The share of recognised samples in each group, ``[n]`` bool and ``[n]`` numbers; None for an empty one."""
    hits = torch.bincount(group, weights=correct.double(), minlength=groups).tolist()
    sizes = torch.bincount(group, minlength=groups).tolist()
    return [hit / size if size else None for hit, size in zip(hits, sizes, strict=True)]


@torch.no_grad()
def in_chunks(function: Callable[[Tensor], Tensor], samples: Samples) -> Tensor:
    """What a function, such as a model in evaluation mode, makes of samples, in chunks of a fixed size.

    Args:
        function: Maps normalised inputs ``[b, ...]`` to ``[b, ...]``.
        samples: ``[n, ...]``, at least one.

    Returns:
        ``[n, ...]``, without a graph.
    """
    starts = range(0, len(samples), CHUNK)
    return torch.cat([function(normalise(samples.inputs[start : start + CHUNK])) for start in starts])


def mean_loss(model: nn.Module, samples: Samples) -> float:
    """Mean cross-entropy of a model in evaluation mode on samples, at least one."""
    scores = in_chunks(model, samples)  # [n, classes]
    return float(functional.cross_entropy(scores.double(), samples.labels))
