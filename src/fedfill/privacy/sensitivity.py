"""How far one record can move the mean of latent codes."""

from __future__ import annotations

import math

from fedfill.errors import FedfillError, did_you_mean

BOUNDS = ("none", "sigmoid", "clip")
"""How latent codes can be bounded; without a bound, no noise gives a guarantee."""


def mean_sensitivity(latent_dim: int, count: int, bound: str = "sigmoid", norm: float | None = None) -> float:
    """How far one record can move the mean of latent codes when it is replaced by another of the same class.

    For several classes take the smallest count: the record is in one class alone. The figure is right only where one
    record's code doesn't depend on the other records: a fixed encoder in evaluation mode.

    Args:
        latent_dim: Coordinates of a latent code, l.
        count: Records in the mean, m.
        bound: ``"sigmoid"`` for coordinates in 0..1, ``"clip"`` for codes clipped to l2 length `norm`, ``"none"``.
        norm: The length C for ``"clip"``.

    Returns:
        ``sqrt(l) / m`` (FedDPMS's 1 / m is that of one coordinate), ``2 C / m``, or infinity without a bound.

    Raises:
        FedfillError: Where `bound` is unknown, or `norm` is missing or not above 0.
        ValueError: Where `latent_dim` or `count` is below 1.
    """
    if latent_dim < 1 or count < 1:
        raise ValueError(f"a mean needs a coordinate and a record, not {latent_dim} and {count}")
    if bound == "none":
        return math.inf
    if bound == "sigmoid":
        return math.sqrt(latent_dim) / count
    if bound == "clip":
        if norm is None or not 0 < norm < math.inf:
            raise FedfillError(f"the norm to clip latent codes to is {norm}; it must be a finite number above 0")
        return 2 * norm / count
    raise FedfillError(f"the bound of the latent codes is '{bound}'; {did_you_mean(bound, BOUNDS)}")


def label_change_sensitivity(
    latent_dim: int, count: int, other_count: int, bound: str = "sigmoid", norm: float | None = None
) -> float:
    """How far one record can move the means of all classes together when its class may change as well.

    The record leaves one class and enters another, so two means move. The figure is conservative: the mean that gains a
    record is charged as if it had one fewer. It covers the means alone: class sizes, and with them which classes are
    released, now depend on the record too.

    Args:
        latent_dim: Coordinates of a latent code.
        count: Records of the one class; for the worst case, of the smallest released class.
        other_count: Records of the other; for the worst case, of the second smallest.
        bound: As for `mean_sensitivity`.
        norm: As for `mean_sensitivity`.

    Returns:
        ``sqrt(1 / count**2 + 1 / other_count**2)`` times the range of a latent code: at most ``sqrt(2)`` times the
        `mean_sensitivity` of the smaller class.

    Raises:
        FedfillError: As for `mean_sensitivity`.
        ValueError: As for `mean_sensitivity`.
    """
    return math.hypot(
        mean_sensitivity(latent_dim, count, bound, norm), mean_sensitivity(latent_dim, other_count, bound, norm)
    )
