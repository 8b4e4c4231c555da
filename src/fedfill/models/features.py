"""Feature maps that need no data: words such as ``conv(200) > project(2048)``, made from a seed by everybody alike.

A map is an encoder without parameters. What is drawn from the seed is kept out of the state dict, so that nothing is sent or
stored for it. What can be learned from sums (the centre; of ``patches`` also mean, whitening and dictionary) is in there, with
first values from the seed. Every record ends with length 1, or 0 where all its features are 0, whatever it holds: a bound on
what one record adds to a sum. No record of anybody decides on anything here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.errors import FedfillError
from fedfill.models.feature_words import LAST, MOST, OF_IMAGES, parse
from fedfill.models.filters import BOX, Drawn, Patches, RandomFilters, product
from fedfill.models.scattering import ANGLES, STRIDE, Scattering
from fedfill.streams import numpy_stream

MOST_BYTES = 2**30
"""Bytes that one matrix of a map, or the responses to one image, may take."""
SEEDED_INPUTS = 500
"""Inputs whose mean feature is the first centre."""


class Pixels(nn.Module):
    """Normalised images, -1..1, back to 0..1."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return _tamed(x.float().contiguous()).add(1).mul_(0.5)


class Vector(nn.Module):
    """Inputs of any shape as rows of numbers, over sqrt(n): n standardised numbers have a length of about 1."""

    def forward(self, x: Tensor) -> Tensor:
        """``[b, n]``."""
        x = _tamed(x.float()).flatten(1)
        return x / math.sqrt(x.shape[1])


def _tamed(x: Tensor) -> Tensor:
    """Inputs that float32 can square and sum: those beyond any sense are made smaller as a whole."""
    largest = x.flatten(1).abs().amax(1).clamp_(min=_SENSE).div_(_SENSE)
    return x / largest.view(-1, *(1,) * (x.dim() - 1))


_SENSE = 1e4


class Centred(nn.Module):
    """Features less a public centre.

    Args:
        features: How many.
    """

    centre: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(features))

    def forward(self, z: Tensor) -> Tensor:
        """``[b, features]``."""
        return z - self.centre


class Bounded(nn.Module):
    """Rows of length 1 (``unit``; rows of zeros stay), or of at most 1 (``clip``).

    Args:
        clip: Leave rows shorter than 1 as they are.
    """

    def __init__(self, clip: bool = False) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, z: Tensor) -> Tensor:
        """The same shape."""
        length = torch.linalg.vector_norm(z, dim=1, keepdim=True)
        return z.div(length.clamp_(min=1.0 if self.clip else 1e-12))

    def extra_repr(self) -> str:
        """Shown in the module's printed form."""
        return "clip" if self.clip else "unit"


class Matrix(Drawn):
    """A matrix of independent normal numbers, row after row: the first rows of many are those of fewer.

    Args:
        inputs: Numbers in a row.
        rows: How many.
        deviation: Of each number.
        stream: Of the draws.
    """

    matrix: Tensor

    def __init__(self, inputs: int, rows: int, deviation: float, stream: np.random.Generator) -> None:
        super().__init__()
        drawn = stream.standard_normal((rows, inputs), dtype=np.float32)
        self.register_buffer("matrix", torch.from_numpy(drawn).mul_(deviation), persistent=False)

    def extra_repr(self) -> str:
        """Shown in the module's printed form."""
        return f"{self.matrix.shape[1]} to {self.matrix.shape[0]}"


class Project(Matrix):
    """The step ``project``: z P with P of n(0, 1 / inputs), drawn column by column."""

    def forward(self, z: Tensor) -> Tensor:
        """``[b, rows]``."""
        return product(z, self.matrix)


class Fourier(Matrix):
    """The step ``fourier``: sqrt(2 / D) [cos w.z, sin w.z] with D / 2 frequencies w (Rahimi and Recht 2007), of length 1 for every z."""

    def forward(self, z: Tensor) -> Tensor:
        """``[b, 2 * rows]``, cosines first."""
        angles = product(z, self.matrix)
        return torch.cat([angles.cos(), angles.sin()], 1).div_(math.sqrt(len(self.matrix)))


class Rectified(Matrix):
    """The step ``relu``: sqrt(2 / D) relu(w.z), the arc-cosine kernel of order 1 (Cho and Saul 2009)."""

    def forward(self, z: Tensor) -> Tensor:
        """``[b, rows]``."""
        return product(z, self.matrix).relu_().mul_(math.sqrt(2 / len(self.matrix)))


class FeatureMap(nn.Sequential):
    """Steps from normalised inputs to features.

    Args:
        steps: By name.
        shape: Of one input.
        seed: That all draws come from.

    Attributes:
        shape: Of one input.
        seed: That all draws come from.
        radius: Length of the longest feature vector.
    """

    radius = 1.0

    def __init__(self, steps: OrderedDict[str, nn.Module], shape: tuple[int, ...], seed: int) -> None:
        super().__init__(steps)
        self.shape, self.seed = shape, seed

    def forward(self, x: Tensor) -> Tensor:
        """Features of inputs.

        Args:
            x: Normalised, ``[b, ...]``.

        Returns:
            ``[b, d]``, each row of length 1 or 0; with ``clip`` of at most 1.

        Raises:
            FedfillError: Where somebody wants a gradient through it.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise FedfillError(
                "model: features has no gradient for its inputs, which this algorithm needs; allowed: a network that is trained, "
                "such as --model auto"
            )
        with torch.no_grad():
            return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]

    def before_centre(self, x: Tensor) -> Tensor:
        """What the centre is taken from: ``[b, D]`` of normalised inputs ``[b, ...]``."""
        with torch.no_grad():
            for step in self:
                if isinstance(step, Centred):
                    break
                x = step(x)
            return x

    def seeded_centre(self) -> Tensor:
        """The mean feature of seeded inputs, ``[D]``, with the filters as they are now; zero for what are no images."""
        centre: Tensor = self.centred.centre  # type: ignore[assignment, union-attr]
        if len(self.shape) != 3:
            return torch.zeros_like(centre)
        total = torch.zeros_like(centre, dtype=torch.float64)
        for chunk in torch.split(synthetic_inputs(self.shape, self.seed).to(centre.device), 100):
            total += self.before_centre(chunk).double().sum(0)
        return total.div_(SEEDED_INPUTS).to(centre.dtype)

    def centre_itself(self) -> None:
        """Take `seeded_centre` for the centre."""
        self.centred.centre.copy_(self.seeded_centre())  # type: ignore[union-attr, operator]


def synthetic_inputs(shape: tuple[int, ...], seed: int, n: int = SEEDED_INPUTS) -> Tensor:
    """Images of nobody: sigmoid(2 u - 1) with u a sum of enlarged noise of 4, 7, 14 and 28 pixels to a side.

    Args:
        shape: (channels, height, width).
        seed: Of the experiment's map.
        n: How many.

    Returns:
        Normalised as data are, -1..1, ``[n, channels, height, width]``; the first of many are those of fewer.
    """
    u = torch.zeros(n, *shape)
    for side in (4, 7, 14, 28):
        stream = numpy_stream(seed, "features", "synthetic inputs", side)
        noise = torch.from_numpy(stream.standard_normal((n, shape[0], side, side), dtype=np.float32))
        u += functional.interpolate(noise, shape[1:], mode="bilinear", align_corners=False) * (4 / side)
    return torch.sigmoid(2 * u - 1).mul_(2).sub_(1)


def default_words(shape: tuple[int, ...], most: int = MOST) -> str:
    """The map for inputs of this shape, where nobody says which, with as many features as may be."""
    return f"conv(200) > project({min(2048, most)})" if _is_image(shape) else f"fourier({min(1024, most)})"


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] in (1, 3)


def features(words: str | None, shape: tuple[int, ...], seed: int) -> tuple[FeatureMap, int]:
    """The map that words name, with its first values.

    Args:
        words: Steps from left to right; none: `default_words`.
        shape: Of one input: (channels, height, width) of images with 1 or 3 channels, or any other of rows of numbers.
        seed: Of the experiment: with it everybody makes the same map, and torch's global generator stays where it is.

    Returns:
        The encoder, and the number of its features d.

    Raises:
        FedfillError: Where the words can't be read, or don't fit the inputs or memory.
    """
    encoder, size = uncentred(words, shape, seed)
    encoder.centre_itself()
    return encoder, size


def uncentred(words: str | None, shape: tuple[int, ...], seed: int) -> tuple[FeatureMap, int]:
    """The map of `features` before its centre, which takes seconds, for whoever loads a state dict that holds one."""
    words = default_words(shape) if words is None else words
    if not shape or min(shape) < 1:
        raise FedfillError(f"features: found inputs of shape {list(shape)}; allowed: images or rows of numbers")
    steps, size = _Steps(words, shape, seed), math.prod(shape)
    chain, image = parse(words), _is_image(shape)
    steps.add("pixels", Pixels()) if image else steps.add("vector", Vector())
    if chain[0][0] in OF_IMAGES:
        size = steps.of_images(*chain.pop(0))
    elif image:
        steps.add("flatten", nn.Flatten())
    if image:
        steps.add("unit", Bounded())  # before the centre too: a mean over records' features can be made private
    steps.add("centred", Centred(size))
    if image:
        steps.add("unit", Bounded())
    for place, (name, settings) in enumerate(chain):
        if name in OF_IMAGES or (name in LAST and place + 1 < len(chain)):
            raise FedfillError(
                f"features: found {name} in the wrong place in '{words}'; allowed: {name} as the {'first' if name in OF_IMAGES else 'last'}"
            )
        size = size if name in LAST else steps.lift(name, settings, size)
    steps.end(clip=bool(chain) and chain[-1][0] == "clip")
    if size > MOST:
        raise FedfillError(
            f"features: found '{words}', which makes {size:,} features; allowed: 1..{MOST}, say with > project(2048)"
        )
    return FeatureMap(steps.made, shape, seed), size


class _Steps:
    """The steps of a map as they are made."""

    def __init__(self, words: str, shape: tuple[int, ...], seed: int) -> None:
        self.words, self.shape, self.seed = words, shape, seed
        self.made: OrderedDict[str, nn.Module] = OrderedDict()

    def add(self, name: str, step: nn.Module) -> None:
        """One step more, under its name or the name with a number."""
        count = sum(made.rstrip("0123456789") == name for made in self.made)
        self.made[f"{name}{count + 1 if count else ''}"] = step

    def stream(self, name: str) -> np.random.Generator:
        """Of the draws of the next step with this name."""
        count = sum(made.rstrip("0123456789") == name for made in self.made)
        return numpy_stream(self.seed, "features", name, count)

    def of_images(self, name: str, settings: Mapping[str, float]) -> int:
        """The first step of a map for images; how many numbers it gives."""
        shape = self.shape
        if not _is_image(shape):
            raise FedfillError(
                f"features: found {name} in '{self.words}' with inputs of shape {list(shape)}; allowed there: fourier(1024), "
                "project, relu, unit, clip"
            )
        size, cells = int(settings.get("size", 0)), int(settings.get("cells", 0))
        grown = 2 * (size // 2) if name == "conv" else 0
        least = {
            "conv": max(BOX // 2 + 1, size + cells - 1 - grown),
            "patches": size + cells - 1,
            "scatter": STRIDE + 1,
        }[name]
        if min(shape[1:]) < least:
            raise FedfillError(
                f"features: found {name} in '{self.words}' with images of {shape[1]}x{shape[2]}; allowed there: at least {least} "
                "pixels to a side (image_size)"
            )
        if name == "scatter":
            self.fits(name, 2 * ANGLES * ANGLES * shape[0], (shape[1] + 2 * STRIDE) * (shape[2] + 2 * STRIDE))
            step: Scattering | Patches | RandomFilters = Scattering(shape)
        else:
            filters, kind = int(settings["filters"]), RandomFilters if name == "conv" else Patches
            places = math.prod(side + grown - size + 1 for side in shape[1:])
            self.fits(f"{name}({filters})", places, max(filters, shape[0] * size * size))
            step = kind(shape, filters, size, cells, settings["threshold"], self.stream(name))
        self.add(name, step)
        return step.features

    def lift(self, name: str, settings: Mapping[str, float], inputs: int) -> int:
        """A step from numbers to numbers; how many it gives."""
        d = int(settings["features"])
        if name == "fourier" and d % 2:
            raise FedfillError(f"features: found fourier({d}); allowed: an even number, of cosines and sines in pairs")
        rows = d // 2 if name == "fourier" else d
        self.fits(f"{name}({d})", rows, inputs)
        kind: type[Matrix] = {"project": Project, "fourier": Fourier, "relu": Rectified}[name]
        deviation = {"project": inputs**-0.5, "fourier": 1 / settings.get("width", 1), "relu": 1.0}[name]
        self.add(name, kind(inputs, rows, deviation, self.stream(name)))
        if name != "fourier":
            self.add("unit", Bounded())
        return d

    def fits(self, what: str, rows: int, columns: int) -> None:
        """Refuse what memory would not hold, before it is made."""
        if 4 * rows * columns > MOST_BYTES:
            raise FedfillError(
                f"features: found {what} in '{self.words}', a matrix of {rows:,} x {columns:,} numbers; allowed: at most "
                f"{MOST_BYTES // 2**20} MiB, that is {MOST_BYTES // 4 // columns:,} x {columns:,}"
            )

    def end(self, clip: bool) -> None:
        """The bound: length 1, or at most 1."""
        last = next(reversed(self.made))
        if clip and isinstance(self.made[last], Bounded):
            del self.made[last]
        if clip or not isinstance(self.made[last], Bounded | Fourier):
            self.add("bounded", Bounded(clip))
