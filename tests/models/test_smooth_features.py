"""The maps of features with a gradient: the same function, and its slope."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import refused

from fedfill.models.features import features
from fedfill.models.smooth_features import require_smooth, smooth_features


def inputs(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(6, *shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize(
    ("words", "shape", "apart"),
    [
        ("fourier(64, width=0.7)", (1, 8, 8), 1e-5),
        ("project(32) > fourier(64)", (3, 12, 12), 1e-5),
        ("relu(48)", (1, 8, 8), 1e-5),
        ("project(16) > clip", (1, 8, 8), 1e-5),
        ("conv(12) > project(32)", (1, 28, 28), 0.05),
        ("conv(12, cells=3) > fourier(64)", (3, 16, 16), 0.08),
        ("fourier(32)", (9,), 1e-5),
    ],
)
def test_it_is_the_same_map(words: str, shape: tuple[int, ...], apart: float) -> None:
    encoder, d = features(words, shape, 3)
    require_smooth(encoder)
    x = inputs(shape)
    found = smooth_features(encoder, x)
    assert found.shape == (6, d)
    assert float((found - encoder(x)).norm(dim=1).max()) < apart


@pytest.mark.parametrize("words", ["fourier(16)", "conv(4) > project(8)", "relu(8)", "project(8) > clip"])
def test_the_slope_is_that_of_small_differences(words: str) -> None:
    encoder, _ = features(words, (1, 8, 8), 1)
    encoder = encoder.double()
    x = inputs((1, 8, 8))[:2].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda y: smooth_features(encoder, y), x, eps=1e-6, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("words", ["patches(9, size=4, cells=2)", "scatter"])
def test_steps_without_a_slope_are_refused(words: str) -> None:
    with refused("embedding", words.split("(")[0]):
        require_smooth(features(words, (1, 8, 8), 0)[0])
