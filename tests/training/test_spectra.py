"""Amplitudes of images: what is exchanged, and what stays."""

import pytest
import torch

from fedfill.training.spectra import half_width, low_amplitudes, with_amplitudes


def images(n: int, side: int = 8, seed: int = 0) -> torch.Tensor:
    """Of a small contrast, so that nothing leaves 0..1."""
    return 0.4 + 0.2 * torch.rand(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


def test_how_many_frequencies_are_low():
    assert [half_width(torch.zeros(1, 1, 28, 30), share) for share in (0.01, 0.1, 0.5)] == [0, 2, 14]
    assert low_amplitudes(images(2, 28), 2).shape == (2, 3, 5, 5)
    assert low_amplitudes(images(2), 4).shape == (2, 3, 8, 8)  # all there are


def test_frequency_zero_is_the_sum_of_the_values():
    x = images(2)
    assert torch.allclose(low_amplitudes(x, 0)[..., 0, 0], x.sum((-2, -1)), rtol=1e-5)


def test_with_that_one_alone_only_the_mean_moves_and_by_the_share():
    x, other = images(2), images(2, seed=1) * 0.5
    share = torch.tensor([0.25, 1.0])
    mixed = with_amplitudes(x, low_amplitudes(other, 0), share, 0)
    means = x.mean((-2, -1)) + share[:, None] * (other.mean((-2, -1)) - x.mean((-2, -1)))
    assert torch.allclose(mixed.mean((-2, -1)), means, atol=1e-5)
    assert torch.allclose(mixed - mixed.mean((-2, -1), keepdim=True), x - x.mean((-2, -1), keepdim=True), atol=1e-5)


@pytest.mark.parametrize("side", [7, 8])
def test_all_amplitudes_of_another_image_and_the_phases_of_ones_own(side: int):
    x, other = images(2, side), images(2, side, seed=1)
    half = side // 2
    mixed = with_amplitudes(x, low_amplitudes(other, half), torch.ones(2), half)
    inside = (mixed > 0).all() and (mixed < 1).all()
    assert inside  # else the range would have been cut
    assert torch.allclose(low_amplitudes(mixed, half), low_amplitudes(other, half), atol=1e-4)
    phases = torch.fft.fft2(mixed).angle() - torch.fft.fft2(x).angle()
    assert torch.allclose(phases.cos(), torch.ones(()), atol=1e-3)


def test_without_a_share_images_stay_and_none_leaves_its_range():
    x = torch.rand(4, 1, 8, 8)
    assert torch.allclose(with_amplitudes(x, 9 * low_amplitudes(x, 1), torch.zeros(4), 1), x, atol=1e-6)
    bright = with_amplitudes(x, 9 * low_amplitudes(x, 1), torch.ones(4), 1)
    assert bright.max() == 1
    assert bright.min() >= 0
