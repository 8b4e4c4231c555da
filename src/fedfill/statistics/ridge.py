"""Ridge regression on one-hot labels, from the sums G = Z'Z, M = Z'Y and the class counts alone.

W = (G + lambda I)^-1 M has no intercept. It is Fed3R's head (Fanì et al., "Accelerating Heterogeneous Federated
Learning with Closed-form Classifiers", ICML 2024) and, as sums add up, AFL's (He et al., "AFL: A Single-Round Analytic
Approach for Federated Learning with Pre-trained Models", CVPR 2025). Lambda is chosen without any record by
generalised cross-validation (Golub, Heath and Wahba 1979) or by the evidence (MacKay 1992). Two data sets with equal
sums can differ in their leave-one-out errors, so these are sums of their own, once the first are known.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedfill.errors import FedfillError
from fedfill.statistics.heads import LinearHead, allowed, cholesky, linear, rounding, singular, sums
from fedfill.statistics.spectral_noise import clipped, noise_edge, shrunk
from fedfill.statistics.sums import one_hot

log = logging.getLogger("fedfill")

FLOOR = 1e-7
"""What is added to lambda under noise, in shares of n, so that the solution stays finite where the noise ends."""


def ridge(
    gram: Tensor, moments: Tensor, lam: float, counts: Tensor | None = None, column_norm: bool = False
) -> LinearHead:
    """The ridge head for one lambda; for several, `Spectrum` is cheaper.

    Args:
        gram: G, ``[d, d]``.
        moments: M, ``[d, C]``.
        lam: Lambda, on the scale of the eigenvalues of G.
        counts: ``[C]``, to know the classes that nobody holds; none: every class is held.
        column_norm: Whether each class's weights are scaled to length 1, a heuristic against imbalance.

    Returns:
        The head; its bias is zero but for absent classes.

    Raises:
        FedfillError: Where lambda is negative, or too small for a singular G.
    """
    gram, moments = sums(gram, moments)
    factor = cholesky(gram + lam * torch.eye(len(gram), dtype=gram.dtype)) if allowed(lam) else None
    if factor is None:
        raise singular(lam)
    return _head(torch.cholesky_solve(moments, factor), counts, column_norm)


@dataclass(frozen=True)
class Spectrum:
    """G = V diag(s) V' and V'M: one decomposition serves every lambda.

    Attributes:
        values: s, ``[d]`` float64, ascending.
        vectors: V, ``[d, d]``, columns.
        projected: V'M, ``[d, C]``.
    """

    values: Tensor
    vectors: Tensor
    projected: Tensor

    @classmethod
    def of(cls, gram: Tensor, moments: Tensor) -> Spectrum:
        """The decomposition of G ``[d, d]``, with M ``[d, C]``."""
        gram, moments = sums(gram, moments)
        if len(gram) >= 1024:  # it takes seconds, and eight times as long for twice as many
            log.info("solving for %s features", f"{len(gram):,}")
        values, vectors = torch.linalg.eigh(gram)
        return cls(values, vectors, vectors.T @ moments)

    def solution(self, lam: float, counts: Tensor | None = None, column_norm: bool = False) -> LinearHead:
        """As `ridge`."""
        if not self.solvable(lam):
            raise singular(lam)
        weight = self.vectors @ (self.projected / (self.values + lam)[:, None])
        return _head(weight, counts, column_norm)

    def solvable(self, lam: float) -> bool:
        """Whether G + lambda I is positive definite beyond rounding."""
        return allowed(lam) and bool((self.values + lam).min() > rounding(self.values + lam))

    def effective_parameters(self, lam: float) -> float:
        """The trace of the hat matrix, sum_j s_j / (s_j + lambda)."""
        s, _ = self._held()
        return float((s / (s + lam)).sum())

    def residuals(self, lam: float, counts: Tensor) -> Tensor:
        """The residual sum of squares of each class's 0/1 targets over all records.

        N_c - 2 m'w + w'Gw cancels to nothing where lambda is small. So what lies outside the span of the features, and
        does not depend on lambda, is kept apart from what shrinking leaves, a sum of squares.

        Args:
            lam: Lambda.
            counts: N, ``[C]``, whose sum is n.

        Returns:
            ``[C]``, none negative.
        """
        s, squares = self._held()
        shrunk = (squares * (lam**2 / (s * (s + lam) ** 2))[:, None]).sum(0)
        return self._outside(counts.double(), float(counts.sum())) + shrunk

    def gcv(self, lam: float, n: float) -> float:
        """Generalised cross-validation, n RSS / (n - df)^2, for n records; the smaller the better."""
        s, squares = self._held()
        shrunk = float((squares.sum(1) * lam**2 / (s * (s + lam) ** 2)).sum())
        free = max(n - len(s), 0) + float((lam / (s + lam)).sum())  # n - df, which would cancel
        return n * (self._left(n) + shrunk) / free**2 if free > 0 else math.inf

    def evidence(self, lam: float, n: float) -> float:
        """The log evidence of a Gaussian prior on W, up to a constant, for n records; the larger the better.

        Targets of all classes share one variance of noise, put at its most likely value.

        Args:
            lam: Lambda, the ratio of the variances of noise and prior; more than 0.
            n: Records.

        Returns:
            -(C/2) [n log(q / (nC)) + log det(I + G / lambda)], q = n - sum_c m_c'(G + lambda I)^-1 m_c.
        """
        s, squares = self._held()
        q = self._left(n) + float((squares.sum(1) * lam / (s * (s + lam))).sum())
        classes = self.projected.shape[1]
        fit = n * math.log(max(q, math.ulp(n)) / (n * classes))
        return -classes / 2 * (fit + float(torch.log1p(s / lam).sum()))

    def _held(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues beyond rounding, ``[rank]``, and the squares of V'M in their rows, ``[rank, C]``."""
        held = self.values > rounding(self.values)
        return self.values[held], self.projected[held] ** 2

    def _outside(self, squared: Tensor, n: float) -> Tensor:
        """What least squares leaves of targets with these sums of squares: nothing where n features are independent."""
        s, squares = self._held()
        left = (squared - (squares / s[:, None]).sum(0)).clamp(min=0)
        return left if n > len(s) else torch.zeros_like(left)

    def _left(self, n: float) -> float:
        """As `_outside` for all classes together: one-hot targets have n for their sum of squares."""
        s, squares = self._held()
        return max(n - float((squares.sum(1) / s).sum()), 0.0) if n > len(s) else 0.0


def noisy_ridge(
    gram: Tensor, moments: Tensor, n: float, off_diagonal_std: float,
    counts: Tensor | None = None, shrinkage: Literal["clip", "spiked"] = "clip", strength: float | None = None,
) -> LinearHead:  # fmt: skip
    """The ridge head from noisy sums, with a lambda from public numbers alone.

    Args:
        gram: With noise, ``[d, d]``, symmetric.
        moments: With noise, ``[d, C]``.
        n: Records, as far as the public knows.
        off_diagonal_std: Of the noise in `gram` off the diagonal.
        counts: As in `ridge`.
        shrinkage: Negative eigenvalues at 0, or `shrunk`.
        strength: Lambda in shares of the noise's edge; none: 1/8 with clip, 1/4 with spiked.

    Returns:
        The head for lambda = strength * edge + 1e-7 n.
    """
    spectrum = Spectrum.of(gram, moments)
    edge = noise_edge(off_diagonal_std, len(gram))
    values = clipped(spectrum.values) if shrinkage == "clip" else shrunk(spectrum.values, edge)
    if strength is None:
        strength = 1 / 8 if shrinkage == "clip" else 1 / 4
    return replace(spectrum, values=values).solution(strength * edge + FLOOR * max(n, 1), counts)


@dataclass(frozen=True)
class Choice:
    """A lambda that a rule chose.

    Attributes:
        lam: Lambda.
        grid: All that were tried, ascending.
        scores: Of each, the smaller the better.
        end: Which end of the grid was chosen, None where neither: beyond it there may be a better one.
    """

    lam: float
    grid: tuple[float, ...]
    scores: tuple[float, ...]
    end: Literal["lowest", "highest"] | None

    @classmethod
    def least(cls, grid: Sequence[float], scores: Sequence[float]) -> Choice:
        """The lambda of the least score, the smaller one on a tie."""
        best = min(range(len(grid)), key=scores.__getitem__)
        end: Literal["lowest", "highest"] | None = (
            "lowest" if best == 0 else "highest" if best == len(grid) - 1 else None
        )
        return cls(grid[best], tuple(grid), tuple(scores), end)


def lambdas(spectrum: Spectrum, n: float, grid: Sequence[float] | None = None) -> tuple[float, ...]:
    """What a rule tries.

    Args:
        spectrum: Of sums without noise.
        n: Records.
        grid: More than 0 each; none: 25 from 1e-8 to 1 times the trace of G, which is n for features of length 1, evenly
            on a log scale.

    Returns:
        Those for which G + lambda I is not singular, ascending.

    Raises:
        FedfillError: Where there is no record, or lambda is not more than 0.
    """
    if n <= 0:
        raise FedfillError(f"head: found {n:g} records; allowed: sums over one record or more")
    if grid is None:
        scale = float(clipped(spectrum.values).sum()) or n
        grid = [scale * 10 ** (k / 3 - 8) for k in range(25)]
    if not grid or not all(allowed(lam) and lam > 0 for lam in grid):
        raise FedfillError(f"ridge_lambda: found the grid {list(grid)}; allowed: one number or more, above 0")
    tried = tuple(lam for lam in sorted(grid) if spectrum.solvable(lam))
    if not tried:
        raise singular(max(grid))
    return tried


def choose_lambda(
    spectrum: Spectrum, n: float, rule: Literal["gcv", "evidence"] = "gcv", grid: Sequence[float] | None = None
) -> Choice:
    """The best lambda of a grid, from exact sums alone.

    Args:
        spectrum: Of sums without noise.
        n: Records.
        rule: Least generalised cross-validation, too small a lambda where records are repeated, or most evidence.
        grid: As in `lambdas`.

    Returns:
        The choice, the smaller lambda on a tie.

    Raises:
        FedfillError: As in `lambdas`.
    """
    tried = lambdas(spectrum, n, grid)
    return Choice.least(tried, [spectrum.gcv(lam, n) if rule == "gcv" else -spectrum.evidence(lam, n) for lam in tried])


def leave_one_out(spectrum: Spectrum, lam: float, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """How the heads do that are each fitted without one of the records, of those that made the sums; exact.

    With h the leverage of a record, z'(G + lambda I)^-1 z, and r the residual of the head of all records, the head without
    it has the residual r / (1 - h).

    Args:
        spectrum: Of sums without noise, over these records and others.
        lam: Lambda, more than 0.
        z: Features, ``[b, d]`` float64.
        labels: ``[b]``.

    Returns:
        The squared length of each record's residual over all classes, and whether its class is not the first of the
        largest scores; ``[b]`` each.
    """
    rotated = z @ spectrum.vectors
    spread = rotated / (spectrum.values + lam)
    leverage = (rotated * spread).sum(1)
    targets = one_hot(labels, spectrum.projected.shape[1])
    residuals = (targets - spread @ spectrum.projected) / (1 - leverage)[:, None]
    return residuals.square().sum(1), (targets - residuals).argmax(1) != labels


def _head(weight: Tensor, counts: Tensor | None, column_norm: bool) -> LinearHead:
    present = torch.ones(weight.shape[1], dtype=torch.bool) if counts is None else counts > 0
    if column_norm:
        lengths = weight.norm(dim=0)
        weight = weight / torch.where(lengths > 0, lengths, 1.0)
    return linear(weight.T.contiguous(), torch.zeros(weight.shape[1], dtype=weight.dtype), present)
