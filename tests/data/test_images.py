"""Images: decoded as they were stored, or brought to one size with the channels that the data have."""

from __future__ import annotations

import io
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
    as_dataset,
    brightness,
    encoded,
    flat,
    says,
    write,
    write_folder,
    write_shades,
)
from tests.helpers import refused

from fedfill.data import sources
from fedfill.data.sources import load
from fedfill.deployment.host_data import Task, load_host


def test_palette_and_one_bit_images_become_colour_and_grey(tmp_path: Path) -> None:
    dots = Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8)).convert("1")
    write(tmp_path / "bits" / "train.parquet", [encoded(dots)] * 6, [0] * 6)
    assert load("bits", tmp_path).train.inputs[0].tolist() == [[[0, 255], [255, 0]]]
    red = Image.new("RGB", (1, 1), (255, 0, 0)).convert("P")
    write(tmp_path / "palette" / "train.parquet", [encoded(red)] * 6, [0] * 6)
    assert load("palette", tmp_path).train.inputs[0].flatten().tolist() == [255, 0, 0]


IMAGES: list[bytes | None] = [encoded(pixels) for pixels in GREY]


def with_row_7(data: bytes | None) -> list[bytes | None]:
    return [*IMAGES[:7], data, *IMAGES[8:]]


@pytest.mark.parametrize(
    ("images", "labels", "names", "facts"),
    [
        (with_row_7(encoded(GREY[7])[:-30]), KINDS, None, ["row 7", "cut short"]),
        (with_row_7(b"hello"), KINDS, None, ["row 7", "no image that can be recognised"]),
        (with_row_7(None), KINDS, None, ["row 7", "no image bytes"]),
        (with_row_7(encoded(GREY[0, :3])), KINDS, None, ["row 7", "5x3 grey", "row 0", "5x4 grey", "image_size"]),
        (with_row_7(encoded(COLOUR[0])), KINDS, None, ["row 7", "5x4 colour", "row 0", "5x4 grey", "image_size"]),
        ([encoded(np.full((4, 5), 40_000, np.uint16))] * 12, KINDS, None, ["row 0", "'I;16'"]),
        (IMAGES, KINDS - 1, None, ["a label is -1"]),
        (IMAGES, KINDS + 1, NAMES, ["a label is 3", "3 class names"]),
        (IMAGES, KINDS / 2, None, ["labels of type double"]),
        (IMAGES, [None, *KINDS[1:].tolist()], None, ["1 empty labels"]),
        ([], np.array([], np.int64), None, []),
    ],
)
def test_broken_rows(
    tmp_path: Path, images: list[bytes | None], labels: Any, names: list[str] | None, facts: list[str]
) -> None:
    write(tmp_path / "set" / "train.parquet", images, labels, names)
    with refused("data") as caught:
        load("set", tmp_path)
    says(caught, "train.parquet'", *facts)


# ---- one size


def test_images_of_many_sizes_need_one(tmp_path: Path) -> None:
    write_shades(tmp_path / "d" / "sea", 0, size=3)
    write_shades(tmp_path / "d" / "air", 100, size=5)
    with refused("data") as caught:
        load("d", tmp_path)
    says(caught, "domain 'sea'", "[1, 5, 5]", "[1, 3, 3]", "image_size")
    source = load("d", tmp_path, 4)
    assert source.train.inputs.shape[1:] == (1, 4, 4)
    assert brightness(source)["air"] == [*range(100, 105), *range(110, 115)]
    (tmp_path / "d" / "sea" / "ant" / "00.png").write_bytes(encoded(flat([0], 7, True)[0]))
    sources._load.cache_clear()
    coloured = load("d", tmp_path, 4)
    assert coloured.train.inputs.shape[1:] == coloured.test.inputs.shape[1:] == (3, 4, 4)
    assert brightness(coloured) == brightness(source)


def test_a_size_shrinks_by_means_and_stretches_by_lines(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train.parquet", np.array([[[0, 0, 200, 200]] * 4] * 6, np.uint8), [0, 1] * 3)
    assert load("d", tmp_path, 1).train.inputs[0].tolist() == [[[100]]]
    assert load("d", tmp_path, 8).train.inputs[0, 0, 0].tolist() == [0, 0, 0, 50, 150, 200, 200, 200]


MODES = {mode: encoded(Image.fromarray(COLOUR[3]).convert(mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")}
MODES["RGB of grey pixels"] = encoded(Image.fromarray(GREY[3]).convert("RGB"))


@pytest.mark.parametrize(
    ("train", "test", "channels"),
    [
        (["L"], ["L"], 1),
        (["L", "1", "LA"], ["1"], 1),
        (["RGB"], ["RGB"], 3),
        (["L", "RGB"], ["L"], 3),
        (["L"], ["L", "RGBA"], 3),
        (["L"], ["P"], 3),
        (["L", "RGB of grey pixels"], ["L"], 3),
        (["1"], ["RGB of grey pixels"], 3),
    ],
)
def test_channels_follow_from_what_all_images_hold(
    tmp_path: Path, train: list[str], test: list[str], channels: int
) -> None:
    kinds = {"train": train * 3, "test": test * 3}
    for split, modes in kinds.items():
        write(tmp_path / "d" / f"{split}.parquet", [MODES[mode] for mode in modes], [k % 2 for k in range(len(modes))])
    source = load("d", tmp_path, 3)
    for samples, modes in ((source.train, kinds["train"]), (source.test, kinds["test"])):
        assert samples.inputs.shape == (len(modes), channels, 3, 3)
        for pixels, mode in zip(samples.inputs, modes, strict=True):
            # whether grey is repeated before the size or after it is all one
            with Image.open(io.BytesIO(MODES[mode])) as image:
                resized = image.convert("RGB").resize((3, 3), Image.Resampling.BILINEAR)
            np.testing.assert_array_equal(pixels.numpy(), np.asarray(resized).transpose(2, 0, 1)[:channels])


def test_channels_of_shards_domains_and_known_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "shards" / "train-00000-of-00002.parquet", GREY, KINDS)
    write(tmp_path / "shards" / "train-00001-of-00002.parquet", COLOUR, KINDS)
    write(tmp_path / "column" / "train.parquet", [*IMAGES, encoded(COLOUR[0])], [*KINDS, 0], domains=[*"ab" * 6, "b"])
    write_folder(tmp_path / "folders" / "grey", GREY)
    write_folder(tmp_path / "folders" / "colour", COLOUR)
    write_folder(tmp_path / "splits" / "train" / "one", GREY)
    write_folder(tmp_path / "splits" / "test" / "one", COLOUR)
    for name in ("shards", "column", "folders", "splits"):
        source = load(name, tmp_path, 4)
        assert source.train.inputs.shape[1:] == source.test.inputs.shape[1:] == (3, 4, 4), name
    assert load("digits", None, 4).train.inputs.shape == (1438, 1, 4, 4)
    for second, channels in ((GREY, 1), (COLOUR, 3)):
        given = [as_dataset(GREY), as_dataset(second)]
        monkeypatch.setattr(sources, "_unreachable", lambda repository: None)
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, given=given, **__: given)
        sources._load.cache_clear()
        assert load("mnist", None, 4).train.inputs.shape == (12, channels, 4, 4)


@pytest.mark.parametrize(("agreed", "fits"), [((1, 4, 4), "grey"), ((3, 4, 4), "grey colour")])
def test_a_host_has_the_channels_that_were_agreed_on(tmp_path: Path, agreed: tuple[int, ...], fits: str) -> None:
    """What one host holds doesn't tell whether all others' images are grey too."""
    task = Task("insects", 2, tuple(NAMES), agreed)
    write_folder(tmp_path / "grey", GREY)
    write_folder(tmp_path / "colour", COLOUR)
    for name in ("grey", "colour"):
        if name in fits:
            data = load_host(tmp_path / name, "images", task, size=4, share=0.2)
            assert data.train.inputs.shape[1:] == data.test.inputs.shape[1:] == agreed
            assert data.unlabelled.inputs.shape[1:] == agreed
        else:
            with refused("data") as caught:
                load_host(tmp_path / name, "images", task, size=4)
            says(caught, "[3, 4, 4]", "[1, 4, 4]", "never grey of colour")
    # without a size nothing is changed
    with refused("data") as caught:
        load_host(tmp_path / "grey", "images", Task("insects", 2, tuple(NAMES), (3, 4, 5)))
    says(caught, "[1, 4, 5]", "[3, 4, 5]", "image_size")
