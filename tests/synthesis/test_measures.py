"""Measures of synthetic samples: hand-worked distances, identities, and a slow and obvious search beside the chunked one."""

import math
from types import SimpleNamespace

import pytest
import torch
from tests.helpers import refused
from torch import Tensor, nn

from fedfill.data.samples import Samples, normalise
from fedfill.streams import torch_stream
from fedfill.synthesis.intervals import share
from fedfill.synthesis.measures import (
    Balance,
    class_balance,
    features,
    frechet_distance,
    nearest_distances,
    nearness,
    recognised,
)  # fmt: skip


def cloud(n: int, d: int, name: str) -> Tensor:
    """Features with covariances of many sizes."""
    stream = torch_stream(0, name)
    return torch.randn(n, d, generator=stream) @ torch.randn(d, d, generator=stream) + torch.randn(d, generator=stream)


def images(n: int, seed: int, side: int = 4) -> Tensor:
    return torch.randint(0, 256, (n, 1, side, side), generator=torch_stream(seed, "images"), dtype=torch.uint8)


# ---- Fréchet distance


def test_frechet_distance_in_one_dimension_by_hand():
    a = torch.tensor([[-1.0], [1.0]])  # mean 0, variance 2
    b = torch.tensor([[1.0], [5.0]])  # mean 3, variance 8
    assert frechet_distance(a, b) == pytest.approx(3**2 + (math.sqrt(8) - math.sqrt(2)) ** 2)


def test_frechet_distance_of_diagonal_covariances_by_hand():
    corners = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])  # variances 4/3, no covariance
    other = corners * torch.tensor([3.0, 0.5]) + torch.tensor([1.0, -2.0])
    expected = 1 + 4 + 4 / 3 * ((3 - 1) ** 2 + (0.5 - 1) ** 2)
    assert frechet_distance(corners, other) == pytest.approx(expected)


def test_frechet_distance_of_the_same_set_is_zero_and_of_a_shifted_one_the_shift():
    a = cloud(50, 6, "a")
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(a, a[torch.randperm(50, generator=torch_stream(0, "order"))]) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(a, a + 2) == pytest.approx(6 * 4, rel=1e-5)


@pytest.mark.parametrize(("n", "m"), [(200, 90), (5, 7)])  # 5 and 7 samples of 12 features: singular covariances
def test_frechet_distance_is_symmetric_and_knows_no_axes(n: int, m: int):
    a, b = cloud(n, 12, "a").double(), cloud(m, 12, "b").double()
    distance = frechet_distance(a, b)
    assert distance > 1
    assert frechet_distance(b, a) == pytest.approx(distance, rel=1e-6)
    rotation = torch.linalg.qr(cloud(12, 12, "rotation").double()).Q
    assert frechet_distance(a @ rotation, b @ rotation) == pytest.approx(distance, rel=1e-6)
    assert frechet_distance(3 * a, 3 * b) == pytest.approx(9 * distance, rel=1e-6)


@pytest.mark.parametrize(("n", "m"), [(40, 30), (5, 7)])
def test_frechet_distance_another_way(n: int, m: int):
    """The trace of the root is the nuclear norm of the product of the centred features."""
    a, b = cloud(n, 12, "a").double(), cloud(m, 12, "b").double()
    one, other = (x - x.mean(0) for x in (a, b))
    overlap = torch.linalg.svdvals(one @ other.T).sum() / math.sqrt((n - 1) * (m - 1))
    spread = one.square().sum() / (n - 1) + other.square().sum() / (m - 1)
    expected = (a.mean(0) - b.mean(0)).square().sum() + spread - 2 * overlap
    assert frechet_distance(a, b) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(("n", "m"), [(1, 5), (5, 1), (0, 2)])
def test_frechet_distance_of_too_few_samples(n: int, m: int):
    with refused("Fréchet distance", f"{n} and {m} samples", "at least 2"):
        frechet_distance(torch.zeros(n, 3), torch.zeros(m, 3))


# ---- nearest neighbours


def test_nearest_distances_by_hand():
    queries = torch.tensor([[0.0, 0.0], [4.0, 4.0]])
    references = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert nearest_distances(queries, references).tolist() == pytest.approx([math.sqrt(1 / 2), math.sqrt(1 / 2)])
    black, white = torch.zeros(1, 1, 4, 4, dtype=torch.uint8), torch.full((1, 1, 4, 4), 255, dtype=torch.uint8)
    assert nearest_distances(black, white).item() == pytest.approx(2)  # from -1 to 1 in every pixel


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_nearest_distances_against_all_pairs(chunk: int):
    queries, references = images(20, 0), images(70, 1)
    pairs = normalise(queries)[:, None] - normalise(references)[None]  # [20, 70, 1, 4, 4]
    expected = pairs.square().mean((2, 3, 4)).sqrt().amin(1)
    torch.testing.assert_close(nearest_distances(queries, references, chunk), expected)


def test_a_copy_is_at_distance_zero_and_found_among_many():
    references = images(300, 2, side=28)
    queries = torch.cat([references[[299, 7]], images(2, 3, side=28)])
    queries[1, 0, 0, 0] ^= 1  # one grey level in one pixel
    found = nearest_distances(queries, references, chunk=10)
    assert found[0] == 0
    assert found[1] == pytest.approx(1 / 127.5 / 28, rel=1e-4)
    assert (found[2:] > 0.5).all()


def test_no_queries():
    assert nearest_distances(images(0, 0), images(3, 0)).shape == (0,)


def test_nearness_tells_a_copier_from_a_generator():
    training, test = images(400, 0), images(200, 1)
    fresh, copied = nearness(images(100, 2), training, test), nearness(training[:100], training, test)
    assert (copied.median.value, copied.minimum, copied.share_below.value) == (0, 0, 1)
    assert fresh.median.value == pytest.approx(fresh.real_median, rel=0.05)
    assert fresh.median.low < fresh.median.value < fresh.median.high
    assert fresh.share_below.value < 0.1
    assert fresh.share_below.high < copied.share_below.low
    half = nearness(torch.cat([training[:50], images(50, 2)]), training, test)
    assert half.share_below.value == pytest.approx(0.5, abs=0.05)
    real = nearest_distances(test, training).sort().values
    assert real[1] <= copied.real_percentile <= real[2]  # 1 % of 200
    assert copied.real_median == pytest.approx(float(real[99:101].mean()))


def test_a_copier_is_found_where_real_images_repeat_too():
    training = images(50, 0)
    assert nearness(training[:5], training, training).share_below.value == 1


# ---- oracle, features, balance


class Brightness(nn.Module):
    """Names class 1 where an image is brighter than the middle."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.flatten(1).mean(1, keepdim=True)
        return torch.cat([-mean, mean, mean - 5], 1)


def test_recognised_by_class_with_empty_and_unlabelled_ones():
    inputs = torch.tensor([0, 0, 255, 255, 255], dtype=torch.uint8).view(5, 1, 1, 1)
    by_class, overall = recognised(Brightness(), Samples(inputs, torch.tensor([0, 1, 1, 1, -1])), 3)
    assert by_class == [1, pytest.approx(2 / 3), None]
    assert overall == share(3, 4)
    assert recognised(Brightness(), Samples(inputs, torch.full((5,), -1)), 3) == ([None] * 3, None)


def test_features_are_the_encoders_of_normalised_inputs():
    encoder = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).eval()
    inputs = images(7, 0)
    model = SimpleNamespace(encoder=encoder)
    found = features(model, inputs, batch_size=3)
    assert found.shape == (7, 2 * 2 * 2)
    assert not found.requires_grad
    torch.testing.assert_close(found, encoder(inputs / 127.5 - 1).flatten(1).detach())


def entropy_of(balance: Balance) -> tuple[float, int]:
    assert balance.entropy is not None
    return balance.entropy.value, balance.entropy.n


def test_class_balance_by_hand():
    even = class_balance(torch.tensor([0, 1, 2, 3, -1, -1, -1, -1]), 4, 0)
    assert (even.counts, entropy_of(even), even.labelled) == ([1, 1, 1, 1], (pytest.approx(1), 4), 0.5)
    two = class_balance(torch.tensor([3, 1, 1, 3]), 4, 0)
    assert (two.counts, entropy_of(two), two.labelled) == ([0, 2, 0, 2], (pytest.approx(0.5), 4), 1)
    one = class_balance(torch.tensor([2, 2]), 4, 0)
    assert (one.counts, entropy_of(one)) == ([0, 0, 2, 0], (0, 2))
    none = class_balance(torch.tensor([-1]), 4, 0)
    assert (none.counts, none.entropy, none.labelled) == ([0] * 4, None, 0)
