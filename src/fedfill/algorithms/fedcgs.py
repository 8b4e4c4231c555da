"""FedCGS: Guan, Zhou and Gu, "Capture Global Feature Statistics for One-Shot Federated Learning", AAAI 2025.

``covariance`` gives the neighbours: nearest class mean (FedNCM, Legate et al. 2023) and GH-OFL's heads. See
``docs/algorithms/fedcgs.md``.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from fedfill.algorithms._heads import Head, sound_counts
from fedfill.algorithms._layers import Layer
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Collected
from fedfill.statistics.gaussian_heads import lda, nearest_mean
from fedfill.statistics.heads import LinearHead
from fedfill.statistics.sums import Statistic, class_moments
from fedfill.tree import Weights


class FedCGS(Head):
    """Linear discriminant analysis: each class a Gaussian around its mean, with one covariance for all, in one round.

    Use it where classes are uneven: prior=uniform weighs them alike, from the same sums.
    """

    name = "fedcgs"
    biased = True

    covariance: Literal["shared", "none"] = "shared"
    """Covariance of the classes' Gaussians: one for all (shared), or none at all, which is the nearest class mean."""
    shrinkage: Literal["oas"] | Annotated[float, Field(ge=0, le=1)] = "oas"
    """Share of a multiple of the identity in the covariance, by the oracle approximating rule (oas) or as a number."""
    prior: Literal["train", "uniform"] = "train"
    """How often a class is expected: as in the clients' records together (train), or all alike (uniform)."""

    def statistic(self, layer: Layer) -> Statistic:
        """M, N, and for a covariance G."""
        return class_moments(layer.features, layer.classes, radius=layer.radius, gram=self.covariance == "shared")

    def solve(self, server: Server, collected: Collected, layer: Layer, weights: Weights) -> LinearHead:
        """w_c = S^-1 mu_c, b_c = -mu_c' S^-1 mu_c / 2 + log pi_c."""
        sums = {**collected.sums, "counts": sound_counts(collected)}
        if self.covariance == "none":
            return nearest_mean(sums["moments"], sums["counts"])
        std = collected.stds["gram"] / math.sqrt(2)
        return lda(sums["gram"], sums["moments"], sums["counts"], self.shrinkage, self.prior, std or None)
