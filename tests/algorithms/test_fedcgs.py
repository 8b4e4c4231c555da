"""FedCGS and its neighbours: LDA, naive Bayes, QDA and nearest means by hand through the algorithm, priors, noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NearestCentroid
from tests.algorithms.sums_world import BY_HAND, Plane, bundles, fitted, head_of, records, split
from tests.algorithms.test_fed3r import images
from tests.helpers import refused
from tests.protocol.sums_world import Points, drawn

import fedfill
from fedfill import tree
from fedfill.algorithms.fedcgs import FedCGS


@pytest.mark.parametrize("sizes", [None, (5,), (1, 1, 0, 3)])
@pytest.mark.parametrize(
    ("settings", "weight", "bias"),
    [
        ({"shrinkage": 0.0}, [[12.883929, 5.544643], [1.044643, 4.098214]], [-6.093861, -3.592184]),
        (
            {"shrinkage": 0.0, "prior": "uniform"},
            [[12.883929, 5.544643], [1.044643, 4.098214]],
            [-6.276183, -3.369040],
        ),
        ({"shrinkage": 0.1}, [[11.341554, 4.817510], [0.858566, 4.149737]], [-5.425499, -3.506299]),
        ({"covariance": "none"}, [[0.866667, 0.3], [0.0, 0.9]], [-0.375556, -0.45]),
    ],
)
def test_by_hand_through_the_algorithm(
    settings: dict[str, object], weight: list[list[float]], bias: list[float], sizes: tuple[int, ...] | None
) -> None:
    """Five points of two clients, which are truncated to 2^-12: what is divided by small variances moves in the third digit."""
    w, b = head_of(fitted(FedCGS(**settings), BY_HAND if sizes is None else split(BY_HAND, *sizes)))
    assert np.allclose(w, weight, rtol=1e-2, atol=2e-3)
    assert np.allclose(b, bias, rtol=1e-2, atol=2e-3)


def test_by_rule_five_points_are_a_sphere() -> None:
    """The share of the oracle approximating rule is 1 at the most: then LDA has the directions of the means."""
    w, _ = head_of(fitted(FedCGS(), BY_HAND))
    variance = (0.068889 + 0.246667) / 2
    assert np.allclose(w, np.array([[0.866667, 0.3], [0, 0.9]]) / variance, rtol=1e-2, atol=1e-6)


def test_it_is_scikit_learns_on_pooled_records() -> None:
    """Scikit-learn divides the covariance by n, and ours by n - C."""
    points = bundles(60, 0, 90)
    z, y = records(points)
    w, b = head_of(fitted(FedCGS(shrinkage=0.2), points, model=Plane(4, 3)))
    means = np.stack([z[y == c].mean(0) for c in range(3)])
    scatter = sum(((z[y == c] - means[c]).T @ (z[y == c] - means[c]) for c in range(3)), np.zeros((4, 4)))
    s = 0.8 * scatter / 147 + 0.2 * np.trace(scatter / 147) / 4 * np.eye(4)
    solved = np.linalg.solve(s, means.T)
    prior = np.bincount(y) / 150
    assert np.allclose(w, solved, rtol=1e-5)
    assert np.allclose(b, -0.5 * (means.T * solved).sum(0) + np.log(prior), rtol=1e-5)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.0).fit(z, y)
    ours = head_of(fitted(FedCGS(shrinkage=0.0), points, model=Plane(4, 3)))
    test, _ = records(bundles(400, seed=1))
    assert ((test @ ours[0] + ours[1]).argmax(1) == theirs.predict(test)).mean() > 0.99
    nearest = head_of(fitted(FedCGS(covariance="none"), points, model=Plane(4, 3)))
    assert ((test @ nearest[0] + nearest[1]).argmax(1) == NearestCentroid().fit(z, y).predict(test)).mean() > 0.99


def test_a_prior_moves_the_biases_alone() -> None:
    points = [*bundles(40), ([[1.0, 0, 0, 0]] * 30, [0] * 30)]
    train, uniform = (head_of(fitted(FedCGS(prior=prior), points, model=Plane(4, 3))) for prior in ("train", "uniform"))
    _, y = records(points)
    assert np.array_equal(train[0], uniform[0])
    shift = np.log(np.bincount(y) / len(y)) - np.log(1 / 3)
    assert np.allclose(train[1] - uniform[1], shift, atol=1e-4)


@pytest.mark.parametrize("covariance", ["shared", "none"])
def test_a_class_that_nobody_holds_never_wins(covariance: str) -> None:
    w, b = head_of(fitted(FedCGS(covariance=covariance), drawn(20, 30, d=4), model=Plane(4, 3)))
    assert np.isfinite(w).all()
    assert np.isfinite(b).all()
    z = np.random.default_rng(0).normal(size=(200, 4))
    assert set((z @ w + b).argmax(1)) == {0, 1}


@pytest.mark.parametrize("covariance", ["shared", "class", "diagonal", "none"])
def test_every_split_gives_the_same_bits_and_the_same_predictions(covariance: str, tmp_path: Path) -> None:
    found = {}
    for partition, clients in (("iid", 3), ("classes:1", 10)):
        result = fedfill.run(
            "fedcgs", data=images(), partition=partition, clients=clients, client_test=0.0, covariance=covariance,
            features="conv(10) > project(12)", workers=2, seed=0, out=tmp_path / str(clients),
        )  # fmt: skip
        found[partition] = (result.summary["weights_sha256"], result.summary["accuracy"], result.summary["loss"])
    assert found["iid"] == found["classes:1"]
    assert found["iid"][1] > 0.5


def test_without_a_client_the_answer_is_that_of_the_others_exactly() -> None:
    points = bundles(20, 9, 30)
    broken: Points = [points[0], ([[float("inf"), 0, 0, 0]], [0]), points[2]]
    model = Plane(4, 3)
    some, others = fitted(FedCGS(), broken, model=model), fitted(FedCGS(), [points[0], points[2]], model=model)
    assert tree.sha256(some.state.weights) == tree.sha256(others.state.weights)
    assert [loss["client"] for loss in some.lost] == [1]


def test_nobody_at_all_and_one_record() -> None:
    with refused("head", "no record"):
        fitted(FedCGS(covariance="none"), [([], []), ([], [])])
    w, b = head_of(fitted(FedCGS(), [([[0.6, 0.8]], [1])]))
    assert np.isfinite(w).all()
    assert np.isfinite(b).all()
    assert (np.array([[1.0, 0.0]]) @ w + b).argmax() == 1


@pytest.mark.parametrize("trust", ["site", "secure", "server"])
@pytest.mark.parametrize("covariance", ["shared", "none"])
def test_as_noise_ends_it_tends_to_the_exact_head(covariance: str, trust: str) -> None:
    points, model = bundles(200, 300), Plane(4, 3)
    exact = head_of(fitted(FedCGS(covariance=covariance, shrinkage=0.0), points, model=model))
    noisy = head_of(fitted(FedCGS(covariance=covariance, trust=trust, target_epsilon=1e9), points, model=model))
    assert np.allclose(noisy[0], exact[0], rtol=1e-2, atol=1e-2)
    assert np.allclose(noisy[1], exact[1], rtol=1e-2, atol=1e-2)


def test_counts_are_noised_with_the_rest_and_the_promise_is_kept(tmp_path: Path) -> None:
    """Exact counts beside noisy sums would leave no guarantee for a record added."""
    options = {"features": "conv(10) > project(12)", "clients": 3, "client_test": 0.0}
    result = fedfill.run("fedcgs", data=images(), **options, target_epsilon=3.0, out=tmp_path)
    kept = result.summary["privacy"]
    assert kept["total_epsilon_added"] == pytest.approx(3, rel=1e-6)
    assert 3 < kept["total_epsilon"] < 6


def test_an_epsilon_that_drowns_every_class_is_a_sentence() -> None:
    """No class can be told from one that nobody holds."""
    server = fitted(FedCGS(target_epsilon=1e-3), bundles(4, 5), model=Plane(4, 3))
    assert server.state.weights["classifier.weight"].equal(server.initial["classifier.weight"])  # the head of before
    assert any("class 0, 1, 2" in sentence for sentence in server.warnings)


def test_noise_leaves_no_covariance_of_each_class(tmp_path: Path) -> None:
    for covariance in ("class", "diagonal"):
        with refused("target_epsilon", 3, covariance):
            fedfill.run(
                "fedcgs", data=images(), clients=2, covariance=covariance, target_epsilon=3.0, out=tmp_path / "x"
            )
    assert not (tmp_path / "x").exists()


def test_a_layer_without_biases_has_no_place_for_them() -> None:
    with refused("model", "bias", "classifier"):
        fitted(FedCGS(), model=Plane(bias=False))


def test_noise_on_features_that_nothing_bounds_is_refused() -> None:
    with refused("target_epsilon", 3, "bounds"):
        fitted(FedCGS(target_epsilon=3.0), model=Plane(bounded=False))


def test_without_shrinkage_a_singular_covariance_is_a_sentence() -> None:
    points: Points = [([[1.0, 0, 0, 0], [0.0, 1, 0, 0], [0.6, 0.8, 0, 0], [0.8, 0.6, 0, 0]], [0, 1, 1, 0])]
    with refused("shrinkage", "singular"):
        fitted(FedCGS(shrinkage=0.0), points, model=Plane(4))
    w, _ = head_of(fitted(FedCGS(), points, model=Plane(4)))
    assert np.isfinite(w).all()
    assert torch.isfinite(torch.tensor(w)).all()
