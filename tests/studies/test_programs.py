"""Programs for who has no fedfill: what the page says runs, with the model's own answers and nobody's samples inside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tests.helpers import refused

import fedfill
from fedfill.data import sources
from fedfill.studies import programs

PAGE = (Path(__file__).parents[2] / "docs" / "using-a-model.md").read_text()
TINY = {"clients": 3, "partition": "iid", "workers": 1, "rounds": 1, "local_epochs": 1}
ALONE = "import sys; sys.modules['fedfill'] = None\n"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with both programs."""
    run = fedfill.run("fedavg", out=tmp_path_factory.mktemp("run"), **{**TINY, "rounds": 2})
    pytest.importorskip("onnxscript")
    fedfill.export(run, pt2=True, onnx=True)
    return run.directory


def test_the_three_lines_of_the_page(digits: Path):
    (recipe,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in recipe.splitlines() if line]) == 3
    assert "fedfill" not in recipe
    inputs = sources.load("digits").test.inputs[:40]
    np.save(digits / "inputs.npy", inputs.numpy())
    code = [
        ALONE + recipe,
        "import numpy",
        "found = [model(torch.from_numpy(numpy.load('../inputs.npy'))[:n]).softmax(1).tolist() for n in (1, 40)]",
        "import json",
        "print(json.dumps([scores.shape[1], found]))",
    ]
    child = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], cwd=digits / "model", capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    classes, (one, all_of_them) = json.loads(child.stdout)
    expected = fedfill.load(digits).predict(inputs).probabilities
    assert classes == 10
    torch.testing.assert_close(torch.tensor(all_of_them), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(one), expected[:1], rtol=1e-5, atol=1e-6)


def test_onnx_gives_the_same(digits: Path):
    onnxruntime = pytest.importorskip("onnxruntime")
    inputs = sources.load("digits").test.inputs
    session = onnxruntime.InferenceSession(digits / "model" / "model.onnx", providers=["CPUExecutionProvider"])
    for n in (1, 50):
        (scores,) = session.run(None, {"inputs": inputs[:n].numpy()})
        expected = fedfill.load(digits)(inputs[:n]).detach()
        torch.testing.assert_close(torch.from_numpy(scores), expected, rtol=1e-4, atol=1e-4)


def test_the_card_says_how_they_were_compared(digits: Path):
    card = json.loads((digits / "model" / "model.json").read_text())
    assert [entry["file"] for entry in card["programs"]] == ["model.pt2", "model.onnx"]
    for entry in card["programs"]:
        assert (entry["compared_on"], entry["same_class"]) == (250, 250)
        assert 0 <= entry["largest_difference"] < 1e-5
        assert entry["input"] == "uint8 [n, 1, 8, 8]"


def test_no_sample_and_no_pickle_is_in_the_program(digits: Path):
    some = [image.numpy().tobytes() for image in sources.load("digits").test.inputs[:2]]
    assert not any(image in (digits / "model" / "model.onnx").read_bytes() for image in some)
    with zipfile.ZipFile(digits / "model" / "model.pt2") as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    assert not any(image in data for image in some for data in held.values())
    assert not any(
        b"PK\x03\x04" in data[:4] or data[:1] == b"\x80" for name, data in held.items() if "weight" not in name
    )


def test_a_table_in_its_own_units(tmp_path: Path):
    stream = np.random.default_rng(0)
    rows = pd.DataFrame({"age": stream.integers(20, 80, 90), "job": stream.choice(["cook", "vet"], 90)})
    (tmp_path / "people").mkdir()
    rows.assign(label=rows.age > 50).to_csv(tmp_path / "people" / "train.csv", index=False)
    run = fedfill.run("fedavg", data="people", data_dir=tmp_path, out=tmp_path / "run", **TINY)
    fedfill.export(run, pt2=True)
    program = torch.export.load(tmp_path / "run" / "model" / "model.pt2").module()
    raw = torch.tensor(
        [[row.age, row.job == "cook", row.job == "vet"] for row in rows.itertuples()], dtype=torch.float64
    )
    expected = fedfill.load(run).predict(rows).probabilities
    torch.testing.assert_close(program(raw).softmax(1), expected, rtol=1e-4, atol=1e-5)


def test_what_stands_in_the_way(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Wilful(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flatten(1)) if float(x.sum()) > -1e9 else x

    images = np.random.default_rng(0).integers(0, 256, (60, 4, 4), dtype=np.uint8)
    data = (images, np.arange(60) % 2)
    net = Wilful(16, 2)
    run = fedfill.run("fedavg", data=data, model=net, out=tmp_path / "run", **TINY)
    with refused("pt2", "Python", "data="):
        fedfill.export(run, pt2=True, model=net)
    with refused("model", "Wilful"):
        fedfill.export(run, pt2=True, data=data)
    with refused("pt2", "Wilful"):
        fedfill.export(run, pt2=True, model=net, data=data)
    with refused("pt2", "[1, 5, 4]"):
        fedfill.export(run, pt2=True, model=net, data=(np.zeros((60, 5, 4), np.uint8), data[1]))
    assert not any((tmp_path / "run" / "model").glob("*"))
    before = sorted((digits / "model").iterdir())
    monkeypatch.setitem(programs.PACKAGES, "onnx", ("onnx", "no_such_package"))
    with refused("onnx", "no_such_package", "fedfill[onnx]"):
        fedfill.export(digits, onnx=True)
    monkeypatch.setattr(programs, "CLOSE", -1.0)
    with refused("pt2", "250 real samples"):
        fedfill.export(digits, pt2=True)
    assert sorted((digits / "model").iterdir()) == before
