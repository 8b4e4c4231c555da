"""CCVR: class Gaussians from sums and from clients, samples, training on them, and the bound without samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from tests.helpers import refused
from torch.nn.functional import cross_entropy

from fedfill.statistics.calibration import (
    ClassGaussians,
    class_gaussians,
    gaussian_samples,
    jensen_bound,
    minimise_bound,
    noisy_class_gaussians,
    train_on_samples,
)
from fedfill.statistics.covariance import within_covariance
from fedfill.statistics.heads import LinearHead, linear
from fedfill.streams import torch_stream

Z = torch.tensor([[1, 0], [0.6, 0.8], [0, 1], [0.8, 0.6], [0.8, -0.6]], dtype=torch.float64)
Y = torch.tensor([0, 1, 1, 0, 0])


def sums_of(z: torch.Tensor, y: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Class Grams, moments and counts."""
    targets = torch.eye(classes, dtype=torch.float64)[y]
    return torch.einsum("nc,ni,nj->cij", targets, z, z), z.T @ targets, targets.sum(0)


def drawn(n: int, d: int, classes: int, seed: int = 0, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=stream)
    centres = torch.randn(classes, d, generator=stream, dtype=torch.float64)
    return centres[y] + spread * torch.randn(n, d, generator=stream, dtype=torch.float64), y


def stream_of(c: int) -> torch.Generator:
    return torch_stream(0, "samples", c)


def zero(classes: int, d: int) -> LinearHead:
    return LinearHead(torch.zeros(classes, d, dtype=torch.float64), torch.zeros(classes, dtype=torch.float64))


# Means and covariances


@given(st.integers(1, 6), st.integers(0, 10_000))
@settings(max_examples=50)
def test_the_papers_way_of_merging_clients_gives_what_class_grams_give(clients, seed):
    z, y = drawn(80, 3, 2, seed)
    client = torch.randint(0, clients, (80,), generator=torch.Generator().manual_seed(seed))
    ours = class_gaussians(*sums_of(z, y, 2))
    for c in range(2):
        n = int((y == c).sum())
        mean = z[y == c].mean(0)
        merged = -n / (n - 1) * torch.outer(mean, mean)
        for k in range(clients):
            own = z[(y == c) & (client == k)]
            if len(own) > 1:
                merged += (len(own) - 1) / (n - 1) * own.T.cov()
            if len(own):
                merged += len(own) / (n - 1) * torch.outer(own.mean(0), own.mean(0))
        assert torch.allclose(ours.means[c], mean, atol=1e-12)
        assert torch.allclose(ours.covariances[c], merged, atol=1e-11)


def test_classes_of_few_records_lean_on_the_pooled_covariance():
    z, y = drawn(60, 4, 2)
    z, y = torch.cat([z, z[:3] ** 2, z[:1]]), torch.cat([y, torch.tensor([2, 2, 2, 3])])
    grams, moments, counts = sums_of(z, y, 5)
    pooled = within_covariance(grams.sum(0), moments, counts)
    found = class_gaussians(grams, moments, counts)
    assert torch.allclose(found.covariances[0], z[y == 0].T.cov())
    assert torch.allclose(found.covariances[2], 3 / 7 * z[y == 2].T.cov() + 4 / 7 * pooled)  # a = 4 / (4 + 3)
    assert torch.allclose(found.covariances[3], pooled)
    assert found.means[4].tolist() == [0] * 4


def test_covariances_under_noise_by_hand():
    grams = torch.diag(torch.tensor([9.0, 1]))[None].repeat(2, 1, 1)
    moments, counts = torch.tensor([[2.0, 9], [4, 9]]), torch.tensor([4.0, 0])
    found = noisy_class_gaussians(grams, moments, counts, 0.5)
    values, vectors = np.linalg.eigh(np.array([[9 / 4 - 1 / 4, -1 / 2], [-1 / 2, 1 / 4 - 1]]))
    edge = 2 * 0.5 * math.sqrt(2)
    slow = (vectors * (np.maximum(values, 0) + edge / 8 / 4)) @ vectors.T
    assert np.abs(found.covariances[0].numpy() - slow).max() < 1e-12
    assert found.means.tolist() == [[0.5, 1], [0, 0]]


def test_as_the_noise_ends_covariances_are_those_of_records():
    z, y = drawn(60, 4, 2)
    found = noisy_class_gaussians(*sums_of(z, y, 2), 1e-9)
    assert torch.allclose(found.covariances[1], z[y == 1].T.cov(correction=0), atol=1e-8)


# Samples


def test_samples_by_hand(monkeypatch):
    draws = torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]], dtype=torch.float64)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: draws)
    gaussians = class_gaussians(*sums_of(torch.cat([Z, Z]), torch.cat([Y, Y]), 2))
    # the covariances of the example, whose divisor is N_c - 1 with half the records
    own = torch.tensor([[[0.04 / 3, 0], [0, 0.36]], [[0.18, -0.06], [-0.06, 0.02]]], dtype=torch.float64)
    samples, labels = gaussian_samples(ClassGaussians(gaussians.means, own, gaussians.counts), [4, 0], stream_of)
    expected = [0.982569, 0, 0.866667, 0.600083, 0.750764, 0, 0.866667, -0.600083]
    assert samples.flatten().tolist() == pytest.approx(expected, abs=6e-7)
    assert labels.tolist() == [0] * 4


def test_samples_have_the_moments_of_their_class():
    z, y = drawn(300, 3, 2)
    gaussians = class_gaussians(*sums_of(z, y, 2))
    samples, labels = gaussian_samples(gaussians, 40_000, stream_of, jitter=0.0)
    for c in range(2):
        assert torch.allclose(samples[labels == c].mean(0), gaussians.means[c], atol=0.03)
        assert torch.allclose(samples[labels == c].T.cov(), gaussians.covariances[c], atol=0.04)


def test_draws_of_a_class_do_not_depend_on_the_others_and_nobodys_class_has_none():
    z, y = drawn(300, 3, 2)
    few, many = class_gaussians(*sums_of(z, y, 2)), class_gaussians(*sums_of(z, 2 * y, 4))
    a, labels_a = gaussian_samples(few, 10, stream_of)
    b, labels_b = gaussian_samples(many, [10, 10, 10, 10], stream_of)
    assert labels_b.tolist() == [0] * 10 + [2] * 10
    assert torch.equal(a[labels_a == 0], b[labels_b == 0])
    none, labels = gaussian_samples(many, 0, stream_of)
    assert (none.shape, labels.shape) == ((0, 3), (0,))


@pytest.mark.parametrize(("n", "d", "classes"), [(1, 1, 1), (1, 4, 3), (4, 30, 2), (5, 3, 5)])
@pytest.mark.parametrize("jitter", [0.0, 1e-4])
def test_few_records_give_finite_samples_and_heads(n, d, classes, jitter):
    z, y = drawn(n, d, classes)
    gaussians = class_gaussians(*sums_of(z, y, classes))
    samples, labels = gaussian_samples(gaussians, 20, stream_of, jitter)
    assert torch.isfinite(samples).all()
    assert set(labels.tolist()) == set(y.tolist())
    trained = train_on_samples(zero(classes, d), samples, labels, stream_of(99), steps=5)
    for head in (trained, minimise_bound(zero(classes, d), gaussians)):
        scores = head.scores(torch.cat([z, 1e3 * z, -z]))
        assert torch.isfinite(scores).all()
        assert set(scores.argmax(1).tolist()) <= set(y.tolist())


# Training on samples


def test_training_lowers_the_loss_to_that_of_the_best_head():
    z, y = drawn(500, 3, 3, seed=2)
    samples, labels = gaussian_samples(class_gaussians(*sums_of(z, y, 3)), 500, stream_of)
    head = train_on_samples(zero(3, 3), samples, labels, stream_of(99))
    fit = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    best = torch.optim.LBFGS([fit], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        best.zero_grad()
        loss = cross_entropy(samples @ fit[:, :3].T + fit[:, 3], labels)
        loss.backward()
        return loss

    best.step(closure)
    reached = float(cross_entropy(head.scores(samples), labels))
    assert reached < float(closure().detach()) + 0.01
    again = train_on_samples(zero(3, 3), samples, labels, stream_of(99))
    assert torch.equal(head.weight, again.weight)


def test_training_starts_from_the_present_head_and_does_not_change_it():
    z, y = drawn(50, 3, 2)
    start = LinearHead(torch.randn(2, 3, generator=stream_of(1), dtype=torch.float64), torch.tensor([0.5, -0.5]))
    held = start.weight.clone()
    assert torch.equal(train_on_samples(start, z, y, stream_of(0), steps=0).weight, held)
    one = train_on_samples(start, z, y, stream_of(0), steps=1)
    assert float((one.weight - held).abs().max()) == pytest.approx(0.01, rel=1e-3)  # Adam's first step
    assert torch.equal(start.weight, held)


def test_samples_are_clamped_to_the_range_of_the_codes():
    z, y = 3 * torch.randn(100, 3, generator=stream_of(0), dtype=torch.float64), torch.arange(100) % 2
    clamped = train_on_samples(zero(2, 3), z, y, stream_of(1), clamp=(0.0, 1.0), steps=20)
    slow = train_on_samples(zero(2, 3), z.clamp(0, 1), y, stream_of(1), steps=20)
    assert torch.equal(clamped.weight, slow.weight)
    assert not torch.equal(clamped.weight, train_on_samples(zero(2, 3), z, y, stream_of(1), steps=20).weight)


def test_a_class_that_nobody_held_can_be_learned_later():
    z, y = drawn(300, 3, 2, seed=4, spread=0.2)
    without = linear(torch.ones(2, 3), torch.zeros(2), torch.tensor([True, False]))
    gaussians = class_gaussians(*sums_of(z, y, 2))
    samples, labels = gaussian_samples(gaussians, 200, stream_of)
    assert float(without.bias[1]) < -1e8
    for head in (train_on_samples(without, samples, labels, stream_of(9)), minimise_bound(without, gaussians)):
        assert float((head.scores(z).argmax(1) == y).double().mean()) > 0.95


def test_sums_and_samples_of_nobody_are_refused():
    with refused("head"):
        class_gaussians(torch.zeros(2, 3, 3), torch.zeros(3, 2), torch.zeros(2))
    with refused("head"):
        train_on_samples(zero(2, 3), torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), stream_of(0))


# The bound


def test_the_bound_by_hand():
    _, moments, counts = sums_of(Z, Y, 2)
    means = (moments / counts).T
    own = torch.tensor([[[0.04 / 3, 0], [0, 0.36]], [[0.18, -0.06], [-0.06, 0.02]]], dtype=torch.float64)
    half = torch.full((2,), 0.5, dtype=torch.float64)
    bound = jensen_bound(torch.eye(2, dtype=torch.float64), torch.zeros(2), ClassGaussians(means, own, counts), half)
    assert float(bound) == pytest.approx(0.453511, abs=6e-7)


def test_the_bound_is_the_log_of_a_mean_over_samples_and_lies_above_the_loss():
    z, y = drawn(300, 3, 3)
    gaussians = class_gaussians(*sums_of(z, y, 3))
    weight = 0.5 * torch.randn(3, 3, generator=stream_of(0), dtype=torch.float64)
    bias, prior = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5]).double()
    samples, labels = gaussian_samples(gaussians, 400_000, stream_of, jitter=0.01)
    scores = samples @ weight.T + bias
    ratios = (scores - scores.gather(1, labels[:, None])).exp().sum(1)
    slow = sum(prior[c] * ratios[labels == c].mean().log() for c in range(3))
    loss = sum(prior[c] * ratios[labels == c].log().mean() for c in range(3))
    bound = jensen_bound(weight, bias, gaussians, prior, jitter=0.01)
    assert float(bound) == pytest.approx(float(slow), abs=0.01)
    assert float(bound) > float(loss) + 0.05


def test_the_bound_tends_to_the_loss_of_tight_classes():
    z, y = drawn(300, 3, 3)
    gaussians = class_gaussians(*sums_of(z, y, 3))
    tight = ClassGaussians(gaussians.means, 1e-6 * gaussians.covariances, gaussians.counts)
    weight, third = torch.randn(3, 3, generator=stream_of(0), dtype=torch.float64), torch.full((3,), 1 / 3).double()
    loss = cross_entropy(gaussians.means @ weight.T, torch.arange(3))
    assert float(jensen_bound(weight, torch.zeros(3), tight, third)) == pytest.approx(float(loss), abs=1e-4)


@pytest.mark.parametrize("prior", ["uniform", "train", torch.tensor([1.0, 5.0, 2.0])])
def test_fifty_steps_reach_the_least_bound(prior):
    z, y = drawn(300, 4, 3, spread=0.5)
    gaussians = class_gaussians(*sums_of(z, y, 3))
    shares = {"uniform": torch.ones(3), "train": gaussians.counts}.get(prior if isinstance(prior, str) else "", prior)
    shares = (shares / shares.sum()).double()

    def bound(flat: np.ndarray) -> float:
        head = torch.as_tensor(flat).reshape(3, 5)
        return float(jensen_bound(head[:, :4], head[:, 4], gaussians, shares, 1e-4))

    best = minimize(bound, np.zeros(15), method="BFGS").fun
    head = minimise_bound(zero(3, 4), gaussians, prior)
    reached = bound(torch.cat([head.weight, head.bias[:, None]], 1).numpy().ravel())
    assert reached == pytest.approx(best, abs=1e-4)
    assert reached < 0.5 * bound(np.zeros(15))


def test_the_bounds_head_is_as_good_as_that_of_samples():
    z, y = drawn(600, 5, 3, spread=0.7)
    gaussians = class_gaussians(*sums_of(z, y, 3))
    samples, labels = gaussian_samples(gaussians, 500, stream_of)
    heads = train_on_samples(zero(3, 5), samples, labels, stream_of(9)), minimise_bound(zero(3, 5), gaussians)
    right = [float((head.scores(z).argmax(1) == y).double().mean()) for head in heads]
    assert min(right) > 0.9
    assert right[1] > right[0] - 0.02
