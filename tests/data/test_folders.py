"""Folders: a layout is told by where the files lie, and what can't be read is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.made import (
    COLOUR,
    GREY,
    KINDS,
    NAMES,
    brightness,
    encoded,
    rows,
    says,
    write,
    write_folder,
    write_shades,
)
from tests.helpers import refused

from fedfill.data import sources
from fedfill.data.sources import load


def test_image_folder_with_splits(tmp_path: Path) -> None:
    write_folder(tmp_path / "insects" / "train")
    write_folder(tmp_path / "insects" / "test", GREY[::-1])
    (tmp_path / "insects" / "train" / "ant" / "notes.txt").write_text("not an image")
    source = load("insects", tmp_path)
    order = np.argsort(KINDS, kind="stable")  # by class folder, then by file name
    np.testing.assert_array_equal(source.train.inputs[:, 0].numpy(), GREY[order])
    np.testing.assert_array_equal(source.test.inputs[:, 0].numpy(), GREY[::-1][order])
    assert source.train.labels.tolist() == sorted(KINDS.tolist())
    assert source.class_names == ("ant", "bee", "cat")


def test_image_folder_without_splits(tmp_path: Path) -> None:
    write_folder(tmp_path / "insects")
    source = load("insects", tmp_path)
    assert rows(source) == {(p.tobytes(), int(y)) for p, y in zip(GREY, KINDS, strict=True)}
    assert source.test.counts(3) == [1, 1, 1]
    assert "fifth" in source.note


def test_image_folder_of_jpegs(tmp_path: Path) -> None:
    write_folder(tmp_path / "insects" / "train", np.full((12, 8, 8, 3), 128, np.uint8), suffix="JPG")
    source = load("insects", tmp_path)
    assert source.train.inputs.shape[1:] == (3, 8, 8)
    assert (source.train.inputs.int() - 128).abs().max() <= 2


def test_broken_image_folders(tmp_path: Path) -> None:
    for name in "abc":
        write_folder(tmp_path / name / "train")
    broken = tmp_path / "a" / "train" / "bee" / "01.png"
    broken.write_bytes(broken.read_bytes()[:-30])
    for folder in ("b/train/dog", "c/test/dog", "d/train"):
        (tmp_path / folder).mkdir(parents=True)
    for place, fact in (
        ("a/train/bee/01.png", "cut short"),
        ("b/train/dog", "no images"),
        ("c/test/dog", "a class that the training images don't have"),
        ("d/train", "no class folders"),
    ):
        with refused("data") as caught:
            load(place[0], tmp_path)
        says(caught, f"{place}'", fact)


@pytest.mark.parametrize("within", ["data", "plain_text"])
def test_a_clone_of_a_hub_repository(tmp_path: Path, within: str) -> None:
    clone = tmp_path / "insects"
    write(clone / within / "train-00000-of-00001.parquet", GREY, KINDS, NAMES)
    write(clone / within / "test-00000-of-00001.parquet", GREY[:3], KINDS[:3], NAMES)
    (clone / "README.md").write_text("Insects")
    write(clone / ".git" / "train.parquet", COLOUR, KINDS)
    (clone / "assets").mkdir()
    (clone / "assets" / "bee.png").write_bytes(encoded(GREY[0]))
    source = load("insects", tmp_path)
    np.testing.assert_array_equal(source.train.inputs[:, 0].numpy(), GREY)
    assert (len(source.test), source.class_names, source.name) == (3, ("ant", "bee", "cat"), "insects")
    # what lies in the folder itself goes before what lies in a folder below
    write(clone / "train.parquet", GREY[:6], KINDS[:6], NAMES)
    write(clone / "test.parquet", GREY[:3], KINDS[:3], NAMES)
    sources._load.cache_clear()
    assert len(load("insects", tmp_path).train) == 6


def test_a_clone_with_several_configurations(tmp_path: Path) -> None:
    for count, within in ((12, "cropped"), (9, "full")):
        write(tmp_path / "insects" / within / "train.parquet", GREY[:count], KINDS[:count])
    with refused("data") as caught:
        load("insects", tmp_path)
    says(caught, "cropped, full", "--data cropped")
    full = load("full", tmp_path / "insects")
    assert len(full.train) + len(full.test) == 9
    # another data set below the data folder is never taken for one that isn't there
    with refused("data") as caught:
        load("inject", tmp_path)
    says(caught, "'inject'", "did you mean 'insects'")


def test_a_folder_of_pictures_among_data_sets_makes_no_classes_of_them(tmp_path: Path) -> None:
    write_folder(tmp_path / "insects")
    (tmp_path / "screens").mkdir()
    (tmp_path / "screens" / "a.png").write_bytes(encoded(GREY[0]))
    assert load("insects", tmp_path).class_names == ("ant", "bee", "cat")
    with refused("data") as caught:
        load("inserts", tmp_path)
    says(caught, "'inserts'", "did you mean 'insects'")
    # where there are classes alone, the data folder is the data set
    assert load("whatever", tmp_path / "insects").class_names == ("ant", "bee", "cat")


def test_class_folders_with_a_stray_one_beside_them_say_why_they_are_no_data_set(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(encoded(GREY[0]))
    (tmp_path / "runs").mkdir()
    with refused("data") as caught:
        load("pets", tmp_path)
    says(caught, "'pets' is unknown", "not each of its folders holds images")


def test_folders_that_nobody_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "insects")
    closed = tmp_path / "lost+found"
    closed.mkdir()
    write_folder(tmp_path / "open")
    (tmp_path / "open" / "dog").mkdir()
    iterdir = Path.iterdir

    def closed_to_us(self: Path) -> Any:
        if self in (closed, tmp_path / "open" / "dog"):
            raise PermissionError(13, "Permission denied", str(self))
        return iterdir(self)

    monkeypatch.setattr(Path, "iterdir", closed_to_us)  # nothing is closed to root, who may run the tests
    with refused("data") as caught:
        load("inserts", tmp_path)
    says(caught, "'inserts'", "did you mean 'insects'")
    assert load("insects", tmp_path).class_names == ("ant", "bee", "cat")
    for name, place in (("lost+found", "lost+found"), ("open", "open/dog")):
        with refused("data") as caught:
            load(name, tmp_path)
        says(caught, "Permission denied", f"{place}')")
    monkeypatch.setattr(Path, "iterdir", lambda self: closed_to_us(closed))
    with refused("data_dir") as caught:
        load("inserts", tmp_path)
    says(caught, "Permission denied")


# ---- domains


def test_image_folders_by_depth(tmp_path: Path) -> None:
    write_shades(tmp_path / "deep" / "sea", 0)
    write_shades(tmp_path / "deep" / "air", 100)
    write_shades(tmp_path / "flat", 0)
    source = load("deep", tmp_path)
    assert source.class_names == ("ant", "bee")
    assert brightness(source) == {
        "air": [*range(100, 105), *range(110, 115)],
        "sea": [*range(5), *range(10, 15)],
    }
    assert load("flat", tmp_path).domains is None
    # several data sets lie below a data folder: none of them is a domain of another name
    with refused("data") as caught:
        load("deap", tmp_path)
    says(caught, "'deap'", "did you mean 'deep'")


def test_image_folders_with_splits_and_a_class_that_a_domain_lacks(tmp_path: Path) -> None:
    write_shades(tmp_path / "d" / "train" / "sea", 0, labels=(1,))
    write_shades(tmp_path / "d" / "train" / "air", 100)
    write_shades(tmp_path / "d" / "test" / "sea", 200, each=1, labels=(1,))
    source = load("d", tmp_path)
    assert source.class_names == ("ant", "bee")
    assert brightness(source)["sea"] == [*range(5), 200]
    assert source.domains is not None
    assert set(source.train.labels[torch.from_numpy(source.domains.train == 1)].tolist()) == {1}
    write_shades(tmp_path / "d" / "test" / "moon", 0)
    sources._load.cache_clear()
    with refused("data") as caught:
        load("d", tmp_path)
    says(caught, "test/moon'", "a domain that the training images don't have")


@pytest.mark.parametrize(
    "names", [("Training", "Testing"), ("TRAIN", "Test"), ("photo", "Val"), ("test", "validation")]
)
def test_parts_of_a_data_set_are_no_domains(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        write_shades(tmp_path / "d" / name, 0)
    found = sorted(name for name in names if name != "photo")[0]
    with refused("data") as caught:
        load("d", tmp_path)
    says(caught, f"d/{found}'", "train and test")


def test_blanks_around_a_folder_s_name_make_no_other_domain(tmp_path: Path) -> None:
    write_shades(tmp_path / "d" / "train" / "sea ", 0)
    write_shades(tmp_path / "d" / "train" / "air", 50)
    write_shades(tmp_path / "d" / "test" / "sea", 100)
    source = load("d", tmp_path)
    assert source.domains is not None
    assert source.domains.names == ("air", "sea")
    assert brightness(source)["sea"] == [*range(5), *range(10, 15), *range(100, 105), *range(110, 115)]
    write_shades(tmp_path / "d" / "train" / "sea", 0)
    sources._load.cache_clear()
    with refused("data") as caught:
        load("d", tmp_path)
    says(caught, "train/sea'", "train/sea '", "blanks")
    write_shades(tmp_path / "e" / "Val ", 0)
    with refused("data") as caught:
        load("e", tmp_path)
    says(caught, "e/Val '", "train and test")


def test_image_folders_of_numbers_in_their_order(tmp_path: Path) -> None:
    for k, name in enumerate(("10", "9", "b", "a")):
        write_shades(tmp_path / "d" / name, 50 * k)
    source = load("d", tmp_path)
    assert source.domains is not None
    assert source.domains.names == ("9", "10", "a", "b")
    assert brightness(source)["10"] == [*range(5), *range(10, 15)]
