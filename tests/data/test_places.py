"""Data that are named by where they lie: a folder or a table just works, and one line says what was found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.data.made import COLOUR, GREY, KINDS, NAMES, write, write_folder
from tests.helpers import refused

from fedfill.data.names import is_place, unknown
from fedfill.data.schema import from_document
from fedfill.data.sources import load


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDFILL_DATA", raising=False)
    return tmp_path


def test_which_words_are_places() -> None:
    assert all(map(is_place, ("./photos", "/data/photos", "~/photos", "a/b", "..", ".")))
    assert not any(map(is_place, ("", "digits", "photos", "people.csv")))
    Path("people.csv").write_text("a,label\n")
    assert not is_place("people.csv")  # it may be one of the data folder
    assert "'./people.csv'" in str(unknown("people.csv"))


def test_a_folder_by_its_path(here: Path) -> None:
    write_folder(here / "digits" / "train")  # a name that is known is a place all the same where it is a path
    write_folder(here / "digits" / "test", GREY[::-1])
    for name in ("./digits", str(here / "digits")):
        source = load(name)
        assert source.class_names == ("ant", "bee", "cat")
        said = f"Found in '{here / 'digits'}': 24 grey images of 4x5 pixels, 3 classes (ant, bee, cat); 12 for training and 12 as the test set."
        assert source.note.startswith(said)
        assert "fifth" not in source.note
    assert load("digits").class_names[0] == "0"
    assert load("./digits", size=8).train.inputs.shape[1:] == (1, 8, 8)
    assert load("./digits", here).name == "digits"  # a data folder beside it is not asked


def test_what_was_cut_off_as_a_test_set_is_said(here: Path) -> None:
    write_folder(here / "photos", COLOUR)
    note = load("./photos").note
    assert "12 colour images of 4x5 pixels" in note
    assert "9 for training and 3 as the test set." in note
    assert "fifth" in note


def test_parquet_and_tables_by_their_path(here: Path) -> None:
    (here / "set").mkdir()
    write(here / "set" / "train.parquet", GREY, KINDS, NAMES)
    assert "12 grey images" in load("set/").note
    rng = np.random.default_rng(0)
    lines = [f"{rng.normal():.3f},{rng.normal():.3f},{'no' if k % 2 else 'yes'}" for k in range(20)]
    (here / "people.csv").write_text("\n".join(["age,height,label", *lines]) + "\n")
    for name in ("./people.csv", str(here / "people.csv")):
        source = load(name)
        assert "20 rows of 2 numbers, 2 classes (no, yes); 16 for training and 4 as the test set." in source.note


def test_what_is_to_be_told_is_named(here: Path) -> None:
    (here / "people.csv").write_text("age,stay,event\n" + "".join(f"{k},{k / 2},{k % 2}\n" for k in range(40)))
    columns = {"age": {"kind": "real", "low": 0, "high": 50}}
    for target, told in (
        ({"column": "stay", "kind": "number", "low": 0, "high": 50}, "the number 'stay' to be told;"),
        (
            {"column": "stay", "kind": "survival", "event": "event", "grid": [5, 10, 15]},
            "times to 'event' on a grid of 3;",
        ),
    ):
        schema = from_document({"target": target, "columns": columns}, "x")
        assert told in load("./people.csv", schema=schema).note


def test_a_table_without_a_label_or_in_another_code_is_refused_with_what_helps(here: Path) -> None:
    (here / "people.csv").write_text("Age,died\n1,a\n2,b\n")
    with refused("data", "'label'", "schema_file"):
        load("./people.csv")
    document = {
        "target": {"column": "died", "values": ["a", "b"]},
        "columns": {"age": {"kind": "real", "low": 0, "high": 9}},
    }
    schema = from_document(document, "x")
    with refused("data", "'age'", "did you mean 'Age'?"):
        load("./people.csv", schema=schema)
    (here / "people.csv").write_bytes("age,died\n1,ä\n2,b\n".encode("latin-1"))
    with refused("data", "people.csv", "UTF-8"):
        load("./people.csv", schema=schema)


def test_domains_are_named(here: Path) -> None:
    for domain in ("hospital", "clinic"):
        write_folder(here / "scans" / domain)
    assert "2 domains (clinic, hospital)" in load("./scans").note


def test_what_is_not_there(here: Path) -> None:
    with refused("data", here / "nowhere", "no such folder"):
        load("./nowhere")
    (here / "text.txt").write_text("x")
    with refused("data", "text.txt", "another kind"):
        load("./text.txt")
    (here / "photos").mkdir()
    with refused("data", "photos", "./photos"):
        load("photos")
    assert "did you mean 'mnist'" in str(unknown("minst"))
