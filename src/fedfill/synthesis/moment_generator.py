"""A generator of images whose mean features by class come near to given ones: mean embeddings, DP-MERF's objective.

Harder, Adamczewski and Park, "DP-MERF: Differentially Private Mean Embeddings with Random Features for Practical
Privacy-Preserving Data Generation", AISTATS 2021. It sees no image of anybody, so it may take any number of steps.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fedfill.models.features import FeatureMap
from fedfill.models.smooth_features import smooth_features
from fedfill.synthesis.gan_networks import Generator

Estimator = Literal["biased", "unbiased"]
"""Of the squared distance of means: from the mean of a batch, or without the part that a batch's own spread adds."""


def distance(targets: Tensor, z: Tensor, estimator: Estimator) -> Tensor:
    """The squared distance of mean features, summed over classes.

    Args:
        targets: Mean features mu_c of records, ``[C, D]``.
        z: Features of generated images, ``[C, b, D]``, b at least 2.
        estimator: ``biased`` is ``sum_c |mu_c - mean_b z_cb|^2``, whose mean is higher by the spread of z over b, so that
            a generator that repeats itself is favoured; ``unbiased`` leaves the pairs of an image with itself out.

    Returns:
        A scalar; the unbiased one may be below 0.
    """
    if estimator == "biased":
        return (targets - z.mean(1)).square().sum()
    b = z.shape[1]
    pairs = (z.sum(1).square().sum() - z.square().sum()) / (b * (b - 1))
    return pairs - 2 * (targets * z.mean(1)).sum() + targets.square().sum()


def distance_of_seconds(targets: Tensor, z: Tensor, estimator: Estimator) -> Tensor:
    """The squared distance of mean second moments z z', as matrices, summed over classes.

    Args:
        targets: Mean second moments S_c of records, ``[C, D, D]``.
        z: Features of generated images, ``[C, b, D]``, b at least 2.
        estimator: As in `distance`: ``sum_c |S_c - mean_b z z'|_F^2``, or without the pairs of an image with itself.

    Returns:
        A scalar; the unbiased one may be below 0.
    """
    b = z.shape[1]
    sums = z.transpose(1, 2) @ z  # [C, D, D]
    if estimator == "biased":
        return (targets - sums / b).square().sum()
    # the inner product of two z z' is the square of that of the two z
    pairs = (sums.square().sum() - z.square().sum(2).square().sum()) / (b * (b - 1))
    return pairs - 2 * (targets * sums).sum() / b + targets.square().sum()


def match_means(
    generator: Generator, encoder: FeatureMap, targets: Tensor, classes: Tensor, *, seconds: Tensor | None = None,
    steps: int, per_class: int, learning_rate: float, estimator: Estimator, draws: torch.Generator,
) -> float:  # fmt: skip
    """Train a generator in place, by Adam.

    Args:
        generator: Of noise and classes to images in -1..1.
        encoder: The map of features.
        targets: ``[C', D]``, one row for each of `classes`.
        classes: Which classes somebody holds, ``[C']``.
        seconds: Mean second moments of features, ``[C', D, D]``, to which the generated ones come near as well.
        steps: Of Adam, which starts afresh.
        per_class: Images of each class in a step, at least 2.
        learning_rate: Adam's.
        estimator: See `distance`.
        draws: Stream of the noise.

    Returns:
        The mean distance over the last tenth of the steps.
    """
    optimizer = torch.optim.Adam(generator.parameters(), lr=learning_rate)
    labels = classes.repeat_interleave(per_class)
    generator.train()
    last: list[float] = []
    for step in range(steps):
        noise = torch.randn(len(labels), _latent(generator), generator=draws, device=draws.device)
        z = smooth_features(encoder, generator(noise, labels)).view(len(classes), per_class, -1)
        loss = distance(targets, z, estimator)
        if seconds is not None:
            loss = loss + distance_of_seconds(seconds, z, estimator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step >= steps - max(1, steps // 10):
            last.append(float(loss.detach()))
    return sum(last) / len(last)


def _latent(generator: Generator) -> int:
    first = generator.layers[0]
    assert isinstance(first, nn.ConvTranspose2d)
    return first.in_channels - generator.classes
