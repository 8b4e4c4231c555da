"""Pooled data: one training on everything."""

import torch
from tests.helpers import refused

import fedfill

OPTIONS = {"data": "digits", "rounds": 2, "local_epochs": 2, "data_fraction": 0.3, "partition": "iid", "seed": 1}


def test_it_trains_on_everybodys_samples_and_own_test_splits_stay(tmp_path):
    central = fedfill.run("central", **OPTIONS, clients=5, out=tmp_path / "central")
    plain = fedfill.run("fedavg", **OPTIONS, clients=5, out=tmp_path / "fedavg")
    assert central.summary["train_samples"] == plain.summary["train_samples"]
    assert None not in central.summary["accuracy_by_client"]
    assert len(central.summary["accuracy_by_client"]) == 5
    assert "The training samples of all clients are pooled." in central.summary["notes"]


def test_one_client_that_holds_everything_is_the_same_training(tmp_path):
    central = fedfill.run("central", **OPTIONS, clients=1, client_test=0.0, out=tmp_path / "central")
    alone = fedfill.run("fedavg", **OPTIONS, clients=1, client_test=0.0, out=tmp_path / "fedavg")
    assert all(torch.equal(central.weights[name], tensor) for name, tensor in alone.weights.items())


def test_the_budget_is_a_cohorts(tmp_path):
    central = fedfill.run("central", **OPTIONS, clients=5, participation=0.4, client_test=0.0, out=tmp_path / "a")
    n = sum(map(sum, fedfill_counts(tmp_path / "a")))
    assert central.summary["train_samples"] == 2 * 2 * round(0.4 * n)


def fedfill_counts(path):
    import json

    return json.loads((path / "partition.json").read_text())["clients"]


def test_it_is_no_federation_of_hosts():
    with refused("engine", "algorithm", "central"):
        fedfill.run("central", engine="flower", clients=3)
