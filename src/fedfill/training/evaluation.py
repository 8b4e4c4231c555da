"""Evaluation in large batches, split into chunks that any number of workers may share without changing a bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedfill.data.samples import Samples
from fedfill.training.local import Resident

CHUNK = 1000


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
    """Score any number of samples, at least one, in the chunks in which every engine does it.

    Args:
        resident: A model, loaded.
        samples: ``[n, ...]``.

    Returns:
        The outcome of each, in their order.
    """
    parts = [score(resident, samples[start : start + CHUNK]) for start in range(0, len(samples), CHUNK)]
    return Scored(torch.cat([part.correct for part in parts]), torch.cat([part.losses for part in parts]))


@dataclass(frozen=True)
class Evaluation:
    """Accuracies and losses of one model; all accuracies are shares in [0, 1].

    Attributes:
        accuracy: On the test set.
        loss: Mean cross-entropy on the test set.
        accuracy_by_class: On the test set, by class; None for a class that it lacks.
        accuracy_by_client: On each client's own test split; None for a client without one.
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


def shares(correct: Tensor, group: Tensor, groups: int) -> list[float | None]:
    """The share of recognised samples in each group, ``[n]`` bool and ``[n]`` numbers; None for an empty one."""
    hits = torch.bincount(group, weights=correct.double(), minlength=groups).tolist()
    sizes = torch.bincount(group, minlength=groups).tolist()
    return [hit / size if size else None for hit, size in zip(hits, sizes, strict=True)]
