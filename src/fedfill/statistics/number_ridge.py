"""Ridge regression of one number with an intercept, from sums over all records: Hoerl and Kennard 1970, centred by the sums themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedfill.privacy import sums as privacy
from fedfill.privacy.sums import BlockBound
from fedfill.statistics.heads import LinearHead
from fedfill.statistics.ridge import FLOOR, Spectrum
from fedfill.statistics.spectral_noise import clipped, noise_edge
from fedfill.statistics.sums import FINE, GRID, NO_BOUND, Block, Statistic, require_memory, truncated
from fedfill.tree import Weights

STRENGTH = 0.5
"""Lambda under noise, in shares of the noise's largest eigenvalue. Classes bear an eighth, as only their order counts; the error of a
number is twice as large there. Found on generated tables, where it is flat from a half to one."""


def number_moments(d: int, radius: float, *, stepped: bool = False) -> Statistic:
    """The sums that the regression needs.

    Args:
        d: Length of a feature vector z.
        radius: Length of the longest; infinite where nothing bounds it.
        stepped: Whether numbers are truncated towards zero to multiples of 2^-12, as bounded features are: then all sums are exact and
            can be told in whole steps.

    Returns:
        For numbers y of -1..1 the sums of z z' as ``gram`` ``[d, d]``, of z y as ``moments`` ``[d, 1]``, of z as ``total`` ``[d]``,
        of y and y^2 as ``numbers`` ``[2]``, and how many records there are as ``counts`` ``[1]``.

    Raises:
        FedfillError: Where they would not fit into memory.
    """
    bounded = min(radius, NO_BOUND)
    once, twice = (GRID, 2 * GRID) if stepped and radius <= FINE else (None, None)
    blocks = {
        "gram": Block((d, d), privacy.gram(bounded, d), symmetric=True, bits=twice),
        "moments": Block((d, 1), privacy.other(bounded, d), bits=twice),
        "total": Block((d,), privacy.other(bounded, d), bits=once),
        # (y, y^2) is (1, 1) at the most, and (-1, 1) is as far from it as any
        "numbers": Block((2,), BlockBound(math.sqrt(2), 2.0, 2), bits=twice),
        "counts": Block((1,), privacy.counts(1), bits=0),
    }
    require_memory(d, blocks)

    def add(sums: Weights, z: Tensor, labels: Tensor) -> None:
        y = truncated(labels) if stepped else labels.to(torch.float64)
        sums["gram"].addmm_(z.T, z)
        sums["moments"].addmm_(z.T, y[:, None])
        sums["total"] += z.sum(0)
        sums["numbers"] += torch.stack([y.sum(), y.square().sum()])
        sums["counts"] += len(y)

    return Statistic(blocks, add, "sums of features, of a number and of their products")


@dataclass(frozen=True)
class Centred:
    """The regression's sums, less their means.

    Attributes:
        spectrum: Of sum (z - mean z)(z - mean z)' and sum (z - mean z)(y - mean y), the latter scaled so that the squares of the
            centred numbers would add up to `degrees`, as those of one-hot labels do to their number: what chooses lambda from
            sums counts on it.
        mean: Of z, ``[d]``.
        middle: Of y.
        scale: By which the numbers were multiplied; 0 where they don't vary.
        degrees: Records less one, which the intercept costs.
    """

    spectrum: Spectrum
    mean: Tensor
    middle: float
    scale: float
    degrees: float

    @classmethod
    def of(cls, sums: Weights) -> Centred:
        """Those of `number_moments`, over one record or more; with noise fewer than one are taken for one."""
        n = max(float(sums["counts"].sum()), 1.0)
        mean, middle = sums["total"] / n, min(max(float(sums["numbers"][0]) / n, -1.0), 1.0)
        gram = sums["gram"] - n * torch.outer(mean, mean)
        moments = sums["moments"] - n * middle * mean[:, None]
        spread = float(sums["numbers"][1]) - n * middle**2
        varies = n > 1 and spread > 1e-12 * n
        scale = math.sqrt((n - 1) / spread) if varies else 0.0
        return cls(Spectrum.of((gram + gram.T) / 2, moments * scale), mean, middle, scale, max(n - 1, 1.0))

    def head(self, lam: float) -> LinearHead:
        """The layer that predicts y for one lambda: weights ``[1, d]`` and the intercept, which is not shrunk."""
        if not self.scale:
            return LinearHead(torch.zeros(1, len(self.mean), dtype=torch.float64), self.mean.new_tensor([self.middle]))
        weight = self.spectrum.solution(lam).weight / self.scale
        return LinearHead(weight, self.middle - weight @ self.mean)

    def noisy_head(self, stds: Mapping[str, float], strength: float | None = None) -> LinearHead:
        """The layer from sums with noise, as `fedfill.statistics.ridge.noisy_ridge` has it for classes.

        The squares of what the weights predict, sum_j s_j (m_j / (s_j + lambda))^2, come from noise alone, too. Where they are no more than
        that and four of its deviations, the weights are 0: the model says the mean of y, or 0 where not even the number of records
        stands out.

        Args:
            stds: By block: standard deviation of the noise on a coordinate; on that of ``gram`` off the diagonal by the root of 2 less.
            strength: Lambda in shares of the noise's largest eigenvalue; None: `STRENGTH`.

        Returns:
            Weights ``[1, d]`` and the intercept, for lambda = strength times the edge of the noise + 1e-7 n. Negative eigenvalues count
            as 0.
        """
        edge = noise_edge(stds["gram"] / math.sqrt(2), len(self.mean))
        lam = (STRENGTH if strength is None else strength) * edge + FLOOR * (self.degrees + 1)
        values = clipped(self.spectrum.values)
        weights = values / (values + lam) ** 2
        told = float((self.spectrum.projected[:, 0].square() * weights).sum())
        # centring adds the noise in the sums of z and of y, the latter along one direction, to that in the sum of z y
        std = self.scale * math.hypot(
            stds["moments"],
            self.middle * stds["total"],
            float(self.mean.norm()) * stds["numbers"] / math.sqrt(len(self.mean)),
        )
        alone = std**2 * (float(weights.sum()) + 4 * math.sqrt(2 * float(weights.square().sum())))
        if self.degrees + 1 <= 3 * stds["counts"]:  # nobody knows how many rows there are, and so no mean
            return replace(self, scale=0.0, middle=0.0).head(lam)
        if told <= alone:
            return replace(self, scale=0.0).head(lam)
        return replace(self, spectrum=replace(self.spectrum, values=values)).head(lam)
