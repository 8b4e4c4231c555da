"""Encoded images, decoded to uint8 tensors as they were stored, or brought to one size; values are not scaled here."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedfill.errors import FedfillError, first_line

# Pillow's modes by what they become; anything else (16-bit, floating point) would lose information in uint8
GREY = frozenset({"1", "L", "LA"})
COLOUR = frozenset({"RGB", "RGBA", "P", "PA", "CMYK", "YCbCr"})


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
    first = _open(encoded[0], where(0), size)
    out = np.empty((len(encoded), *(first.shape if size is None else (size, size, 3))), np.uint8)
    grey = np.empty(len(encoded), bool)

    def fill(begin: int) -> None:
        for row in range(begin, min(begin + 512, len(encoded))):
            image = _open(encoded[row], where(row), size)
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


def _open(encoded: bytes | Path | None, where: str, size: int | None) -> np.ndarray[Any, Any]:
    """One image as ``[h, w, c]`` uint8."""
    if not encoded:
        raise FedfillError(f"data: {where} holds no image bytes")
    try:
        with Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded) as image:
            if image.mode in GREY | COLOUR:
                return pixels(image, size)
            mode = image.mode
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        what = "no image that can be recognised" if isinstance(error, UnidentifiedImageError) else first_line(error)
        raise FedfillError(f"data: {where} can't be decoded as an image, it may be cut short: {what}") from error
    raise FedfillError(f"data: {where} is an image of mode '{mode}', but 8-bit grey or colour is needed")


def _describe(shape: Sequence[int]) -> str:
    return f"{shape[1]}x{shape[0]} {'grey' if shape[2] == 1 else 'colour'}"
