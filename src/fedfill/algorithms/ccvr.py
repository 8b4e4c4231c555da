"""CCVR: Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data", NeurIPS 2021."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from fedfill.algorithms._heads import Head
from fedfill.algorithms._layers import Layer
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Collected, sound_counts
from fedfill.statistics.calibration import (
    class_gaussians,
    gaussian_samples,
    minimise_bound,
    noisy_class_gaussians,
    train_on_samples,
)
from fedfill.statistics.heads import LinearHead
from fedfill.statistics.sums import Statistic, class_moments
from fedfill.tree import Weights


class CCVR(Head):
    """Classifier calibration with virtual representations: each class a Gaussian of features, on whose draws the head is trained.

    Use it as the head of another algorithm (head=ccvr) whose features are good and whose last layer leans to some classes.
    """

    name = "ccvr"
    biased = True

    samples: Literal["inf"] | Annotated[int, Field(ge=1)] = 500
    """Draws for each class (M); inf: none, and the least upper bound of the loss on endless draws in their place, which is ours."""
    prior: Literal["uniform", "train"] = "uniform"
    """Whether classes count alike (uniform) or as in the clients' records together (train)."""

    def statistic(self, layer: Layer) -> Statistic:
        """For each class the sum of z z', the sum of z, and how many there are."""
        return class_moments(layer.features, layer.classes, radius=layer.radius, gram=False, by_class=True)

    def solve(self, server: Server, collected: Collected, layer: Layer, weights: Weights) -> LinearHead:
        """Algorithm 1: Gaussians of all classes (equations 3 and 4), draws, and the head trained on these from where it is."""
        sums, std = collected.sums, collected.stds["class_grams"] / math.sqrt(2)
        counts = sound_counts(collected)
        if std:
            gaussians = noisy_class_gaussians(sums["class_grams"], sums["moments"], counts, std)
        else:
            gaussians = class_gaussians(sums["class_grams"], sums["moments"], counts)
        head = layer.held_by(weights)
        if self.samples == "inf":
            return minimise_bound(head, gaussians, self.prior)
        wanted = [self.samples] * layer.classes
        if self.prior == "train":
            wanted = [round(self.samples * layer.classes * float(n / counts.sum())) for n in counts]
        z, labels = gaussian_samples(gaussians, wanted, lambda c: server.stream(f"ccvr samples of class {c}"))
        return train_on_samples(head, z, labels, server.stream("ccvr batches"), clamp=layer.range)
