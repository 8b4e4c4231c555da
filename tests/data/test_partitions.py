"""Partitions: every sample has one owner, the skew is what its name says, and slips get a sentence."""

from __future__ import annotations

import itertools
import math
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedfill.data.division import federate
from fedfill.data.partitions import NAMES, from_partitioner, parse, partition
from fedfill.data.skew import _guarded_cuts, _spread, classes, dirichlet, iid, multimodal, quantity, unimodal
from fedfill.data.stratified import hold_out, keep_labels
from fedfill.errors import FedfillError

LABELS = np.arange(1000) % 10
SPECS = ["iid", "dirichlet:0.5", "classes:2", "unimodal:2", "multimodal:4:0.6,0.4", "quantity:0.5"]


def assert_covers(parts: list[NDArray[np.int64]], samples: int) -> None:
    """Each index once, each array sorted and of the right type."""
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(samples))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(60, 200), min_size=2, max_size=6),
    clients=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    spec=st.sampled_from(["iid", "dirichlet:1", "dirichlet:20", "quantity:2", "classes:2"]),
    shift=st.integers(0, 5),
)
def test_each_sample_has_one_owner(sizes: list[int], clients: int, seed: int, spec: str, shift: int) -> None:
    # classes need not start at 0 nor follow on each other
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)) * 2 + shift, sizes))
    if spec == "classes:2" and 2 * clients < len(sizes):
        with pytest.raises(FedfillError, match="too few for"):
            partition(spec, labels, clients, seed)
        return
    parts = partition(spec, labels, clients, seed)
    assert len(parts) == clients
    assert_covers(parts, len(labels))
    if spec != "classes:2":
        assert min(map(len, parts)) >= 10
    for again, part in zip(partition(spec, labels, clients, seed), parts, strict=True):
        np.testing.assert_array_equal(again, part)


@pytest.mark.parametrize("spec", SPECS)
def test_another_seed_is_another_partition(spec: str) -> None:
    first, second = partition(spec, LABELS, 10, 0), partition(spec, LABELS, 10, 1)
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(first, second, strict=True))


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


def test_dirichlet_gives_up_with_a_sentence() -> None:
    with pytest.raises(
        FedfillError, match=r"'dirichlet:0.001': none of 1,000 draws .* use a larger beta, fewer clients or more data"
    ):
        dirichlet(LABELS, 50, 0, 0.001)


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


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("dirichelt:0.5", "'dirichelt:0.5' is unknown; did you mean 'dirichlet'"),
        ("", "'' is unknown; allowed: classes, dirichlet, domain, iid, multimodal, quantity, unimodal"),
        ("iid:3", "'iid' takes no number"),
        ("dirichlet", "'dirichlet' needs a number above 0, such as 'dirichlet:0.5', but 'dirichlet' has none"),
        ("dirichlet:", "has none"),
        ("dirichlet:half", "'dirichlet:half' has 'half'"),
        ("dirichlet:0", "'dirichlet:0' has 0"),
        ("dirichlet:-1", "'dirichlet:-1' has -1"),
        ("dirichlet:nan", "'dirichlet:nan' has nan"),
        ("quantity:inf", "'quantity:inf' has inf"),
        ("classes:2.5", "a whole number of classes, 1 or more, such as 'classes:2', but 'classes:2.5' has '2.5'"),
        ("classes:0", "'classes:0' has 0"),
        ("classes:11", "'classes:11': a client can hold 1 to 10 of the 10 classes"),
        ("unimodal", "'unimodal' needs a whole number of classes, 1 or more, such as 'unimodal:2', but .* has none"),
        ("unimodal:0", "'unimodal:0' has 0"),
        ("unimodal:1.5", "'unimodal:1.5' has '1.5'"),
        ("unimodal:2:0.8,0.2", "'unimodal:2:0.8,0.2' has '2:0.8,0.2'"),
        ("unimodal:11", "'unimodal:11': a client can hold 1 to 10 of the 10 classes"),
        ("multimodal", "'multimodal' needs a whole number of classes, 1 or more, such as 'multimodal:2'"),
        ("multimodal:0", "'multimodal:0' has 0"),
        ("multimodal:2:a,b", "'multimodal' takes shares of the clients, such as .*, but 'multimodal:2:a,b' has 'a,b'"),
        ("multimodal:2:", "'multimodal:2:' has ''"),
        ("multimodal:2:0.8,0.3", "'multimodal:2:0.8,0.3': the shares must be above 0 and sum to 1, .* sum to 1.1"),
        ("multimodal:2:1.2,-0.2", "the shares must be above 0 and sum to 1"),
        ("multimodal:2:nan,1", "the shares must be above 0 and sum to 1"),
        ("multimodal:6:0.5,0.5", "'multimodal:6:0.5,0.5': a client can hold 1 to 5 of the 5 classes"),
        ("multimodal:2:0.99,0.01", "of 10 clients a group would have none; use larger shares or more clients"),
        ("multimodal:1:0.8,0.2", "2 clients make 2 shards, too few for 5 classes"),
    ],
)
def test_slips_in_a_spec(spec: str, sentence: str) -> None:
    with pytest.raises(FedfillError, match=sentence):
        partition(spec, LABELS, 10, 0)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("clients", "sentence"), [(0, "found 0"), (-2, "found -2"), (1001, "only 1,000 samples")])
def test_impossible_numbers_of_clients(spec: str, clients: int, sentence: str) -> None:
    with pytest.raises(FedfillError, match=f"^clients: .*{sentence}"):
        partition(spec, LABELS, clients, 0)


@pytest.mark.parametrize("spec", ["dirichlet:5", "quantity:5"])
def test_too_many_clients_for_the_smallest_size(spec: str) -> None:
    with pytest.raises(FedfillError, match="too few for 101 clients; use at most 100"):
        partition(spec, LABELS, 101, 0)


def test_too_few_and_too_many_pieces() -> None:
    with pytest.raises(
        FedfillError,
        match="4 clients make 8 pieces, too few for 10 classes; use at least 3 classes per client or 5 clients",
    ):
        classes(LABELS, 4, 0, 2)
    with pytest.raises(FedfillError, match="600 clients need 1,200 pieces, but there are only 1,000 samples"):
        classes(LABELS, 600, 0, 2)


def test_too_few_and_too_many_shards() -> None:
    with pytest.raises(FedfillError, match="'unimodal:2': 4 clients make 8 shards, too few for 10 classes"):
        unimodal(LABELS, 4, 0, 2)
    with pytest.raises(FedfillError, match="600 clients need 1,200 shards, but there are only 1,000 samples"):
        unimodal(LABELS, 600, 0, 2)
    with pytest.raises(
        FedfillError, match=r"'multimodal:2:0.8,0.2': 640 clients need 1,280 shards, .* only 500 samples"
    ):
        multimodal(LABELS, 800, 0, 2)
    # one sample of the two classes is kept for each of three clients, and thirds are rounded down
    with pytest.raises(FedfillError, match="3 clients need 3 shards, but there are only 2 samples"):
        multimodal(np.repeat([0, 1, 2, 3], [50, 50, 1, 1]), 5, 0, 1, (0.6, 0.4))


def test_more_groups_than_clients_or_classes() -> None:
    for labels, clients in ((LABELS, 2), (LABELS % 2, 10)):
        with pytest.raises(FedfillError, match="3 groups need as many clients and classes, and there are"):
            multimodal(labels, clients, 0, 1, (0.4, 0.3, 0.3))


@pytest.mark.parametrize("labels", [np.zeros(20), np.zeros((20, 2), int)])
def test_labels_must_be_a_list_of_integers(labels: NDArray[Any]) -> None:
    with pytest.raises(FedfillError, match=r"^labels: "):
        iid(labels, 2, 0)


def test_parse_knows_every_listed_name() -> None:
    examples = {
        usage: usage.replace("BETA", "0.5").replace("SHARES", "0.7,0.3").replace("C", "2").replace("K", "3")
        for usage in NAMES
    }
    assert [parse(example) for example in examples.values()] == [
        ("iid", []),
        ("dirichlet", [0.5]),
        ("classes", [2.0]),
        ("unimodal", [2.0]),
        ("multimodal", [2.0, 0.7, 0.3]),
        ("quantity", [0.5]),
        ("domain", [3.0]),
    ]
    assert parse("domain") == ("domain", [])


def test_shares_in_a_spec() -> None:
    assert parse("multimodal:2") == ("multimodal", [2.0])
    assert parse("multimodal:2:0.7,0.3") == ("multimodal", [2.0, 0.7, 0.3])
    for spec, shares in (("multimodal:2", (0.8, 0.2)), ("multimodal:2:0.7,0.3", (0.7, 0.3))):
        for mine, own in zip(partition(spec, LABELS, 20, 0), multimodal(LABELS, 20, 0, 2, shares), strict=True):
            np.testing.assert_array_equal(mine, own)


class Contiguous:
    """Behaves as the `IidPartitioner` of flwr_datasets does: contiguous shards of a data set that can be set once."""

    def __init__(self, clients: int) -> None:
        self.num_partitions = clients
        self._dataset: datasets.Dataset | None = None

    @property
    def dataset(self) -> datasets.Dataset:
        return self._dataset

    @dataset.setter
    def dataset(self, value: datasets.Dataset) -> None:
        if self._dataset is not None:
            raise ValueError("assigned only once")
        if not isinstance(value, datasets.Dataset):
            raise TypeError("not a Dataset")
        self._dataset = value

    def load_partition(self, partition_id: int) -> datasets.Dataset:
        return self.dataset.shard(num_shards=self.num_partitions, index=partition_id, contiguous=True)


class ByClass(Contiguous):
    """One client per class, by the column it was told."""

    def __init__(self, clients: int, column: str) -> None:
        super().__init__(clients)
        self._partition_by = column

    def load_partition(self, partition_id: int) -> datasets.Dataset:
        values = np.asarray(self.dataset[self._partition_by])
        return self.dataset.select(np.flatnonzero(values == partition_id)[::-1])


def test_partitioner_by_position() -> None:
    partitioner = Contiguous(4)
    for _ in range(2):  # the object isn't used up
        parts = from_partitioner(partitioner, LABELS[:10])
        assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("column", ["label", "digit"])
def test_partitioner_by_its_own_column(column: str) -> None:
    parts = from_partitioner(ByClass(3, column), np.array([2, 0, 1, 0, 2]))
    assert [part.tolist() for part in parts] == [[1, 3], [2], [0, 4]]
    assert all(part.dtype == np.int64 for part in parts)


def test_partitioner_that_fails_or_misdeals() -> None:
    used = Contiguous(2)
    used.dataset = datasets.Dataset.from_dict({"label": [0]})
    with pytest.raises(FedfillError, match="Contiguous can't divide these 1,000 samples: assigned only once"):
        from_partitioner(used, LABELS)
    with pytest.raises(FedfillError, match="ByClass gave client 10 no samples"):
        from_partitioner(ByClass(11, "label"), LABELS)

    class Twice(Contiguous):
        def load_partition(self, partition_id: int) -> datasets.Dataset:
            return self.dataset

    with pytest.raises(FedfillError, match="each sample to one client at most"):
        from_partitioner(Twice(2), LABELS)


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


@pytest.mark.parametrize("kind", ["IidPartitioner", "DirichletPartitioner", "LinearPartitioner"])
def test_real_partitioners_of_flwr_datasets_are_accepted(kind: str) -> None:
    from flwr_datasets import partitioner as real

    options = {
        "IidPartitioner": {"num_partitions": 5},
        "DirichletPartitioner": {"num_partitions": 5, "partition_by": "label", "alpha": 0.5, "seed": 1},
        "LinearPartitioner": {"num_partitions": 5},
    }
    parts = from_partitioner(getattr(real, kind)(**options[kind]), LABELS)
    assert len(parts) == 5
    assert_covers(parts, len(LABELS))
    # most of them can't say how many partitions they make before they have data
    images = np.zeros((len(LABELS), 4, 4), np.uint8)
    federation = federate((images, LABELS), partition=getattr(real, kind)(**options[kind]), seed=0, client_test=0.0)
    assert len(federation.clients) == 5
