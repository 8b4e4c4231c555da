"""Areas, Brier scores and calibration errors: by hand, and as scikit-learn has them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, roc_auc_score

from fedfill.training.probabilities import auc, brier, calibration_error


def two(*second: float) -> np.ndarray:
    """Probabilities of two classes by that of the second."""
    return np.stack([1 - np.array(second), np.array(second)], axis=1)


def test_area_by_hand() -> None:
    # of the four pairs of a second and a first, .8 > .3, .8 > .5, .4 > .3, and .4 < .5
    assert auc(np.array([0, 0, 1, 1]), two(0.3, 0.5, 0.8, 0.4)) == pytest.approx(3 / 4)
    assert auc(np.array([0, 1]), two(0.5, 0.5)) == 0.5  # a tie counts half
    assert auc(np.array([1, 1]), two(0.3, 0.5)) is None
    assert auc(np.array([], dtype=int), two()) is None


def test_area_of_three_classes_leaves_out_what_no_sample_has() -> None:
    chances = np.array([[0.6, 0.1, 0.3], [0.2, 0.2, 0.6], [0.5, 0.2, 0.3]])
    # class 0 against class 2: of class 0 the first is above (.6 > .2 and .6 > .5); of class 2 .6 and .3 are above .3 once, and tie once
    assert auc(np.array([0, 2, 2]), chances) == pytest.approx((1 + 0.75) / 2)


def test_brier_by_hand() -> None:
    assert brier(np.array([0, 1]), two(0.2, 0.6)) == pytest.approx((0.04 + 0.16) / 2)
    # a half of .3^2 + .2^2 + .1^2
    assert brier(np.array([0]), np.array([[0.7, 0.2, 0.1]])) == pytest.approx(0.07)
    assert brier(np.array([], dtype=int), two()) is None


def test_calibration_error_by_hand() -> None:
    # confidences .9, .9, .95 and .6; bins of a fifteenth: (.8667, .9333] holds the first two, one right: |1 - 1.8| = .8; .95 right: .05;
    # .6 is the end of its bin, wrong: .6
    labels = np.array([1, 0, 1, 0])
    assert calibration_error(labels, two(0.9, 0.9, 0.95, 0.6)) == pytest.approx((0.8 + 0.05 + 0.6) / 4)
    assert calibration_error(np.array([1]), two(1.0)) == 0
    assert calibration_error(np.array([], dtype=int), two()) is None


@settings(max_examples=40, deadline=None)
@given(classes=st.integers(2, 5), n=st.integers(6, 60), seed=st.integers(0, 10**6))
def test_as_scikit_learn_has_them(classes: int, n: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), draw.integers(0, classes, n)])
    chances = draw.dirichlet(np.ones(classes), len(labels)).round(2) + 1e-3
    chances /= chances.sum(axis=1, keepdims=True)
    scores = chances[:, 1] if classes == 2 else chances
    assert auc(labels, chances) == pytest.approx(roc_auc_score(labels, scores, multi_class="ovr", average="macro"))
    assert brier(labels, chances) == pytest.approx(
        brier_score_loss(labels, scores, labels=range(classes), scale_by_half=True)
    )
    assert 0 <= calibration_error(labels, chances) <= 1


def test_a_calibrated_model_has_an_error_near_none() -> None:
    draw = np.random.default_rng(0)
    chances = draw.uniform(size=100_000)
    labels = (draw.uniform(size=100_000) < chances).astype(int)
    assert calibration_error(labels, two(*chances)) < 0.01
    assert calibration_error(labels, two(*chances**3)) > 0.05
