"""Models of runs and of folders from strangers: read without the code that trained them, and never believed unchecked."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from tests.helpers import refused

import fedfill
from fedfill.models.features import FeatureMap

TINY: dict[str, Any] = {
    "clients": 2, "partition": "iid", "workers": 1, "data_fraction": 0.1, "rounds": 1, "local_epochs": 1, "model": "mlp",
}  # fmt: skip
WITH_RECORDS: dict[str, dict[str, Any]] = {
    "feddpms": {"rounds": 3, "model": "cnn2"},
    "fedmix": {},
    "fedzdac": {"rounds": 2, "model": "cnn2bn"},
    "fraug": {"model": "cnn2"},
    "naivemix": {},
}
"""Algorithms that keep records of classes of their own in the checkpoint."""

ALONE = """
import os, sys
import fedfill.studies.saved
assert not [name for name in sys.modules if name in sys.argv[1].split()], "an algorithm is imported before a run is read"
for run in sys.argv[2:]:
    if os.fork() == 0:  # so that no run is read after another one's algorithm was imported
        model = fedfill.studies.saved.saved_at(run)
        os._exit(0 if model.model(model.card["weights"][0].get("number")).class_names else 1)
    assert os.wait()[1] == 0, run
"""


def test_a_model_is_read_where_nothing_else_has_imported_its_algorithm(tmp_path: Path):
    for name, settings in WITH_RECORDS.items():
        fedfill.run(name, out=tmp_path / name, **{**TINY, **settings})
        held = (tmp_path / name / "checkpoint" / "state.safetensors").read_bytes()
        assert b'\\"record\\"' in held, name  # else it shows nothing
    modules = [f"fedfill.algorithms.{name}" for name in ("feddpms", "fedmix", "fedzda", "fraug", "naivemix")]
    runs = [str(tmp_path / name) for name in WITH_RECORDS]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, " ".join(modules), *runs], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported models: one of all, one of each client, one on a map of features."""
    folder = tmp_path_factory.mktemp("exports")
    for name, settings in {
        "fedavg": {},
        "local": {},
        "fed3r": {"model": "features", "features": "conv(4) > project(20)"},
    }.items():
        fedfill.export(fedfill.run(name, out=folder / "runs" / name, **{**TINY, **settings}), folder / name)
    return folder


@pytest.fixture
def model(exports: Path, tmp_path: Path) -> Path:
    """One of all, to be changed."""
    return Path(shutil.copytree(exports / "fedavg", tmp_path / "model"))


def edited(folder: Path, place: str, value: Any) -> None:
    """The card with a value at a place such as ``weights.0.file``; ... takes it out."""
    path = folder / "model.json"
    document = json.loads(path.read_text())
    *above, last = [int(word) if word.isdigit() else word for word in place.split(".")]
    table: Any = document
    for key in above:
        table = table[key]
    if value is ...:
        del table[last]
    else:
        table[last] = value
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "word", ["../x/model.safetensors", "/dev/zero", "clients/0.safetensors", "./model.safetensors", "", 5, None]
)
def test_weights_lie_nowhere_else_than_in_the_folder(model: Path, word: Any):
    edited(model, "weights.0.file", word)
    if isinstance(word, str) and word.startswith(".."):  # it would be read if it were looked for
        shutil.copytree(model, model.parent / "x")
    with refused("model", "model.json", "weights.0"):
        fedfill.load(model)


@pytest.mark.parametrize("name", ["model.safetensors", "model.json"])
def test_what_is_no_regular_file_is_not_read(model: Path, name: str):
    (model / name).unlink()
    os.mkfifo(model / name)  # nobody will ever write into it
    with refused("model"):
        fedfill.load(model)
    (model / name).unlink()
    (model / name).symlink_to("/dev/zero")  # which never ends
    with refused("model"):
        fedfill.load(model)


DAMAGED: dict[str, list[Any]] = {
    "network.name": [5, ["mlp"], "", None, "nothing"],
    "network.settings": [None, 3, [], {"width": "huge"}, {"strange": 1}],
    "network": [None, [], "mlp"],
    "inputs": [None, {}, []],
    "inputs.shape": [[], "8", [1.5, 8, 8], [True, 8, 8], [1, 10**12, 8], [1, 0, 8], [1, 8], [1, 4096, 4096 * 4]],
    "inputs.kind": ["table", "numbers", None],
    "inputs.dtype": ["float32", "int8", 1],
    "class_names": [None, {}, [], 5, "ab", [None] * 10, [[]] * 10, ["1"] * 10, [5] * 10, ["a", "b"]],
    "weights": [None, {}, [], [{}], [5]],
    "weights.0.sha256": [None, "", 5, ...],
    "format": [None, "1", 1.5, True, 0, 2, ...],
    "run": [None, [], ...],
    "privacy": [None, 5, ...],
}


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, values in DAMAGED.items() for value in values])
def test_a_damaged_card_is_told_in_one_sentence(model: Path, place: str, value: Any):
    edited(model, place, value)
    with refused("model", model):
        fedfill.load(model)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "", "nul", "[1]", '{"format": NaN}', "\x00", '{"format": ' + "9" * 5000 + "}"]
)
def test_a_card_that_is_none(model: Path, text: str):
    (model / "model.json").write_text(text)
    with refused("model", "model.json"):
        fedfill.load(model)


def test_cards_of_clients_and_of_features(exports: Path, tmp_path: Path):
    for field, value in (
        ("number", ...),
        ("client", ...),
        ("number", 1),
        ("number", -1),
        ("client", 5),
        ("number", True),
    ):
        folder = Path(shutil.copytree(exports / "local", tmp_path / f"{field}{value}"))
        edited(folder, f"weights.0.{field}", value)
        with refused("model", "model.json", "weights"):
            fedfill.load(folder, "0")
    for value in (..., {}, {"features": "conv(4) > project(21)"}):
        folder = Path(shutil.copytree(exports / "fed3r", tmp_path / f"features{value}"))
        edited(folder, "network.settings", value)
        with refused("model", folder):
            fedfill.load(folder)


def test_a_model_of_no_numbers_predicts_nothing(model: Path):
    images = np.zeros((600, 8, 8), np.uint8)
    assert len(fedfill.load(model).predict(images)) == 600
    weights = safetensors.torch.load_file(model / "model.safetensors")
    weights[next(name for name in weights if name.endswith("bias"))][0] = torch.nan
    data = safetensors.torch.save(weights)
    (model / "model.safetensors").write_bytes(data)
    edited(model, "weights.0.sha256", hashlib.sha256(data).hexdigest())
    for some in (images, images[:1]):
        with refused("model", f"{len(some)} of {len(some)} inputs"):
            fedfill.load(model).predict(some)


def test_an_input_of_no_numbers_is_not_the_models_fault(tmp_path: Path):
    inputs = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    run = fedfill.run(
        "fedavg", data=(inputs, np.arange(40) % 2), out=tmp_path / "run", **{**TINY, "data_fraction": 1.0}
    )
    found = copy.copy(inputs)
    found[7, 1] = np.nan
    with refused("data", "input 7"):
        fedfill.load(run).predict(found)


def test_a_model_of_one_class(tmp_path: Path):
    for k in range(12):
        for part in ("train", "test"):
            (tmp_path / "data" / part / "only").mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 20 * k).save(tmp_path / "data" / part / "only" / f"{k}.png")
    run = fedfill.run("fedavg", data=str(tmp_path / "data"), out=tmp_path / "run", **{**TINY, "data_fraction": 1.0})
    fedfill.export(run, tmp_path / "model")
    assert fedfill.predict(tmp_path / "model", tmp_path / "data" / "test").classes == ["only"] * 12


def test_a_map_of_features_is_loaded_without_its_first_centre(exports: Path, monkeypatch: pytest.MonkeyPatch):
    images = np.random.default_rng(0).integers(0, 256, (9, 8, 8), dtype=np.uint8)
    whole = fedfill.load(exports / "fed3r")
    centre = safetensors.torch.load_file(exports / "fed3r" / "model.safetensors")["encoder.centred.centre"]
    assert centre.abs().sum() > 0
    assert torch.equal(whole.state_dict()["network.encoder.centred.centre"], centre)
    # it is computed from hundreds of images, and the weights replace it
    monkeypatch.setattr(FeatureMap, "seeded_centre", lambda self: pytest.fail("the first centre was computed"))
    for place in (exports / "fed3r", exports / "runs" / "fed3r"):
        assert torch.equal(fedfill.load(place).predict(images).probabilities, whole.predict(images).probabilities)
