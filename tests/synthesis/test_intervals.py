"""Intervals of a share, of a median and of the evenness of labels: by hand, and how often they hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedfill.synthesis.intervals import evenness, median, share


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (3, 10), (10, 10), (57, 359)])
def test_the_interval_is_clopper_and_pearsons(hits: int, n: int):
    found, exact = share(hits, n), stats.binomtest(hits, n).proportion_ci(0.95, "exact")
    assert (found.low, found.high) == (pytest.approx(exact.low), pytest.approx(exact.high))
    assert (found.value, found.n) == (hits / n, n)


def test_an_interval_by_hand():
    """None of 10: the upper end p has (1 - p)^10 = .025."""
    assert share(0, 10).high == pytest.approx(1 - 0.025**0.1)
    assert share(0, 10).low == 0
    few, many = share(50, 100, effective=4.0), share(50, 100)
    assert few.low < many.low < 0.5 < many.high < few.high


def test_a_median_by_hand():
    """Of ten values the second and the ninth: fewer than 2 of 10 coins come with 11 / 1024, fewer than 3 with 56 / 1024."""
    found = median(torch.tensor([7.0, 1, 2, 3, 4, 5, 6, 8, 9, 10]))
    assert (found.value, found.low, found.high, found.n) == (5.5, 2, 9, 10)
    few = median(torch.tensor([3.0, 1, 2]))
    assert (few.value, few.low, few.high, few.n) == (2, 1, 3, 3)
    one = median(torch.tensor([4.0]))
    assert (one.value, one.low, one.high, one.n) == (4, 4, 4, 1)


def test_a_median_s_interval_holds_the_truth_as_often_as_it_says():
    draws = torch.randn(2000, 40, generator=torch.Generator().manual_seed(0)).exp()  # whose median is 1
    held = [found.low <= 1 <= found.high for found in map(median, draws)]
    # 40 coins leave .9615 between the ranks 14 and 27
    assert np.mean(held) == pytest.approx(0.9615, abs=0.015)


def test_evenness_by_hand():
    found = evenness(torch.tensor([2, 0, 2, 0]), 0)
    assert found is not None
    assert (found.value, found.n) == (pytest.approx(0.5), 4)
    assert evenness(torch.tensor([0, 0]), 0) is None
    alone = evenness(torch.tensor([0, 9]), 0)
    assert alone is not None
    assert (alone.value, alone.low, alone.high) == (0, 0, 0)  # no draw has another class


def test_evenness_is_as_wide_as_the_delta_method_says():
    p = np.array([0.6, 0.3, 0.1])
    entropy = -(p * np.log(p)).sum()
    deviation = math.sqrt(((p * np.log(p) ** 2).sum() - entropy**2) / 10_000) / math.log(3)
    found = evenness(torch.tensor([6000, 3000, 1000]), 0)
    assert found is not None
    assert found.value == pytest.approx(entropy / math.log(3))
    assert found.high - found.value == pytest.approx(1.96 * deviation, rel=0.1)
    assert found.value - found.low == pytest.approx(1.96 * deviation, rel=0.1)
    assert evenness(torch.tensor([6000, 3000, 1000]), 0) == found
