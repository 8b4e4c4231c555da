"""Matched averaging: which units of several networks are the same, and their mean.

Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (PFNM), ICML 2019, with as many global units as
each client has. A client's unit v is a global unit theta and noise, theta is normal about 0. What the paper says of units that
new clients bring, and of how many clients have a unit, is then the same for all pairs and drops out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def gains(units: Tensor, precision: Tensor, sums: Tensor, known: Tensor) -> Tensor:
    """What it is worth to match a client's units with global ones (PFNM, proposition 1, without what all pairs share).

    Args:
        units: The client's, ``[L, q]`` float64.
        precision: Of the client's numbers about those of a global unit, 1 / sigma^2, ``[q]``.
        sums: Of each global unit, the sum of precision times value over the clients that are matched, ``[L, q]``.
        known: The sum of these precisions, with the prior's, ``[q]``.

    Returns:
        Of the client's unit l (rows) with the global unit i (columns), ``[L, L]``: the sum over q of
        (sums + precision v)^2 / (known + precision) - sums^2 / known.
    """
    total = known + precision
    share = torch.where(total > 0, 1 / total, 0.0)  # a number that nobody knows anything about counts nothing
    own = precision * units
    joined = (own.square() @ share)[:, None] + 2 * (own * share) @ sums.T + sums.square() @ share
    return joined - torch.where(known > 0, sums.square() / known, 0.0).sum(1)


def match(units: Sequence[Tensor], precisions: Sequence[Tensor], prior: float = 0.0, sweeps: int = 5) -> list[Tensor]:
    """Match the units of several clients: the first client's in their order, the others one client after the other.

    Then each client in turn is taken out and matched again, until nothing changes.

    Args:
        units: Of each client, ``[L, q]`` float64 on the CPU.
        precisions: Of each client's numbers, ``[q]``.
        prior: Precision of a global unit's numbers about 0, 1 / sigma_0^2; 0: nothing is known of them.
        sweeps: How often all clients are matched again, at the most.

    Returns:
        Of each client, which global unit each of its units is: int64 ``[L]``, a permutation.
    """
    places = [torch.arange(len(units[0]))]
    sums, known = precisions[0] * units[0], prior + precisions[0]

    def placed(j: int) -> Tensor:
        found = gains(units[j], precisions[j], sums, known)
        return torch.from_numpy(linear_sum_assignment(found.numpy(), maximize=True)[1])

    def part(j: int) -> Tensor:
        return (precisions[j] * units[j])[places[j].argsort()]

    for j in range(1, len(units)):
        places.append(placed(j))
        sums, known = sums + part(j), known + precisions[j]
    for _ in range(sweeps if len(units) > 1 else 0):
        before = list(places)
        for j in range(len(units)):
            # added up anew, as a difference would leave a rest where the others know nothing
            known = sum((p for k, p in enumerate(precisions) if k != j), torch.full_like(precisions[j], prior))
            sums = sums - part(j)
            places[j] = placed(j)
            sums = sums + part(j)
        if all(torch.equal(old, new) for old, new in zip(before, places, strict=True)):
            break
    return places


def matched_mean(values: Iterable[Tensor], precisions: Iterable[Tensor], prior: float = 0.0) -> Tensor:
    """The most likely global numbers, given clients' that are in the same order.

    Args:
        values: Of each client, of one shape.
        precisions: Of each client, of a shape that spreads over it.
        prior: As in `match`; 0: the weighted mean, and above 0 nearer to 0.

    Returns:
        sum of precision times value / (prior + sum of precision), of that shape, in float64.
    """
    total: Tensor | float = 0.0
    known: Tensor | float = prior
    for value, precision in zip(values, precisions, strict=True):
        total, known = total + precision * value.double(), known + precision
    return torch.as_tensor(total) / known


def class_shares(counts: Tensor) -> Tensor:
    """Of each class, the share of its records that each client has.

    Args:
        counts: Records by client and class, ``[J, C]``.

    Returns:
        ``[J, C]`` float64, each column with the sum 1; of a class without a record all clients have the same share.
    """
    total = counts.double().sum(0)
    return torch.where(total > 0, counts / total.clamp(min=1), 1 / len(counts))
