"""Networks of conditional variational auto-encoders for small images, their settings, and their loss.

Sohn, Lee and Yan 2015; sizes as in FedCVAE (Heinbaugh, Luz-Ricca and Shao 2023). The encoder has no normalisation. The decoder has
batch norm, or group norm where each image's gradient is clipped by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.errors import FedfillError
from fedfill.tree import Weights

_GROUPS = 8
_WIDTHS = (64, 64, 32, 32)
"""Channels of the decoder's maps, the smallest first; those of the encoder's come in the other order."""


@dataclass(frozen=True)
class CVAESettings:
    """How a conditional VAE is built.

    Attributes:
        shape: (channels, height, width) of an image.
        classes: Of the task (C).
        latent: Coordinates of a latent code (l).
        norm: Of the decoder: ``batch``, or ``group``, which couples no images.
    """

    shape: tuple[int, ...]
    classes: int
    latent: int = 10
    norm: Literal["batch", "group"] = "batch"


def require_images(inputs: Tensor, algorithm: str) -> None:
    """Check that the decoder can make what the data hold.

    Args:
        inputs: Of one sample as they are stored, ``[1, ...]``.
        algorithm: For the error's sentence.

    Raises:
        FedfillError: Where they are no 8-bit images.
    """
    if inputs.dtype != torch.uint8 or inputs.dim() != 4:
        raise FedfillError(
            f"data: {algorithm} found inputs of type {inputs.dtype} and shape {list(inputs.shape[1:])}; allowed: 8-bit images "
            "(uint8, [channels, height, width])"
        )


class Encoder(nn.Module):
    """Images and classes to means and log-variances of latent codes, by four convolutions and a linear layer.

    Args:
        settings: Its sizes.
    """

    def __init__(self, settings: CVAESettings) -> None:
        super().__init__()
        channels, *sides = settings.shape
        self.margins = _margins(sides)
        layers: list[nn.Module] = []
        for inputs, outputs in zip((channels, *_WIDTHS[:0:-1]), _WIDTHS[::-1], strict=True):
            layers += [nn.Conv2d(inputs, outputs, 4, 2, 1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Flatten())
        features = _WIDTHS[0] * math.prod(_smallest(sides))
        self.head = nn.Linear(features + settings.classes, 2 * settings.latent)

    def forward(self, images: Tensor, onehot: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log-variances ``[b, latent]`` of images in 0..1 with classes ``[b, classes]``."""
        features = self.layers(functional.pad(images, self.margins))
        mean, logvar = self.head(torch.cat([features, onehot], 1)).chunk(2, 1)
        return mean, logvar


class Decoder(nn.Module):
    """Latent codes and classes to logits of pixels, by a linear layer and four transposed convolutions.

    It makes sides that are multiples of 16, of which the middle is cut out.

    Args:
        settings: Its sizes.
    """

    def __init__(self, settings: CVAESettings) -> None:
        super().__init__()
        channels, *sides = settings.shape
        self.smallest = (_WIDTHS[0], *_smallest(sides))
        self.margins = [-margin for margin in _margins(sides)]
        self.head = nn.Linear(settings.latent + settings.classes, math.prod(self.smallest))
        layers: list[nn.Module] = []
        for inputs, outputs in zip(_WIDTHS, (*_WIDTHS[1:], channels), strict=True):
            layers.append(nn.ConvTranspose2d(inputs, outputs, 4, 2, 1))
            if len(layers) < 3 * len(_WIDTHS) - 2:
                norm = nn.BatchNorm2d(outputs) if settings.norm == "batch" else nn.GroupNorm(_GROUPS, outputs)
                layers += [norm, nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, codes: Tensor, onehot: Tensor) -> Tensor:
        """Logits ``[b, channels, height, width]`` of codes ``[b, latent]`` with classes ``[b, classes]``."""
        maps = functional.relu(self.head(torch.cat([codes, onehot], 1))).view(-1, *self.smallest)
        return functional.pad(self.layers(maps), self.margins)


class CVAE(nn.Module):
    """Encoder and decoder.

    Args:
        settings: Their sizes.
    """

    def __init__(self, settings: CVAESettings) -> None:
        super().__init__()
        self.encoder = Encoder(settings)
        self.decoder = Decoder(settings)

    def forward(self, images: Tensor, onehot: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, means and log-variances; `draws` are standard normal, ``[b, latent]``."""
        mean, logvar = self.encoder(images, onehot)
        return self.decoder(mean + (logvar / 2).exp() * draws, onehot), mean, logvar


def _margins(sides: Sequence[int]) -> list[int]:
    """What brings (height, width) to multiples of 16: left, right, top, bottom."""
    height, width = (-side % 16 for side in sides)
    return [width // 2, width - width // 2, height // 2, height - height // 2]


def _smallest(sides: Sequence[int]) -> tuple[int, int]:
    """Height and width of the decoder's first maps."""
    height, width = (-(-side // 16) for side in sides)
    return height, width


def negative_elbo(logits: Tensor, images: Tensor, mean: Tensor, logvar: Tensor, beta: float) -> Tensor:
    """Binary cross-entropy summed over pixels, plus beta times the divergence from N(0, 1) summed over the latent.

    Args:
        logits: Before the sigmoid, ``[b, ...]``.
        images: In 0..1, of the same shape.
        mean: ``[b, latent]``.
        logvar: ``[b, latent]``.
        beta: Weight of the divergence.

    Returns:
        Of each image, ``[b]``.
    """
    divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1)
    return pixel_loss(logits, images) + beta * divergence


def pixel_loss(logits: Tensor, images: Tensor) -> Tensor:
    """Binary cross-entropy of each image, summed over its pixels, ``[b]``, from logits; images in 0..1."""
    error = functional.binary_cross_entropy_with_logits(logits, images, reduction="none")
    total: Tensor = error.flatten(1).sum(1)
    return total


def start(settings: CVAESettings, stream: torch.Generator) -> Weights:
    """A conditional VAE before its training.

    Args:
        settings: Its sizes.
        stream: Of the initial weights, which live on its device: uniform, as wide as torch's own.

    Returns:
        Tensors of encoder and decoder.
    """
    model = built(CVAE, settings, stream.device)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm):
            layer.reset_parameters()
        elif isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            bound = 1 / math.sqrt(layer.weight[0].numel())
            nn.init.uniform_(layer.weight, -bound, bound, generator=stream)
            nn.init.uniform_(layer.bias, -bound, bound, generator=stream)  # type: ignore[arg-type]
    return tensors_of(model)


def decoder_of(weights: Weights) -> Weights:
    """The decoder's tensors of a whole conditional VAE, under the names that they have in a decoder."""
    return {name.removeprefix("decoder."): x for name, x in weights.items() if name.startswith("decoder.")}


def unit(inputs: Tensor) -> Tensor:
    """Normalised inputs as the decoder's targets in 0..1, whatever the rounding."""
    return ((inputs + 1) / 2).clamp(0, 1)


def built(kind: type[nn.Module], settings: CVAESettings, device: torch.device) -> nn.Module:
    """A network without values: constructors would draw from torch's global generator, which threads share."""
    with torch.device("meta"):
        model = kind(settings)
    return model.to_empty(device=device)


def loaded(kind: type[nn.Module], settings: CVAESettings, weights: Weights, device: torch.device) -> nn.Module:
    """A network of this kind that holds these tensors."""
    model = built(kind, settings, device)
    model.load_state_dict(weights)
    return model


def tensors_of(module: nn.Module) -> Weights:
    """Copies of a network's parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
