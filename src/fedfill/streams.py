"""Named streams of randomness.

Every draw in fedfill comes from a stream that is derived from the experiment's seed and a name such as
``("fit", round, client)``, never from a global generator. So neither the order in which clients run, nor the engine,
nor the number of workers, nor a resume changes a result.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive(seed: int, *name: str | int) -> int:
    """A 63-bit seed for the stream of this name: the first bytes of SHA-256 over seed and name."""
    digest = hashlib.sha256(repr((int(seed), *name)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def torch_stream(seed: int, *name: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator at the start of the named stream, on `device`; on the CPU torch uses 32 bits of the seed."""
    return torch.Generator(device=device).manual_seed(derive(seed, *name))


def numpy_stream(seed: int, *name: str | int) -> np.random.Generator:
    """A numpy generator at the start of the named stream."""
    return np.random.default_rng(derive(seed, *name))
