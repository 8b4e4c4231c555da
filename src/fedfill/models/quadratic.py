"""A last layer that scores each class by a Gaussian of its own, where covariances differ and no linear layer will do."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Quadratic(nn.Module):
    """Scores -||T_c (z - mu_c)||^2 / 2 + b_c. Nothing in it is trained; it is fitted from sums.

    Args:
        in_features: Length d of a feature vector.
        out_features: Number of classes.
        diagonal: Whether every T_c is a diagonal matrix.

    Attributes:
        in_features: Length d of a feature vector.
        out_features: Number of classes.
        means: mu, ``[classes, d]``.
        whitening: T, ``[classes, d, d]``, or ``[classes, d]`` where it is diagonal.
        bias: b, ``[classes]``.
        present: Which classes may win, ``[classes]``, 1 or 0.
    """

    means: Tensor
    whitening: Tensor
    bias: Tensor
    present: Tensor

    def __init__(self, in_features: int, out_features: int, diagonal: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("means", torch.zeros(out_features, in_features))
        square = () if diagonal else (in_features,)
        self.register_buffer("whitening", torch.zeros(out_features, in_features, *square))
        self.register_buffer("bias", torch.zeros(out_features))
        self.register_buffer("present", torch.ones(out_features))

    def forward(self, z: Tensor) -> Tensor:
        """Scores ``[b, classes]`` of features ``[b, d]``; a class that nobody holds has the least of all."""
        scores = z.new_empty(len(z), self.out_features)
        for c in range(self.out_features):
            away, whitening = z - self.means[c], self.whitening[c]
            white = away * whitening if whitening.dim() == 1 else away @ whitening.T
            scores[:, c] = self.bias[c] - white.square().sum(1) / 2
        lowest = scores.amin(1, keepdim=True).clamp(max=0)
        return torch.where(self.present > 0, scores, 2 * lowest - 1e9)

    def extra_repr(self) -> str:
        """Shown in the module's printed form."""
        return f"{self.in_features}, {self.out_features}{', diagonal' if self.whitening.dim() == 2 else ''}"
