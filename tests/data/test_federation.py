"""Federations: what they say of themselves, all data in one place, and a fingerprint that sees every change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.made import COUNT, DATA, INPUTS, LABELS, TEST_INPUTS, TEST_LABELS, divided, numbers

from fedfill.data.dataset import Source
from fedfill.data.federation import Federation, class_table
from fedfill.data.samples import Samples


def test_what_a_federation_says_of_itself() -> None:
    federation = divided(partition="dirichlet:0.5")
    assert (federation.classes, federation.shape, federation.name) == (4, (1,), "python")
    assert np.sum(federation.counts) == sum(len(client.train) for client in federation.clients)
    for counts, client in zip(federation.counts, federation.clients, strict=True):
        assert Counter(client.train.labels.tolist()) == {label: count for label, count in enumerate(counts) if count}
    assert federation.notes == (
        "Test set: the one given with the data.",
        "Partition dirichlet:0.5: 400 training samples divided among 4 clients.",
        "Each client keeps 10% of its samples as its own test split, stratified by class.",
    )


def test_class_table() -> None:
    source = Source(
        "tiny",
        Samples(torch.zeros(4, 1), torch.tensor([0, 1, 1, 1])),
        Samples(torch.zeros(1, 1), torch.tensor([0])),
        ("ant", "bee"),
        "Made up.",
    )
    header, rows = class_table(divided(source, clients=1, client_test=0.3))
    assert header == ["client", "samples", "ant", "bee", "own test"]
    assert rows == [["0", 3, 1, 2, 1]]


def test_pooled() -> None:
    federation = divided(partition="classes:2")
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


def test_labels_in_the_table_and_in_one_place() -> None:
    federation = divided(partition="classes:2", clients=3, labelled_per_client=5, client_test=0)
    header, rows = class_table(federation)
    assert header == ["client", "samples", "0", "1", "2", "3", "unlabelled", "own test"]
    assert [row[1] for row in rows] == [5, 5, 5]
    assert sum(row[6] for row in rows) == COUNT - 15
    pooled = federation.pooled()
    assert numbers(pooled.clients[0].unlabelled) == [n for c in federation.clients for n in numbers(c.unlabelled)]
    assert set(pooled.clients[0].unlabelled.labels.tolist()) == {-1}
    assert [len(client.unlabelled) for client in pooled.clients] == [COUNT - 15, 0, 0]
    assert [len(client.train) for client in pooled.clients] == [15, 0, 0]


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
    assert divided(**change).fingerprint != divided().fingerprint
    assert len(divided().fingerprint) == 64


def test_fingerprint_sees_shapes() -> None:
    tall, wide = (np.ones((COUNT, *shape), np.float32) for shape in ((4, 2), (2, 4)))
    assert divided((tall, LABELS, tall, LABELS)).fingerprint != divided((wide, LABELS, wide, LABELS)).fingerprint


def test_fingerprint_tells_train_from_test_and_client_from_client() -> None:
    def federation(first: slice, second: slice) -> Federation:
        return divided([(*(part[cut] for part in DATA[:2]), *DATA[2:]) for cut in (first, second)], clients=None)

    prints = {federation(slice(0, cut), slice(cut, COUNT)).fingerprint for cut in (100, 101, 200)}
    assert len(prints) == 3


def test_fingerprint_sees_labels_that_are_gone() -> None:
    prints = {divided(labelled_per_client=number).fingerprint for number in (None, 5, 6)}
    assert len(prints) == 3
    # also what the samples without labels are, and nothing where there are none
    moved = (INPUTS * 2, *DATA[1:])
    assert divided(moved, labelled_per_client=5).fingerprint not in prints
    assert divided(labelled_per_client=COUNT).fingerprint == divided().fingerprint
