"""Maps of features with a gradient for their inputs: what is made at a server shall have features like those of records.

The maps of `fedfill.models.features` take no gradient, and are fast for it. Here is the same function, plainly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.errors import FedfillError
from fedfill.models.features import Bounded, Centred, FeatureMap, Fourier, Pixels, Project, Rectified, Vector
from fedfill.models.filters import BOX, RandomFilters

SMOOTH = 1e-4
"""What is added under a square root, whose slope at 0 has no end."""


def require_smooth(encoder: FeatureMap) -> None:
    """Refuse a map with a step that has no gradient here.

    Args:
        encoder: The map.

    Raises:
        FedfillError: For ``patches`` and ``scatter``.
    """
    for name, step in encoder.named_children():
        if not isinstance(
            step, Pixels | Vector | RandomFilters | nn.Flatten | Bounded | Centred | Fourier | Project | Rectified
        ):
            raise FedfillError(
                f"embedding: found {name}, which has no gradient; allowed: conv, project, fourier, relu, unit and clip"
            )


def smooth_features(encoder: FeatureMap, x: Tensor) -> Tensor:
    """The features of inputs, with a gradient.

    Args:
        encoder: A map; see `require_smooth`.
        x: Normalised inputs, ``[b, ...]``.

    Returns:
        ``[b, d]``: those of ``encoder(x)``, but for what `SMOOTH` changes where there is ``conv``.
    """
    for step in encoder:
        if isinstance(step, Pixels):
            x = (x + 1) / 2
        elif isinstance(step, Vector):
            x = x.flatten(1) / math.sqrt(x[0].numel())
        elif isinstance(step, RandomFilters):
            x = _filtered(step, x)
        elif isinstance(step, nn.Flatten):
            x = x.flatten(1)
        elif isinstance(step, Bounded):
            length = (x.square().sum(1, keepdim=True) + 1e-12).sqrt()
            x = x / (length.clamp(min=1) if step.clip else length)
        elif isinstance(step, Centred):
            x = x - step.centre
        elif isinstance(step, Fourier):
            angles = x @ step.matrix.T
            x = torch.cat([angles.cos(), angles.sin()], 1) / math.sqrt(len(step.matrix))
        elif isinstance(step, Rectified):
            x = (x @ step.matrix.T).relu() * math.sqrt(2 / len(step.matrix))
        elif isinstance(step, Project):
            x = x @ step.matrix.T
    return x


def _filtered(step: RandomFilters, x: Tensor) -> Tensor:
    channels = x.shape[1]
    weight = step.weight.view(step.filters, channels, step.size, step.size)
    responses = functional.conv2d(even_contrast(x), weight, padding=step.padding)
    signs = [functional.adaptive_avg_pool2d((sign * responses - step.threshold).relu(), step.cells) for sign in (1, -1)]
    return (torch.stack(signs, 2) + SMOOTH).sqrt().flatten(1)


def even_contrast(x: Tensor) -> Tensor:
    """`fedfill.models.filters.even_contrast` by pooling, equal but for rounding."""
    grey = functional.pad(x.mean(1, keepdim=True), [BOX // 2] * 4, mode="reflect")
    mean, square = (functional.avg_pool2d(y, BOX, stride=1) for y in (grey, grey * grey))
    return (x - mean) / ((square - mean * mean).clamp(min=0) + 0.01).sqrt()
