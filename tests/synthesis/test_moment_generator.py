"""A generator that is trained towards mean features: the distance by hand, its bias, and that it arrives."""

from __future__ import annotations

import pytest
import torch

from fedfill.models.features import features
from fedfill.synthesis.gan import start
from fedfill.synthesis.gan_networks import GANSettings, Generator
from fedfill.synthesis.moment_generator import distance, distance_of_seconds, match_means


def test_the_distances_by_hand() -> None:
    targets = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    z = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 2.0], [0.0, 0.0]]])
    # class 0: mean (.5, .5), distance .25 + .25; class 1: mean (0, 1), distance 1
    assert float(distance(targets, z, "biased")) == pytest.approx(1.5)
    # class 0: z1.z2 = 0, - 2 * .5 + 1; class 1: z1.z2 = 0, 0
    assert float(distance(targets, z, "unbiased")) == pytest.approx(0.0)


def test_the_unbiased_one_is_that_of_endless_draws() -> None:
    stream = torch.Generator().manual_seed(0)
    targets = torch.randn(3, 5, generator=stream)
    z = torch.randn(3000, 3, 4, 5, generator=stream) + 0.3
    truth = float((targets - 0.3).square().sum())
    found = {e: float(torch.stack([distance(targets, x, e) for x in z]).mean()) for e in ("biased", "unbiased")}
    assert found["unbiased"] == pytest.approx(truth, abs=0.15)
    assert found["biased"] == pytest.approx(truth + 3 * 5 / 4, abs=0.15)


def test_the_distances_of_second_moments_are_those_of_the_vectors_z_z() -> None:
    """The squared Frobenius distance of matrices is that of their numbers, whichever way it is computed."""
    stream = torch.Generator().manual_seed(0)
    z, targets = torch.randn(3, 4, 5, generator=stream), torch.randn(3, 5, 5, generator=stream)
    outer = (z[..., :, None] * z[..., None, :]).flatten(2)  # [C, b, D * D]
    for estimator in ("biased", "unbiased"):
        by_hand = distance(targets.flatten(1), outer, estimator)
        assert float(distance_of_seconds(targets, z, estimator)) == pytest.approx(float(by_hand), rel=1e-5)


def test_second_moments_tell_spread_that_means_do_not() -> None:
    """Half of the images are dark and half light, or all are grey: the mean is the same, and z z' is not."""
    targets, seconds = torch.zeros(1, 1), torch.ones(1, 1, 1)
    grey, both = torch.zeros(1, 4, 1), torch.tensor([[[1.0], [-1.0], [1.0], [-1.0]]])
    assert float(distance(targets, grey, "biased")) == float(distance(targets, both, "biased")) == 0
    assert float(distance_of_seconds(seconds, grey, "biased")) == 1
    assert float(distance_of_seconds(seconds, both, "biased")) == 0


def test_it_comes_nearer_to_the_means_of_images() -> None:
    """Two classes, dark and light."""
    shape, settings = (1, 8, 8), GANSettings(latent=4, width=8, classes=2)
    encoder, _ = features("fourier(64, width=1)", shape, 0)
    bright = torch.zeros(2, 40, 1, 8, 8)
    bright[0, ..., :4], bright[1, ..., 4:] = 0.9, 0.9
    real = bright + 0.1 * torch.randn(bright.shape, generator=torch.Generator().manual_seed(1))
    targets = torch.stack([encoder(x.clamp(-1, 1)).mean(0) for x in real])
    generator = Generator(shape, settings)
    generator.load_state_dict(start(shape, settings, torch.Generator().manual_seed(0)).generator)
    steps = {"per_class": 8, "learning_rate": 2e-3, "estimator": "biased", "draws": torch.Generator().manual_seed(2)}
    first = match_means(generator, encoder, targets, torch.tensor([0, 1]), steps=2, **steps)
    last = match_means(generator, encoder, targets, torch.tensor([0, 1]), steps=150, **steps)
    assert last < first / 3
    with torch.no_grad():
        made = generator.eval()(
            torch.randn(20, 4, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 1] * 10)
        )
    left = made[:, 0, :, :4].mean((1, 2)) - made[:, 0, :, 4:].mean((1, 2))
    assert (left[::2] > 0).all()
    assert (left[1::2] < 0).all()
