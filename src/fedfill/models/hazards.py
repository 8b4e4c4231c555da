"""Proportional hazards as a network: from a row's features to the probabilities of the cells of its time and event."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.data.survival import grid_size
from fedfill.errors import FedfillError

SMALLEST = 1e-30
"""Of a hazard, so that its logarithm is a number."""
LARGEST = 50.0
"""Of a hazard's logarithm: exp of more is more than any row survives."""


class ProportionalHazards(nn.Module):
    """Cox's model on a grid, with leaving that depends on nothing.

    The hazard of a row at grid time k is h_k exp(beta' z). Whoever is still there after j grid times leaves before the next with
    probability c_j. So each row has a distribution over the 2G + 1 cells of `fedfill.data.survival`, which add up to 1.

    Args:
        features: Length of z.
        classes: 2G + 1.

    Attributes:
        risk: beta; begins with zeros.
        log_hazard: log h_k, ``[G]``; begins with a hazard of 1 over the grid.
        leaving: Log-odds of c_0, ..., c_{G-1}; begin with 1 / (G + 1) each.

    Raises:
        FedfillError: Where so many classes are the cells of no grid.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        size = grid_size(classes)
        if size is None:
            raise FedfillError(
                f"model: hazards learns times to an event, and found {classes} classes; allowed: a table whose schema has a target "
                "of the kind 'survival'"
            )
        self.risk = nn.Linear(features, 1, bias=False)
        nn.init.zeros_(self.risk.weight)
        self.log_hazard = nn.Parameter(torch.full((size,), -math.log(size)))
        self.leaving = nn.Parameter(torch.full((size,), -math.log(size)))

    def forward(self, z: Tensor) -> Tensor:
        """Logarithms of the cells' probabilities, ``[b, 2G + 1]``, of features ``[b, features]``."""
        log_hazard = (self.log_hazard + self.risk(z)).clamp(
            max=LARGEST
        )  # [b, G]; sums first: one is small where the other is large
        hazard = log_hazard.exp()
        total = functional.pad(hazard.cumsum(1), (1, 0))  # [b, G + 1]: up to each time, from none of them
        there = functional.pad(functional.logsigmoid(-self.leaving).cumsum(0), (1, 0))  # nobody left before the first
        event = there[1:] - total[:, :-1] + _log_event(hazard.clamp(min=SMALLEST))
        left = there + functional.pad(functional.logsigmoid(self.leaving), (0, 1)) - total
        return torch.cat([event, left], dim=1)


def _log_event(x: Tensor) -> Tensor:
    """log(1 - exp(-x))."""
    return torch.log(-torch.expm1(-x))
