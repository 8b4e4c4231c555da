"""Aggregation: from the clients' tensors to the server's."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from fedfill.tree import Weights


def weighted_mean(updates: Iterable[tuple[Weights, float]]) -> Weights:
    """The weighted mean of the clients' tensors (McMahan et al. 2017, algorithm 1), summed in the order given.

    Floating-point tensors, running statistics of normalisation layers among them, are averaged with weights that are
    normalised over the updates at hand. Integer tensors, such as batch counters, can't be averaged: they are copied from
    the update with the largest weight, the first of them on a tie.

    Args:
        updates: Pairs of tensors by name and a weight >= 0, at least one of them positive; callers pass client order.

    Returns:
        New tensors under the same names.

    Raises:
        ValueError: Where there is no update, a weight is negative or not finite or all are zero, or names or shapes differ.
    """
    pairs = list(updates)
    total = float(sum(weight for _, weight in pairs))
    if not pairs or not 0 < total < math.inf or any(weight < 0 for _, weight in pairs):
        raise ValueError("weighted_mean needs at least one update, weights >= 0 and a positive sum")
    largest, _ = max(pairs, key=lambda pair: pair[1])
    mean = {
        name: torch.zeros_like(tensor) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in largest.items()
    }
    for weights, weight in pairs:
        if weights.keys() != mean.keys():
            raise ValueError("weighted_mean needs updates with the same names")
        for name, tensor in weights.items():
            if tensor.shape != mean[name].shape:
                raise ValueError(f"weighted_mean needs updates with the same shapes, and those of '{name}' differ")
            if tensor.is_floating_point():
                mean[name].add_(tensor, alpha=weight / total)
    return mean
