"""Features of images from many small filters: random ones, and ones for whitened patches that can be learned from sums.

Both correlate, rectify with both signs, average over cells and take the square root. The patches follow Coates and Ng 2011
("The Importance of Encoding Versus Training with Sparse Coding and Vector Quantization"). One image at a time: its
responses stay in the processor's cache, and no bit of them depends on which images stand beside it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

BOX = 9
"""Pixels to a side over which contrast is made equal."""
SOFTENED = 10.0
"""What is added to a patch's variance, on the scale 0..255, so that flat patches stay small."""


def product(rows: Tensor, matrix: Tensor) -> Tensor:
    """``rows @ matrix.T`` in blocks of one size, so that no bit of a row depends on how many others there are.

    Args:
        rows: ``[b, n]`` float32.
        matrix: ``[m, n]``.

    Returns:
        ``[b, m]``.
    """
    out = rows.new_empty(len(rows), len(matrix))
    # of few columns the library makes some rows by other steps than the rest
    wide = matrix if len(matrix) >= _LEAST else functional.pad(matrix, (0, 0, 0, _LEAST - len(matrix)))
    for start in range(0, len(rows), _ROWS):
        block = rows[start : start + _ROWS]
        whole = block if len(block) == _ROWS else functional.pad(block, (0, 0, 0, _ROWS - len(block)))
        out[start : start + _ROWS] = (whole.contiguous() @ wide.t())[: len(block), : len(matrix)]
    return out


_ROWS, _LEAST = 64, 16


def even_contrast(x: Tensor) -> Tensor:
    """Local contrast normalisation: (x - m) / sqrt(v + 0.01), with mean and variance of the grey image in 9x9 boxes.

    Args:
        x: Images with values in 0..1, ``[b, channels, height, width]``, sides of at least 5 pixels.

    Returns:
        The same shape.
    """
    grey = x if x.shape[1] == 1 else (x[:, :1] + x[:, 1:2] + x[:, 2:]).div_(3)
    grey = functional.pad(grey, [BOX // 2] * 4, mode="reflect")
    mean, square = _boxes(grey), _boxes(grey * grey)
    deviation = square.sub_(mean * mean).clamp_(min=0).add_(0.01).sqrt_()
    return (x - mean).div_(deviation)


def _boxes(x: Tensor) -> Tensor:
    """Means of 9x9 boxes: sums of shifted copies, along one axis and then along the other."""
    for axis in (2, 3):
        n = x.shape[axis] - BOX + 1
        total = x.narrow(axis, 0, n).clone()
        for shift in range(1, BOX):
            total += x.narrow(axis, shift, n)
        x = total
    return x.div_(BOX * BOX)


def random_filters(filters: int, size: int, channels: int, stream: np.random.Generator) -> Tensor:
    """Pieces of waves under a bell, drawn filter after filter, so that the first of many are the first of fewer.

    Args:
        filters: How many.
        size: Pixels to a side.
        channels: 1 or 3.
        stream: Of the draws.

    Returns:
        ``[filters, channels * size * size]``, each of length 1.
    """
    place = np.arange(size) - (size - 1) / 2
    rows, columns = np.meshgrid(place, place, indexing="ij")
    drawn = np.empty((filters, channels, size, size))
    for f in range(filters):
        angle, pitch, phase, width, centred, tinted = stream.random(6)
        centre, colour = stream.normal(0, 0.7, 2), stream.normal(size=3)
        angle, frequency = math.pi * angle, 2 * math.pi * (0.08 + 0.3 * pitch)
        along = math.cos(angle) * columns + math.sin(angle) * rows
        distance = (columns - centre[0]) ** 2 + (rows - centre[1]) ** 2
        wave = np.cos(frequency * along + 2 * math.pi * phase) * np.exp(-distance / (2 * (1 + 2 * width) ** 2))
        if centred < 0.85:
            wave -= wave.mean()
        if channels == 1:
            drawn[f] = wave
        else:
            tint = colour if tinted < 0.5 else 1 + 0.1 * colour
            drawn[f] = tint[:, None, None] * wave
        drawn[f] /= max(float(np.linalg.norm(drawn[f])), 1e-12)
    return torch.from_numpy(drawn.reshape(filters, -1).astype(np.float32))


class Drawn(nn.Module):
    """A module whose buffers outside its state dict never change: its copies share them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        for name in self._non_persistent_buffers_set:
            memo[id(self._buffers[name])] = self._buffers[name]
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class Filters(Drawn):
    """Both signs of thresholded filter responses, averaged over cells.

    Args:
        shape: (channels, height, width) of an image.
        filters: How many, F.
        size: Pixels to a side of a filter, k.
        cells: Cells to a side, g.
        threshold: What a response has to exceed, t.
        padding: Zeros around the image.

    Attributes:
        features: Numbers for one image: 2 F g^2, in the order filter, sign, cell.
    """

    def __init__(
        self, shape: tuple[int, ...], filters: int, size: int, cells: int, threshold: float, padding: int
    ) -> None:
        super().__init__()
        self.filters, self.size, self.cells, self.threshold, self.padding = filters, size, cells, threshold, padding
        self.channels = shape[0]
        self.rows, self.columns = (side + 2 * padding - size + 1 for side in shape[1:])
        self.features = 2 * filters * cells * cells

    def rectified(self, x: Tensor, responses: Callable[[Tensor], Tensor]) -> Tensor:
        """Both signs of responses, averaged, and the square root.

        Args:
            x: Images, ``[b, channels, height, width]``.
            responses: Of all filters to what all places of one image hold: ``[places, channels * k * k]`` to ``[places, F]``.

        Returns:
            ``[b, features]``, at least 0.
        """
        out = x.new_empty(len(x), self.filters, 2, self.cells, self.cells)
        for i, image in enumerate(x.unbind()):
            held = functional.unfold(image, self.size, padding=self.padding).t()
            over = functional.softshrink(responses(held), self.threshold)  # [places, F]
            out[i, :, 0] = self._pooled(over.clamp(min=0))
            out[i, :, 1] = self._pooled(over.clamp_(max=0)).neg_()
        return out.clamp_(min=0).sqrt_().flatten(1)

    def _pooled(self, over: Tensor) -> Tensor:
        """Means over cells, ``[F, cells, cells]``."""
        maps = over.view(1, self.rows, self.columns, self.filters).permute(0, 3, 1, 2)  # channels-last
        return functional.adaptive_avg_pool2d(maps, self.cells)[0]

    def extra_repr(self) -> str:
        """Shown in the module's printed form."""
        return f"{self.filters}, size={self.size}, cells={self.cells}, threshold={self.threshold:g}"


class RandomFilters(Filters):
    """The step ``conv``: random filters on images of even contrast, at all places and half a filter beyond the edge.

    Args:
        shape: (channels, height, width) of an image.
        filters: How many, F.
        size: Pixels to a side of a filter, k.
        cells: Cells to a side, g.
        threshold: What a response has to exceed, t.
        stream: Of the filters' draws.
    """

    weight: Tensor

    def __init__(
        self, shape: tuple[int, ...], filters: int, size: int, cells: int, threshold: float, stream: np.random.Generator
    ) -> None:
        super().__init__(shape, filters, size, cells, threshold, padding=size // 2)
        self.register_buffer("weight", random_filters(filters, size, shape[0], stream), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[b, 2 F g^2]`` of images in 0..1, ``[b, channels, height, width]``."""
        return self.rectified(even_contrast(x), lambda held: held @ self.weight.t())


def even_patches(patches: Tensor) -> Tensor:
    """Patches less their mean, over sqrt(variance + 10): shorter than k * sqrt(channels).

    Args:
        patches: Values on the scale 0..255, ``[..., channels * k * k]``.

    Returns:
        The same shape.
    """
    even = patches - patches.mean(-1, keepdim=True)
    return even.div_(even.square().mean(-1, keepdim=True).add_(SOFTENED).sqrt_())


class Patches(Filters):
    """The step ``patches``: responses of unit filters to whitened patches, at all places within the image.

    What is learned from sums are the buffers ``mean`` ``[P]``, ``whitening`` ``[P, P]`` and ``dictionary`` ``[F, P]`` with P
    = channels * k * k. They begin with 0, the identity and seeded directions, which can be used as they are.

    Args:
        shape: (channels, height, width) of an image.
        filters: How many, F.
        size: Pixels to a side of a patch, k.
        cells: Cells to a side, g.
        threshold: What a response has to exceed, t.
        stream: Of the first directions.
    """

    mean: Tensor
    whitening: Tensor
    dictionary: Tensor

    def __init__(
        self, shape: tuple[int, ...], filters: int, size: int, cells: int, threshold: float, stream: np.random.Generator
    ) -> None:
        super().__init__(shape, filters, size, cells, threshold, padding=0)
        numbers = shape[0] * size * size
        directions = torch.from_numpy(stream.standard_normal((filters, numbers)))
        self.register_buffer("mean", torch.zeros(numbers))
        self.register_buffer("whitening", torch.eye(numbers))
        self.register_buffer("dictionary", functional.normalize(directions).float())

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[b, 2 F g^2]`` of images in 0..1, ``[b, channels, height, width]``."""
        kernel = self.dictionary @ self.whitening  # [F, P]
        shift = kernel @ self.mean  # [F]
        return self.rectified(
            x * 255, lambda held: torch.addmm(shift, even_patches(held.contiguous()), kernel.t(), beta=-1)
        )
