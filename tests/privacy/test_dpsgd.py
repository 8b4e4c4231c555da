"""DP-SGD: clipping by hand, per-sample gradients against a loop, Poisson samples."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fedfill.privacy.dpsgd import clipped_sum, noisy_sum, poisson_sample
from fedfill.privacy.keyed import seeded


def linear(weights, x):
    return (weights["w"] * x).sum()


def test_clipping_by_hand():
    # the gradient of each sample is the sample: lengths 5 and 0.5, clipped to 1
    batch = (torch.tensor([[3.0, 4.0], [0.3, 0.4]]),)
    total = clipped_sum(linear, {"w": torch.zeros(2)}, batch, clip=1.0)
    torch.testing.assert_close(total["w"], torch.tensor([0.6 + 0.3, 0.8 + 0.4]))


def test_a_norm_is_that_of_all_tensors_together():
    def loss(weights, x):
        return (weights["a"] * x).sum() + (weights["b"] * x).sum()

    x = torch.tensor([[3.0, 4.0]])  # both gradients have length 5, together sqrt(50)
    total = clipped_sum(loss, {"a": torch.zeros(2), "b": torch.zeros(2)}, (x,), clip=1.0)
    torch.testing.assert_close(total["a"], x[0] / math.sqrt(50))
    torch.testing.assert_close(total["b"], x[0] / math.sqrt(50))


def test_a_parameter_that_is_one_number():
    def loss(weights, x):
        return (weights["a"] * x).sum() + 3 * weights["b"]

    total = clipped_sum(loss, {"a": torch.zeros(2), "b": torch.tensor(0.0)}, (torch.tensor([[0.0, 4.0]]),), clip=1.0)
    torch.testing.assert_close(total, {"a": torch.tensor([0.0, 0.8]), "b": torch.tensor(0.6)})


def test_against_a_loop_over_samples():
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(3 * 4, 1))
    x, y = torch.randn(7, 1, 4, 4, generator=generator), torch.randn(7, generator=generator)

    def loss(weights, image, target):
        return (functional_call(network, weights, (image[None],))[0, 0] - target).square()

    weights = {name: p.detach() for name, p in network.named_parameters()}
    fast = clipped_sum(loss, weights, (x, y), clip=0.7)
    slow = {name: torch.zeros_like(p) for name, p in weights.items()}
    for i in range(7):
        network.zero_grad()
        (network(x[i : i + 1])[0, 0] - y[i]).square().backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in network.parameters()))
        for name, p in network.named_parameters():
            slow[name] += p.grad * min(1.0, 0.7 / norm)
    for name in slow:
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e6])
def test_one_sample_moves_the_sum_by_no_more_than_the_clip(scale):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 5, generator=generator) * scale
    whole = clipped_sum(linear, {"w": torch.zeros(5)}, (x,), clip=0.5)["w"]
    without = clipped_sum(linear, {"w": torch.zeros(5)}, (x[:-1],), clip=0.5)["w"]
    assert float((whole - without).norm()) <= 0.5 * (1 + 1e-5)


def test_noise_has_the_promised_deviation_and_is_on_an_empty_batch_too():
    weights = {"w": torch.zeros(20_000)}
    noise = seeded(2)
    total = noisy_sum(linear, weights, (torch.zeros(0, 20_000),), clip=0.5, noise_multiplier=3.0, noise=noise)["w"]
    assert float(total.std()) == pytest.approx(1.5, rel=0.02)
    assert float(total.mean()) == pytest.approx(0.0, abs=0.05)


def test_poisson_samples_vary_in_size_and_have_the_probability():
    generator = seeded(3)
    sizes = torch.tensor([len(poisson_sample(1000, 0.1, generator)) for _ in range(400)]).double()
    assert float(sizes.mean()) == pytest.approx(100, abs=2)
    assert float(sizes.var()) == pytest.approx(90, rel=0.25)  # n q (1 - q)
    assert len(poisson_sample(10, 1.0, generator)) == 10
