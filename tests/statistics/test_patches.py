"""Filters from patches by sums: places that follow from the image, whitening and a step of k-means by hand, any split."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fedfill.models.filters import even_patches
from fedfill.statistics import patches
from fedfill.statistics.sums import GRID, as_joined, as_sent, summed


def images(n: int, channels: int = 1, side: int = 9, seed: int = 0) -> Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, side, side), generator=stream).float()


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_gives_the_same_patches_wherever_it_lies(channels: int) -> None:
    many = images(12, channels)
    whole = patches.extract(many, 4).view(12, patches.PER_IMAGE, -1)
    for rows in ([5], [11, 0, 5], list(range(11, -1, -1))):
        alone = patches.extract(many[rows], 4).view(len(rows), patches.PER_IMAGE, -1)
        assert torch.equal(alone, whole[rows])


@pytest.mark.parametrize("channels", [1, 3])
def test_patches_are_pieces_of_their_image(channels: int) -> None:
    """Each is one of the 36 that a slow search finds; images differ in where they are taken."""
    many = images(20, channels)
    found = patches.extract(many, 4).view(20, patches.PER_IMAGE, -1)
    places = []
    for image, mine in zip(many, found, strict=True):
        pieces = [
            even_patches(image[:, r : r + 4, c : c + 4].reshape(1, -1))[0].contiguous()
            for r in range(6)
            for c in range(6)
        ]
        at = [min(range(36), key=lambda k: float((pieces[k] - p).abs().max())) for p in mine]
        assert all(torch.allclose(pieces[k], p, atol=1e-5) for k, p in zip(at, mine, strict=True))
        places.append(tuple(at))
    assert len(set(places)) > 15
    assert len({k for at in places for k in at}) > 25  # no corner of the images is left out


def test_an_image_of_one_patch_and_flat_images() -> None:
    flat = torch.full((2, 1, 4, 4), 255.0)
    assert patches.extract(flat, 4).tolist() == [[0.0] * 16] * (2 * patches.PER_IMAGE)
    assert patches.extract(images(1, side=4), 4).unique(dim=0).shape == (1, 16)


def test_no_patch_is_longer_than_its_bound() -> None:
    checks = (torch.arange(81).view(9, 9) % 2 * 255.0)[None, None]
    for one in (checks, images(30), 255 - checks):
        assert (patches.extract(one, 4).norm(dim=1) < 4).all()


def test_whitening_by_hand() -> None:
    """Patches (3, 0), (-1, 0), (1, 2), (1, -2): mean (1, 0), covariance diag(2, 2) with the divisor n."""
    p = torch.tensor([[3.0, 0], [-1, 0], [1, 2], [1, -2]])
    sums = summed(patches.moments(2), [(p, torch.zeros(4, dtype=torch.int64))])
    assert sums["patches"].tolist() == [4]
    assert sums["squares"].tolist() == [[12, 0], [0, 8]]
    mean, white = patches.whitening(**sums)
    assert mean.tolist() == [1, 0]
    assert torch.allclose(white, torch.eye(2).double() / (2 + patches.RIDGE) ** 0.5, atol=1e-12)


def test_whitened_patches_have_the_identity_for_a_covariance() -> None:
    stream = torch.Generator().manual_seed(0)
    p = (torch.randn(4000, 6, generator=stream) @ torch.randn(6, 6, generator=stream)).double() * 30
    mean, white = patches.whitening(torch.tensor([4000.0]).double(), p.sum(0), p.T @ p)
    q = (p - mean) @ white
    assert torch.equal(white, white.T) or torch.allclose(white, white.T, atol=1e-12)
    assert torch.allclose(q.T @ q / 4000, torch.eye(6).double(), atol=0.02)


def test_whitening_of_nobody_is_finite() -> None:
    mean, white = patches.whitening(torch.zeros(1).double(), torch.zeros(3).double(), torch.zeros(3, 3).double())
    assert not mean.any()
    assert torch.allclose(white, torch.eye(3).double() * patches.RIDGE**-0.5)


def test_a_step_of_k_means_by_hand() -> None:
    """(1, .5) is nearest to e_1 and adds 1 times itself; (-1, 2) to e_2 and adds 2 times itself; -e_1 is nearest to nothing."""
    dictionary = torch.tensor([[1.0, 0], [0, 1], [-1, 0]])
    q = torch.tensor([[1.0, 0.5], [-1, 2], [0.5, 0.25]])
    sums = summed(patches.clusters(dictionary), [(q, torch.zeros(3, dtype=torch.int64))])
    assert sums["clusters"].tolist() == [[1.25, 0.625], [-2, 4], [0, 0]]
    new = patches.update(dictionary, sums["clusters"])
    by_hand = torch.tensor([[1.251, 0.625], [-2, 4.001], [-1, 0]]).double()
    assert torch.allclose(new, by_hand / by_hand.norm(dim=1, keepdim=True), atol=1e-7)


def test_a_tie_goes_to_the_first_filter() -> None:
    dictionary = torch.tensor([[0.0, 1], [1, 0]])
    sums = summed(patches.clusters(dictionary), [(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64))])
    assert sums["clusters"].tolist() == [[1, 1], [0, 0]]


def test_steps_find_the_directions_of_the_patches() -> None:
    """Spherical k-means: the mean of q.D over patches never falls, and three bundles are found from seeded directions."""
    stream = torch.Generator().manual_seed(3)
    truth = torch.nn.functional.normalize(torch.randn(3, 8, generator=stream))
    q = truth[torch.arange(600) % 3] * 2 + 0.1 * torch.randn(600, 8, generator=stream)
    dictionary = torch.nn.functional.normalize(torch.randn(12, 8, generator=stream)).double()
    heights = []
    for _ in range(8):
        alike = (q.double() @ dictionary.T).max(1).values
        heights.append(float((alike**2).sum()))
        sums = summed(patches.clusters(dictionary), [(q, torch.zeros(600, dtype=torch.int64))])
        dictionary = patches.update(dictionary, sums["clusters"])
    assert all(later >= before * (1 - 1e-3) for before, later in itertools.pairwise(heights))
    assert ((truth.double() @ dictionary.T).max(1).values > 0.99).all()


def test_any_split_gives_the_same_bits() -> None:
    many = images(40, 3)
    found = patches.extract(many, 4)
    labels = torch.zeros(len(found), dtype=torch.int64)
    filters = torch.nn.functional.normalize(torch.randn(7, 48, generator=torch.Generator().manual_seed(0)))
    for statistic in (patches.moments(48), patches.clusters(filters)):
        whole = as_joined(statistic, as_sent(statistic, summed(statistic, [(found, labels)])))
        total: dict[str, Tensor] = {}
        for rows in (slice(35, 40), slice(0, 1), slice(1, 35)):
            part = patches.extract(many[rows], 4)
            sent = as_sent(statistic, summed(statistic, [(p[None], labels[:1]) for p in part]))
            total = {name: x.to(torch.int64) + total.get(name, 0) for name, x in sent.items()}
        again = as_joined(statistic, total)
        assert all(torch.equal(x, whole[name]) for name, x in again.items())
        assert all(torch.equal(x * 2.0 ** (2 * GRID), (x * 2.0 ** (2 * GRID)).round()) for x in whole.values())
