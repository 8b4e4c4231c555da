"""Images with other amplitudes: what they look like, and not what they show, is for the most part in the lowest frequencies."""

from __future__ import annotations

import torch
from torch import Tensor


def half_width(images: Tensor, share: float) -> int:
    """How many frequencies on each side of 0 are low: this share of the shorter side of images, rounded down."""
    return int(min(images.shape[-2:]) * share)


def _square(images: Tensor, half: int) -> tuple[slice, slice]:
    """Where the low frequencies of images are in a spectrum with frequency 0 in the middle."""
    height, width = (slice(max(0, n // 2 - half), min(n, n // 2 + half + 1)) for n in images.shape[-2:])
    return height, width


def low_amplitudes(images: Tensor, half: int) -> Tensor:
    """Amplitudes of the low frequencies.

    Args:
        images: In 0..1, ``[n, channels, height, width]``.
        half: Frequencies on each side of 0; 0: the sum of a channel's values alone.

    Returns:
        ``[n, channels, 2 half + 1, 2 half + 1]``, cut off where the spectrum ends.
    """
    # the transform refuses no images at all
    spectra = torch.fft.fftshift(torch.fft.fft2(images), dim=(-2, -1)) if len(images) else images
    rows, columns = _square(images, half)
    amplitudes: Tensor = spectra[..., rows, columns].abs()
    return amplitudes


def with_amplitudes(images: Tensor, foreign: Tensor, share: Tensor, half: int) -> Tensor:
    """Images whose low frequencies have amplitudes in between their own and others'; phases stay.

    Args:
        images: In 0..1, ``[n, channels, height, width]``.
        foreign: Of the shape that `low_amplitudes` gives.
        share: Of the foreign ones, in 0..1, ``[n]``.
        half: As in `low_amplitudes`.

    Returns:
        In 0..1: what leaves this range is cut off.
    """
    spectra = torch.fft.fftshift(torch.fft.fft2(images), dim=(-2, -1))
    amplitudes, phases = spectra.abs(), spectra.angle()
    rows, columns = _square(images, half)
    s = share.view(-1, 1, 1, 1)
    amplitudes[..., rows, columns] = (1 - s) * amplitudes[..., rows, columns] + s * foreign
    mixed = torch.fft.ifftshift(torch.polar(amplitudes, phases), dim=(-2, -1))
    changed: Tensor = torch.fft.ifft2(mixed).real.clamp(0, 1)
    return changed
