"""Canary records for DP-SGD: images that bear a number, whose gradients are replaced by one coordinate each before the clip.

Everything behind that is the algorithm's own: which records are in a step, the clip, the sum, the noise, the number of steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from fedfill.data.samples import Samples
from fedfill.errors import FedfillError
from fedfill.privacy.bounds import Floats
from fedfill.streams import numpy_stream
from fedfill.tree import Weights

LONG = 5.0
"""Length of a canary's gradient before the clip, in multiples of the clip, so that a missing clip shows."""
_MARK = 16
_BITS = 20


class GradientCanaries:
    """Pairs of opposite canaries: the gradient of canary j is +C or -C along coordinate j, by its coin.

    Args:
        count: How many there are, at most 2^20.
        seed: Of the audit.
        replaced: Whether a coin of -1 stands for the opposite gradient, else for a gradient of zero, which is absence.

    Attributes:
        coins: +1 or -1, ``[count]``.
        scores: Sums over all steps of the noisy sum along each canary's coordinate, in multiples of the clip.
        steps: How many noisy sums were seen.
    """

    def __init__(self, count: int, seed: int, replaced: bool = True) -> None:
        self.coins = numpy_stream(seed, "audit", "coins").choice([-1, 1], count)
        self.scores: Floats = np.zeros(count)
        self.steps = 0
        self._signs = torch.tensor(self.coins if replaced else (self.coins + 1) // 2, dtype=torch.float32)
        self._mark = torch.tensor(numpy_stream(seed, "audit", "mark").random(_MARK) < 0.5)
        self._places = numpy_stream(seed, "audit", "coordinates")
        self._coordinates: Tensor | None = None

    def records(self, like: Samples, labels: Tensor) -> Samples:
        """The canaries as samples of such a type and shape, with these labels ``[count]``."""
        shape = tuple(like.inputs.shape[1:])
        size = int(np.prod(shape))
        if like.inputs.dtype != torch.uint8 or size < 2 + _MARK + _BITS:
            raise FedfillError(
                f"canaries: found inputs of {like.inputs.dtype} with {size} numbers each; allowed: images of whole numbers with {2 + _MARK + _BITS} or more"
            )
        numbers = torch.arange(len(self.coins))
        bits = (numbers[:, None] >> torch.arange(_BITS)) & 1
        flat = torch.zeros(len(numbers), size, dtype=torch.uint8)
        flat[:, 1] = 255
        flat[:, 2 : 2 + _MARK] = self._mark.to(torch.uint8) * 255
        flat[:, 2 + _MARK : 2 + _MARK + _BITS] = bits.to(torch.uint8) * 255
        return Samples(flat.reshape(-1, *shape).to(like.inputs.device), labels)

    def numbers(self, inputs: Tensor) -> Tensor:
        """Which canary each input of a batch is, -1 for none, ``[b]``, whatever range inputs were brought to."""
        flat = inputs.flatten(1)
        low, high = flat[:, :1], flat[:, 1:2]
        bright = flat[:, 2 : 2 + _MARK + _BITS] > (low + high) / 2
        mark = self._mark.to(flat.device)
        binary = ((flat[:, 2 : 2 + _MARK + _BITS] == low) | (flat[:, 2 : 2 + _MARK + _BITS] == high)).all(1)
        found = (bright[:, :_MARK] == mark).all(1) & binary & (high > low)[:, 0]
        number = (bright[:, _MARK:] * (1 << torch.arange(_BITS, device=flat.device))).sum(1)
        return torch.where(found & (number < len(self.coins)), number, -1)

    @contextmanager
    def inserted(self) -> Iterator[None]:
        """Replace the canaries' gradients in every noisy sum that is made meanwhile, and note what came out."""
        # each module that imported it has a name of its own for it
        holders = [(module, vars(module)["noisy_sum"]) for module in _holders()]
        for module, original in holders:
            module.noisy_sum = self._watched(original)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for module, original in holders:
                module.noisy_sum = original  # type: ignore[attr-defined]

    def _watched(self, original: Callable[..., Weights]) -> Callable[..., Weights]:
        def noisy_sum(
            loss: Callable[..., Tensor], weights: Weights, batch: tuple[Tensor, ...], clip: float,
            noise_multiplier: float, noise: torch.Generator,
        ) -> Weights:  # fmt: skip
            size = sum(w.numel() for w in weights.values())
            if self._coordinates is None:
                if size < len(self.coins):
                    raise FedfillError(
                        f"canaries: found {len(self.coins)}, and the network has {size} parameters; allowed: no more canaries than these"
                    )
                self._coordinates = torch.from_numpy(self._places.permutation(size)[: len(self.coins)])
            numbers = self.numbers(batch[0])
            which = numbers.clamp_min(0).cpu()
            place = self._coordinates[which].to(numbers.device)
            strength = self._signs[which].to(numbers.device) * LONG * clip

            def canaried(w: Weights, number: Tensor, at: Tensor, length: Tensor, *sample: Tensor) -> Tensor:
                flat = torch.cat([tensor.reshape(-1) for tensor in w.values()])
                return torch.where(number >= 0, length * flat.gather(0, at[None])[0], loss(w, *sample))

            total = original(canaried, weights, (numbers, place, strength, *batch), clip, noise_multiplier, noise)
            flat = torch.cat([total[name].reshape(-1) for name in weights]).double().cpu()
            self.scores = self.scores + flat[self._coordinates].numpy() / clip
            self.steps += 1
            return total

        return noisy_sum


def _holders() -> list[ModuleType]:
    return [module for module in [*sys.modules.values()] if callable(vars(module).get("noisy_sum"))]
