"""Softmax regression by full-batch steps, of which each needs one sum of gradients over all records.

The Hessian of the summed loss is at most (1/2)(I - 11'/C) (x) G (Böhning, "Multinomial Logistic Regression Algorithm",
1992). So B = G/2 + lambda I bounds it once and for all, and a step by B^-1 needs no learning rate and never raises the
loss. W is ``[d, C]`` as the moments are, zero at the start; there is no intercept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedfill.statistics.heads import LinearHead, allowed, cholesky, linear, singular, sums
from fedfill.statistics.spectral_noise import clipped, noise_edge

FINE_GRADIENT = 18
"""Bits behind the point of p - e_y where gradients are whole numbers: with 12 of z, 2^23 records add up exactly in float64."""


def gradient_sum(
    weight: Tensor, z: Tensor, labels: Tensor, clip: float | None = None, bits: int | None = None
) -> Tensor:
    """The gradient of the cross-entropy, summed over records.

    Args:
        weight: W, ``[d, C]``, the same for all records.
        z: Features, ``[n, d]``.
        labels: ``[n]`` int64, 0..C-1.
        clip: Longest contribution of one record, in l2; none: as `gradient_bound` says.
        bits: Where p - e_y is rounded towards zero to multiples of 2^-bits, which makes no contribution longer; none: it is not.

    Returns:
        sum z (p - e_y)' with p = softmax(W'z), ``[d, C]`` float64.
    """
    z = z.double()
    residual = torch.softmax(z @ weight.double(), 1)
    residual[torch.arange(len(z)), labels] -= 1
    if clip is not None:
        lengths = z.norm(dim=1) * residual.norm(dim=1)
        residual *= (clip / lengths.clamp(min=clip))[:, None]
    if bits is not None:
        residual.mul_(2.0**bits).trunc_().mul_(2.0**-bits)
    return z.T @ residual


def gradient_bound(radius: float, clip: float | None = None) -> float:
    """The longest contribution of a record to `gradient_sum`, for features up to length R: sqrt(2) R, or the clip."""
    bound = math.sqrt(2) * radius
    return bound if clip is None else min(bound, clip)


def preconditioner(gram: Tensor, lam: float) -> Tensor:
    """The lower Cholesky factor of B = G/2 + lambda I.

    Args:
        gram: G, ``[d, d]``.
        lam: Lambda of the term (lambda/2) ||W||^2 in the loss; 1e-6 n does without noise.

    Returns:
        ``[d, d]`` float64.

    Raises:
        FedfillError: Where B is singular.
    """
    (gram,) = sums(gram)
    return _factor(gram / 2 + lam * torch.eye(len(gram), dtype=gram.dtype), lam)


def noisy_preconditioner(gram: Tensor, off_diagonal_std: float, strength: float = 1 / 4) -> Tensor:
    """As `preconditioner`, from a noisy Gram matrix, for steps whose loss has no lambda.

    A rough matrix is enough: its errors slow the steps down, and do not change where they lead.

    Args:
        gram: With noise, ``[d, d]``, symmetric.
        off_diagonal_std: Of the noise off the diagonal.
        strength: What is added to all eigenvalues, in shares of the noise's edge; the negative ones are put at 0 first.

    Returns:
        ``[d, d]`` float64.

    Raises:
        FedfillError: Where B is singular, as it may be without noise.
    """
    (gram,) = sums(gram)
    values, vectors = torch.linalg.eigh(gram)
    added = strength * noise_edge(off_diagonal_std, len(gram))
    return _factor((vectors * (clipped(values) + added)) @ vectors.T / 2, added)


def step(weight: Tensor, gradient: Tensor, factor: Tensor, lam: float = 0.0) -> Tensor:
    """One step, W - B^-1 (S + lambda W).

    Args:
        weight: W, ``[d, C]`` float64.
        gradient: S, of `gradient_sum` over all records, with or without noise, ``[d, C]``.
        factor: Of `preconditioner`, with the same lambda, or of `noisy_preconditioner`.
        lam: Lambda.

    Returns:
        The next W.
    """
    (gradient,) = sums(gradient)
    return weight - torch.cholesky_solve(gradient + lam * weight, factor)


def softmax_head(weight: Tensor, counts: Tensor | None = None) -> LinearHead:
    """The head of W ``[d, C]``; with counts ``[C]``, classes that nobody holds never win."""
    classes = weight.shape[1]
    present = torch.ones(classes, dtype=torch.bool) if counts is None else counts > 0
    return linear(weight.T.double().contiguous(), torch.zeros(classes, dtype=torch.float64), present)


def _factor(bound: Tensor, added: float) -> Tensor:
    factor = cholesky(bound) if allowed(added) else None
    if factor is None:
        raise singular(added)
    return factor
