"""Starting from a finished run: its weights to the bit, what fits and what doesn't."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.experiment.world import Net, Stop, digits, stop
from tests.helpers import refused
from torch import nn

import fedfill
from fedfill import tree
from fedfill.algorithms.fedbn import FedBN
from fedfill.deployment.app import init_app
from fedfill.experiment.prepare import Prepared, arrange
from fedfill.experiment.start import Start
from fedfill.models.networks import ModelSettings
from fedfill.runs.directory import RunDirectory

SMALL: dict[str, Any] = {"clients": 4, "local_epochs": 1, "data_fraction": 0.3}
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "moon": {},
    "central": {},
    "feddpms": {"alpha": 5, "max_candidates": 50},
    "fedbn": {"model": "cnn2bn"},
    "mlp": {"algorithm": "fedavg", "model": "mlp"},
    "latent": {"algorithm": "fedavg", "latent": 24, "latent_activation": "sigmoid"},
    "own": {"algorithm": "fedavg", "model": Net()},
}


class Personal(FedBN):
    """An algorithm of one's own that ends with a model for each client."""

    name = "personal-of-ones-own"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], fedfill.Result]:
    """Finished runs of two rounds by name."""
    folder, found = tmp_path_factory.mktemp("made"), dict[str, fedfill.Result]()

    def run(name: str) -> fedfill.Result:
        if name not in found:
            options = {"algorithm": name, **RUNS[name]}
            found[name] = fedfill.run(**options, **SMALL, rounds=2, out=folder / name)
        return found[name]

    return run


def begun(algorithm: Any, run: fedfill.Result | Path, **options: Any) -> Prepared:
    place = run if isinstance(run, Path) else run.directory
    words = {"data": "digits", "partition": "dirichlet:0.5", "model": "auto", **SMALL, "rounds": 2, **options}
    return arrange(algorithm, **words, start_from=place)


def note(prepared: Prepared) -> str:
    return next(text for text in prepared.federation.notes if text.startswith("The network begins"))


def equal(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("name", ["fedavg", "moon", "central", "mlp", "latent"])
def test_the_first_weights_are_the_runs_last_ones(name: str, made: Callable[[str], fedfill.Result]) -> None:
    """By itself FedAvg takes the network with which they were learnt: MOON's head stands on a projection."""
    run = made(name)
    prepared = begun("fedavg", run)
    assert prepared.initial.keys() == run.weights.keys()
    assert equal(prepared.initial, run.weights)
    for fact in (str(run.directory), run.summary["algorithm"], "rounds 2", run.summary["weights_sha256"]):
        assert fact in note(prepared)


def test_a_round_in_which_nobody_learns_ends_where_the_run_ended(
    made: Callable[[str], fedfill.Result], tmp_path: Path
) -> None:
    """Steps of 1e-30 move no weight, and means of equal weights round once: the accuracy is that of the run's end."""
    run = made("mlp")
    still = fedfill.run(
        "fedavg", **SMALL, rounds=1, start_from=run.directory, buffers="frozen", learning_rate=1e-30, out=tmp_path
    )
    assert still.summary["accuracy"] == run.summary["accuracy"]
    assert any("The network begins" in text for text in still.summary["notes"])


def test_it_trains_on_and_is_the_same_experiment_wherever_the_run_lies(
    made: Callable[[str], fedfill.Result], tmp_path: Path
) -> None:
    first = made("fedavg")
    moved = Path(shutil.copytree(first.directory, tmp_path / "moved"))
    one = fedfill.run("scaffold", **SMALL, rounds=2, start_from=first.directory, out=tmp_path / "one", workers=1)
    assert one.rounds[-1]["loss"] < first.summary["loss"]
    two = fedfill.run("scaffold", **SMALL, rounds=2, start_from=moved, out=tmp_path / "two", workers=2)
    documents = [tomllib.loads((r.directory / "experiment.toml").read_text()) for r in (one, two)]
    assert documents[0]["digest"] == documents[1]["digest"]
    assert documents[0]["start_from"] == str(first.directory)
    assert one.summary["weights_sha256"] == two.summary["weights_sha256"]
    scratch = fedfill.run("scaffold", **SMALL, rounds=2, out=tmp_path / "scratch")
    assert scratch.summary["weights_sha256"] != one.summary["weights_sha256"]
    assert "start_from" not in (tmp_path / "scratch" / "experiment.toml").read_text()


def test_a_resume_reads_the_run_again_and_takes_no_other(made: Callable[[str], fedfill.Result], tmp_path: Path) -> None:
    first, place = made("fedavg"), tmp_path / "first"
    shutil.copytree(first.directory, place)
    whole = fedfill.run("fedavg", **SMALL, rounds=2, start_from=place, out=tmp_path / "whole")
    part = tmp_path / "part"
    with pytest.raises(Stop):
        fedfill.run("fedavg", **SMALL, rounds=2, start_from=place, out=part, on_round=stop)
    moved = place.rename(tmp_path / "moved")
    with refused("start_from", "no run"):
        fedfill.resume(part)
    with refused("resume", "start_from"):
        fedfill.resume(part, start_from=whole.directory)
    again = fedfill.resume(part, start_from=moved)
    assert (again.resumed_after, again.summary["weights_sha256"]) == (1, whole.summary["weights_sha256"])
    more = fedfill.resume(part, start_from=moved, rounds=3)
    assert more.resumed_after == 2
    with refused("resume", "start_from", "can't be changed"):
        fedfill.resume(first.directory, start_from=moved)


def test_parts_that_only_one_of_the_two_has(made: Callable[[str], fedfill.Result]) -> None:
    plain = arrange("feddpms", data="digits", partition="dirichlet:0.5", model="auto", **SMALL, rounds=2)
    prepared, run = begun("feddpms", made("fedavg")), made("fedavg").weights
    drawn = prepared.initial.keys() - run.keys()
    assert {name.rpartition(".")[0].split(".")[0] for name in drawn} == {"decoder", "encoder"}
    assert equal({name: prepared.initial[name] for name in drawn}, plain.initial)
    assert equal({name: prepared.initial[name] for name in run}, run)
    assert "drawn as usual: encoder.logvar, decoder." in note(prepared)

    prepared, run = begun("fedavg", made("feddpms")), made("feddpms").weights
    assert equal(prepared.initial, run)
    assert len(prepared.initial) < len(run)
    assert "left out: encoder.logvar, decoder." in note(prepared)

    prepared, run = begun("moon", made("fedavg")), made("fedavg").weights
    assert "its head, whose shape is another" in note(prepared)
    assert "drawn as usual: projection." in note(prepared)
    assert equal({name: tensor for name, tensor in prepared.initial.items() if name.startswith("encoder")}, run)


def test_a_head_of_other_classes_begins_as_drawn(made: Callable[[str], fedfill.Result]) -> None:
    images, labels = digits()
    run, few = made("latent"), (images[labels < 7], labels[labels < 7])
    prepared = begun("fedavg", run, data=few)
    assert prepared.experiment.model_settings["latent"] == 24
    assert "its head, whose shape is another" in note(prepared)
    fresh = arrange(
        "fedavg", data=few, partition="dirichlet:0.5", model="cnn2", latent=24, latent_activation="sigmoid", **SMALL
    )
    for name, tensor in prepared.initial.items():
        assert torch.equal(tensor, (fresh.initial if name.startswith("classifier") else run.weights)[name])


def test_ones_own_network_is_given_again(made: Callable[[str], fedfill.Result]) -> None:
    run, model = made("own"), Net()
    untouched = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert equal(begun("fedavg", run, model=model).initial, run.weights)
    assert equal(untouched, model.state_dict())
    with refused("model", "python:Net"):
        begun("fedavg", run)

    class More(Net):
        def __init__(self) -> None:
            super().__init__()
            self.third = nn.Linear(10, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(super().forward(x))  # type: ignore[no-any-return]

    assert "drawn as usual: third." in note(begun("fedavg", run, model=More()))


def test_the_division_is_compared(made: Callable[[str], fedfill.Result]) -> None:
    said = {
        key: any("divided otherwise" in text for text in begun("fedavg", made("fedavg"), **change).federation.notes)
        for key, change in {"same": {}, "seed": {"seed": 1}, "clients": {"clients": 5}}.items()
    }
    assert said == {"same": False, "seed": True, "clients": True}
    whose = ("in clients' own test", "in the test set and in clients' own test")
    for change, words in zip(({"seed": 1}, {"test_fraction": 0.3}), whose, strict=True):
        assert any(words in text for text in begun("fedavg", made("fedavg"), **change).federation.notes)


def test_another_release_is_named(made: Callable[[str], fedfill.Result], tmp_path: Path) -> None:
    place = Path(shutil.copytree(made("fedavg").directory, tmp_path / "run"))
    assert "made by fedfill" not in note(begun("fedavg", place))
    path = place / "experiment.toml"
    path.write_text(path.read_text().replace(f'version = "{fedfill.__version__}"', 'version = "0.0.7"'))
    assert "made by fedfill 0.0.7" in note(begun("fedavg", place))


def unfinished(run: Path) -> None:
    (run / "summary.json").unlink()


def without_checkpoint(run: Path) -> None:
    (run / "checkpoint" / "state.safetensors").unlink()


def torn(run: Path) -> None:
    (run / "checkpoint" / "state.safetensors").write_bytes(b"torn")


def of_others(run: Path) -> None:
    document = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**document, "weights_sha256": "0" * 64}))


def diverged(run: Path) -> None:
    directory = RunDirectory(run)
    state = directory.read_checkpoint()
    assert state is not None
    state["weights"]["classifier.bias"][3] = float("nan")
    directory.write_checkpoint(state)
    document = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**document, "weights_sha256": tree.sha256(state["weights"])}))


def empty(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()


@pytest.mark.parametrize(
    ("harm", "facts"),
    [
        (shutil.rmtree, ("no run",)),
        (empty, ("no run",)),
        (unfinished, ("2 of 2", "fedfill resume")),
        (without_checkpoint, ("0 of 2", "fedfill resume")),
        (torn, ("damaged",)),
        (of_others, ("summary.json", "checkpoint")),
        (diverged, ("NaN",)),
    ],
)
def test_folders_that_hold_no_finished_run(
    harm: Callable[[Path], None], facts: tuple[str, ...], made: Callable[[str], fedfill.Result], tmp_path: Path
) -> None:
    place = Path(shutil.copytree(made("fedavg").directory, tmp_path / "run"))
    harm(place)
    with refused("start_from", place, *facts):
        fedfill.run("fedavg", **SMALL, start_from=place, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


COLOUR = (np.zeros((400, 3, 8, 8), np.uint8), np.arange(400) % 10)
LARGE = (np.zeros((400, 1, 16, 16), np.uint8), np.arange(400) % 10)


@pytest.mark.parametrize(
    ("run", "options", "setting", "facts"),
    [
        ("fedbn", {}, "start_from", ("fedbn", "each client")),
        ("fedavg", {"algorithm": "fedbn"}, "start_from", ("fedbn", "normalisation layers")),
        ("mlp", {"algorithm": "feddpms"}, "model", ("decoder",)),
        ("fedavg", {"model": "mlp"}, "start_from", ("encoder.", "cnn2")),
        ("mlp", {"model": "cnn2"}, "start_from", ("encoder.", "mlp")),
        ("latent", {"model": "cnn2"}, "start_from", ("encoder.mu.weight", "[24, 128]", "[16, 128]")),
        ("fedavg", {"latent": 24}, "start_from", ("encoder.mu.weight", "[16, 128]", "[24, 128]")),
        ("fedavg", {"width": "wide"}, "start_from", ("encoder.trunk",)),
        ("moon", {"model": "cnn2", "projection": 7}, "start_from", ("projection.",)),
        ("fedavg", {"model": Net()}, "start_from", ("encoder.",)),
        ("own", {"model": "mlp"}, "start_from", ("first.weight",)),
        ("own", {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))}, "start_from", ("first.weight",)),
        ("fedavg", {"data": COLOUR}, "start_from", ("encoder.trunk.0.weight", "[16, 1, 3, 3]", "[16, 3, 3, 3]")),
        ("fedavg", {"data": LARGE}, "start_from", ("encoder.mu.weight",)),
        ("mlp", {"data": LARGE}, "start_from", ("[128, 64]", "[128, 256]")),
        ("fedavg", {"weights": "w.safetensors"}, "start_from", ("model.weights=w.safetensors",)),
        ("fedavg", {"latent": 0}, "latent", (0, "at least 1")),
    ],
)  # fmt: skip
def test_runs_that_do_not_fit(
    run: str, options: dict[str, Any], setting: str, facts: tuple[Any, ...], made: Callable[[str], fedfill.Result],
    tmp_path: Path,
) -> None:  # fmt: skip
    small = {**SMALL, "data_fraction": 1.0} if "data" in options else SMALL
    with refused(setting, *facts):
        fedfill.run(**{"algorithm": "fedavg", **small, **options}, start_from=made(run).directory, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_class_that_is_not_at_hand_is_known_by_its_weights_names(
    made: Callable[[str], fedfill.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Personal models are named `0.first.weight`; those of a Sequential `1.weight`, which are also the server's."""
    sequential = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    personal = fedfill.run(Personal, model="mlp", **SMALL, rounds=1, out=tmp_path / "personal")
    plain = fedfill.run("fedavg", model=sequential, **SMALL, rounds=1, out=tmp_path / "plain")
    monkeypatch.setattr("fedfill.experiment.start.lookup", {}.get)
    with refused("start_from", "personal-of-ones-own", "each client"):
        begun("fedavg", personal)
    assert equal(begun("fedavg", plain, model=sequential).initial, plain.weights)


def test_a_comparison_and_a_deployment(made: Callable[[str], fedfill.Result], tmp_path: Path) -> None:
    run = made("fedavg")
    fedfill.compare(
        ["fedavg", "fedprox"], seeds=[0], start_from=run.directory, rounds=1, **SMALL, out=tmp_path / "compare"
    )
    notes = [json.loads(path.read_text())["notes"] for path in (tmp_path / "compare").rglob("summary.json")]
    assert [any("The network begins" in text for text in said) for said in notes] == [True, True]
    pytest.importorskip("flwr")
    with refused("start_from", run.directory, "model.weights"):
        init_app(tmp_path / "app", "fedavg", start_from=run.directory)
    assert not (tmp_path / "app").exists()


def test_what_an_older_version_recorded_of_a_network_that_lacks_it_is_dropped() -> None:
    recorded = {"width": "paper", "latent": "none", "latent_activation": "sigmoid", "dropout": "none"}
    begun = {name: Start("old", {"model": name, "model_settings": recorded}, {}, "") for name in ("cnn2bn", "cnn2")}
    assert begun["cnn2bn"].network({}) == ("cnn2bn", ModelSettings())
    assert begun["cnn2"].network({}) == ("cnn2", ModelSettings(latent_activation="sigmoid"))
