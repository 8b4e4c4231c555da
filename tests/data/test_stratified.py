"""Stratified choices: every class has its share, and a larger share holds a smaller."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.data.made import assert_covers

from fedfill.data.stratified import hold_out, keep_labels, set_aside
from fedfill.streams import numpy_stream


@settings(max_examples=50, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), max_size=80).map(lambda values: np.array(values, np.int64)),
    share=st.floats(0, 1),
    seed=st.integers(0, 100),
)
def test_hold_out_is_stratified(labels: NDArray[np.int64], share: float, seed: int) -> None:
    kept, held = hold_out(labels, share, np.random.default_rng(seed))
    np.testing.assert_array_equal(np.sort(np.concatenate([kept, held])), np.arange(len(labels)))
    for label in np.unique(labels):
        size, out = int((labels == label).sum()), int((labels[held] == label).sum())
        assert out <= size - 1
        assert abs(out - min(share * size, size - 1)) <= 0.5 + 1e-6


def test_hold_out_by_hand_and_nested() -> None:
    labels = np.repeat([0, 1, 2], [10, 5, 1])
    kept, held = hold_out(labels, 0.1, np.random.default_rng(0))
    # 1.0 of ten, 0.5 of five rounds up, the only one stays
    assert np.bincount(labels[held], minlength=3).tolist() == [1, 1, 0]
    more_kept, _ = hold_out(labels, 0.6, np.random.default_rng(0))
    assert set(more_kept) < set(kept)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.sampled_from([0.0, 0.1, 0.25, 0.5]), st.integers(0, 3))
def test_what_is_set_aside(values: list[int], share: float, seed: int) -> None:
    labels = np.array(values)
    stay, aside = set_aside(labels, share, numpy_stream(seed, "x"))
    assert sorted([*stay, *aside]) == list(range(len(values)))
    sizes, taken = Counter(values), Counter(labels[aside].tolist())
    wanted = int(share * len(values) + 0.5)
    assert len(aside) <= wanted
    for label, size in sizes.items():
        assert taken[label] <= size - 1
        assert taken[label] <= share * size + 1
    if min(sizes.values()) > 1:  # nobody's last sample is in the way
        assert len(aside) == wanted
        assert all(taken[label] > share * size - 1 for label, size in sizes.items())


def test_set_aside_by_hand() -> None:
    # shares of 2.4, 1.2 and 0.6: rounded down 2, 1, 0, and the fourth goes to the class that lost 0.6
    labels = np.repeat([0, 1, 2], [24, 12, 6])
    stay, aside = set_aside(labels, 0.1, numpy_stream(0, "x"))
    assert Counter(labels[aside].tolist()) == {0: 2, 1: 1, 2: 1}
    assert len(stay) == 38
    # forty samples of ten classes: none has a whole share, and four samples are set aside all the same
    assert len(set_aside(np.arange(40) % 10, 0.1, numpy_stream(0, "x"))[1]) == 4


def test_kept_labels_by_hand() -> None:
    labels = np.array([2, 0, 0, 1, 0, 0, 1, 0, 0, 1])  # six, three and one
    found = {
        number: np.bincount(labels[keep_labels(labels, number, np.random.default_rng(0))[0]], minlength=3).tolist()
        for number in range(1, 13)
    }
    # one of each, the largest class first; then 6/3 = 2, 6/5 = 1.2, 3/3 = 1, 6/7, 6/9, 3/5, 6/11
    assert list(found.values()) == [
        [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [3, 1, 1], [3, 2, 1],
        [4, 2, 1], [5, 2, 1], [5, 3, 1], [6, 3, 1], [6, 3, 1], [6, 3, 1],
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=80).map(lambda values: np.array(values, np.int64)),
    number=st.integers(1, 90),
    seed=st.integers(0, 100),
)
def test_kept_labels_follow_the_classes_sizes(labels: NDArray[np.int64], number: int, seed: int) -> None:
    kept, others = keep_labels(labels, number, np.random.default_rng(seed))
    assert_covers([kept, others], len(labels))
    assert len(kept) == min(number, len(labels))
    sizes, seats = np.bincount(labels, minlength=7), np.bincount(labels[kept], minlength=7)
    present = np.flatnonzero(sizes)
    if len(kept) < len(present):
        assert seats.max() == 1
        assert sizes[seats == 1].min() >= max(sizes[seats == 0])
        return
    assert seats[present].min() >= 1
    # nobody has a seat beyond its first to which another class has a better claim
    for rich, poor in itertools.permutations(present, 2):
        if seats[rich] > 1 and seats[poor] < sizes[poor]:
            assert sizes[rich] / (2 * seats[rich] - 1) >= sizes[poor] / (2 * seats[poor] + 1)
    fewer, _ = keep_labels(labels, max(1, number // 2), np.random.default_rng(seed))
    assert set(fewer) <= set(kept)


def test_chance_decides_which_labels_are_kept() -> None:
    labels = np.arange(40) % 4
    kept = [keep_labels(labels, 1, np.random.default_rng(seed))[0][0] for seed in range(60)]
    assert {int(labels[position]) for position in kept} == {0, 1, 2, 3}
    assert len(set(kept)) > 20
