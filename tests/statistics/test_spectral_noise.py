"""Whether anything stands out of noise."""

from __future__ import annotations

import torch

from fedfill.statistics.spectral_noise import drowned


def test_noise_alone_is_drowned_and_a_difference_of_classes_is_not() -> None:
    """The mean, which all classes have in common, tells nothing of them."""
    draw = torch.Generator().manual_seed(0)
    common, apart = torch.randn(64, 1, generator=draw) * 50, torch.randn(64, 10, generator=draw)
    alone = [drowned(common + 3 * torch.randn(64, 10, generator=draw), 3.0) for _ in range(200)]
    assert all(alone)
    assert not any(drowned(common + 3 * apart + 3 * torch.randn(64, 10, generator=draw), 3.0) for _ in range(200))


def test_by_hand() -> None:
    """Two features, two classes: 1 + 4 sqrt(2 / 2) = 5 times the noise is the limit, of 2 (a - b)^2 / 4 each."""
    apart = torch.tensor([[1.0, -1.0], [0.0, 0.0]])
    assert drowned(2.2 * apart, 1.0)  # 2 * 2.2^2 / 2 = 4.84
    assert not drowned(2.3 * apart, 1.0)  # 5.29
