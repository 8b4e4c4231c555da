"""Sources: what is read is what was written, the test set stays apart, and broken data get a sentence."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from fedfill.data import sources
from fedfill.data.dataset import Source
from fedfill.data.objects import from_python
from fedfill.data.sources import HUB, JOINED, NAMES, load
from fedfill.errors import FedfillError
from fedfill.tree import sha256

GREY = np.arange(12 * 4 * 5, dtype=np.uint8).reshape(12, 4, 5)
COLOUR = np.arange(12 * 4 * 5 * 3, dtype=np.uint32).astype(np.uint8).reshape(12, 4, 5, 3)
LABELS = np.arange(12) % 3
CLASSES = ["ant", "bee", "cat"]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDFILL_DATA", raising=False)
    sources._load.cache_clear()


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write(
    path: Path,
    images: list[bytes | None] | np.ndarray[Any, Any],
    labels: Any,
    names: list[str] | None = None,
    image: str = "image",
    label: str = "label",
) -> Path:
    """A Parquet file in the layout that `datasets` writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = [png(pixels) for pixels in images] if isinstance(images, np.ndarray) else images
    table = pa.table({image: [{"bytes": data, "path": None} for data in encoded], label: labels})
    if names is not None:
        features = {image: {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path)
    return path


def rows(source: Source) -> set[tuple[bytes, int]]:
    """All samples of a source, train and test, whatever their order."""
    both = source.train + source.test
    return {(image.numpy().tobytes(), int(label)) for image, label in zip(both.inputs, both.labels, strict=True)}


# ---- bundled


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


# ---- Parquet


@pytest.mark.parametrize(("pixels", "channels"), [(GREY, 1), (COLOUR, 3)])
def test_parquet_pixels_and_names(tmp_path: Path, pixels: np.ndarray[Any, Any], channels: int) -> None:
    write(tmp_path / "insects" / "train.parquet", pixels[:9], LABELS[:9], CLASSES)
    write(tmp_path / "insects" / "test.parquet", pixels[9:], LABELS[9:], CLASSES)
    source = load("insects", tmp_path)
    expected = pixels.reshape(12, 4, 5, channels).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(source.train.inputs.numpy(), expected[:9])
    np.testing.assert_array_equal(source.test.inputs.numpy(), expected[9:])
    assert source.train.labels.tolist() == LABELS[:9].tolist()
    assert source.class_names == ("ant", "bee", "cat")
    assert source.name == "insects"
    assert source.train.inputs.is_contiguous()


def test_parquet_written_by_datasets(tmp_path: Path) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    data = datasets.Dataset.from_dict({"image": [Image.fromarray(p) for p in GREY], "label": LABELS}, features=features)
    (tmp_path / "insects").mkdir()
    data.to_parquet(str(tmp_path / "insects" / "train.parquet"))
    data.to_parquet(str(tmp_path / "insects" / "test.parquet"))
    source = load("insects", tmp_path)
    np.testing.assert_array_equal(source.train.inputs[:, 0].numpy(), GREY)
    assert source.class_names == ("ant", "bee", "cat")


def test_parquet_in_the_data_folder_itself_and_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "train.parquet", GREY, LABELS)
    write(tmp_path / "test.parquet", GREY[:3], LABELS[:3])
    monkeypatch.setenv("FEDFILL_DATA", str(tmp_path))
    source = load("whatever")
    assert (len(source.train), len(source.test)) == (12, 3)
    assert source.class_names == ("0", "1", "2")


def test_shards_are_read_in_order(tmp_path: Path) -> None:
    write(tmp_path / "train-00001-of-00002.parquet", GREY[5:], LABELS[5:], CLASSES)
    write(tmp_path / "train-00000-of-00002.parquet", GREY[:5], LABELS[:5], CLASSES)
    write(tmp_path / "test-00000-of-00001.parquet", GREY, LABELS, CLASSES)
    source = load("x", tmp_path)
    np.testing.assert_array_equal(source.train.inputs[:, 0].numpy(), GREY)
    assert source.train.labels.tolist() == LABELS.tolist()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.parquet", GREY, LABELS)
    with pytest.raises(
        FedfillError, match=r"train-00001-of-00002.parquet' is missing beside 'train-00000-of-00002.parquet'"
    ):
        load("x", tmp_path)


def test_shards_that_name_their_classes_differently(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.parquet", GREY, LABELS, CLASSES)
    write(tmp_path / "train-00001-of-00002.parquet", GREY, LABELS, CLASSES[::-1])
    with pytest.raises(FedfillError, match=r"train-00001-of-00002.parquet' names its classes differently from"):
        load("x", tmp_path)


def test_shards_of_different_sizes(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.parquet", GREY, LABELS)
    write(tmp_path / "train-00001-of-00002.parquet", GREY[:, :3].copy(), LABELS)
    with pytest.raises(FedfillError, match=r"train-00001-of-00002.parquet': some samples have shape \[1, 4, 5\]"):
        load("x", tmp_path)


def test_cifar_columns(tmp_path: Path) -> None:
    write(tmp_path / "cifar100" / "train.parquet", COLOUR, LABELS, CLASSES, image="img", label="fine_label")
    source = load("cifar100", tmp_path)
    assert rows(source) == {(p.transpose(2, 0, 1).tobytes(), int(y)) for p, y in zip(COLOUR, LABELS, strict=True)}


def test_missing_test_split_is_held_out_the_same_way_every_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write(tmp_path / folder / "train.parquet", GREY, LABELS)
    first, second = load("a", tmp_path), load("b", tmp_path)
    assert first.test.counts(3) == [1, 1, 1]
    assert torch.equal(first.test.inputs, second.test.inputs)
    assert len(rows(first)) == 12
    assert "fifth" in first.note


def test_more_rows_than_one_batch_and_one_block(tmp_path: Path) -> None:
    count = 8192 + 700
    values = (np.arange(count) % 251).astype(np.uint8)
    write(
        tmp_path / "train.parquet", np.broadcast_to(values[:, None, None], (count, 2, 2)).copy(), np.arange(count) % 7
    )
    write(tmp_path / "test.parquet", np.zeros((7, 2, 2), np.uint8), np.arange(7))
    source = load("x", tmp_path)
    np.testing.assert_array_equal(source.train.inputs[:, 0, 1, 1].numpy(), values)
    np.testing.assert_array_equal(source.train.labels.numpy(), np.arange(count) % 7)
    # a broken row is counted from the beginning of the file
    images = [png(np.zeros((2, 2), np.uint8))] * count
    write(tmp_path / "broken" / "train.parquet", [*images[:8500], b"hello", *images[8501:]], np.arange(count) % 7)
    with pytest.raises(FedfillError, match=r"row 8500 of '.*train.parquet' can't be decoded"):
        load("broken", tmp_path)


def test_palette_and_one_bit_images_become_colour_and_grey(tmp_path: Path) -> None:
    def encoded(image: Image.Image) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return buffer.getvalue()

    dots = Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8)).convert("1")
    write(tmp_path / "bits" / "train.parquet", [encoded(dots)] * 6, [0] * 6)
    assert load("bits", tmp_path).train.inputs[0].tolist() == [[[0, 255], [255, 0]]]
    red = Image.new("RGB", (1, 1), (255, 0, 0)).convert("P")
    write(tmp_path / "palette" / "train.parquet", [encoded(red)] * 6, [0] * 6)
    assert load("palette", tmp_path).train.inputs[0].flatten().tolist() == [255, 0, 0]


def sixteen_bit() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 5), 40_000, np.uint16)).save(buffer, "PNG")
    return buffer.getvalue()


IMAGES = [png(pixels) for pixels in GREY]


@pytest.mark.parametrize(
    ("images", "labels", "names", "sentence"),
    [
        (
            [*IMAGES[:7], IMAGES[7][:-30], *IMAGES[8:]],
            LABELS,
            None,
            r"row 7 of '.*train.parquet' can't be decoded as an image",
        ),
        (
            [*IMAGES[:7], b"hello", *IMAGES[8:]],
            LABELS,
            None,
            r"row 7 of .* can't be decoded .*: no image that can be recognised",
        ),
        ([*IMAGES[:7], None, *IMAGES[8:]], LABELS, None, r"row 7 of .* holds no image bytes"),
        (
            [*IMAGES[:7], png(GREY[0, :3]), *IMAGES[8:]],
            LABELS,
            None,
            r"row 7 of .* is 5x3 grey, but row 0 of .* is 5x4 grey",
        ),
        ([*IMAGES[:7], png(COLOUR[0]), *IMAGES[8:]], LABELS, None, r"row 7 of .* is 5x4 colour, but row 0"),
        ([sixteen_bit()] * 12, LABELS, None, r"row 0 of .* is an image of mode 'I;16', but 8-bit"),
        (IMAGES, LABELS - 1, None, r"train.parquet': a label is -1, but classes are counted from 0"),
        (IMAGES, LABELS + 1, CLASSES, r"train.parquet': a label is 3, but there are 3 class names, so 0 to 2"),
        (IMAGES, LABELS / 2, None, r"train.parquet' has labels of type double, but integers"),
        (IMAGES, [None, *LABELS[1:].tolist()], None, r"train.parquet' has 1 empty labels"),
        ([], np.array([], np.int64), None, r"train.parquet' (holds no samples|has images of type)"),
    ],
)
def test_broken_rows(
    tmp_path: Path, images: list[bytes | None], labels: Any, names: list[str] | None, sentence: str
) -> None:
    write(tmp_path / "set" / "train.parquet", images, labels, names)
    with pytest.raises(FedfillError, match=sentence):
        load("set", tmp_path)


def test_broken_files(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet", GREY, LABELS).read_bytes()
    for name, data in {"short": whole[:-200], "middle": whole[:300] + whole[500:], "none": b""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.parquet").write_bytes(data)
        with pytest.raises(
            FedfillError, match=rf"{name}/train.parquet'.*can't be read as Parquet, it may be cut short"
        ):
            load(name, tmp_path)


def test_missing_columns(tmp_path: Path) -> None:
    write(tmp_path / "a" / "train.parquet", GREY, LABELS, image="picture")
    with pytest.raises(FedfillError, match=r"a/train.parquet' has no column 'image' or 'img', only picture, label"):
        load("a", tmp_path)
    write(tmp_path / "b" / "train.parquet", GREY, LABELS, label="kind")
    with pytest.raises(FedfillError, match=r"b/train.parquet' has no column 'label' or 'fine_label', only image, kind"):
        load("b", tmp_path)


def test_splits_that_differ(tmp_path: Path) -> None:
    write(tmp_path / "a" / "train.parquet", GREY, LABELS)
    write(tmp_path / "a" / "test.parquet", COLOUR, LABELS)
    with pytest.raises(FedfillError, match=r"data 'a': some samples have shape \[1, 4, 5\].* others \[3, 4, 5\]"):
        load("a", tmp_path)
    write(tmp_path / "b" / "train.parquet", GREY, LABELS, CLASSES)
    write(tmp_path / "b" / "test.parquet", GREY, LABELS, CLASSES[::-1])
    with pytest.raises(FedfillError, match=r"class names in the train and test files of .* differ"):
        load("b", tmp_path)


def test_folders_that_are_missing_or_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedfillError, match=r"data 'empty': '.*empty' holds neither train\*.parquet files, nor"):
        load("empty", tmp_path)
    with pytest.raises(FedfillError, match=r"data: 'emty' is unknown; did you mean 'empty'"):
        load("emty", tmp_path)
    with pytest.raises(FedfillError, match=r"data: 'fashon_mnist' is unknown; did you mean 'fashion_mnist'"):
        load("fashon_mnist")
    with pytest.raises(FedfillError, match=r"data_dir: '.*nowhere' is not a folder"):
        load("mnist", tmp_path / "nowhere")
    monkeypatch.setenv("FEDFILL_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FedfillError, match=r"FEDFILL_DATA: '.*nowhere' is not a folder"):
        load("mnist")
    with pytest.raises(FedfillError, match=r"'\.\./empty' is unknown"):
        load("../empty", tmp_path / "empty")


def test_too_few_samples_for_a_test_set(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", GREY[:3], LABELS[:3])
    with pytest.raises(FedfillError, match="no test set and the 3 samples are too few"):
        load("x", tmp_path)


@pytest.mark.parametrize("within", ["data", "plain_text"])
def test_a_clone_of_a_hub_repository(tmp_path: Path, within: str) -> None:
    clone = tmp_path / "insects"
    write(clone / within / "train-00000-of-00001.parquet", GREY, LABELS, CLASSES)
    write(clone / within / "test-00000-of-00001.parquet", GREY[:3], LABELS[:3], CLASSES)
    (clone / "README.md").write_text("Insects")
    write(clone / ".git" / "train.parquet", COLOUR, LABELS)
    (clone / "assets").mkdir()
    (clone / "assets" / "bee.png").write_bytes(png(GREY[0]))
    source = load("insects", tmp_path)
    np.testing.assert_array_equal(source.train.inputs[:, 0].numpy(), GREY)
    assert (len(source.test), source.class_names, source.name) == (3, ("ant", "bee", "cat"), "insects")
    # what lies in the folder itself goes before what lies in a folder below
    write(clone / "train.parquet", GREY[:6], LABELS[:6], CLASSES)
    write(clone / "test.parquet", GREY[:3], LABELS[:3], CLASSES)
    sources._load.cache_clear()
    assert len(load("insects", tmp_path).train) == 6


def test_a_clone_with_several_configurations(tmp_path: Path) -> None:
    for count, within in ((12, "cropped"), (9, "full")):
        write(tmp_path / "insects" / within / "train.parquet", GREY[:count], LABELS[:count])
    with pytest.raises(FedfillError, match=r"in 2 folders \(cropped, full\); choose one, such as .* --data cropped$"):
        load("insects", tmp_path)
    full = load("full", tmp_path / "insects")
    assert len(full.train) + len(full.test) == 9
    # another data set below the data folder is never taken for one that isn't there
    with pytest.raises(FedfillError, match="'inject' is unknown; did you mean 'insects'"):
        load("inject", tmp_path)


@pytest.mark.parametrize(
    ("names", "pair"),
    [
        (["train.parquet", "train-00000-of-00001.parquet"], "train-00000-of-00001.parquet' and 'train.parquet'"),
        (["train.parquet", "train_copy.parquet"], "train.parquet' and 'train_copy.parquet'"),
        (["train-00000-of-00001.parquet", "train_copy.parquet"], "00001.parquet' and 'train_copy.parquet'"),
        (
            ["train-00000-of-00001-0a1b.parquet", "train-00000-of-00001-ffff.parquet"],
            "0a1b.parquet' and '.*ffff.parquet'",
        ),
        (
            ["train-00000-of-00001.parquet", "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
            "00001.parquet' and 'train-00000-of-00002.parquet'",
        ),
        (["test.parquet", "test-00000-of-00001.parquet"], "test-00000-of-00001.parquet' and 'test.parquet'"),
    ],
)
def test_the_same_samples_twice(tmp_path: Path, names: list[str], pair: str) -> None:
    for name in {"train.parquet", *names} if names[0].startswith("test") else names:
        write(tmp_path / "set" / name, GREY, LABELS)
    with pytest.raises(FedfillError, match=f"{pair} lie side by side, which may be the same samples twice; remove one"):
        load("set", tmp_path)


def test_names_of_parts(tmp_path: Path) -> None:
    write(tmp_path / "old" / "train-00000-of-00002-0a1b.parquet", GREY[:5], LABELS[:5])
    write(tmp_path / "old" / "train-00001-of-00002-ffff.parquet", GREY[5:], LABELS[5:])
    write(tmp_path / "own" / "train_a.parquet", GREY[:5], LABELS[:5])
    write(tmp_path / "own" / "train_b.parquet", GREY[5:], LABELS[5:])
    assert len(rows(load("old", tmp_path))) == len(rows(load("own", tmp_path))) == 12
    (tmp_path / "old" / "train-00000-of-00002-0a1b.parquet").unlink()
    sources._load.cache_clear()
    with pytest.raises(FedfillError, match=r"train-00000-of-00002\*.parquet' is missing beside"):
        load("old", tmp_path)


def test_more_classes_than_samples(tmp_path: Path) -> None:
    labels = LABELS.copy()
    labels[10] = 3_000_000
    write(tmp_path / "a" / "train-00000-of-00002.parquet", GREY[:6], labels[:6], label="fine_label")
    write(tmp_path / "a" / "train-00001-of-00002.parquet", GREY[6:], labels[6:], label="fine_label")
    with pytest.raises(
        FedfillError,
        match=r"a/train-00001-of-00002.parquet', column 'fine_label': the highest label is 3000000, which makes "
        "3,000,001 classes of 12 samples; number",
    ):
        load("a", tmp_path)
    write(tmp_path / "b" / "train.parquet", GREY, LABELS)
    write(tmp_path / "b" / "test.parquet", GREY, labels)
    with pytest.raises(FedfillError, match=r"b/test.parquet', column 'label': .* 3,000,001 classes of 24 samples"):
        load("b", tmp_path)
    # names say how many classes there are, however few samples
    write(tmp_path / "c" / "train.parquet", GREY, LABELS, [*CLASSES, *map(str, range(100))])
    assert len(load("c", tmp_path).class_names) == 103
    # as many classes as samples is the most
    write(tmp_path / "d" / "train.parquet", GREY, np.where(labels > 3, 11, labels))
    assert len(load("d", tmp_path).class_names) == 12
    write(tmp_path / "e" / "train.parquet", GREY, np.where(labels > 3, 12, labels))
    with pytest.raises(FedfillError, match="the highest label is 12, which makes 13 classes of 12 samples"):
        load("e", tmp_path)


# ---- image folders


def write_folder(folder: Path, pixels: np.ndarray[Any, Any] = GREY, suffix: str = "png") -> None:
    for index, (image, label) in enumerate(zip(pixels, LABELS, strict=True)):
        path = folder / CLASSES[label] / f"{index:02d}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def test_image_folder_with_splits(tmp_path: Path) -> None:
    write_folder(tmp_path / "insects" / "train")
    write_folder(tmp_path / "insects" / "test", GREY[::-1])
    (tmp_path / "insects" / "train" / "ant" / "notes.txt").write_text("not an image")
    source = load("insects", tmp_path)
    order = np.argsort(LABELS, kind="stable")  # by class folder, then by file name
    np.testing.assert_array_equal(source.train.inputs[:, 0].numpy(), GREY[order])
    np.testing.assert_array_equal(source.test.inputs[:, 0].numpy(), GREY[::-1][order])
    assert source.train.labels.tolist() == sorted(LABELS.tolist())
    assert source.class_names == ("ant", "bee", "cat")


def test_image_folder_without_splits(tmp_path: Path) -> None:
    write_folder(tmp_path / "insects")
    source = load("insects", tmp_path)
    assert rows(source) == {(p.tobytes(), int(y)) for p, y in zip(GREY, LABELS, strict=True)}
    assert source.test.counts(3) == [1, 1, 1]
    assert "fifth" in source.note


def test_image_folder_of_jpegs(tmp_path: Path) -> None:
    write_folder(tmp_path / "insects" / "train", np.full((12, 8, 8, 3), 128, np.uint8), "JPG")
    source = load("insects", tmp_path)
    assert source.train.inputs.shape[1:] == (3, 8, 8)
    assert (source.train.inputs.int() - 128).abs().max() <= 2


def test_broken_image_folders(tmp_path: Path) -> None:
    write_folder(tmp_path / "a" / "train")
    broken = tmp_path / "a" / "train" / "bee" / "01.png"
    broken.write_bytes(broken.read_bytes()[:-30])
    with pytest.raises(FedfillError, match=r"'.*a/train/bee/01.png' can't be decoded as an image, it may be cut short"):
        load("a", tmp_path)
    write_folder(tmp_path / "b" / "train")
    (tmp_path / "b" / "train" / "dog").mkdir()
    with pytest.raises(FedfillError, match=r"the class folder '.*dog' holds no images"):
        load("b", tmp_path)
    write_folder(tmp_path / "c" / "train")
    (tmp_path / "c" / "test" / "dog").mkdir(parents=True)
    with pytest.raises(FedfillError, match=r"'.*c/test/dog' is a class that the training images don't have"):
        load("c", tmp_path)
    (tmp_path / "d" / "train").mkdir(parents=True)
    with pytest.raises(FedfillError, match=r"'.*d/train' holds no class folders"):
        load("d", tmp_path)


def test_a_folder_of_pictures_among_data_sets_makes_no_classes_of_them(tmp_path: Path) -> None:
    write_folder(tmp_path / "insects")
    (tmp_path / "screens").mkdir()
    (tmp_path / "screens" / "a.png").write_bytes(png(GREY[0]))
    assert load("insects", tmp_path).class_names == ("ant", "bee", "cat")
    with pytest.raises(FedfillError, match=r"^data: 'inserts' is unknown; did you mean 'insects'"):
        load("inserts", tmp_path)
    # where there are classes alone, the data folder is the data set
    assert load("whatever", tmp_path / "insects").class_names == ("ant", "bee", "cat")


def test_folders_that_nobody_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "insects")
    closed = tmp_path / "lost+found"
    closed.mkdir()
    write_folder(tmp_path / "open")
    (tmp_path / "open" / "dog").mkdir()
    iterdir = Path.iterdir

    def refused(self: Path) -> Any:
        if self in (closed, tmp_path / "open" / "dog"):
            raise PermissionError(13, "Permission denied", str(self))
        return iterdir(self)

    monkeypatch.setattr(Path, "iterdir", refused)  # nothing is closed to root, who may run the tests
    with pytest.raises(FedfillError, match=r"^data: 'inserts' is unknown; did you mean 'insects'"):
        load("inserts", tmp_path)
    assert load("insects", tmp_path).class_names == ("ant", "bee", "cat")
    for name, place in (("lost+found", "lost.found"), ("open", "open/dog")):
        with pytest.raises(
            FedfillError, match=rf"^data '.*': '.*' can't be read \(.*Permission denied: '.*{place}'\)$"
        ):
            load(name, tmp_path)
    monkeypatch.setattr(Path, "iterdir", lambda self: refused(closed))
    with pytest.raises(FedfillError, match=r"^data_dir: '.*' can't be read \(.*Permission denied: .*\)$"):
        load("inserts", tmp_path)


# ---- the Hub


def as_dataset(pixels: np.ndarray[Any, Any] = GREY, image: str = "image", label: str = "label") -> datasets.Dataset:
    features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=CLASSES)})
    return datasets.Dataset.from_dict({image: [Image.fromarray(p) for p in pixels], label: LABELS}, features=features)


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


def test_a_local_folder_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_from_hub", lambda name: pytest.fail("asked the Hub"))
    write(tmp_path / "mnist" / "train.parquet", GREY, LABELS)
    assert len(load("mnist", tmp_path).train) == 9


def test_an_unreachable_hub_fails_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # nothing listens on this port, so the failure is real and needs no network
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    offline = datasets.config.HF_HUB_OFFLINE
    start = time.monotonic()
    with pytest.raises(FedfillError) as caught:
        load("usps")
    assert time.monotonic() - start < 10
    sentence = str(caught.value)
    assert sentence.startswith("data: 'usps' could not be fetched from the Hugging Face Hub (")
    assert "folder 'usps' below --data-dir or FEDFILL_DATA, or use --data digits" in sentence
    assert "\n" not in sentence
    assert offline == datasets.config.HF_HUB_OFFLINE


def test_a_download_that_breaks_off_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("the line went dead\nand more")

    monkeypatch.setattr(sources, "_unreachable", lambda repository: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(FedfillError, match=r"\(the line went dead\); put its Parquet files"):
        load("mnist")


def test_every_name_is_bundled_or_on_the_hub() -> None:
    assert set(NAMES) == {"digits", *HUB, *JOINED}


# ---- Python objects


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
    source = from_python((wrap(inputs), wrap(LABELS), wrap(inputs[:3]), wrap(LABELS[:3])), "mine")
    assert isinstance(source, Source)
    np.testing.assert_array_equal(source.train.inputs.numpy(), expected)
    np.testing.assert_array_equal(source.test.inputs.numpy(), expected[:3])
    assert source.train.labels.dtype == torch.int64
    assert (source.name, source.class_names) == ("mine", ("0", "1", "2"))


def test_arrays_without_a_test_set() -> None:
    source = from_python((GREY, LABELS))
    assert isinstance(source, Source)
    assert source.test.counts(3) == [1, 1, 1]
    assert rows(source) == {(p.tobytes(), int(y)) for p, y in zip(GREY, LABELS, strict=True)}


def test_classes_that_only_the_test_set_has_count_too() -> None:
    source = from_python((GREY[:3], [0, 1, 2], GREY[3:5], [1, 4]))
    assert isinstance(source, Source)
    assert source.class_names == ("0", "1", "2", "3", "4")


def test_datasets_objects(tmp_path: Path) -> None:
    whole = from_python(datasets.DatasetDict(train=as_dataset(), test=as_dataset(GREY[::-1])))
    assert isinstance(whole, Source)
    np.testing.assert_array_equal(whole.train.inputs[:, 0].numpy(), GREY)
    np.testing.assert_array_equal(whole.test.inputs[:, 0].numpy(), GREY[::-1])
    assert whole.class_names == ("ant", "bee", "cat")
    part = from_python(as_dataset().select([11, 3, 0, 6, 9]))  # rows picked and reordered
    assert isinstance(part, Source)
    assert rows(part) == {(GREY[i].tobytes(), int(LABELS[i])) for i in (11, 3, 0, 6, 9)}


def test_class_names_of_the_test_split_are_those_of_the_training_split() -> None:
    train = as_dataset()

    def test(names: list[str] | None, label: int) -> datasets.Dataset:
        kind = datasets.Value("int64") if names is None else datasets.ClassLabel(names=names)
        features = datasets.Features({"image": datasets.Image(), "label": kind})
        return datasets.Dataset.from_dict({"image": [Image.fromarray(GREY[0])], "label": [label]}, features=features)

    for names in (CLASSES[::-1], [*CLASSES, "dog"]):
        with pytest.raises(
            FedfillError, match=r"^data: the class names in the train and test splits differ; give both the same names"
        ):
            from_python(datasets.DatasetDict(train=train, test=test(names, 0)))
    with pytest.raises(FedfillError, match=r"^data, test set: a label is 3, but there are 3 class names"):
        from_python(datasets.DatasetDict(train=train, test=test(None, 3)))
    source = from_python(datasets.DatasetDict(train=train, test=test(None, 2)))
    assert isinstance(source, Source)
    assert (source.class_names, source.test.labels.tolist()) == (tuple(CLASSES), [2])


@pytest.mark.parametrize("kind", [">f4", ">f8", np.longdouble, np.float16])
def test_floats_of_any_kind(kind: Any) -> None:
    inputs = np.linspace(0, 1, 24).reshape(12, 2)
    source = from_python((inputs.astype(kind), LABELS, inputs.astype(kind), LABELS))
    assert isinstance(source, Source)
    assert source.train.inputs.dtype == torch.float32
    np.testing.assert_array_equal(source.train.inputs.numpy(), inputs.astype(kind).astype(np.float32))


def test_datasets_of_arrays_and_of_files(tmp_path: Path) -> None:
    plain = from_python(datasets.Dataset.from_dict({"image": GREY, "label": LABELS}))
    assert isinstance(plain, Source)
    assert plain.train.inputs.dtype == torch.uint8
    assert rows(plain) == {(p.tobytes(), int(y)) for p, y in zip(GREY, LABELS, strict=True)}
    floats = from_python(datasets.Dataset.from_dict({"image": np.ones((12, 2), np.float32), "label": LABELS}))
    assert isinstance(floats, Source)
    assert floats.train.inputs.dtype == torch.float32
    files = []
    for index, pixels in enumerate(GREY):
        files.append(str(tmp_path / f"{index}.png"))
        Image.fromarray(pixels).save(files[-1])
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    from_files = from_python(datasets.Dataset.from_dict({"image": files, "label": LABELS}, features=features))
    assert isinstance(from_files, Source)
    assert rows(from_files) == rows(plain)


def test_a_list_is_one_data_set_per_client() -> None:
    given = [(GREY, LABELS), as_dataset(), load("digits")]
    found = from_python(given)
    assert isinstance(found, list)
    assert [type(source) for source in found] == [Source] * 3
    assert found[2] is given[2]


def test_a_client_with_too_few_samples_has_an_empty_test_set() -> None:
    lone, many = from_python([(GREY[:1], [2]), (GREY, LABELS)])  # type: ignore[misc]
    assert (len(lone.train), lone.test.inputs.shape, lone.train.labels.tolist()) == (1, (0, 1, 4, 5), [2])
    assert lone.class_names == ("0", "1", "2")  # more than it has samples, but not more than all have
    assert "too few to hold one out" in lone.note
    assert len(many.test) == 3
    assert "fixed stratified fifth" in many.note
    empty = Source("x", many.train, many.test[:0], many.class_names, "")
    for given in ([(GREY[:1], [0]), (GREY[:2], [0, 1])], [empty, empty]):
        with pytest.raises(
            FedfillError, match=r"^data: there is no test set and the samples of each client are too few"
        ):
            from_python(given)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ((GREY, LABELS[:11]), "there are 12 inputs but 11 labels"),
        ((GREY, LABELS * 0.5), "labels are float64 of shape .*, but one integer per sample"),
        ((GREY, LABELS.reshape(3, 4)), "labels are int64 of shape"),
        ((GREY, LABELS - 1), "a label is -1"),
        ((GREY, LABELS > 0), "labels are bool"),
        ((np.full((3, 2), np.nan), [0, 1, 2]), "inputs hold NaN"),
        ((torch.tensor([[1.0], [float("inf")]]), [0, 1]), "inputs hold NaN or infinite"),
        ((np.full((3, 2), 1e300), [0, 1, 2]), "inputs hold .* values beyond the range of float32"),
        ((torch.full((3, 2), 1e300, dtype=torch.float64), [0, 1, 2]), "inputs hold .* beyond the range of float32"),
        ((GREY[:0], LABELS[:0]), r"inputs have shape \[0, 4, 5\], but at least one sample"),
        ((GREY.astype(np.int64), LABELS), "inputs are int64, but uint8 images or floats"),
        ((torch.zeros(3, 2, 2, dtype=torch.int32), [0, 1, 2]), "inputs are int32"),
        ((GREY.reshape(12, 20), LABELS), r"uint8 inputs have shape \[12, 20\]"),
        ((np.zeros((12, 4, 5, 2), np.uint8), LABELS), r"uint8 inputs have shape \[12, 4, 5, 2\]"),
        (([[1.0], [2.0]], [0, 1]), "inputs are a list"),
        ((GREY, LABELS, GREY), "found a tuple of 3"),
        ((GREY, LABELS, COLOUR, LABELS), r"data: some samples have shape \[1, 4, 5\]"),
        ((GREY, LABELS, GREY, LABELS[:3]), "data, test set: there are 12 inputs but 3 labels"),
        ([], "the list of clients' data sets is empty"),
        ([(GREY, LABELS), (GREY, LABELS - 1)], "^data of client 1: a label is -1"),
        ([GREY, LABELS], "^data of client 0: found ndarray"),
        ((GREY, LABELS * 10**6), r"^data: the highest label is 2000000, which makes .* classes of 12 samples"),
        ((GREY, LABELS, GREY, LABELS + 22), "^data, test set: the highest label is 24, which makes 25 classes of 24"),
        ([(GREY, LABELS), (GREY[:1], [13])], "^data of client 1: the highest label is 13, which makes 14 .* of 13"),
        (
            datasets.Dataset.from_dict({"image": (GREY / 2).tolist(), "label": [99] * 12}),
            "^data, column 'label': the highest label is 99",
        ),
        (7, "found int, but a tuple"),
        (datasets.DatasetDict(test=datasets.Dataset.from_dict({"a": [1]})), "no split 'train', only test"),
        (datasets.Dataset.from_dict({"text": ["a"], "label": [0]}), "no column 'image' or 'img', only text, label"),
        (datasets.Dataset.from_dict({"image": [], "label": []}), "holds no samples"),
    ],
)
def test_bad_python_data(data: Any, sentence: str) -> None:
    with pytest.raises(FedfillError, match=sentence):
        from_python(data)


def test_class_folders_with_a_stray_one_beside_them_say_why_they_are_no_data_set(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(png(GREY[0]))
    (tmp_path / "runs").mkdir()
    with pytest.raises(
        FedfillError, match=r"'pets' is unknown; .* itself is no data set, as not each of its folders holds images$"
    ):
        load("pets", tmp_path)
