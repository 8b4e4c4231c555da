"""CCVR through the algorithm: the paper's merging of clients, draws of classes, the bound without draws, noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms.sums_world import BY_HAND, Plane, bundles, fitted, head_of, records, split
from tests.algorithms.test_fed3r import images
from tests.helpers import refused, scripted
from tests.protocol.sums_world import Points
from torch import Tensor

import fedfill
from fedfill import tree
from fedfill.algorithms._layers import Layer
from fedfill.algorithms.ccvr import CCVR
from fedfill.protocol.sums import Collected
from fedfill.statistics.calibration import (
    ClassGaussians,
    class_gaussians,
    gaussian_samples,
    jensen_bound,
    train_on_samples,
)
from fedfill.statistics.heads import LinearHead
from fedfill.statistics.sums import class_moments, summed
from fedfill.streams import torch_stream

INF = CCVR(samples="inf")


def merged_as_in_the_paper(points: Points) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Equations 3 and 4 over clients: from each one's count, mean and covariance (divisor n - 1) of a class."""
    means, covariances = [], []
    for c in range(2):
        own = [(z[y == c]) for z, y in (records([client]) for client in points) if (y == c).any()]
        n = sum(map(len, own))
        mean = sum(len(z) * z.mean(0) for z in own) / n
        second = sum(
            (len(z) - 1) * (np.cov(z.T, ddof=1) if len(z) > 1 else 0.0) + len(z) * np.outer(z.mean(0), z.mean(0)) for z in own
        )  # fmt: skip
        means.append(mean)
        covariances.append((second - n * np.outer(mean, mean)) / (n - 1))
    return np.stack(means), np.stack(covariances)


def test_the_papers_merging_is_that_of_the_sums() -> None:
    """By hand for five points of two clients; then for many, where no class is smaller than the features."""
    _, covariances = merged_as_in_the_paper(BY_HAND)
    by_hand = [[[0.013333, 0], [0, 0.36]], [[0.18, -0.06], [-0.06, 0.02]]]
    assert np.allclose(covariances, by_hand, atol=1e-3)
    points = [(z, [c % 2 for c in y]) for z, y in bundles(30, 20, 25)]
    rows, y = (torch.tensor(x) for x in records(points))
    sums = summed(class_moments(4, 2, gram=False, by_class=True), [(rows, y)])
    ours = class_gaussians(sums["class_grams"], sums["moments"], sums["counts"])
    means, covariances = merged_as_in_the_paper(points)
    assert np.allclose(ours.means, means, atol=1e-12)
    assert np.allclose(ours.covariances, covariances, atol=1e-12)


@pytest.mark.parametrize("algorithm", [CCVR(samples=40), INF])
def test_every_split_gives_the_same_bits(algorithm: CCVR) -> None:
    points = bundles(30, 0, 20)
    found = {
        tree.sha256(fitted(algorithm, made, model=Plane(4, 3), workers=2).state.weights)
        for made in (points, split(points, 50), split(points, 1, 24, 25))
    }
    assert len(found) == 1


def solved(algorithm: CCVR, points: Points, head: LinearHead, span: tuple[float, float]) -> LinearHead:
    """What the server makes of the clients' sums."""
    rows, y = (torch.tensor(x) for x in records(points))
    classes = len(head.bias)
    sums = summed(algorithm.statistic(Layer("classifier", 4, classes, 1.0, span)), [(rows, y)])
    weights = {"classifier.weight": head.weight.float(), "classifier.bias": head.bias.float()}
    server, _ = scripted(1, weights)
    collected = Collected(sums, dict.fromkeys(sums, 0.0), 1)
    return algorithm.solve(server, collected, Layer("classifier", 4, classes, 1.0, span), weights)


def test_it_is_trained_on_draws_of_each_class_from_where_the_head_is() -> None:
    """Slow and plain: Gaussians, draws from streams of the classes' own, then Adam from the present layer."""
    points = bundles(30, 25)
    head = LinearHead(torch.full((3, 4), 0.25).double(), torch.tensor([0.5, 0, -0.5]).double())
    rows, y = (torch.tensor(x) for x in records(points))
    sums = summed(class_moments(4, 3, gram=False, by_class=True), [(rows, y)])
    gaussians = class_gaussians(sums["class_grams"], sums["moments"], sums["counts"])
    z, labels = gaussian_samples(
        gaussians, 30, lambda c: torch_stream(0, "server", f"ccvr samples of class {c}", 0)
    )  # fmt: skip
    wanted = train_on_samples(head, z, labels, torch_stream(0, "server", "ccvr batches", 0), clamp=(0.0, 1.0))
    found = solved(CCVR(samples=30), points, head, (0.0, 1.0))
    assert torch.equal(found.weight, wanted.weight)
    assert torch.equal(found.bias, wanted.bias)
    other = solved(CCVR(samples=30), points, head, (-float("inf"), float("inf")))
    assert not torch.equal(found.weight, other.weight)


def test_the_bound_is_lower_than_at_any_head_near_by_and_than_after_draws() -> None:
    points = bundles(60, 50)
    rows, y = (torch.tensor(x) for x in records(points))
    sums = summed(class_moments(4, 3, gram=False, by_class=True), [(rows, y)])
    gaussians = class_gaussians(sums["class_grams"], sums["moments"], sums["counts"])

    def bound(w: Any, b: Any) -> float:
        return float(jensen_bound(_t(w).T, _t(b), gaussians, torch.full((3,), 1 / 3).double(), 1e-4))

    w, b = head_of(fitted(INF, points, model=Plane(4, 3)))
    least = bound(w, b)
    stream = np.random.default_rng(0)
    for _ in range(20):
        assert bound(w + 0.3 * stream.normal(size=w.shape), b + 0.3 * stream.normal(size=b.shape)) > least
    assert bound(*head_of(fitted(CCVR(samples=200), points, model=Plane(4, 3)))) > least


def _t(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def test_the_bound_of_the_example() -> None:
    """W = I, b = 0, two classes alike: .453511 without jitter."""
    rows, y = (torch.tensor(x) for x in records(BY_HAND))
    sums = summed(class_moments(2, 2, gram=False, by_class=True), [(rows, y)])
    means = (sums["moments"] / sums["counts"]).T
    covariances = torch.stack(
        [q / n - mu[:, None] * mu for q, n, mu in zip(sums["class_grams"], sums["counts"], means, strict=True)]
    )
    covariances *= (sums["counts"] / (sums["counts"] - 1))[:, None, None]
    gaussians = ClassGaussians(means, covariances, sums["counts"])
    value = jensen_bound(torch.eye(2).double(), torch.zeros(2).double(), gaussians, torch.full((2,), 0.5).double())
    assert float(value) == pytest.approx(0.453511, abs=1e-3)


@pytest.mark.parametrize("prior", ["uniform", "train"])
@pytest.mark.parametrize("samples", [50, "inf"])
def test_a_class_that_nobody_holds_and_one_of_one_record(samples: Any, prior: Any) -> None:
    points = [*[(z, [min(c, 1) for c in y]) for z, y in bundles(30, 20)], ([[0, 0, 0, 1.0]], [2])]
    w, b = head_of(fitted(CCVR(samples=samples, prior=prior), points, model=Plane(4, 4)))
    assert np.isfinite(w).all()
    assert np.isfinite(b).all()
    z = np.random.default_rng(0).normal(size=(300, 4)) * 100
    assert set((z @ w + b).argmax(1)) == {0, 1, 2}


def test_a_prior_of_the_records_favours_the_many() -> None:
    points = [*bundles(60), ([[1.0, 0, 0, 0]] * 5 + [[0.6, 0.8, 0, 0]] * 200, [0] * 205)]
    shares = []
    for prior in ("uniform", "train"):
        w, b = head_of(fitted(CCVR(samples="inf", prior=prior), points, model=Plane(4, 3)))
        z = np.random.default_rng(0).normal(size=(500, 4))
        shares.append(float(((z @ w + b).argmax(1) == 0).mean()))
    assert shares[1] > shares[0]


@pytest.mark.parametrize("algorithm", ["inf", 30])
def test_as_noise_ends_it_tends_to_the_exact_head(algorithm: Any) -> None:
    points, model = bundles(200, 300), Plane(4, 3)
    exact, near, far = (
        head_of(fitted(CCVR(samples="inf", target_epsilon=e), points, model=model))[0] for e in (None, 1e9, 10.0)
    )
    assert np.abs(near - exact).max() < 0.3
    assert np.abs(far - exact).max() > np.abs(near - exact).max()


def test_the_promise_is_kept_and_an_epsilon_that_drowns_every_class_is_a_sentence(tmp_path: Path) -> None:
    options = {"data": images(), "features": "conv(10) > project(12)", "clients": 3, "client_test": 0.0}
    kept = fedfill.run("ccvr", **options, target_epsilon=30.0, samples=20, out=tmp_path).summary["privacy"]
    assert kept["total_epsilon_added"] == pytest.approx(30, rel=1e-6)
    server = fitted(CCVR(target_epsilon=1e-3), bundles(4, 5), model=Plane(4, 3))
    assert server.state.weights["classifier.weight"].equal(server.initial["classifier.weight"])  # the head of before
    assert any("class 0, 1, 2" in sentence for sentence in server.warnings)


def test_what_a_layer_has_to_have() -> None:
    with refused("model", "bias", "classifier"):
        fitted(CCVR(), model=Plane(bias=False))
    with refused("target_epsilon", 3, "bounds"):
        fitted(CCVR(target_epsilon=3.0), model=Plane(bounded=False))
    for wrong in (0, -1, "many", 2.5):
        with pytest.raises(ValueError, match="samples"):
            CCVR(samples=wrong)


def test_more_class_grams_than_memory_holds_are_refused_before_any(tmp_path: Path) -> None:
    """A hundred classes and 2,048 features: 3.1 GiB of whole matrices."""
    with refused("features", "2048", "project("):
        CCVR().check_network(Plane(2048, 100), torch.zeros(1, 2048))
