"""Preparation: data, partitions and networks from words and from Python."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tests.experiment.world import PLAIN, TINY, Net, Stop, digits, stop
from tests.helpers import refused
from torch import nn

import fedfill
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fraug import FRAug
from fedfill.errors import FedfillError, checked
from fedfill.experiment.settings import Experiment


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("rounds", True, "rounds: found 'True'; allowed: a whole number"),
        ("rounds", None, "rounds: found None; allowed: a whole number"),
        ("rounds", 2.5, "rounds: found 2.5; allowed: a whole number"),
        ("rounds", "1e3", "rounds: found '1e3'; allowed: a whole number"),
        ("participation", math.inf, "participation: found inf; allowed: a finite number"),
        ("participation", 1.5, "participation: found 1.5; allowed: at most 1"),
        ("seed", -1, "seed: found -1; allowed: at least 0"),
        ("participation", math.nan, "participation: found nan; allowed: a finite number"),
        ("delta", 0, "delta: found 0; allowed: more than 0"),
        ("delta", 1, "delta: found 1; allowed: less than 1"),
        ("workers", 10**9, "workers: found 1000000000; allowed: at most 1024"),
        ("settings", 5, "settings: found 5; allowed: a table of settings"),
        ("roundz", 5, "option: unknown name 'roundz'; did you mean 'rounds'?"),
        ("zzz", 5, "option: unknown name 'zzz'; allowed: algorithm, "),
    ],
)
def test_checked_says_what_is_wrong(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(FedfillError) as refusal:
        checked(Experiment, {"algorithm": "fedavg", name: value}, "option")
    assert str(refusal.value).startswith(sentence)


def test_checked_reads_text() -> None:
    experiment = checked(Experiment, {"algorithm": "fedavg", "rounds": "7", "delta": "1e-3", "workers": "None"})
    assert (experiment.rounds, experiment.delta, experiment.workers) == (7, 1e-3, None)


def test_own_arrays_and_own_module_and_resume_with_them(tmp_path: Path) -> None:
    images, labels = digits()
    own: dict[str, Any] = {"data": (images, labels), "model": Net()}
    untouched = {name: tensor.clone() for name, tensor in own["model"].state_dict().items()}
    whole = fedfill.run("fedavg", **own, **PLAIN, clients=4, out=tmp_path / "whole")
    assert whole.summary["dataset"] == "python"
    assert set(whole.weights) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in own["model"].state_dict().items())

    run = tmp_path / "run"
    with pytest.raises(Stop):
        fedfill.run("fedavg", **own, **PLAIN, clients=4, out=run, on_round=stop)
    with refused("data", "Python"):
        fedfill.resume(run)
    with refused("model", "Python"):
        fedfill.resume(run, data=own["data"])
    changed = images.copy()
    changed[0, 0, 0] ^= 1
    with refused("resume", "data", "model", run):
        fedfill.resume(run, data=(changed, labels), model=own["model"])
    other = Net()
    nn.init.zeros_(other.first.bias)
    with refused("resume", "data", "model", run):
        fedfill.resume(run, data=own["data"], model=other)
    result = fedfill.resume(run, **own)
    assert result.resumed_after == 1
    assert result.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_arrays_give_what_the_name_gives(tmp_path: Path) -> None:
    """The digits by name are their images times 255 / 16, rounded; the same arrays give the same bits."""
    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    by_hand = fedfill.run("fedavg", data=(images, bunch.target), clients=4, **PLAIN, out=tmp_path / "arrays")
    by_name = fedfill.run("fedavg", data="digits", clients=4, **PLAIN, out=tmp_path / "name")
    assert by_hand.summary["weights_sha256"] == by_name.summary["weights_sha256"]


def test_a_data_set_for_each_client(tmp_path: Path) -> None:
    images, labels = digits()
    parts = [(images[labels < 5], labels[labels < 5]), (images, labels), (images[:300], labels[:300])]
    result = fedfill.run("fedavg", data=parts, **PLAIN, out=tmp_path / "a")
    assert result.summary["clients"] == 3
    assert result.summary["partition"] == "given"
    counts = json.loads((tmp_path / "a" / "partition.json").read_text())["clients"]
    assert counts[0][5:] == [0] * 5
    assert fedfill.resume(tmp_path / "a", data=parts).was_finished
    with refused("clients", "4"):
        fedfill.run("fedavg", data=parts, **PLAIN, clients=4, out=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_dataset_of_datasets(tmp_path: Path) -> None:
    images, labels = digits()
    features = datasets.Features(
        {"image": datasets.Array2D((8, 8), "uint8"), "label": datasets.ClassLabel(names=list("0123456789"))}
    )
    data = datasets.Dataset.from_dict({"image": list(images), "label": labels.tolist()}, features=features)
    result = fedfill.run("fedavg", data=data, clients=4, **PLAIN, out=tmp_path / "a")
    arrays = fedfill.run("fedavg", data=(images, labels), clients=4, **PLAIN, out=tmp_path / "b")
    assert result.summary["weights_sha256"] == arrays.summary["weights_sha256"]


class Halves:
    """A partitioner in the manner of flwr_datasets: even rows and odd rows."""

    def __init__(self) -> None:
        self.dataset: Any = None

    @property
    def num_partitions(self) -> int:
        return 2

    def load_partition(self, partition_id: int) -> Any:
        return self.dataset.select(range(partition_id, len(self.dataset), 2))


def test_a_partitioner_object_says_how_many_clients(tmp_path: Path) -> None:
    result = fedfill.run("fedavg", data="digits", partition=Halves(), **PLAIN, out=tmp_path)
    assert (result.summary["clients"], result.summary["partition"]) == (2, "python:Halves")
    with refused("partition", "Python"):
        fedfill.resume(tmp_path)
    assert fedfill.resume(tmp_path, partition=Halves()).was_finished


@pytest.mark.parametrize(
    ("given", "epochs", "steps"),
    [
        ({}, 1, 7),
        ({"local_epochs": 3}, 3, None),
        ({"local_steps": 2}, 1, 2),
        ({"local_epochs": 3, "local_steps": 2}, 3, 2),
    ],
)
@pytest.mark.parametrize("preset", [{"local_steps": 7, "local_epochs": 1}, {"local_epochs": 1}])
def test_epochs_that_are_asked_for_stand_in_for_an_algorithms_mini_batches(
    preset: dict[str, int], given: dict[str, int], epochs: int, steps: int | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(FRAug, "paper", {"digits": preset})
    fedfill.run("fraug", model="cnn2bn", preset="paper", clients=2, rounds=1, data_fraction=0.1, **given, out=tmp_path)
    recorded = tomllib.loads((tmp_path / "experiment.toml").read_text())["settings"]
    expected = None if not given and "local_steps" not in preset else steps
    assert (recorded["local_epochs"], recorded["local_steps"]) == (epochs, expected or "none")
    fedfill.resume(tmp_path)


class InSteps(FedAvg):
    """FedAvg that counts in mini-batches."""

    name = "in-steps"

    local_steps: int = 2
    """Mini-batches in a round."""


def test_an_algorithm_that_knows_steps_alone_keeps_them(tmp_path: Path) -> None:
    fedfill.run(InSteps, clients=2, rounds=1, data_fraction=0.1, local_epochs=3, out=tmp_path)
    assert "\nlocal_steps = 2\n" in (tmp_path / "experiment.toml").read_text()


@pytest.mark.parametrize("word", ["crops", "", "true"])
def test_a_word_that_a_setting_does_not_know_is_answered_with_those_that_it_does(word: str) -> None:
    with pytest.raises(FedfillError) as error:
        checked(FedAvg, {"augmentation": word})
    allowed = "'shift', 'shift_flip', 'crop' or 'crop_colour', or none"
    assert str(error.value) == f"augmentation: found '{word}'; allowed: {allowed}"
    assert checked(FedAvg, {"augmentation": "none"}).augmentation is None


@pytest.mark.parametrize("number", [0, -1, 1.5, "many", True])
def test_a_number_of_labels_that_is_none(number: Any, tmp_path: Path) -> None:
    with refused("labelled_per_client", "found", "allowed"):
        fedfill.run("fedavg", **TINY, labelled_per_client=number, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()
