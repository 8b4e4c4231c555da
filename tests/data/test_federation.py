"""Federations: every sample has one place, the test set is sealed, and the fingerprint sees every change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from fedfill.data.dataset import Source
from fedfill.data.division import federate
from fedfill.data.federation import Federation, class_table
from fedfill.data.samples import Samples
from fedfill.data.sources import load
from fedfill.errors import FedfillError

# the sample's number is its content, so that it can be followed
COUNT = 400
INPUTS = np.arange(COUNT, dtype=np.float32).reshape(COUNT, 1)
LABELS = np.arange(COUNT) % 4
TEST_INPUTS = -1 - np.arange(40, dtype=np.float32).reshape(40, 1)
TEST_LABELS = np.arange(40) % 4
DATA = (INPUTS, LABELS, TEST_INPUTS, TEST_LABELS)


def make(data: Any = DATA, **changes: Any) -> Federation:
    options: dict[str, Any] = {"fraction": 1.0, "partition": "iid", "clients": 4, "seed": 0}
    return federate(data, **{**options, **changes})


def numbers(samples: Samples) -> list[int]:
    return [int(value) for value in samples.inputs[:, 0]]


@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.5", "classes:2", "unimodal:2", "quantity:1"])
@pytest.mark.parametrize("share", [0, 0.1, 0.5])
def test_every_sample_has_one_place_and_keeps_its_label(partition: str, share: float) -> None:
    federation = make(partition=partition, client_test=share)
    held: list[int] = []
    for client in federation.clients:
        for samples in (client.train, client.test):
            held += numbers(samples)
            assert samples.labels.tolist() == [number % 4 for number in numbers(samples)]
        assert len(client.train)
        # of each class the share is held out, to the nearest, and one sample always stays
        both = (client.train + client.test).counts(4)
        assert client.test.counts(4) == [min(int(share * n + 0.5), max(n - 1, 0)) for n in both]
    assert sorted(held) == list(range(COUNT))
    assert numbers(federation.test) == [-1 - number for number in range(40)]


def test_what_a_federation_says_of_itself() -> None:
    federation = make(partition="dirichlet:0.5")
    assert (federation.classes, federation.shape, federation.name) == (4, (1,), "python")
    assert np.sum(federation.counts) == sum(len(client.train) for client in federation.clients)
    for counts, client in zip(federation.counts, federation.clients, strict=True):
        assert Counter(client.train.labels.tolist()) == {label: count for label, count in enumerate(counts) if count}
    assert federation.notes == (
        "Test set: the one given with the data.",
        "Partition dirichlet:0.5: 400 training samples divided among 4 clients.",
        "Each client keeps 10% of its samples as its own test split, stratified by class.",
    )


def test_by_name() -> None:
    federation = make("digits", clients=10)
    assert federation.name == "digits"
    assert federation.shape == (1, 8, 8)
    assert federation.test is load("digits").test
    assert sum(len(client.train) + len(client.test) for client in federation.clients) == 1438


def test_class_table() -> None:
    source = Source(
        "tiny",
        Samples(torch.zeros(4, 1), torch.tensor([0, 1, 1, 1])),
        Samples(torch.zeros(1, 1), torch.tensor([0])),
        ("ant", "bee"),
        "Made up.",
    )
    header, rows = class_table(make(source, clients=1, client_test=0.3))
    assert header == ["client", "samples", "ant", "bee", "own test"]
    assert rows == [["0", 3, 1, 2, 1]]


def test_fraction_is_stratified_nested_and_leaves_the_test_set_whole() -> None:
    parts = {
        fraction: {n for client in make(fraction=fraction, client_test=0).clients for n in numbers(client.train)}
        for fraction in (0.1, 0.5, 1.0)
    }
    assert {fraction: len(part) for fraction, part in parts.items()} == {0.1: 40, 0.5: 200, 1.0: 400}
    assert parts[0.1] < parts[0.5]
    other = make(fraction=0.1, client_test=0, seed=1)
    assert {n for client in other.clients for n in numbers(client.train)} != parts[0.1]
    assert Counter(n % 4 for n in parts[0.1]) == {0: 10, 1: 10, 2: 10, 3: 10}
    federation = make(fraction=0.1)
    assert len(federation.test) == 40
    assert "Data fraction 0.1: 40 of 400 training samples, stratified by class." in federation.notes
    # a fraction that would leave nothing keeps one sample of each class
    assert sum(map(sum, make(fraction=1e-6, client_test=0).counts)) == 4


def test_seed_moves_clients_but_not_the_test_set() -> None:
    first, again, other = (make(partition="dirichlet:1", fraction=0.5, seed=seed) for seed in (0, 0, 1))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    for one, same in zip(first.clients, again.clients, strict=True):
        assert torch.equal(one.train.inputs, same.train.inputs)
        assert torch.equal(one.test.inputs, same.test.inputs)
    assert numbers(first.clients[0].train) != numbers(other.clients[0].train)
    assert torch.equal(first.test.inputs, other.test.inputs)


def test_own_test_splits_of_clients_come_from_their_own_streams() -> None:
    # four clients with 100 samples of one class each would hold out the same positions if they shared a stream
    positions = set()
    for client in make((INPUTS, LABELS * 0, TEST_INPUTS, TEST_LABELS)).clients:
        own = sorted(numbers(client.train) + numbers(client.test))
        positions.add(tuple(own.index(number) for number in numbers(client.test)))
    assert len(positions) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"client_test": 0.2},
        {"clients": 5},
        {"partition": "quantity:1"},
        {"fraction": 0.9},
        {"data": (INPUTS + (INPUTS == 7), *DATA[1:])},
        {"data": (INPUTS, np.where(np.arange(COUNT) == 7, 0, LABELS), *DATA[2:])},
        {"data": (*DATA[:2], TEST_INPUTS * 2, TEST_LABELS)},
        {"data": (*DATA[:3], TEST_LABELS[::-1].copy())},
    ],
)
def test_fingerprint_sees_every_change(change: dict[str, Any]) -> None:
    assert make(**change).fingerprint != make().fingerprint
    assert len(make().fingerprint) == 64


def test_fingerprint_sees_shapes() -> None:
    tall, wide = (np.ones((COUNT, *shape), np.float32) for shape in ((4, 2), (2, 4)))
    assert make((tall, LABELS, tall, LABELS)).fingerprint != make((wide, LABELS, wide, LABELS)).fingerprint


def test_fingerprint_tells_train_from_test_and_client_from_client() -> None:
    def federation(first: slice, second: slice) -> Federation:
        return make([(*(part[cut] for part in DATA[:2]), *DATA[2:]) for cut in (first, second)], clients=None)

    prints = {federation(slice(0, cut), slice(cut, COUNT)).fingerprint for cut in (100, 101, 200)}
    assert len(prints) == 3


def test_a_list_is_its_own_partition() -> None:
    cut = 300
    given = [
        (INPUTS[:cut], LABELS[:cut], TEST_INPUTS[:30], TEST_LABELS[:30]),
        (INPUTS[cut:], LABELS[cut:], TEST_INPUTS[30:], TEST_LABELS[30:]),
    ]
    federation = make(given, clients=None, partition=None)
    assert [numbers(client.train) for client in federation.clients] == [list(range(cut)), list(range(cut, COUNT))]
    assert [len(client.test) for client in federation.clients] == [30, 10]
    assert torch.equal(federation.test.inputs, torch.from_numpy(TEST_INPUTS))
    assert any("one data set per client" in note for note in federation.notes)
    assert make(given, clients=2, partition="dirichlet:0.5").fingerprint == federation.fingerprint


def test_a_list_without_test_sets_holds_out_a_fifth_of_each_client() -> None:
    federation = make([(INPUTS[:200], LABELS[:200]), (INPUTS[200:], LABELS[200:])], clients=None, fraction=0.5)
    assert [client.test.counts(4) for client in federation.clients] == [[10] * 4, [10] * 4]
    assert [client.train.counts(4) for client in federation.clients] == [[20] * 4, [20] * 4]
    assert len(federation.test) == 80
    places = [n for client in federation.clients for n in numbers(client.train + client.test)]
    assert len(set(places)) == len(places)


def test_each_client_of_a_list_draws_its_own_fraction() -> None:
    federation = make([DATA, DATA], clients=None, fraction=0.5)
    first, second = (set(numbers(client.train)) for client in federation.clients)
    assert len(first) == len(second) == 200
    assert 50 < len(first & second) < 150  # two halves by chance share a quarter of all


def test_a_client_in_a_list_with_too_few_samples_has_no_test_split() -> None:
    lone = (INPUTS[:1], LABELS[:1])
    federation = make([lone, (INPUTS[1:], LABELS[1:]), lone], clients=None, fraction=0.5)
    assert [len(client.train) for client in federation.clients] == [1, 159, 1]  # 39 of 79 and 3 * 40 of 80
    assert [client.test.inputs.shape for client in federation.clients] == [(0, 1), (80, 1), (0, 1)]
    assert len(federation.test) == 80
    assert sum(note.startswith("Test set: ") for note in federation.notes) == 1
    assert (
        "No test split of their own, as their samples are too few to hold one out: 2 of 3 clients." in federation.notes
    )
    assert not any("too few" in note for note in make([DATA, DATA], clients=None).notes)
    with pytest.raises(FedfillError, match="no test set and the samples of each client are too few"):
        make([lone, lone], clients=None)


def test_a_list_whose_clients_lack_classes() -> None:
    few = (INPUTS[LABELS < 2], LABELS[LABELS < 2])
    federation = make([few, (INPUTS, LABELS)], clients=None)
    assert federation.classes == 4
    assert federation.counts[0][2:] == [0, 0]


def test_a_list_of_unlike_data() -> None:
    with pytest.raises(FedfillError, match=r"data of client 1: its samples have shape \[2\].* client 0's have \[1\]"):
        make([(INPUTS, LABELS), (np.ones((COUNT, 2), np.float32), LABELS)], clients=None)
    names = [
        Source("x", *(Samples(torch.zeros(4, 1), torch.arange(4)),) * 2, names, "")
        for names in (("a", "b", "c", "d"), ("b", "a"))
    ]
    with pytest.raises(
        FedfillError, match="data of client 1: its classes are b, a, but those of another client are a, b, c, d"
    ):
        make(names, clients=None)
    with pytest.raises(FedfillError, match="clients: found 3, but the list holds 1 data sets"):
        make([(INPUTS, LABELS)], clients=3)


class First:
    """A partitioner that gives two clients 30 samples each and leaves out the rest."""

    num_partitions = 2
    dataset: Any = None

    def load_partition(self, partition_id: int) -> datasets.Dataset:
        return self.dataset.select(range(30 * partition_id, 30 * partition_id + 30))


def test_a_partitioner() -> None:
    federation = make(partition=First(), clients=None, client_test=0)
    assert [numbers(client.train) for client in federation.clients] == [list(range(30)), list(range(30, 60))]
    assert "The partition left out 340 of 400 training samples." in federation.notes
    with pytest.raises(FedfillError, match="clients: found 3, but the First makes 2 partitions"):
        make(partition=First(), clients=3)


def test_samples_that_multimodal_leaves_out_are_counted() -> None:
    # two classes of 100 for each group: 50 samples for each of its 4 clients, where the other 16 have 12
    federation = make(partition="multimodal:2", clients=20, client_test=0)
    assert sum(map(sum, federation.counts)) == 192 + 48
    assert "The partition left out 160 of 400 training samples." in federation.notes
    assert not any("left out" in note for note in make(partition="unimodal:2", clients=20).notes)


def test_pooled() -> None:
    federation = make(partition="classes:2")
    pooled = federation.pooled()
    everything = [number for client in federation.clients for number in numbers(client.train)]
    assert [numbers(client.train) for client in pooled.clients] == [everything, [], [], []]
    assert pooled.clients[0].train.labels.tolist() == [number % 4 for number in everything]
    assert pooled.clients[3].train.inputs.shape == (0, 1)
    assert [numbers(client.test) for client in pooled.clients] == [
        numbers(client.test) for client in federation.clients
    ]
    assert torch.equal(pooled.test.inputs, federation.test.inputs)
    assert pooled.notes == (*federation.notes, "The training samples of all clients are pooled.")
    assert pooled.fingerprint == federation.fingerprint  # of the data and their owners, whoever trains on them
    assert all(len(client.train) for client in federation.clients)  # which is as it was


def test_clients_too_small_for_a_test_split_are_counted() -> None:
    federation = make((INPUTS[:8], LABELS[:8], *DATA[2:]), clients=4)
    assert [len(client.test) for client in federation.clients] == [0] * 4
    assert federation.clients[0].test.inputs.shape == (0, 1)
    assert federation.notes[-1].endswith("; too few for one: 4 of 4 clients.")


# ---- labels for some


@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.5", "quantity:1"])
def test_some_keep_their_labels_and_all_else_stays(partition: str) -> None:
    whole, part = make(partition=partition), make(partition=partition, labelled_per_client=12)
    for before, after in zip(whole.clients, part.clients, strict=True):
        assert numbers(after.test) == numbers(before.test)
        assert after.test.labels.tolist() == before.test.labels.tolist()
        assert sorted(numbers(after.train) + numbers(after.unlabelled)) == numbers(before.train)
        assert after.train.labels.tolist() == [number % 4 for number in numbers(after.train)]
        assert after.unlabelled.labels.tolist() == [-1] * len(after.unlabelled)
        assert len(after.train) == min(12, len(before.train))
        assert all(after.train.counts(4)[c] for c in range(4) if before.train.counts(4)[c])
    assert torch.equal(part.test.inputs, whole.test.inputs)
    assert part.counts == [client.train.counts(4) for client in part.clients]
    assert all(len(client.unlabelled) == 0 for client in whole.clients)
    assert whole.clients[0].unlabelled.inputs.shape == (0, 1)


def test_labels_are_kept_by_the_classes_shares_of_each_client() -> None:
    # classes of 6, 3 and 1 and of 2, 2 and 0 samples; one of each first, then 6/3, 6/5 and 3/3
    first, second = np.repeat([0, 1, 2], [6, 3, 1]), np.repeat([0, 1], [2, 2])
    given = [(INPUTS[: len(labels)], labels, TEST_INPUTS[:3], np.arange(3)) for labels in (first, second)]
    federation = make(given, clients=None, labelled_per_client=6)
    assert federation.counts == [[3, 2, 1], [2, 2, 0]]
    assert [len(client.unlabelled) for client in federation.clients] == [4, 0]
    assert federation.notes[-1] == (
        "Labelled: 10 of 14 training samples, 6 for each client, stratified by class; fewer samples than that, all "
        "labelled: 1 of 2 clients."
    )
    assert [len(client.train) for client in make(given, clients=None, labelled_per_client=4).clients] == [4, 4]
    assert make(given, clients=None, labelled_per_client=4).notes[-1] == (
        "Labelled: 8 of 14 training samples, 4 for each client, stratified by class."
    )


def test_each_client_draws_its_own_labels() -> None:
    given = [(INPUTS[:40], LABELS[:40], TEST_INPUTS, TEST_LABELS)] * 8
    chosen = [tuple(numbers(client.train)) for client in make(given, clients=None, labelled_per_client=4).clients]
    again = [tuple(numbers(client.train)) for client in make(given, clients=None, labelled_per_client=4).clients]
    other = [tuple(numbers(c.train)) for c in make(given, clients=None, labelled_per_client=4, seed=1).clients]
    assert chosen == again != other
    assert len(set(chosen)) == 8


def test_labels_in_the_table_and_in_one_place() -> None:
    federation = make(partition="classes:2", clients=3, labelled_per_client=5, client_test=0)
    header, rows = class_table(federation)
    assert header == ["client", "samples", "0", "1", "2", "3", "unlabelled", "own test"]
    assert [row[1] for row in rows] == [5, 5, 5]
    assert sum(row[6] for row in rows) == COUNT - 15
    pooled = federation.pooled()
    assert numbers(pooled.clients[0].unlabelled) == [n for c in federation.clients for n in numbers(c.unlabelled)]
    assert set(pooled.clients[0].unlabelled.labels.tolist()) == {-1}
    assert [len(client.unlabelled) for client in pooled.clients] == [COUNT - 15, 0, 0]
    assert [len(client.train) for client in pooled.clients] == [15, 0, 0]


def test_fingerprint_sees_labels_that_are_gone() -> None:
    prints = {make(labelled_per_client=number).fingerprint for number in (None, 5, 6)}
    assert len(prints) == 3
    # also what the samples without labels are, and nothing where there are none
    moved = (INPUTS * 2, *DATA[1:])
    assert make(moved, labelled_per_client=5).fingerprint not in prints
    assert make(labelled_per_client=COUNT).fingerprint == make().fingerprint


@pytest.mark.parametrize("number", [0, -1, 1.5, "many", True])
def test_labels_for_a_number_that_is_none(number: Any) -> None:
    with pytest.raises(
        FedfillError, match=f"^labelled_per_client: found {number!r}, but a whole number of at least 1 is needed$"
    ):
        make(labelled_per_client=number)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"fraction": 0}, "^data_fraction: found 0, but"),
        ({"fraction": 1.5}, "^data_fraction: found 1.5"),
        ({"fraction": float("nan")}, "^data_fraction: found nan"),
        ({"client_test": -0.1}, "^client_test: found -0.1, but a share from 0 to 0.5"),
        ({"client_test": 0.6}, "^client_test: found 0.6"),
        ({"clients": None}, "^clients: a number is needed to divide the data by 'iid'"),
        ({"partition": None}, "^partition: a spec .* is needed, but none was given"),
        ({"partition": 0.5}, "^partition: a spec .* is needed, but found float"),
        ({"clients": 401}, "^clients: found 401, but there are only 400 samples"),
        ({"data": "digitz"}, "^data: 'digitz' is unknown; did you mean 'digits'"),
    ],
)
def test_slips(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedfillError, match=sentence):
        make(**change)
