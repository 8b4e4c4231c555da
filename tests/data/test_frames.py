"""Tables in memory, and labels that are words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from tests.helpers import refused

import fedfill
from fedfill.data.dataset import Source
from fedfill.data.division import federate
from fedfill.data.objects import from_python
from fedfill.data.sources import load

AGES = np.arange(20.0, 60.0)
FRAME = pd.DataFrame({"age": AGES, "ward": ["east", "west"] * 20, "label": ["sick", "well", "well", "sick"] * 10})


def one(data: Any, **options: Any) -> Source:
    found = from_python(data, **options)
    assert isinstance(found, Source)
    return found


def test_a_frame_is_what_its_file_is(tmp_path: Path) -> None:
    FRAME.to_csv(tmp_path / "people.csv", index=False)
    held, read = one(FRAME), load(str(tmp_path / "people.csv"))
    assert held.class_names == read.class_names == ("sick", "well")
    assert held.columns == read.columns
    for part in ("train", "test"):
        assert torch.equal(getattr(held, part).inputs, getattr(read, part).inputs)
        assert torch.equal(getattr(held, part).labels, getattr(read, part).labels)


@pytest.mark.parametrize(
    "form",
    [
        pa.Table.from_pandas(FRAME),
        FRAME.set_index(pd.Index(range(100, 140))),
        FRAME.astype({"ward": "category", "label": "category"}),
        (FRAME.drop(columns="label"), FRAME["label"]),
        (FRAME.drop(columns="label"), FRAME[["label"]].rename(columns={"label": "state"})),
        (FRAME.drop(columns="label"), FRAME[["label"]]),
        (FRAME.drop(columns="label"), list(FRAME["label"])),
        (FRAME.drop(columns="label"), FRAME["label"].to_numpy()),
    ],
)  # fmt: skip
def test_every_form_of_one_table(form: Any) -> None:
    found, expected = one(form), one(FRAME)
    assert (found.class_names, found.columns) == (expected.class_names, expected.columns)
    assert torch.equal(found.train.inputs, expected.train.inputs)
    assert torch.equal(found.train.labels, expected.train.labels)


def test_a_test_table_is_scaled_by_the_training_table() -> None:
    test = pd.DataFrame({"age": [10.0], "ward": ["north"], "label": ["well"]})
    for data in (
        (FRAME, test),
        (FRAME.drop(columns="label"), FRAME["label"], test.drop(columns="label"), test["label"]),
    ):
        found = one(data)
        assert len(found.train) == 40
        # mean 39.5; variance of 0..39 is (40 ** 2 - 1) / 12; a ward that nobody knows is none
        expected = [(10 - 39.5) / ((40**2 - 1) / 12) ** 0.5, 0, 0]
        np.testing.assert_allclose(found.test.inputs[0], expected, rtol=1e-6)
        assert found.test.labels.tolist() == [1]


def test_clients_and_domains_share_columns_classes_and_scaling() -> None:
    east, west = FRAME[:20].assign(ward="east"), FRAME[20:].assign(ward="west")
    west = west.assign(label="ill")
    sources = from_python([east, west])
    assert isinstance(sources, list)
    assert {source.class_names for source in sources} == {("ill", "sick", "well")}
    assert sources[0].columns == sources[1].columns
    assert sources[0].columns is not None
    assert sources[0].columns.words == {"ward": ("east", "west")}
    train = torch.cat([source.train.inputs for source in sources])
    torch.testing.assert_close(train[:, 0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(train[:, 0].std(correction=0), torch.tensor(1.0))
    assert sources[1].train.labels.unique().tolist() == [0]
    assert federate([east, west], seed=0).columns == sources[0].columns
    whole = one({"b": east, "a": west})
    assert whole.domains is not None
    assert whole.domains.names == ("b", "a")
    assert federate({"b": east, "a": west}, partition="domain", seed=0).domains == ("b", "a")


def test_a_frame_with_domains() -> None:
    found = federate(FRAME.rename(columns={"ward": "domain"}), partition="domain", seed=0)
    assert found.domains == ("east", "west")


def test_labels_that_are_words() -> None:
    inputs = np.arange(24, dtype=np.float32).reshape(12, 2)
    words = ["cat", "ant", "bee"] * 4
    for labels in (words, np.array(words), np.array(words, object), pd.Series(words, index=range(5, 17))):
        found = one((inputs, labels, inputs[:2], ["bee", "cat"]))
        assert found.class_names == ("ant", "bee", "cat")
        assert found.train.labels.tolist() == [2, 0, 1] * 4
        assert found.test.labels.tolist() == [1, 2]
    several = from_python([(inputs[:6], ["ant", "cat"] * 3), (inputs[6:], ["bee", "cat"] * 3)])
    assert isinstance(several, list)
    assert [source.class_names for source in several] == [("ant", "bee", "cat")] * 2
    assert {int(y) for source in several for y in (*source.train.labels, *source.test.labels)} == {0, 1, 2}


def test_names_that_are_given() -> None:
    inputs, numbers = np.zeros((12, 2), np.float32), np.arange(12) % 3
    names = ["low", "mid", "high"]
    found = fedfill.dataset((inputs, numbers), class_names=names)
    assert isinstance(found, Source)
    assert found.class_names == ("low", "mid", "high")
    by_word = fedfill.dataset((inputs, [names[k] for k in numbers]), class_names=names)
    assert isinstance(by_word, Source)
    assert torch.equal(by_word.train.labels, found.train.labels)
    for ordered in (tuple(names), np.array(names), pd.Index(names)):
        assert from_python((inputs, numbers), class_names=ordered).class_names == found.class_names  # type: ignore[union-attr,arg-type]
    table = pd.DataFrame({"a": np.arange(12.0), "label": numbers})
    for label in (numbers, [names[k] for k in numbers]):
        of_table = fedfill.dataset(table.assign(label=label), class_names=names)
        assert isinstance(of_table, Source)
        assert of_table.class_names == ("low", "mid", "high")
        assert torch.equal(of_table.train.labels, found.train.labels)


def test_names_that_people_have() -> None:
    names = [
        "Brustkrebs\N{NO-BREAK SPACE}links",
        "\N{FAMILY}",
        "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{ROCKET}",
        "a\t",
        "9" * 5000,
    ]
    found = from_python((np.zeros((15, 2)), np.arange(15) % 5), class_names=names)
    assert isinstance(found, Source)
    assert found.class_names == tuple(names)
    assert one((np.zeros((15, 2)), names * 3)).class_names == tuple(sorted(names))


def test_whole_numbers_as_categories() -> None:
    table = FRAME.assign(label=pd.Categorical([0, 1] * 20))
    alone, several = (from_python(data, class_names=["a", "b"]) for data in (table, [table, table]))
    assert isinstance(alone, Source)
    assert isinstance(several, list)
    assert alone.class_names == several[0].class_names == ("a", "b")
    assert sorted({*alone.train.labels.tolist()}) == [0, 1]


def test_truth_values_are_words() -> None:
    """In arrays as in tables."""
    inputs, truth = np.zeros((12, 2), np.float32), np.arange(12) % 3 > 0
    forms = [(inputs, truth), (inputs, torch.tensor(truth)), pd.DataFrame({"a": np.arange(12.0), "label": truth})]
    for data in forms:
        for names in (None, ["False", "True"]):
            found = from_python(data, class_names=names)
            assert isinstance(found, Source)
            assert found.class_names == ("False", "True")
            assert sorted({*found.train.labels.tolist()}) == [0, 1]


@pytest.mark.parametrize(
    ("data", "options", "setting", "facts"),
    [
        (FRAME.drop(columns="label"), {}, "data", ["'label'", "age, ward"]),
        (FRAME.assign(age=None), {}, "data", ["'age'"]),
        (FRAME.assign(age=[*AGES.tolist()[:-1], None]), {}, "data", ["'age'", "1 empty"]),
        (FRAME.assign(when=pd.Timestamp("2026-01-01")), {}, "data", ["'when'", "timestamp"]),
        (FRAME[:0], {}, "data", ["no samples"]),
        ((FRAME, FRAME["label"]), {}, "data", ["'label'"]),
        ((FRAME.drop(columns="label"), [1, 2]), {}, "data", ["[2]", "40"]),
        ((FRAME, FRAME.assign(label="new")), {}, "data", ["'new'"]),
        ([FRAME, (np.zeros((4, 2)), [0, 1, 0, 1])], {}, "data of client 1", ["tuple"]),
        ([FRAME, FRAME.drop(columns="age")], {}, "data of client 1", ["'age'"]),
        ([FRAME, FRAME.assign(age="old")], {}, "data of client 1", ["'age'", "double", "numbers"]),
        ({"a": FRAME, " a": FRAME}, {}, "data", ["'a'", "twice"]),
        (FRAME, {"class_names": ["sick", "dead"]}, "data", ["'well'", "sick, dead"]),
        (FRAME, {"class_names": "sick"}, "class_names", ["'sick'"]),
        (FRAME, {"class_names": ["a", "a"]}, "class_names", ["once"]),
        (FRAME, {"class_names": {"sick", "well"}}, "class_names", ["list"]),
        (FRAME, {"class_names": {"sick": 0, "well": 1}}, "class_names", ["list"]),
        ((np.zeros((3, 2)), [0, 1, 2]), {"class_names": ["a", "b"]}, "data", ["2 class names"]),
        ((np.zeros((3, 2)), ["a", "b", "c"], np.zeros((1, 2)), ["d"]), {}, "data, test set", ["'d'"]),
        ((FRAME, FRAME.drop(columns="label")), {}, "data", ["test table", "'label'"]),
        ((np.zeros((3, 2)), ["a", "b", "c"], np.zeros((1, 2)), [1]), {}, "data", ["words", "test set"]),
        (FRAME.assign(age=[10**30] * 40), {}, "data", ["too large"]),
        ([(np.zeros((3, 2)), ["a", "b", "c"]), (np.zeros((3, 2)), [0, 1, 2])], {}, "data", ["words"]),
        (load("digits"), {"class_names": ["a"]}, "class_names", ["its own"]),
        ([FRAME, FRAME.assign(age=[*AGES.tolist()[:-1], None])], {}, "data", ["'table of client 1'", "'age'"]),
        ([(FRAME, FRAME), (FRAME, FRAME.assign(age=math.inf))], {}, "data", ["'test table of client 1'", "'age'"]),
        ({"sea": FRAME, "air": FRAME.assign(age=math.inf)}, {}, "data", ["table of domain 'air'", "'age'"]),
        ([FRAME.assign(domain=1.5), FRAME.assign(domain=1.5, age=math.inf)], {}, "data", ["'table of client 1'", "'age'"]),
        ([FRAME, (FRAME, FRAME), (FRAME, FRAME.assign(extra=1))], {}, "data of client 2, test set", ["'extra'"]),
        ([FRAME, (FRAME, FRAME), (FRAME, FRAME[:0])], {}, "data of client 2, test set", ["without rows"]),
        ([(FRAME, FRAME), (FRAME, FRAME.assign(age=1e90))], {}, "data of client 1, test set", ["'age'", "1e+90"]),
        ((FRAME, FRAME.assign(label="q" * 999)), {}, "data", ["a value of type str"]),
        ((np.zeros((6, 2)), [[1], [1, 2]] * 3), {}, "data", ["labels are list", "one whole number"]),
        ((np.zeros((6, 2)), [0, 1] * 3, np.zeros((1, 2)), np.array([True])), {}, "data, test set", ["words", "whole numbers"]),
        ((np.zeros((4, 2)), [0, 1] * 2), {"class_names": ["a\n", "b"]}, "class_names", ["'a\\n'"]),
        ((np.zeros((4, 2)), [0, 1] * 2), {"class_names": np.array("ab")}, "class_names", ["list"]),
        (FRAME.rename(columns={"label": "Label"}), {}, "data", ["did you mean 'Label'"]),
        (FRAME.assign(label=[True, False] * 20), {"class_names": ["no", "yes"]}, "data", ["'False'", "no, yes"]),
        ((FRAME, FRAME.assign(age=1e99)), {}, "data", ["'age'", "1e+99"]),
        (FRAME.assign(age=[1, "a"] * 20), {}, "data", ["convert 'a'", "age"]),
        (FRAME.assign(label=np.uint64(2**63)), {"class_names": ["a", "b"]}, "data", ["9223372036854775808"]),
    ],
)  # fmt: skip
def test_bad_tables(data: Any, options: Any, setting: str, facts: list[str]) -> None:
    with refused(setting, *facts):
        from_python(data, **options)


def test_from_a_frame_to_a_prediction(tmp_path: Path) -> None:
    run = fedfill.run("fedavg", data=FRAME, partition="iid", clients=2, rounds=2, workers=1, out=tmp_path / "run")
    fedfill.export(run, tmp_path / "model")
    found = fedfill.predict(tmp_path / "model", FRAME.drop(columns="label")[:5])
    assert found.class_names == ("sick", "well")
    assert len(found) == 5
    with refused("data", "too large"):
        fedfill.predict(tmp_path / "model", [{"age": 10**30, "ward": "east"}])
    again = fedfill.resume(run, data=FRAME)
    assert again.was_finished
