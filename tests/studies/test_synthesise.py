"""A run's synthetic samples as a file: made, pictured, trained on, added to clients' data, and measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.helpers import TINY_GAN, refused

import fedfill
from fedfill.algorithms.feddpgan import FedDPGAN
from fedfill.data.samples import Samples
from fedfill.data.synthetic import read
from fedfill.runs.directory import read_toml
from fedfill.studies import assess as assessment
from fedfill.studies.measure import measure
from fedfill.studies.synthesise import synthesise

TINY = {"clients": 3, "partition": "classes:5", "workers": 1, "batch_size": 32, "data_fraction": 0.3, "local_steps": 2}
RUNS = {
    "zda": ("fedzdac", {"model": "cnn2bn", "start_round": 1, "images_per_class": 4, "inversion_steps": 3}),
    "gan": ("feddpgan", {**TINY_GAN, "images_per_class": 3}),
    "pool": ("sdafl-ac", {**TINY_GAN, "images_per_client": 12, "server_steps": 0}),
    "plain": ("fedavg", {}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs, and a file of one of them."""
    folder = tmp_path_factory.mktemp("runs")
    for name, (algorithm, settings) in RUNS.items():
        fedfill.run(algorithm, out=folder / name, rounds=2, **{**TINY, **settings})
    synthesise(folder / "gan", out=folder / "made.safetensors", per_class=6)
    return folder


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessment, "STEPS", 3)
    monkeypatch.setattr(assessment, "DRAWS", 2)


@pytest.mark.parametrize("name", ["zda", "gan"])
def test_so_many_of_each_class(place: Path, tmp_path: Path, name: str):
    found = synthesise(place / name, out=tmp_path / "deep" / "made.safetensors", per_class=7)
    held = read(found.path)
    assert held.samples.counts(10) == [7] * 10
    assert torch.equal(held.samples.inputs, found.samples.inputs)
    summary = json.loads((place / name / "summary.json").read_text())
    origin = held.origin
    assert (origin.algorithm, origin.data, origin.seed) == (RUNS[name][0], "digits", 0)
    assert (origin.per_class, origin.version) == (7, fedfill.__version__)
    assert origin.privacy == summary["privacy"]["statement"]
    assert (origin.epsilon, origin.delta) == (None, 1e-5)
    assert origin.guarantee == "no differential-privacy guarantee"
    assert origin.digest in (place / name / "experiment.toml").read_text()
    assert str(tmp_path).encode() not in found.path.read_bytes()
    assert str(place).encode() not in found.path.read_bytes()
    assert sorted(path.name for path in found.path.parent.iterdir()) == ["made.png", "made.safetensors"]


def test_a_fixed_set_gives_what_it_has(place: Path, tmp_path: Path):
    found = synthesise(place / "pool", out=tmp_path / "made.safetensors", per_class=100)
    assert len(found.samples) == 3 * 12
    few = synthesise(place / "pool", out=tmp_path / "few.safetensors", per_class=1)
    assert set(few.samples.counts(10)) <= {0, 1}


def test_the_same_again_is_left_and_anything_else_is_never_lost(place: Path, tmp_path: Path):
    path = tmp_path / "made.safetensors"
    synthesise(place / "gan", out=path, per_class=6)
    assert path.read_bytes() == (place / "made.safetensors").read_bytes()
    before = path.stat().st_mtime_ns
    synthesise(place / "gan", out=path, per_class=6)
    assert path.stat().st_mtime_ns == before
    with refused("out", path, "something else"):
        synthesise(place / "gan", out=path, per_class=5)
    assert path.read_bytes() == (place / "made.safetensors").read_bytes()


def test_a_foreign_picture_is_never_lost(place: Path, tmp_path: Path):
    path, picture = tmp_path / "made.safetensors", tmp_path / "made.png"
    picture.write_bytes(b"somebody's holidays")
    with refused("out", picture, "something else"):
        synthesise(place / "gan", out=path, per_class=6)
    assert picture.read_bytes() == b"somebody's holidays"
    assert not path.exists()
    picture.unlink()
    synthesise(place / "gan", out=path, per_class=6)
    before = picture.stat().st_mtime_ns
    synthesise(place / "gan", out=path, per_class=6)
    assert picture.stat().st_mtime_ns == before


def test_the_picture_has_the_nearest_images_below(place: Path, tmp_path: Path):
    plain = synthesise(place / "gan", out=tmp_path / "a.safetensors", per_class=6)
    beside = synthesise(place / "gan", out=tmp_path / "b.safetensors", per_class=6, against="digits")
    itself = synthesise(place / "gan", out=tmp_path / "c.safetensors", per_class=6, against=plain.path)
    assert plain.path.read_bytes() == beside.path.read_bytes() == itself.path.read_bytes()
    heights = []
    for found in (plain, beside, itself):
        assert found.picture is not None
        with Image.open(found.picture) as picture:
            heights.append(picture.height)
    assert heights[0] * 1.8 < heights[1] == heights[2]
    assert beside.picture is not None
    assert itself.picture is not None
    assert beside.picture.read_bytes() != itself.picture.read_bytes()


@pytest.mark.parametrize(
    ("run", "options", "setting", "facts"),
    [
        ("plain", {}, "synthesise", ("run of fedavg", "features", "feddpgan", "fedvae", "fedzdac")),
        ("nowhere", {}, "synthesise", ("nowhere", "experiment.toml")),
        ("gan", {"per_class": 0}, "per_class", ("found 0", "from 1 to 100000")),
        ("gan", {"per_class": 10**9}, "per_class", ("found 1000000000", "100000")),
        ("gan", {"per_class": 2.5}, "per_class", ("found 2.5",)),
        ("gan", {"out": "made.npz"}, "out", ("made.npz", ".safetensors")),
        ("gan", {"against": "digit"}, "against", ("'digit'", "digits")),
        ("gan", {"against": "large"}, "against", ("[1, 12, 12]", "[1, 8, 8]")),
    ],
)
def test_slips(place: Path, tmp_path: Path, run: str, options: dict[str, object], setting: str, facts: tuple[str, ...]):
    if options.get("against") == "large":
        for name in "ab":
            (tmp_path / "large" / name).mkdir(parents=True)
            for k in range(5):
                Image.new("L", (12, 12), 40 * k).save(tmp_path / "large" / name / f"{k}.png")
        options = {**options, "against": tmp_path / "large"}
    out = tmp_path / "out" / str(options.get("out", "made.safetensors"))
    with refused(setting, *facts):
        synthesise(place / run, **{**options, "out": out})
    assert not (tmp_path / "out").exists()


def test_features_are_no_samples(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    features = Samples(torch.zeros(10, 5), torch.arange(10))
    monkeypatch.setattr(FedDPGAN, "synthetic", lambda self, server, per_class=None: features)
    for work, setting in ((synthesise, "synthesise"), (measure, "measure")):
        with refused(setting, "feddpgan", "torch.float32 of shape [5]", "torch.uint8 of shape [1, 8, 8]"):
            work(place / "gan", out=tmp_path / "made.safetensors")
    assert not list(tmp_path.iterdir())


# ---- what it is good for


def test_train_on_synthetic_and_test_on_real(place: Path, tmp_path: Path):
    options = {**TINY, "data_fraction": 1.0, "partition": "iid", "client_test": 0.0, "rounds": 1}
    result = fedfill.run("central", data=str(place / "made.safetensors"), out=tmp_path / "run", **options)
    assert result.summary["dataset"].endswith("made.safetensors")
    assert any("60 synthetic samples of made.safetensors" in note for note in result.summary["notes"])
    assert len(json.loads((tmp_path / "run/partition.json").read_text())["clients"]) == 3
    assert fedfill.resume(tmp_path / "run").was_finished
    # a file that a run on a file made is tested on the same real test set, and says so
    fedfill.run("feddpgan", data=str(place / "made.safetensors"), out=tmp_path / "second", **{**options, **TINY_GAN})
    second = synthesise(tmp_path / "second", out=tmp_path / "second.safetensors", per_class=2)
    assert second.origin.data == "digits"
    assert "trained on synthetic samples (feddpgan on digits" in second.origin.privacy


def test_extra_data_for_any_algorithm_on_any_number_of_workers(place: Path, tmp_path: Path):
    extra, options = str(place / "made.safetensors"), {**TINY, "rounds": 1, "local_steps": None, "local_epochs": 1}
    plain = fedfill.run("fedprox", out=tmp_path / "plain", **options)
    more = fedfill.run("fedprox", out=tmp_path / "more", extra=extra, **options)
    assert more.summary["train_samples"] == plain.summary["train_samples"] + 3 * 60
    assert more.summary["weights_sha256"] != plain.summary["weights_sha256"]
    assert any(note.startswith("Extra: 60 samples of made.safetensors") for note in more.summary["notes"])
    assert "extra" not in (tmp_path / "plain/experiment.toml").read_text()
    assert f'extra = "{extra}"' in (tmp_path / "more/experiment.toml").read_text()
    two = fedfill.run("fedprox", out=tmp_path / "two", extra=extra, **{**options, "workers": 2})
    assert two.summary["weights_sha256"] == more.summary["weights_sha256"]
    pooled = fedfill.run("central", out=tmp_path / "central", extra=extra, **options)
    assert pooled.summary["train_samples"] == plain.summary["train_samples"] + 60


def test_extra_data_may_move_and_not_change(place: Path, tmp_path: Path):
    first = tmp_path / "first.safetensors"
    first.write_bytes((place / "made.safetensors").read_bytes())
    options = {**TINY, "rounds": 1}
    fedfill.run("fedavg", out=tmp_path / "run", extra=first, **options)
    moved = first.rename(tmp_path / "moved.safetensors")
    with refused("extra", first, "found no file"):
        fedfill.resume(tmp_path / "run")
    assert fedfill.resume(tmp_path / "run", extra=moved).was_finished
    assert fedfill.resume(tmp_path / "run", extra=moved, rounds=2).summary["rounds"] == 2
    synthesise(place / "gan", out=tmp_path / "other.safetensors", per_class=5)
    with refused("resume", "not the ones"):
        fedfill.resume(tmp_path / "run", extra=tmp_path / "other.safetensors")
    with refused("extra", moved, "engine=flower", "local or ray"):
        fedfill.run("fedavg", out=tmp_path / "flower", extra=moved, engine="flower", **{**options, "workers": None})


def test_a_file_and_its_run_measured_with_so_many_have_the_same_figures(place: Path, tmp_path: Path):
    of_file = measure(place / "made.safetensors", out=tmp_path / "file").document
    of_run = measure(place / "gan", per_class=6, out=tmp_path / "run").document
    for name in ("samples", "balance", "trained_on"):
        assert of_file[name] == of_run[name]
    assert of_file["oracle"] is None
    assert of_file["accuracy"] is None
    assert of_run["accuracy"] is not None
    assert of_file["algorithm"] == "feddpgan"
    free = of_file["data_free"]
    for name in (
        "frechet",
        "frechet_floor",
        "precision",
        "recall",
        "real_precision",
        "real_recall",
        "nearer_to_training",
    ):
        assert free[name]["low"] <= free[name]["value"] <= free[name]["high"], name
    assert free["frechet"]["value"] > free["frechet_floor"]["value"]
    learnt = of_file["trained_on"]
    assert (learnt["network"], learnt["steps"], learnt["synthetic"]["samples"]) == ("cnn2", 3, 60)
    assert "real" not in learnt
    for folder in ("file", "run"):
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == [
            "measures.json",
            "measures.png",
            "measures.svg",
        ]
    with refused("per_class", "made.safetensors"):
        measure(place / "made.safetensors", per_class=3)


def test_the_ceiling_is_the_same_classifier_on_real_samples(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(assessment, "STEPS", 150)
    learnt = measure(place / "made.safetensors", ceiling=True, out=tmp_path).document["trained_on"]
    assert learnt["real"]["accuracy"]["value"] > 0.8
    assert learnt["synthetic"]["accuracy"]["value"] < 0.6  # of a generator that did three steps
    assert learnt["both"]["samples"] == learnt["real"]["samples"] + 60
    accuracy = learnt["real"]["accuracy"]
    assert accuracy["low"] < accuracy["value"] < accuracy["high"]


def test_extra_samples_are_not_taken_for_real_ones(place: Path, tmp_path: Path):
    """A run whose clients had the file beside their own did not copy what it is asked for again."""
    options = {**TINY, **TINY_GAN, "rounds": 2, "images_per_class": 3}
    fedfill.run("feddpgan", out=tmp_path / "run", extra=place / "made.safetensors", **options)
    plain = measure(place / "gan", per_class=6, out=tmp_path / "a").document
    found = measure(tmp_path / "run", per_class=6, out=tmp_path / "b").document
    assert found["nearest"]["real_median"] == plain["nearest"]["real_median"]
    made = synthesise(tmp_path / "run", out=tmp_path / "made.safetensors", per_class=2)
    assert "the samples of a file (feddpgan on digits" in made.origin.privacy
    assert "beside their own, whose account comes on top" in made.origin.privacy


@pytest.mark.parametrize(
    ("options", "told"),
    [({"target_epsilon": 5.0}, None), ({"target_epsilon": 5.0, "trust": "server"}, None), ({}, 4321)],
)
def test_what_has_noise_does_not_tell_the_seed_that_its_noise_follows_from(
    tmp_path: Path, options: dict[str, Any], told: int | None
):
    more = {"data": "digits", "data_fraction": 0.3, "clients": 2, "images_per_class": 5, "classifier_epochs": 1}
    fedfill.run("fedgauss", out=tmp_path / "run", seed=4321, **more, **options)
    made = synthesise(tmp_path / "run", out=tmp_path / "made.safetensors", per_class=2)
    model = fedfill.export(tmp_path / "run", to=tmp_path / "model")
    assert read(made.path).origin.seed == model.card["run"]["seed"] == told
    # the digest is a function of every record: whoever guesses them would know from it whether all are right
    digest = str(read_toml(tmp_path / "run" / "experiment.toml", "run")["digest"])
    assert read(made.path).origin.digest == model.card["run"]["digest"] == (None if told is None else digest)
    for path in (made.path, tmp_path / "model" / "model.json"):
        assert (b"4321" in path.read_bytes()) == (digest.encode() in path.read_bytes()) == (told is not None)
    assert fedfill.export(tmp_path / "run", to=tmp_path / "model") == model  # the same run, without its digest
    fitted = fedfill.export(
        fedfill.run("fedgauss", out=tmp_path / "all", test_fraction=0.0, client_test=0.0, **more, **options).directory,
        to=tmp_path / "of-all",
    )
    # where the test set is what was trained on, figures of it are of the records that noise protects
    assert ("accuracy" in fitted.card["run"]) == (told is not None)
    fedfill.run("fedgauss", out=tmp_path / "other", seed=8765, **more, **options)
    with refused("to", "another run"):
        fedfill.export(tmp_path / "other", to=tmp_path / "model")


def test_what_a_run_was_given_stands_in_its_own_account(place: Path, tmp_path: Path):
    """A guarantee for what a run sent says nothing of a file that was made of the same records before."""
    more = {"embedding": "fourier(50)", "generator_steps": 2, "generator_width": 8, "images_per_class": 5, "clients": 3}
    told = fedfill.run(
        "dpmerf", data="digits", target_epsilon=3.0, extra=place / "made.safetensors", out=tmp_path / "run", **more
    ).summary["privacy"]
    (sentence,) = told["not_in_the_account"]
    assert "the samples of a file (feddpgan on digits" in sentence
    assert told["statement"].endswith(sentence)
    made = synthesise(tmp_path / "run", out=tmp_path / "made.safetensors", per_class=2).origin
    assert (made.epsilon, made.epsilon_added) == (None, None)
    assert made.privacy.count("whose account comes on top") == 1
    assert made.guarantee == "no guarantee is known for these samples"
