"""The discrete Gaussian: noise on whole numbers.

Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020.

P(x) is proportional to exp(-x^2 / (2 sigma^2)) for whole x. Where sigma is many steps, the sum of independent ones is all but
one of the summed variance (Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism", ICML 2021): `distance`
bounds by how much. With `STEPS` steps and more the privacy of the sum is that of the real Gaussian to five digits of delta,
so that mu is sensitivity over sigma here too. No rounding touches what is protected: sums and noise are whole numbers.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfill.privacy.keyed import KeyedStream

STEPS = 1024.0
"""Steps of the grid that one share's standard deviation has at the least.

A proof needs 4, for the sum of shares to be a discrete Gaussian to 1e-65. From 1,024 on that one's delta also equals the
real one's: to a share of t^2 / (12 STEPS^2), where t = epsilon / mu + mu / 2 is how many deviations away the two differ.
"""
_PIECE = 2**20


def distance(sigma: float, shares: int) -> float:
    """How far the sum of so many discrete Gaussians lies from one of the summed variance, as a bound on |log(P / Q)|.

    Args:
        sigma: Of one share, in steps.
        shares: How many.

    Returns:
        10 sum_k exp(-2 pi^2 sigma^2 k / (k + 1)) for k from 1 to shares - 1, for each coordinate.
    """
    return 10 * math.fsum(math.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1)) for k in range(1, shares))


def grid_bits(std: float, bits: int = 0) -> int:
    """The coarsest grid 2^-b, b at least `bits`, on which a share's standard deviation has `STEPS` steps.

    Args:
        std: Of one share, above 0.
        bits: Of the grid on which what is summed lies already.

    Returns:
        b.
    """
    return max(bits, math.ceil(math.log2(STEPS / std)))


def discrete_gaussian(sigma: Tensor, stream: KeyedStream) -> Tensor:
    """Independent discrete Gaussians.

    From the discrete Laplace law by rejection, as in Canonne et al. (algorithms 1 to 3), with coins of 53 bits: each whole
    number has its probability to a factor of 1 +- 2^-45 or so, except that coins below 2^-53 never fall, which moves
    probabilities of 2^-50 at the most altogether.

    Args:
        sigma: In steps, 1 to 2^50 each, float64.
        stream: Of the draws, for nothing else.

    Returns:
        Whole numbers, int64, of the shape of `sigma`, on the CPU.

    Raises:
        ValueError: Where a sigma is out of range.
    """
    flat = sigma.detach().cpu().to(torch.float64).reshape(-1).numpy()
    if flat.size and not (flat.min() >= 1 and flat.max() <= 2.0**50):
        raise ValueError(f"a discrete Gaussian has 1 to 2^50 steps here, not {flat.min()} to {flat.max()}")
    found = np.empty(flat.shape, dtype=np.int64)
    for start in range(0, len(flat), _PIECE):
        _fill(found[start : start + _PIECE], flat[start : start + _PIECE], stream)
    return torch.from_numpy(found).reshape(sigma.shape)


def _fill(found: NDArray[np.int64], sigma: NDArray[np.float64], stream: KeyedStream) -> None:
    """Draw again and again where a draw was rejected."""
    left = np.arange(len(found))
    while left.size:
        s = sigma[left]
        t = np.floor(s) + 1
        y, kept = _laplace(t, stream)
        kept &= _falls(np.exp(-((np.abs(y) - s * s / t) ** 2) / (2 * s * s)), stream)
        found[left[kept]] = y[kept].astype(np.int64)
        left = left[~kept]


def _laplace(t: NDArray[np.float64], stream: KeyedStream) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Discrete Laplace numbers of scale t, as whole float64, and which of them were not rejected."""
    whole = t.astype(np.uint64)
    words = stream.words(len(t))
    most = np.uint64(2**64 - 1)
    kept = (
        words <= most - (most % whole + np.uint64(1)) % whole
    )  # below a multiple of t, so that no remainder is favoured
    u = (words % whole).astype(np.float64)
    kept &= _falls(np.exp(-u / t), stream)
    # P(v) = (1 - 1/e) e^-v by the inverse of its distribution function; the uniform is never 0
    uniform = (stream.words(len(t)) >> np.uint64(11)) * 2.0**-53 + 2.0**-54
    v = np.floor(-np.log(uniform))
    negative = (stream.words(len(t)) >> np.uint64(63)).astype(bool)
    y = u + t * v
    kept &= ~(negative & (y == 0))
    return np.where(negative, -y, y), kept


def _falls(probability: NDArray[np.float64], stream: KeyedStream) -> NDArray[np.bool_]:
    """Coins, each with its own probability."""
    return (stream.words(len(probability)) >> np.uint64(11)) * 2.0**-53 < probability
