"""Encoded images, decoded to uint8 tensors as they were stored, or brought to one size; values are not scaled here."""

from __future__ import annotations

import functools
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedfill.errors import FedfillError, first_line, shown
from fedfill.files import check_regular

T = TypeVar("T")

# Pillow's modes by what they become; anything else (16-bit, floating point) would lose information in uint8
GREY = frozenset({"1", "L", "LA"})
COLOUR = frozenset({"RGB", "RGBA", "P", "PA", "CMYK", "YCbCr"})

PNG_END = b"IEND\xaeB`\x82"
"""The last chunk of a PNG, with its checksum."""


def decode(encoded: Sequence[bytes | Path | None], where: Callable[[int], str], size: int | None) -> Tensor:
    """Images of whatever Pillow reads; without a size all must be of one size and all grey or all colour.

    Args:
        encoded: The bytes of each, or its file.
        where: What an error sentence calls the image of a row.
        size: Pixels to a side to bring every image to; None: as they are.

    Returns:
        ``[n, c, h, w]`` uint8, contiguous. With a size c is 1 where all are grey and 3 where any is in colour.
    """
    if not encoded:
        return torch.empty(0, 0, 0, 0, dtype=torch.uint8)
    most = most_pixels()
    bring = functools.partial(pixels, size=size)
    first = _open(encoded[0], where(0), bring, most)
    out = _room((len(encoded), *(first.shape if size is None else (size, size, 3))), f"data: {len(encoded):,} images")
    grey = np.empty(len(encoded), bool)

    def fill(begin: int) -> None:
        for row in range(begin, min(begin + 512, len(encoded))):
            image = _open(encoded[row], where(row), bring, most)
            if size is None and image.shape != first.shape:
                raise FedfillError(
                    f"data: {where(row)} is {_describe(image.shape)}, but {where(0)} is {_describe(first.shape)}; "
                    "all images must have one size and be all grey or all colour; image_size brings them there"
                )
            out[row] = image  # which repeats grey where colour is kept
            grey[row] = image.shape[2] == 1

    # Pillow releases the interpreter lock while it decodes; results land by row, whatever the order of the threads
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(fill, range(0, len(encoded), 512)))
    return torch.from_numpy(np.ascontiguousarray((out[..., :1] if grey.all() else out).transpose(0, 3, 1, 2)))


def in_colour(images: Tensor) -> Tensor:
    """Grey images with their channel repeated, ``[n, 3, h, w]``; those in colour as they are."""
    return images.expand(-1, 3, -1, -1).contiguous()


def pixels(image: Image.Image, size: int | None) -> np.ndarray[Any, Any]:
    """An image of a known mode as ``[h, w, c]`` uint8, c = 1 or 3; with a size stretched or shrunk to that square.

    Pillow's bilinear filter widens where it shrinks, so that nothing is skipped, and it computes in whole numbers: every
    machine gets the same bytes.
    """
    image = image.convert("L" if image.mode in GREY else "RGB")
    if size is not None:
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(image.height, image.width, -1)


@dataclass(frozen=True)
class Fitted:
    """Images that were brought to one shape.

    Attributes:
        inputs: ``[n, channels, height, width]`` uint8.
        resized: How many had another size.
        recoloured: How many were grey and are in colour now, or the other way round.
    """

    inputs: Tensor
    resized: int
    recoloured: int


def fitted(
    encoded: Sequence[bytes | Path | Image.Image | None], where: Callable[[int], str], shape: Sequence[int]
) -> Fitted:
    """Images as a network takes them, whatever size they have and whether they are grey or in colour.

    Args:
        encoded: As for `decode`, or images that are decoded.
        where: As for `decode`.
        shape: (channels, height, width) that all of them get, the channels 1 or 3.

    Returns:
        The images. One that has this shape is as `decode` gives it, and one of another size as `decode` does with a size.
    """
    channels, height, width = shape
    most = most_pixels()
    out = np.empty((len(encoded), height, width, channels), np.uint8)
    changed = np.zeros((len(encoded), 2), bool)

    def fill(begin: int) -> None:
        for row in range(begin, min(begin + 64, len(encoded))):
            out[row], *changed[row] = _open(
                encoded[row], where(row), lambda image: _brought(image, channels, width, height), most
            )

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(fill, range(0, len(encoded), 64)))
    resized, recoloured = (int(count) for count in changed.sum(0))
    return Fitted(torch.from_numpy(np.ascontiguousarray(out.transpose(0, 3, 1, 2))), resized, recoloured)


def _brought(image: Image.Image, channels: int, width: int, height: int) -> tuple[np.ndarray[Any, Any], bool, bool]:
    """One image of this shape, whether it had another size, and whether it had other channels."""
    grey, resized = image.mode in GREY, image.size != (width, height)
    image = image.convert("L" if grey else "RGB")
    if channels == 1 and not grey:
        image = image.convert("L")
    if resized:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(height, width, -1), resized, grey != (channels == 1)


def most_pixels() -> int:
    """Pixels that an image may have, so that a small file can't fill the memory: Pillow's limit, or FEDFILL_MAX_PIXELS.

    Returns:
        Width times height.

    Raises:
        FedfillError: Where FEDFILL_MAX_PIXELS is no whole number of at least 1.
    """
    if (text := os.environ.get("FEDFILL_MAX_PIXELS")) is not None:
        if not (text.isdecimal() and 0 < len(text) < 16 and int(text)):
            raise FedfillError(f"FEDFILL_MAX_PIXELS: found {shown(text)}; allowed: a whole number of at least 1")
        # else Pillow warns above its own limit, and refuses twice as much
        Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS and max(Image.MAX_IMAGE_PIXELS, int(text))
        return int(text)
    return Image.MAX_IMAGE_PIXELS or sys.maxsize


def _room(shape: tuple[int, ...], what: str) -> np.ndarray[Any, Any]:
    """An array of bytes for all images, refused where there is no room for it."""
    try:
        return np.empty(shape, np.uint8)
    except (MemoryError, ValueError) as error:  # NumPy's word for an array that no machine could hold
        raise FedfillError(
            f"{what} of {shape[2]}x{shape[1]} pixels need {math.prod(shape) / 2**30:,.0f} GiB, which are not there; image_size makes them smaller"
        ) from error


def _open(encoded: bytes | Path | Image.Image | None, where: str, bring: Callable[[Image.Image], T], most: int) -> T:
    """What is made of one image of a known mode and of no more than `most` pixels."""
    if not encoded:
        raise FedfillError(f"data: {where} holds no image bytes")
    try:
        if isinstance(encoded, Path):
            check_regular(encoded)
        if isinstance(encoded, Image.Image):
            opened: Any = nullcontext(encoded)
        else:
            opened = Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded)
        with opened as image:
            if image.width * image.height > most:
                raise FedfillError(
                    f"data: {where} has {image.width:,}x{image.height:,} pixels; allowed: {most:,} in all, or what FEDFILL_MAX_PIXELS says"
                )
            if image.format == "PNG" and PNG_END not in _bytes_of(encoded):  # Pillow reads on without it
                raise OSError("a PNG without its end")
            if image.mode in GREY | COLOUR:
                return bring(image)
            mode = image.mode
    except (
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:  # the latter where warnings are errors
        raise FedfillError(
            f"data: {where} has far more pixels than allowed: {most:,} in all, or what FEDFILL_MAX_PIXELS says"
        ) from error
    except (OSError, SyntaxError, ValueError) as error:
        what = "no image that can be recognised" if isinstance(error, UnidentifiedImageError) else first_line(error)
        raise FedfillError(f"data: {where} can't be decoded as an image, it may be cut short: {what}") from error
    raise FedfillError(f"data: {where} is an image of mode '{mode}', but 8-bit grey or colour is needed")


def _bytes_of(encoded: Any) -> bytes:
    """What was encoded; of an image from Python, which brings none, an end alone."""
    if isinstance(encoded, Path):
        return encoded.read_bytes()
    return encoded if isinstance(encoded, bytes) else PNG_END


def _describe(shape: Sequence[int]) -> str:
    return f"{shape[1]}x{shape[0]} {'grey' if shape[2] == 1 else 'colour'}"
