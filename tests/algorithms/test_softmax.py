"""Softmax regression from sums of gradients: steps by hand through the algorithm, a loss that never rises, its budget."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms.sums_world import BY_HAND, Plane, bundles, fitted, head_of, records, split
from tests.algorithms.test_fed3r import images
from tests.helpers import refused
from tests.protocol.sums_world import Points

import fedfill
from fedfill.algorithms._layers import Layer
from fedfill.algorithms.softmax import Softmax


def objective(w: Any, points: Points, lam: float) -> float:
    z, y = records(points)
    scores = z @ w
    losses = np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1)) + scores.max(1) - scores[np.arange(len(y)), y]
    return float(losses.sum() + lam / 2 * (w**2).sum())


@pytest.mark.parametrize("sizes", [None, (5,), (1, 1, 0, 3)])
def test_by_hand_through_the_algorithm(sizes: tuple[int, ...] | None) -> None:
    """Five points; a penalty of .02 for each makes lambda .1. W_1, and the objective from step to step."""
    points = BY_HAND if sizes is None else split(BY_HAND, *sizes)
    steps = [np.zeros((2, 2))]
    fitted(Softmax(penalty=0.02), points, rounds=5, after=lambda server: steps.append(head_of(server)[0]))
    assert np.allclose(steps[1], [[0.85, -0.85], [-0.8625, 0.8625]], atol=2e-3)
    found = [objective(w, BY_HAND, 0.1) for w in steps]
    assert np.allclose(found, [3.465736, 1.638698, 1.516042, 1.472574, 1.453405, 1.444044], atol=2e-3)


def test_the_first_step_is_ridge_on_centred_labels() -> None:
    """W_1 = (G/2 + lambda I)^-1 (M - sum z / C): from W = 0 every class is as likely as another."""
    points, lam = bundles(30, 50), 0.01 * 80
    z, y = records(points)
    w, _ = head_of(fitted(Softmax(penalty=0.01), points, model=Plane(4, 3)))
    centred = np.eye(3)[y] - 1 / 3
    assert np.allclose(w, np.linalg.solve(z.T @ z / 2 + lam * np.eye(4), z.T @ centred), atol=1e-5)


@pytest.mark.parametrize("penalty", [0.0, 1e-6, 0.1])
def test_the_objective_never_rises_and_reaches_the_least(penalty: float) -> None:
    points, found = bundles(60, 20, 40), list[float]()
    lam = penalty * 120
    server = fitted(
        Softmax(penalty=penalty), points, model=Plane(4, 3), rounds=60,
        after=lambda server: found.append(objective(head_of(server)[0], points, lam)),
    )  # fmt: skip
    assert all(later <= before + 1e-4 for before, later in itertools.pairwise(found))
    assert found[-1] < found[0]
    # a stationary point: no gradient is left
    z, y = records(points)
    w, _ = head_of(server)
    p = np.exp(z @ w) / np.exp(z @ w).sum(1, keepdims=True)
    left = np.abs(z.T @ (p - np.eye(3)[y]) + lam * w).max()
    assert left < 0.2


def test_a_split_moves_no_more_than_the_last_bits() -> None:
    points = bundles(60, 20, 40)
    one, other = (
        head_of(fitted(Softmax(), made, model=Plane(4, 3), rounds=8, workers=2))[0]
        for made in (points, split(points, 1, 0, 119))
    )
    assert np.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_without_a_client_the_answer_is_that_of_the_others() -> None:
    points = bundles(20, 9, 30)
    broken: Points = [points[0], ([[float("nan"), 0, 0, 0]], [0]), points[2]]
    some, others = (
        fitted(Softmax(), made, model=Plane(4, 3), rounds=3) for made in (broken, [points[0], points[2]])
    )  # fmt: skip
    assert np.array_equal(head_of(some)[0], head_of(others)[0])
    assert [loss["client"] for loss in some.lost] == [1]


def test_a_class_that_nobody_holds_never_wins() -> None:
    points = [(z, [min(c, 1) for c in y]) for z, y in bundles(60, 40)]
    w, b = head_of(fitted(Softmax(), points, model=Plane(4, 3), rounds=20))
    assert np.isfinite(w).all()
    assert np.isfinite(b).all()
    z = np.random.default_rng(0).normal(size=(200, 4)) * 100
    assert set((z @ w + b).argmax(1)) == {0, 1}


def test_features_that_nothing_bounds() -> None:
    """Of any length: what is kept from one pass to the next is what was computed, and the penalty is for each record."""
    near = bundles(40, 30)
    far: Points = [((np.array(z) * 64).tolist(), y) for z, y in near]
    heads = [
        head_of(fitted(Softmax(penalty=0.01 * k * k), points, model=Plane(4, 3, bounded=False), rounds=5))[0]
        for k, points in ((1, near), (64, far))
    ]
    assert np.allclose(heads[0], heads[1] * 64, rtol=0.05, atol=0.02)
    # one direction has no records: the penalty alone makes B regular
    flat: Points = [([[40.0, 0, 0, 0], [20.0, 0, 0, 0], [-30.0, 0, 0, 0]], [0, 0, 1])]
    assert np.isfinite(head_of(fitted(Softmax(), flat, model=Plane(4, 2, bounded=False), rounds=3))[0]).all()


@pytest.mark.parametrize("trust", ["site", "secure", "server"])
def test_as_noise_ends_steps_tend_to_the_exact_ones(trust: str) -> None:
    points, model = bundles(200, 300), Plane(4, 3)
    exact = head_of(fitted(Softmax(penalty=0.0), points, model=model, rounds=4))[0]
    far = [
        np.abs(head_of(fitted(Softmax(trust=trust, target_epsilon=e), points, model=model, rounds=4))[0] - exact).max()
        for e in (10.0, 1e9)
    ]
    assert far[1] < 0.02
    assert far[0] > far[1]


@pytest.mark.parametrize("rounds", [1, 4])
def test_the_promise_is_kept_over_centre_second_moments_and_steps(rounds: int, tmp_path: Path) -> None:
    options = {
        "data": images(),
        "features": "conv(10) > project(12)",
        "clients": 3,
        "client_test": 0.0,
        "rounds": rounds,
    }
    result = fedfill.run("softmax", **options, target_epsilon=3.0, out=tmp_path)
    kept = result.summary["privacy"]
    assert kept["total_epsilon_added"] == pytest.approx(3, rel=1e-6)
    assert 3 < kept["total_epsilon"] <= 6.5
    assert sorted(entry["times"] for entry in kept["entries"] if entry["epsilon"]) == sorted([1, 1, rounds])


def test_fewer_rounds_than_the_steps_leave_a_part_of_the_promise(tmp_path: Path) -> None:
    points, model = bundles(60, 40), Plane(4, 3)
    server = fitted(Softmax(target_epsilon=3.0, steps=10), points, model=model, rounds=2)
    spent = server.ledger.account(1e-5)["total_epsilon_added"]
    assert 0.5 < spent < 2
    with refused("steps", 10, 11):
        fitted(Softmax(target_epsilon=3.0, steps=10), points, model=model, rounds=11)
    fitted(Softmax(steps=1), points, model=model, rounds=2)  # without noise there is nothing to divide


def test_a_clip_is_the_bound_of_a_gradient() -> None:
    """Noise goes with it: as large as the clip, which no gradient is beyond."""
    points, model = bundles(40, 40), Plane(4, 3)
    algorithm = Softmax(target_epsilon=3.0, clip=0.5)
    server = fitted(algorithm, points, model=model, rounds=2)
    assert server.ledger.account(1e-5)["total_epsilon_added"] == pytest.approx(3, rel=1e-6)
    layer = Layer("classifier", 4, 3, 1.0, (-math.inf, math.inf))
    w = torch.randn(4, 3)
    assert algorithm.gradients(layer, w).blocks["gradient"].bound.bound == 0.5
    assert Softmax().gradients(layer, w).blocks["gradient"].bound.bound == pytest.approx(2**0.5)


def test_noise_on_features_that_nothing_bounds_is_refused() -> None:
    with refused("target_epsilon", 3, "bounds"):
        fitted(Softmax(target_epsilon=3.0), model=Plane(bounded=False))
    with refused("model", "softmax"):
        fitted(Softmax(), model=_NotLinear())


class _NotLinear(Plane):
    def forward(self, x: Any) -> Any:
        return super().forward(x).softmax(1)


def test_singular_second_moments_without_a_penalty_are_a_sentence() -> None:
    with refused("ridge_lambda", "singular"):
        fitted(Softmax(penalty=0.0), [([[1.0, 0.0]] * 4, [0, 1, 0, 1])])
    assert np.isfinite(head_of(fitted(Softmax(), [([[1.0, 0.0]] * 4, [0, 1, 0, 1])]))[0]).all()
