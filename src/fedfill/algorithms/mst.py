"""MST: a private synthetic table from noisy counts, summed over clients; McKenna, Miklau and Sheldon, 2021, made federated.

See ``docs/algorithms/mst.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms._base import Algorithm
from fedfill.data.samples import Samples
from fedfill.data.schema import Schema, agreed
from fedfill.errors import FedfillError
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Sums, collect, contribute
from fedfill.statistics.marginals import (
    Clique,
    Network,
    Noisy,
    consistent,
    dependence,
    directed,
    marginal_counts,
    network,
    spanning_tree,
    tables_of,
    total_of,
)  # fmt: skip
from fedfill.statistics.noise import NoisySums
from fedfill.tree import Tree, Weights

Structure = Literal["star", "tree", "label_tree", "augmented"]
Step = Literal["columns", "pairs", "tables"]


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


class MST(NoisySums, Algorithm):
    """A synthetic table from counts over all clients' rows: of columns, of pairs that depend on each other, and of these again.

    Use it to hand out a table with a guarantee for every row; the network is trained at the server on that table alone.
    """

    name = "mst"
    single_round = True
    tabular = True

    structure: Structure = "star"
    """What is counted together: the label with each column (star), the tree of pairs that depend most (tree), that tree with the label's best pair (label_tree), or the label with each pair of a tree of the other columns (augmented)."""
    share_one: float = Field(default=0.2, gt=0, lt=1)
    """Share of the squared privacy budget for the counts of single columns."""
    share_select: float = Field(default=0.3, gt=0, lt=1)
    """Share for the choice of pairs, where there is one."""
    rows: int | None = Field(default=None, ge=1, le=10_000_000)
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
        """The classifier, the counts of columns and of pairs with their noise, and the network's tables by column."""
        return {**super().server_state(initial), "columns": None, "pairs": None, "tables": None, "parents": None}

    def share(self, step: Step) -> float:
        """Of the squared budget."""
        chosen = self.share_select if self.structure != "star" else 0.0
        return {"columns": self.share_one, "pairs": chosen, "tables": 1 - self.share_one - chosen}[step]

    # Counts

    def pretraining_steps(self) -> int:
        """The counts of columns, and those of pairs where some are chosen: exchanges of their own, so that none is asked twice."""
        return 1 if self.structure == "star" else 2

    def pretrain(self, server: Server, step: int) -> None:
        """One exchange."""
        d = len(agreed(server.schema).sizes)
        if step == 0:
            server.state.columns = self.ask(server, "columns", [(k,) for k in range(d)])
        else:
            server.state.pairs = self.ask(server, "pairs", list(itertools.combinations(range(d), 2)))

    def ask(self, server: Server, step: Step, cliques: list[Clique]) -> dict[str, Tree]:
        """Counts of some tables over all clients, and the standard deviation of the noise in a cell."""
        statistic = marginal_counts(agreed(server.schema).sizes, cliques)
        message = AskCounts(server.clients, step, [list(clique) for clique in cliques])
        noise = self.noise(statistic, self.share(step))
        found = collect(server, self.count, message, statistic, noise, purpose=step)
        return {"counts": found.sums["counts"], "std": found.stds["counts"], "cliques": message.cliques}

    @client_handler
    def count(self, client: Client, message: AskCounts) -> Sums:
        """The client's counts."""
        schema = agreed(client.schema)
        step: Any = message.step
        statistic = marginal_counts(schema.sizes, [tuple(clique) for clique in message.cliques])

        def records() -> Iterator[tuple[Tensor, Tensor]]:
            codes = schema.codes_of(client.data.inputs, client.data.labels)
            yield torch.from_numpy(codes).to(torch.float64), client.data.labels.cpu()

        noise = self.noise(statistic, self.share(step))
        return contribute(client, statistic, records(), noise, message.clients, purpose=step)

    # The table

    def round(self, server: Server, t: int) -> None:
        """The tables of what was chosen, the distribution that agrees with all, and the network, trained on draws from it."""
        schema = agreed(server.schema)
        columns, parents = self.read(server, "columns"), self.chosen(server)
        cliques = sorted({tuple(sorted((*above, own))) for own, above in parents.items() if above})
        found = self.ask(server, "tables", cliques)
        tables = [*columns, *tables_of(_counts(found), schema.sizes, cliques, _std(found))]
        total = total_of(tables)
        made = network(schema.sizes, parents, consistent(tables, total), total)
        server.state.parents = [[column, *above] for column, above in parents.items()]
        server.state.tables = {str(column): torch.from_numpy(table.copy()) for column, table in made.tables.items()}
        server.note(rows=round(total))
        training = replace(self.training(t), epochs=self.classifier_epochs, steps=None)
        data = self.drawn(server, None)
        server.state.weights = server.fit(server.state.weights, self.loss, training, data=data).weights

    def read(self, server: Server, name: Literal["columns", "pairs"]) -> list[Noisy]:
        """Counts of an earlier exchange."""
        found = getattr(server.state, name)
        cliques = [tuple(clique) for clique in found["cliques"]]
        return tables_of(_counts(found), agreed(server.schema).sizes, cliques, _std(found))

    def chosen(self, server: Server) -> Mapping[int, Clique]:
        """The parents of each column, from the label on."""
        d = len(agreed(server.schema).sizes)
        label, others = d - 1, range(d - 1)
        if self.structure == "star" or d < 3:
            return {label: (), **dict.fromkeys(others, (label,))}
        scores = dependence(self.read(server, "pairs"), self.read(server, "columns"))
        if self.structure == "augmented":
            edges = spanning_tree({pair: score for pair, score in scores.items() if label not in pair}, others)
            # the tree begins where a column tells most of the label
            root = max(others, key=lambda column: scores[column, label])
            pairs = {child: (label, parent) for parent, child in directed(edges, root)}
            return {label: (), root: (label,), **pairs}
        first = []
        if self.structure == "label_tree":
            first = [max((pair for pair in scores if label in pair), key=lambda pair: scores[pair])]
        edges = spanning_tree(scores, range(d), first)
        return {label: (), **{child: (parent,) for parent, child in directed(edges, label)}}

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
        root = None if per_class is None else np.repeat(np.arange(server.classes), per_class)
        n = len(root) if root is not None else self.rows or max(1, round(made.total))
        return samples_of(schema, made.sample(n, draw, root), draw).to(server.sample.inputs.device)

    def synthetic(self, server: Server, per_class: int | None = None) -> Samples | None:
        """Rows, so many of each class; none before there is a table."""
        return None if server.state.tables is None else self.drawn(server, per_class)


def samples_of(schema: Schema, codes: Any, draw: np.random.Generator) -> Samples:
    """Rows with these cells as samples: each value is drawn within its cell."""
    encoding, where = schema.encoding(), Path("drawn rows")
    values = encoding.values(schema.prepared(schema.frame(codes, draw), str(where), labelled=False), where)
    return Samples(encoding.inputs(values, str(where)), torch.from_numpy(codes[:, -1].copy()))


def _counts(found: Mapping[str, Any]) -> Tensor:
    counts: Tensor = found["counts"]
    return counts


def _std(found: Mapping[str, Any]) -> float:
    return float(found["std"])
