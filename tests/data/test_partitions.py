"""Partitions by name: a spec or a partitioner divides the samples, and slips get a sentence."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.made import assert_covers, says
from tests.helpers import refused

from fedfill.data.division import federate
from fedfill.data.names import PARTITIONS, parse
from fedfill.data.partitions import from_partitioner, partition
from fedfill.data.skew import multimodal

LABELS = np.arange(1000) % 10

SPECS = ["iid", "dirichlet:0.5", "classes:2", "unimodal:2", "multimodal:4:0.6,0.4", "quantity:0.5"]


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
        with refused("partition") as caught:
            partition(spec, labels, clients, seed)
        says(caught, f"{2 * clients} pieces")
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


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        ("dirichelt:0.5", ["'dirichelt:0.5'", "did you mean 'dirichlet'"]),
        ("domian", ["'domian'", "did you mean 'domain'"]),
        ("", ["''", "classes, dirichlet, domain, iid, multimodal, quantity, unimodal"]),
        ("iid:3", ["'iid:3'"]),
        ("dirichlet", ["'dirichlet:0.5'", "none"]),
        ("dirichlet:", ["'dirichlet:0.5'", "none"]),
        ("dirichlet:half", ["'half'"]),
        ("dirichlet:0", ["above 0", "'dirichlet:0'"]),
        ("dirichlet:-1", ["above 0", "'dirichlet:-1'"]),
        ("dirichlet:nan", ["above 0", "'dirichlet:nan'"]),
        ("quantity:inf", ["above 0", "'quantity:inf'"]),
        ("classes:2.5", ["whole number", "'classes:2'", "'2.5'"]),
        ("classes:0", ["whole number", "'classes:0'"]),
        ("classes:11", ["'classes:11'", "1 to 10"]),
        ("unimodal", ["whole number", "'unimodal:2'", "none"]),
        ("unimodal:0", ["whole number", "'unimodal:0'"]),
        ("unimodal:1.5", ["whole number", "'1.5'"]),
        ("unimodal:2:0.8,0.2", ["whole number", "'2:0.8,0.2'"]),
        ("unimodal:11", ["'unimodal:11'", "1 to 10"]),
        ("multimodal", ["whole number", "'multimodal:2'", "none"]),
        ("multimodal:0", ["whole number", "'multimodal:0'"]),
        ("multimodal:2:a,b", ["shares", "'multimodal:2:0.8,0.2'", "'a,b'"]),
        ("multimodal:2:", ["shares", "''"]),
        ("multimodal:2:0.8,0.3", ["'multimodal:2:0.8,0.3'", "sum to 1.1"]),
        ("multimodal:2:1.2,-0.2", ["above 0"]),
        ("multimodal:2:nan,1", ["above 0", "sum to nan"]),
        ("multimodal:6:0.5,0.5", ["'multimodal:6:0.5,0.5'", "1 to 5"]),
        ("multimodal:2:0.99,0.01", ["10 clients", "none"]),
        ("multimodal:1:0.8,0.2", ["2 clients", "5 classes"]),
        ("domain:0", ["clients for each domain", "'domain:0'"]),
        ("domain:", ["clients for each domain", "none"]),
        ("domain:x", ["clients for each domain", "'x'"]),
        ("domain", ["'domain'", "these have none"]),
        ("dirichlet:5", ["101 clients", "at most 100"]),
        ("quantity:5", ["101 clients", "at most 100"]),
    ],
)
def test_slips_in_a_spec(spec: str, facts: list[str]) -> None:
    with refused("partition") as caught:
        partition(spec, LABELS, 101 if spec.endswith(":5") else 10, 0)
    says(caught, *facts)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("clients", [0, -2, 1001])
def test_impossible_numbers_of_clients(spec: str, clients: int) -> None:
    with refused("clients") as caught:
        partition(spec, LABELS, clients, 0)
    says(caught, f"found {clients:,}")


def test_a_number_of_clients_is_needed_where_no_domain_tells_it() -> None:
    with refused("clients"):
        partition("iid", LABELS, None, 0)


def test_parse_knows_every_listed_name() -> None:
    examples = {
        usage: usage.replace("BETA", "0.5").replace("SHARES", "0.7,0.3").replace("C", "2").replace("K", "3")
        for usage in PARTITIONS
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


def test_partition_by_spec() -> None:
    labels, domains = np.zeros(6, np.int64), np.array([1, 0, 1, 0, 1, 0])
    assert [part.tolist() for part in partition("domain", labels, None, 0, domains)] == [[1, 3, 5], [0, 2, 4]]
    assert parse("domain:3") == ("domain", [3.0])


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


class Twice(Contiguous):
    """Gives all to everybody."""

    def load_partition(self, partition_id: int) -> datasets.Dataset:
        return self.dataset


def test_partitioner_that_fails_or_misdeals() -> None:
    used = Contiguous(2)
    used.dataset = datasets.Dataset.from_dict({"label": [0]})
    for partitioner, facts in (
        (used, ["Contiguous", "1,000 samples", "assigned only once"]),
        (ByClass(11, "label"), ["ByClass", "client 10"]),
        (Twice(2), ["Twice", "sample 0", "client 0", "client 1"]),
    ):
        with refused("partition") as caught:
            from_partitioner(partitioner, LABELS)
        says(caught, *facts)


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
