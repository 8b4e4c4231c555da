"""A look at the clients: distances by hand, and none where there is nothing to see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedfill.data.division import federate
from fedfill.data.samples import Samples
from fedfill.studies.look import DRIFTS, drift, label_distance, look


def test_the_distance_of_labels_by_hand() -> None:
    assert label_distance(np.array([[5.0, 5.0], [1.0, 1.0]])) == 0
    # all: (1/2, 1/2); a client of one class: sqrt(1 - sqrt(1/2))
    assert label_distance(np.array([[4.0, 0.0], [0.0, 4.0]])) == pytest.approx(np.sqrt(1 - np.sqrt(0.5)))
    # by size: 6 samples at a distance of their own, 2 at another
    all_of_them = np.array([0.75, 0.25])
    own = [np.sqrt(1 - np.sqrt(0.75)), np.sqrt(1 - np.sqrt(0.25))]
    assert label_distance(np.array([[6.0, 0.0], [0.0, 2.0]])) == pytest.approx(float(all_of_them @ own))


def rows(*values: float, label: int = 0) -> Samples:
    return Samples(torch.tensor(values).reshape(-1, 1), torch.full((len(values),), label))


def share(clients: list[Samples]) -> float:
    return drift(clients)[0]


def test_drift_is_omega_squared_by_hand() -> None:
    # means 1 and 5, centre 3: between 2*4 + 2*4 = 16, within 4*1 = 4, one degree of freedom between and two within;
    # chance 4/2 = 2, and (16 - 2) / (16 + 4 + 2) = 7/11, whatever the unit
    clients = [rows(0.0, 2.0), rows(4.0, 6.0)]
    assert share(clients) == pytest.approx(7 / 11)
    assert share([Samples(c.inputs * 1000 + 7, c.labels) for c in clients]) == pytest.approx(7 / 11)
    # an input that is the same everywhere adds nothing
    assert share([Samples(torch.cat([c.inputs, torch.ones(2, 1)], 1), c.labels) for c in clients]) == pytest.approx(
        7 / 11
    )


def test_classes_are_compared_with_themselves_alone() -> None:
    assert share([rows(0.0, 1.0), rows(8.0, 9.0, label=1)]) == 0  # no class is on two clients
    assert share([rows(5.0), rows(5.0)]) == 0
    # a class of one client alone changes only the unit
    with_another = [rows(0.0, 2.0), rows(4.0, 6.0), rows(3.0, 3.0, label=1)]
    assert share(with_another) == pytest.approx(7 / 11)


def test_chance_is_taken_off() -> None:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(200):
        clients = [
            Samples(torch.randn(20, 5, generator=generator), torch.randint(0, 3, (20,), generator=generator))
            for _ in range(5)
        ]
        found.append(share(clients))
    assert abs(np.mean(found)) < 4 * np.std(found) / np.sqrt(len(found))


@pytest.mark.parametrize(
    ("partition", "skew", "coverage"),
    [("iid", "none", 1.0), ("dirichlet:0.1", "strong", 0.39), ("classes:1", "strong", 0.1)],
)
def test_what_is_seen_of_digits(partition: str, skew: str, coverage: float) -> None:
    seen = look(federate("digits", partition=partition, clients=10, seed=0, client_test=0.1))
    assert (seen.label_skew, seen.feature_shift, seen.clients, seen.few) == (skew, False, 10, True)
    assert seen.coverage == pytest.approx(coverage, abs=0.02)
    assert seen.samples == pytest.approx(1290, abs=20)
    assert any(f"{seen.hellinger:.2f}" in sentence for sentence in seen.sentences())


def test_other_inputs_are_seen() -> None:
    federation = federate("digits", partition="iid", clients=4, seed=0, client_test=0.1)
    clients = [client.train for client in federation.clients]
    assert abs(share(clients)) < 0.01
    assert share([Samples(255 - clients[0].inputs, clients[0].labels), *clients[1:]]) > 0.3


@pytest.mark.parametrize(("clients", "size"), [(200, 2), (50, 20), (10, 100)])
def test_few_samples_are_not_taken_for_other_inputs(clients: int, size: int) -> None:
    bunch = federate("digits", partition="iid", clients=1, seed=0, client_test=0.0).clients[0].train
    for seed in range(5):
        order = torch.randperm(len(bunch), generator=torch.Generator().manual_seed(seed))
        parts = [bunch[order[i * size : (i + 1) * size]] for i in range(clients) if (i + 1) * size <= len(order)]
        found, by_chance = drift(parts)
        assert found < max(by_chance, DRIFTS)
        inverted = [Samples(255 - one.inputs, one.labels) if i % 2 else one for i, one in enumerate(parts)]
        found, by_chance = drift(inverted)
        assert found > max(by_chance, DRIFTS)
