"""Noise from a keyed stream: its law, its tails, its secrecy; and noise on whole numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedfill.privacy import discrete
from fedfill.privacy.keyed import KeyedStream, normal_of, seeded


def test_the_key_and_the_name_make_the_stream() -> None:
    def first(key: bytes, *name: str | int) -> int:
        return int(KeyedStream(key, *name).words(1)[0])

    keys = [bytes([k]) * 32 for k in range(3)]
    found = {first(key, *name) for key in keys for name in (("a", 1), ("a", 2), ("a1",), ("a", "1"), ())}
    assert len(found) == 15
    assert first(keys[0], "a", 1) == first(keys[0], "a", 1)
    assert int(seeded(1, "a").words(1)[0]) != int(seeded(2, "a").words(1)[0])
    with pytest.raises(ValueError, match="32 bytes"):
        KeyedStream(b"short")


def test_a_stream_goes_on_where_it_was() -> None:
    whole, parts = seeded(0, "a").words(10), seeded(0, "a")
    assert np.array_equal(np.concatenate([parts.words(3), parts.words(7)]), whole)
    assert torch.equal(seeded(0, "a").normal((2, 5)).flatten(), torch.from_numpy(normal_of(whole)))


def test_normal_numbers_by_hand() -> None:
    """The highest bit is the sign, the next 53 the size: all 0 is the longest number, all 1 the shortest."""
    top, low = np.uint64(2**63), np.uint64(2**63 - 1)
    longest, positive, shortest = normal_of(np.array([0, top, low], dtype=np.uint64))
    assert longest == -positive
    assert positive == pytest.approx(-stats.norm.ppf(2.0**-55), rel=1e-12)
    assert 8.2 < positive < 8.5
    assert -1e-15 < shortest <= 0
    half = normal_of(np.array([2**63 + 2**62], dtype=np.uint64))[0]  # u = 1/2: the upper quartile
    assert half == pytest.approx(0.6744897501960817, rel=1e-12)


def test_the_law_of_normal_and_uniform_numbers() -> None:
    normal, uniform = seeded(3, "n").normal(200_000).numpy(), seeded(3, "u").uniform(200_000).numpy()
    assert stats.kstest(normal, "norm").pvalue > 1e-3
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3
    assert (np.abs(normal) > 4).sum() == pytest.approx(200_000 * 2 * stats.norm.sf(4), abs=14)  # 13 +- 4
    assert 0 <= uniform.min() < uniform.max() < 1


@pytest.mark.parametrize("sigma", [1.0, 3.3, 20.0])
def test_the_law_of_the_discrete_gaussian(sigma: float) -> None:
    drawn = discrete.discrete_gaussian(torch.full((100_000,), sigma, dtype=torch.float64), seeded(4, "d")).numpy()
    reach = math.ceil(3 * sigma)
    steps = np.arange(-reach, reach + 1)
    mass = np.exp(-(steps**2) / (2 * sigma**2))
    mass /= np.exp(-(np.arange(-40 * reach, 40 * reach + 1) ** 2) / (2 * sigma**2)).sum()
    inside = np.array([(drawn == k).sum() for k in steps])
    counts, expected = [*inside, 100_000 - inside.sum()], [*(100_000 * mass), 100_000 * (1 - mass.sum())]
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_each_number_has_its_own_deviation() -> None:
    sigma = torch.tensor([1e3, 1e12], dtype=torch.float64).repeat(20_000, 1)
    drawn = discrete.discrete_gaussian(sigma, seeded(5, "d")).double()
    assert (drawn.std(0) / sigma[0]).tolist() == pytest.approx([1, 1], rel=0.03)
    for wrong in (0.5, 2.0**51):
        with pytest.raises(ValueError, match="steps"):
            discrete.discrete_gaussian(torch.tensor([wrong]), seeded(0))


def test_the_grid_is_fine_for_the_noise_and_for_what_is_summed() -> None:
    assert discrete.grid_bits(1.0) == 10
    assert discrete.grid_bits(4.0, 24) == 24
    for std in (0.3, 2.0**-7, 900.0):
        bits = discrete.grid_bits(std)
        assert std * 2.0**bits >= discrete.STEPS
        assert bits == 0 or std * 2.0**bits < 2 * discrete.STEPS
    assert discrete.distance(4.0, 10) < 1e-65
    assert discrete.distance(1.0, 2) == pytest.approx(10 * math.exp(-(math.pi**2)))
    assert discrete.distance(5.0, 1) == 0


@pytest.mark.parametrize(("mu", "epsilon"), [(0.27, 1.0), (1.7, 8.0), (0.05, 0.1)])
def test_delta_of_the_discrete_gaussian_is_that_of_the_real_one(mu: float, epsilon: float) -> None:
    """Summed up over all whole numbers at the coarsest grid that is allowed; at 4 steps it would not be."""

    def delta(sigma: float) -> float:
        shift = max(1, round(mu * sigma))
        x = np.arange(-int(30 * sigma), int(30 * sigma) + 1, dtype=np.float64)
        mass = np.exp(-(x**2) / (2 * sigma**2))
        other = np.exp(-((x - shift) ** 2) / (2 * sigma**2))
        exact = np.maximum(other - math.exp(epsilon) * mass, 0).sum() / mass.sum()
        real = shift / sigma
        a, b = epsilon / real - real / 2, epsilon / real + real / 2
        return float(exact / (stats.norm.sf(a) - math.exp(epsilon) * stats.norm.sf(b)))

    assert delta(discrete.STEPS) == pytest.approx(1, abs=1e-5)
    assert abs(delta(4.0) - 1) > 1e-5
