"""FeSEM: Xie et al., "Multi-Center Federated Learning", 2021 (World Wide Web 2023)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedfill.algorithms._clustered import Assigned
from fedfill.protocol.server import Server
from fedfill.training.aggregation import Mean, combined
from fedfill.training.similarity import distances, hierarchical, movement, products
from fedfill.tree import Weights


class FeSEM(Assigned):
    """FedAvg of several models, each over the clients whose trained models lie nearest to it (algorithm 1, FeSEM).

    Use it when clients fall into a few kinds, you know about how many, and most of them take part in each round.
    """

    name = "fesem"

    clusters: int = Field(default=2, ge=1)
    """How many models there are (K), the centres."""
    weighting: Literal["samples", "uniform"] = "uniform"
    """Weights of the averages: all equal, or each client's number of samples."""

    def round(self, server: Server, t: int) -> None:
        """Train from the clients' own centres; then each client's nearest centre (E step), and each centre's mean (M step)."""
        state, models = server.state, self.models(server)
        between = mean_of(models)
        starts = {i: models[state.clusters[i]] if i in state.clusters else between for i in self.cohort(server, t)}
        replies = self.trained_from(server, starts)
        trained = {i: reply.weights for i, reply in replies.items()}
        if len(models) > 1:
            found = {i: self.nearest(server, own, models) for i, own in trained.items()}
        elif len(trained) >= self.clusters > 1:
            found = self.first_clusters(server, trained, models[0])
            models = models * self.clusters
        else:
            found = dict.fromkeys(trained, 0)
            if self.clusters > 1:
                server.warn(
                    f"clusters: {self.clusters} centres need as many replies in a round, and {len(trained)} came."
                )
        state.models = self.averaged(models, replies, found)
        if len(models) > 1:
            state.clusters = {**state.clusters, **found}
        server.note(clusters={str(i): j for i, j in found.items()})

    def first_clusters(self, server: Server, trained: dict[int, Weights], start: Weights) -> dict[int, int]:
        """Clusters of models that were all trained from the same one, by Ward's criterion: that of k-means, step by step."""
        inner = products([movement(server.model(start), own, start) for own in trained.values()])
        return dict(zip(trained, hierarchical(distances(inner), "ward", self.clusters).tolist(), strict=True))

    def nearest(self, server: Server, own: Weights, centres: list[Weights]) -> int:
        """The centre at the least Euclidean distance between parameters; of equal ones the first."""
        squares = [
            sum(float(part.double().square().sum()) for part in movement(server.model(centre), own, centre).values())
            for centre in centres
        ]
        return squares.index(min(squares))


def mean_of(models: list[Weights]) -> Weights:
    """The mean of all centres, where a client without one begins: it is equally near to two of them."""
    mean = combined(Mean(model, 1.0, 1.0) for model in models)
    assert mean is not None
    return mean.tensors
