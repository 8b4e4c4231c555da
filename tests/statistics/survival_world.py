"""Records for tests of survival analysis."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfill.data.survival import cells

SITE = np.array([1] * 5 + [2] * 5)
TIMES = np.array([2, 3, 3, 5, 8, 1, 3, 4, 5, 7], dtype=np.float64)
EVENTS = np.array([1, 1, 0, 1, 0, 1, 1, 0, 1, 1], dtype=bool)
X = np.array([0, 1, 0, 1, 0, 1, 1, 0, 0, 1], dtype=np.float64)
GRID = (1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 8.0)
"""Ten records of two sites, worked by hand."""


def counted(found: NDArray[np.int64], size: int) -> Tensor:
    """Counts of cells, ``[2G + 1]``."""
    return torch.bincount(torch.from_numpy(found), minlength=2 * size + 1).double()


def hand() -> Tensor:
    return counted(cells(TIMES, EVENTS, GRID), len(GRID))


def drawn(
    n: int, p: int, seed: int, steps: int = 40
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64]]:
    """Times on whole numbers, so with many ties, events and covariates of a Cox model."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, p))
    beta = np.linspace(0.8, -0.5, p)
    event = draw.exponential(np.exp(-x @ beta) * 20)
    left = draw.uniform(0, steps, n)
    times = np.ceil(np.minimum(event, left))
    return times, event <= left, x
