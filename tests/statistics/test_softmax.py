"""Softmax regression by sums of gradients: hand-worked steps, the bound, and a loss that never rises."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from tests.helpers import refused
from torch.nn.functional import cross_entropy

from fedfill.statistics.ridge import ridge
from fedfill.statistics.softmax import (
    gradient_bound,
    gradient_sum,
    noisy_preconditioner,
    preconditioner,
    softmax_head,
    step,
)

Z = torch.tensor([[1, 0], [0.6, 0.8], [0, 1], [0.8, 0.6], [0.8, -0.6]], dtype=torch.float64)
Y = torch.tensor([0, 1, 1, 0, 0])


def drawn(n: int, d: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """n unit vectors, gathered around a direction of their class."""
    stream = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=stream)
    centres = torch.randn(classes, d, generator=stream, dtype=torch.float64)
    z = centres[y] + torch.randn(n, d, generator=stream, dtype=torch.float64)
    return z / z.norm(dim=1, keepdim=True), y


def objective(weight: torch.Tensor, z: torch.Tensor, y: torch.Tensor, lam: float) -> float:
    return float(cross_entropy(z @ weight, y, reduction="sum") + lam / 2 * (weight**2).sum())


def test_steps_by_hand():
    weight = torch.zeros(2, 2, dtype=torch.float64)
    assert gradient_sum(weight, Z[:2], Y[:2]).flatten().tolist() == pytest.approx([-0.2, 0.2, 0.4, -0.4])
    whole = gradient_sum(weight, Z, Y)
    assert whole.flatten().tolist() == pytest.approx([-1, 1, 0.9, -0.9])
    factor, seen = preconditioner(Z.T @ Z, 0.1), [objective(weight, Z, Y, 0.1)]
    for k in range(5):
        weight = step(weight, gradient_sum(weight, Z, Y), factor, 0.1)
        seen.append(objective(weight, Z, Y, 0.1))
        if k == 0:
            assert weight.flatten().tolist() == pytest.approx([0.85, -0.85, -0.8625, 0.8625])
    assert seen == pytest.approx([3.465736, 1.638698, 1.516042, 1.472574, 1.453405, 1.444044], abs=6e-7)


def test_the_first_step_is_ridge_on_centred_labels():
    z, y = drawn(80, 6, 4)
    targets = torch.eye(4, dtype=torch.float64)[y] - 1 / 4
    first = step(torch.zeros(6, 4), gradient_sum(torch.zeros(6, 4), z, y), preconditioner(z.T @ z, 0.3), 0.3)
    assert torch.allclose(first, ridge(z.T @ z / 2, z.T @ targets, 0.3).weight.T, atol=1e-12)


def test_the_sum_is_the_derivative_of_the_loss_and_adds_up_over_parts():
    z, y = drawn(50, 5, 3)
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    cross_entropy(z @ weight, y, reduction="sum").backward()
    ours = gradient_sum(weight.detach(), z, y)
    assert torch.allclose(ours, weight.grad, atol=1e-12)
    parts = sum(gradient_sum(weight.detach(), z[k::7], y[k::7]) for k in range(7))
    assert torch.allclose(parts, ours, atol=1e-12)
    assert gradient_sum(weight.detach(), z[:0], y[:0]).tolist() == [[0] * 3] * 5


def test_steps_lead_to_scikit_learns_optimum():
    z, y = drawn(200, 5, 3)
    weight, factor = torch.zeros(5, 3, dtype=torch.float64), preconditioner(z.T @ z, 1.0)
    for _ in range(400):
        weight = step(weight, gradient_sum(weight, z, y), factor, 1.0)
    theirs = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-10, max_iter=5000).fit(z.numpy(), y.numpy())
    assert torch.allclose(weight.T, torch.as_tensor(theirs.coef_), atol=1e-6)


# The bound


def test_no_record_contributes_more_than_the_bound():
    stream = torch.Generator().manual_seed(0)
    bound, longest = gradient_bound(1.0), 0.0
    for _ in range(10_000):
        weight = torch.randn(4, 3, generator=stream, dtype=torch.float64)
        weight *= 1000 * torch.rand(1, generator=stream) / weight.norm()
        z = torch.randn(1, 4, generator=stream, dtype=torch.float64)
        z /= z.norm()
        longest = max(longest, float(gradient_sum(weight, z, torch.randint(3, (1,), generator=stream)).norm()))
    assert bound == pytest.approx(math.sqrt(2))
    assert bound * (1 - 1e-9) < longest <= bound * (1 + 1e-12)


def test_a_clip_bounds_each_record_and_leaves_the_shorter_as_they_are():
    z, y = drawn(200, 5, 3)
    weight = 20 * torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for k in range(200):
        free, held = (gradient_sum(weight, z[k : k + 1], y[k : k + 1], clip) for clip in (None, 0.5))
        assert torch.allclose(held, free * min(1, 0.5 / float(free.norm())), atol=1e-14)
    parts = sum(gradient_sum(weight, z[k : k + 1], y[k : k + 1], 0.5) for k in range(200))
    assert torch.allclose(gradient_sum(weight, z, y, 0.5), parts, atol=1e-12)
    assert gradient_bound(1.0, 0.5) == 0.5
    assert gradient_bound(0.1, 0.5) == pytest.approx(0.1 * math.sqrt(2))


@pytest.mark.parametrize("classes", [1, 2, 5])
@pytest.mark.parametrize("scale", [0.1, 1, 30])
def test_the_loss_never_rises_from_anywhere(classes, scale):
    for seed in range(10):
        z, y = drawn(40, 6, classes, seed)
        z = z * scale
        lam = 1e-6 * 40
        weight = (
            10 * torch.randn(6, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / scale
        )
        factor, before = preconditioner(z.T @ z, lam), math.inf
        for _ in range(20):
            now = objective(weight, z, y, lam)
            assert now <= before * (1 + 1e-12) + 1e-9
            weight, before = step(weight, gradient_sum(weight, z, y), factor, lam), now


def test_half_the_gram_is_needed():
    # with a quarter of it in its place the loss would rise: two classes, whose records lie on both sides of zero
    z = torch.tensor([[1.0], [1], [-1], [-1]], dtype=torch.float64)
    y = torch.tensor([0, 1, 0, 1])
    weight = torch.tensor([[0.5, -0.5]], dtype=torch.float64)
    losses = [
        objective(step(weight, gradient_sum(weight, z, y), preconditioner(share * z.T @ z, 0.0)), z, y, 0.0)
        for share in (1, 0.49)
    ]
    assert losses[0] < objective(weight, z, y, 0.0)
    assert losses[1] > losses[0]


# Noise and edges


def test_a_noisy_preconditioner_by_hand():
    gram = torch.diag(torch.tensor([-3.0, 8.0, 20.0]))
    added = 2 * 2 * math.sqrt(3) / 4
    factor = noisy_preconditioner(gram, 2.0)
    expected = torch.diag(torch.tensor([added, 8 + added, 20 + added], dtype=torch.float64)) / 2
    assert torch.allclose(factor @ factor.T, expected)


def test_as_the_noise_ends_the_preconditioner_is_the_exact_one():
    z, _ = drawn(100, 6, 3)
    noisy, exact = noisy_preconditioner(z.T @ z, 1e-9), preconditioner(z.T @ z, 0.0)
    assert torch.allclose(noisy @ noisy.T, exact @ exact.T, atol=1e-6)


def test_a_singular_bound_is_refused():
    z, _ = drawn(3, 6, 3)
    with refused("ridge_lambda", 0, "singular"):
        preconditioner(z.T @ z, 0.0)
    with refused("ridge_lambda", "singular"):
        noisy_preconditioner(z.T @ z, 0.0)
    for lam in (-1.0, math.nan):
        with refused("ridge_lambda", lam):
            preconditioner(z.T @ z, lam)


@pytest.mark.parametrize(("n", "d", "classes"), [(1, 1, 1), (1, 5, 3), (4, 30, 2)])
def test_few_records_give_finite_heads(n, d, classes):
    z, y = drawn(n, d, classes)
    weight, factor = torch.zeros(d, classes, dtype=torch.float64), preconditioner(z.T @ z, 1e-6 * n)
    for _ in range(20):
        weight = step(weight, gradient_sum(weight, z, y), factor, 1e-6 * n)
    assert torch.isfinite(weight).all()
    counts = torch.bincount(y, minlength=classes)
    head = softmax_head(weight, counts)
    assert (counts[head.scores(torch.cat([z, -1e6 * z])).argmax(1)] > 0).all()
    assert torch.equal(softmax_head(weight).weight, weight.T)
