"""What methods for synthetic tables share: counts that are asked for, a network of tables that is learnt, and rows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms._base import Algorithm
from fedfill.data.samples import Samples
from fedfill.data.schema import agreed
from fedfill.errors import FedfillError
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Collected, Sums, collect, contribute
from fedfill.statistics.marginals import Clique, Network, Noisy, marginal_counts, tables_of
from fedfill.statistics.noise import NoisySums
from fedfill.synthesis.tables import samples_of
from fedfill.tree import Tree, Weights


@dataclass(frozen=True)
class AskCounts(Message):
    """Server to client: the request for counts.

    Attributes:
        clients: How many clients are asked.
        step: Which share of the privacy budget they have.
        cliques: The columns of each table that is counted.
    """

    clients: int
    step: str
    cliques: list[list[int]]


class SyntheticTable(NoisySums, Algorithm):
    """A synthetic table from counts over all clients' rows; the network is trained at the server on that table alone."""

    single_round = True
    tabular = True

    share_one: float = Field(default=0.2, gt=0, lt=1)
    """Share of the squared privacy budget for the counts of single columns."""
    share_select: float = Field(default=0.3, gt=0, lt=1)
    """Share for the choice of pairs, where there is one."""
    rows: int | None = Field(default=None, ge=2, le=10_000_000)
    """Synthetic rows that the network is trained on; none: as many as the noisy counts say there are."""
    classifier_epochs: int = Field(default=5, ge=1)
    """Passes over these rows, with batch_size, optimizer and learning_rate."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse shares that leave nothing."""
        self.check_trust()
        if self.share_one + self.share_select >= 1:
            raise FedfillError(
                f"share_select: found {self.share_select:g} beside share_one={self.share_one:g}; allowed: less than 1 together"
            )
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The classifier, and the network's tables by column."""
        return {**super().server_state(initial), "tables": None, "parents": None}

    def share(self, step: str) -> float:
        """Of the squared budget, for one of the exchanges."""
        raise NotImplementedError

    # Counts

    def counted(
        self, client: Client, cliques: Sequence[Sequence[int]], share: float, clients: int, purpose: str
    ) -> Sums:
        """A client's counts of some tables, with the noise of a share of the squared budget."""
        schema = agreed(client.schema)
        statistic = marginal_counts(schema.sizes, [tuple(clique) for clique in cliques])

        def records() -> Iterator[tuple[Tensor, Tensor]]:
            codes = schema.codes_of(client.data.inputs, client.data.labels)
            yield torch.from_numpy(codes).to(torch.float64), client.data.labels.cpu()

        return contribute(client, statistic, records(), self.noise(statistic, share), clients, purpose=purpose)

    def ask(self, server: Server, step: str, cliques: Sequence[Clique]) -> dict[str, Tree]:
        """Counts of some tables over all clients, and the standard deviation of the noise in a cell."""
        statistic = marginal_counts(agreed(server.schema).sizes, cliques)
        message = AskCounts(server.clients, step, [list(clique) for clique in cliques])
        found = collect(server, self.count, message, statistic, self.noise(statistic, self.share(step)), purpose=step)
        return kept(found, message)

    @client_handler
    def count(self, client: Client, message: AskCounts) -> Sums:
        """The client's counts."""
        return self.counted(client, message.cliques, self.share(message.step), message.clients, message.step)

    # The table

    def settle(self, server: Server, made: Network, t: int) -> None:
        """Keep the distribution, and train the network on draws from it."""
        server.state.parents = [[column, *above] for column, above in made.parents.items()]
        server.state.tables = {str(column): torch.from_numpy(table.copy()) for column, table in made.tables.items()}
        server.note(rows=round(made.total))
        training = replace(self.training(t), epochs=self.classifier_epochs, steps=None)
        data = self.drawn(server, None)
        server.state.weights = server.fit(server.state.weights, self.loss, training, data=data).weights

    def distribution(self, server: Server) -> Network:
        """What was learned."""
        tables = {int(column): x.double().cpu().numpy() for column, x in server.state.tables.items()}
        parents = {column: tuple(above) for column, *above in server.state.parents}
        total = float(next(iter(tables.values())).sum())
        return Network(agreed(server.schema).sizes, tuple(parents), parents, tables, total)

    def drawn(self, server: Server, per_class: int | None) -> Samples:
        """Rows as a network takes them: so many of each class, or as many as there are, as the counts have them."""
        schema, made = agreed(server.schema), self.distribution(server)
        seed = int(torch.randint(2**62, (1,), generator=server.stream("rows"), device=server.stream("rows").device))
        draw = np.random.default_rng(seed)
        root = None if per_class is None else np.repeat(np.arange(len(schema.target.cells)), per_class)
        n = len(root) if root is not None else self.rows or max(2, round(made.total))  # batch norm can't train on one
        return samples_of(schema, made.sample(n, draw, root), draw).to(server.sample.inputs.device)

    def synthetic(self, server: Server, per_class: int | None = None) -> Samples | None:
        """Rows, so many of each class; none before there is a table."""
        return None if server.state.tables is None else self.drawn(server, per_class)


def kept(found: Collected, message: AskCounts) -> dict[str, Tree]:
    """Counts as the server keeps them: with the standard deviation of the noise in a cell, and the columns of each table."""
    return {"counts": found.sums["counts"], "std": found.stds["counts"], "cliques": message.cliques}


def tables_in(found: Mapping[str, Any], sizes: Sequence[int]) -> list[Noisy]:
    """The tables of counts that were `kept`."""
    cliques = [tuple(clique) for clique in found["cliques"]]
    return tables_of(found["counts"], sizes, cliques, float(found["std"]))
