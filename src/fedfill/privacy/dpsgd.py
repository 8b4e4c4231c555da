"""DP-SGD: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016: clipped per-sample gradients with noise on their sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedfill.privacy.keyed import KeyedStream
from fedfill.tree import Weights, zeros_like


def poisson_sample(n: int, probability: float, coins: KeyedStream) -> Tensor:
    """Positions of a Poisson sample: each of `n` records by a coin of its own; perhaps none.

    Args:
        n: How many records there are.
        probability: Of each, in (0, 1].
        coins: Their stream: uniform in float64, so that a probability is met to 2^-53.

    Returns:
        Positions in ascending order, ``[b]`` int64.
    """
    return torch.nonzero(coins.uniform(n) < probability).flatten()


def clipped_sum(loss: Callable[..., Tensor], weights: Weights, batch: tuple[Tensor, ...], clip: float) -> Weights:
    """The sum of every sample's gradient, each clipped to an l2 norm.

    Args:
        loss: ``loss(weights, *sample)``, a scalar that depends on this sample alone: no batch norm.
        weights: With respect to which it is differentiated.
        batch: Tensors with samples in front, ``[b, ...]`` each.
        clip: Largest norm over all tensors of one sample's gradient, above 0.

    Returns:
        Tensors of the shapes of `weights`; zeros for an empty batch.
    """
    if not len(batch[0]):
        return zeros_like(weights)
    each = vmap(grad(loss), in_dims=(None, *(0 for _ in batch)), randomness="error")(
        weights, *batch
    )  # [b, ...] by name
    norms = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in each.values()]).sum(0).sqrt()  # [b]
    scale = (clip / norms.clamp_min(1e-12)).clamp_max(1.0)  # [b]
    return {name: torch.einsum("b,b...->...", scale, g) for name, g in each.items()}


def noisy_sum(
    loss: Callable[..., Tensor],
    weights: Weights,
    batch: tuple[Tensor, ...],
    clip: float,
    noise_multiplier: float,
    noise: KeyedStream,
) -> Weights:
    """`clipped_sum` with Gaussian noise of standard deviation ``noise_multiplier * clip`` on each coordinate.

    Args:
        loss: As in `clipped_sum`.
        weights: As in `clipped_sum`.
        batch: A Poisson sample; the noise is added to an empty one, too.
        clip: As in `clipped_sum`.
        noise_multiplier: Above 0.
        noise: Stream of the noise, which is added in float64 before the sum is rounded to the type of the weights.

    Returns:
        To be divided by the expected size of a batch, never by that of this one.
    """
    total = clipped_sum(loss, weights, batch, clip)
    std = noise_multiplier * clip
    return {name: (g.double() + noise.normal(g.shape).to(g.device) * std).to(g.dtype) for name, g in total.items()}
