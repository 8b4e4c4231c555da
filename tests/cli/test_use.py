"""A trained model from the command line: written, and asked for predictions."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from PIL import Image
from tests.cli.calls import TINY, fedfill_, refused

from fedfill.cli import use
from fedfill.data import sources


@pytest.fixture
def images(elsewhere: Path) -> list[str]:
    """A run in a folder ``run``, and the files of some images."""
    assert fedfill_("run", "fedavg", *TINY, "--out", "run").exit_code == 0
    paths = []
    for k, image in enumerate(sources.load("digits").test.inputs[:3]):
        paths.append(f"{k}.png")
        Image.fromarray(image[0].numpy()).save(elsewhere / paths[-1])
    return paths


def test_from_a_run_to_predictions(elsewhere: Path, images: list[str]) -> None:
    made = fedfill_("export", "run", "--to", "model")
    assert made.exit_code == 0, made.output
    assert "fedavg on digits, 1 round, seed 0, accuracy 0." in made.stdout
    assert "Privacy: no differential-privacy guarantee." in made.stdout
    assert "Use it: fedfill predict model PATH" in made.stdout
    straight, found = fedfill_("predict", "run", *images), fedfill_("predict", "model", *images)
    assert found.exit_code == 0, found.output
    assert (found.stdout, found.stderr) == (straight.stdout, "")
    rows = list(csv.DictReader(found.stdout.splitlines()))
    assert [(row["file"], row["row"]) for row in rows] == [(name, "") for name in images]
    assert all(0.1 <= float(row["probability"]) <= 1 for row in rows)
    written = fedfill_("predict", "model", ".", "--out", "deep/found.csv", "--top", "2")
    assert "Written: deep/found.csv, 3 predictions" in written.stdout
    lines = list(csv.DictReader((elsewhere / "deep/found.csv").read_text().splitlines()))
    assert [row["rank"] for row in lines] == ["1", "2"] * 3
    assert [row["class"] for row in lines[::2]] == [row["class"] for row in rows]
    assert fedfill_("export", "run").exit_code == 0
    assert json.loads((elsewhere / "run/model/model.json").read_text())["run"]["algorithm"] == "fedavg"


def test_nothing_but_earlier_predictions_is_replaced(elsewhere: Path, images: list[str]) -> None:
    """Least of all what was read."""
    (elsewhere / "notes.csv").write_text("a,b\n1,2\n")
    refused(["predict", "run", *images, "--out", "notes.csv"], "out")
    (elsewhere / "theirs.csv").write_text("file,row,risk,median,mine\nscan,1,high,,keep\n")
    refused(["predict", "run", *images, "--out", "theirs.csv"], "out")
    before = (elsewhere / images[0]).read_bytes()
    refused(["predict", "run", *images, "--out", images[0]], "out")
    assert (elsewhere / images[0]).read_bytes() == before
    assert (elsewhere / "notes.csv").read_text() == "a,b\n1,2\n"
    for top in ("1", "2", "1"):
        assert fedfill_("predict", "run", *images, "--out", "found.csv", "--top", top).exit_code == 0


def test_a_note_does_not_disturb_what_is_piped(elsewhere: Path, images: list[str]) -> None:
    Image.new("L", (9, 9)).save(elsewhere / "large.png")
    found = fedfill_("predict", "run", *images, "large.png")
    assert found.stdout.count("\n") == 5
    assert "1 of 4 images had another size" in found.stderr


def test_a_table_for_the_eye(images: list[str], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import fedfill

    monkeypatch.setattr(use, "MOST_ROWS", 2)
    use._print_predictions(fedfill.predict("run", images), 1)
    text = capsys.readouterr().out
    assert "probability" in text
    assert "row " not in text.splitlines()[0] + text.splitlines()[1]
    assert [name in text for name in images] == [True, True, False]
    assert "1 more rows" in text


def test_slips(elsewhere: Path, images: list[str]) -> None:
    refused(["predict", "run", "missing.png"], "paths")
    refused(["predict", ".", *images], "model")
    refused(["predict", "run", *images, "--client", "0"], "client")
    refused(["predict", "run", *images, "--device", "tpu"], "device")
    refused(["predict", "run", *images, "--out", "run"], "out")
    refused(["export", "missing"], "export")
    refused(["export", "run", "--to", "."], "to")
    assert fedfill_("predict", "run").exit_code == 2
    assert fedfill_("predict", "run", *images, "--top", "0").exit_code == 2


def test_personal_models(elsewhere: Path, images: list[str]) -> None:
    assert fedfill_("run", "local", *TINY, "--out", "own").exit_code == 0
    made = fedfill_("export", "own")
    assert "models of 4 clients" in made.stdout
    assert "A client's own model was trained on its records" in " ".join(made.stdout.split())
    assert "Use it: fedfill predict own/model --client '0' PATH" in made.stdout
    assert "0, 1, 2, 3" in refused(["predict", "own/model", *images], "client")
    several = [fedfill_("predict", "own/model", *images, "--client", str(k)).stdout for k in range(4)]
    assert len(set(several)) == 4
