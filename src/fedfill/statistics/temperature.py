"""How sharp a softmax of least-squares scores may be, where nothing but their means and variance is known.

The worst of all distributions with a given mean and variance bounds the cross-entropy where a record's margins over
all other classes are alike, as in distributionally robust optimisation (Scarf 1958, "A min-max solution of an
inventory problem"; Delage and Ye 2010). The use for the scores of a ridge regression is ours, and a rule, no bound.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import softplus

SCALES = torch.logspace(0, 3, 301, dtype=torch.float64)
"""What is tried: from 1 to 1,000."""
SHARES = torch.logspace(-9, -1e-3, 400, dtype=torch.float64)
"""Probabilities of the upper of two points."""


def worst_cross_entropy(margin: float, variance: float, classes: int) -> torch.Tensor:
    """For each of `SCALES`, the largest mean of log(1 + (C - 1) exp(-scale x)) over all margins x with these two moments.

    A parabola that lies above the loss touches it at two points at the most, since the loss's second derivative has one
    peak. So the worst has two points, as Scarf's has for the hinge: one of them takes the records that are wrong.

    Args:
        margin: The mean of a record's score for its own class less that for another.
        variance: Of that difference, 0 or more.
        classes: C, two or more.

    Returns:
        ``[301]``, in nats.
    """
    share, deviation = SHARES[:, None], math.sqrt(variance)
    wrong = -margin + deviation * ((1 - share) / share).sqrt()
    right = -margin - deviation * (share / (1 - share)).sqrt()
    low, high = (softplus(math.log(classes - 1) + SCALES * points) for points in (right, wrong))
    return (share * high + (1 - share) * low).max(0).values


def robust_scale(margin: float, variance: float, classes: int) -> float:
    """The scale with the least `worst_cross_entropy`; 1 where there is one class, or no margin.

    Scores that are Gaussian would allow for the larger margin / (variance / 2). Real ones have records that are far off,
    and there it costs most.
    """
    if classes < 2 or margin <= 0:
        return 1.0
    return float(SCALES[worst_cross_entropy(margin, max(variance, 0.0), classes).argmin()])
