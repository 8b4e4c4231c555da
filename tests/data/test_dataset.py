"""Data sets in memory: a test set that is held out is always the same, and parts that differ are refused."""

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
    by_domain,
    flat,
    numbers,
    rows,
    says,
    write,
)
from tests.helpers import refused

from fedfill.data.dataset import OWN, Source
from fedfill.data.objects import from_python
from fedfill.data.sources import load


def test_missing_test_split_is_held_out_the_same_way_every_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write(tmp_path / folder / "train.parquet", GREY, KINDS)
    first, second = load("a", tmp_path), load("b", tmp_path)
    assert first.test.counts(3) == [1, 1, 1]
    assert torch.equal(first.test.inputs, second.test.inputs)
    assert len(rows(first)) == 12
    assert "fifth" in first.note


def test_classes_that_only_the_test_set_has_count_too() -> None:
    source = from_python((GREY[:3], [0, 1, 2], GREY[3:5], [1, 4]))
    assert isinstance(source, Source)
    assert source.class_names == ("0", "1", "2", "3", "4")


def test_more_classes_than_samples(tmp_path: Path) -> None:
    labels = KINDS.copy()
    labels[10] = 3_000_000
    write(tmp_path / "a" / "train-00000-of-00002.parquet", GREY[:6], labels[:6], label="fine_label")
    write(tmp_path / "a" / "train-00001-of-00002.parquet", GREY[6:], labels[6:], label="fine_label")
    write(tmp_path / "b" / "train.parquet", GREY, KINDS)
    write(tmp_path / "b" / "test.parquet", GREY, labels)
    write(tmp_path / "c" / "train.parquet", GREY, np.where(labels > 3, 12, labels))
    for name, facts in (
        ("a", ["a/train-00001-of-00002.parquet', column 'fine_label'", "label is 3000000", "3,000,001 classes of 12"]),
        ("b", ["b/test.parquet', column 'label'", "3,000,001 classes of 24"]),
        ("c", ["label is 12", "13 classes of 12"]),
    ):
        with refused("data") as caught:
            load(name, tmp_path)
        says(caught, *facts)
    # as many classes as samples is the most, but where names say how many classes there are
    write(tmp_path / "d" / "train.parquet", GREY, np.where(labels > 3, 11, labels))
    assert len(load("d", tmp_path).class_names) == 12
    write(tmp_path / "e" / "train.parquet", GREY, KINDS, [*NAMES, *map(str, range(100))])
    assert len(load("e", tmp_path).class_names) == 103


@pytest.mark.parametrize(
    ("train", "test", "facts"),
    [
        ((GREY, KINDS), (COLOUR, KINDS), ["data 'd'", "[1, 4, 5]", "[3, 4, 5]", "image_size"]),
        ((GREY, KINDS, NAMES), (GREY, KINDS, NAMES[::-1]), ["class names", "differ"]),
        ((GREY[:3], KINDS[:3]), None, ["no test set", "3 samples"]),
    ],
)
def test_splits_that_differ_or_are_too_small(tmp_path: Path, train: Any, test: Any, facts: list[str]) -> None:
    write(tmp_path / "d" / "train.parquet", *train)
    if test is not None:
        write(tmp_path / "d" / "test.parquet", *test)
    with refused("data") as caught:
        load("d", tmp_path)
    says(caught, *facts)


def test_a_domain_without_test_samples_gives_a_fifth(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train.parquet", flat(range(20)), [0, 1] * 10, domains=["sea"] * 10 + ["air"] * 10)
    write(tmp_path / "d" / "test.parquet", flat([100]), [0], domains=["sea"])
    source = load("d", tmp_path)
    assert source.domains is not None
    tested = dict(zip(source.test.inputs[:, 0, 0, 0].tolist(), source.domains.test.tolist(), strict=True))
    assert tested.pop(100) == 1
    assert len(tested) == 2
    assert all(10 <= value < 20 and home == 0 for value, home in tested.items())
    assert source.note == f"{OWN} Of air, which came without one, a fixed stratified fifth."


def test_the_fifth_of_a_domain_is_its_own_affair() -> None:
    """What a domain holds out depends neither on the others nor on its place among them."""
    data = by_domain(test=False)
    whole, turned, alone = (from_python(part) for part in (data, dict(reversed(data.items())), {"sea": data["sea"]}))
    held = [{n for n in numbers(s.test) if n < 1000} for s in (whole, turned, alone)]  # type: ignore[union-attr]
    assert held[0] == held[1] == held[2]
    assert len(held[0]) == 8
