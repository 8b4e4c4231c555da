"""Local training in bfloat16: layers compute in it, weights, gradients and the optimizer stay in float32; and where that is fast."""

from __future__ import annotations

import functools
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch.nn import functional

from fedfill.errors import FedfillError

Precision = Literal["float32", "bfloat16"]

FAST = 0.9
"""So much of float32's time a step may take at the most: where little is won, results are better left as they are."""
PAIRS = 5
"""Of steps that are timed, one in each precision."""


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """What a forward pass and its loss run in.

    Args:
        device: Of the model.
        precision: With bfloat16 torch casts what convolutions and matrix products take, and keeps in float32 what needs it.

    Returns:
        To enter once.
    """
    if precision == "float32":
        return nullcontext()
    # not with its cache of weights that were cast: all threads share it, and the end of one's step would empty another's, so
    # that gradients of a weight which is used twice would be added in bfloat16 or in float32 by chance
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def require_fast(device: torch.device) -> None:
    """Make sure that bfloat16 is faster than float32 on a device; an emulation of it is many times slower.

    Args:
        device: A processor is timed; a GPU's driver says whether it has bfloat16.

    Raises:
        FedfillError: Where it is not.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            if torch.cuda.is_bf16_supported(including_emulation=False):
                return
            name = torch.cuda.get_device_name()
        raise FedfillError(f"precision: found bfloat16, which the GPU {name} can only emulate; allowed: float32")
    if (times := slowdown()) > FAST:
        raise FedfillError(
            f"precision: found bfloat16, in which a training step takes {times:.2g} times as long as in float32 on this processor; "
            "allowed: float32"
        )


@functools.cache
def slowdown() -> float:
    """How many times as long as in float32 a step takes in bfloat16 on this machine's processor, in one thread.

    The step is forward and backward through a convolution and a linear layer, of the sizes that small networks have. It is
    timed once in a process, which takes a second where there is no bfloat16.

    Returns:
        The median over pairs of steps.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        images, kernel, matrix = (torch.ones(shape) for shape in ((64, 32, 14, 14), (32, 32, 3, 3), (64, 32 * 14 * 14)))
        images, kernel = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (images, kernel))
        weights = [kernel.requires_grad_(), matrix.requires_grad_()]

        def seconds(precision: Precision) -> float:
            start = time.perf_counter()
            with autocast(images.device, precision):
                found = functional.linear(functional.conv2d(images, kernel, padding=1).flatten(1), matrix)
            torch.autograd.grad(found.float().mean(), weights)
            return time.perf_counter() - start

        both: tuple[Precision, Precision] = ("bfloat16", "float32")
        pairs = [[seconds(precision) for precision in both] for _ in range(PAIRS + 1)][1:]  # the first warms up
        return statistics.median(lower / full for lower, full in pairs)
    finally:
        torch.set_num_threads(threads)
