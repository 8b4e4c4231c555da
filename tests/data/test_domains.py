"""Division by domain: clients and test sets follow where samples come from, and a slip gets a sentence."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.made import SIZES, by_domain, floats, numbers, says
from tests.helpers import refused

import fedfill
from fedfill.data.dataset import OWN
from fedfill.data.division import federate
from fedfill.data.federation import ClientData, Federation, class_table
from fedfill.deployment.host_data import Task, load_host, save_host


def make(data: Any = None, **changes: Any) -> Federation:
    return federate(by_domain() if data is None else data, **{"partition": "domain", "seed": 0, **changes})


def test_one_client_per_domain() -> None:
    federation = make()
    assert federation.domains == ("sea", "air", "land")
    for number, (client, size) in enumerate(zip(federation.clients, SIZES.values(), strict=True)):
        assert numbers(client.train) == [*range(1000 * number, 1000 * number + size)]
        assert numbers(client.test) == [*range(1000 * number + 500, 1000 * number + 500 + size // 2)]
    assert numbers(federation.test) == [n for client in federation.clients for n in numbers(client.test)]
    assert federation.notes == (
        OWN,
        "Partition domain: 120 training samples divided among 3 clients.",
        "Each client is tested on the whole test set of its domain.",
    )
    assert federation.client_names == ["0 sea", "1 air", "2 land"]
    header, rows = class_table(federation)
    assert (header, rows[1]) == (["client", "samples", "0", "1", "own test"], ["1 air", 20, 10, 10, 10])


def test_several_clients_per_domain() -> None:
    federation = make(partition="domain:2", clients=6)
    assert federation.domains == ("sea", "sea", "air", "air", "land", "land")
    assert [len(client.train) for client in federation.clients] == [20, 20, 10, 10, 30, 30]
    assert [len(client.test) for client in federation.clients] == [20, 20, 10, 10, 30, 30]
    assert set(numbers(federation.clients[0].train + federation.clients[1].train)) == set(range(40))
    assert len(federation.test) == 60


def test_a_fraction_of_each_domain() -> None:
    parts = {f: [set(numbers(c.train)) for c in make(fraction=f).clients] for f in (0.1, 0.5)}
    assert [len(part) for part in parts[0.1]] == [4, 2, 6]
    assert all(small < large for small, large in zip(parts[0.1], parts[0.5], strict=True))
    assert all(Counter(n % 2 for n in part) == {0: len(part) / 2, 1: len(part) / 2} for part in parts[0.1])
    # the pool is drawn alike, and no domain is ever lost
    pooled = make(fraction=0.1, partition="iid", clients=2, client_test=0)
    assert set().union(*parts[0.1]) == {n for client in pooled.clients for n in numbers(client.train)}
    assert [len(client.train) for client in make(fraction=1e-6).clients] == [2, 2, 2]
    assert "Data fraction 0.1: 12 of 120 training samples, stratified by class and domain." in make(fraction=0.1).notes


def test_domains_with_fractions_of_their_own() -> None:
    whole = [set(numbers(c.train)) for c in make(fraction=0.1).clients]
    federation = make(fraction=0.1, domain_fractions="air=0.5, land=1")
    parts = [set(numbers(c.train)) for c in federation.clients]
    assert [len(part) for part in parts] == [4, 10, 60]
    assert parts[0] == whole[0]  # the others' shares don't change it
    assert all(Counter(n % 2 for n in part) == {0: len(part) / 2, 1: len(part) / 2} for part in parts)
    assert "Shares of their own: air 0.5, land 1." in federation.notes
    assert [len(c.train) for c in make(domain_fractions="sea=0.25").clients] == [10, 20, 60]


def test_other_partitions_take_all_domains_as_one_pool() -> None:
    federation = make(partition="iid", clients=3)
    assert federation.domains == ()
    assert "The domains of the data (sea, air, land) are one pool to this partition." in federation.notes
    assert all(len({n // 1000 for n in numbers(client.train)}) == 3 for client in federation.clients)
    assert sorted(n for c in federation.clients for n in numbers(c.train + c.test)) == sorted(
        n for c in make().clients for n in numbers(c.train)
    )


def test_clients_of_a_domain_without_test_samples_hold_out_their_own() -> None:
    data = {"few": (floats(0, 2), [0, 1]), "many": (floats(100, 40), [0, 1] * 20)}
    federation = make(data, client_test=0.5)
    assert [len(client.test) for client in federation.clients] == [0, 8]
    assert federation.notes[-1].endswith(
        "; where a domain has none, 50% of the client's samples: 1 of 2 clients; too few for one: 1."
    )
    # two of one class are too few for a fifth, and enough for a half
    data["few"] = (floats(0, 2), [0, 0])
    federation = make(data, client_test=0.5)
    assert [len(client.test) for client in federation.clients] == [1, 8]
    assert [len(client.train) for client in federation.clients] == [1, 32]
    assert len(federation.test) == 8


def test_fingerprint_sees_the_domains_names() -> None:
    renamed = {("ocean" if name == "sea" else name): data for name, data in by_domain().items()}
    assert make(renamed).fingerprint != make().fingerprint == make().fingerprint


def test_pooled_keeps_what_the_domains_are_tested_on() -> None:
    federation = make(client_validation=0.1)
    pooled = federation.pooled()
    assert [len(client.train) for client in pooled.clients] == [108, 0, 0]
    for part in ("test", "validation"):
        before, after = ([numbers(getattr(c, part)) for c in f.clients] for f in (federation, pooled))
        assert before == after
    assert pooled.domains == federation.domains


POOL = (floats(0, 20), [0, 1] * 10)


@pytest.mark.parametrize(
    ("change", "setting", "facts"),
    [
        ({"clients": 4}, "clients", ["found 4", "'domain'", "makes 3"]),
        ({"partition": "domain:2", "clients": 3}, "clients", ["found 3", "'domain:2'", "makes 6"]),
        ({"partition": "domain:21"}, "partition", ["'domain:21'", "20 samples", "21 clients"]),
        ({"data": POOL}, "partition", ["'domain'", "these have none", "a column 'domain'"]),
        ({"domain_fractions": "see=0.5"}, "domain_fractions", ["found 'see=0.5'", "did you mean 'sea'"]),
        ({"domain_fractions": "sea=2"}, "domain_fractions", ["found 'sea=2'"]),
        ({"domain_fractions": "sea"}, "domain_fractions", ["found 'sea'"]),
        ({"domain_fractions": "sea=0.5,sea=0.2"}, "domain_fractions", ["found 'sea' twice"]),
        ({"domain_fractions": ","}, "domain_fractions", ["found ''"]),
        ({"domain_fractions": "sea=nan"}, "domain_fractions", ["found 'sea=nan'"]),
        (
            {"domain_fractions": "sea=0.5", "data": POOL, "partition": "iid", "clients": 2},
            "domain_fractions", ["found 'sea=0.5'", "no domains"],
        ),
        (
            {"domain_fractions": "sea=0.5", "data": [*by_domain().values()], "partition": None},
            "domain_fractions", ["found 'sea=0.5'", "a list of data sets"],
        ),
    ],
)  # fmt: skip
def test_slips(change: dict[str, Any], setting: str, facts: list[str]) -> None:
    with refused(setting) as caught:
        make(**change)
    says(caught, *facts)


def test_validation_is_apart_and_leaves_the_rest_in_its_place() -> None:
    for options in ({"partition": "domain"}, {"partition": "dirichlet:1", "clients": 3}):
        plain, with_validation = make(**options), make(**options, client_validation=0.2)
        assert with_validation.fingerprint != plain.fingerprint
        for before, after in zip(plain.clients, with_validation.clients, strict=True):
            assert numbers(after.test) == numbers(before.test)
            assert sorted(numbers(after.train + after.validation)) == sorted(numbers(before.train))
            assert len(after.validation) == int(0.2 * len(before.train) + 0.5)
            assert after.validation.labels.tolist() == [n % 2 for n in numbers(after.validation)]
            assert len(before.validation) == 0
            assert before.validation.inputs.shape == (0, 1)
    assert make(client_validation=0.0).fingerprint == make().fingerprint


def test_validation_is_held_out_before_labels_go() -> None:
    whole, part = make(client_validation=0.1), make(client_validation=0.1, labelled_per_client=4)
    for before, after in zip(whole.clients, part.clients, strict=True):
        assert numbers(after.validation) == numbers(before.validation)
        assert after.validation.labels.tolist() == before.validation.labels.tolist()
        assert sorted(numbers(after.train + after.unlabelled)) == numbers(before.train)
    header, rows = class_table(part)
    assert (header[4:], rows[0][4:]) == (["unlabelled", "validation", "own test"], [32, 4, 20])


def test_clients_of_a_list_have_validation_too() -> None:
    federation = federate([*by_domain().values()], seed=0, client_validation=0.1)
    assert [len(client.validation) for client in federation.clients] == [4, 2, 6]
    assert federation.notes[-1] == "Each client keeps 10% of what is left for validation, stratified by class."
    assert (
        federate([(floats(0, 3), [0, 1, 1], floats(9, 1), [0])], seed=0, client_validation=0.1)
        .notes[-1]
        .endswith("; too few for it: 1 of 1 clients.")
    )


@pytest.mark.parametrize("labelled", [None, 12])
def test_what_a_rehearsal_saves_is_what_its_hosts_read(tmp_path: Path, labelled: int | None) -> None:
    federation = make(client_validation=0.2, labelled_per_client=labelled)
    task = Task.of(federation)
    for i, client in enumerate(federation.clients):
        path = tmp_path / str(i)
        save_host(path, client)
        found = load_host(path, "safetensors", task, client=i, share=0.1, validation=0.2, labelled=labelled)
        for part in ("train", "test", "unlabelled", "validation"):
            one, other = getattr(found, part), getattr(client, part)
            assert torch.equal(one.inputs, other.inputs)
            assert torch.equal(one.labels, other.labels)
        # without the setting, what a host brings for validation is not used
        assert len(load_host(path, "safetensors", task, client=i, share=0.1).validation) == 0


def test_a_host_keeps_the_validation_that_a_simulation_keeps(tmp_path: Path) -> None:
    plain = make()
    for i, client in enumerate(plain.clients):
        save_host(tmp_path / str(i), ClientData(client.train, client.test))
        found = load_host(tmp_path / str(i), "safetensors", Task.of(plain), client=i, share=0.1, validation=0.2)
        assert numbers(found.validation) == numbers(make(client_validation=0.2).clients[i].validation)


def images(start: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.random.default_rng(start).integers(0, 256, (20, 8, 8), np.uint8), np.arange(20) % 2


def test_a_run_by_domain(tmp_path: Path) -> None:
    data = {"sea": images(0), "air": images(1)}
    options: dict[str, Any] = {"partition": "domain", "rounds": 1, "local_epochs": 1, "client_validation": 0.25}
    result = fedfill.run("fedavg", data=data, out=tmp_path / "r", **options)
    division = json.loads((tmp_path / "r" / "partition.json").read_text())
    assert division.pop("inputs")["shape"] == [1, 8, 8]
    assert division == {"class_names": ["0", "1"], "clients": [[6, 6], [6, 6]], "domains": ["sea", "air"]}
    assert (result.summary["clients"], len(result.summary["accuracy_by_client"])) == (2, 2)
    assert result.summary["train_samples"] == 24
    assert fedfill.resume(tmp_path / "r", data=data).was_finished
    with refused("clients"):
        fedfill.run("fedavg", data=data, out=tmp_path / "s", clients=3, **options)
    assert not (tmp_path / "s").exists()
