"""Images from Gaussians of their lowest frequencies: the transform, the bound, covariances by hand, noise taken out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.fft
import torch
from tests.experiment.world import digits

from fedfill.statistics.sums import class_moments, summed
from fedfill.synthesis.image_gaussians import Frequencies, denoised, drawn_images


def images(n: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = digits()
    return torch.as_tensor(x[:n]).view(n, 1, 8, 8), torch.as_tensor(y[:n])


def whole(share: float = 1.0, radius: float = 1.0, shape: tuple[int, ...] = (1, 8, 8)) -> Frequencies:
    return Frequencies.of(shape, share, radius)


def test_it_is_scipys_cosine_transform() -> None:
    x, _ = images(5)
    frequencies = whole(share=0.5, radius=0.9)
    theirs = scipy.fft.dctn(x[:, 0].numpy() / 255, axes=(1, 2), norm="ortho")[:, :4, :4].reshape(5, 16) / (0.9 * 8)
    lengths = np.linalg.norm(theirs, axis=1, keepdims=True)
    assert np.allclose(frequencies.vectors(x), theirs / np.maximum(lengths, 1), atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 10)])
def test_all_frequencies_give_the_image_back(shape: tuple[int, ...]) -> None:
    x = torch.randint(0, 256, (7, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    frequencies = whole(shape=shape)
    assert frequencies.numbers == math.prod(shape)
    assert torch.equal(frequencies.images(frequencies.vectors(x)), x)


@pytest.mark.parametrize("radius", [0.05, 0.45, 1.0])
def test_no_image_is_longer_than_one(radius: float) -> None:
    white, black = torch.full((1, 1, 8, 8), 255, dtype=torch.uint8), torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    lengths = whole(radius=radius).vectors(torch.cat([white, black, images(50)[0]])).norm(dim=1)
    assert float(lengths.max()) <= 1 + 1e-12
    assert float(lengths[0]) == pytest.approx(1.0)
    assert not float(lengths[1])


def test_no_bit_of_an_image_depends_on_the_others() -> None:
    x, _ = images(130)
    frequencies = whole(share=5 / 7)
    assert torch.equal(frequencies.vectors(x), torch.cat([frequencies.vectors(part) for part in torch.split(x, 37)]))


def sums_of(frequencies: Frequencies, x: torch.Tensor, y: torch.Tensor, by_class: bool) -> dict[str, torch.Tensor]:
    statistic = class_moments(frequencies.numbers, 10, counts=False, gram=not by_class, by_class=by_class)
    return summed(statistic, [(frequencies.vectors(x), y)])


def test_without_noise_the_gaussians_are_means_and_covariances() -> None:
    x, y = images(1000)
    frequencies = whole(share=0.5)
    z = (frequencies.vectors(x) * 4096).trunc().numpy() / 4096
    counts = torch.bincount(y, minlength=10)
    own = denoised(sums_of(frequencies, x, y, True), counts, 0.0)
    shared = denoised(sums_of(frequencies, x, y, False), counts, 0.0)
    pooled = sum(np.cov(z[y == c].T) * (int(counts[c]) - 1) for c in range(10)) / (1000 - 10)
    for c in range(10):
        assert np.allclose(own.means[c], z[y == c].mean(0))
        assert np.allclose(own.covariances[c], np.cov(z[y == c].T), atol=1e-12)
        assert np.allclose(shared.covariances[c], pooled, atol=1e-10)


@pytest.mark.parametrize("by_class", [True, False])
def test_what_is_noise_alone_leaves_no_spread(by_class: bool) -> None:
    """Every record the same image, so that all there is in the covariance is noise, below its edge."""
    d, n, std = 64, 1000.0, 3.0
    mean = torch.full((d,), 0.1, dtype=torch.float64)
    stream = torch.Generator().manual_seed(1)
    whole_gram = n * torch.outer(mean, mean)

    def noisy(gram: torch.Tensor) -> torch.Tensor:
        a = torch.randn(d, d, generator=stream, dtype=torch.float64) * std
        return gram + (a + a.T) / 2**0.5

    moments, counts = n * mean[:, None].expand(d, 2), torch.tensor([n, n])
    found = (
        {"moments": moments, "class_grams": torch.stack([noisy(whole_gram), noisy(whole_gram)])}
        if by_class
        else {"moments": moments, "gram": noisy(2 * whole_gram)}
    )
    left = denoised(found, counts, std * 1.1)
    assert not left.covariances.any()
    raw = denoised(found, counts, std / 20)
    assert raw.covariances.any()


def test_a_spread_that_stands_out_of_the_noise_is_kept_about_as_large_as_it_is() -> None:
    d, n, std = 100, 10_000.0, 2.0
    axis = torch.zeros(d, dtype=torch.float64)
    axis[3] = 1.0
    a = torch.randn(d, d, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * std
    gram = n * 0.05 * torch.outer(axis, axis) + (a + a.T) / 2**0.5
    found = {"moments": torch.zeros(d, 1, dtype=torch.float64), "class_grams": gram[None]}
    left = denoised(found, torch.tensor([n]), std).covariances[0]
    assert float(axis @ left @ axis) == pytest.approx(0.05, rel=0.05)
    assert float(left.trace()) == pytest.approx(0.05, rel=0.05)


def test_draws_have_the_classes_means_and_none_is_of_a_class_that_nobody_holds() -> None:
    x, y = images(1000)
    held = y != 4
    x, y = x[held], y[held]
    frequencies = whole()
    counts = torch.bincount(y, minlength=10)
    gaussians = denoised(sums_of(frequencies, x, y, True), counts, 0.0)
    made = drawn_images(gaussians, frequencies, 400, lambda c: torch.Generator().manual_seed(c))
    assert made.counts(10) == [400 * (c != 4) for c in range(10)]
    assert made.inputs.dtype == torch.uint8
    for c in (0, 7):
        real, drawn = (inputs[labels == c].float().mean(0) for inputs, labels in ((x, y), (made.inputs, made.labels)))
        assert float((real - drawn).abs().mean()) < 12  # of 255; values below 0 and above 255 are cut
    fewer = drawn_images(gaussians, frequencies, 50, lambda c: torch.Generator().manual_seed(c))
    assert torch.equal(fewer.inputs[:50], made.inputs[:50])
