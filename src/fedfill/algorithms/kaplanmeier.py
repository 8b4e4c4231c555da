"""Kaplan-Meier curves and the log-rank test from one sum of counts, with or without noise.

Kaplan and Meier 1958; Mantel 1966. See ``docs/algorithms/kaplanmeier.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Algorithm
from fedfill.algorithms._survival import (
    cumulative,
    drawn,
    grid_of,
    left_shares,
    median,
    p_value,
    require_hazards,
    times_between,
    with_hazards,
)
from fedfill.data.schema import Schema, agreed
from fedfill.errors import FedfillError, did_you_mean
from fedfill.privacy.releases import Release, unbounded
from fedfill.privacy.sums import BlockBound
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Sums, collect, contribute
from fedfill.runs.curves import Findings, FoundTable
from fedfill.statistics.noise import NoisySums
from fedfill.statistics.prefix import decoding
from fedfill.statistics.sums import GRID, Block, Statistic
from fedfill.statistics.survival import (
    Curve,
    LogRank,
    bound_of,
    encoding,
    kaplan_meier,
    log_rank,
    noisy_kaplan_meier,
)
from fedfill.tree import Tree, Weights

SITE = "site"
"""The group of a row that is its client."""


@dataclass(frozen=True)
class AskCounts(Message):
    """Server to client: the request for counts.

    Attributes:
        clients: How many clients are asked.
    """

    clients: int


@dataclass(frozen=True)
class Tests(Message):
    """Client to server: the log-rank test among its own rows.

    Attributes:
        sums: ``observed`` and ``expected`` events of each group ``[K]``, and ``covariance`` ``[K, K]``, float64.
    """

    declared: ClassVar[dict[str, Release]] = {
        "sums": unbounded("events of each group with what was expected, sent as they are")
    }

    sums: Weights


class KaplanMeier(NoisySums, Algorithm):
    """Survival curves with bands, of all rows or by group, and the log-rank test, from counts in one round.

    Use it to see how long it takes until an event, before any model. Counts bear noise well.
    """

    name = "kaplanmeier"
    network = "hazards"
    single_round = True
    trains = False

    group: str | None = None
    """Column by whose values rows are told apart, or site: by client; none: one curve."""
    strata: Literal["none", "site"] = "none"
    """Whether the log-rank test compares groups within each site, where sites have hazards of their own (site)."""
    band_level: float = Field(default=0.95, gt=0, lt=1)
    """Confidence of the bands."""

    def check_schema(self, schema: Schema | None) -> None:
        """Refuse data without times, and a group that is no column."""
        grid_of(schema, self.name)
        assert schema is not None
        if self.group is not None and self.group not in (SITE, *schema.columns):
            raise FedfillError(f"group: found '{self.group}'; {did_you_mean(self.group, [SITE, *schema.columns])}")
        if self.strata == "site" and self.group in (None, SITE):
            raise FedfillError(
                f"strata: found site with group={self.group or 'none'}; allowed with a column as group, whose values are compared within each site"
            )
        if self.strata == "site" and self.target_epsilon is not None:
            raise FedfillError(
                "strata: found site with a target_epsilon, and what the test sums has no bound for one row; allowed: none"
            )

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse words on noise that would not be heeded, and another network."""
        self.check_trust()
        require_hazards(model, self.name)
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def number_of_groups(self, schema: Schema, sites: int) -> int:
        """How many groups there are."""
        if self.group is None:
            return 1
        return sites if self.group == SITE else schema.columns[self.group].size

    def groups(self, schema: Schema, sites: Sequence[str]) -> list[str]:
        """What the groups are called; sites as their federation calls them."""
        if self.group is None:
            return ["all"]
        if self.group == SITE:
            return [f"site: {name}" for name in sites]
        return [f"{self.group}: {word}" for word in schema.columns[self.group].labels()]

    def group_of(self, client: Client) -> Tensor:
        """Each row's group, ``[n]`` int64."""
        labels = client.data.labels.cpu()
        if self.group is None or self.group == SITE:
            return torch.full_like(labels, 0 if self.group is None else client.id)
        schema = agreed(client.schema)
        codes = schema.codes_of(client.data.inputs, client.data.labels)
        return torch.from_numpy(codes[:, list(schema.names).index(self.group)].copy())

    def statistic(self, groups: int, size: int) -> Statistic:
        """Counts by group and cell; under noise encoded so that sums of them have little of it."""
        cells = 2 * size + 1
        matrix = torch.eye(cells, dtype=torch.float64) if self.target_epsilon is None else encoding(size)
        bound, replaced = bound_of(matrix)
        bits = 0 if self.target_epsilon is None else GRID
        block = Block(
            (groups, cells), BlockBound(bound, max(replaced, math.sqrt(2) * bound), groups * cells), bits=bits
        )

        def add(sums: Weights, z: Tensor, labels: Tensor) -> None:
            index = z[:, 0].long() * cells + labels.cpu()
            counts = torch.bincount(index, minlength=groups * cells).reshape(groups, cells).to(torch.float64)
            sums["counts"] += counts @ matrix.T

        return Statistic(
            {"counts": block}, add, "counts of rows by the grid time of their event, or until when there was none"
        )

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The network, the counts as they came, the noise in them, and the test within sites."""
        return {**super().server_state(initial), "counts": None, "std": 0.0, "tests": None}

    def round(self, server: Server, t: int) -> None:
        """Sum the counts; everything else follows from them."""
        state, schema = server.state, agreed(server.schema)
        size, names = len(schema.target.grid), self.groups(schema, server.names)
        statistic = self.statistic(len(names), size)
        message = AskCounts(server.clients)
        collected = collect(server, self.count, message, statistic, self.noise(statistic))
        state.counts, state.std = collected.sums["counts"], collected.stds["counts"]
        if self.strata == "site":
            k = len(names)
            shapes = {"observed": (k,), "expected": (k,), "covariance": (k, k)}
            template = {name: torch.empty(shape, dtype=torch.float64, device="meta") for name, shape in shapes.items()}
            state.tests = server.sum(range(server.clients), self.test, message, of={"sums": template})[1]["sums"]
        whole = self.curve(state.counts.sum(0), state.std * math.sqrt(len(names)))
        counts = state.counts.sum(0)
        if state.std:
            counts = (decoding(encoding(size)) @ counts).clamp(min=0)
        rows = float(counts.sum())
        state.weights = with_hazards(server.initial, cumulative(whole), left_shares(counts), rows, rows)

    @client_handler
    def count(self, client: Client, message: AskCounts) -> Sums:
        """Counts over the client's rows."""
        schema = agreed(client.schema)
        statistic = self.statistic(self.number_of_groups(schema, message.clients), len(schema.target.grid))
        records = [(self.group_of(client)[:, None].double(), client.data.labels)]
        return contribute(client, statistic, records, self.noise(statistic), message.clients)

    @client_handler
    def test(self, client: Client, message: AskCounts) -> Tests:
        """The log-rank test among the client's own rows."""
        schema = agreed(client.schema)
        k, cells = self.number_of_groups(schema, message.clients), len(schema.target.classes)
        index = self.group_of(client) * cells + client.data.labels.cpu()
        own = log_rank(torch.bincount(index, minlength=k * cells).reshape(k, cells))
        return Tests({name: x.contiguous() for name, x in vars(own).items()})

    def curve(self, counts: Tensor, std: float) -> Curve:
        """A curve of counts as they came."""
        return (
            noisy_kaplan_meier(counts, encoding(len(counts) // 2), std)
            if self.target_epsilon is not None
            else kaplan_meier(counts)
        )

    def findings(self, server: Server) -> Findings:
        """Curves by group, medians and the test."""
        state, schema = server.state, agreed(server.schema)
        grid, names = schema.target.grid, self.groups(schema, server.names)
        found = {name: self.curve(counts, state.std) for name, counts in zip(names, state.counts.cpu(), strict=True)}
        # a group without rows has no curve; under noise nobody knows which ones have none
        curves = {name: c for name, c in found.items() if state.std or float(c.at_risk[0]) > 0}
        groups: dict[str, Any] = {
            name: {
                "rows_at_risk": c.rows,
                "events": float(c.events.sum()),
                **median(c, grid, self.band_level),
                "survival_at_the_end": float(c.survival[-1]),
            }
            for name, c in curves.items()
        }
        figures: dict[str, Any] = {"groups": groups, "std_of_noise_in_counts": state.std}
        if self.group is not None and self.target_epsilon is None:
            kept = [k for k, name in enumerate(names) if name in curves]
            test = log_rank(state.counts.cpu()[kept]) if state.tests is None else LogRank(**dict(state.tests))
            figures["log_rank"] = {
                "chi_square": test.statistic,
                "degrees_of_freedom": test.freedom,
                "p": test.p,
                "stratified_by_site": state.tests is not None,
                "observed": dict(zip(curves if state.tests is None else names, test.observed.tolist(), strict=True)),
                "expected": dict(zip(curves if state.tests is None else names, test.expected.tolist(), strict=True)),
            }
        drawings = [drawn(name, c, grid, self.band_level) for name, c in curves.items()]
        return Findings(figures, drawings, self.band_level, tables=self.tables(figures, grid))

    def tables(self, figures: dict[str, Any], grid: tuple[float, ...]) -> list[FoundTable]:
        """Groups and the test for people."""
        end = f"{grid[-1]:g}"
        header = (
            "group",
            "rows",
            "events",
            "median",
            f"{100 * self.band_level:g} % interval",
            f"without the event at {end}",
        )
        rows = tuple(
            (
                name,
                f"{one['rows_at_risk']:,.0f}",
                f"{one['events']:,.0f}",
                f"after {end}" if one["median"] is None else f"{one['median']:g}",
                times_between(one["median_low"], one["median_high"], grid),
                f"{one['survival_at_the_end']:.3f}",
            )
            for name, one in figures["groups"].items()
        )
        found = [FoundTable("Time to the event", header, rows)]
        if (test := figures.get("log_rank")) is not None:
            title = "Log-rank test: whether all groups have one hazard"
            title += ", within each site" if test["stratified_by_site"] else ""
            cells = (str(self.group), f"{test['chi_square']:.4g}", str(test["degrees_of_freedom"]), p_value(test["p"]))
            found.append(FoundTable(title, ("groups", "chi-square", "degrees of freedom", "p"), (cells,)))
        return found
