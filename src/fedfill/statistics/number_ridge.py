"""Ridge regression of one number with an intercept, from sums over all records: Hoerl and Kennard 1970, centred by the sums themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfill.privacy import sums as privacy
from fedfill.statistics.heads import LinearHead
from fedfill.statistics.ridge import Spectrum
from fedfill.statistics.sums import NO_BOUND, Block, Statistic, require_memory
from fedfill.tree import Weights


def number_moments(d: int, radius: float) -> Statistic:
    """The sums that the regression needs.

    Args:
        d: Length of a feature vector z.
        radius: Length of the longest; infinite where nothing bounds it.

    Returns:
        For numbers y of -1..1 the sums of z z' as ``gram`` ``[d, d]``, of z y as ``moments`` ``[d, 1]``, of z as ``total`` ``[d]``,
        of y and y^2 as ``numbers`` ``[2]``, and how many records there are as ``counts`` ``[1]``.

    Raises:
        FedfillError: Where they would not fit into memory.
    """
    bounded = min(radius, NO_BOUND)
    blocks = {
        "gram": Block((d, d), privacy.gram(bounded, d), symmetric=True),
        "moments": Block((d, 1), privacy.other(bounded, d)),
        "total": Block((d,), privacy.other(bounded, d)),
        "numbers": Block((2,), privacy.other(math.sqrt(2), 2)),
        "counts": Block((1,), privacy.counts(1), bits=0),
    }
    require_memory(d, blocks)

    def add(sums: Weights, z: Tensor, labels: Tensor) -> None:
        y = labels.to(torch.float64)
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
        """Those of `number_moments`, over one record or more."""
        n = float(sums["counts"].sum())
        mean, middle = sums["total"] / n, float(sums["numbers"][0]) / n
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
