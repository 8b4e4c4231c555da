"""FedCGS: Guan, Zhou and Gu, "Capture Global Feature Statistics for One-Shot Federated Learning", AAAI 2025.

``covariance`` gives its neighbours: GH-OFL's heads, and the nearest class mean (FedNCM, Legate et al. 2023). See
``docs/algorithms/fedcgs.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms._heads import Head
from fedfill.algorithms._layers import Layer
from fedfill.errors import FedfillError
from fedfill.models.features import default_words
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Collected, sound_counts
from fedfill.statistics.gaussian_heads import QuadraticHead, lda, naive_bayes, nearest_mean, qda
from fedfill.statistics.heads import LinearHead
from fedfill.statistics.sums import Statistic, class_moments
from fedfill.tree import Weights


class FedCGS(Head):
    """Discriminant analysis: each class a Gaussian of features, in one round from sums that no split changes.

    Use it where classes are uneven: prior=uniform weighs them alike, from the same sums.
    """

    name = "fedcgs"
    biased = True

    covariance: Literal["shared", "class", "diagonal", "none"] = "shared"
    """Covariance of the classes: one for all (shared), one for each (class), variances for each (diagonal: naive Bayes), or none at all, which is the nearest class mean."""
    shrinkage: Literal["oas"] | Annotated[float, Field(ge=0, le=1)] = "oas"
    """Share of a multiple of the identity in the shared covariance, by the oracle approximating rule (oas) or as a number."""
    prior: Literal["train", "uniform"] = "train"
    """How often a class is expected: as in the clients' records together (train), or all alike (uniform)."""

    @property
    def last_layer(self) -> str:
        """A linear one where one covariance is all classes'."""
        return {"class": "gaussian", "diagonal": "diagonal"}.get(self.covariance, "linear")

    def network_settings(self, shape: tuple[int, ...], samples: int, clients: int) -> Mapping[str, Any]:
        """The last layer, and fewer features where each class has a covariance."""
        own = super().network_settings(shape, samples, clients)
        if self.last_layer == "linear":
            return own
        few = {"features": default_words(shape, 512)} if self.covariance == "class" else {}
        return {**own, **few, "last_layer": self.last_layer}

    def check_network(self, model: nn.Module, inputs: Tensor) -> None:
        """Refuse noise where nothing keeps a class's noisy covariance a covariance."""
        if self.target_epsilon is not None and self.last_layer != "linear":
            raise FedfillError(
                f"target_epsilon: found {self.target_epsilon:g} with covariance={self.covariance}; allowed with covariance=shared or none"
            )
        super().check_network(model, inputs)

    def statistic(self, layer: Layer) -> Statistic:
        """M, N, and what the covariance is made of."""
        return class_moments(
            layer.features, layer.classes, radius=layer.radius, gram=self.covariance == "shared",
            by_class=self.covariance == "class", diagonal=self.covariance == "diagonal",
        )  # fmt: skip

    def solve(self, server: Server, collected: Collected, layer: Layer, weights: Weights) -> LinearHead | QuadraticHead:
        """Scores log pi_c - log det(S_c) / 2 - (z - mu_c)' S_c^-1 (z - mu_c) / 2, linear where S is shared."""
        sums, counts = collected.sums, sound_counts(collected)
        if self.covariance == "none":
            return nearest_mean(sums["moments"], counts)
        if self.covariance == "class":
            return qda(sums["class_grams"], sums["moments"], counts, prior=self.prior)
        if self.covariance == "diagonal":
            return naive_bayes(sums["squares"].T, sums["moments"], counts, self.prior)
        std = collected.stds["gram"] / math.sqrt(2)
        return lda(sums["gram"], sums["moments"], counts, self.shrinkage, self.prior, std or None)
