"""Parquet: pixels, labels and domains are those that were written, shards belong together, and a broken file is named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from tests.data.made import (
    COLOUR,
    GREY,
    KINDS,
    NAMES,
    brightness,
    encoded,
    flat,
    rows,
    says,
    write,
)
from tests.helpers import refused

from fedfill.data import sources
from fedfill.data.dataset import OWN
from fedfill.data.sources import load


@pytest.mark.parametrize(("pixels", "channels"), [(GREY, 1), (COLOUR, 3)])
def test_parquet_pixels_and_names(tmp_path: Path, pixels: np.ndarray[Any, Any], channels: int) -> None:
    write(tmp_path / "insects" / "train.parquet", pixels[:9], KINDS[:9], NAMES)
    write(tmp_path / "insects" / "test.parquet", pixels[9:], KINDS[9:], NAMES)
    source = load("insects", tmp_path)
    expected = pixels.reshape(12, 4, 5, channels).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(source.train.inputs.numpy(), expected[:9])
    np.testing.assert_array_equal(source.test.inputs.numpy(), expected[9:])
    assert source.train.labels.tolist() == KINDS[:9].tolist()
    assert source.class_names == ("ant", "bee", "cat")
    assert source.name == "insects"
    assert source.train.inputs.is_contiguous()


def test_parquet_written_by_datasets(tmp_path: Path) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    data = datasets.Dataset.from_dict({"image": [Image.fromarray(p) for p in GREY], "label": KINDS}, features=features)
    (tmp_path / "insects").mkdir()
    data.to_parquet(str(tmp_path / "insects" / "train.parquet"))
    data.to_parquet(str(tmp_path / "insects" / "test.parquet"))
    source = load("insects", tmp_path)
    np.testing.assert_array_equal(source.train.inputs[:, 0].numpy(), GREY)
    assert source.class_names == ("ant", "bee", "cat")


def test_shards_are_read_in_order(tmp_path: Path) -> None:
    write(tmp_path / "train-00001-of-00002.parquet", GREY[5:], KINDS[5:], NAMES)
    write(tmp_path / "train-00000-of-00002.parquet", GREY[:5], KINDS[:5], NAMES)
    write(tmp_path / "test-00000-of-00001.parquet", GREY, KINDS, NAMES)
    source = load("x", tmp_path)
    np.testing.assert_array_equal(source.train.inputs[:, 0].numpy(), GREY)
    assert source.train.labels.tolist() == KINDS.tolist()


def test_names_of_parts(tmp_path: Path) -> None:
    write(tmp_path / "old" / "train-00000-of-00002-0a1b.parquet", GREY[:5], KINDS[:5])
    write(tmp_path / "old" / "train-00001-of-00002-ffff.parquet", GREY[5:], KINDS[5:])
    write(tmp_path / "own" / "train_a.parquet", GREY[:5], KINDS[:5])
    write(tmp_path / "own" / "train_b.parquet", GREY[5:], KINDS[5:])
    assert len(rows(load("old", tmp_path))) == len(rows(load("own", tmp_path))) == 12
    (tmp_path / "old" / "train-00000-of-00002-0a1b.parquet").unlink()
    sources._load.cache_clear()
    with refused("data") as caught:
        load("old", tmp_path)
    says(caught, "train-00000-of-00002*.parquet'", "missing")


def test_cifar_columns(tmp_path: Path) -> None:
    write(tmp_path / "cifar100" / "train.parquet", COLOUR, KINDS, NAMES, image="img", label="fine_label")
    source = load("cifar100", tmp_path)
    assert rows(source) == {(p.transpose(2, 0, 1).tobytes(), int(y)) for p, y in zip(COLOUR, KINDS, strict=True)}


def test_more_rows_than_one_batch_and_one_block(tmp_path: Path) -> None:
    count = 8192 + 700
    values = (np.arange(count) % 251).astype(np.uint8)
    write(tmp_path / "train.parquet", flat(values), np.arange(count) % 7)
    write(tmp_path / "test.parquet", np.zeros((7, 2, 2), np.uint8), np.arange(7))
    source = load("x", tmp_path)
    np.testing.assert_array_equal(source.train.inputs[:, 0, 1, 1].numpy(), values)
    np.testing.assert_array_equal(source.train.labels.numpy(), np.arange(count) % 7)
    # a broken row is counted from the beginning of the file
    images = [encoded(np.zeros((2, 2), np.uint8))] * count
    write(tmp_path / "broken" / "train.parquet", [*images[:8500], b"hello", *images[8501:]], np.arange(count) % 7)
    with refused("data") as caught:
        load("broken", tmp_path)
    says(caught, "row 8500", "train.parquet'")


@pytest.mark.parametrize(
    ("second", "facts"),
    [
        (None, ["train-00001-of-00002.parquet'", "missing", "train-00000-of-00002.parquet'"]),
        ({"names": NAMES[::-1]}, ["train-00001-of-00002.parquet'", "names its classes differently"]),
        ({"names": NAMES, "images": GREY[:, :3].copy()}, ["train-00001-of-00002.parquet'", "[1, 4, 5]", "[1, 3, 5]"]),
        ({"names": NAMES, "domains": ["a"] * 12}, ["train-00001-of-00002.parquet'", "'domain'", "or neither"]),
    ],
)
def test_shards_that_do_not_belong_together(tmp_path: Path, second: dict[str, Any] | None, facts: list[str]) -> None:
    write(tmp_path / "train-00000-of-00002.parquet", GREY, KINDS, NAMES)
    if second is not None:
        write(tmp_path / "train-00001-of-00002.parquet", **{"images": GREY, "labels": KINDS, **second})
    with refused("data") as caught:
        load("x", tmp_path)
    says(caught, *facts)


def test_broken_files(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet", GREY, KINDS).read_bytes()
    for name, data in {"short": whole[:-200], "middle": whole[:300] + whole[500:], "none": b""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.parquet").write_bytes(data)
        with refused("data") as caught:
            load(name, tmp_path)
        says(caught, f"{name}/train.parquet'", "cut short")


def test_missing_columns(tmp_path: Path) -> None:
    write(tmp_path / "a" / "train.parquet", GREY, KINDS, image="picture")
    write(tmp_path / "b" / "train.parquet", GREY, KINDS, label="kind")
    for name, facts in (
        ("a", ["'image' or 'img'", "picture, label"]),
        ("b", ["'label' or 'fine_label'", "image, kind"]),
    ):
        with refused("data") as caught:
            load(name, tmp_path)
        says(caught, f"{name}/train.parquet'", *facts)


@pytest.mark.parametrize(
    ("names", "pair"),
    [
        (["train.parquet", "train-00000-of-00001.parquet"], ["train-00000-of-00001", "train"]),
        (["train.parquet", "train_copy.parquet"], ["train", "train_copy"]),
        (["train-00000-of-00001.parquet", "train_copy.parquet"], ["train-00000-of-00001", "train_copy"]),
        (
            ["train-00000-of-00001-0a1b.parquet", "train-00000-of-00001-ffff.parquet"],
            ["train-00000-of-00001-0a1b", "train-00000-of-00001-ffff"],
        ),
        (
            ["train-00000-of-00001.parquet", "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
            ["train-00000-of-00001", "train-00000-of-00002"],
        ),
        (["test.parquet", "test-00000-of-00001.parquet"], ["test-00000-of-00001", "test"]),
    ],
)
def test_the_same_samples_twice(tmp_path: Path, names: list[str], pair: list[str]) -> None:
    for name in {"train.parquet", *names}:
        if name == "train.parquet" and name not in names and not names[0].startswith("test"):
            continue
        write(tmp_path / "set" / name, GREY, KINDS)
    with refused("data") as caught:
        load("set", tmp_path)
    says(caught, f"/{pair[0]}.parquet'", f"'{pair[1]}.parquet'", "twice")


def test_parquet_with_a_column_of_names(tmp_path: Path) -> None:
    words = ["sea", "air"] * 6
    write(tmp_path / "d" / "train.parquet", flat(range(12)), [0, 0, 1, 1] * 3, domains=words)
    write(tmp_path / "d" / "test.parquet", flat(range(100, 104)), [0, 0, 1, 1], domains=words[:4])
    source = load("d", tmp_path)
    assert source.domains is not None
    assert source.domains.names == ("air", "sea")
    assert brightness(source) == {"air": [1, 3, 5, 7, 9, 11, 101, 103], "sea": [0, 2, 4, 6, 8, 10, 100, 102]}
    # labels stay with their images
    assert [k // 2 % 2 for k in source.train.inputs[:, 0, 0, 0].tolist()] == source.train.labels.tolist()
    assert (len(source.test), source.note) == (4, OWN)


def test_parquet_with_a_column_of_numbers_in_their_order(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train.parquet", flat(range(30)), [0, 1] * 15, domains=[10] * 10 + [2] * 10 + [-1] * 10)
    source = load("d", tmp_path)
    assert source.domains is not None
    assert source.domains.names == ("-1", "2", "10")
    assert brightness(source) == {"-1": [*range(20, 30)], "2": [*range(10, 20)], "10": [*range(10)]}
    # a fifth of each class of each domain is the test set
    assert Counter(zip(source.domains.test.tolist(), source.test.labels.tolist(), strict=True)) == {
        (d, c): 1 for d in range(3) for c in range(2)
    }


@pytest.mark.parametrize("spelt", [["sea ", " air"], ["\tsea", "air"], ["sea", "air\u00a0"]])
def test_blanks_around_a_domain_s_name_make_no_other_domain(tmp_path: Path, spelt: list[str]) -> None:
    write(tmp_path / "d" / "train.parquet", flat(range(12)), [0, 0, 1, 1] * 3, domains=["sea", "air", *spelt] * 3)
    source = load("d", tmp_path)
    assert brightness(source) == {"air": [1, 3, 5, 7, 9, 11], "sea": [0, 2, 4, 6, 8, 10]}


def domains(*some: Any) -> list[Any]:
    return [*some, *["a"] * (12 - len(some))]


@pytest.mark.parametrize(
    ("train", "test", "facts"),
    [
        (domains("b"), None, ["the training samples have a column 'domain'"]),
        (None, domains(), ["the test samples have a column 'domain'"]),
        (domains("b"), domains("c"), ["domain 'c'"]),
        ([0.5] * 12, [0.5] * 12, ["train.parquet'", "type double"]),
        (domains(None), domains(), ["train.parquet'", "'domain'", "1 empty cell"]),
        (domains("", "b"), domains(), ["train.parquet'", "'domain'", "1 empty cell"]),
        (domains("  ", "\t", None), domains(), ["train.parquet'", "'domain'", "3 empty cells"]),
    ],
)
def test_bad_columns(tmp_path: Path, train: Any, test: Any, facts: list[str]) -> None:
    for split, found in (("train", train), ("test", test)):
        write(tmp_path / "d" / f"{split}.parquet", flat(range(12)), [0, 1] * 6, domains=found)
    with refused("data") as caught:
        load("d", tmp_path)
    says(caught, *facts)


def test_shards_with_and_without_domains(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.parquet", flat(range(6)), [0, 1] * 3)
    write(tmp_path / "train-00001-of-00002.parquet", flat(range(6)), [0, 1] * 3, domains=["a"] * 6)
    with refused("data") as caught:
        load("x", tmp_path)
    says(caught, "00001-of-00002.parquet'", "'domain'", "or neither")
