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


def secret_stream(key: bytes, *name: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator that nobody can follow who does not have the key.

    The same key and name give the same draws, so that noise that is asked for once more tells nothing more. On the CPU
    all 19,968 bits of the generator's state come from the key, by SHAKE-256, where a seed would fill 32.

    Args:
        key: 32 random bytes.
        *name: Of the stream.
        device: Where it draws.

    Returns:
        The generator at its start.
    """
    generator = torch.Generator(device=device)
    digest = hashlib.shake_256(key + repr(name).encode())
    if generator.device.type != "cpu":
        return generator.manual_seed(int.from_bytes(digest.digest(8), "big") >> 1)
    generator.manual_seed(0)
    state = generator.get_state()
    words = np.frombuffer(digest.digest(_TWISTER_WORDS * 4), dtype=np.uint32).astype(np.uint64)
    place = slice(_TWISTER_OFFSET, _TWISTER_OFFSET + _TWISTER_WORDS * 8)
    state[place] = torch.from_numpy(words.view(np.uint8).copy())
    return generator.set_state(state)


# torch keeps the Mersenne twister's 624 words of 32 bits in 64 bits each, behind seed, position and two flags
_TWISTER_WORDS, _TWISTER_OFFSET = 624, 24
