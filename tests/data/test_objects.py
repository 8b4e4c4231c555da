"""Data from Python: arrays, `datasets` objects, and lists and dicts of them, and a sentence for what they can't be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.made import (
    COLOUR,
    GREY,
    KINDS,
    NAMES,
    as_dataset,
    brightness,
    floats,
    rows,
    says,
)
from tests.helpers import refused

from fedfill.data.dataset import Source
from fedfill.data.objects import from_python
from fedfill.data.samples import Samples
from fedfill.data.sources import load


@pytest.mark.parametrize("wrap", [lambda x: x, torch.from_numpy])
@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (GREY, GREY[:, None]),
        (COLOUR, COLOUR.transpose(0, 3, 1, 2)),
        (np.ascontiguousarray(COLOUR.transpose(0, 3, 1, 2)), COLOUR.transpose(0, 3, 1, 2)),
        (GREY[..., None], GREY[:, None]),
        (np.linspace(0, 1, 24).reshape(12, 2), np.linspace(0, 1, 24).reshape(12, 2).astype(np.float32)),
    ],
)
def test_arrays(wrap: Any, inputs: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    source = from_python((wrap(inputs), wrap(KINDS), wrap(inputs[:3]), wrap(KINDS[:3])), "mine")
    assert isinstance(source, Source)
    np.testing.assert_array_equal(source.train.inputs.numpy(), expected)
    np.testing.assert_array_equal(source.test.inputs.numpy(), expected[:3])
    assert source.train.labels.dtype == torch.int64
    assert (source.name, source.class_names) == ("mine", ("0", "1", "2"))


def test_arrays_without_a_test_set() -> None:
    source = from_python((GREY, KINDS))
    assert isinstance(source, Source)
    assert source.test.counts(3) == [1, 1, 1]
    assert rows(source) == {(p.tobytes(), int(y)) for p, y in zip(GREY, KINDS, strict=True)}


@pytest.mark.parametrize("kind", [">f4", ">f8", np.longdouble, np.float16])
def test_floats_of_any_kind(kind: Any) -> None:
    inputs = np.linspace(0, 1, 24).reshape(12, 2)
    source = from_python((inputs.astype(kind), KINDS, inputs.astype(kind), KINDS))
    assert isinstance(source, Source)
    assert source.train.inputs.dtype == torch.float32
    np.testing.assert_array_equal(source.train.inputs.numpy(), inputs.astype(kind).astype(np.float32))


def test_datasets_objects(tmp_path: Path) -> None:
    whole = from_python(datasets.DatasetDict(train=as_dataset(), test=as_dataset(GREY[::-1])))
    assert isinstance(whole, Source)
    np.testing.assert_array_equal(whole.train.inputs[:, 0].numpy(), GREY)
    np.testing.assert_array_equal(whole.test.inputs[:, 0].numpy(), GREY[::-1])
    assert whole.class_names == ("ant", "bee", "cat")
    part = from_python(as_dataset().select([11, 3, 0, 6, 9]))  # rows picked and reordered
    assert isinstance(part, Source)
    assert rows(part) == {(GREY[i].tobytes(), int(KINDS[i])) for i in (11, 3, 0, 6, 9)}


def test_datasets_of_arrays_and_of_files(tmp_path: Path) -> None:
    plain = from_python(datasets.Dataset.from_dict({"image": GREY, "label": KINDS}))
    assert isinstance(plain, Source)
    assert plain.train.inputs.dtype == torch.uint8
    assert rows(plain) == {(p.tobytes(), int(y)) for p, y in zip(GREY, KINDS, strict=True)}
    floats = from_python(datasets.Dataset.from_dict({"image": np.ones((12, 2), np.float32), "label": KINDS}))
    assert isinstance(floats, Source)
    assert floats.train.inputs.dtype == torch.float32
    files = []
    for index, pixels in enumerate(GREY):
        files.append(str(tmp_path / f"{index}.png"))
        Image.fromarray(pixels).save(files[-1])
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    from_files = from_python(datasets.Dataset.from_dict({"image": files, "label": KINDS}, features=features))
    assert isinstance(from_files, Source)
    assert rows(from_files) == rows(plain)


def test_class_names_of_the_test_split_are_those_of_the_training_split() -> None:
    train = as_dataset()

    def test(names: list[str] | None, label: int) -> datasets.Dataset:
        kind = datasets.Value("int64") if names is None else datasets.ClassLabel(names=names)
        features = datasets.Features({"image": datasets.Image(), "label": kind})
        return datasets.Dataset.from_dict({"image": [Image.fromarray(GREY[0])], "label": [label]}, features=features)

    for names in (NAMES[::-1], [*NAMES, "dog"]):
        with refused("data") as caught:
            from_python(datasets.DatasetDict(train=train, test=test(names, 0)))
        says(caught, "class names in the train and test splits differ")
    with refused("data, test set") as caught:
        from_python(datasets.DatasetDict(train=train, test=test(None, 3)))
    says(caught, "a label is 3", "3 class names")
    source = from_python(datasets.DatasetDict(train=train, test=test(None, 2)))
    assert isinstance(source, Source)
    assert (source.class_names, source.test.labels.tolist()) == (tuple(NAMES), [2])


def test_a_list_is_one_data_set_per_client() -> None:
    given = [(GREY, KINDS), as_dataset(), load("digits")]
    found = from_python(given)
    assert isinstance(found, list)
    assert [type(source) for source in found] == [Source] * 3
    assert found[2] is given[2]


def test_a_client_with_too_few_samples_has_an_empty_test_set() -> None:
    lone, many = from_python([(GREY[:1], [2]), (GREY, KINDS)])  # type: ignore[misc]
    assert (len(lone.train), lone.test.inputs.shape, lone.train.labels.tolist()) == (1, (0, 1, 4, 5), [2])
    assert lone.class_names == ("0", "1", "2")  # more than it has samples, but not more than all have
    assert "too few to hold one out" in lone.note
    assert len(many.test) == 3
    assert "fixed stratified fifth" in many.note
    empty = Source("x", many.train, many.test[:0], many.class_names, "")
    for given in ([(GREY[:1], [0]), (GREY[:2], [0, 1])], [empty, empty]):
        with refused("data") as caught:
            from_python(given)
        says(caught, "no test set", "each client")


def test_a_dataset_with_named_domains() -> None:
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=NAMES[:2]),
            "domain": datasets.ClassLabel(names=["sea", "air"]),
        }
    )
    images = [Image.fromarray(np.full((2, 2), k, np.uint8)) for k in range(12)]
    data = datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 6, "domain": [1] * 6 + [0] * 6}, features)
    source = from_python(data)
    assert isinstance(source, Source)
    assert brightness(source) == {"air": [*range(6)], "sea": [*range(6, 12)]}
    # in a list a data set is one client's, whatever its samples say
    (alone,) = from_python([data])  # type: ignore[misc]
    assert alone.domains is None


def _two(start: int) -> tuple[Samples, Samples]:
    train, test = (Samples(torch.from_numpy(floats(k, 10)), torch.arange(10) % 2) for k in (start, start + 50))
    return train, test


def test_a_dict_of_any_forms() -> None:
    whole = from_python({"a": (floats(0, 20), [0, 1] * 10), 7: Source("x", *_two(100), ("0", "1"), "")})
    assert isinstance(whole, Source)
    assert whole.domains is not None
    assert whole.domains.names == ("a", "7")
    assert (len(whole.train), len(whole.test), whole.class_names) == (16 + 10, 4 + 10, ("0", "1"))
    assert Counter(whole.domains.test.tolist()) == {0: 4, 1: 10}


SEA, AIR = (Source("x", *_two(0), names, "") for names in (("x", "y"), ("y", "x")))
NINE = (floats(0, 9), [0] * 9)


@pytest.mark.parametrize(
    ("data", "setting", "facts"),
    [
        # arrays
        ((GREY, KINDS[:11]), "data", ["12 inputs", "11 labels"]),
        ((GREY, KINDS, GREY, KINDS[:3]), "data, test set", ["12 inputs", "3 labels"]),
        ((GREY, KINDS * 0.5), "data", ["labels are float64"]),
        ((GREY, KINDS.reshape(3, 4)), "data", ["labels", "[3, 4]"]),
        ((GREY, KINDS - 1), "data", ["a label is -1"]),
        ((GREY, torch.tensor(KINDS).bfloat16()), "data", ["whole number"]),
        ((GREY, KINDS.astype(np.uint64) + np.uint64(2**63)), "data", ["92233720368547758"]),
        ((GREY, np.array(["a", " ", "b"] * 4)), "class names", ["' '"]),
        ((GREY, np.array(["a", "\ud800", "b"] * 4)), "class names", ["ud800"]),
        ({"a": NINE, "\n": NINE}, "domains", ["found ''"]),
        ((np.full((3, 2), np.nan), [0, 1, 2]), "data", ["NaN"]),
        ((torch.tensor([[1.0], [float("inf")]]), [0, 1]), "data", ["infinite"]),
        ((np.full((3, 2), 1e300), [0, 1, 2]), "data", ["beyond the range of float32"]),
        ((torch.full((3, 2), 1e300, dtype=torch.float64), [0, 1, 2]), "data", ["beyond the range of float32"]),
        ((GREY[:0], KINDS[:0]), "data", ["[0, 4, 5]", "at least one sample"]),
        ((GREY.astype(np.int64), KINDS), "data", ["inputs are int64"]),
        ((torch.zeros(3, 2, 2, dtype=torch.int32), [0, 1, 2]), "data", ["inputs are int32"]),
        ((GREY.reshape(12, 20), KINDS), "data", ["[12, 20]"]),
        ((np.zeros((12, 4, 5, 2), np.uint8), KINDS), "data", ["[12, 4, 5, 2]"]),
        (([[1.0], [2.0]], [0, 1]), "data", ["inputs are a list"]),
        ((GREY, KINDS, GREY), "data", ["a tuple of 3"]),
        ((GREY, KINDS, COLOUR, KINDS), "data", ["[1, 4, 5]", "[3, 4, 5]"]),
        ((GREY, KINDS * 10**6), "data", ["highest label is 2000000", "12 samples"]),
        ((GREY, KINDS, GREY, KINDS + 22), "data, test set", ["highest label is 24", "25 classes of 24"]),
        (7, "data", ["found int"]),
        # datasets
        (
            datasets.Dataset.from_dict({"image": (GREY / 2).tolist(), "label": [99] * 12}),
            "data, column", ["column 'label'", "highest label is 99"],
        ),
        (datasets.DatasetDict(test=datasets.Dataset.from_dict({"a": [1]})), "data", ["'train'", "only test"]),
        (datasets.Dataset.from_dict({"text": ["a"], "label": [0]}), "data", ["'image' or 'img'", "text, label"]),
        (datasets.Dataset.from_dict({"image": [], "label": []}), "data", ["no samples"]),
        # lists
        ([], "data", ["list", "empty"]),
        ([(GREY, KINDS), (GREY, KINDS - 1)], "data of client 1", ["a label is -1"]),
        ([GREY, KINDS], "data of client 0", ["found ndarray"]),
        ([(GREY, KINDS), (GREY[:1], [13])], "data of client 1", ["highest label is 13", "14 classes of 13"]),
        ([{"a": NINE}], "data of client 0", ["found dict"]),
        # dicts
        ({}, "data", ["dict", "empty"]),
        ({1: NINE, "1": NINE}, "data", ["'1'", "twice"]),
        ({"sea": NINE, " sea": NINE}, "data", ["'sea'", "twice", "blanks"]),
        ({"a": 7}, "data of domain", ["domain 'a'", "found int"]),
        ({1.5: NINE}, "data", ["1.5", "float"]),
        ({"a": NINE, "b": (np.ones((9, 2)), [0] * 9)}, "data, domain", ["domain 'b'", "[1]", "[2]"]),
        ({"a": (floats(0, 1), [0]), "b": (floats(0, 1), [0])}, "data", ["no test set", "each of 2 domains"]),
        ({"a": (floats(0, 9), [99] * 9)}, "data of domain", ["domain 'a'", "highest label is 99", "100 classes"]),
        ({"a": SEA, "b": (floats(0, 9), [2] * 9)}, "data, domain", ["domain 'b'", "a label is 2"]),
        ({"a": SEA, "b": AIR}, "data", ["domain 'b'", "y, x", "x, y"]),
        ({"a": replace(SEA, train=SEA.train[:0])}, "data", ["domain 'a'", "no training samples"]),
    ],
)  # fmt: skip
def test_bad_python_data(data: Any, setting: str, facts: list[str]) -> None:
    with refused(setting) as caught:
        from_python(data)
    says(caught, *facts)


def test_blanks_around_a_domain_s_name_do_not_count() -> None:
    source = from_python({" sea": (floats(0, 20), [0, 1] * 10), "air": (floats(50, 20), [0, 1] * 10)})
    assert isinstance(source, Source)
    assert source.domains is not None
    assert source.domains.names == ("sea", "air")
