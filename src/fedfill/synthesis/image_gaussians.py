"""Images drawn from a Gaussian for each class, of which nothing is needed but sums over all records.

An image is taken as the coefficients of its lowest frequencies (the discrete cosine transform, type 2, orthonormal). Its
mean and covariance by class follow from class moments and Gram matrices, so they do not depend on how records lie on
clients, and one Gaussian mechanism on the sums protects every record. High frequencies are left out: noise that no image
has would be drawn there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfill.data.samples import Samples, quantise
from fedfill.models.filters import product
from fedfill.statistics.calibration import ClassGaussians, class_gaussians, gaussian_samples
from fedfill.statistics.covariance import class_means, within_covariance
from fedfill.statistics.heads import somebody, sums
from fedfill.statistics.spectral_noise import noise_edge, shrunk
from fedfill.tree import Weights


@dataclass(frozen=True)
class Frequencies:
    """The lowest frequencies of images of one shape.

    Attributes:
        shape: (channels, height, width) of an image.
        rows: How many along the height.
        columns: How many along the width.
        radius: Length to which an image of 0..1 is shortened, and over which it is divided: so every vector has at most
            length 1.
    """

    shape: tuple[int, int, int]
    rows: int
    columns: int
    radius: float

    @classmethod
    def of(cls, shape: tuple[int, ...], share: float, radius: float) -> Frequencies:
        """Those of a shape.

        Args:
            shape: (channels, height, width).
            share: Of the frequencies along each side, above 0 and up to 1; at least one is kept.
            radius: In shares of the length of a white image.

        Returns:
            The frequencies.
        """
        channels, height, width = shape
        rows, columns = (max(1, round(share * side)) for side in (height, width))
        return cls((channels, height, width), rows, columns, radius * math.sqrt(math.prod(shape)))

    @property
    def numbers(self) -> int:
        """Length d of an image's vector."""
        return self.shape[0] * self.rows * self.columns

    def matrix(self) -> Tensor:
        """From the pixels of one channel, row after row, to its frequencies, ``[rows * columns, height * width]`` float64."""
        return torch.kron(_cosines(self.rows, self.shape[1]), _cosines(self.columns, self.shape[2]))

    def vectors(self, images: Tensor) -> Tensor:
        """What is summed of images.

        Args:
            images: ``[b, channels, height, width]`` uint8.

        Returns:
            ``[b, d]`` float64, none longer than 1. No bit of a row depends on the others.
        """
        pixels = images.flatten(2).flatten(0, 1).float() / 255
        matrix = (self.matrix() / self.radius).to(pixels)
        z = product(pixels, matrix).view(len(images), -1).double()
        shortened: Tensor = z / z.norm(dim=1, keepdim=True).clamp(min=1)
        return shortened

    def images(self, vectors: Tensor) -> Tensor:
        """Images of vectors ``[b, d]`` as they are stored, ``[b, channels, height, width]`` uint8."""
        coefficients = vectors.view(-1, self.rows * self.columns) * self.radius
        return quantise((coefficients @ self.matrix().to(coefficients)).view(-1, *self.shape))


def _cosines(kept: int, side: int) -> Tensor:
    """The first cosines of a side, each of length 1, ``[kept, side]`` float64."""
    place, wave = torch.arange(side, dtype=torch.float64) + 0.5, torch.arange(kept, dtype=torch.float64)
    waves = torch.cos(math.pi / side * wave[:, None] * place)
    unit: Tensor = waves / waves.norm(dim=1, keepdim=True)
    return unit


def denoised(found: Weights, counts: Tensor, off_diagonal_std: float) -> ClassGaussians:
    """A Gaussian for each class from sums, with the noise taken out of the spectrum where there is any.

    Args:
        found: ``moments`` M ``[d, C]``, and ``class_grams`` ``[C, d, d]``, or ``gram`` ``[d, d]`` for one covariance of all.
        counts: N, ``[C]``; those too small to tell from noise put at 0.
        off_diagonal_std: Of the noise in each Gram matrix off the diagonal; 0: none.

    Returns:
        Without noise as `class_gaussians`; with noise covariances of those directions alone that stand out of it (`shrunk`).
    """
    if "class_grams" in found and not off_diagonal_std:
        return class_gaussians(found["class_grams"], found["moments"], counts)
    moments, counts = sums(found["moments"], counts)
    somebody(counts > 0)
    means, edge = class_means(moments, counts), noise_edge(off_diagonal_std, len(moments))
    if "gram" in found:
        shared = _above(within_covariance(sums(found["gram"])[0], moments, counts), edge / float(counts.sum()))
        return ClassGaussians(means, shared.expand(len(counts), -1, -1), counts)
    held = torch.where(counts > 0, counts, 1.0)
    second = sums(found["class_grams"])[0] / held[:, None, None] - means[:, :, None] * means[:, None, :]
    own = [_above(s, edge / float(n)) for s, n in zip(second, held, strict=True)]
    return ClassGaussians(means, torch.stack(own), counts)


def _above(covariance: Tensor, edge: float) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    left: Tensor = (vectors * shrunk(values, edge)) @ vectors.T
    return left


def drawn_images(
    gaussians: ClassGaussians, frequencies: Frequencies, per_class: int, stream: Callable[[int], torch.Generator]
) -> Samples:
    """So many images of each class that somebody holds.

    Args:
        gaussians: Of the vectors.
        frequencies: Which these are.
        per_class: How many of each class.
        stream: Of class c, at its start: so the draws of a class do not depend on the others.

    Returns:
        Images uint8 and labels, class after class.
    """
    z, labels = gaussian_samples(gaussians, per_class, stream, jitter=1e-9)
    return Samples(frequencies.images(z), labels)
