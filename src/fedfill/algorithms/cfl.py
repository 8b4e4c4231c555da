"""CFL: Sattler, Müller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization", 2020.

As a setting the clustering once of Briggs, Fan, Andras: "Federated Learning with Hierarchical Clustering of Local Updates", 2020.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms._clustered import Assigned
from fedfill.errors import FedfillError
from fedfill.protocol.server import Server
from fedfill.training.similarity import cosines, hierarchical, movement, products
from fedfill.tree import Tree, Weights


class CFL(Assigned):
    """FedAvg whose clients are divided where their updates point apart, cluster by cluster, each with a model of its own.

    Use it when clients may fall into a few kinds, whose data call for different models, and you do not know into how many.
    """

    name = "cfl"

    when: Literal["still", "once"] = "still"
    """How clients are divided: a cluster in two, whenever its model stands still and its clients pull at it (still, CFL), or all of them once (once, Briggs et al.)."""
    warm_rounds: int = Field(default=10, ge=0)
    """Rounds of plain FedAvg before any division."""
    still: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """Below which share of the longest update the mean update's length says that the model stands still."""
    eps1: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The paper's own: the length below which a mean update says so, in the place of `still`; none: `still`."""
    eps2: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The paper's own: the length above which the longest update says that clients pull at the model; none: any."""
    gamma: float = Field(default=0.71, ge=0, le=1)
    """How far apart two halves must be: sqrt((1 - largest cosine across) / 2) above it. 0.71: no angle across is sharp; 0: no such check."""
    linkage: Literal["complete", "single", "average"] = "complete"
    """How alike two groups are: as their members that are least alike (complete, as in the authors' program), most alike (single, which solves the paper's formula exactly), or the mean over all pairs (average)."""
    clusters: int | None = Field(default=None, ge=1)
    """How many clusters there may be, or with once how many there are; none: any number, or with once where the distances jump most."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse settings of the other way to divide."""
        if self.when == "once":
            defaults = type(self).model_fields
            for name in ("still", "eps1", "eps2", "gamma"):
                if (value := getattr(self, name)) != defaults[name].default:
                    raise FedfillError(f"{name}: found {value:g} with when=once; allowed: with when=still alone")
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """Beside models and clusters each client's last update by which its cluster was not divided, with its weight."""
        return {**super().server_state(initial), "updates": {}}

    def round(self, server: Server, t: int) -> None:
        """FedAvg in each cluster. What is divided is divided before the averages, so that each part begins with its own."""
        state, models = server.state, list(self.models(server))
        clusters = {i: state.clusters.get(i, 0) for i in range(server.clients)}
        once = self.when == "once" and t >= self.warm_rounds and not state.clusters
        cohort = list(clusters) if once else self.cohort(server, t)
        starts = {i: models[clusters[i]] for i in cohort}
        replies = self.trained_from(server, starts)
        updates = {i: movement(server.model(starts[i]), reply.weights, starts[i]) for i, reply in replies.items()}
        if once:
            clusters |= self.divided_once(updates)
            models += [models[0]] * max(clusters.values())
        elif self.when == "still":
            state.updates = {
                **state.updates,
                **{i: (updates[i], float(reply.samples if self.by else 1)) for i, reply in replies.items()},
            }
            if t >= self.warm_rounds:
                self.divide(server, models, clusters)
        if once or len(models) > 1:
            state.clusters = clusters
        state.models = self.averaged(models, replies, clusters)
        server.note(clusters={str(i): clusters[i] for i in replies})

    def divide(self, server: Server, models: list[Weights], clusters: dict[int, int]) -> None:
        """Divide in two every cluster whose model stands still and whose clients pull at it (algorithm 2).

        Args:
            server: What the algorithm sees; updates by which a cluster is divided are dropped from its state.
            models: Of all clusters; one is added for each that is divided.
            clusters: Of all clients; changed in place.
        """
        updates, lengths = server.state.updates, {}
        for j in range(len(models)):
            members = [i for i, cluster in clusters.items() if cluster == j]
            if len(members) <= 2 or not all(i in updates for i in members):
                continue
            inner = products([updates[i][0] for i in members])  # [members, members]
            weights = torch.tensor([updates[i][1] for i in members], dtype=torch.float64)
            shares = weights / weights.sum().clamp(min=1)
            mean = math.sqrt(max(float(shares @ inner @ shares), 0.0))
            longest = math.sqrt(float(inner.diagonal().max()))
            lengths[str(j)] = [round(mean, 4), round(longest, 4)]
            if len(models) == self.clusters or not self.ripe(mean, longest):
                continue
            alike = cosines(inner)
            groups = hierarchical(1 - alike, self.linkage, 2)
            across = float(alike[groups == 0][:, groups == 1].max())
            if math.sqrt((1 - across) / 2) <= self.gamma:
                continue
            for i, group in zip(members, groups.tolist(), strict=True):
                clusters[i] = len(models) if group else j
                del updates[i]
            models.append(models[j])
        server.note(update_lengths=lengths)

    def ripe(self, mean: float, longest: float) -> bool:
        """Whether a cluster's model stands still, by the length of the mean update, while clients pull at it."""
        return mean < (self.still * longest if self.eps1 is None else self.eps1) and longest > (self.eps2 or 0.0)

    def divided_once(self, updates: dict[int, Weights]) -> dict[int, int]:
        """Clusters of those whose updates arrived, by hierarchical clustering (Briggs et al., algorithm 1)."""
        groups = hierarchical(1 - cosines(products(list(updates.values()))), self.linkage, self.clusters)
        return dict(zip(updates, groups.tolist(), strict=True))
