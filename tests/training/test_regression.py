"""Figures of predicted numbers, by hand and as scikit-learn has them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score, root_mean_squared_error

from fedfill.training.regression import calibration, r_squared, r_squared_by, rmse


def test_by_hand() -> None:
    y, p = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 4.0])
    assert r_squared(p, y) == pytest.approx(1 - 2 / 2)
    assert rmse(p, y) == pytest.approx((2 / 3) ** 0.5)
    # mean p 2: sum (p - 2)(y - 2) = 1 + 0 + 2 = 3, sum (p - 2)^2 = 6
    assert calibration(p, y) == pytest.approx((0.5, 1.0))
    assert r_squared_by(p, y, [0, 1, 2]) == [None, None, pytest.approx(1 - 2 / 0.5)]


def test_nothing_to_tell() -> None:
    constant, none = torch.ones(3), torch.zeros(0)
    assert r_squared(torch.rand(3), constant) is None
    assert calibration(constant, torch.rand(3)) is None
    assert (r_squared(none, none), rmse(none, none), calibration(none, none)) == (None, None, None)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(3, 50), seed=st.integers(0, 10**6))
def test_as_scikit_learn_has_them(n: int, seed: int) -> None:
    y, p = torch.randn(2, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert r_squared(p, y) == pytest.approx(r2_score(y, p))
    assert rmse(p, y) == pytest.approx(root_mean_squared_error(y, p))
    line = LinearRegression().fit(p[:, None], y)
    assert calibration(p, y) == pytest.approx((line.coef_[0], line.intercept_), abs=1e-9)
