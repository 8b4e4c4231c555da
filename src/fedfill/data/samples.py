"""Samples: inputs with labels, resident in memory, and the one place where bytes become floats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfill.tree import Record

STRATA = 10
"""Into how many bins of its public bounds a number is taken apart where samples are divided or split evenly."""
UNKNOWN = -1
"""In the place of a label that nobody knows."""


@dataclass(frozen=True)
class Samples(Record):
    """Samples with their labels.

    Attributes:
        inputs: ``[n, channels, height, width]`` uint8 images, or any float tensor with n in front.
        labels: ``[n]`` int64 class indices, `UNKNOWN` where a sample has none; or float32 numbers, brought from their public bounds
            to -1..1.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self.labels)

    def __add__(self, other: Samples | None) -> Samples:
        """These samples followed by the others'.

        Args:
            other: Inputs of the same type and shape; None adds nothing.

        Returns:
            All of them.

        Raises:
            ValueError: Where the inputs differ in type or shape; bytes and floats mean different things (`normalise`).
        """
        if other is None:
            return self
        if self.inputs.dtype != other.inputs.dtype or self.inputs.shape[1:] != other.inputs.shape[1:]:
            raise ValueError(
                f"samples of type {self.inputs.dtype} and shape {list(self.inputs.shape[1:])} can't be joined with "
                f"samples of type {other.inputs.dtype} and shape {list(other.inputs.shape[1:])}"
            )
        return Samples(torch.cat([self.inputs, other.inputs]), torch.cat([self.labels, other.labels]))

    def __getitem__(self, index: Tensor | slice) -> Samples:
        """The samples at these positions."""
        return Samples(self.inputs[index], self.labels[index])

    def to(self, device: torch.device | str) -> Samples:
        """The samples on `device`."""
        return Samples(self.inputs.to(device), self.labels.to(device))

    def unlabelled(self) -> Samples:
        """The same inputs, without the labels."""
        return Samples(self.inputs, torch.full_like(self.labels, UNKNOWN))

    @property
    def labelled(self) -> Samples:
        """Those with a label: of numbers all."""
        return self if self.of_numbers else self[self.labels >= 0]

    @property
    def of_numbers(self) -> bool:
        """Whether the labels are numbers, and no classes."""
        return self.labels.is_floating_point()

    @property
    def strata(self) -> NDArray[np.int64]:
        """Of what a split shall have an even share, ``[n]``: the classes, or of numbers `STRATA` bins of one width."""
        labels = self.labels.numpy()
        if not self.of_numbers:
            return labels
        return np.clip(np.floor((labels + 1) / 2 * STRATA), 0, STRATA - 1).astype(np.int64)

    def counts(self, classes: int) -> list[int]:
        """How many samples there are of each of `classes` classes; all together where the labels are numbers."""
        if self.of_numbers:
            return [len(self)]
        return torch.bincount(self.labels, minlength=classes).tolist()


@dataclass(frozen=True)
class Batch:
    """A mini-batch as a loss sees it.

    Attributes:
        inputs: Normalised, ``[b, ...]`` float32.
        labels: ``[b]`` int64.
        index: Positions of these samples in the training data, ``[b]`` int64.
    """

    inputs: Tensor
    labels: Tensor
    index: Tensor


def fits(samples: Samples, sample: Samples, classes: int) -> bool:
    """Whether samples from elsewhere are labelled samples of a task.

    Args:
        samples: As they came.
        sample: One of the task's.
        classes: How many the task has.

    Returns:
        Whether types, shapes and labels fit.
    """
    inputs, labels = samples.inputs, samples.labels
    if labels.dtype != torch.int64 or labels.dim() != 1 or inputs.dtype != sample.inputs.dtype:
        return False
    if inputs.shape != (len(labels), *sample.inputs.shape[1:]):
        return False
    return bool((labels >= 0).all() & (labels < classes).all())


def some_of_each(samples: Samples, most: int, generator: torch.Generator) -> Samples:
    """No more than some of each class.

    Args:
        samples: Those without a label are left out.
        most: Of a class.
        generator: Stream of the choice, on the samples' device.

    Returns:
        Class after class, drawn without replacement; all of a class that has no more.
    """
    order = torch.randperm(len(samples), generator=generator, device=samples.labels.device)
    shuffled = samples.labels[order]
    classes = sorted({c for c in shuffled.tolist() if c >= 0})
    chosen = [order[shuffled == c][:most].sort().values for c in classes]
    return samples[torch.cat([order[:0], *chosen])]


def draw(data: Samples, b: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A mini-batch, each sample of it drawn from all.

    Args:
        data: At least one sample.
        b: How many are drawn, with replacement.
        generator: Stream of the draws, on the data's device.

    Returns:
        Normalised inputs ``[b, ...]`` and labels ``[b]``.
    """
    index = torch.randint(len(data), (b,), generator=generator, device=generator.device)
    return normalise(data.inputs[index]), data.labels[index]


def normalise(inputs: Tensor) -> Tensor:
    """Images as the networks see them: uint8 0..255 becomes float32 -1..1 (FedDPMS's preprocessing); floats keep their values.

    The result never shares memory with the data: a network may work in place.
    """
    if inputs.dtype != torch.uint8:
        return inputs.clone()
    return inputs.to(torch.float32).mul_(1 / 127.5).sub_(1.0)


def quantise(images: Tensor) -> Tensor:
    """Decoded images, floats in 0..1, as they are stored: uint8 0..255, rounded to the nearest."""
    return (images.clamp(0, 1) * 255).round_().to(torch.uint8)
