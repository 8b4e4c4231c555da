"""Fed3R: Fanì et al., "Accelerating Heterogeneous Federated Learning with Closed-form Classifiers", ICML 2024.

AFL (He et al., CVPR 2025) has the same solution, by inverses that clients send in place of sums. See ``docs/algorithms/fed3r.md``.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms._heads import Head
from fedfill.algorithms._layers import Layer
from fedfill.errors import FedfillError
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Collected
from fedfill.statistics.heads import LinearHead
from fedfill.statistics.ridge import Spectrum, choose_lambda, noisy_ridge
from fedfill.statistics.sums import Statistic, class_moments
from fedfill.tree import Weights


class Fed3R(Head):
    """Ridge regression on one-hot labels, from the sums of z z' and z e_y' over all records, in one round.

    Use it first where clients lack classes: every split gives the same model, and many records bear noise well.
    """

    name = "fed3r"

    ridge_lambda: Literal["gcv", "evidence"] | Annotated[float, Field(ge=0, le=1e100)] = "gcv"
    """Ridge penalty: chosen by generalised cross-validation (gcv) or by the evidence (evidence), both from the sums alone, or a number. Under noise a multiple of the noise's largest eigenvalue, by rule an eighth."""
    column_norm: bool = False
    """Whether each class's weights are scaled to length 1, a heuristic against uneven classes."""

    scale: Literal["auto"] | Annotated[float, Field(gt=0, allow_inf_nan=False)] = "auto"
    """What the head is multiplied by, which changes no prediction: training can go on from it where its softmax is sharp enough (auto: by the spread of the scores, from the sums alone, and 1 under noise)."""

    def check_network(self, model: nn.Module, inputs: Tensor) -> None:
        """Refuse what the noisy ridge does not have."""
        if self.column_norm and self.target_epsilon is not None:
            raise FedfillError(
                "column_norm: found true with a target_epsilon, whose noise it would raise for rare classes; allowed: false"
            )
        super().check_network(model, inputs)

    def statistic(self, layer: Layer) -> Statistic:
        """G, M, and without noise N: the noisy ridge needs no counts."""
        return class_moments(layer.features, layer.classes, radius=layer.radius, counts=self.target_epsilon is None)

    def solve(self, server: Server, collected: Collected, layer: Layer, weights: Weights) -> LinearHead:
        """W = (G + lambda I)^-1 M."""
        sums, std = collected.sums, collected.stds["gram"] / math.sqrt(2)
        if std:
            # where all feature vectors are of this length the trace tells how many there are, else fewer
            n = float(sums["gram"].trace()) / layer.radius**2
            strength = None if isinstance(self.ridge_lambda, str) else self.ridge_lambda
            head = noisy_ridge(sums["gram"], sums["moments"], n, std, strength=strength)
            tau = 1.0 if self.scale == "auto" else self.scale
            return LinearHead(tau * head.weight, tau * head.bias)
        counts, spectrum = sums["counts"], Spectrum.of(sums["gram"], sums["moments"])
        n, given = float(counts.sum()), self.ridge_lambda
        if isinstance(given, str):
            choice = choose_lambda(spectrum, n, given)
            if choice.end is not None:
                server.warn(f"ridge_lambda: {given} chose the {choice.end} of its grid, {choice.lam:g}.")
            given = choice.lam
        server.note(ridge_lambda=given, effective_parameters=spectrum.effective_parameters(given))
        head = spectrum.solution(given, counts, self.column_norm)
        return self.scaled(head, sums, n, float(spectrum.residuals(given, counts).sum()))

    def scaled(self, head: LinearHead, sums: Weights, n: float, residual: float) -> LinearHead:
        """Tau W, with tau the distance of the mean scores of a record's class and of another over their variance.

        For scores that are Gaussian around these two means it is where the cross-entropy is least.
        """
        classes = len(head.bias)
        own = float((head.weight * sums["moments"].T).sum()) / n
        other = (float((head.weight @ sums["moments"].sum(1)).sum()) / n - own) / max(classes - 1, 1)
        variance = residual / (n * classes) - ((1 - own) ** 2 + (classes - 1) * other**2) / classes
        tau = self.scale if self.scale != "auto" else min(max((own - other) / max(variance, 1e-6), 1.0), 1000.0)
        return LinearHead(tau * head.weight, tau * head.bias)
