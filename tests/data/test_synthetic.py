"""Files of synthetic samples: what goes in comes out, what is not sound is refused, and what fits is data like others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.data.made import divided
from tests.helpers import refused

from fedfill.data import synthetic
from fedfill.data.division import federate
from fedfill.data.samples import Samples
from fedfill.data.sources import load
from fedfill.data.synthetic import Origin, Synthetic, read, to_bytes, with_extra

DIGITS = tuple(map(str, range(10)))
ORIGIN = Origin(
    class_names=DIGITS, algorithm="feddpgan", data="digits", image_size=None, seed=3, digest="0" * 16, version="0.2.0",
    per_class=2, epsilon=1.5, epsilon_added=None, delta=1e-5, privacy="The server sees it. In total: epsilon 1.5 at delta 1e-05.",
)  # fmt: skip


def samples(n: int = 20, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> Samples:
    stream = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=stream)
    return Samples(images, torch.arange(n) % classes)


def written(path: Path, held: Samples | None = None, **changes: Any) -> Path:
    path.write_bytes(to_bytes(Synthetic(held or samples(), replace(ORIGIN, **changes))))
    return path


def test_what_goes_in_comes_out_and_the_bytes_are_the_same_each_time(tmp_path: Path):
    found = read(written(tmp_path / "a.safetensors"))
    assert torch.equal(found.samples.inputs, samples().inputs)
    assert torch.equal(found.samples.labels, samples().labels)
    assert found.origin == ORIGIN
    assert found.origin.guarantee == "epsilon 1.5 at delta 1e-05"
    assert (tmp_path / "a.safetensors").read_bytes() == to_bytes(found)
    floats = Samples(torch.randn(4, 7), torch.tensor([0, 1, 2, 9]))
    again = read(written(tmp_path / "b.safetensors", floats, epsilon=None))
    assert torch.equal(again.samples.inputs, floats.inputs)
    assert again.origin.epsilon is None


def test_a_test_set_is_held_out_as_it_was_for_the_run(tmp_path: Path) -> None:
    assert b"test_fraction" not in written(tmp_path / "a.safetensors").read_bytes()
    found = load(str(written(tmp_path / "b.safetensors", test_fraction=0.1)))
    assert len(found.test) == len(load("digits", test_fraction=0.1).test) < len(load("digits").test)
    extra = with_extra(divided("digits", test_fraction=0.1), str(tmp_path / "b.safetensors"))
    assert "test_fraction (0.1) is not that of this run (none given)" in extra.notes[-1]
    same = with_extra(divided("digits", test_fraction=0.1), str(tmp_path / "b.safetensors"), None, 0.1)
    assert "test_fraction" not in same.notes[-1]
    with refused("data", "c.safetensors", "test_fraction 0"):
        load(str(written(tmp_path / "c.safetensors", test_fraction=0.0)))


def tensors(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    given = {"inputs": samples().inputs, "labels": samples().labels, **changes}
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def header(**changes: Any) -> dict[str, str]:
    return {synthetic.KEY: json.dumps({**ORIGIN.__dict__, **changes})}


@pytest.mark.parametrize(
    ("held", "metadata", "facts"),
    [
        (tensors(), None, ("how its samples were made",)),
        (tensors(), {"other": "1"}, ("how its samples were made",)),
        (tensors(), {synthetic.KEY: "no JSON"}, ("header",)),
        (tensors(), {synthetic.KEY: "[1]"}, ("header",)),
        (tensors(), {synthetic.KEY: '{"class_names": ["a", "b"]}'}, ("header",)),
        (tensors(), header(seed="three"), ("'three'", "'seed'")),
        (tensors(), header(seed=True), ("True", "'seed'")),
        (tensors(), header(image_size=-5), ("-5", "'image_size'")),
        (tensors(), header(image_size=0), ("0", "'image_size'")),
        (tensors(), header(epsilon=-1.0), ("-1.0", "'epsilon'")),
        (tensors(), header(epsilon_added=float("nan")), ("nan", "'epsilon_added'")),
        (tensors(), header(more=1), ("header",)),
        (tensors(), header(class_names=["a", "a"]), ("['a', 'a']", "two or more different names")),
        (tensors(), header(class_names=[1, 2]), ("[1, 2]",)),
        (tensors(labels=None), header(), ("no tensor 'labels'",)),
        (tensors(inputs=None), header(), ("no tensor 'inputs'",)),
        (tensors(labels=torch.arange(19)), header(), ("shape [19]", "each of the 20 inputs")),
        (tensors(labels=torch.zeros(20)), header(), ("torch.float32", "int64")),
        (tensors(labels=torch.arange(20)), header(), ("0..19", "0..9", "10 classes")),
        (tensors(labels=samples().labels - 1), header(), ("-1..8", "0..9")),
        (tensors(), header(class_names=["a", "b", "c"]), ("0..9", "0..2")),
        (tensors(inputs=samples().inputs.double()), header(), ("torch.float64", "uint8 images or float32")),
        (tensors(inputs=samples().inputs[:0], labels=samples().labels[:0]), header(), ("[0, 1, 8, 8]", "n at least 1")),
        (tensors(inputs=torch.full((20, 3), float("nan"))), header(), ("NaN", "finite numbers")),
        (tensors(inputs=torch.full((20, 3), float("inf"))), header(), ("infinite",)),
    ],
)  # fmt: skip
def test_files_that_are_not_sound(
    tmp_path: Path, held: dict[str, torch.Tensor], metadata: dict[str, str] | None, facts: tuple[str, ...]
):
    path = tmp_path / "bad.safetensors"
    safetensors.torch.save_file(held, path, metadata)
    with refused("data", path, *facts, "allowed: ") as caught:
        load(str(path))
    assert "\n" not in str(caught.value)
    with refused("extra", path, *facts):
        with_extra(divided(), str(path))


@pytest.mark.parametrize("content", [b"not tensors, but text", b"", b"\xff" * 100])
def test_a_text_with_that_ending(tmp_path: Path, content: bytes):
    path = tmp_path / "text.safetensors"
    path.write_bytes(content)
    with refused("data", path, "can't be read as safetensors", "fedfill synthesise"):
        load(str(path))
    path.write_bytes(to_bytes(Synthetic(samples(), ORIGIN))[:-9])
    with refused("data", path, "can't be read"):
        load(str(path))
    with refused("data", "nowhere.safetensors", "found no file"):
        load("nowhere.safetensors")


# ---- as data


def test_it_is_trained_on_and_tested_on_the_real_test_set(tmp_path: Path):
    path = written(tmp_path / "made.safetensors")
    source, real = load(str(path)), load("digits")
    assert torch.equal(source.train.inputs, samples().inputs)
    assert torch.equal(source.test.inputs, real.test.inputs)
    assert source.class_names == real.class_names
    for fact in ("20 synthetic samples of made.safetensors", "feddpgan on digits, seed 3", "epsilon 1.5", real.note):
        assert fact in source.note
    assert str(tmp_path) not in source.note
    federation = federate(str(path), partition="iid", clients=2, seed=0, client_test=0)
    assert sum(len(client.train) for client in federation.clients) == 20
    assert len(federation.test) == len(real.test)
    assert torch.equal(
        load("made.safetensors", tmp_path).train.inputs, source.train.inputs
    )  # it lies in the data folder
    written(path, samples(10))
    assert len(load(str(path)).train) == 10  # and not what was read before


def test_the_size_of_its_images_is_the_size_of_the_test_set(tmp_path: Path):
    path = written(tmp_path / "large.safetensors", samples(shape=(1, 12, 12)), image_size=12)
    assert load(str(path)).test.inputs.shape[1:] == (1, 12, 12)
    assert load(str(path), size=12).test.inputs.shape[1:] == (1, 12, 12)
    with refused("image_size", 16, path, "allowed: none, or 12"):
        load(str(path), size=16)


@pytest.mark.parametrize(
    ("changes", "shape", "facts"),
    [
        (
            {"class_names": ("a", "b", *DIGITS[2:])},
            (1, 8, 8),
            ("10 classes (a, b, 2", "allowed: the 10 of 'digits' (0, 1, 2"),
        ),
        ({"class_names": (*DIGITS, "10")}, (1, 8, 8), ("11 classes", "allowed: the 10")),
        ({}, (1, 6, 6), ("torch.uint8", "[1, 6, 6]", "[1, 8, 8]")),
        ({}, (3, 8, 8), ("[3, 8, 8]", "[1, 8, 8]")),
        ({"data": "python"}, (1, 8, 8), ("needs the test set of 'python'", "unknown", "--data-dir")),
        ({"data": "pictures"}, (1, 8, 8), ("needs the test set of 'pictures'", "--data-dir")),
    ],
)
def test_files_that_do_not_fit_their_data_set(
    tmp_path: Path, changes: dict[str, Any], shape: tuple[int, ...], facts: tuple[str, ...]
):
    path = written(tmp_path / "odd.safetensors", samples(shape=shape), **changes)
    with refused("data", path, *facts, "allowed: "):
        load(str(path))


# ---- as extra data


def test_extra_samples_lie_beside_the_labelled_ones_of_who_trains(tmp_path: Path):
    path = written(tmp_path / "made.safetensors")
    plain = federate("digits", partition="iid", clients=3, seed=0, labelled_per_client=30)
    more = with_extra(plain, "made.safetensors", tmp_path)
    for before, after in zip(plain.clients, more.clients, strict=True):
        assert torch.equal(after.train.inputs, torch.cat([before.train.inputs, samples().inputs]))
        for part in ("test", "unlabelled", "validation"):
            assert torch.equal(getattr(after, part).inputs, getattr(before, part).inputs)
    assert more.fingerprint != plain.fingerprint
    assert more.fingerprint == with_extra(plain, str(path)).fingerprint
    for fact in ("20 samples of made.safetensors", "each of 3 clients", "epsilon 1.5 at delta 1e-05."):
        assert fact in more.notes[-1]
    pooled = with_extra(plain.pooled(), str(path))
    assert [len(client.train) for client in pooled.clients] == [3 * 30 + 20, 0, 0]
    assert "the one client that trains" in pooled.notes[-1]


def test_extra_samples_that_do_not_fit(tmp_path: Path):
    federation = federate("digits", partition="iid", clients=3, seed=0)
    with refused("extra", "[1, 4, 4]", "[1, 8, 8]", "these data"):
        with_extra(federation, str(written(tmp_path / "a.safetensors", samples(shape=(1, 4, 4)))))
    with refused("extra", "3 classes (a, b, c)"):
        with_extra(
            federation, str(written(tmp_path / "b.safetensors", samples(classes=3), class_names=("a", "b", "c")))
        )
    with refused("extra", "nowhere", "found no file"):
        with_extra(federation, "nowhere.safetensors")
