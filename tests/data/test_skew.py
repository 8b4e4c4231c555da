"""Skew: every sample has one owner at most, and the skew is what its name says."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.data.made import assert_covers, says
from tests.helpers import refused

from fedfill.data.skew import _guarded_cuts, _spread, classes, dirichlet, domain, iid, multimodal, quantity, unimodal
from fedfill.errors import FedfillError

LABELS = np.arange(1000) % 10


def test_iid_sizes_differ_by_one_at_most() -> None:
    assert sorted(map(len, iid(LABELS[:103], 10, 0))) == [10] * 7 + [11] * 3


def test_iid_mixes_the_labels() -> None:
    sorted_labels = np.repeat(np.arange(10), 100)
    for part in iid(sorted_labels, 5, 0):
        assert np.bincount(sorted_labels[part], minlength=10).min() >= 8


@settings(max_examples=30, deadline=None)
@given(beta=st.floats(0.2, 5), clients=st.integers(2, 8), seed=st.integers(0, 1000), least=st.integers(0, 20))
def test_dirichlet_ends_and_the_smallest_client_holds_enough(beta: float, clients: int, seed: int, least: int) -> None:
    # with 1,000 samples and at most 8 clients all of these are within 1,000 draws' reach
    parts = dirichlet(LABELS, clients, seed, beta, min_samples=least)
    assert_covers(parts, len(LABELS))
    assert min(map(len, parts)) >= least


@settings(max_examples=50, deadline=None)
@given(beta=st.floats(0.01, 10), clients=st.integers(2, 30), seed=st.integers(0, 1000))
def test_guard_gives_nothing_to_who_holds_a_fair_share(beta: float, clients: int, seed: int) -> None:
    sizes = np.array([300, 100, 50, 250, 300])
    cuts = _guarded_cuts(sizes, clients, beta, np.random.default_rng(seed))
    if cuts is None:  # a tiny beta: the whole of every draw was on clients that are full
        assert beta < 0.5
        return
    given_out = np.diff(cuts, axis=1, prepend=0)
    np.testing.assert_array_equal(given_out.sum(axis=1), sizes)
    assert given_out.min() >= 0
    before = np.cumsum(given_out, axis=0) - given_out
    assert (given_out[before >= sizes.sum() / clients] == 0).all()


def test_cuts_favour_no_position() -> None:
    # 400 classes of 5 samples for 10 clients, nearly no skew: rounding down would leave the first client next to nothing
    cuts = _guarded_cuts(np.full(400, 5), 10, 100, np.random.default_rng(0))
    assert cuts is not None
    # half of the classes, before the guard evens things out
    held = np.diff(cuts, axis=1, prepend=0)[:200].sum(axis=0)
    assert 50 < held.min() <= held.max() < 150


def test_dirichlet_is_as_skewed_as_beta_says() -> None:
    def skew(beta: float) -> float:
        tables = [
            np.bincount(LABELS[part], minlength=10) / len(part)
            for seed in range(5)
            for part in dirichlet(LABELS, 5, seed, beta)
        ]
        return float(np.max(tables, axis=1).mean())

    # the largest class's share of a client: 0.1 without skew
    assert skew(0.1) > 0.3 > skew(1) > 0.15 > skew(1000)


def test_classes_by_hand() -> None:
    labels = np.repeat([3, 5, 7], [6, 6, 6])
    parts = classes(labels, 3, 0, 2)
    assert_covers(parts, 18)
    # six pieces of three samples each, two to each client
    assert [len(part) for part in parts] == [6, 6, 6]
    for part in parts:
        found, counts = np.unique(labels[part], return_counts=True)
        assert len(found) <= 2
        assert set(counts) <= {3, 6}


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    clients=st.integers(1, 12),
    count=st.integers(1, 8),
    seed=st.integers(0, 100),
)
def test_classes_holds_at_most_that_many(sizes: list[int], clients: int, count: int, seed: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    if count > len(sizes) or not len(sizes) <= clients * count <= len(labels) or clients > len(labels):
        with pytest.raises(FedfillError):
            classes(labels, clients, seed, count)
        return
    parts = classes(labels, clients, seed, count)
    assert_covers(parts, len(labels))
    assert all(count <= len(part) for part in parts)
    assert all(len(np.unique(labels[part])) <= count for part in parts)


def test_spread_is_even_and_the_largest_classes_get_the_rest() -> None:
    rng = np.random.default_rng(0)
    assert _spread(8, np.array([10, 30, 20]), rng).tolist() == [2, 3, 3]
    assert _spread(6, np.array([10, 10, 10]), rng).tolist() == [2, 2, 2]
    # a class of one sample can't be cut in three: the others take its two pieces
    assert _spread(9, np.array([1, 30, 20]), rng).tolist() == [1, 4, 4]


def test_unimodal_by_hand() -> None:
    # nine shards in proportion to 30, 45 and 60 samples: two, three and four of them, all of 15
    labels = np.random.default_rng(0).permutation(np.repeat([2, 5, 9], [30, 45, 60]))
    parts = unimodal(labels, 3, 0, 3)
    assert_covers(parts, 135)
    assert [len(part) for part in parts] == [45, 45, 45]
    for part in parts:
        assert set(np.unique(labels[part], return_counts=True)[1]) <= {15, 30, 45}


def test_unimodal_shards_are_as_many_as_the_class_is_large() -> None:
    # one shard for each client, so that the clients are the shards
    labels = np.repeat([0, 1, 2], [700, 200, 100])
    parts = unimodal(labels, 10, 0, 1)
    assert [len(part) for part in parts] == [100] * 10
    assert sorted(int(labels[part[0]]) for part in parts) == [0] * 7 + [1] * 2 + [2]
    # 102 and 48 of 150 samples are 3.4 and 1.6 of five shards; by the averages 102 / 4 and 48 / 2 it would be four and one
    labels = np.repeat([0, 1], [102, 48])
    assert sorted(len(part) for part in unimodal(labels, 5, 0, 1)) == [24, 24, 34, 34, 34]
    # a class too small for its share has one shard of its own all the same
    labels = np.repeat([0, 1], [990, 10])
    assert sorted(len(part) for part in unimodal(labels, 10, 0, 1)) == [10] + [110] * 9


def test_unimodal_shards_are_of_samples_by_chance() -> None:
    # one class in two halves: by the order of the data each would be a run of twenty numbers
    first, second = unimodal(np.zeros(40, np.int64), 2, 0, 1)
    assert len(first) == len(second) == 20
    assert np.ptp(first) > 30 < np.ptp(second)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    clients=st.integers(1, 12),
    count=st.integers(1, 8),
    seed=st.integers(0, 100),
)
def test_unimodal_holds_at_most_that_many(sizes: list[int], clients: int, count: int, seed: int) -> None:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(sizes)) * 3, sizes))
    if count > len(sizes) or not len(sizes) <= clients * count <= len(labels) or clients > len(labels):
        with pytest.raises(FedfillError):
            unimodal(labels, clients, seed, count)
        return
    parts = unimodal(labels, clients, seed, count)
    assert len(parts) == clients
    assert_covers(parts, len(labels))
    assert all(count <= len(part) for part in parts)
    assert all(len(np.unique(labels[part])) <= count for part in parts)
    for again, part in zip(unimodal(labels, clients, seed, count), parts, strict=True):
        np.testing.assert_array_equal(again, part)


PAPER = np.random.default_rng(0).permutation(np.arange(60_000) % 10)
"""As many labels as MNIST has, in an order of chance."""


def test_unimodal_with_the_paper_s_hundred_clients() -> None:
    parts = unimodal(PAPER, 100, 0, 2)
    assert_covers(parts, 60_000)
    assert {len(part) for part in parts} == {600}
    held = [len(np.unique(PAPER[part])) for part in parts]
    assert set(held) <= {1, 2}
    # two of 200 shards with twenty of each class: one class only with probability 19 / 199
    assert 0 < held.count(1) < 30


def test_multimodal_with_the_paper_s_hundred_clients() -> None:
    parts = multimodal(PAPER, 100, 0, 2)
    # 30,000 samples for 80 clients are 375 for each, and the other 20 leave 22,500 of theirs out
    assert {len(part) for part in parts} == {374, 375, 376}
    held = np.concatenate(parts)
    assert len(np.unique(held)) == len(held) == 37_500
    assert all(PAPER[part].max() < 5 for part in parts[:80])
    assert all(PAPER[part].min() >= 5 for part in parts[80:])
    assert all(len(np.unique(PAPER[part])) <= 2 for part in parts)
    # four to one
    np.testing.assert_array_equal(np.bincount(PAPER[held]), [6000] * 5 + [1500] * 5)


def test_multimodal_by_hand() -> None:
    # classes 1, 2 | 4, 6 | 7 and clients 2 | 2 | 1: 24, 40 and 30 samples are 12, 20 and 30 for each
    labels = np.repeat([1, 2, 4, 6, 7], [12, 12, 20, 20, 30])
    parts = multimodal(labels, 5, 0, 1, (0.4, 0.4, 0.2))
    assert [len(part) for part in parts] == [12] * 5
    assert [sorted({int(label) for part in group for label in labels[part]}) for group in (parts[:2], parts[2:4])] == [
        [1, 2],
        [4, 6],
    ]
    assert set(labels[parts[4]]) == {7}


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=2, max_size=8),
    clients=st.integers(2, 12),
    count=st.integers(1, 3),
    share=st.floats(0.1, 0.9),
    seed=st.integers(0, 100),
)
def test_multimodal_clients_hold_their_groups_classes(
    sizes: list[int], clients: int, count: int, share: float, seed: int
) -> None:
    labels = np.random.default_rng(2).permutation(np.repeat(np.arange(len(sizes)), sizes))
    first = round(share * clients)
    half = math.ceil(len(sizes) / 2)
    groups = [(first, sizes[:half]), (clients - first, sizes[half:])]
    possible = all(size and count <= len(own) <= size * count <= sum(own) for size, own in groups)
    if not possible:
        with pytest.raises(FedfillError):
            multimodal(labels, clients, seed, count, (share, 1 - share))
        return
    try:
        parts = multimodal(labels, clients, seed, count, (share, 1 - share))
    except FedfillError:
        # a group of several classes may keep too few of its samples, when it keeps hardly more than one for each shard
        each = min(sum(own) // size for size, own in groups)
        assume(each > count + len(sizes) / 2)
        raise
    assert len(parts) == clients
    held = np.concatenate(parts)
    assert len(np.unique(held)) == len(held)
    for k, part in enumerate(parts):
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
        assert count <= len(part)
        assert len(np.unique(labels[part])) <= count
        assert set(labels[part] < half) == {k < first}
    for again, part in zip(multimodal(labels, clients, seed, count, (share, 1 - share)), parts, strict=True):
        np.testing.assert_array_equal(again, part)


def test_quantity_skews_sizes_and_not_labels() -> None:
    labels = np.arange(20_000) % 2
    parts = quantity(labels, 8, 0, 0.5)
    sizes = np.array([len(part) for part in parts])
    assert sizes.max() > 4 * sizes.min() >= 40
    for part in parts:
        # four standard deviations of a fair coin
        assert abs(labels[part].mean() - 0.5) < 4 * 0.5 / np.sqrt(len(part))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(1, 3), st.integers(0, 5))
def test_a_domain_is_dealt_among_its_clients(values: list[int], count: int, seed: int) -> None:
    domains = np.array(values)
    sizes = Counter(values)
    if min(sizes.values()) < count:
        with refused("partition") as caught:
            domain(domains, seed, count)
        says(caught, f"'domain:{count}'", f"only {min(sizes.values())} samples")
        return
    parts = domain(domains, seed, count)
    assert sorted(i for part in parts for i in part) == list(range(len(values)))
    for place, home in enumerate(sorted(sizes)):
        own = parts[place * count : (place + 1) * count]
        assert all(values[i] == home for part in own for i in part)
        assert max(map(len, own)) - min(map(len, own)) <= 1
        assert all((np.diff(part) > 0).all() for part in own)


def test_a_domain_is_dealt_at_random_and_the_same_again() -> None:
    domains = np.repeat([0, 1], 50)
    first, again, other = (domain(domains, seed, 2) for seed in (0, 0, 1))
    assert [part.tolist() for part in first] == [part.tolist() for part in again]
    assert [part.tolist() for part in first] != [part.tolist() for part in other]
    assert first[0].tolist() != (first[2] - 50).tolist()


@pytest.mark.parametrize(
    ("divide", "arguments", "facts"),
    [
        (dirichlet, (LABELS, 50, 0, 0.001), ["'dirichlet:0.001'", "1,000 draws"]),
        (classes, (LABELS, 4, 0, 2), ["'classes:2'", "8 pieces", "3 classes per client", "5 clients"]),
        (classes, (LABELS, 600, 0, 2), ["1,200 pieces", "1,000 samples"]),
        (unimodal, (LABELS, 4, 0, 2), ["'unimodal:2'", "8 pieces", "10 classes"]),
        (unimodal, (LABELS, 600, 0, 2), ["1,200 pieces", "1,000 samples"]),
        (multimodal, (LABELS, 800, 0, 2), ["'multimodal:2:0.8,0.2'", "640 clients", "1,280 pieces", "500 samples"]),
        # one sample of the two classes is kept for each of three clients, and thirds are rounded down
        (multimodal, (np.repeat([0, 1, 2, 3], [50, 50, 1, 1]), 5, 0, 1, (0.6, 0.4)), ["3 clients", "only 2 samples"]),
        (multimodal, (LABELS, 2, 0, 1, (0.4, 0.3, 0.3)), ["3 groups", "2 and 10"]),
        (multimodal, (LABELS % 2, 10, 0, 1, (0.4, 0.3, 0.3)), ["3 groups", "10 and 2"]),
    ],
)
def test_what_cannot_be_met(divide: Any, arguments: tuple[Any, ...], facts: list[str]) -> None:
    with refused("partition") as caught:
        divide(*arguments)
    says(caught, *facts)


@pytest.mark.parametrize("labels", [np.zeros(20), np.zeros((20, 2), int)])
def test_labels_must_be_a_list_of_integers(labels: NDArray[Any]) -> None:
    with refused("labels"):
        iid(labels, 2, 0)
