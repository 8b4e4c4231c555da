"""Measuring a run: the figures are those of the images that the run's picture shows, and every slip is one sentence."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers import refused
from torch import nn
from typer.testing import CliRunner

import fedfill
from fedfill.cli import app
from fedfill.data import sources
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples, normalise
from fedfill.engines.runner import make_resident
from fedfill.experiment.loop import synthetic_images
from fedfill.runs.directory import RunDirectory
from fedfill.runs.pictures import image_grid
from fedfill.studies import assess as assessment
from fedfill.studies.assess import Real, assess, judged
from fedfill.studies.measure import measure, pseudo_labels
from fedfill.studies.run import reopen
from fedfill.synthesis.measures import recognised

CPU = torch.device("cpu")
TINY = {"clients": 4, "partition": "classes:5", "workers": 1, "model": "cnn2bn", "batch_size": 32}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long is tested on its own."""
    monkeypatch.setattr(assessment, "STEPS", 3)
    monkeypatch.setattr(assessment, "DRAWS", 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with synthetic images, an oracle, and runs that are neither."""
    place = tmp_path_factory.mktemp("made")
    augmented = {"start_round": 1, "images_per_class": 6, "inversion_steps": 8, "local_epochs": 1, "data_fraction": 0.5}
    fedfill.run("fedzdac", out=place / "zda", rounds=2, **augmented, **TINY)
    oracle = {"optimizer": "sgd", "learning_rate": 0.02, "local_epochs": 3}
    fedfill.run("central", out=place / "oracle", rounds=1, **oracle, **TINY)
    short = {"rounds": 1, "local_steps": 1, "data_fraction": 0.2}
    fedfill.run("local", out=place / "personal", **short, **TINY)
    fedfill.run("feddpms", out=place / "young", **short, **{**TINY, "model": "auto"})
    images = np.zeros((40, 8, 8), dtype=np.uint8), np.arange(40) % 10
    fedfill.run("fedavg", out=place / "python", data=images, **{**short, **TINY, "partition": "iid"})
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "runs"))


def test_the_command_measures_and_writes(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(place)
    result = CliRunner().invoke(app, ["measure", "zda", "--oracle", "oracle"])
    assert result.exit_code == 0, result.output
    found = json.loads((place / "zda/samples/measures.json").read_text())
    run, oracle = (json.loads((place / name / "summary.json").read_text()) for name in ("zda", "oracle"))
    assert found["weights_sha256"] == run["weights_sha256"]
    assert found["accuracy_by_class"] == run["accuracy_by_class"]
    assert found["oracle"]["weights_sha256"] == oracle["weights_sha256"]
    assert found["oracle"]["accuracy"] == oracle["accuracy"]
    assert (found["samples"], found["unlabelled"]) == (60, 0)
    assert (found["balance"]["counts"], found["balance"]["labelled"]) == ([6] * 10, 1)
    assert found["balance"]["entropy"]["value"] == pytest.approx(1)
    assert found["recognised"]["value"] == pytest.approx(sum(found["recognised_by_class"]) / 10)
    assert found["frechet"]["features"] == "encoder of central on digits, d=128"
    assert found["frechet"]["samples"] == 60
    assert found["frechet"]["synthetic"]["value"] > found["frechet"]["test"] > 0
    assert found["nearest"]["median"]["value"] > found["nearest"]["real_median"] > 0
    intervals = [
        found["balance"]["entropy"], found["recognised"], found["frechet"]["synthetic"],
        *(found["nearest"][name] for name in ("median", "share_below")),
    ]  # fmt: skip
    assert all(one["low"] <= one["value"] <= one["high"] and one["n"] == 60 for one in intervals)
    assert found["notes"] == []
    with Image.open(place / "zda/samples/measures.png") as picture:
        assert picture.format == "PNG"

    text = " ".join(result.stdout.split())
    assert (
        f"all 60 {100 * found['recognised']['value']:.2f} {100 * oracle['accuracy']:.2f} {100 * run['accuracy']:.2f}"
        in text
    )
    assert "; encoder of central on digits, d=128." in text
    assert "Written: zda/samples/measures.json, measures.png" in text
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_the_images_are_those_of_the_runs_picture_and_the_judge_is_the_oracle(place: Path):
    directory = RunDirectory(place / "zda")
    run = reopen(directory)
    images = synthetic_images(run, directory, CPU)
    assert images is not None
    image_grid(images, run.federation.class_names, place / "again.png")
    assert (place / "again.png").read_bytes() == (place / "zda/samples/round-0002.png").read_bytes()

    judges = RunDirectory(place / "oracle")
    weights = judges.read_checkpoint()["weights"]
    oracle = make_resident(reopen(judges).model, CPU).load(weights).eval()
    by_class, overall = recognised(oracle, run.federation.test, 10)
    summary = judges.summary()
    assert overall is not None
    assert overall.value == pytest.approx(summary["accuracy"])
    assert by_class == pytest.approx(summary["accuracy_by_class"])
    document = measure(place / "zda", oracle=place / "oracle").document
    right = oracle(normalise(images.inputs)).argmax(1) == images.labels
    assert document["recognised"]["value"] == pytest.approx(right.double().mean().item())


def test_pseudo_labels_that_cannot_be_right_are_counted(tmp_path: Path):
    gans = {
        "gan_iterations": 2,
        "gan_width": 8,
        "images_per_client": 12,
        "server_steps": 0,
        "tau": 0.0,
        "local_steps": 1,
    }
    small = {**TINY, "clients": 5, "partition": "classes:2", "data_fraction": 0.2, "rounds": 2}
    fedfill.run("central", out=tmp_path / "oracle", local_steps=1, **small)
    result = fedfill.run("sdafl", out=tmp_path / "run", **gans, **small)
    found = measure(tmp_path / "run", oracle=tmp_path / "oracle").document["pseudo_labels"]
    held = [
        {c for c, n in enumerate(counts) if n}
        for counts in json.loads((tmp_path / "run/partition.json").read_text())["clients"]
    ]
    for record, entry in zip(result.rounds, found, strict=True):
        right = sum(record["labelled_by_owner"][str(i)][c] for i, classes in enumerate(held) for c in classes)
        assert entry == {"round": record["round"], "labelled": 1.0, "of_owners_classes": right / 60}
    assert 0 < min(entry["of_owners_classes"] for entry in found) < 1


def test_without_labels_and_with_unlabelled_samples_there_is_no_such_figure(made: Path):
    run = reopen(RunDirectory(made / "zda"))
    rounds = [{"round": 1, "labelled": 0.0, "labelled_by_owner": {"0": [0] * 10}}]
    assert pseudo_labels(rounds, run.federation) == [{"round": 1, "labelled": 0.0, "of_owners_classes": None}]
    assert pseudo_labels([{"round": 1}], run.federation) is None
    clients = [replace(client, unlabelled=client.train) for client in run.federation.clients]
    assert pseudo_labels(rounds, replace(run.federation, clients=clients)) is None


def test_another_folder_and_the_same_figures_again(place: Path):
    first = measure(place / "zda", oracle=place / "oracle", out=place / "deep/measures")
    assert sorted(path.name for path in first.directory.iterdir()) == ["measures.json", "measures.png", "measures.svg"]
    assert not (place / "zda/samples/measures.json").exists()
    again = measure(str(place / "zda"), oracle=str(place / "oracle"), device="cpu")
    assert again.document == first.document
    assert fedfill.resume(place / "zda").was_finished  # what was written does not make the folder another's


# ---- what is measured


class Bright(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.flatten(1).mean(1, keepdim=True)
        return torch.cat([-mean, mean, mean - 5], 1)


def test_unlabelled_images_are_counted_and_an_oracle_without_encoder_gives_no_distance(
    random_samples: Callable[..., Samples], make_federation: Callable[..., Federation]
):
    federation = make_federation([random_samples(20), random_samples(10, seed=1)], test=random_samples(12, seed=2))
    images = Samples(random_samples(5, seed=3).inputs, torch.tensor([0, 0, 1, -1, -1]))
    real = Real.of(federation)
    found = {**judged(images, real, Bright().eval(), "nobody", 0), **assess(images, real, 0)}
    assert (found["samples"], found["unlabelled"], found["balance"]["counts"]) == (5, 2, [2, 1, 0])
    assert found["recognised_by_class"][2] is None
    assert found["frechet"] is None
    assert found["notes"] == ["No Fréchet distance: the oracle's Bright has no part 'encoder'."]
    oracle = nn.Sequential()
    oracle.encoder, oracle.classifier = nn.Flatten(), nn.Linear(64, 3)
    one = judged(images[:1], real, oracle.eval(), "nobody", 0)
    assert one["notes"] == ["No Fréchet distance: it needs at least 2 synthetic and 2 real images."]
    many = judged(images, real, oracle.eval(), "nobody", 0)
    assert many["frechet"]["samples"] == 5
    assert many["notes"] == []


def test_training_images_as_synthetic_ones_are_unmasked(
    random_samples: Callable[..., Samples], make_federation: Callable[..., Federation]
):
    """All clients' training images are compared with, and none of the test images."""
    parts = [random_samples(20), random_samples(30, seed=1)]
    federation = make_federation(parts, test=random_samples(50, seed=2))
    oracle = nn.Sequential()
    oracle.encoder, oracle.classifier = nn.Flatten(), nn.Linear(64, 3)
    real, copied = Real.of(federation), parts[0] + parts[1]
    found = {**assess(copied, real, 0), **judged(copied, real, oracle.eval(), "nobody", 0)}
    assert found["exact_copies"] == {"count": 50, "first": list(range(20))}
    assert found["data_free"]["nearer_to_training"]["low"] > 0.9
    assert found["nearest"]["share_below"]["value"] == 1
    assert found["frechet"]["synthetic"]["value"] == pytest.approx(0, abs=1e-6)
    assert found["frechet"]["test"] > 1
    other = {**assess(federation.test, real, 0), **judged(federation.test, real, oracle.eval(), "nobody", 0)}
    assert other["exact_copies"] == {"count": 0, "first": []}
    assert other["data_free"]["nearer_to_training"]["high"] < 0.1
    assert other["nearest"]["share_below"]["value"] == pytest.approx(0.02, abs=0.011)
    assert other["frechet"]["synthetic"]["value"] == other["frechet"]["test"]


def test_copies_of_images_without_a_label_are_unmasked_too(
    random_samples: Callable[..., Samples], make_federation: Callable[..., Federation]
):
    """SDA-FL's generators are trained on them as well."""
    secret = random_samples(30, seed=1)
    federation = make_federation([random_samples(5)], test=random_samples(50, seed=2))
    clients = (replace(federation.clients[0], unlabelled=secret),)
    found = assess(secret, Real.of(replace(federation, clients=clients)), 0)
    assert found["exact_copies"]["count"] == 30
    assert found["nearest"]["share_below"]["value"] == 1


# ---- slips


@pytest.mark.parametrize(
    ("run", "oracle", "setting", "facts"),
    [
        ("nowhere", "oracle", "measure", ("nowhere", "no experiment.toml")),
        ("zda", "nowhere", "oracle", ("nowhere", "no experiment.toml")),
        ("oracle", "zda", "measure", ("run of central", "feddpms", "fedzdac")),
        ("personal", "oracle", "measure", ("run of local", "global")),
        ("zda", "personal", "oracle", ("run of local", "global")),
        ("python", "oracle", "measure", ("data of", "Python", "allowed: ")),
        ("zda", "python", "oracle", ("data of", "Python", "allowed: ")),
        ("young", "oracle", "measure", ("run of feddpms", "without synthetic images")),
        ("zda", "zda", "oracle", ("itself",)),
    ],
)  # fmt: skip
def test_slips(made: Path, run: str, oracle: str, setting: str, facts: tuple[str, ...]):
    before = sorted(made.rglob("*"))
    with refused(setting, made / (run if setting == "measure" else oracle), *facts) as raised:
        measure(made / run, oracle=made / oracle)
    assert "\n" not in str(raised.value)
    assert sorted(made.rglob("*")) == before


@pytest.mark.parametrize("per_class", [0, -1, 100_001, 10**15, 2.0, True])
def test_so_many_of_each_class_can_not_be_asked_for(made: Path, per_class: int):
    with refused("per_class", str(per_class), "from 1 to 100000"):
        measure(made / "zda", per_class=per_class)


@pytest.mark.parametrize(("which", "word"), [("zda", "measure"), ("oracle", "oracle")])
def test_unfinished_runs_deployments_and_other_versions(place: Path, which: str, word: str):
    def slips(*facts: object) -> None:
        with refused(word, place / which, *facts):
            measure(place / "zda", oracle=place / "oracle")

    summary = place / which / "summary.json"
    summary.rename(place / "summary.json")
    rounds = 2 if which == "zda" else 1
    slips(f"{rounds} of {rounds} rounds", f"'fedfill resume {place / which}'")
    (place / "summary.json").rename(summary)
    (place / which / "deployment.toml").touch()
    slips("deployment", "hosts")
    (place / which / "deployment.toml").unlink()
    settings = place / which / "experiment.toml"
    text = settings.read_text()
    settings.write_text(text.replace(f'version = "{fedfill.__version__}"', 'version = "0.0.1"'))
    slips("fedfill 0.0.1")
    settings.write_text(text.replace("batch_size = 32", "batch_size = 33"))
    slips("data", "model", "settings")


def write_images(folder: Path, side: int, seed: int, classes: str = "ab") -> None:
    """An image folder with a test split, of black and white noise."""
    rng = np.random.default_rng(seed)
    for split, n in (("train", 12), ("test", 4)):
        for name in classes:
            (folder / split / name).mkdir(parents=True)
            for k in range(n):
                pixels = rng.integers(0, 256, (side, side), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{k}.png")


@pytest.mark.parametrize(
    ("side", "seed", "classes", "facts"),
    [
        (12, 0, "ab", ("[1, 12, 12]", "torch.uint8", "[1, 8, 8]")),
        (8, 1, "ab", ("theirs", "ours")),
        (8, 0, "ac", ("theirs", "ours")),
        (8, 0, "ab", None),  # the same images under another name
    ],
)  # fmt: skip
def test_oracles_of_other_data(tmp_path: Path, side: int, seed: int, classes: str, facts: tuple[str, ...] | None):
    write_images(tmp_path / "ours", 8, 0)
    write_images(tmp_path / "theirs", side, seed, classes)
    options = {**TINY, "clients": 2, "partition": "iid", "rounds": 1, "local_steps": 1, "data_dir": tmp_path}
    small = {"images_per_class": 2, "inversion_steps": 1}
    fedfill.run("fedzdas", data="ours", out=tmp_path / "run", **small, **options)
    fedfill.run("central", data="theirs", out=tmp_path / "oracle", **options)
    if facts is None:
        moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
        sources._load.cache_clear()  # what was read a moment ago is not read again
        with refused("data_dir", tmp_path):
            measure(moved / "run", oracle=moved / "oracle")
        found = measure(moved / "run", oracle=moved / "oracle", data_dir=moved).document
        assert found["frechet"]["samples"] == 8  # 2 classes, 2 images, 2 clients: as many as there are test images
        return
    with refused("oracle", tmp_path / "oracle", *facts):
        measure(tmp_path / "run", oracle=tmp_path / "oracle")
    assert not (tmp_path / "run/samples/measures.json").exists()


def test_a_place_that_cannot_be_written(place: Path):
    (place / "file").touch()
    with refused("out", "can't write"):
        measure(place / "zda", oracle=place / "oracle", out=place / "file")
