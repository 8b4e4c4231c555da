"""Runs that stand on sums: one round and a note, a network of their own, stopped between exchanges, before and after others."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.experiment.world import Net
from tests.helpers import refused

import fedfill
from fedfill.experiment.prepare import arrange
from fedfill.runs.directory import RunDirectory

SMALL: dict[str, Any] = {"data": "digits", "clients": 3, "data_fraction": 0.3}
ONE = {"features": "conv(10) > project(24)"}
SINGLE = ["fed3r", "pfed3r", "fedcgs", "ccvr"]


def document(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "experiment.toml").read_text())


def prepared(name: str, **more: Any) -> Any:
    return arrange(name, **{"partition": "dirichlet:0.5", "model": "auto", **SMALL, **more})


@pytest.mark.parametrize("name", SINGLE)
def test_one_round_is_run_whatever_was_asked_for(name: str, tmp_path: Path) -> None:
    """As a comparison asks all for as many; the record says one, with a note."""
    result = fedfill.run(name, **SMALL, **ONE, rounds=7, out=tmp_path)
    assert [record["round"] for record in result.rounds] == [1]
    assert result.summary["rounds"] == document(tmp_path)["rounds"] == 1
    assert [note for note in result.summary["notes"] if note.startswith("rounds:")] == [
        f"rounds: {name} takes one round, and no more are run."
    ]
    again = fedfill.run(name, **SMALL, **ONE, rounds=1, out=tmp_path / "one")
    assert again.summary["weights_sha256"] == result.summary["weights_sha256"]
    assert not any(note.startswith("rounds:") for note in again.summary["notes"])


def test_settings_of_a_training_that_is_none_are_noted(tmp_path: Path) -> None:
    """As a comparison gives them to all; those as they come are not."""
    notes = prepared("fed3r", local_epochs=2, batch_size=8, optimizer="adam").federation.notes
    assert [note for note in notes if "trains no network" in note] == [
        "local_epochs, batch_size: fed3r trains no network, and does not read these."
    ]
    assert not any("trains no network" in note for note in prepared("fed3r").federation.notes)
    assert not any("trains no network" in note for note in prepared("fedavg", local_epochs=2).federation.notes)


def test_a_finished_one_takes_no_more_rounds(tmp_path: Path) -> None:
    fedfill.run("fed3r", **SMALL, **ONE, out=tmp_path)
    assert fedfill.resume(tmp_path).was_finished
    with refused("rounds", 3, 1):
        fedfill.resume(tmp_path, rounds=3)


def test_steps_without_noise_go_on_and_those_that_share_a_budget_do_not(tmp_path: Path) -> None:
    whole = fedfill.run("softmax", **SMALL, **ONE, rounds=3, out=tmp_path / "whole")
    fedfill.run("softmax", **SMALL, **ONE, rounds=2, out=tmp_path / "more")
    more = fedfill.resume(tmp_path / "more", rounds=3)
    assert more.summary["weights_sha256"] == whole.summary["weights_sha256"]
    fedfill.run("softmax", **SMALL, **ONE, rounds=1, target_epsilon=5.0, out=tmp_path / "noisy")
    with refused("steps", 1, 2):
        fedfill.resume(tmp_path / "noisy", rounds=2)


def test_in_a_comparison_auto_is_a_network_of_its_own_for_them_and_one_for_all_others(tmp_path: Path) -> None:
    comparison = fedfill.compare(
        ["fedavg", f"fed3r:features={ONE['features']}", "moon", f"softmax:features={ONE['features']}"],
        **{**SMALL, "data_fraction": 0.1},
        rounds=2,
        seeds=[0],
        local_epochs=1,
        out=tmp_path,
    )
    assert comparison is not None
    found = {}
    for path in tmp_path.rglob("experiment.toml"):
        made = tomllib.loads(path.read_text())
        found[made["algorithm"]] = (made["model"], made["rounds"], made["model_settings"].get("projection"))
    assert found["fed3r"][:2] == ("features", 1)
    assert found["softmax"][:2] == ("features", 2)
    assert found["fedavg"] == found["moon"] == ("cnn2", 2, found["moon"][2])


def test_a_network_that_is_named_is_taken(tmp_path: Path) -> None:
    """Untrained, as the run has it; of the same split the same bits."""
    result = fedfill.run("fed3r", **SMALL, model="mlp", out=tmp_path)
    assert document(tmp_path)["model"] == "mlp"
    first = prepared("fed3r", model="mlp").initial
    assert {n for n, x in first.items() if not torch.equal(x, result.weights[n])} == {
        "classifier.weight", "classifier.bias",
    }  # fmt: skip
    own = fedfill.run("fed3r", **SMALL, model=Net(), out=tmp_path / "own")
    assert own.summary["accuracy"] > 0.3
    assert {n for n, x in Net().state_dict().items() if not torch.equal(x, own.weights[n])} == {
        "second.weight", "second.bias",
    }  # fmt: skip


@pytest.mark.parametrize(("trust", "wide", "narrow"), [("server", 50.0, 0.5), ("site", 100.0, 0.5)])
def test_under_noise_there_are_as_many_features_as_it_lets_one_use(trust: str, wide: float, narrow: float) -> None:
    """A power of two, which falls with epsilon and with the number of sites that add noise; words of one's own are kept."""
    found = {}
    for epsilon in (wide, narrow):
        words = prepared("fed3r", target_epsilon=epsilon, trust=trust).experiment.model_settings["features"]
        found[epsilon] = int(words.rsplit("project(", 1)[1].rstrip(") "))
    assert found[wide] > found[narrow] >= 64
    sites = {
        clients: prepared("fed3r", target_epsilon=50.0, clients=clients).initial["classifier.weight"].shape[1]
        for clients in (1, 30)
    }
    assert sites[1] > sites[30]
    kept = prepared("fed3r", target_epsilon=1.0, trust=trust, **ONE)
    assert kept.experiment.model_settings["features"] == ONE["features"]
    assert prepared("fed3r").initial["classifier.weight"].shape[1] == 2048


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fed3r", {"features": "patches(6, size=4, cells=1)", "filter_steps": 3}),
        ("fedcgs", {**ONE, "target_epsilon": 5.0}),
        ("softmax", {**ONE, "target_epsilon": 5.0, "trust": "server", "rounds": 2}),
        ("softmax", {**ONE, "rounds": 3}),
    ],
)
def test_stopped_after_every_exchange_it_goes_on_with_the_same_bits(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Also the noise is the same, and the account counts nothing twice."""
    whole = fedfill.run(name, **SMALL, **more, out=tmp_path / "whole")

    def stop(record: dict[str, Any], rounds: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedfill.run(name, **SMALL, **more, out=tmp_path / "stopped", on_round=stop)
    stops = 1
    for _ in range(20):
        try:
            again = fedfill.resume(tmp_path / "stopped", on_round=stop)
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops >= 2
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    for figure in ("total_epsilon", "total_epsilon_added", "entries"):
        assert again.summary["privacy"][figure] == whole.summary["privacy"][figure]
    assert again.summary["bytes_by_handler"] == whole.summary["bytes_by_handler"]


# Before and after others


def test_a_head_on_features_that_others_trained(tmp_path: Path) -> None:
    """`fed3r` from a run of FedAvg fits the last layer of that network, as head=fed3r would have."""
    words = {**SMALL, "rounds": 2, "local_epochs": 1, "seed": 3}
    trained = fedfill.run("fedavg", **words, out=tmp_path / "fedavg")
    after = fedfill.run("fed3r", **SMALL, seed=3, start_from=tmp_path / "fedavg", out=tmp_path / "after")
    headed = fedfill.run("fedavg", **words, head="fed3r", out=tmp_path / "headed")
    assert after.summary["weights_sha256"] == headed.summary["weights_sha256"]
    moved = {n for n, x in trained.weights.items() if not torch.equal(x, after.weights[n])}
    assert moved == {"classifier.weight", "classifier.bias"}
    assert headed.rounds[-1]["accuracy_of_trained_head"] == trained.summary["accuracy"]
    for name in ("accuracy", "mean_client_accuracy"):
        assert headed.summary[f"{name}_of_trained_head"] == trained.summary[name]


def test_training_on_from_a_head(tmp_path: Path) -> None:
    """FedAvg takes the map of features with the head on it, and trains the head alone, as a map has no parameters."""
    first = fedfill.run("fed3r", **SMALL, **ONE, out=tmp_path / "first")
    after = fedfill.run(
        "fedavg", **SMALL, rounds=2, local_epochs=1, start_from=tmp_path / "first", out=tmp_path / "after"
    )
    assert document(tmp_path / "after")["model"] == "features"
    assert after.weights.keys() == first.weights.keys()
    assert {n for n, x in first.weights.items() if not torch.equal(x, after.weights[n])} <= {
        "classifier.weight", "classifier.bias",
    }  # fmt: skip
    assert after.rounds[0]["accuracy"] > first.summary["accuracy"] - 0.1


# Tables and arrays


def rows(n: int = 240, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two rings: no linear layer tells them apart, and a lift does."""
    stream = np.random.default_rng(seed)
    y = stream.integers(0, 2, n)
    angle, radius = stream.uniform(0, 6.28, n), 1 + 2 * y + 0.2 * stream.normal(size=n)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), stream.normal(size=n)], 1).astype(np.float32), y


@pytest.mark.parametrize("name", ["fed3r", "fedcgs", "softmax"])
def test_vectors_from_python_are_lifted(name: str, tmp_path: Path) -> None:
    """By default fourier(1024), which no record has a say in; any split gives the same bits but for softmax."""
    found = {}
    for partition, clients in (("iid", 3), ("classes:1", 2)):
        result = fedfill.run(
            name, data=(*rows(), *rows(200, 1)), partition=partition, clients=clients, client_test=0.0, rounds=5,
            out=tmp_path / str(clients),
        )  # fmt: skip
        assert result.weights["classifier.weight"].shape == (2, 1024)
        found[partition] = result
    assert min(r.summary["accuracy"] for r in found.values()) > 0.9
    if name != "softmax":
        assert len({r.summary["weights_sha256"] for r in found.values()}) == 1
    linear = fedfill.run(
        name,
        data=(*rows(), *rows(200, 1)),
        partition="iid",
        clients=3,
        features="unit",
        rounds=5,
        out=tmp_path / "linear",
    )
    assert linear.weights["classifier.weight"].shape == (2, 3)
    assert linear.summary["accuracy"] < 0.75


def test_a_table_of_numbers_and_words(tmp_path: Path) -> None:
    x, y = rows(300)
    with (tmp_path / "people.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "town", "label"])
        for (a, b, c), label in zip(x, y, strict=True):
            writer.writerow([f"{a:.4f}", f"{b:.4f}", "in" if c > 0 else "out", "far" if label else "near"])
    made = [
        fedfill.run(
            "fed3r", data="people.csv", data_dir=tmp_path, partition=partition, clients=3, client_test=0.0, **noise,
            out=tmp_path / f"{partition[:3]}{len(noise)}",
        )
        for partition, noise in (("iid", {}), ("dirichlet:0.2", {}), ("iid", {"target_epsilon": 20.0}))
    ]  # fmt: skip
    assert made[0].summary["weights_sha256"] == made[1].summary["weights_sha256"]
    assert made[0].summary["accuracy"] > 0.85
    kept = made[2].summary["privacy"]
    assert kept["total_epsilon_added"] == pytest.approx(20, rel=1e-6)
    assert RunDirectory(made[2].directory).read_checkpoint() is not None


def test_the_scaling_of_a_table_is_named_beside_a_guarantee(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("age,label\n" + "".join(f"{k},{'ab'[k % 2]}\n" for k in range(200)))
    inputs, labels = np.arange(200.0)[:, None] / 200, np.arange(200) % 2
    given: dict[str, Any] = {"clients": 2, "partition": "iid", "workers": 1, "target_epsilon": 5.0}
    table = fedfill.run("fedcgs", data=str(tmp_path / "people.csv"), out=tmp_path / "table", **given).summary["privacy"]
    (sentence,) = table["not_in_the_account"]
    assert "means, deviations" in sentence
    assert table["statement"].endswith(sentence)
    assert table["total_epsilon_added"] is not None
    arrays = fedfill.run("fedcgs", data=(inputs, labels), out=tmp_path / "arrays", **given).summary["privacy"]
    assert arrays["not_in_the_account"] == []
    plain = fedfill.run(
        "fedavg", data=str(tmp_path / "people.csv"), clients=2, rounds=1, workers=1, out=tmp_path / "plain"
    )
    assert sentence not in plain.summary["privacy"]["statement"]  # there is no guarantee that it could spoil


@pytest.mark.parametrize("given", [("fed3r", {}), ("dpmerf", {}), ("feddpms", {"means": "global"})])
def test_more_honest_clients_than_there_are_is_refused_before_anything_is_written(
    given: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    name, more = given
    noise: dict[str, Any] = {"target_epsilon": 3.0, "trust": "secure", "honest": 9}
    with refused("honest", 9, "1 to 4"):
        fedfill.run(name, clients=4, out=tmp_path / "run", **noise, **more)
    assert not (tmp_path / "run").exists()
