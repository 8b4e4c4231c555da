"""A trained model in use: what is exported predicts what the run evaluated, and every slip gets a sentence."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.helpers import refused

import fedfill
from fedfill.data import sources
from fedfill.studies.model import Model

TINY = {"clients": 3, "partition": "classes:5", "workers": 1, "data_fraction": 0.3, "rounds": 1, "local_epochs": 1}
FEATURES = {"model": "features", "features": "conv(12) > project(40)"}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "images": ("fedavg", {}),
    "start": ("fedavg", {"start_from": "images", "seed": 1}),
    "head": ("fedavg", {"head": "ccvr"}),
    "features": ("fed3r", FEATURES),
    "quadratic": ("fedcgs", {"features": "conv(6) > project(12)", "covariance": "class"}),
    "projection": ("moon", {}),
    "decoder": ("feddpms", {}),
    "personal": ("fedbn", {}),
    "table": ("fedavg", {"data": "people", "partition": "iid", "data_fraction": 1.0, "rounds": 3}),
}
JOBS = ("cook", "vet", "pilot")


class Net(torch.nn.Module):
    """A network of one's own, in which two names stand for one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = torch.nn.Linear(64, 10)
        self.same = self.lines

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lines(x.flatten(1))


def people(n: int, seed: int) -> pd.DataFrame:
    """A table whose label follows from its columns, far from mean 0."""
    stream = np.random.default_rng(seed)
    age, job = stream.integers(20, 80, n), stream.choice(JOBS[:2], n)
    label = np.where(age + 20 * (job == "vet") > 60, "old", "young")
    return pd.DataFrame({"age": age, "job": job, "income": stream.normal(3e4, 5e3, n), "label": label})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs, each in a folder of its name, and the table that one of them has."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "people").mkdir()
    people(120, 0).to_csv(folder / "people" / "train.csv", index=False)
    people(60, 1).to_csv(folder / "people" / "test.csv", index=False)
    for name, (algorithm, settings) in RUNS.items():
        options = {**TINY, **settings}
        if "start_from" in options:
            options["start_from"] = folder / options["start_from"]
        fedfill.run(algorithm, out=folder / name, data_dir=folder, **options)
    return folder


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def accuracy(model: Model, name: str, place: Path) -> float:
    source = sources.load("people" if name == "table" else "digits", place)
    if name == "table":
        predicted = model.predict(place / "people" / "test.csv").indices
    else:
        predicted = model.predict(source.test.inputs).indices
    return float((predicted == source.test.labels).double().mean())


@pytest.mark.parametrize("name", RUNS)
def test_predicts_what_the_run_evaluated(place: Path, tmp_path: Path, name: str):
    exported = fedfill.export(place / name, tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "moved")
    clients = [entry.get("client") for entry in exported.card["weights"]]
    assert clients == (["0", "1", "2"] if name == "personal" else [None])
    for directory in (tmp_path / "moved", place / name):
        found = [accuracy(fedfill.load(directory, client), name, place) for client in clients]
        assert statistics.fmean(found) == pytest.approx(summary_of(place / name)["accuracy"], abs=1e-12)
        assert len(found) > 1 or found == [summary_of(place / name)["accuracy"]]


def test_the_card_and_the_weights(place: Path, tmp_path: Path):
    card = fedfill.export(place / "images", tmp_path / "model").card
    summary = summary_of(place / "images")
    held = load_file(tmp_path / "model" / "model.safetensors")
    assert {"encoder.trunk.0.weight", "encoder.mu.bias", "classifier.weight"} < held.keys()
    assert sum(tensor.numel() for tensor in held.values()) == card["weights"][0]["parameters"]
    text = (tmp_path / "model" / "model.json").read_text()
    assert json.loads(text) == card
    assert str(place) not in text
    assert card["class_names"] == [str(digit) for digit in range(10)]
    assert (card["inputs"]["kind"], card["inputs"]["shape"]) == ("images", [1, 8, 8])
    assert card["network"]["name"] == "cnn2"
    assert card["run"]["accuracy"] == summary["accuracy"]
    assert card["run"]["weights_sha256"] == summary["weights_sha256"]
    assert card["privacy"]["statement"] == summary["privacy"]["statement"]
    assert card["privacy"]["not_in_the_account"] == []


def test_what_training_alone_needs_is_left_out(place: Path):
    names = fedfill.load(place / "decoder").state_dict().keys()
    assert not [name for name in names if "decoder" in name or "logvar" in name]
    assert [name for name in fedfill.load(place / "projection").state_dict() if "projection" in name]


def test_the_account_says_what_it_leaves_out(place: Path, tmp_path: Path):
    def privacy(name: str) -> dict[str, Any]:
        found: dict[str, Any] = fedfill.export(place / name, tmp_path / name).card["privacy"]
        return found

    assert "began with another one's weights" in privacy("start")["statement"]
    assert "no guarantee is known for this model" in privacy("start")["statement"]
    (scaling,) = privacy("table")["not_in_the_account"]
    assert "means, deviations and words" in scaling
    (own,) = privacy("personal")["not_in_the_account"]
    assert "own model" in own


def test_a_guarantee_holds_for_the_model_but_not_for_a_clients_own(tmp_path: Path):
    for algorithm, holds in (("fed3r", True), ("pfed3r", False)):
        run = fedfill.run(algorithm, out=tmp_path / algorithm, **{**TINY, **FEATURES, "target_epsilon": 3.0})
        account, privacy = run.summary["privacy"], fedfill.export(run).card["privacy"]
        assert account["total_epsilon_added"] == pytest.approx(3, abs=0.01)
        expected = (account["total_epsilon"], account["total_epsilon_added"]) if holds else (None, None)
        assert (privacy["epsilon"], privacy["epsilon_added"]) == expected


def test_a_table_is_read_by_the_names_of_its_columns(place: Path, tmp_path: Path):
    model = fedfill.load(place / "table")
    rows = people(40, 2)
    source = sources.load("people", place)
    assert source.columns is not None
    raw = [[row.age, row.income, row.job == "cook", row.job == "vet"] for row in rows.itertuples()]
    expected = source.columns.scaled(torch.tensor(raw, dtype=torch.float64))
    turned = rows[["income", "label", "job", "age"]]
    turned.to_csv(tmp_path / "new.csv", index=False)
    pq.write_table(pa.Table.from_pandas(turned, preserve_index=False), tmp_path / "new.parquet")
    for data in (turned, rows.to_dict("list"), rows.to_dict("records"), tmp_path / "new.csv", tmp_path / "new.parquet"):
        assert torch.equal(model.preprocess(data), expected)
    found = model.predict(tmp_path)
    assert (len(found), found.notes) == (80, ())
    assert found.files == (str(tmp_path / "new.csv"),) * 40 + (str(tmp_path / "new.parquet"),) * 40
    assert found.rows == (*range(40), *range(40))
    torch.testing.assert_close(found.probabilities[:40], model(expected).softmax(1).detach(), rtol=0, atol=0)

    found = model.predict(rows.assign(job=["pilot"] * 3 + ["cook"] * 37, id=1))
    assert [str(fact) in "".join(found.notes) for fact in ("id", "'job'", "3 rows", "'pilot'")] == [True] * 4
    unknown = model.preprocess([{"age": 30, "income": 3e4, "job": "pilot"}])
    assert unknown[0, 2:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("lines", "facts"),
    [
        (["job,income", "cook,1"], ["'age'", "age"]),
        (["age,job,incom", "1,cook,1"], ["'income'", "'incom'"]),
        (["age,job,income", "one,cook,1"], ["'age'", "numbers"]),
        (["age,job,income", ",cook,1", "1,vet,1"], ["'age'", "1 empty cell"]),
        (["age,job,income"], ["no samples"]),
    ],
)
def test_a_table_that_does_not_fit(place: Path, tmp_path: Path, lines: list[str], facts: list[str]):
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n")
    with refused("data", "new.csv", *facts):
        fedfill.predict(place / "table", tmp_path / "new.csv")


def test_images_of_other_sizes_and_colours(place: Path, tmp_path: Path):
    model = fedfill.load(place / "images")
    (tmp_path / "b" / "deep").mkdir(parents=True)
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    Image.fromarray(grey).save(tmp_path / "a.png")
    Image.new("RGB", (20, 16), (200, 100, 0)).save(tmp_path / "b" / "deep" / "c.png")
    (tmp_path / "b" / ".hidden.png").write_text("no image")
    (tmp_path / "b" / "notes.txt").write_text("no image")
    found = model.predict([tmp_path])
    assert [Path(file).name for file in found.files] == ["a.png", "c.png"]
    assert found.rows == (None, None)
    inputs = model.preprocess([tmp_path / "a.png", tmp_path / "b"])
    # ITU-R 601: 0.299 * 200 + 0.587 * 100 = 118.5
    assert inputs[0, 0].tolist() == grey.tolist()
    assert set(inputs[1].flatten().tolist()) <= {118, 119}
    assert ["1 of 2 images" in note for note in found.notes] == [True, True]
    assert "8x8" in found.notes[0]
    assert "grey" in found.notes[1]
    pictures = [Image.open(tmp_path / "a.png"), Image.open(tmp_path / "b" / "deep" / "c.png")]
    assert torch.equal(model.preprocess(pictures), inputs)
    for array in (grey, grey[None], grey[..., None], torch.from_numpy(grey)[None, None], np.stack([grey] * 3, 2)):
        assert torch.equal(model.preprocess(array), inputs[:1])
    assert model.predict(np.stack([grey] * 2)).notes == ()
    assert torch.equal(model(inputs).softmax(1), found.probabilities)


def test_images_of_the_training_set_are_read_as_they_were(place: Path, tmp_path: Path):
    images = sources.load("digits").test.inputs[:3]
    encoded = []
    for k, image in enumerate(images):
        Image.fromarray(image[0].numpy()).save(tmp_path / f"{k}.png")
        encoded.append({"bytes": (tmp_path / f"{k}.png").read_bytes(), "path": None})
    (tmp_path / "p").mkdir()
    pq.write_table(pa.table({"image": encoded, "label": [0, 1, 2]}), tmp_path / "p" / "test.parquet")
    model = fedfill.load(place / "images")
    assert torch.equal(model.preprocess(tmp_path / "p"), images)
    assert torch.equal(model.preprocess([tmp_path / f"{k}.png" for k in range(3)]), images)
    found = model.predict(tmp_path / "p" / "test.parquet")
    assert (found.rows, found.notes) == ((0, 1, 2), ())


def test_what_is_no_image(place: Path, tmp_path: Path):
    run = place / "images"
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.png").write_text("no image")
    (tmp_path / "rows.csv").write_text("a\n1\n")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "rows.parquet")
    Image.new("I;16", (8, 8)).save(tmp_path / "deep.png")
    for name, setting, facts in (
        ("empty", "paths", ["empty", "grey images of 8x8"]),
        ("missing.png", "paths", ["missing.png"]),
        ("rows.csv", "paths", ["rows.csv", "grey images of 8x8"]),
        ("broken.png", "data", ["broken.png"]),
        ("deep.png", "data", ["deep.png", "8-bit"]),
        ("rows.parquet", "data", ["rows.parquet", "'image'", "a"]),
    ):
        with refused(setting, *facts):
            fedfill.predict(run, tmp_path / name)
    with refused("paths", "photo.png", "table"):
        (tmp_path / "photo.png").write_bytes(b"")
        fedfill.predict(place / "table", tmp_path / "photo.png")
    with refused("paths"):
        fedfill.predict(run, [])
    model = fedfill.load(run)
    for wrong in (np.zeros((8, 8)), 3, [], np.zeros((1, 2, 8, 8), np.uint8)):
        with refused("data"):
            model.predict(wrong)
    with refused("data", "DataFrame"):
        fedfill.load(place / "table").predict(np.zeros((2, 4)))


def test_predictions(place: Path):
    found = fedfill.load(place / "images").predict(sources.load("digits").test.inputs[:7])
    torch.testing.assert_close(found.probabilities.sum(1), torch.ones(7))
    assert found.classes == [str(c) for c in found.probabilities.argmax(1).tolist()]
    for best, row in zip(found.top(3), found.probabilities.tolist(), strict=True):
        assert [p for _, p in best] == sorted(row, reverse=True)[:3]
        assert all(row[int(name)] == p for name, p in best)
    assert len(found.top(99)[0]) == 10
    lines = found.to_csv(2).splitlines()
    assert lines[0] == "file,row,rank,class,probability"
    assert len(lines) == 15
    assert lines[1].startswith(f",0,1,{found.classes[0]},")


def test_a_client_by_number_or_domain(place: Path, tmp_path: Path):
    run = place / "personal"
    for wrong in (None, "3", "0 a"):
        with refused("client", "0, 1, 2"):
            fedfill.load(run, wrong)
    with refused("client", "'1'", "one model for all"):
        fedfill.load(place / "images", "1")
    assert fedfill.load(run, 1).client == "1"
    shutil.copytree(run, tmp_path / "run")
    division = json.loads((run / "partition.json").read_text())
    (tmp_path / "run" / "partition.json").write_text(json.dumps({**division, "domains": ["north", "south", "south"]}))
    fedfill.export(tmp_path / "run", tmp_path / "model")
    for directory in (tmp_path / "run", tmp_path / "model"):
        assert fedfill.load(directory, "north").client == fedfill.load(directory, "0 north").client == "0 north"
        with refused("client", "2 clients", "1 south", "2 south"):
            fedfill.load(directory, "south")
    # a client called by another's number: a number is a number, a text a name, and a number again where nobody is called so
    (tmp_path / "run" / "partition.json").write_text(json.dumps({**division, "domains": ["1", "0", "x"]}))
    for client, number in ((0, 0), (1, 1), (np.int64(1), 1), ("0", 1), ("1", 0), ("2", 2), ("1 0", 1)):
        assert fedfill.load(tmp_path / "run", client).client == f"{number} {('1', '0', 'x')[number]}"
    for client in (3, -1, True, 1.0):
        with refused("client", repr(client), "0 1"):
            fedfill.load(tmp_path / "run", client)  # type: ignore[arg-type]
    toml = tmp_path / "run" / "experiment.toml"
    toml.write_text(toml.read_text().replace('engine = "local"', 'engine = "flower"'))
    with refused("export", "fedbn", "stay with their hosts"):
        fedfill.export(tmp_path / "run")


def test_a_network_of_ones_own(tmp_path: Path):
    images = sources.load("digits").test.inputs
    net = Net()
    before = net.lines.weight.clone()
    run = fedfill.run("fedavg", out=tmp_path / "run", **{**TINY, "model": net})
    exported = fedfill.export(run, tmp_path / "model")
    assert exported.card["network"] == {"name": "python", "class": "Net"}
    model = fedfill.load(tmp_path / "model", model=net)
    assert (model.predict(images).indices == sources.load("digits").test.labels).double().mean() == run.summary[
        "accuracy"
    ]
    assert torch.equal(net.lines.weight, before)
    with refused("model", "Net"):
        fedfill.load(tmp_path / "model")
    with refused("model", "Linear"):
        fedfill.load(tmp_path / "model", model=torch.nn.Linear(2, 2))


def test_numbers_from_python(tmp_path: Path):
    stream = np.random.default_rng(0)
    labels = np.arange(120) % 2
    inputs = (stream.normal(size=(120, 5)) + 3 * labels[:, None]).astype(np.float32)
    run = fedfill.run("fedavg", data=(inputs, labels), out=tmp_path / "run", **{**TINY, "partition": "iid"})
    model = fedfill.load(run)
    assert model.predict(inputs).classes == [model.predict(row).classes[0] for row in inputs]
    with refused("paths", "model.predict"):
        model.predict("inputs.csv")
    with refused("data", "[5]"):
        model.predict(inputs[:, :4])


def test_a_model_that_was_changed_or_is_of_tomorrow(place: Path, tmp_path: Path):
    folder = tmp_path / "model"
    fedfill.export(place / "images", folder)
    whole, card = (folder / "model.safetensors").read_bytes(), json.loads((folder / "model.json").read_text())
    for data in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        (folder / "model.safetensors").write_bytes(data)
        with refused("model", "model.safetensors"):
            fedfill.load(folder)
    (folder / "model.safetensors").unlink()
    with refused("model", "model.safetensors"):
        fedfill.load(folder)
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "model.json").write_text(json.dumps({**card, "format": 2, "fedfill": "9.1"}))
    with refused("model", "9.1", "fedfill 0."):
        fedfill.load(folder)
    for text in ("{", "[]", "{}", json.dumps({**card, "weights": []}), json.dumps({**card, "inputs": {}})):
        (folder / "model.json").write_text(text)
        with refused("model", "model.json"):
            fedfill.load(folder)
    (folder / "model.json").write_text(json.dumps({**card, "network": {**card["network"], "name": "cnn3"}}))
    with refused("model", "cnn3"):
        fedfill.load(folder)


def test_features_that_are_drawn_otherwise_are_refused(place: Path, tmp_path: Path):
    card = fedfill.export(place / "features", tmp_path / "model").card
    assert card["network"]["settings"]["features_seed"] == 0
    card["network"]["settings"]["features_seed"] = 1
    (tmp_path / "model" / "model.json").write_text(json.dumps(card))
    with refused("model", "features_seed 1"):
        fedfill.load(tmp_path / "model")


def test_what_is_no_model(place: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    for name, fact in (("missing", "nothing"), ("file", "a file"), (".", "no model")):
        with refused("model", fact):
            fedfill.load(tmp_path / name)
    shutil.copytree(place / "images", tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    for use, setting in ((fedfill.load, "model"), (fedfill.export, "export")):
        with refused(setting, "1 of 1 rounds", "fedfill resume"):
            use(tmp_path / "run")


def test_where_an_export_may_lie(place: Path, tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    first = fedfill.export(place / "images", folder)
    (folder / "model.pt2").write_text("of before")
    (folder / ".export-killed").mkdir()
    again = fedfill.export(place / "images", folder)
    assert first == again
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "model.safetensors"]
    before = (folder / "model.json").read_bytes()
    with refused("to", "another run", "fedavg on digits"):
        fedfill.export(place / "features", folder)
    (folder / "mine.txt").write_text("mine")
    with refused("to", "mine.txt"):
        fedfill.export(place / "images", folder)
    assert (folder / "model.json").read_bytes() == before
    with refused("to", "a file"):
        fedfill.export(place / "images", folder / "mine.txt")
    with refused("to", "can't write", "mine.txt"):
        fedfill.export(place / "images", folder / "mine.txt" / "below")


def test_a_run_from_before_there_was_a_record_of_inputs(place: Path, tmp_path: Path):
    for name in ("images", "table"):
        shutil.copytree(place / name, tmp_path / name)
        path = tmp_path / name / "partition.json"
        division = json.loads(path.read_text())
        wanted = division.pop("inputs")
        path.write_text(json.dumps(division))
        assert fedfill.export(tmp_path / name, data_dir=place).card["inputs"] == wanted
