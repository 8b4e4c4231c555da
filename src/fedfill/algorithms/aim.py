"""AIM: a private synthetic table from the counts that its model knows least of; McKenna, Mullins, Sheldon and Miklau, 2022, made federated.

See ``docs/algorithms/aim.md``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field

from fedfill.algorithms._tables import AskCounts, SyntheticTable, kept, tables_in
from fedfill.data.schema import agreed
from fedfill.errors import FedfillError
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Sums, collect
from fedfill.statistics.marginals import Clique, Network, Noisy, Table, marginal_counts, total_of
from fedfill.statistics.markov import cells, elimination, fitted, marginal
from fedfill.tree import Tree, Weights

MEGABYTE = 2**20 / 8
"""Cells in float64."""
NOTHING = 1e-6
"""A gap without noise that is smaller, in shares of all records, is rounding."""


@dataclass(frozen=True)
class AskTable(AskCounts):
    """Server to client: the request for one table.

    Attributes:
        share: Of the squared privacy budget.
    """

    share: float


class AIM(SyntheticTable):
    """A synthetic table from counts over all clients' rows: in each turn of those that the model of the turn before knows least of.

    Use it where all pairs of columns matter and mst's tree leaves too many out; its server needs the package mbi.
    """

    name = "aim"
    packages = ("jax", "mbi")
    numbers = True

    turns: int = Field(default=16, ge=1, le=1000)
    """Tables that are counted one after the other, at the most; the rest of the budget is for them, at first in equal parts."""
    degree: int = Field(default=2, ge=2, le=3)
    """Columns of the largest tables that may be counted."""
    largest_model: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Megabytes of the tables of the whole model; a turn has the share of them that is its share of the budget so far."""

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The classifier, the network's tables, all counts with their noise, and how the budget is spent."""
        return {
            **super().server_state(initial),
            **{"columns": None, "candidates": None, "measured": []},
            **{"spent": 0.0, "next": self.share("turns") / self.turns},
        }

    def client_state(self) -> dict[str, Tree]:
        """What the turns so far have cost, so that nobody can ask for more."""
        return {**super().client_state(), "spent": 0.0}

    def share(self, step: str) -> float:
        """Of the squared budget; that of all turns together is the rest."""
        parts = {"columns": self.share_one, "candidates": self.share_select}
        return parts.get(step, 1 - sum(parts.values()))

    # Counts

    @client_handler
    def count(self, client: Client, message: AskCounts) -> Sums:
        """The client's counts of columns or of candidates; what turns have is asked for in turns alone."""
        if message.step not in ("columns", "candidates"):
            raise FedfillError(f"step: found '{message.step}'; allowed: columns, candidates")
        return self.counted(client, message.cliques, self.share(message.step), message.clients, message.step)

    def pretraining_steps(self) -> int:
        """The counts of columns, those of all candidates, and the turns: exchanges of their own, so that none is asked twice."""
        return 2 + self.turns

    def pretrain(self, server: Server, step: int) -> None:
        """One exchange."""
        columns = range(len(agreed(server.schema).sizes))
        if step == 0:
            server.state.columns = self.ask(server, "columns", [(k,) for k in columns])
        elif step == 1:
            sizes = range(2, min(self.degree, len(columns)) + 1)
            candidates = [clique for size in sizes for clique in itertools.combinations(columns, size)]
            server.state.candidates = self.ask(server, "candidates", candidates)
        else:
            self.turn(server)

    def turn(self, server: Server) -> None:
        """Fit the model, choose what it knows least of, and count that; nothing where the budget is spent."""
        state, sizes = server.state, agreed(server.schema).sizes
        left = self.share("turns") - state.spent
        if left <= 0:
            return
        model, candidates = self.fit(server), tables_in(state.candidates, sizes)
        told = {table.clique: marginal(model, table.clique) for table in candidates}
        if state.measured and (last := state.measured[-1])["std"]:
            [table] = tables_in(last, sizes)
            moved = np.abs(told[table.clique] - last["before"].numpy()).sum()
            if moved <= math.sqrt(2 / math.pi) * table.std * table.counts.size:
                state.next = 4 * state.next  # half the standard deviation
        share = left if left < 1.5 * state.next else state.next
        ahead = self.deviation(server, share)
        allowed = self.allowed(server, [table.clique for table in candidates], state.spent + share)
        scores = {
            table.clique: score(table, told[table.clique], ahead) for table in candidates if table.clique in allowed
        }
        best = max(scores, key=lambda clique: scores[clique])
        if not ahead and scores[best] <= NOTHING * model.total:
            # where the model may grow yet, later turns look at what was too large
            done = share == left or len(scores) == len(candidates)
            state.spent = self.share("turns") if done else state.spent + share
            return
        statistic = marginal_counts(sizes, [best])
        message = AskTable(server.clients, "turn", [list(best)], share)
        found = collect(server, self.measure, message, statistic, self.noise(statistic, share), purpose="turn")
        state.measured = [*state.measured, {**kept(found, message), "before": torch.from_numpy(told[best])}]
        state.spent = self.share("turns") if share == left else state.spent + share

    @client_handler
    def measure(self, client: Client, message: AskTable) -> Sums:
        """The client's counts of one table; not more than the budget has room for."""
        spent, most = client.state.spent + message.share, self.share("turns")
        if not message.share > 0 or spent > most * (1 + 1e-9) or len(message.cliques) != 1:
            raise FedfillError(
                f"share: found {message.share:g} for {len(message.cliques)} tables after {client.state.spent:g}; allowed: {most:g} for all "
                "turns together, one table in each"
            )
        client.state.spent = spent
        return self.counted(client, message.cliques, message.share, message.clients, "turn")

    def deviation(self, server: Server, share: float) -> float:
        """Of the noise that one table will have in each cell, where all clients answer."""
        noise = self.noise(marginal_counts((1,), [(0,)]), share)
        return 0.0 if noise is None else noise.stds["counts"] * noise.in_the_sum(server.clients, server.clients)

    def allowed(self, server: Server, candidates: Sequence[Clique], spent: float) -> set[Clique]:
        """Those with which the model stays small enough; those alone with which it is smallest, where there are none."""
        sizes, label = agreed(server.schema).sizes, len(agreed(server.schema).sizes) - 1
        known = [tuple(clique) for found in server.state.measured for clique in found["cliques"]]
        large = {clique: cells(sizes, elimination(sizes, [*known, clique], label)) for clique in candidates}
        most = max(self.largest_model * MEGABYTE * spent / self.share("turns"), min(large.values()))
        return {clique for clique, found in large.items() if found <= most}

    # The table

    def round(self, server: Server, t: int) -> None:
        """The distribution that fits all counts best, and the network, trained on draws from it."""
        self.settle(server, self.fit(server), t)

    def fit(self, server: Server) -> Network:
        """The model of all that was counted so far."""
        sizes, state = agreed(server.schema).sizes, server.state
        first = tables_in(state.candidates, sizes)
        turns = [table for found in state.measured for table in tables_in(found, sizes)]
        chosen = {table.clique for table in turns}
        tables = joined([*tables_in(state.columns, sizes), *(x for x in first if x.clique in chosen), *turns])
        return fitted(sizes, tables, total_of(tables), len(sizes) - 1)


def score(table: Noisy, told: Table, ahead: float) -> float:
    """How much a model does not know of a table, its columns counted.

    Args:
        table: Its noisy counts.
        told: What the model says, of the same shape.
        ahead: Standard deviation of the noise in the counts that would be asked for.

    Returns:
        Columns times the squared distance without what both noises add to it, over the deviation that the first gives it; without
        noise columns times the l1 distance.
    """
    gap, size = table.counts - told, table.counts.size
    if not table.std:
        return len(table.clique) * float(np.abs(gap).sum())
    beyond = float((gap**2).sum()) - size * (table.std**2 + ahead**2)
    return len(table.clique) * beyond / (table.std**2 * math.sqrt(2 * size))


def joined(tables: Sequence[Noisy]) -> list[Noisy]:
    """One table for each clique: the mean of its tables, weighted by how exact each is."""
    found: dict[Clique, list[Noisy]] = {}
    for table in tables:
        found.setdefault(table.clique, []).append(table)
    return [_mean(same) for same in found.values()]


def _mean(tables: Sequence[Noisy]) -> Noisy:
    if not all(table.std for table in tables):
        return tables[-1]
    weights = np.array([1 / table.std**2 for table in tables])
    counts: Table = np.tensordot(weights / weights.sum(), np.stack([table.counts for table in tables]), 1)
    return Noisy(tables[0].clique, counts, float(weights.sum() ** -0.5))
