"""Small data sets, in memory and in files, for the tests of the data room."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image

from fedfill.data.dataset import Source
from fedfill.data.division import federate
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples

# ---- samples whose number is their content, so that they can be followed

COUNT = 400
INPUTS = np.arange(COUNT, dtype=np.float32).reshape(COUNT, 1)
LABELS = np.arange(COUNT) % 4
TEST_INPUTS = -1 - np.arange(40, dtype=np.float32).reshape(40, 1)
TEST_LABELS = np.arange(40) % 4
DATA = (INPUTS, LABELS, TEST_INPUTS, TEST_LABELS)
SIZES = {"sea": 40, "air": 20, "land": 60}  # training samples of the domains; half as many test samples


def divided(data: Any = DATA, **changes: Any) -> Federation:
    return federate(data, **{"fraction": 1.0, "partition": "iid", "clients": 4, "seed": 0, **changes})


def numbers(samples: Samples) -> list[int]:
    return [int(value) for value in samples.inputs[:, 0]]


def floats(start: int, count: int) -> NDArray[Any]:
    return np.arange(start, start + count, dtype=np.float32)[:, None]


def by_domain(test: bool = True) -> dict[Any, Any]:
    """Domain k has training samples 1000k, 1000k + 1, ... and test samples 1000k + 500, ..., classes in turn."""
    found: dict[Any, Any] = {}
    for number, (name, size) in enumerate(SIZES.items()):
        found[name] = (floats(1000 * number, size), np.arange(size) % 2)
        if test:
            found[name] += (floats(1000 * number + 500, size // 2), np.arange(size // 2) % 2)
    return found


def assert_covers(parts: list[NDArray[np.int64]], samples: int) -> None:
    """Each index once, each array sorted and of the right type."""
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(samples))


# ---- images

GREY = np.arange(12 * 4 * 5, dtype=np.uint8).reshape(12, 4, 5)
COLOUR = np.arange(12 * 4 * 5 * 3, dtype=np.uint32).astype(np.uint8).reshape(12, 4, 5, 3)
KINDS = np.arange(12) % 3
NAMES = ["ant", "bee", "cat"]
"""The labels of the images, and the names of their classes."""


def flat(values: Any, size: int = 2, colour: bool = False) -> NDArray[np.uint8]:
    """Images of one brightness each."""
    return np.stack([np.full((size, size, 3) if colour else (size, size), value, np.uint8) for value in values])


def encoded(image: NDArray[Any] | Image.Image) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, "PNG")
    return buffer.getvalue()


def write(
    path: Path, images: Any, labels: Any, names: list[str] | None = None, *, image: str = "image", label: str = "label",
    domains: Any = None,
) -> Path:  # fmt: skip
    """A Parquet file in the layout that `datasets` writes, of arrays or of encoded images."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = [encoded(pixels) for pixels in images] if isinstance(images, np.ndarray) else images
    columns = {image: [{"bytes": item, "path": None} for item in data], label: labels}
    table = pa.table(columns | ({} if domains is None else {"domain": domains}))
    if names is not None:
        features = {image: {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path)
    return path


def write_folder(folder: Path, images: Any = GREY, labels: Any = KINDS, suffix: str = "png") -> None:
    """An image in a file for each row, in the folder of its class."""
    for index, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / NAMES[label] / f"{index:02d}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


def write_shades(folder: Path, start: int, each: int = 5, size: int = 2, labels: tuple[int, ...] = (0, 1)) -> None:
    """Grey images of the brightness start, start + 1, ... in the folder of the first label, start + 10, ... in the next."""
    shades = [start + 10 * k + i for k in range(len(labels)) for i in range(each)]
    write_folder(folder, flat(shades, size), np.repeat(labels, each))


def as_dataset(pixels: NDArray[Any] = GREY, image: str = "image", label: str = "label") -> datasets.Dataset:
    features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=NAMES)})
    return datasets.Dataset.from_dict({image: [Image.fromarray(p) for p in pixels], label: KINDS}, features=features)


def rows(source: Source) -> set[tuple[bytes, int]]:
    """All samples of a source, train and test, whatever their order."""
    both = source.train + source.test
    return {(image.numpy().tobytes(), int(label)) for image, label in zip(both.inputs, both.labels, strict=True)}


def brightness(source: Source) -> dict[str, list[int]]:
    """The values of each domain's samples, training and test."""
    assert source.domains is not None
    values: dict[str, list[int]] = {name: [] for name in source.domains.names}
    for samples, index in ((source.train, source.domains.train), (source.test, source.domains.test)):
        assert len(samples) == len(index)
        for image, number in zip(samples.inputs, index, strict=True):
            values[source.domains.names[number]].append(int(image.flatten()[0]))
    return {name: sorted(found) for name, found in values.items()}


# ---- errors


def says(caught: pytest.ExceptionInfo[Exception], *facts: object) -> None:
    """The sentence names these facts, such as a file, a row or a value; how it is worded is left open."""
    for fact in facts:
        assert str(fact) in str(caught.value)
