"""Cox regression over all sites, from sums over risk sets or, stratified by site, from each site's own score.

Cox 1972; Breslow 1974. See ``docs/algorithms/cox.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from scipy.special import ndtr
from torch import Tensor, nn

from fedfill.algorithms import Algorithm
from fedfill.algorithms._survival import (
    UNSEEN,
    drawn,
    grid_of,
    left_shares,
    ratios,
    require_hazards,
    with_hazards,
    with_risk,
)
from fedfill.data.schema import Schema, agreed
from fedfill.errors import FedfillError
from fedfill.privacy.packed import pack, unpack
from fedfill.privacy.releases import Release, unbounded
from fedfill.protocol.client import BoundHandler, Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.runs.curves import Findings, StepCurve
from fedfill.statistics.cox import (
    CoxFit,
    RiskSums,
    Score,
    breslow,
    coarseness,
    hazard_ratio,
    moments_of,
    newton,
    risk_sums,
    score,
    score_of,
    times_at_risk,
)
from fedfill.statistics.survival import Pairs, at_risk, concordance, concordance_of_counts, kaplan_meier
from fedfill.tree import Tree, Weights

RANGES = 100
"""Of risk, of one width, by which rows are counted."""
REACH = 4.0
"""How far they go to each side of the mean of all rows' risks, in their standard deviations; who is beyond is in the outermost one."""
ROUNDED = 1e-6
"""Standard deviation of an input below which too little is left of its values: inputs are float32, and near 1 where bounds are wide."""
NOTHING = torch.zeros(0, dtype=torch.float64)
COARSE = 0.05
"""Share of those at risk who have their event at the same grid time, from which it is told that coefficients shrink."""
COARSER = (
    "grid: on average {:.0%} of those at risk have their event at the same grid time, and coefficients are nearer to 0 by about as much; "
    "a finer grid prevents it"
)
NO_EPSILON = (
    "Cox regression sends sums without a bound for one row, so that there is no epsilon: whoever sees a site's own sums can tell rows "
    "that leave alone between two times of the grid. For a guarantee fit it on a synthetic table (mst; docs/survival.md)."
)


@dataclass(frozen=True)
class AskAt(Message):
    """Server to client: the request for sums at some coefficients.

    Attributes:
        beta: ``[p]`` float64, of the inputs that are used.
        centre: What is taken off these inputs first, ``[p]`` float64; empty: nothing, or the site's own choice.
    """

    beta: Tensor
    centre: Tensor


@dataclass(frozen=True)
class AskRanks(Message):
    """Server to client: the request for rows by range of risk.

    Attributes:
        beta: ``[p]`` float64, of the inputs that are used.
        ends: Where the ranges begin and end, ``[2]`` float64.
    """

    beta: Tensor
    ends: Tensor


@dataclass(frozen=True)
class CoxSums(Message):
    """Client to server: sums over its rows, or over its risk sets.

    Attributes:
        sums: By name, float64.
    """

    declared: ClassVar[dict[str, Release]] = {
        "sums": unbounded("sums of a Cox regression, sent as they are; nothing bounds what one row adds")
    }

    sums: Weights


@dataclass(frozen=True)
class Input:
    """An input that has a coefficient.

    Attributes:
        place: Among the network's inputs.
        name: For people.
        unit: What one of the column's own units is on the input's scale.
    """

    place: int
    name: str
    unit: float


class Cox(Algorithm):
    """Cox's proportional hazards, equal to the regression on all rows together, in a few small exchanges.

    Use it to see which columns go with an earlier event, and by how much. It has no epsilon.
    """

    name = "cox"
    network = "hazards"
    single_round = True

    strata: Literal["none", "site"] = "none"
    """Whether each site has a baseline hazard of its own, and sends no sums over risk sets (site)."""
    fewest: int = Field(default=5, ge=1)
    """Rows at risk that a site must have at each time of the grid at which it has any, or nothing is sent."""
    most_steps: int = Field(default=25, ge=1, le=1000)
    """Coefficients that are tried at the most."""
    band_level: float = Field(default=0.95, gt=0, lt=1)
    """Confidence of limits and bands."""

    def check_schema(self, schema: Schema | None) -> None:
        """Refuse data without times."""
        grid_of(schema, self.name)

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse another network."""
        require_hazards(model, self.name)
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The network, the fit, counts by cell and by range of risk, hazards in the middle of the rows, pairs of rows within sites."""
        found = dict.fromkeys(("fit", "counts", "by_risk", "ends", "hazard", "pairs"))
        return {**super().server_state(initial), **found}

    def round(self, server: Server, t: int) -> None:
        """Newton's steps until nothing changes, then how well the risks rank."""
        schema, state = agreed(server.schema), server.state
        inputs, size = design(schema), len(schema.target.grid)
        server.warn(NO_EPSILON)
        if self.strata == "site":
            fit = self.fitted(server, lambda beta: self.summed_scores(server, beta), len(inputs))
            found = self.total(server, self.pairs_within, AskAt(fit.beta, NOTHING), {"pairs": (3,)})
            weights = server.initial  # sites keep their hazards to themselves: the network ranks, and tells no more
        else:
            shapes = {"cells": (2 * size + 1,), "event_sum": (len(inputs),), "sum": (len(inputs),)}
            first = self.total(server, self.counts, AskAt(NOTHING, NOTHING), shapes)
            events = first["cells"][:size]
            if (tied := coarseness(events, at_risk(first["cells"]))) > COARSE:
                server.warn(COARSER.format(tied))
            centre = (first["sum"] / at_risk(first["cells"])[0].clamp(min=1)).float().double()
            event_sum = first["event_sum"] - events.sum() * centre
            left = at_risk(first["cells"]) - torch.cat([at_risk(first["cells"])[1:], torch.zeros(1)])
            if few := int(((left > 0) & (left < self.fewest)).sum()):
                server.warn(
                    f"At {few} of {size} times of the grid fewer than {self.fewest} rows leave, all sites together: the difference of two "
                    "sums tells what these are. A coarser grid prevents it."
                )

            asked: list[RiskSums] = []  # the first is at coefficients of 0, where each row counts as one

            def at(beta: Tensor) -> Score:
                asked.append(self.risk_sets(server, AskAt(beta, centre), size))
                return score(asked[-1], events, event_sum, beta)

            fit = self.fitted(server, at, len(inputs))
            mean, covariance = moments_of(asked[0])
            self.warn_of_rounding(server, covariance)
            middle, reach = fit.beta @ (centre + mean), REACH * (fit.beta @ covariance @ fit.beta).clamp(min=0).sqrt()
            ends = torch.stack([middle - reach, middle + reach])
            wanted = {"pairs": (3,), "by_risk": (RANGES, 2 * size + 1)}
            found = self.total(server, self.ranks, AskRanks(fit.beta, ends), wanted)
            sums = self.risk_sets(server, AskAt(fit.beta, centre), size)
            hazard, exposed, away = breslow(sums, events), float(sums.s0.max()), fit.beta @ centre
            state.counts, state.hazard, state.by_risk = first["cells"], hazard, found["by_risk"]
            state.ends = ends - away
            leaving, rows = left_shares(first["cells"]), float(first["cells"].sum())
            weights = with_hazards(server.initial, hazard, leaving, rows, exposed, float(away))
        state.fit = {name: x if isinstance(x, Tensor) else float(x) for name, x in vars(fit).items()}
        state.pairs = found["pairs"]
        state.weights = with_risk(weights, [one.place for one in inputs], fit.beta)

    def fitted(self, server: Server, at: Callable[[Tensor], Score], p: int) -> CoxFit:
        """The coefficients, with a warning where the steps came to no end."""
        fit = newton(at, p, self.most_steps)
        if not fit.converged:
            server.warn(
                f"most_steps: after {fit.asked} the likelihood still grows; where a column tells the event from none it does so for ever, and "
                f"its coefficient means nothing. Least is known of '{design(agreed(server.schema))[int(fit.se.argmax())].name}'."
            )
        return fit

    def summed_scores(self, server: Server, beta: Tensor) -> Score:
        """Likelihood, gradient and information of all sites, each within itself."""
        p = len(beta)
        shapes = {"log_likelihood": (1,), "gradient": (p,), "information": (p * (p + 1) // 2,)}
        found = self.total(server, self.scores, AskAt(beta, NOTHING), shapes)
        return Score(float(found["log_likelihood"]), found["gradient"], unpack(found["information"]))

    def risk_sets(self, server: Server, message: AskAt, size: int) -> RiskSums:
        """The sums over risk sets, of all sites."""
        p = len(message.beta)
        shapes = {"s0": (size,), "s1": (size, p), "s2": (size, p * (p + 1) // 2)}
        return RiskSums(**self.total(server, self.risks, message, shapes))

    def warn_of_rounding(self, server: Server, covariance: Tensor) -> None:
        """Name the columns whose bounds are so wide that rounding leaves too little of what rows differ in."""
        spread = covariance.diagonal().clamp(min=0).sqrt().tolist()
        inputs = design(agreed(server.schema))
        if few := [f"'{one.name}'" for one, own in zip(inputs, spread, strict=True) if 0 < own < ROUNDED]:
            server.warn(
                f"schema: the rows' values of {', '.join(few)} lie within a millionth of what the bounds allow, so that rounding changes the "
                "coefficient; give narrower bounds, or the schema that a run of moments writes"
            )

    def total(
        self, server: Server, handler: BoundHandler, message: Message, shapes: Mapping[str, tuple[int, ...]]
    ) -> Weights:
        """What all sites' sums come to; they must be those of the same sites each time."""
        template = {name: torch.empty(shape, dtype=torch.float64, device="meta") for name, shape in shapes.items()}
        replies, sums = server.sum(range(server.clients), handler, message, of={"sums": template})
        if len(replies) < server.clients:
            missing = [i for i in range(server.clients) if i not in replies]
            raise FedfillError(
                f"cox: {len(missing)} of {server.clients} sites did not answer (the first is {missing[0]}), and the steps need the sums of the "
                "same rows each time; 'fedfill resume' asks again"
            )
        return {name: x.cpu() for name, x in sums["sums"].items()}

    # What a site answers

    def rows(self, client: Client) -> tuple[Tensor, Tensor, int]:
        """Covariates ``[n, p]``, cells ``[n]`` and G, where enough are at risk at each time of the grid."""
        schema = agreed(client.schema)
        places, grid = [one.place for one in design(schema)], schema.target.grid
        cells = client.data.labels.cpu()
        last = times_at_risk(cells, len(grid))
        n = (last[None, :] > torch.arange(len(grid))[:, None]).sum(1)
        few = (n > 0) & (n < self.fewest)  # nobody's sums are 0, and tell of nobody
        if self.strata == "none" and bool(few.any()):
            enough = int(few.nonzero()[0])
            until = f"{self.fewest} or more, as with a grid that ends at {grid[enough - 1]:g}; or " if enough else ""
            raise FedfillError(
                f"fewest: client {client.id} has {int(n[enough])} rows at risk at {grid[enough]:g}, and {self.fewest} are needed; allowed: "
                f"{until}strata=site, which sends no sums over those at risk; or a smaller number"
            )
        return client.data.inputs.flatten(1).cpu().double()[:, places], cells, len(grid)

    @client_handler
    def counts(self, client: Client, message: AskAt) -> CoxSums:
        """Rows by cell, and the sums of the covariates of those with an event, and of those at risk at the first grid time.

        Of all rows it would tell, with the sums over that risk set, those who leave before.
        """
        x, cells, size = self.rows(client)
        counts = torch.bincount(cells, minlength=2 * size + 1).double()
        return CoxSums(
            {"cells": counts, "event_sum": x[cells < size].sum(0), "sum": x[times_at_risk(cells, size) > 0].sum(0)}
        )

    @client_handler
    def risks(self, client: Client, message: AskAt) -> CoxSums:
        """Sums over the risk set at each time of the grid."""
        x, cells, size = self.rows(client)
        return CoxSums(dict(vars(risk_sums(x - message.centre.cpu(), cells, size, message.beta.cpu()))))

    @client_handler
    def scores(self, client: Client, message: AskAt) -> CoxSums:
        """The site's own likelihood, gradient and information."""
        own = score_of(*self.rows(client), message.beta.cpu())
        sums = {"gradient": own.gradient, "information": pack(own.information)}
        return CoxSums({"log_likelihood": torch.tensor([own.log_likelihood], dtype=torch.float64), **sums})

    @client_handler
    def pairs_within(self, client: Client, message: AskAt) -> CoxSums:
        """Pairs of the site's own rows, and how many of them the risks rank rightly."""
        return CoxSums({"pairs": self.own_pairs(client, message.beta)[0]})

    @client_handler
    def ranks(self, client: Client, message: AskRanks) -> CoxSums:
        """The same, and rows by range of risk and cell."""
        pairs, risk, cells = self.own_pairs(client, message.beta)
        low, high = message.ends.tolist()
        place = ((risk - low) / max(high - low, 1e-12) * RANGES).long().clamp(0, RANGES - 1)
        width = len(agreed(client.schema).target.classes)
        by_risk = torch.bincount(place * width + cells, minlength=RANGES * width).reshape(RANGES, width)
        return CoxSums({"pairs": pairs, "by_risk": by_risk.double()})

    def own_pairs(self, client: Client, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Counts of pairs ``[3]``, risks and cells ``[n]``."""
        x, cells, size = self.rows(client)
        risk = x @ beta.cpu()
        pairs = concordance(risk, cells, size)
        return torch.tensor([pairs.right, pairs.tied, pairs.comparable], dtype=torch.float64), risk, cells

    # What is told

    def findings(self, server: Server) -> Findings:
        """Coefficients with limits, how well they rank, and curves of thirds by risk beside the model's."""
        state, schema = server.state, agreed(server.schema)
        fit = CoxFit(**dict(state.fit))
        z = NormalDist().inv_cdf((1 + self.band_level) / 2)
        inputs = design(schema)
        rows = [self.row(inputs, fit, k, z) for k in range(len(inputs))]
        within = Pairs(*state.pairs.tolist())
        figures: dict[str, Any] = {
            "coefficients": rows,
            "log_likelihood": fit.log_likelihood,
            "null_log_likelihood": fit.null_log_likelihood,
            "steps": int(fit.asked),
            "converged": bool(fit.converged),
            "c_index_within_sites": within.index,
        }
        tables = (ratios(rows, self.band_level),)
        if state.by_risk is None:
            return Findings(figures, tells="ranks", tables=tables)
        counts = state.counts.cpu()
        figures |= {
            "rows": int(counts.sum()),
            "events": int(counts[: len(schema.target.grid)].sum()),
            "c_index_by_ranges": concordance_of_counts(state.by_risk.cpu()).index,
        }
        return Findings(figures, self.thirds(server, schema), self.band_level, tables=tables)

    def row(self, inputs: list[Input], fit: CoxFit, k: int, z: float) -> dict[str, Any]:
        """What is told of a coefficient, for one of the column's own units."""
        one = inputs[k]
        beta, se = float(fit.beta[k]) * one.unit, float(fit.se[k]) * one.unit
        if not bool(fit.known[k]):
            alike = [f"'{inputs[j].name}'" for j in fit.mixed_with(k)]
            why = f"no row tells it apart from {', '.join(alike)}" if alike else UNSEEN
            return {"name": one.name, "coefficient": None, "why": why}
        ratio, low, high = hazard_ratio(beta, se, z)
        p = float(2 * ndtr(-abs(beta) / se)) if se else 1.0
        return {
            "name": one.name,
            "coefficient": beta,
            "se": se,
            "p": p,
            "hazard_ratio": ratio,
            "low": low,
            "high": high,
        }

    def thirds(self, server: Server, schema: Schema) -> list[StepCurve]:
        """Kaplan-Meier curves of three ranges of risk with equally many rows, as far as ranges allow, and the model's mean there."""
        by_risk, grid, hazard = server.state.by_risk.cpu(), schema.target.grid, server.state.hazard.cpu()
        low, high = server.state.ends.tolist()
        middle = low + (torch.arange(RANGES, dtype=torch.float64) + 0.5) / RANGES * (high - low)
        n = by_risk.sum(1)
        part = ((n.cumsum(0) - n / 2) / n.sum().clamp(min=1) * 3).long().clamp(0, 2)
        curves = []
        for third, label in enumerate(("lowest risk", "middle risk", "highest risk")):
            mine = part == third
            if not float(n[mine].sum()):
                continue
            curves.append(drawn(label, kaplan_meier(by_risk[mine].sum(0)), grid, self.band_level))
            said = torch.exp(-middle[mine].exp()[:, None] * hazard.cumsum(0)[None, :])  # [ranges, G]
            mean = (n[mine] / n[mine].sum()) @ said
            curves.append(StepCurve(f"model, {label}", grid, mean.tolist(), model=True))
        return curves


def design(schema: Schema) -> list[Input]:
    """The inputs that have a coefficient: all but the first word of each category, with which the others are compared."""
    encoding, found = schema.encoding(), []
    for place, name in enumerate(encoding.numbers):
        found.append(Input(place, name, 1 / encoding.deviation[place]))
    place = len(encoding.numbers)
    for name, words in encoding.words.items():
        named = [Input(place + k, f"{name}: {word} against {words[0]}", 1.0) for k, word in enumerate(words)]
        found += named[1:]
        place += len(words)
    return found
