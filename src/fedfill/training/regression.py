"""Figures of predicted numbers: R², and what a regression of the truth on the predictions says of their calibration."""

from __future__ import annotations

import torch
from torch import Tensor

FIGURES = {
    "rmse": "root mean squared error, in the target's unit",
    "r2": "R²",
    "calibration_slope": "calibration slope",
    "calibration_intercept": "calibration intercept, in the target's unit",
}
"""What is measured of a run's numbers: names in its summary, and words for people."""


def r_squared(predicted: Tensor, truth: Tensor) -> float | None:
    """The coefficient of determination, 1 - sum (y - p)^2 / sum (y - mean y)^2.

    Args:
        predicted: p, ``[n]``.
        truth: y, ``[n]``.

    Returns:
        At most 1; 0 of who always says the mean of these very numbers, less of who is worse. None where they don't vary.
    """
    y, p = truth.double(), predicted.double()
    spread = float((y - y.mean()).square().sum()) if len(y) else 0.0
    return 1 - float((y - p).square().sum()) / spread if spread else None


def r_squared_by(predicted: Tensor, truth: Tensor, sizes: list[int]) -> list[float | None]:
    """`r_squared` of consecutive parts, each against its own mean."""
    parts = zip(torch.split(predicted, sizes), torch.split(truth, sizes), strict=True)
    return [r_squared(p, y) for p, y in parts]


def rmse(predicted: Tensor, truth: Tensor) -> float | None:
    """Root mean squared error, in the unit of both, ``[n]`` each; None without samples."""
    return float((truth.double() - predicted.double()).square().mean().sqrt()) if len(truth) else None


def calibration(predicted: Tensor, truth: Tensor) -> tuple[float, float] | None:
    """Slope and intercept of the least-squares line of the truth over the predictions (Cox 1958; Steyerberg 2009, chapter 15).

    Args:
        predicted: ``[n]``.
        truth: ``[n]``.

    Returns:
        Slope and intercept, 1 and 0 of a calibrated model. A slope below 1 says that predictions are too far from each other.
        None where they don't vary.
    """
    y, p = truth.double(), predicted.double()
    centred = p - p.mean() if len(p) else p
    spread = float(centred.square().sum())
    if not spread:
        return None
    slope = float((centred * (y - y.mean())).sum()) / spread
    return slope, float(y.mean()) - slope * float(p.mean())
