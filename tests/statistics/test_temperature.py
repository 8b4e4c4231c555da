"""The scale of scores that are known by two moments."""

from __future__ import annotations

import math

import pytest
import torch

from fedfill.statistics.temperature import SCALES, robust_scale, worst_cross_entropy


def test_without_spread_it_is_the_loss_of_the_margin() -> None:
    """All margins 0.5, three classes, scale 1: log(1 + 2 exp(-0.5))."""
    assert float(worst_cross_entropy(0.5, 0.0, 3)[0]) == pytest.approx(math.log(1 + 2 * math.exp(-0.5)))
    assert robust_scale(0.5, 0.0, 3) == pytest.approx(1000)


def test_a_hinge_has_scarfs_bound() -> None:
    """At scale 1,000 and two classes the loss is 1000 max(0, -x): 1000 (sqrt(m^2 + v) - m) / 2, and a little."""
    m, v = 0.3, 0.2
    hinge = 1000 * (math.sqrt(m * m + v) - m) / 2
    found = float(worst_cross_entropy(m, v, 2)[-1])
    assert found == pytest.approx(hinge, rel=0.01)


@pytest.mark.parametrize("classes", [2, 10])
def test_no_distribution_is_worse(classes: int) -> None:
    """Skewed, heavy and two-point margins, each with its own moments."""
    draw = torch.Generator().manual_seed(classes)
    normal, flat = (f(20_000, generator=draw, dtype=torch.float64) for f in (torch.randn, torch.rand))
    samples = {
        "normal": 0.7 + 0.3 * normal,
        "heavy": 0.7 + 0.05 * normal / flat.clamp(min=0.01),
        "skewed": 1 - 0.3 * -flat.clamp(min=1e-12).log(),
        "two points": torch.where(flat < 0.05, -1.0, 0.9),
    }
    closest = 0.0
    for x in samples.values():
        worst = worst_cross_entropy(float(x.mean()), float(x.var(correction=0)), classes)
        for k in range(0, len(SCALES), 20):
            loss = float(torch.nn.functional.softplus(math.log(classes - 1) - SCALES[k] * x).mean())
            assert loss <= float(worst[k]) * (1 + 1e-4)
            closest = max(closest, loss / float(worst[k]))
    assert closest > 0.95


def test_less_spread_allows_for_a_larger_scale() -> None:
    scales = [robust_scale(0.8, v, 10) for v in (0.001, 0.003, 0.01)]
    assert scales == sorted(scales, reverse=True)
    assert robust_scale(0, 0.1, 10) == robust_scale(-1, 0.1, 10) == robust_scale(1, 0.1, 1) == 1
