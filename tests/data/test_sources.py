"""Sources: a name is found in the package, in the data folder or on the Hub, in this order."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.datasets import load_digits
from tests.data.made import (
    GREY,
    KINDS,
    as_dataset,
    brightness,
    flat,
    rows,
    says,
    write,
)
from tests.helpers import refused

from fedfill.data import sources
from fedfill.data.names import DATASETS
from fedfill.data.sources import HUB, JOINED, load
from fedfill.tree import sha256


def test_digits() -> None:
    source = load("digits")
    original = load_digits()
    assert source.train.inputs.shape == (1438, 1, 8, 8)
    assert source.test.inputs.shape == (359, 1, 8, 8)
    assert source.train.inputs.dtype == torch.uint8
    assert source.train.labels.dtype == torch.int64
    scaled = np.rint(original.images * 255 / 16).astype(np.uint8)
    assert rows(source) == {(image.tobytes(), int(label)) for image, label in zip(scaled, original.target, strict=True)}
    assert source.train.inputs.max() == 255
    # stratified: a fifth of each class, to the nearest
    total = np.bincount(original.target)
    assert source.test.counts(10) == np.floor(total * 0.2 + 0.5).astype(int).tolist()
    assert source.class_names == tuple("0123456789")
    assert "fixed stratified fifth" in source.note


def test_digits_test_set_never_changes() -> None:
    # the split is part of every result: if this changes, results are no longer comparable
    test = load("digits").test
    assert sha256({"inputs": test.inputs, "labels": test.labels}).startswith("f28a0a0ac6b15f5a")


def test_loading_twice_gives_the_same_tensors() -> None:
    assert load("digits").train.inputs is load("digits").train.inputs


def test_parquet_in_the_data_folder_itself_and_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "train.parquet", GREY, KINDS)
    write(tmp_path / "test.parquet", GREY[:3], KINDS[:3])
    monkeypatch.setenv("FEDFILL_DATA", str(tmp_path))
    source = load("whatever")
    assert (len(source.train), len(source.test)) == (12, 3)
    assert source.class_names == ("0", "1", "2")


def test_names_that_are_unknown_and_folders_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    for name, folder, setting, facts in (
        ("empty", tmp_path, "data", ["'empty'", "train*.parquet"]),
        ("emty", tmp_path, "data", ["'emty'", "did you mean 'empty'"]),
        ("../empty", tmp_path / "empty", "data", ["'../empty'"]),
        ("fashon_mnist", None, "data", ["'fashon_mnist'", "did you mean 'fashion_mnist'"]),
        ("mnist", tmp_path / "nowhere", "data_dir", ["nowhere'", "not a folder"]),
    ):
        with refused(setting) as caught:
            load(name, folder)
        says(caught, *facts)
    monkeypatch.setenv("FEDFILL_DATA", str(tmp_path / "nowhere"))
    with refused("FEDFILL_DATA") as caught:
        load("mnist")
    says(caught, "nowhere'", "not a folder")


def test_hub_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(repository: str, configuration: str | None, split: list[str]) -> list[datasets.Dataset]:
        asked.append((repository, configuration, split))
        return [as_dataset(GREY, "img", "fine_label"), as_dataset(GREY[::-1], "img", "fine_label")]

    monkeypatch.setattr(sources, "_unreachable", lambda repository: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = load("svhn")
    assert asked == [("ufldl-stanford/svhn", "cropped_digits", ["train", "test"])]
    np.testing.assert_array_equal(source.train.inputs[:, 0].numpy(), GREY)
    np.testing.assert_array_equal(source.test.inputs[:, 0].numpy(), GREY[::-1])
    assert source.class_names == ("ant", "bee", "cat")
    assert "official" in source.note
    assert "ufldl-stanford/svhn, revision unknown" in source.note


def test_the_record_says_which_revision_the_hub_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the library keeps what it fetched in a folder that is named by the commit
    revision = "7c1f2ab80d34e5" + "0" * 26
    file = tmp_path / "ylecun___mnist" / "mnist" / "0.0.0" / revision / "mnist-train.arrow"
    file.parent.mkdir(parents=True)
    table = as_dataset().data.table
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    kept = datasets.Dataset.from_file(str(file))
    monkeypatch.setattr(sources, "_unreachable", lambda repository: "no network")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [kept, kept])
    sources._load.cache_clear()
    assert f"ylecun/mnist, revision {revision}." in load("mnist").note
    sources._load.cache_clear()


def test_a_local_folder_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_from_hub", lambda name: pytest.fail("asked the Hub"))
    write(tmp_path / "mnist" / "train.parquet", GREY, KINDS)
    assert len(load("mnist", tmp_path).train) == 9


def test_an_unreachable_hub_fails_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # nothing listens on this port, so the failure is real and needs no network
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    offline = datasets.config.HF_HUB_OFFLINE
    start = time.monotonic()
    with refused("data") as caught:
        load("usps")
    assert time.monotonic() - start < 10
    says(caught, "'usps'", "Hugging Face Hub", "folder 'usps' below --data-dir or FEDFILL_DATA", "--data digits")
    assert "\n" not in str(caught.value)
    assert offline == datasets.config.HF_HUB_OFFLINE


def test_a_download_that_breaks_off_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("the line went dead\nand more")

    monkeypatch.setattr(sources, "_unreachable", lambda repository: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with refused("data") as caught:
        load("mnist")
    says(caught, "(the line went dead)")


def test_every_name_is_bundled_or_on_the_hub() -> None:
    assert set(DATASETS) == {"digits", *HUB, *JOINED}


def test_digits_domains(tmp_path: Path) -> None:
    kinds = {"mnist": (28, False), "mnist_m": (32, True), "svhn": (32, True), "usps": (16, False)}
    for k, (name, (size, colour)) in enumerate(kinds.items()):
        write(tmp_path / name / "train.parquet", flat(range(50 * k, 50 * k + 20), size, colour), [*range(10)] * 2)
        write(tmp_path / name / "test.parquet", flat([50 * k + 20, 50 * k + 21], size, colour), [3, 4])
    source = load("digits-domains", tmp_path)
    assert (source.name, source.train.inputs.shape, source.test.inputs.shape) == (
        "digits-domains", (80, 3, 32, 32), (8, 3, 32, 32),
    )  # fmt: skip
    assert brightness(source) == {name: [*range(50 * k, 50 * k + 22)] for k, name in enumerate(kinds)}
    assert source.train.inputs.dtype == torch.uint8
    assert all(len(image.unique()) == 1 for image in source.train.inputs)
    assert load("digits-domains", tmp_path) is source
    assert load("digits-domains", tmp_path, 8).test.inputs.shape == (8, 3, 8, 8)
    # a folder of that name goes first
    write(tmp_path / "digits-domains" / "train.parquet", flat(range(12)), [0, 1] * 6)
    sources._load.cache_clear()
    assert len(load("digits-domains", tmp_path).train) == 10


def test_digits_domains_whose_part_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_unreachable", lambda repository: "no network")
    with refused("data") as caught:
        load("digits-domains", tmp_path)
    says(caught, "'mnist'", "no network", "folder 'mnist' below --data-dir")
