"""Noise and coins from a keyed cryptographic stream: ChaCha20 (RFC 8439) under a key of HKDF-SHA256 (RFC 5869).

Whoever lacks the key can't tell the stream from random bits. The same key and name give the same draws, so that noise that
is asked for once more tells nothing more.

A normal number is made of 64 bits by the inverse distribution function: 1 bit is the sign, 53 are a uniform u in (0, 1), and
the number is the u/2 quantile. No number is longer than 8.375, which cuts tails of 2^-55 on each side, and neighbouring values
of u make steps of less than 2^-51 in the middle, where most numbers lie. In float64 that is not the real-valued normal
law that the account is about; `fedfill.privacy.discrete` has noise on whole numbers, whose law it is to some 2^-50.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

_PIECE = 2**20
"""Numbers at a time, so that what they are made of stays small."""


class KeyedStream:
    """Draws that nobody can follow who does not have the key; each goes on where the one before ended.

    Args:
        key: 32 bytes, or more.
        *name: Of the stream: another name, another stream.
        device: Where tensors lie; the draws are the same everywhere.
    """

    def __init__(self, key: bytes, *name: str | int, device: torch.device | str = "cpu") -> None:
        if len(key) < 32:
            raise ValueError(f"a key has 32 bytes or more, not {len(key)}")
        self.device = torch.device(device)
        own = HKDF(SHA256(), 32, salt=None, info=b"fedfill stream " + repr(name).encode()).derive(key)
        self._cipher = Cipher(algorithms.ChaCha20(own, bytes(16)), mode=None).encryptor()

    def words(self, n: int) -> NDArray[np.uint64]:
        """Uniform whole numbers of 64 bits, ``[n]``."""
        return np.frombuffer(self._cipher.update(bytes(8 * n)), dtype="<u8").astype(np.uint64, copy=False)

    def uniform(self, shape: int | Sequence[int]) -> Tensor:
        """Uniform multiples of 2^-53 from 0 to below 1, float64."""
        return self._made(shape, lambda words: (words >> np.uint64(11)) * 2.0**-53)

    def normal(self, shape: int | Sequence[int]) -> Tensor:
        """Standard normal numbers, float64."""
        return self._made(shape, normal_of)

    def _made(self, shape: int | Sequence[int], make: object) -> Tensor:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        n = math.prod(shape)
        found = np.empty(n)
        for start in range(0, n, _PIECE):
            piece = found[start : start + _PIECE]
            piece[:] = make(self.words(len(piece)))  # type: ignore[operator]
        return torch.from_numpy(found).reshape(shape).to(self.device)


def normal_of(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The normal numbers of words of 64 bits: the highest bit is the sign, the next 53 the size."""
    from scipy.special import ndtri  # here: SciPy takes a tenth of the start of a program that draws no such noise

    u = ((words & np.uint64(2**63 - 1)) >> np.uint64(10)) * 2.0**-53 + 2.0**-54
    sign = np.where(words >> np.uint64(63), 1.0, -1.0)
    return sign * -ndtri(u / 2)  # type: ignore[no-any-return]


def normal(stream: torch.Generator | KeyedStream, shape: Sequence[int], device: torch.device) -> Tensor:
    """Standard normal numbers, float32: of a keyed stream, rounded, or of one of torch's."""
    if isinstance(stream, KeyedStream):
        return stream.normal(shape).float().to(device)
    return torch.empty(tuple(shape), device=device).normal_(generator=stream)


def seeded(seed: int, *name: str | int, device: torch.device | str = "cpu") -> KeyedStream:
    """The stream of a simulation, whose key is made of the seed: who has the seed has the noise.

    Args:
        seed: Of the experiment.
        *name: Of the stream.
        device: As in `KeyedStream`.

    Returns:
        The stream at its start.
    """
    return KeyedStream(hashlib.sha256(f"fedfill seed {int(seed)}".encode()).digest(), *name, device=device)
