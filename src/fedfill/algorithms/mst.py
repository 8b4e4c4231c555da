"""MST: a private synthetic table from noisy counts, summed over clients; McKenna, Miklau and Sheldon, 2021, made federated.

See ``docs/algorithms/mst.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal

from fedfill.algorithms._tables import SyntheticTable, tables_in
from fedfill.data.schema import agreed
from fedfill.protocol.server import Server
from fedfill.statistics.marginals import (
    Clique,
    consistent,
    dependence,
    directed,
    network,
    spanning_tree,
    total_of,
)  # fmt: skip
from fedfill.tree import Tree, Weights

Structure = Literal["star", "tree", "label_tree", "augmented"]


class MST(SyntheticTable):
    """A synthetic table from counts over all clients' rows: of columns, of pairs that depend on each other, and of these again.

    Use it to hand out a table with a guarantee for every row; the network is trained at the server on that table alone.
    """

    name = "mst"
    numbers = True

    structure: Structure = "star"
    """What is counted together: the label with each column (star), the tree of pairs that depend most (tree), that tree with the label's best pair (label_tree), or the label with each pair of a tree of the other columns (augmented)."""

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The classifier, the counts of columns and of pairs with their noise, and the network's tables by column."""
        return {**super().server_state(initial), "columns": None, "pairs": None}

    def share(self, step: str) -> float:
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

    # The table

    def round(self, server: Server, t: int) -> None:
        """The tables of what was chosen, the distribution that agrees with all, and the network, trained on draws from it."""
        sizes, parents = agreed(server.schema).sizes, self.chosen(server)
        cliques = sorted({tuple(sorted((*above, own))) for own, above in parents.items() if above})
        found = self.ask(server, "tables", cliques)
        tables = [*tables_in(server.state.columns, sizes), *tables_in(found, sizes)]
        total = total_of(tables)
        self.settle(server, network(sizes, parents, consistent(tables, total), total), t)

    def chosen(self, server: Server) -> Mapping[int, Clique]:
        """The parents of each column, from the label on."""
        sizes = agreed(server.schema).sizes
        d = len(sizes)
        label, others = d - 1, range(d - 1)
        if self.structure == "star" or d < 3:
            return {label: (), **dict.fromkeys(others, (label,))}
        scores = dependence(tables_in(server.state.pairs, sizes), tables_in(server.state.columns, sizes))
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
