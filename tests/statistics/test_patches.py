"""Filters learned from sums: where patches are taken, whitening, and spherical k-means, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedfill.data.samples import normalise
from fedfill.models.filters import even_patches
from fedfill.statistics.patches import clusters, moments, patches_at, positions, update, whitened, whitening
from fedfill.statistics.sums import summed
from fedfill.streams import torch_stream


def images(n: int, shape: tuple[int, ...] = (1, 9, 11), seed: int = 0) -> torch.Tensor:
    return normalise(torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=torch_stream(seed, "images")))


def test_places_follow_the_record_and_the_seed_and_nothing_else() -> None:
    x = images(40)
    places = positions(x, 6, 5, seed=3)
    order = torch.randperm(40, generator=torch_stream(1, "order"))
    assert torch.equal(positions(x[order], 6, 5, seed=3), places[order])
    assert torch.equal(torch.cat([positions(x[:7], 6, 5, seed=3), positions(x[7:], 6, 5, seed=3)]), places)
    assert torch.equal(positions(x, 6, 3, seed=3)[:, :3], places[:, :3])
    assert not torch.equal(positions(x, 6, 5, seed=4), places)
    other = x[:1].clone()
    other[0, 0, 0, 0] = other[0, 0, 0, 0] * -1
    assert not torch.equal(positions(other, 6, 5, seed=3), places[:1])


def test_places_are_about_uniform_and_lie_within_the_image() -> None:
    places = positions(images(1500), 6, 4, seed=0).flatten(0, 1)  # 4 rows, 6 columns
    counts = torch.bincount(places[:, 0] * 6 + places[:, 1], minlength=24)
    assert len(counts) == 24
    # 250 each, of deviation 15.5
    assert 180 < int(counts.min()) <= int(counts.max()) < 320


def test_a_patch_is_what_stands_there() -> None:
    x = images(3, (3, 8, 8))
    places = torch.tensor([[[0, 0], [2, 1]], [[1, 2], [2, 2]], [[0, 1], [1, 1]]])
    found = patches_at(x, places, 6)
    for i in range(3):
        for j in range(2):
            row, column = places[i, j].tolist()
            pixels = (x[i, :, row : row + 6, column : column + 6].flatten() + 1) * 127.5
            even = (pixels - pixels.mean()) / (pixels.var(correction=0) + 10).sqrt()
            torch.testing.assert_close(found[i, j], even, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0, 1e-3, 1, 255, 1e6])
@pytest.mark.parametrize("channels", [1, 3])
def test_even_patches_are_shorter_than_their_bound(scale: float, channels: int) -> None:
    patches = torch.randn(50, channels * 36, generator=torch_stream(0, "patches")) * scale
    patches[0] = scale
    patches[1] = 0
    patches[1, 0] = scale
    lengths = even_patches(patches).norm(dim=1)
    assert float(lengths.max()) <= 6 * math.sqrt(channels) * (1 + 1e-6)
    assert float(lengths[0]) < 1e-3 * 6


def over(statistic, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The sums over some patches, given as ``[n, m, P]``."""
    flat = rows.flatten(0, 1)
    return summed(statistic, [(flat, torch.zeros(len(flat), dtype=torch.int64))])


def test_moments_of_two_records_by_hand() -> None:
    rows = torch.tensor([[[1.0, 0], [0, 2]], [[2.0, 2], [0, 0]]])
    sums = over(moments(2), rows)
    assert (sums["patches"].tolist(), sums["first"].tolist()) == ([4], [3, 4])
    assert sums["second"].tolist() == [[5, 4], [4, 8]]


def test_whitening_whitens() -> None:
    mix = torch.randn(6, 6, generator=torch_stream(0, "mix"), dtype=torch.float64)
    patches = (torch.randn(4000, 2, 6, generator=torch_stream(0, "x"), dtype=torch.float64) @ mix) + 3
    flat = patches.flatten(0, 1)
    mean, matrix = whitening(flat.sum(0), flat.t() @ flat, n=8000, softening=0)
    q = whitened(patches, mean, matrix).flatten(0, 1)
    torch.testing.assert_close(q.mean(0), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(q.t() @ q / len(q), torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-8)
    assert torch.equal(matrix.argmax(0), torch.arange(6)) or torch.allclose(matrix, matrix.t())  # symmetric: no turn


def test_whitening_by_hand_and_with_noise_below_zero() -> None:
    # mean (1, 0); variances 3.9 and -0.5, which counts as 0: 1 / sqrt(3.9 + 0.1) and 1 / sqrt(0.1)
    mean, matrix = whitening(torch.tensor([10.0, 0]), torch.tensor([[49.0, 0], [0, -5]]), n=10)
    assert mean.tolist() == [1, 0]
    torch.testing.assert_close(matrix, torch.diag(torch.tensor([0.5, 10**0.5], dtype=torch.float64)))


def test_a_step_of_k_means_by_hand() -> None:
    dictionary = torch.eye(3)[:, :2].contiguous()[:2]  # e1 and e2 in the plane
    q = torch.tensor([[[3.0, 4], [2, 1]], [[-1, -2], [0, 0.5]]])
    # (3, 4) to e2 with 4; (2, 1) to e1 with 2; (-1, -2) to e1 with -1; (0, .5) to e2 with .5
    sums = over(clusters(dictionary), q)["clusters"]
    assert sums.tolist() == [[4 + 1, 2 + 2], [12, 16 + 0.25]]
    new = update(dictionary, sums)
    a, b = 5 + 1e-3, 4.0
    torch.testing.assert_close(new[0], torch.tensor([a, b], dtype=torch.float64) / math.hypot(a, b))


def test_a_direction_without_patches_stays() -> None:
    dictionary = torch.tensor([[0.6, 0.8], [-1.0, 0]])
    new = update(dictionary, over(clusters(dictionary), torch.tensor([[[6.0, 8]]]))["clusters"])
    torch.testing.assert_close(new, dictionary.double())


def test_k_means_finds_the_directions() -> None:
    true = torch.tensor([[1.0, 0, 0], [0, 0.6, 0.8], [0, -0.8, 0.6]])
    of = torch.randint(3, (600,), generator=torch_stream(0, "of"))
    q = (true[of] * 2 + 0.1 * torch.randn(600, 3, generator=torch_stream(0, "noise")))[:, None]
    found = torch.nn.functional.normalize(torch.tensor([[1.0, 0.4, 0.2], [0.2, 0.5, 1], [0.1, -1, 0.3]]))
    for _ in range(5):
        found = update(found, over(clusters(found), q)["clusters"]).float()
    assert float((found * true).sum(1).min()) > 0.999
