"""Augmentation of images, as tensor code on whole batches. Images are normalised, -1..1, and each draws for itself.

`weak` and `strong` are FixMatch's (Sohn et al. 2020, section 2.3); the strong kind is RandAugment (Cubuk et al. 2020) with
magnitudes drawn at random, and Cutout (DeVries and Taylor 2017), with the operations and ranges of FixMatch's appendix, without
equalise and colour. `augmented` is what every algorithm's local training offers: the weak kind, or crops and colours as they are
usual for data of several domains (Gulrajani and Lopez-Paz 2021, appendix D.2), FRAug's authors' program among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedfill.errors import FedfillError

Augmentation = Literal["shift", "shift_flip", "crop", "crop_colour"]
"""Of a training's mini-batches: see `augmented`."""

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

AREA = (0.7, 1.0)
"""Crop: share of the image's area."""
RATIO = (3 / 4, 4 / 3)
"""Crop: width by height, as a factor of the image's own, drawn evenly on a logarithmic scale."""
JITTER = 0.3
"""Colours: the largest change of the factors of brightness, contrast and saturation, and of the hue as a share of a turn."""
GREY = 0.1
"""Colours: share of the images that lose theirs."""
LUMA = (0.299, 0.587, 0.114)
"""Grey of red, green and blue (ITU-R BT.601)."""


def require(inputs: Tensor, kind: Augmentation) -> None:
    """Make sure that data can be augmented.

    Args:
        inputs: One sample's as stored, ``[1, ...]``.
        kind: How.

    Raises:
        FedfillError: Where there are no images, or too small ones, or values that are in no known range.
    """
    if inputs.dim() != 4:
        raise FedfillError(
            f"augmentation: found {kind} with samples of shape {list(inputs.shape[1:])}; allowed: none, or data of images of channels, "
            "height and width"
        )
    height, width = inputs.shape[2:]
    if kind in ("shift", "shift_flip") and int(SHIFT * min(height, width)) < 1:
        raise FedfillError(
            f"augmentation: found {kind} with images of {height} x {width}, an eighth of which is no whole pixel; allowed: crop, none, or "
            "sides of at least 8"
        )
    if kind == "crop_colour" and inputs.dtype != torch.uint8:
        raise FedfillError(
            f"augmentation: found crop_colour with values of {inputs.dtype}, whose range is not known; allowed: shift, shift_flip, "
            "crop, none, or images of torch.uint8"
        )


def augmented(images: Tensor, kind: Augmentation, generator: torch.Generator) -> Tensor:
    """A mini-batch as local training sees it.

    Args:
        images: ``[b, c, h, w]``; -1..1 where colours are changed.
        kind: ``shift``: translations by up to an eighth of the side; ``shift_flip``: half of them mirrored as well; ``crop``: parts of 0.7
            to 1 of the area and of other proportions, brought to the image's size; ``crop_colour``: crops with other brightness,
            contrast, saturation and hue, one in ten in grey.
        generator: Stream of the draws, on the images' device.

    Returns:
        New images of the same shape.

    Raises:
        FedfillError: Where these are no images.
    """
    if kind in ("shift", "shift_flip") or not _shape(images)[0]:
        return weak(images, generator, kind == "shift_flip")
    images = _cropped(images, *_windows(images, generator))
    return _recoloured(images, *_colours(images, generator)) if kind == "crop_colour" else images


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


def require_bytes(inputs: Tensor, algorithm: str) -> None:
    """Check that the range of values is known, which the strong augmentation keeps them in.

    Args:
        inputs: One sample's, ``[1, ...]``, as stored.
        algorithm: For the error's sentence.

    Raises:
        FedfillError: Where they are floats.
    """
    if inputs.dtype != torch.uint8:
        raise FedfillError(
            f"data: {algorithm} changes brightness and colours, found values of {inputs.dtype}, whose range is not known; give images as bytes"
        )


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


# ---- crops and colours


def _windows(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sizes and centres of windows as shares of height and width, ``[b, 2]`` each; centres are measured from the middle."""
    n, *_ = _shape(images)
    u = torch.rand(n, 4, generator=generator, device=images.device)
    area = AREA[0] + (AREA[1] - AREA[0]) * u[:, 0]
    root = torch.exp((math.log(RATIO[0]) + math.log(RATIO[1] / RATIO[0]) * u[:, 1]) / 2)  # of width by height
    # a window that is longer than the image is cut off, so that there is nothing outside to show
    sizes = torch.stack([area.sqrt() / root, area.sqrt() * root], 1).clamp(max=1)
    return sizes, (1 - sizes) * (u[:, 2:] - 0.5)


def _cropped(images: Tensor, sizes: Tensor, centres: Tensor) -> Tensor:
    """Windows of images, brought to the whole size with bilinear interpolation; arguments as `_windows` gives them."""
    zero = torch.zeros_like(sizes[:, 0])
    theta = torch.stack(
        [
            torch.stack([sizes[:, 1], zero, 2 * centres[:, 1]], 1),
            torch.stack([zero, sizes[:, 0], 2 * centres[:, 0]], 1),
        ],
        1,
    )  # [b, 2, 3]
    grid = functional.affine_grid(theta, list(images.shape), align_corners=False)
    found = functional.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    # the weights of four pixels may add up to a little more than 1
    return found.clamp_(images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True))


def _colours(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Factors of brightness, contrast and saturation and the turn of the hue, ``[b, 4]``; and which images become grey, ``[b]``."""
    u = torch.rand(len(images), 5, generator=generator, device=images.device)
    changes = JITTER * (2 * u[:, :4] - 1)
    changes[:, :3] += 1
    return changes, u[:, 4] < GREY


def _recoloured(images: Tensor, changes: Tensor, grey: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue changed in this order, then some images in grey; grey images stay grey.

    Args:
        images: ``[b, c, h, w]``, -1..1; of more than one channel, those of three have a saturation and a hue.
        changes: As `_colours` gives them.
        grey: As `_colours` gives it.

    Returns:
        New images, -1..1.
    """
    brightness, contrast, saturation, hue = changes[:, :, None, None, None].unbind(1)  # [b, 1, 1, 1] each
    images = ((images + 1) / 2 * brightness).clamp(0, 1)
    images = torch.lerp(_luma(images).mean((2, 3), keepdim=True).expand_as(images), images, contrast).clamp(0, 1)
    if images.shape[1] == 3:
        images = torch.lerp(_luma(images).expand_as(images), images, saturation).clamp(0, 1)
        images = _turned(images, hue)
        images = torch.where(grey[:, None, None, None], _luma(images), images)
    return images * 2 - 1


def _luma(images: Tensor) -> Tensor:
    """The grey of images, ``[b, 1, h, w]``."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    return (images * torch.tensor(LUMA, device=images.device)[:, None, None]).sum(1, keepdim=True)


def _turned(images: Tensor, hue: Tensor) -> Tensor:
    """Images in 0..1 with their hue moved on by a share of a turn, at the same value and saturation (HSV)."""
    red, green, blue = (images[:, c : c + 1] for c in range(3))  # [b, 1, h, w] each
    value = images.amax(1, keepdim=True)
    chroma = value - images.amin(1, keepdim=True)
    unit = torch.where(chroma > 0, chroma, 1)
    # in sixths of a turn: 0 is red, 2 green, 4 blue
    near_red, near_green, near_blue = (green - blue) / unit, 2 + (blue - red) / unit, 4 + (red - green) / unit
    sixth = torch.where(value == red, near_red, torch.where(value == green, near_green, near_blue)) + 6 * hue
    offset = torch.tensor([5.0, 3.0, 1.0], device=images.device)[:, None, None]  # of red, green and blue
    place = (offset + sixth) % 6
    return value - chroma * torch.minimum(place, 4 - place).clamp(0, 1)
