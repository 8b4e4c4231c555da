"""Synthetic embeddings: distances and prototypes worked by hand, the two networks, and where their weights come from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedfill.streams import torch_stream
from fedfill.synthesis.embeddings import (
    EmbeddingGenerator,
    EmbeddingOptions,
    Embeddings,
    RTNet,
    distance,
    empty,
    follow_prototypes,
    initial,
    mean_cov,
    mmd,
    mmd_per_class,
)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def slow_mmd(a: list[list[float]], b: list[list[float]]) -> float:
    """The formula, one pair after the other."""

    def squared(x: list[float], y: list[float]) -> float:
        return sum((p - q) ** 2 for p, q in zip(x, y, strict=True))

    joint = a + b
    n = len(joint)
    bandwidth = sum(squared(x, y) for x in joint for y in joint) / (n * n - n) / 4

    def kernel(x: list[float], y: list[float]) -> float:
        return sum(math.exp(-squared(x, y) / (bandwidth * 2**i)) for i in range(5))

    def mean(xs: list[list[float]], ys: list[list[float]]) -> float:
        return sum(kernel(x, y) for x in xs for y in ys) / (len(xs) * len(ys))

    return mean(a, a) + mean(b, b) - 2 * mean(a, b)


def test_mmd_of_two_points_by_hand():
    # two pairs at distance 2: their squares sum to 8, over 4 - 2 pairs 4, over 2^2 a bandwidth of 1
    expected = 2 * 5 - 2 * sum(math.exp(-4 / k) for k in (1, 2, 4, 8, 16))
    assert mmd(column(0), column(2)).item() == pytest.approx(expected, rel=1e-6)
    # the bandwidth follows the scale, so the value doesn't
    assert mmd(column(0), column(2000)).item() == pytest.approx(expected, rel=1e-5)


def test_mmd_of_two_and_two_points_by_hand():
    # {0, 2} and {0, 4}: squared distances 4, 16, 4, 16, 4, 0 for the six pairs, 88 both ways; 88 / 12 / 4 is the bandwidth
    h = 88 / 48

    def k(d: float) -> float:
        return sum(math.exp(-d / (h * 2**i)) for i in range(5))

    within_a, within_b = (2 * 5 + 2 * k(4)) / 4, (2 * 5 + 2 * k(16)) / 4
    between = (k(0) + k(16) + k(4) + k(4)) / 4
    expected = within_a + within_b - 2 * between
    assert mmd(column(0, 2), column(0, 4)).item() == pytest.approx(expected, rel=1e-6)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9))
def test_mmd_is_the_slow_one_and_within_its_bounds(n: int, m: int, d: int, seed: int):
    draws = torch.Generator().manual_seed(seed)
    a, b = torch.randn(n, d, generator=draws), 3 + 5 * torch.randn(m, d, generator=draws)
    value = mmd(a, b).item()
    assert value == pytest.approx(slow_mmd(a.tolist(), b.tolist()), abs=1e-5)
    assert -1e-5 <= value <= 10
    assert value == pytest.approx(mmd(b, a).item(), abs=1e-5)


def test_mmd_is_nothing_for_equal_sets_and_stays_bounded_where_a_mean_squared_difference_does_not():
    a = torch.randn(6, 3, generator=torch_stream(0, "a"))
    assert mmd(a, a[[3, 1, 0, 2, 5, 4]]).item() == pytest.approx(0, abs=1e-5)
    assert mmd(column(7, 7), column(7, 7)).item() == 0  # no distance at all
    far = [distance(kind, column(0, 1), torch.zeros(2), column(1e6, 2e6), torch.zeros(2)) for kind in ("mmd", "l2")]
    assert 2 < far[0].item() < 10
    assert far[1].item() > 1e11


def test_gradients_leave_the_bandwidth_out():
    a = torch.tensor([[0.0], [1.0]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([[3.0], [5.0]], dtype=torch.float64)
    (found,) = torch.autograd.grad(mmd(a, b), a)
    joint = [0.0, 1.0, 3.0, 5.0]
    h = sum((x - y) ** 2 for x in joint for y in joint) / 12 / 4

    def slope(x: float, y: float) -> float:
        """d k(x, y) / d x at a fixed bandwidth."""
        return sum(-2 * (x - y) / (h * 2**i) * math.exp(-((x - y) ** 2) / (h * 2**i)) for i in range(5))

    for k, x in enumerate((0.0, 1.0)):
        by_hand = 2 / 4 * slope(x, (1.0, 0.0)[k]) - 2 / 4 * (slope(x, 3.0) + slope(x, 5.0))
        assert found[k].item() == pytest.approx(by_hand, rel=1e-9)


def test_by_class_is_the_mean_over_those_that_both_have_twice():
    draws = torch_stream(0, "classes")
    a, b = torch.randn(9, 2, generator=draws), torch.randn(7, 2, generator=draws) + 1
    a_labels, b_labels = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 5]), torch.tensor([0, 0, 1, 1, 2, 2, 3])
    by_hand = [slow_mmd(a[a_labels == c].tolist(), b[b_labels == c].tolist()) for c in (0, 1)]  # 2, 3, 5 are too rare
    assert mmd_per_class(a, a_labels, b, b_labels).item() == pytest.approx(sum(by_hand) / 2, abs=1e-5)
    a.requires_grad_()
    none = mmd_per_class(a, a_labels, b, b_labels + 10)
    assert none.item() == 0
    none.backward()  # it has a gradient all the same, of zeros
    assert not a.grad.any()


def test_means_and_covariances_by_hand():
    a = torch.tensor([[0.0, 0.0], [2.0, 4.0]])  # mean (1, 2), covariance ((2, 4), (4, 8))
    b = torch.tensor([[1.0, 0.0], [1.0, 0.0], [4.0, 0.0]])  # mean (2, 0), covariance ((3, 0), (0, 0))
    assert mean_cov(a, b).item() == pytest.approx((1 + 4) / 2 + (1 + 16 + 16 + 64) / 4)
    assert mean_cov(a, a.flip(0)).item() == 0


def test_kinds_of_distances():
    draws = torch_stream(0, "kinds")
    a, b = torch.randn(6, 2, generator=draws), torch.randn(6, 2, generator=draws)
    labels, others = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 0, 1, 1, 1])
    expected = {
        "mmd": mmd(a, b),
        "mmd_per_class": mmd_per_class(a, labels, b, others),
        "mean_cov": mean_cov(a, b),
        "l2": ((a - b) ** 2).mean(),
    }
    for kind, value in expected.items():
        assert distance(kind, a, labels, b, others).item() == pytest.approx(value.item())  # type: ignore[arg-type]
    assert len({round(value.item(), 6) for value in expected.values()}) == 4


def test_prototypes_by_hand():
    prototypes, seen = torch.zeros(3, 2), torch.zeros(3, dtype=torch.bool)
    batch = torch.tensor([[1.0, 2.0], [3.0, 6.0], [10.0, 0.0]]), torch.tensor([0, 0, 2])
    prototypes, seen = follow_prototypes(prototypes, seen, *batch, 0.3)
    assert prototypes.tolist() == [[2, 4], [0, 0], [10, 0]]  # the first mean is taken whole
    assert seen.tolist() == [True, False, True]
    prototypes, seen = follow_prototypes(
        prototypes, seen, torch.tensor([[12.0, 4.0], [5.0, 5.0]]), torch.tensor([0, 1]), 0.3
    )
    # 0.7 of the old and 0.3 of the new; class 1 is new, class 2 is absent and stays
    assert torch.allclose(prototypes, torch.tensor([[0.7 * 2 + 0.3 * 12, 4.0], [5, 5], [10, 0]]))
    assert seen.all()


def test_prototypes_that_were_given_are_not_written_into():
    before, seen = torch.ones(2, 1), torch.tensor([True, False])
    follow_prototypes(before, seen, torch.tensor([[5.0], [7.0]]), torch.tensor([0, 1]), 0.5)
    assert before.tolist() == [[1], [1]]
    assert seen.tolist() == [True, False]


def test_shapes_and_parameters():
    latent, classes, size = 3, 4, 6
    generator, rtnet = EmbeddingGenerator(latent, classes, size), RTNet(latent, classes, size)
    labels = torch.tensor([0, 3, 1, 2, 2])
    made = generator(torch.randn(5, latent), labels)
    assert made.shape == (5, size)
    assert made.detach().min() >= 0  # a ReLU comes last, as in an encoder
    residual = rtnet(made, labels)
    assert residual.shape == (5, size)
    assert residual.detach().min() < 0

    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    assert count(generator) == (7 * 6 + 6) + 2 * 6 + (6 * 6 + 6) + 2 * 6
    assert count(rtnet) == (10 * 3 + 3) + 2 * 3 + (3 * 6 + 6) + 2 * 6
    # FRAug's on digits: l = 256, d = 512
    assert count(EmbeddingGenerator(256, 10, 512)) == (266 * 512 + 512) + (512 * 512 + 512) + 2 * 2 * 512


def test_labels_matter():
    torch.manual_seed(0)
    generator = EmbeddingGenerator(3, 4, 6).eval()
    z = torch.zeros(1, 3)
    with torch.no_grad():
        first, second = (generator(z, torch.tensor([label])) for label in (0, 1))
    assert not torch.equal(first, second)


def test_initial_weights_are_distributed_as_torchs_and_come_from_the_stream_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()

    def make(device: torch.device | str) -> nn.Module:
        return EmbeddingGenerator(30, 10, 100, device)

    first, again, other = (initial(make, torch_stream(0, name)) for name in ("a", "a", "b"))
    loaded = empty(make, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    loaded.load_state_dict(first)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    plain = EmbeddingGenerator(30, 10, 100).state_dict()
    assert first.keys() == plain.keys()
    for name, tensor in first.items():
        assert (tensor.shape, tensor.dtype) == (plain[name].shape, plain[name].dtype)
        if name.startswith(("layers.0", "layers.3")):
            bound = (40 if name.startswith("layers.0") else 100) ** -0.5
            assert 0.9 * bound < tensor.abs().max() <= bound
            assert tensor.std().item() == pytest.approx(plain[name].std().item(), rel=0.25)
            assert not torch.equal(tensor, other[name])
        else:
            assert torch.equal(tensor, plain[name])  # batch norm begins as the identity


def test_mmd_of_large_sets_far_from_zero_is_that_of_all_differences():
    draws = torch_stream(0, "large")
    a, b = 100 + torch.randn(64, 512, generator=draws), 100.2 + torch.randn(64, 512, generator=draws)
    joint = torch.cat([a, b]).double()
    distances = (joint[:, None] - joint[None]).square().sum(2)
    bandwidth = distances.sum() / (128 * 127) / 4
    kernel = sum(torch.exp(-distances / (bandwidth * 2**i)) for i in range(5))
    assert isinstance(kernel, Tensor)
    expected = kernel[:64, :64].mean() + kernel[64:, 64:].mean() - 2 * kernel[:64, 64:].mean()
    assert mmd(a, b).item() == pytest.approx(expected.item(), rel=1e-3)


# One client's embeddings

CLASSES, SIZE = 4, 16


def made_by(prototypes: Tensor | None = None, seen: Tensor | None = None, **settings: Any) -> Embeddings:
    """Those of a client with networks that were drawn for it, in evaluation mode, and by default without prototypes."""
    options = EmbeddingOptions(**{"embedding_latent": 8, **settings})
    latent = int(options.embedding_latent or 1)

    def drawn(kind: type[nn.Module]) -> nn.Module:
        network = kind(latent, CLASSES, SIZE)
        network.load_state_dict(
            initial(lambda device: kind(latent, CLASSES, SIZE, device), torch_stream(0, "networks"))
        )
        return network.eval()

    prototypes = torch.zeros(CLASSES, SIZE) if prototypes is None else prototypes
    seen = torch.zeros(CLASSES, dtype=torch.bool) if seen is None else seen
    generator, rtnet = drawn(EmbeddingGenerator), drawn(RTNet)
    return Embeddings(options, generator, rtnet, prototypes, seen, [0, 0], torch_stream(0, "embeddings"))


@torch.no_grad()
def test_embeddings_are_bases_with_weighted_residuals():
    draws = torch_stream(0, "bases")
    prototypes = torch.rand(CLASSES, SIZE, generator=draws)
    client = made_by(prototypes, torch.ones(CLASSES, dtype=torch.bool))
    v, labels = torch.rand(8, SIZE, generator=draws), torch.tensor([0, 1] * 4)
    state = client.stream.get_state()
    whole = client.embeddings(v, labels, 1.0)
    client.stream.set_state(state)
    part = client.embeddings(v, labels, 0.25)
    none = client.embeddings(v, labels, 0.0)
    client.stream.set_state(state)
    z = torch.randn(8, 8, generator=client.stream)
    residual = client.rtnet(client.generator(z, labels), labels)
    assert residual.abs().max() > 0.1
    assert [wanted.tolist() for _, wanted in whole] == [labels.tolist(), [0, 1, 2, 3] * 2]
    assert torch.allclose(whole[0][0], v + residual)
    assert torch.allclose(part[0][0], v + 0.25 * residual)
    assert torch.equal(none[0][0], v)
    assert torch.equal(none[1][0], prototypes[none[1][1]])


@pytest.mark.parametrize("b", [2, 3, 4, 7])
def test_balanced_labels_reach_all_classes_at_head_and_generator(b: int):
    client = made_by()
    met = [torch.zeros(CLASSES), torch.zeros(CLASSES)]
    for _ in range(4):
        for which in (0, 1):  # in turns, as in the local update
            met[which] += torch.bincount(client.balanced(which, b), minlength=CLASSES)
    assert all(counts.tolist() == [b] * CLASSES for counts in met)
    assert client.rotations == [0, 0]


def test_noise():
    normal, uniform = made_by().latent(1000), made_by(latent_noise="uniform").latent(1000)
    assert normal.shape == uniform.shape == (1000, 8)
    assert normal.min() < -2
    assert 0 <= uniform.min() < uniform.max() < 1
    assert made_by(embedding_latent=3).latent(2).shape == (2, 3)
