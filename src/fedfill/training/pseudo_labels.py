"""Pseudo-labels: the classes that a model is sure of (SDA-FL, equation 4; FixMatch, Sohn et al. 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedfill.data.samples import Samples, normalise
from fedfill.models.layers import evaluating


def predicted(model: nn.Module, inputs: Tensor, batch_size: int = 512) -> tuple[Tensor, Tensor]:
    """The most probable class of each sample, and how probable it is.

    Args:
        model: Any classifier; it works in evaluation mode here, and each of its layers has its own mode back afterwards.
        inputs: As stored, ``[n, ...]``, on the model's device.
        batch_size: Samples that are looked at together, at least 1.

    Returns:
        Probabilities ``[n]`` float32 and classes ``[n]`` int64.
    """
    # made outside inference mode: a tensor of that mode could be no loss's target
    probabilities = torch.zeros(len(inputs), device=inputs.device)
    classes = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
    with evaluating(model), torch.inference_mode():
        for start in range(0, len(inputs), batch_size):
            part = slice(start, start + batch_size)
            probabilities[part], classes[part] = model(normalise(inputs[part])).softmax(1).max(1)
    return probabilities, classes


def pseudo_labels(model: nn.Module, inputs: Tensor, tau: float, batch_size: int = 512) -> Tensor:
    """The most probable class of each sample where its probability is above a threshold.

    Args:
        model: As in `predicted`.
        inputs: As in `predicted`.
        tau: The threshold, in 0..1.
        batch_size: As in `predicted`.

    Returns:
        ``[n]`` int64: a class, or -1 where no probability is above `tau`.
    """
    probabilities, classes = predicted(model, inputs, batch_size)
    return torch.where(probabilities > tau, classes, -1)


def confident(model: nn.Module, samples: Samples, tau: float) -> Samples:
    """The samples that a model is sure of, with the classes that it takes them for; see `pseudo_labels`."""
    guessed = pseudo_labels(model, samples.inputs, tau)
    return Samples(samples.inputs, guessed)[guessed >= 0]


def compact(labels: Tensor, classes: int) -> Tensor | None:
    """Pseudo-labels as they travel, ``[n]`` int8 or int16; None where no sample has one."""
    return labels.to(torch.int8 if classes <= 128 else torch.int16) if bool((labels >= 0).any()) else None


def labelling_notes(labels: Tensor, owners: Tensor, classes: int) -> dict[str, Any]:
    """How far the pseudo-labels of a pool reach, for a round's record.

    Args:
        labels: Of all clients' samples, ``[n]`` int64.
        owners: Whose each is, ``[n]`` int64.
        classes: Number of classes.

    Returns:
        The share with a label, and their counts by class, of all and by owner.
    """

    def counts(given: Tensor) -> list[int]:
        return torch.bincount(given[given >= 0], minlength=classes).tolist()

    found = counts(labels)
    by_owner = {str(i): counts(labels[owners == i]) for i in torch.unique(owners).tolist()}
    return {"labelled": sum(found) / max(1, len(labels)), "labelled_by_class": found, "labelled_by_owner": by_owner}
