"""Generator and critic of a WGAN-GP for small images, their settings, and the gradient penalty (Gulrajani et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.errors import FedfillError
from fedfill.privacy.accountant import sampled_noise

Noise = Literal["none", "dpsgd", "paper_eq3"]


@dataclass(frozen=True)
class GANSettings:
    """How a GAN is built and trained; the paper gives penalty, batch and iterations, and none of the rest.

    Attributes:
        latent: Size of the generator's noise.
        width: Channels of the widest images; the others have two and four times as many.
        classes: Number of classes of the auxiliary classifier; 0: there is none, and samples have no labels.
        batch_size: Real images in a step of the critic, and fake ones; with ``dpsgd`` the expected number of real ones.
        critic_steps: Steps of the critic for each of the generator.
        learning_rate: Of Adam, for both.
        betas: Of Adam.
        penalty: Weight gamma of the gradient penalty.
        class_weight: Of the auxiliary classifier's cross-entropy.
        average: Decay of the moving average of the generator that makes the images; 0: the generator itself does.
        noise: On the critic's gradients: none; ``dpsgd``, clipped per sample; ``paper_eq3``, which protects nothing.
        clip: Largest norm of one image's gradient, with ``dpsgd``.
        target_epsilon: What ``dpsgd`` keeps for one image that is added or removed, and what equation 3 is given.
        delta: With `target_epsilon`.
    """

    latent: int = 100
    width: int = 64
    classes: int = 0
    batch_size: int = 64
    critic_steps: int = 5
    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.0, 0.9)
    penalty: float = 10.0
    class_weight: float = 1.0
    average: float = 0.0
    noise: Noise = "none"
    clip: float = 1.0
    target_epsilon: float = 10.0
    delta: float = 1e-5

    def probability(self, samples: int) -> float:
        """With which each of a client's images is in a step of the critic (q)."""
        return min(1.0, self.batch_size / samples)

    def noise_multiplier(self, samples: int, iterations: int) -> float:
        """The noise of ``dpsgd`` over `clip`, so that all steps of `iterations` together keep `target_epsilon`."""
        return sampled_noise(self.target_epsilon, self.probability(samples), iterations * self.critic_steps, self.delta)

    def paper_std(self, samples: int) -> float:
        """The noise of equation 3: ``2 q / epsilon * sqrt(n_d ln(1 / delta))``, n_d the mini-batches of an epoch."""
        steps = math.ceil(samples / self.batch_size)
        return 2 * self.probability(samples) / self.target_epsilon * math.sqrt(steps * math.log(1 / self.delta))


def require_images(inputs: Tensor, algorithm: str) -> None:
    """Check that a GAN can make what the data hold.

    Args:
        inputs: Of one sample as they are stored, ``[1, ...]``.
        algorithm: For the error's sentence.

    Raises:
        FedfillError: Where they are no images with sides that can be halved twice, or this one is out of the generator's range.
    """
    shape = list(inputs.shape[1:])
    if len(shape) != 3 or shape[0] not in (1, 3) or shape[1] != shape[2] or shape[1] % 4 or shape[1] < 8:
        raise FedfillError(
            f"data: {algorithm} makes square images of 1 or 3 channels with sides that are multiples of 4 from 8, found shape {shape}"
        )
    if inputs.is_floating_point() and (largest := float(inputs.abs().max())) > 1:
        raise FedfillError(
            f"data: {algorithm} makes floats in -1..1, found a value of size {largest:.4g}; scale the images"
        )


def _sides(side: int) -> list[int]:
    """The sides of images behind each of the generator's four transposed convolutions: 4, 7, 14, 28, say."""
    return [math.ceil(side / 8), side // 4, side // 2, side]


def _halving(side: int) -> tuple[int, int]:
    """Kernel and padding of a convolution with stride 2 that halves a side, rounded up; transposed it goes back."""
    return (4, 1) if side % 2 == 0 else (3, 1)


class Generator(nn.Module):
    """Noise to images in -1..1, by four transposed convolutions with batch norm between them.

    Args:
        shape: (channels, side, side) of an image.
        settings: Its sizes.
    """

    def __init__(self, shape: tuple[int, ...], settings: GANSettings) -> None:
        super().__init__()
        channels, width = shape[0], settings.width
        sides = _sides(shape[1])
        plan = [4 * width, 2 * width, width]
        layers: list[nn.Module] = [
            nn.ConvTranspose2d(settings.latent + settings.classes, plan[0], sides[0], bias=False)
        ]
        for inputs, outputs, side in zip(plan, [*plan[1:], channels], sides[1:], strict=True):
            kernel, padding = _halving(side)
            layers += [nn.BatchNorm2d(inputs), nn.ReLU()]
            layers.append(nn.ConvTranspose2d(inputs, outputs, kernel, 2, padding, bias=outputs == channels))
        self.layers = nn.Sequential(*layers, nn.Tanh())
        self.classes = settings.classes

    def forward(self, z: Tensor, labels: Tensor | None = None) -> Tensor:
        """Images ``[b, channels, side, side]`` from noise ``[b, latent]`` and, where there are classes, labels ``[b]``."""
        if self.classes:
            z = torch.cat([z, functional.one_hot(labels, self.classes).to(z)], 1)  # type: ignore[arg-type]
        return self.layers(z[:, :, None, None])  # type: ignore[no-any-return]


class Critic(nn.Module):
    """Images to scores, by four convolutions and a linear layer.

    There is no batch norm: the penalty is on each image's own gradient, and so is the clipping of ``dpsgd``.

    Args:
        shape: (channels, side, side) of an image.
        settings: Its sizes.
    """

    def __init__(self, shape: tuple[int, ...], settings: GANSettings) -> None:
        super().__init__()
        inputs, side, _ = shape
        layers: list[nn.Module] = []
        for outputs in (settings.width, 2 * settings.width, 4 * settings.width, 4 * settings.width):
            kernel, padding = _halving(side)
            layers += [nn.Conv2d(inputs, outputs, kernel, 2, padding), nn.LeakyReLU(0.2)]
            inputs, side = outputs, math.ceil(side / 2)
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(inputs * side * side, 1 + settings.classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Scores ``[b]``, and class scores ``[b, classes]``, from images in -1..1."""
        out = self.head(self.layers(images))  # [b, 1 + classes]
        return out[:, 0], out[:, 1:]


def gradient_penalty(critic: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
    """How far the critic's slope is from 1 between real and fake images (Gulrajani et al. 2017, equation 3).

    Args:
        critic: Images to scores ``[b]``.
        real: ``[b, ...]``.
        fake: ``[b, ...]``.
        share: Of the real image in the point that is looked at, ``[b]`` in 0..1.

    Returns:
        ``(||grad|| - 1)**2`` of each, ``[b]``.
    """
    between = torch.lerp(fake, real, share.view(-1, *(1,) * (real.dim() - 1))).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)  # [b, ...]
    length: Tensor = torch.linalg.vector_norm(slope.flatten(1), dim=1)
    return (length - 1).square()
