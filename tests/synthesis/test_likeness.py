"""Measures with intervals: figures that were worked by hand, and the cases in which they must speak."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import refused

from fedfill.data.samples import Samples
from fedfill.synthesis.intervals import Estimate
from fedfill.synthesis.likeness import (
    data_free,
    data_free_features,
    exact_copies,
    frechet,
    nearer_to_training,
    precision_recall,
    some,
)
from fedfill.synthesis.measures import frechet_distance


def line(*places: float) -> torch.Tensor:
    return torch.tensor(places)[:, None]


def normal(n: int, d: int = 3, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + shift


# ---- precision and recall


def test_precision_and_recall_on_a_line():
    """k = 1. Real at 0, 1, 3, 10: radii 1, 1, 2, 7. Made at 1.5, 5, 30, 31: radii 3.5, 3.5, 1, 1."""
    precision, recall = precision_recall(line(0, 1, 3, 10), line(1.5, 5, 30, 31), k=1)
    assert precision.value == 0.5  # 1.5 is within 1 of 1, 5 within 2 of 3; 30 and 31 are more than 7 from 10
    assert recall.value == 0.75  # 0, 1 and 3 are within 3.5 of 1.5; 10 is 5 from 5
    assert precision.n == recall.n == 4


def test_a_distance_that_is_the_radius_is_within():
    precision, recall = precision_recall(line(0, 2, 100, 200), line(4, 6, 1000, 3000), k=1)
    assert precision.value == 0.5  # 4 is 2 from 2, whose neighbour is 2 away; 6 is within 98 of 100
    assert recall.value == 0.75  # 2 is 2 from 4; 100 and 200 are within 994 of 1000, 0 isn't


def test_one_mode_repeated_is_precise_and_recalls_little():
    real = normal(200)
    precision, recall = precision_recall(real, normal(200, seed=1) * 0.05)
    assert precision.low > 0.9
    assert recall.high < 0.1
    both = precision_recall(real, normal(200, seed=1))
    assert min(one.value for one in both) > 0.6
    assert [one.value for one in precision_recall(real, real)] == [1, 1]
    assert [one.value for one in precision_recall(real, normal(200, shift=50))] == [0, 0]


def test_precision_and_recall_need_equal_sets():
    with refused("precision and recall", "5 real", "6 synthetic"):
        precision_recall(normal(5), normal(6))
    with refused("precision and recall", "3 real", "more than 3"):
        precision_recall(normal(3), normal(3))


# ---- copies


def test_nearer_on_a_line():
    """Training at 0 and 10, held out at 4 and 20; 2 is as far from both and left out."""
    found = nearer_to_training(line(1, 2, 9, 21), line(0, 10), line(4, 20))
    assert (found.value, found.n) == (2 / 3, 3)
    nothing = nearer_to_training(line(2), line(0), line(4))
    assert nothing == Estimate(0.5, 0.0, 1.0, 0)


def test_thirty_per_cent_of_copies_are_seen():
    training, held, fresh = normal(300), normal(300, seed=1), normal(210, seed=2)
    found = nearer_to_training(torch.cat([training[:90], fresh]), training, held)
    assert found.value == pytest.approx(0.3 + 0.7 / 2, abs=0.06)
    assert found.low > 0.55


def test_halves_of_one_distribution_give_an_interval_around_a_half():
    """In 19 of 20 draws at the least: an interval that is too narrow would show."""
    inside = 0
    for seed in range(100):
        training, held, made = normal(3 * 80, d=2, seed=seed).split(80)
        found = nearer_to_training(made, training, held)
        inside += found.low <= 0.5 <= found.high
    assert inside >= 93


def test_a_generator_with_one_image_says_little_however_often_it_says_it():
    """All of its samples have one nearest neighbour: one coin was thrown, and not 500."""
    made = torch.zeros(500, 3)
    found = nearer_to_training(made, normal(40), normal(40, seed=1))
    assert found.value in (0, 1)
    assert found.low < 0.03
    assert found.high > 0.97


def test_held_out_samples_have_to_be_as_many():
    with refused("nearest", "2 training", "1 held-out"):
        nearer_to_training(line(0), line(0, 1), line(2))


def test_exact_copies_are_listed_and_near_ones_are_not():
    training = torch.randint(0, 256, (20, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    made = training[[3, 5, 3]].clone()
    made[1, 0, 0, 0] ^= 1
    assert exact_copies(made, training) == [0, 2]
    assert exact_copies(made[:0], training) == []
    assert exact_copies(torch.tensor([[1.5]]), torch.tensor([[1.5], [2.0]])) == [0]


# ---- Fréchet distance


def test_the_distance_is_the_plain_one_and_its_interval_holds_the_truth():
    """Two normal distributions of one covariance whose means are 2 apart: 4, and in small samples a little more."""
    a, b = normal(2000, d=2).double(), (normal(2000, d=2, seed=1) + torch.tensor([2.0, 0.0])).double()
    found = frechet(a, b, 0)
    assert found.value == frechet_distance(a, b)
    assert found.low < 4 < found.high
    # the mean's deviation is sqrt(2 / 2000), the slope of its square 4
    assert found.high - found.value == pytest.approx(1.96 * 4 * (2 / 2000) ** 0.5, rel=0.35)
    assert found == frechet(a, b, 0)
    assert frechet(a, a, 0).low == 0


# ---- features


@pytest.mark.parametrize(
    ("shape", "words"), [((1, 8, 8), "conv"), ((3, 8, 8), "conv"), ((1, 4, 4), "fourier"), ((7,), "fourier"), ((2, 9, 9), "fourier")]
)  # fmt: skip
def test_features_need_no_data_and_are_always_the_same(shape: tuple[int, ...], words: str):
    assert data_free(shape)[1].startswith(words)
    inputs = torch.rand(300, *shape, generator=torch.Generator().manual_seed(0))
    found = data_free_features(inputs)
    assert found.shape == (300, 256)
    assert torch.allclose(found.norm(dim=1), torch.ones(300).double(), atol=1e-5)
    data_free.cache_clear()
    assert torch.equal(data_free_features(inputs), found)


def test_some_are_drawn_without_replacement():
    samples = Samples(torch.arange(10.0)[:, None], torch.arange(10))
    found = some(samples, 4, 0, "these")
    assert len(set(found.labels.tolist())) == 4
    assert torch.equal(found.labels, some(samples, 4, 0, "these").labels)
    assert some(samples, 10, 0, "these") is samples
