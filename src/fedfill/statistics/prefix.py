"""Counts along an ordered axis under noise: encoded so that sums from one end to any place have little noise.

With independent noise on each count, a sum of G counts has the noise of G. Here C n is released in place of the counts n, with C
the square root of the matrix that makes sums from the start: a lower triangular Toeplitz matrix of f_0 = 1, f_k = f_{k-1} (2k-1)/(2k).
Then such a sum has no more than (1 + ln(G)/pi + ...) times the noise of one count, at the same guarantee (Fichtenberger, Henzinger and
Upadhyay, "Constant Matters", ICML 2023; Bennett 1977). One record adds one column of C to the sum, of length |(f_0, ..., f_{G-1})| at
the most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedfill.statistics.sums import GRID


def square_root(size: int) -> Tensor:
    """C, ``[size, size]`` float64, with entries rounded towards zero to multiples of 2^-12, so that encoded counts are exact."""
    k = torch.arange(1, size, dtype=torch.float64)
    f = torch.cat([torch.ones(1, dtype=torch.float64), torch.cumprod((2 * k - 1) / (2 * k), 0)])
    f = f.mul(2.0**GRID).trunc() * 2.0**-GRID
    index = torch.arange(size)
    lag = index[:, None] - index[None, :]
    return torch.where(lag >= 0, f[lag.clamp(min=0)], torch.zeros((), dtype=torch.float64))


def decoding(encoding: Tensor) -> Tensor:
    """C^-1, which makes counts of encoded counts; each entry's noise is correlated with the others' so that sums have little."""
    inverse: Tensor = torch.linalg.inv(encoding)
    return inverse
