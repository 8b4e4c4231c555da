"""Mixup: Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


def draw_lambda(alpha: float, generator: torch.Generator) -> float:
    """A share of the first samples, from Beta(alpha, alpha).

    Args:
        alpha: At least 0; 0 means the first samples as they are.
        generator: Stream of the draw, on any device; one integer is taken from it.

    Returns:
        A number in 0..1; 1 where alpha is 0.
    """
    if alpha == 0:
        return 1.0
    # torch's own draw takes no generator
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    return float(np.random.default_rng(seed).beta(alpha, alpha))


def draw_lambdas(alpha: float, n: int, generator: torch.Generator) -> Tensor:
    """Shares from Beta(alpha, alpha), as `draw_lambda` draws one.

    Args:
        alpha: Above 0.
        n: How many.
        generator: Stream of the draws, on any device; one integer is taken from it.

    Returns:
        ``[n]`` float32 in 0..1, on the stream's device.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    shares = np.random.default_rng(seed).beta(alpha, alpha, n)
    return torch.from_numpy(shares).to(generator.device, torch.float32)


def mixup_loss(
    model: nn.Module, first: Tensor, first_labels: Tensor, second: Tensor, second_labels: Tensor, lam: float
) -> Tensor:
    """Cross-entropy of mixed samples with both of their labels (SDA-FL, equations 5 and 6).

    Args:
        model: In training.
        first: Normalised inputs, ``[b, ...]``.
        first_labels: ``[b]`` int64, or probabilities ``[b, classes]``.
        second: As `first`.
        second_labels: As `first_labels`.
        lam: Share of the first in a mixed sample, in 0..1.

    Returns:
        lam CE(f(x), y1) + (1 - lam) CE(f(x), y2) at x = lam x1 + (1 - lam) x2, a scalar.
    """
    return mixed_entropy(model(torch.lerp(second, first, lam)), first_labels, second_labels, lam)


def mixed_entropy(
    scores: Tensor, first_labels: Tensor, second_labels: Tensor, lam: float, reduction: str = "mean"
) -> Tensor:
    """Cross-entropy of scores ``[b, classes]`` with two labels each, of which the first weigh lam, a scalar; ``[b]`` with none."""
    second = functional.cross_entropy(scores, second_labels, reduction=reduction)
    return torch.lerp(second, functional.cross_entropy(scores, first_labels, reduction=reduction), lam)
