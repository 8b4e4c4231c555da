"""Networks in operations that other programs know: what torch.export and ONNX make of them runs without fedfill.

Maps of features go image by image and in blocks, so that no bit depends on what stands beside; here is the same function for
any number of inputs at once, equal but for rounding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.models.features import FeatureMap, Fourier, Matrix, Pixels, Project, Rectified, Vector
from fedfill.models.filters import SOFTENED, Patches, RandomFilters
from fedfill.models.quadratic import Quadratic
from fedfill.models.scattering import Scattering
from fedfill.models.smooth_features import even_contrast


def plain(network: nn.Module) -> nn.Module:
    """The same network without what depends on Python: loops over inputs and writes in place.

    Args:
        network: In evaluation mode; it stays as it is.

    Returns:
        A copy, equal but for rounding. What is no network of fedfill's is copied as it is.
    """
    return _replaced(copy.deepcopy(network)).eval()


def _replaced(module: nn.Module) -> nn.Module:
    for kind, make in _FORMS.items():
        if type(module) is kind:
            return make(module)
    if isinstance(module, FeatureMap):
        steps = [_replaced(step) for step in module.children()]
        return nn.Sequential(*steps)
    for name, child in module.named_children():
        setattr(module, name, _replaced(child))
    return module


class _Pixels(nn.Module):
    """Normalised images back to 0..1; of bytes nothing is beyond sense."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1) * 0.5


class _Vector(nn.Module):
    """Rows over the root of their length, made smaller where float32 could not square them."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        largest = x.abs().amax(1, keepdim=True).clamp(min=1e4) / 1e4
        return x / largest / math.sqrt(x.shape[1])


class _Filters(nn.Module):
    """Both signs of thresholded responses, averaged over cells, and the square root."""

    down: Tensor
    across: Tensor

    def __init__(self, given: RandomFilters | Patches) -> None:
        super().__init__()
        self.size, self.padding, self.threshold = given.size, given.padding, given.threshold
        self.register_buffer("down", _cells(given.rows, given.cells))
        self.register_buffer("across", _cells(given.columns, given.cells).t().contiguous())

    def rectified(self, responses: Tensor) -> Tensor:
        """``[n, F, rows, columns]`` to ``[n, 2 F cells^2]``."""
        both = torch.stack([responses, -responses], 2) - self.threshold
        return (self.down @ both.relu() @ self.across).clamp(min=0).sqrt().flatten(1)


class _RandomFilters(_Filters):
    """The step ``conv``."""

    weight: Tensor

    def __init__(self, given: RandomFilters) -> None:
        super().__init__(given)
        self.register_buffer("weight", given.weight.view(given.filters, given.channels, given.size, given.size))

    def forward(self, x: Tensor) -> Tensor:
        return self.rectified(functional.conv2d(even_contrast(x), self.weight, padding=self.padding))


class _Patches(_Filters):
    """The step ``patches``: with m and s the mean and the softened deviation of a patch p, K (p - m) / s - K mean."""

    kernel: Tensor
    shift: Tensor
    total: Tensor

    def __init__(self, given: Patches) -> None:
        super().__init__(given)
        kernel = given.dictionary @ given.whitening
        shape = (given.filters, given.channels, given.size, given.size)
        self.register_buffer("kernel", kernel.view(shape))
        self.register_buffer("shift", (kernel @ given.mean).view(1, -1, 1, 1))
        self.register_buffer("total", kernel.sum(1).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 255 - 127.5  # smaller squares: a patch's mean is taken away below, whatever it is
        mean = functional.avg_pool2d(x.mean(1, keepdim=True), self.size, stride=1)
        square = functional.avg_pool2d((x * x).mean(1, keepdim=True), self.size, stride=1)
        deviation = ((square - mean * mean).clamp(min=0) + SOFTENED).sqrt()
        responses = functional.conv2d(x, self.kernel) - self.total * mean
        return self.rectified(responses / deviation - self.shift)


class _Scattering(nn.Module):
    """The step ``scatter``."""

    wavelets: Tensor
    down: Tensor
    across: Tensor

    def __init__(self, given: Scattering) -> None:
        super().__init__()
        self.padding = given.padding
        for name in ("wavelets", "down", "across"):
            self.register_buffer(name, getattr(given, name))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.pad(x, self.padding, mode="reflect")[:, :, None]  # [n, channels, 1, rows, columns]
        waves = torch.fft.ifft2(
            torch.fft.fft2(x)[:, :, None] * self.wavelets
        ).abs()  # [n, channels, scales, angles, ...]
        again = torch.fft.ifft2(torch.fft.fft2(waves[:, :, 0, :, None]) * self.wavelets[1]).abs()
        whole = torch.cat([x, waves.flatten(2, 3), again.flatten(2, 3)], 2)
        return (self.down @ (whole @ self.across.t())).flatten(1)


class _Matrix(nn.Module):
    """A matrix of a map and what is made of the products."""

    matrix: Tensor

    def __init__(self, given: Matrix) -> None:
        super().__init__()
        self.kind = type(given)
        self.register_buffer("matrix", given.matrix.t().contiguous())

    def forward(self, z: Tensor) -> Tensor:
        made, rows = z @ self.matrix, self.matrix.shape[1]
        if self.kind is Fourier:
            return torch.cat([made.cos(), made.sin()], 1) / math.sqrt(rows)
        return made.relu() * math.sqrt(2 / rows) if self.kind is Rectified else made


class _Quadratic(nn.Module):
    """The last layer with a Gaussian for each class."""

    def __init__(self, given: Quadratic) -> None:
        super().__init__()
        self.given = given

    def forward(self, z: Tensor) -> Tensor:
        scores = []
        for mean, whitening, bias in zip(self.given.means, self.given.whitening, self.given.bias, strict=True):
            white = (z - mean) * whitening if whitening.dim() == 1 else (z - mean) @ whitening.t()
            scores.append(bias - white.square().sum(1) / 2)
        found = torch.stack(scores, 1)
        lowest = found.amin(1, keepdim=True).clamp(max=0)
        return torch.where(self.given.present > 0, found, 2 * lowest - 1e9)


def _cells(places: int, cells: int) -> Tensor:
    """Means over neighbouring places as a matrix ``[cells, places]``, as of torch's adaptive pooling."""
    means = torch.zeros(cells, places)
    for cell in range(cells):
        first, last = cell * places // cells, -(-(cell + 1) * places // cells)
        means[cell, first:last] = 1 / (last - first)
    return means


_FORMS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    Pixels: lambda _: _Pixels(),
    Vector: lambda _: _Vector(),
    RandomFilters: _RandomFilters,
    Patches: _Patches,
    Scattering: _Scattering,
    Fourier: _Matrix,
    Project: _Matrix,
    Rectified: _Matrix,
    Quadratic: _Quadratic,
}
"""By the type of a module: what stands in its place."""
