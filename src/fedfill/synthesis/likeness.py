"""How like real samples synthetic ones are, with intervals, on features that need no data and so no download.

Fréchet distance with its floor, precision and recall, and a check for copies. All of it looks at real samples: an
observer's figures, by which nothing may be chosen that is released.
"""

from __future__ import annotations

import functools
import math

import torch
from scipy import stats
from torch import Tensor

from fedfill.data.samples import Samples
from fedfill.errors import FedfillError
from fedfill.models.features import FeatureMap, features
from fedfill.streams import torch_stream
from fedfill.synthesis.intervals import LEVEL, Estimate, share
from fedfill.synthesis.measures import frechet_distance, mapped

OF_IMAGES, OF_OTHERS = "conv(100) > project(256)", "fourier(256)"
FEATURES_SEED = 0
"""Of the map: one and the same for everybody, so that figures of one data set compare."""
LEAST_SIDE = 5
"""Pixels to a side below which images are rows of numbers to the map."""
NEIGHBOURS = 3
SAME = 1e-6
"""Distances of features that differ by less are equal: those of one sample depend on its batch in the last digits."""
MOST = 2000
"""Samples of each set that are compared with each other, one with all."""


@functools.lru_cache(maxsize=2)
def data_free(shape: tuple[int, ...]) -> tuple[FeatureMap, str]:
    """The map that all measures stand on: the same one for all inputs of a shape.

    Args:
        shape: Of one input.

    Returns:
        A map from normalised inputs to ``[b, 256]``, and its words.
    """
    image = len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) >= LEAST_SIDE
    words = OF_IMAGES if image else OF_OTHERS
    return features(words, shape, FEATURES_SEED)[0].eval(), words


@torch.inference_mode()
def data_free_features(inputs: Tensor) -> Tensor:
    """Features of inputs as they are stored, ``[n, ...]`` with n at least 1, by `data_free`: ``[n, 256]`` float64."""
    encoder, _ = data_free(tuple(inputs.shape[1:]))
    return mapped(encoder.to(inputs.device), inputs, 250).flatten(1).double()


def frechet(a: Tensor, b: Tensor, seed: int, draws: int = 40) -> Estimate:
    """The Fréchet distance of features, with an interval from bootstrap draws of both sides.

    A draw with replacement has fewer different samples, which raises the distance. So the draws tell the width alone: 1.96 of
    their deviations to each side.

    Args:
        a: ``[n, d]``, n at least 2.
        b: ``[m, d]``, m at least 2.
        seed: Of the draws.
        draws: How many, at least 2.

    Returns:
        The distance; the lower end is at least 0.
    """
    value = frechet_distance(a, b)
    stream = torch_stream(seed, "frechet", "bootstrap")
    found = []
    for _ in range(draws):
        one, other = (side[torch.randint(len(side), (len(side),), generator=stream).to(side.device)] for side in (a, b))
        found.append(frechet_distance(one, other))
    wide = float(stats.norm.ppf((1 + LEVEL) / 2)) * float(torch.tensor(found, dtype=torch.float64).std())
    return Estimate(value, max(0.0, value - wide), value + wide, min(len(a), len(b)))


def precision_recall(real: Tensor, made: Tensor, k: int = NEIGHBOURS) -> tuple[Estimate, Estimate]:
    """How much of the synthetic lies where real samples are, and how much of the real where synthetic ones are.

    Kynkäänniemi et al. 2019: a sample is covered by a set where it is no farther from some member than this member's k-th
    neighbour within the set. The intervals are for other samples of the covered kind, the set that covers them given.

    Args:
        real: Features, ``[n, d]`` with n above k.
        made: ``[n, d]``, equally many: a larger set covers more.
        k: Which neighbour.

    Returns:
        Precision and recall.

    Raises:
        FedfillError: Where the sets are not of one size, or too small.
    """
    if len(real) != len(made) or len(real) <= k:
        raise FedfillError(
            f"precision and recall: found {len(real)} real and {len(made)} synthetic samples; allowed: equally many, more than {k}"
        )
    n, across = len(real), _distances(real, made)  # [real, made]
    covered = (across <= _radii(real, k)[:, None]).any(0), (across <= _radii(made, k)).any(1)
    precision, recall = (share(int(some.sum()), n) for some in covered)
    return precision, recall


def _radii(x: Tensor, k: int) -> Tensor:
    """Distance of each to its k-th neighbour among the others, ``[n]``."""
    return _distances(x, x).fill_diagonal_(math.inf).kthvalue(k, dim=1).values


def _distances(a: Tensor, b: Tensor) -> Tensor:
    # differences in place of a product: the distance of two equal samples is 0, and both directions have the same bits
    return torch.cdist(a.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist")


def nearer_to_training(made: Tensor, training: Tensor, held: Tensor) -> Estimate:
    """The share of synthetic samples that are nearer to a training sample than to one that nobody trained on.

    Where training and held-out samples are of one kind and nothing was copied, each of the two is as likely: .5. Synthetic
    samples that have the same nearest neighbour say the same thing again, so the interval counts (sum m)^2 / sum m^2
    independent ones, m synthetic samples for each neighbour. Equal distances are left out.

    Args:
        made: Features, ``[n, d]``.
        training: ``[m, d]``, m at least 1.
        held: ``[m, d]``, equally many.

    Returns:
        The share, with n those that were not left out; .5 and the interval 0..1 where none is left.

    Raises:
        FedfillError: Where the two real sets are not of one size.
    """
    if len(training) != len(held) or not len(training):
        raise FedfillError(
            f"nearest: found {len(training)} training and {len(held)} held-out samples; allowed: equally many, at least 1"
        )
    (near, which), (far, other) = (_distances(made, real).min(1) for real in (training, held))
    decided = (near - far).abs() > SAME
    trained = (near < far)[decided]
    if not len(trained):
        return Estimate(0.5, 0.0, 1.0, 0)
    neighbours = torch.where(near < far, which, other + len(training))[decided]
    crowds = torch.bincount(neighbours).double()
    effective = float(crowds.sum().square() / crowds.square().sum())
    return share(int(trained.sum()), len(trained), effective)


def exact_copies(made: Tensor, training: Tensor) -> list[int]:
    """The synthetic samples that are a training sample, to the last bit.

    Args:
        made: As they are stored, ``[n, ...]``.
        training: Likewise, ``[m, ...]``.

    Returns:
        Their positions.
    """
    known = {row.tobytes() for row in training.cpu().flatten(1).numpy()}
    return [i for i, row in enumerate(made.cpu().flatten(1).numpy()) if row.tobytes() in known]


def some(samples: Samples, n: int, seed: int, what: str) -> Samples:
    """So many of the samples, drawn without replacement; all of them in their order where there are no more."""
    if n >= len(samples):
        return samples
    index = torch.randperm(len(samples), generator=torch_stream(seed, "measure", what))[:n]
    return samples[index.to(samples.labels.device)]
