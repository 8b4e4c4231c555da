"""Gaussian mixtures of features by class, fitted where the records are, and draws from them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedfill.tree import Record

Covariance = Literal["full", "diag", "spherical"]
"""Of a component: a matrix, a variance for each feature, or one for all."""
LEAST_VARIANCE = 1e-6
"""What is added to every variance, so that no component is a point."""


@dataclass(frozen=True)
class Mixture(Record):
    """Components of the mixtures of all classes, class after class.

    Attributes:
        labels: Class of each component, ``[m]`` int64.
        sizes: How many records each stands for, ``[m]`` float32: the class's number times the component's weight.
        means: ``[m, d]`` float32.
        covariances: ``[m, d, d]`` with full, ``[m, d]`` with diag, ``[m]`` with spherical.
    """

    labels: Tensor
    sizes: Tensor
    means: Tensor
    covariances: Tensor

    def __len__(self) -> int:
        """How many components there are."""
        return len(self.labels)


def fit_mixtures(z: Tensor, labels: Tensor, components: int, covariance: Covariance, seed: int) -> Mixture:
    """Mixtures by expectation maximisation, one for each class that has records.

    Args:
        z: Features, ``[n, d]``.
        labels: ``[n]``.
        components: Of each class, J; a class with fewer records has as many as these.
        covariance: Kind.
        seed: Of the starts.

    Returns:
        All components; none where there is no record.
    """
    from sklearn.exceptions import ConvergenceWarning  # here: it takes as long to load as half of torch
    from sklearn.mixture import GaussianMixture

    d = z.shape[1]
    shape = {"full": (0, d, d), "diag": (0, d), "spherical": (0,)}[covariance]
    found: list[list[Tensor]] = [[labels.new_zeros(0)], [z.new_zeros(0)], [z.new_zeros(0, d)], [z.new_zeros(shape)]]
    for c in sorted(set(labels.tolist())):
        own = z[labels == c].double().numpy()
        if len(own) == 1:  # which is no sample to the library
            one = {"full": torch.eye(d)[None], "diag": torch.ones(1, d), "spherical": torch.ones(1)}[covariance]
            parts = [torch.ones(1), z[labels == c], LEAST_VARIANCE * one]
        else:
            mixture = GaussianMixture(
                min(components, len(own)), covariance_type=covariance, reg_covar=LEAST_VARIANCE, init_params="k-means++",
                random_state=seed,
            )  # fmt: skip
            with warnings.catch_warnings():  # an end by the number of steps is as good
                warnings.simplefilter("ignore", ConvergenceWarning)
                mixture.fit(own)
            fitted = (len(own) * mixture.weights_, mixture.means_, mixture.covariances_)
            parts = [torch.from_numpy(x) for x in fitted]
        for place, x in zip(found, [torch.full((len(parts[0]),), c), *(x.float() for x in parts)], strict=True):
            place.append(x)
    return Mixture(*(torch.cat(place) for place in found))


def draw_from(mixture: Mixture, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """As many draws from each component as it stands for records, at least one.

    Args:
        mixture: One component or more.
        generator: Stream of the draws.

    Returns:
        Features ``[n, d]`` float64 and labels ``[n]``, component after component.
    """
    samples, labels = [], []
    for c, size, mean, covariance in zip(
        mixture.labels, mixture.sizes, mixture.means.double(), mixture.covariances.double(), strict=True
    ):
        n = max(1, round(float(size)))
        draws = torch.randn(n, len(mean), generator=generator, dtype=torch.float64, device=generator.device).cpu()
        if covariance.dim() == 2:
            values, vectors = torch.linalg.eigh(covariance)
            spread = draws @ (vectors * values.clamp(min=0).sqrt()).T
        else:
            spread = draws * covariance.clamp(min=0).sqrt()
        samples.append(mean + spread)
        labels.append(c.expand(n))
    return torch.cat(samples), torch.cat(labels)
