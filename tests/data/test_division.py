"""Division: every sample has one place and keeps its label, the test set is sealed, and slips get a sentence."""

from __future__ import annotations

from collections import Counter
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tests.data.made import COUNT, DATA, INPUTS, LABELS, TEST_INPUTS, TEST_LABELS, divided, numbers, says
from tests.helpers import refused

from fedfill.data.dataset import Source
from fedfill.data.samples import Samples
from fedfill.data.sources import load


@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.5", "classes:2", "unimodal:2", "quantity:1"])
@pytest.mark.parametrize("share", [0, 0.1, 0.5])
def test_every_sample_has_one_place_and_keeps_its_label(partition: str, share: float) -> None:
    federation = divided(partition=partition, client_test=share)
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


def test_by_name() -> None:
    federation = divided("digits", clients=10)
    assert federation.name == "digits"
    assert federation.shape == (1, 8, 8)
    assert federation.test is load("digits").test
    assert sum(len(client.train) + len(client.test) for client in federation.clients) == 1438


def test_fraction_is_stratified_nested_and_leaves_the_test_set_whole() -> None:
    parts = {
        fraction: {n for client in divided(fraction=fraction, client_test=0).clients for n in numbers(client.train)}
        for fraction in (0.1, 0.5, 1.0)
    }
    assert {fraction: len(part) for fraction, part in parts.items()} == {0.1: 40, 0.5: 200, 1.0: 400}
    assert parts[0.1] < parts[0.5]
    other = divided(fraction=0.1, client_test=0, seed=1)
    assert {n for client in other.clients for n in numbers(client.train)} != parts[0.1]
    assert Counter(n % 4 for n in parts[0.1]) == {0: 10, 1: 10, 2: 10, 3: 10}
    federation = divided(fraction=0.1)
    assert len(federation.test) == 40
    assert "Data fraction 0.1: 40 of 400 training samples, stratified by class." in federation.notes
    # a fraction that would leave nothing keeps one sample of each class
    assert sum(map(sum, divided(fraction=1e-6, client_test=0).counts)) == 4


def test_seed_moves_clients_but_not_the_test_set() -> None:
    first, again, other = (divided(partition="dirichlet:1", fraction=0.5, seed=seed) for seed in (0, 0, 1))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    for one, same in zip(first.clients, again.clients, strict=True):
        assert torch.equal(one.train.inputs, same.train.inputs)
        assert torch.equal(one.test.inputs, same.test.inputs)
    assert numbers(first.clients[0].train) != numbers(other.clients[0].train)
    assert torch.equal(first.test.inputs, other.test.inputs)


def test_own_test_splits_of_clients_come_from_their_own_streams() -> None:
    # four clients with 100 samples of one class each would hold out the same positions if they shared a stream
    positions = set()
    for client in divided((INPUTS, LABELS * 0, TEST_INPUTS, TEST_LABELS)).clients:
        own = sorted(numbers(client.train) + numbers(client.test))
        positions.add(tuple(own.index(number) for number in numbers(client.test)))
    assert len(positions) == 4


def test_clients_too_small_for_a_test_split_are_counted() -> None:
    federation = divided((INPUTS[:8], LABELS[:8], *DATA[2:]), clients=4)
    assert [len(client.test) for client in federation.clients] == [0] * 4
    assert federation.clients[0].test.inputs.shape == (0, 1)
    assert federation.notes[-1].endswith("; too few for one: 4 of 4 clients.")


def test_a_list_is_its_own_partition() -> None:
    cut = 300
    given = [
        (INPUTS[:cut], LABELS[:cut], TEST_INPUTS[:30], TEST_LABELS[:30]),
        (INPUTS[cut:], LABELS[cut:], TEST_INPUTS[30:], TEST_LABELS[30:]),
    ]
    federation = divided(given, clients=None, partition=None)
    assert [numbers(client.train) for client in federation.clients] == [list(range(cut)), list(range(cut, COUNT))]
    assert [len(client.test) for client in federation.clients] == [30, 10]
    assert torch.equal(federation.test.inputs, torch.from_numpy(TEST_INPUTS))
    assert any("one data set per client" in note for note in federation.notes)
    assert divided(given, clients=2, partition="dirichlet:0.5").fingerprint == federation.fingerprint


def test_a_list_without_test_sets_holds_out_a_fifth_of_each_client() -> None:
    federation = divided([(INPUTS[:200], LABELS[:200]), (INPUTS[200:], LABELS[200:])], clients=None, fraction=0.5)
    assert [client.test.counts(4) for client in federation.clients] == [[10] * 4, [10] * 4]
    assert [client.train.counts(4) for client in federation.clients] == [[20] * 4, [20] * 4]
    assert len(federation.test) == 80
    places = [n for client in federation.clients for n in numbers(client.train + client.test)]
    assert len(set(places)) == len(places)


def test_each_client_of_a_list_draws_its_own_fraction() -> None:
    federation = divided([DATA, DATA], clients=None, fraction=0.5)
    first, second = (set(numbers(client.train)) for client in federation.clients)
    assert len(first) == len(second) == 200
    assert 50 < len(first & second) < 150  # two halves by chance share a quarter of all


def test_a_client_in_a_list_with_too_few_samples_has_no_test_split() -> None:
    lone = (INPUTS[:1], LABELS[:1])
    federation = divided([lone, (INPUTS[1:], LABELS[1:]), lone], clients=None, fraction=0.5)
    assert [len(client.train) for client in federation.clients] == [1, 159, 1]  # 39 of 79 and 3 * 40 of 80
    assert [client.test.inputs.shape for client in federation.clients] == [(0, 1), (80, 1), (0, 1)]
    assert len(federation.test) == 80
    assert sum(note.startswith("Test set: ") for note in federation.notes) == 1
    assert (
        "No test split of their own, as their samples are too few to hold one out: 2 of 3 clients." in federation.notes
    )
    assert not any("too few" in note for note in divided([DATA, DATA], clients=None).notes)
    with refused("data") as caught:
        divided([lone, lone], clients=None)
    says(caught, "no test set", "each client")


def test_a_list_whose_clients_lack_classes() -> None:
    few = (INPUTS[LABELS < 2], LABELS[LABELS < 2])
    federation = divided([few, (INPUTS, LABELS)], clients=None)
    assert federation.classes == 4
    assert federation.counts[0][2:] == [0, 0]


def named(*names: str) -> Source:
    return Source("x", *(Samples(torch.zeros(4, 1), torch.arange(4)),) * 2, names, "")


class First:
    """A partitioner that gives two clients 30 samples each and leaves out the rest."""

    num_partitions = 2
    dataset: Any = None

    def load_partition(self, partition_id: int) -> datasets.Dataset:
        return self.dataset.select(range(30 * partition_id, 30 * partition_id + 30))


def test_a_partitioner() -> None:
    federation = divided(partition=First(), clients=None, client_test=0)
    assert [numbers(client.train) for client in federation.clients] == [list(range(30)), list(range(30, 60))]
    assert "The partition left out 340 of 400 training samples." in federation.notes


def test_samples_that_multimodal_leaves_out_are_counted() -> None:
    # two classes of 100 for each group: 50 samples for each of its 4 clients, where the other 16 have 12
    federation = divided(partition="multimodal:2", clients=20, client_test=0)
    assert sum(map(sum, federation.counts)) == 192 + 48
    assert "The partition left out 160 of 400 training samples." in federation.notes
    assert not any("left out" in note for note in divided(partition="unimodal:2", clients=20).notes)


@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.5", "quantity:1"])
def test_some_keep_their_labels_and_all_else_stays(partition: str) -> None:
    whole, part = divided(partition=partition), divided(partition=partition, labelled_per_client=12)
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
    federation = divided(given, clients=None, labelled_per_client=6)
    assert federation.counts == [[3, 2, 1], [2, 2, 0]]
    assert [len(client.unlabelled) for client in federation.clients] == [4, 0]
    assert federation.notes[-1] == (
        "Labelled: 10 of 14 training samples, 6 for each client, stratified by class; fewer samples than that, all "
        "labelled: 1 of 2 clients."
    )
    assert [len(client.train) for client in divided(given, clients=None, labelled_per_client=4).clients] == [4, 4]
    assert divided(given, clients=None, labelled_per_client=4).notes[-1] == (
        "Labelled: 8 of 14 training samples, 4 for each client, stratified by class."
    )


def test_each_client_draws_its_own_labels() -> None:
    given = [(INPUTS[:40], LABELS[:40], TEST_INPUTS, TEST_LABELS)] * 8
    chosen = [tuple(numbers(client.train)) for client in divided(given, clients=None, labelled_per_client=4).clients]
    again = [tuple(numbers(client.train)) for client in divided(given, clients=None, labelled_per_client=4).clients]
    other = [tuple(numbers(c.train)) for c in divided(given, clients=None, labelled_per_client=4, seed=1).clients]
    assert chosen == again != other
    assert len(set(chosen)) == 8


PAIR = (INPUTS, LABELS)


@pytest.mark.parametrize(
    ("change", "setting", "facts"),
    [
        ({"fraction": 0}, "data_fraction", ["found 0,"]),
        ({"fraction": 1.5}, "data_fraction", ["found 1.5"]),
        ({"fraction": float("nan")}, "data_fraction", ["found nan"]),
        ({"client_test": -0.1}, "client_test", ["found -0.1"]),
        ({"client_test": 0.6}, "client_test", ["found 0.6"]),
        ({"client_validation": 0.6}, "client_validation", ["found 0.6"]),
        ({"labelled_per_client": 0}, "labelled_per_client", ["found 0,"]),
        ({"labelled_per_client": -1}, "labelled_per_client", ["found -1"]),
        ({"labelled_per_client": 1.5}, "labelled_per_client", ["found 1.5"]),
        ({"labelled_per_client": "many"}, "labelled_per_client", ["found 'many'"]),
        ({"labelled_per_client": True}, "labelled_per_client", ["found True"]),
        ({"image_size": 0, "data": "digits"}, "image_size", ["found 0,"]),
        ({"image_size": 32}, "image_size", ["found 32", "Python"]),
        ({"clients": None}, "clients", ["'iid'"]),
        ({"partition": None}, "partition", ["none was given"]),
        ({"partition": 0.5}, "partition", ["found float"]),
        ({"clients": 401}, "clients", ["found 401", "400 samples"]),
        ({"partition": First(), "clients": 3}, "clients", ["found 3", "First", "2 partitions"]),
        ({"data": [PAIR], "clients": 3}, "clients", ["found 3", "1 data sets"]),
        ({"data": "digitz"}, "data", ["'digitz'", "did you mean 'digits'"]),
        (
            {"data": [PAIR, (np.ones((COUNT, 2), np.float32), LABELS)], "clients": None},
            "data of client 1", ["shape [1]", "[2]"],
        ),
        ({"data": [named(*"abcd"), named(*"ba")], "clients": None}, "data of client 1", ["b, a", "a, b, c, d"]),
    ],
)  # fmt: skip
def test_slips(change: dict[str, Any], setting: str, facts: list[str]) -> None:
    with refused(setting) as caught:
        divided(**change)
    says(caught, *facts)
