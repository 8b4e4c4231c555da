"""The scattering transform of images: Bruna and Mallat, "Invariant Scattering Convolution Networks", 2013.

Two scales, eight angles and order two. The wavelets' constants are those of the package kymatio (Andreux et al. 2020).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedfill.models.filters import Drawn

SCALES, ANGLES = 2, 8
CHANNELS = 1 + SCALES * ANGLES + ANGLES * ANGLES
"""Coefficients at each place of each colour: 81."""
STRIDE = 2**SCALES


def gabor(rows: int, columns: int, deviation: float, angle: float, frequency: float, slant: float) -> np.ndarray:
    """A Gaussian bell times a plane wave, on a torus.

    Args:
        rows: Of the torus.
        columns: Of the torus.
        deviation: Of the bell along the wave, in pixels.
        angle: Of the wave, in radians.
        frequency: Of the wave, in radians for each pixel.
        slant: Deviation along the wave over that across it.

    Returns:
        ``[rows, columns]`` complex128, with its centre at the first place.
    """
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    form = turn @ np.diag([1, slant**2]) @ turn.T / deviation**2
    total = np.zeros((rows, columns), dtype=complex)
    for i in range(-2, 3):
        for j in range(-2, 3):
            y, x = np.mgrid[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            bell = -(form[0, 0] * y * y + 2 * form[0, 1] * y * x + form[1, 1] * x * x) / 2
            total += np.exp(bell + 1j * frequency * (y * math.cos(angle) + x * math.sin(angle)))
    return total * slant / (2 * math.pi * deviation**2)


def bank(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Fourier transforms of the wavelets and of the low-pass filter, which are real.

    Args:
        rows: Of the padded image.
        columns: Of the padded image.

    Returns:
        Wavelets ``[scales, angles, rows, columns]``, zero at frequency 0, and the low-pass filter ``[rows, columns]``, there 1.
    """
    wavelets = np.empty((SCALES, ANGLES, rows, columns))
    for j in range(SCALES):
        for k in range(ANGLES):
            shape = (0.8 * 2**j, (ANGLES / 2 - 1 - k) * math.pi / ANGLES)
            wave = gabor(rows, columns, *shape, 0.75 * math.pi / 2**j, 4 / ANGLES)
            bell = gabor(rows, columns, *shape, 0.0, 4 / ANGLES)
            wavelets[j, k] = np.fft.fft2(wave - wave.sum() / bell.sum() * bell).real
    low = np.fft.fft2(gabor(rows, columns, 0.8 * 2 ** (SCALES - 1), 0.0, 0.0, 1.0)).real
    return torch.from_numpy(wavelets.astype(np.float32)), torch.from_numpy(low.astype(np.float32))


class Scattering(Drawn):
    """The step ``scatter``: moduli of wavelet transforms, and of theirs at the next scale, smoothed and taken at every fourth pixel.

    Args:
        shape: (channels, height, width) of an image.

    Attributes:
        features: Numbers for one image: 81 at each of (height // 4) (width // 4) places of each colour.
    """

    wavelets: Tensor
    down: Tensor
    across: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, *sides = shape
        padded = [((side + STRIDE) // STRIDE + 1) * STRIDE for side in sides]
        beyond = [(whole - side) // 2 for whole, side in zip(padded, sides, strict=True)]
        (top, left), (height, width), (rows, columns) = beyond, sides, padded
        self.padding = [left, columns - width - left, top, rows - height - top]
        self.features = channels * CHANNELS * (rows // STRIDE - 2) * (columns // STRIDE - 2)
        wavelets, low = bank(rows, columns)
        self.register_buffer("wavelets", wavelets, persistent=False)
        # the low-pass filter is a product of two, one down and one across: small matrices that keep every fourth place
        spread = torch.fft.ifft2(low.double()).real
        self.register_buffer("down", _every_fourth(spread.sum(1)), persistent=False)
        self.register_buffer("across", _every_fourth(spread.sum(0)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[b, features]``, in the order colour, coefficient, place, of images ``[b, channels, height, width]``."""
        return torch.stack([self._of_one(image) for image in x]) if len(x) else x.new_empty(0, self.features)

    def _of_one(self, x: Tensor) -> Tensor:
        x = functional.pad(x[None], self.padding, mode="reflect")[0][:, None]  # [channels, 1, rows, columns]
        waves = torch.fft.ifft2(torch.fft.fft2(x)[:, None] * self.wavelets).abs()  # [channels, scales, angles, ...]
        again = torch.fft.ifft2(torch.fft.fft2(waves[:, 0, :, None]) * self.wavelets[1]).abs()
        whole = torch.cat([x, waves.flatten(1, 2), again.flatten(1, 2)], 1)  # [channels, 81, rows, columns]
        return (self.down @ (whole @ self.across.t())).flatten()


def _every_fourth(filter: Tensor) -> Tensor:
    """The matrix of a filter on a circle that keeps every fourth place but for the first and the last."""
    n = len(filter)
    kept = torch.arange(1, n // STRIDE - 1) * STRIDE
    return filter[(kept[:, None] - torch.arange(n)) % n].float()
