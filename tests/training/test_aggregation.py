"""The weighted mean: numbers worked by hand and properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import weighted_mean


def test_by_hand() -> None:
    a = {"w": torch.tensor([[1.0, 2.0]]), "running_mean": torch.tensor(4.0)}
    b = {"running_mean": torch.tensor(8.0), "w": torch.tensor([[5.0, -2.0]])}
    mean = weighted_mean([(a, 30), (b, 10)])
    assert mean["w"].tolist() == [[2.0, 1.0]]  # (3 * 1 + 5) / 4, (3 * 2 - 2) / 4
    assert mean["running_mean"].item() == 5.0
    assert list(mean) == ["w", "running_mean"]
    assert a["w"].tolist() == [[1.0, 2.0]]  # the updates are untouched


def test_weights_are_normalised_over_the_updates_at_hand() -> None:
    a, b = {"w": torch.tensor([0.0])}, {"w": torch.tensor([1.0])}
    for scale in (1e-3, 1, 1e6):
        assert weighted_mean([(a, 3 * scale), (b, scale)])["w"].item() == pytest.approx(0.25)
    assert weighted_mean([(a, 0), (b, 2)])["w"].item() == 1.0


def test_integers_come_from_the_largest_and_the_first_of_equals() -> None:
    updates = [{"n": torch.tensor(k), "on": torch.tensor(k > 1), "w": torch.tensor(float(k))} for k in range(4)]
    mean = weighted_mean(zip(updates, [1, 3, 3, 1], strict=True))
    assert mean["n"].item() == 1
    assert mean["n"].dtype == torch.int64
    assert mean["on"].item() is False
    assert mean["w"].item() == pytest.approx((0 + 3 + 6 + 3) / 8)
    assert weighted_mean(zip(updates, [1, 1, 1, 2], strict=True))["n"].item() == 3


def test_a_zero_weight_adds_nothing_and_layouts_are_kept() -> None:
    image = torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)
    mean = weighted_mean([({"w": image}, 1), ({"w": torch.full((1, 2, 3, 3), 7.0)}, 0)])
    assert torch.equal(mean["w"], image)


@given(
    st.lists(
        st.tuples(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), st.floats(0.01, 100)),
        min_size=1,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_order_does_not_matter_beyond_rounding_and_the_mean_lies_between(values: list[Any], random: Any) -> None:
    updates = [({"w": torch.tensor(numbers)}, weight) for numbers, weight in values]
    mean = weighted_mean(updates)["w"]
    shuffled = updates.copy()
    random.shuffle(shuffled)
    torch.testing.assert_close(weighted_mean(shuffled)["w"], mean, rtol=1e-4, atol=1e-3)
    stacked = torch.stack([weights["w"] for weights, _ in updates])
    assert bool((mean >= stacked.amin(0) - 1e-3).all())
    assert bool((mean <= stacked.amax(0) + 1e-3).all())
    total = math.fsum(weight for _, weight in values)
    expected = [math.fsum(numbers[k] * weight for numbers, weight in values) / total for k in range(3)]
    assert mean.tolist() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("other", [{}, {"v": torch.ones(2)}, {"w": torch.ones(2), "v": torch.ones(2)}])
def test_other_names_are_refused(other: dict[str, torch.Tensor]) -> None:
    for updates in ([({"w": torch.ones(2)}, 2), (other, 1)], [({"w": torch.ones(2)}, 1), (other, 2)]):
        with pytest.raises(ValueError, match="same names"):
            weighted_mean(updates)


@pytest.mark.parametrize("shape", [(1,), (), (3,)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    """A tensor of one number would fit anywhere by broadcasting."""
    with pytest.raises((ValueError, RuntimeError)):
        weighted_mean([({"w": torch.ones(2)}, 2), ({"w": torch.ones(shape)}, 1)])
