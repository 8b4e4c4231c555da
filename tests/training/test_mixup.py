"""Mixup: the loss by hand and at its ends, and the moments of the shares."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.streams import torch_stream
from fedfill.training.mixup import draw_lambda, mixed_entropy, mixup_loss


def batch(name: str) -> tuple[Tensor, Tensor]:
    stream = torch_stream(0, name)
    return torch.randn(6, 4, generator=stream), torch.randint(0, 3, (6,), generator=stream)


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(generator=torch_stream(1, "weights", p.numel()))
    return model


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_loss_by_hand() -> None:
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0], [1.0]]))
    labels = torch.tensor([0]), torch.tensor([1])
    loss = mixup_loss(model, torch.tensor([[6.0]]), labels[0], torch.tensor([[2.0]]), labels[1], 0.25)
    x = 0.25 * 6 + 0.75 * 2  # scores 0 and 3
    assert loss.item() == pytest.approx(0.25 * math.log(1 + math.exp(x)) + 0.75 * math.log(1 + math.exp(-x)), rel=1e-6)


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_at_its_ends_it_is_plain_cross_entropy_to_the_bit(lam: float) -> None:
    (x, y), (v, w) = batch("first"), batch("second")
    model = network()
    mixed = mixup_loss(model, x, y, v, w, lam)
    plain = functional.cross_entropy(model(x if lam else v), y if lam else w)
    assert torch.equal(mixed, plain)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, mixed), gradients(model, plain), strict=True))


def test_it_is_the_cross_entropy_with_mixed_targets_and_both_sides_are_alike() -> None:
    (x, y), (v, w) = batch("first"), batch("second")
    model, hot = network(), [functional.one_hot(labels, 3).float() for labels in (y, w)]
    loss = mixup_loss(model, x, y, v, w, 0.3)
    soft = functional.cross_entropy(model(0.3 * x + 0.7 * v), 0.3 * hot[0] + 0.7 * hot[1])
    assert loss.item() == pytest.approx(soft.item(), rel=1e-6)
    assert mixup_loss(model, v, w, x, y, 0.7).item() == pytest.approx(loss.item(), rel=1e-6)
    assert mixup_loss(model, x, hot[0], v, w, 0.3).item() == pytest.approx(loss.item(), rel=1e-6)
    assert mixed_entropy(model(x), y, y, 0.4).item() == pytest.approx(functional.cross_entropy(model(x), y).item())


@pytest.mark.parametrize("alpha", [0.05, 0.75, 1.0, 4.0])
def test_moments_of_the_shares(alpha: float) -> None:
    stream = torch_stream(0, "shares")
    draws = [draw_lambda(alpha, stream) for _ in range(4000)]
    assert 0 <= min(draws) <= max(draws) <= 1
    variance = 1 / (4 * (2 * alpha + 1))  # of Beta(alpha, alpha)
    assert statistics.fmean(draws) == pytest.approx(0.5, abs=4 * math.sqrt(variance / len(draws)))
    assert statistics.pvariance(draws) == pytest.approx(variance, rel=0.08)


def test_shares_follow_the_passed_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = torch_stream(0, "a"), torch_stream(0, "a")
    draws = [draw_lambda(0.5, first) for _ in range(3)]
    assert draws == [draw_lambda(0.5, second) for _ in range(3)]
    assert len(set(draws)) == 3
    assert draw_lambda(0.5, torch_stream(0, "b")) not in draws
    assert torch.equal(torch.get_rng_state(), before)
    assert draw_lambda(0, first) == 1.0
