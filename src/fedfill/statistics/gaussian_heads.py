"""Gaussian classifiers from sums: LDA, nearest class mean, naive Bayes and QDA.

LDA from class means and one Gram matrix is FedCGS's and GH-OFL's head, the nearest class mean FedNCM's (Legate et al.,
"Guiding The Last Layer in Federated Learning with Pre-Trained Models", NeurIPS 2023). A class that nobody holds is left
out, and never wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedfill.errors import FedfillError
from fedfill.statistics.covariance import class_covariances, class_means, oas, toward_sphere, within_covariance
from fedfill.statistics.heads import LinearHead, cholesky, linear, somebody, sums
from fedfill.statistics.spectral_noise import clipped, noise_edge

Prior = Literal["train", "uniform"] | Tensor
"""Of the classes where the head is used: as in the records, equal, or weights ``[C]``, 0 or more, of any sum."""

TIGHT = 1e-13
"""A spread within classes below this share of the mean square is rounding: its records are equal."""


def lda(
    gram: Tensor, moments: Tensor, counts: Tensor,
    shrinkage: Literal["oas"] | float = "oas", prior: Prior = "train", off_diagonal_std: float | None = None,
) -> LinearHead:  # fmt: skip
    """Linear discriminant analysis.

    Where the records of each class are all equal, LDA's limit is the nearest class mean, which knows no prior.

    Args:
        gram: G, ``[d, d]``.
        moments: M, ``[d, C]``.
        counts: N, ``[C]``.
        shrinkage: Share of (tr S_w / d) I in the covariance, 0..1, or by `oas`; not read under noise.
        prior: See `Prior`; a class of weight 0 never wins.
        off_diagonal_std: Of the noise in `gram`, if any: then negative eigenvalues of S_w are put at 0, and an eighth
            of the noise's edge over n is added to all.

    Returns:
        w_c = S^-1 mu_c, b_c = -mu_c' S^-1 mu_c / 2 + log pi_c.

    Raises:
        FedfillError: Where S is singular, as it may be without shrinkage, a share is none, or nobody holds a record.
    """
    gram, moments, counts = sums(gram, moments, counts)
    log_prior, present = log_weights(prior, counts)
    covariance, n = within_covariance(gram, moments, counts), float(counts.clamp(min=0).sum())
    if off_diagonal_std is not None:
        values, vectors = torch.linalg.eigh(covariance)
        values = clipped(values) + noise_edge(off_diagonal_std, len(gram)) / (8 * n)
        factor = cholesky((vectors * values) @ vectors.T)
    elif float(covariance.trace()) <= TIGHT * float(gram.trace()) / n:
        return nearest_mean(moments, torch.where(present, counts, 0.0))
    else:
        share = oas(covariance, n - float((counts > 0).sum())) if shrinkage == "oas" else shrinkage
        if not 0 <= share <= 1:
            raise FedfillError(f"shrinkage: found {share}; allowed: oas, or a share from 0 to 1")
        factor = cholesky(toward_sphere(covariance, share))
    if factor is None:
        found = "noise 0" if off_diagonal_std is not None else shrinkage
        raise FedfillError(
            f"shrinkage: found {found} where the covariance is singular; allowed: oas, or a larger share"
        )
    means = class_means(moments, counts)
    weight = torch.cholesky_solve(means.T, factor).T
    return linear(weight, log_prior - (means * weight).sum(1) / 2, present)


def nearest_mean(moments: Tensor, counts: Tensor) -> LinearHead:
    """The nearest class mean: w_c = mu_c, b_c = -||mu_c||^2 / 2, from moments ``[d, C]`` and counts ``[C]``."""
    moments, counts = sums(moments, counts)
    means = class_means(moments, counts)
    return linear(means, -(means**2).sum(1) / 2, counts > 0)


@dataclass(frozen=True)
class QuadraticHead:
    """Scores -||T_c (z - mu_c)||^2 / 2 + b_c, which no linear layer holds; the class is the first of the largest.

    Attributes:
        means: mu, ``[C, d]`` float64.
        whitening: T, ``[C, d, d]`` lower triangles, or ``[C, d]`` where they are diagonal; T_c'T_c is the precision.
        bias: ``[C]``, half the log determinant of the precision plus the log of the prior.
        present: ``[C]`` bool: the others never win.
    """

    means: Tensor
    whitening: Tensor
    bias: Tensor
    present: Tensor

    def scores(self, z: Tensor) -> Tensor:
        """``[n, C]`` float64, finite, for features ``[n, d]``."""
        z = z.double()
        scores = torch.empty(len(z), len(self.means), dtype=z.dtype)
        for c in self.present.nonzero().flatten().tolist():
            away, whitening = z - self.means[c], self.whitening[c]
            white = away * whitening if whitening.ndim == 1 else away @ whitening.T
            scores[:, c] = self.bias[c] - (white**2).sum(1) / 2
        lowest = scores[:, self.present].amin(1, keepdim=True)
        return torch.where(self.present, scores, 2 * lowest.clamp(max=0) - 1e9)


def naive_bayes(squares: Tensor, moments: Tensor, counts: Tensor, prior: Prior = "train") -> QuadraticHead:
    """Gaussian naive Bayes: a variance for every class and feature, divided by N_c.

    Variances are at least 1e-3 of their mean over the class's features; a class without any spread takes the pooled
    ones, and where no class has any, all are 1 and the prior is not read: the nearest class mean.

    Args:
        squares: Sums of z * z by class, ``[C, d]``: the diagonals of the class Grams.
        moments: M, ``[d, C]``.
        counts: N, ``[C]``.
        prior: See `Prior`.

    Returns:
        The head, with a diagonal whitening.
    """
    squares, moments, counts = sums(squares, moments, counts)
    log_prior, present = log_weights(prior, counts)
    means, held = class_means(moments, counts), torch.where(counts > 0, counts, 1.0)[:, None]
    second = torch.where((counts > 0)[:, None], squares / held, 0.0)
    variances = (second - means**2).clamp(min=0)
    share = counts.clamp(min=0) / counts.clamp(min=0).sum()
    pooled, least = share @ variances, TIGHT * (share @ second.abs()).mean()
    if pooled.mean() <= least:
        pooled, log_prior = torch.ones_like(pooled), torch.zeros_like(log_prior)
    variances = torch.where(variances.mean(1, keepdim=True) > least, variances, pooled)
    variances = torch.maximum(variances, 1e-3 * variances.mean(1, keepdim=True))
    return QuadraticHead(means, variances.rsqrt(), log_prior - variances.log().sum(1) / 2, present)


def qda(
    class_grams: Tensor, moments: Tensor, counts: Tensor,
    to_sphere: float = 0.1, to_pooled: float = 0.1, prior: Prior = "train",
) -> QuadraticHead:  # fmt: skip
    """Quadratic discriminant analysis, whose covariances are shrunk twice.

    Args:
        class_grams: Q, ``[C, d, d]``.
        moments: M, ``[d, C]``.
        counts: N, ``[C]``.
        to_sphere: Share of (tr/d) I in what the first step gives, 0..1.
        to_pooled: Share of the pooled covariance in each class's own, 0..1.
        prior: See `Prior`.

    Returns:
        The head. Where the records of each class are all equal, it is the nearest class mean.

    Raises:
        FedfillError: Where a covariance is singular all the same, or nobody holds a record.
    """
    class_grams, moments, counts = sums(class_grams, moments, counts)
    log_prior, present = log_weights(prior, counts)
    gram = torch.where((counts > 0)[:, None, None], class_grams, 0.0).sum(0)
    pooled, covariances = within_covariance(gram, moments, counts), class_covariances(class_grams, moments, counts)
    eye, n = torch.eye(len(gram), dtype=gram.dtype), float(counts.clamp(min=0).sum())
    whitening, bias = torch.zeros_like(class_grams), torch.zeros_like(log_prior)
    tight = float(pooled.trace()) <= TIGHT * float(gram.trace()) / n
    for c in present.nonzero().flatten().tolist():
        own = toward_sphere((1 - to_pooled) * covariances[c] + to_pooled * pooled, to_sphere)
        factor = eye if tight else cholesky(own)
        if factor is None:
            raise FedfillError(
                f"shrinkage: found {to_sphere:g} where the covariance of class {c} is singular; allowed: a larger share"
            )
        whitening[c] = torch.linalg.solve_triangular(factor, eye, upper=False)
        bias[c] = 0.0 if tight else log_prior[c] - factor.diagonal().log().sum()
    return QuadraticHead(class_means(moments, counts), whitening, bias, present)


def log_weights(prior: Prior, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The log of the classes' prior, ``[C]`` and finite, and which classes may win.

    Args:
        prior: See `Prior`.
        counts: N, ``[C]`` float64.

    Returns:
        Zeros for classes that may not: those that nobody holds, or of weight 0.

    Raises:
        FedfillError: Where the weights are none, or nobody holds a record.
    """
    somebody(counts > 0)
    if isinstance(prior, Tensor):
        weights = prior.double()
        if weights.shape != counts.shape or not torch.isfinite(weights).all() or (weights < 0).any():
            raise FedfillError(f"prior: found {weights.tolist()}; allowed: {len(counts)} finite weights, 0 or more")
    else:
        weights = counts if prior == "train" else torch.ones_like(counts)
    present = (counts > 0) & (weights > 0)
    if not present.any():
        raise FedfillError("prior: found no weight on a class that somebody holds; allowed: one such class or more")
    weights = torch.where(present, weights, 0.0)
    return torch.where(present, weights / weights.sum(), 1.0).log(), present
