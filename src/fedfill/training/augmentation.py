"""Weak and strong augmentation of images, as tensor code on whole batches (FixMatch, Sohn et al. 2020, section 2.3).

Images are normalised, -1..1, and each draws for itself. The strong kind is RandAugment (Cubuk et al. 2020) with magnitudes drawn
at random, and Cutout (DeVries and Taylor 2017); operations and ranges are those of FixMatch's appendix, without equalise and colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fedfill.errors import FedfillError

SHIFT = 0.125
"""Weak: the largest translation, as a share of the side; rounded down to whole pixels."""
CUTOUT = 0.5
"""Strong: the largest side of the square, as a share of the image's shorter side."""
ENHANCEMENT = (0.05, 0.95)
"""Strong: share of the image that brightness (towards black), contrast (towards its mean) and sharpness (towards a blurred image) leave."""
BITS = (4, 8)
"""Strong: bits of a pixel that posterise leaves."""
GEOMETRY = (math.radians(30), 0.3, 0.3, 0.3, 0.3)
"""Strong: the largest rotation in radians, shear along x and y in pixels by pixel, and translation along x and y as a share
of the side; drawn with either sign. What comes from outside the image is grey, 0."""


def flips(inputs: Tensor, flip: bool | None, algorithm: str) -> bool:
    """Whether an algorithm's augmentation flips images.

    Args:
        inputs: One sample's, ``[1, ...]``.
        flip: What the user says; None: images in colour are flipped, grey ones, digits perhaps, are not.
        algorithm: For the error's sentence.

    Returns:
        Whether.

    Raises:
        FedfillError: Where there are no images to augment.
    """
    if inputs.dim() != 4:
        raise FedfillError(
            f"data: {algorithm} augments images of channels, height and width, found samples of shape {list(inputs.shape[1:])}"
        )
    return inputs.shape[1] == 3 if flip is None else flip


def weak(images: Tensor, generator: torch.Generator, flip: bool) -> Tensor:
    """Random translation with reflection at the borders, and random horizontal flip.

    Args:
        images: ``[b, c, h, w]``.
        generator: Stream of the draws, on the images' device.
        flip: Whether every other image is flipped; makes no sense for digits.

    Returns:
        New images of the same shape.

    Raises:
        FedfillError: Where these are no images.
    """
    n, _, height, width = _shape(images)
    device = images.device
    down, right = (
        torch.randint(-limit, limit + 1, (n,), generator=generator, device=device)
        for limit in (int(SHIFT * height), int(SHIFT * width))
    )
    flipped = torch.zeros(n, dtype=torch.bool, device=device)
    if flip:
        flipped = torch.rand(n, generator=generator, device=device) < 0.5
    return _shifted(images, down, right, flipped)


def strong(images: Tensor, generator: torch.Generator, flip: bool, operations: int = 2) -> Tensor:
    """Weak augmentation, then operations drawn with replacement for each image, then Cutout.

    Drawn from, with the same probability: identity, auto-contrast, brightness, contrast, posterise, sharpness, solarise,
    rotation, shear and translation along x and along y.

    Args:
        images: ``[b, c, h, w]``, -1..1.
        generator: Stream of the draws, on the images' device.
        flip: As in `weak`.
        operations: How many are applied to each image, one after the other.

    Returns:
        New images of the same shape, -1..1.

    Raises:
        FedfillError: Where these are no images.
    """
    n, _, height, width = _shape(images)
    device = images.device
    images = weak(images, generator, flip)
    for _ in range(operations):
        # the last number is the identity
        kinds = torch.randint(len(_PIXELS) + len(GEOMETRY) + 1, (n,), generator=generator, device=device)
        images = _operate(images, kinds, torch.rand(n, generator=generator, device=device))
    largest = int(CUTOUT * min(height, width))
    sizes, rows, columns = (
        torch.randint(limit, (n,), generator=generator, device=device) for limit in (largest + 1, height, width)
    )
    return _cut(images, sizes, rows, columns).clamp_(-1, 1)


def _shape(images: Tensor) -> torch.Size:
    if images.dim() != 4:
        raise FedfillError(
            f"data: augmentation takes images as [n, channels, height, width], found samples of shape {list(images.shape[1:])}"
        )
    return images.shape


def _shifted(images: Tensor, down: Tensor, right: Tensor, flipped: Tensor) -> Tensor:
    """Images flipped where `flipped`, then moved by whole pixels, each by its own; all ``[b]``."""
    height, width = images.shape[2:]
    rows, columns = (
        _reflected(torch.arange(side, device=images.device) - offset[:, None], side)  # [b, side]
        for side, offset in ((height, down), (width, right))
    )
    columns = torch.where(flipped[:, None], width - 1 - columns, columns)
    places = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)  # [b, h w]
    moved = images.flatten(2).gather(2, places[:, None].expand(-1, images.shape[1], -1))
    return moved.view(images.shape)


def _reflected(index: Tensor, side: int) -> Tensor:
    """Positions at most side - 1 outside 0..side-1, mirrored at the outermost pixels."""
    return side - 1 - (side - 1 - index.abs()).abs()


def _operate(images: Tensor, kinds: Tensor, u: Tensor) -> Tensor:
    """One operation on each image: its number, and a draw in 0..1 for its magnitude, ``[b]`` each."""
    images = images.clone()
    for kind, operation in enumerate(_PIXELS):
        chosen = (kinds == kind).nonzero()[:, 0]  # [k]
        if len(chosen):
            images[chosen] = operation(images[chosen], u[chosen, None, None, None])
    first = len(_PIXELS)
    chosen = ((kinds >= first) & (kinds < first + len(GEOMETRY))).nonzero()[:, 0]
    if len(chosen):
        largest = torch.tensor(GEOMETRY, device=images.device)
        signed = (2 * u[chosen, None] - 1) * largest  # [k, 5]
        images[chosen] = _warped(images[chosen], signed * functional.one_hot(kinds[chosen] - first, len(GEOMETRY)))
    return images


# ---- operations on pixels: images [k, c, h, w] and draws in 0..1, [k, 1, 1, 1]


def _auto_contrast(images: Tensor, u: Tensor) -> Tensor:
    """The range of each channel's values becomes -1..1; a channel of one value stays."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low) * 2 - 1, images)


def _brightness(images: Tensor, u: Tensor) -> Tensor:
    return torch.lerp(torch.full_like(images, -1), images, _left(u))


def _contrast(images: Tensor, u: Tensor) -> Tensor:
    return torch.lerp(images.mean((1, 2, 3), keepdim=True).expand_as(images), images, _left(u))


def _posterise(images: Tensor, u: Tensor) -> Tensor:
    low, high = BITS
    step = 2 ** (8 - low - (u * (high + 1 - low)).floor())
    level = ((images + 1) * 127.5).round()  # 0..255
    return (level / step).floor() * step / 127.5 - 1


def _sharpness(images: Tensor, u: Tensor) -> Tensor:
    """Towards means over 3x3 pixels of which the centre counts five times; beyond the border there are none."""
    means = functional.avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)
    return torch.lerp((9 * means + 4 * images) / 13, images, _left(u))


def _solarise(images: Tensor, u: Tensor) -> Tensor:
    """Inverts what is at least as bright as a threshold anywhere in the range."""
    return torch.where(images >= 2 * u - 1, -images, images)


def _left(u: Tensor) -> Tensor:
    low, high = ENHANCEMENT
    return low + (high - low) * u


_PIXELS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    _auto_contrast, _brightness, _contrast, _posterise, _sharpness, _solarise,
)  # fmt: skip


def _warped(images: Tensor, amounts: Tensor) -> Tensor:
    """Images seen through one movement each, with bilinear interpolation.

    Args:
        images: ``[k, c, h, w]``.
        amounts: ``[k, 5]``, as in `GEOMETRY`; at most one of a row is not 0.

    Returns:
        Turned clockwise, sheared and moved images; a positive translation goes right or down.
    """
    height, width = images.shape[2:]
    angle, shear_x, shear_y, right, down = amounts.unbind(1)
    # where an output's pixel comes from; grid_sample measures both sides as -1..1, so that a movement in pixels is scaled
    theta = torch.stack(
        [
            torch.stack([angle.cos(), (angle.sin() - shear_x) * (height / width), -2 * right], 1),
            torch.stack([(-angle.sin() - shear_y) * (width / height), angle.cos(), -2 * down], 1),
        ],
        1,
    )  # [k, 2, 3]
    grid = functional.affine_grid(theta, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _cut(images: Tensor, sizes: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Grey squares of `sizes` around the pixels (row, column), ``[b]`` each; what lies beyond the border is cut off."""
    inside = []
    for side, centre in ((images.shape[2], rows), (images.shape[3], columns)):
        start = (centre - sizes // 2)[:, None]
        place = torch.arange(side, device=images.device)
        inside.append((place >= start) & (place < start + sizes[:, None]))  # [b, side]
    square = inside[0][:, None, :, None] & inside[1][:, None, None, :]  # [b, 1, h, w]
    return images.masked_fill(square, 0.0)
