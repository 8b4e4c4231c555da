"""What methods for times to an event share: the grid, the network that holds their result, and curves for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedfill.data.schema import Schema
from fedfill.errors import FedfillError
from fedfill.models.hazards import ProportionalHazards
from fedfill.runs.curves import FoundTable, StepCurve
from fedfill.statistics.survival import Curve, at_risk, split
from fedfill.tree import Weights

UNSEEN = "the rows say nothing of it"
"""Why an input has no coefficient."""
MOST = 1 - 1e-6
"""Of the probability of an event in the network."""


def grid_of(schema: Schema | None, algorithm: str) -> tuple[float, ...]:
    """The public times at which anything is told.

    Args:
        schema: Of the table.
        algorithm: For the error's sentence.

    Returns:
        G times.

    Raises:
        FedfillError: Where no target of times was agreed on.
    """
    if schema is None or schema.target.kind != "survival":
        found = "none" if schema is None else f"one whose target is of the kind '{schema.target.kind}'"
        raise FedfillError(
            f"schema_file: found {found} with {algorithm}, which learns times to an event; allowed: a schema with a target of the kind "
            "'survival', with the columns of the time and the event and a public grid of times"
        )
    return schema.target.grid


def require_hazards(model: nn.Module, algorithm: str) -> None:
    """Refuse another network than the one that holds hazards."""
    if not isinstance(getattr(model, "classifier", None), ProportionalHazards):
        raise FedfillError(f"model: found a {type(model).__name__} of its own kind with {algorithm}; allowed: hazards")


def with_hazards(
    weights: Weights, hazard: Tensor, leaving: Tensor, rows: float, exposed: float, risk: float = 0.0
) -> Weights:
    """The network's weights with hazards in them.

    What was never seen has a small probability all the same: over the whole grid half an event, and half a row that leaves.

    Args:
        weights: Of a network whose classifier is `ProportionalHazards`.
        hazard: h_k of some row, ``[G]``, 0 or more.
        leaving: Probability of leaving after each grid time but the last, ``[G]``, 0..1.
        rows: How many there were.
        exposed: The most that a grid time has at risk, each row counted by how many times that hazard its own is. So where there was
            an event, the hazard stays as it is, however far from 0 the inputs are.
        risk: Logarithm of how many times that of a row whose inputs are 0 the hazard is.

    Returns:
        All of them, in their own types.
    """
    least = 0.5 / (max(rows, 1.0) * len(hazard))
    unseen = 0.5 / ((exposed if exposed > 0 else 1.0) * len(hazard))
    found = {
        "classifier.log_hazard": hazard.clamp(min=unseen).log() - risk,
        "classifier.leaving": leaving.clamp(least, 1 - least).logit(),
    }
    return {**weights, **{name: x.to(weights[name]) for name, x in found.items()}}


def with_risk(weights: Weights, places: Sequence[int], beta: Tensor) -> Weights:
    """The same with coefficients ``[p]`` of the inputs at these places; those of the others are 0."""
    risk = torch.zeros_like(weights["classifier.risk.weight"])
    risk[0, list(places)] = beta.to(risk)
    return {**weights, "classifier.risk.weight": risk}


def left_shares(counts: Tensor) -> Tensor:
    """Of those who had no event by each grid time but the last, and of all at the start, the share that left before the next, ``[G]``."""
    events, censored = split(counts.double())
    n = torch.cat([counts.double().sum()[None], at_risk(counts.double())[:-1] - events[:-1]])
    return torch.where(n > 0, censored[:-1] / n.clamp(min=1e-9), 0.0).clamp(0, 1)


def cumulative(curve: Curve) -> Tensor:
    """The hazard at each grid time by which a row's S is the curve's: -log(1 - d_k / n_k), ``[G]``."""
    share = torch.where(curve.at_risk > 0, curve.events / curve.at_risk.clamp(min=1e-9), 0.0)
    return -torch.log1p(-share.clamp(0, MOST))


def drawn(label: str, curve: Curve, grid: tuple[float, ...], level: float) -> StepCurve:
    """A curve for people."""
    low, high = curve.band(level)
    return StepCurve(
        label, grid, curve.survival.tolist(), curve.se.tolist(), low.tolist(), high.tolist(), curve.at_risk.tolist(),
        curve.events.tolist(), rows=curve.rows,
    )  # fmt: skip


def times_between(low: float | None, high: float | None, grid: tuple[float, ...]) -> str:
    """Limits of a time for people; None: it is after the grid."""
    return " to ".join(f"after {grid[-1]:g}" if end is None else f"{end:g}" for end in (low, high))


def p_value(p: float) -> str:
    """A p-value for people."""
    return "below .0001" if p < 1e-4 else f"{p:.4f}"


def ratios(rows: Sequence[Mapping[str, Any]], level: float) -> FoundTable:
    """Hazard ratios for people.

    Args:
        rows: For each input its ``name``, ``coefficient``, ``hazard_ratio``, ``low``, ``high`` and ``p``; of one whose coefficient is
            None ``why``, and `UNSEEN` ones are left out.
        level: Of confidence of the limits.

    Returns:
        The table.
    """
    told = [row for row in rows if row["coefficient"] is not None or row["why"] != UNSEEN]
    cells = tuple(
        (f"{row['name']}: {row['why']}", "-", "-", "-")
        if row["coefficient"] is None
        else (row["name"], f"{row['hazard_ratio']:#.4g}", f"{row['low']:#.4g} to {row['high']:#.4g}", p_value(row["p"]))
        for row in told
    )
    left = len(rows) - len(told)
    title = "Hazard ratios, each for one more of the column's own unit"
    title += f"; inputs of which the rows say nothing are left out ({left})" if left else ""
    return FoundTable(title, ("column", "hazard ratio", f"{100 * level:g} % interval", "p"), cells)


def median(curve: Curve, grid: tuple[float, ...], level: float) -> dict[str, float | None]:
    """The first grid time by which half have had the event, with limits by the band (Brookmeyer and Crowley 1982); None: it is later."""

    def first(values: Tensor) -> float | None:
        return next((time for time, s in zip(grid, values.tolist(), strict=True) if s <= 0.5 + 1e-12), None)

    low, high = curve.band(level)
    return {"median": first(curve.survival), "median_low": first(low), "median_high": first(high)}
