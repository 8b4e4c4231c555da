"""Images on disk: Parquet in the Hugging Face layout and folders by class, decoded to uint8 tensors.

Images stay ``[n, channels, height, width]`` as they were stored, unless a size is asked for; values are not scaled here.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedfill.data.samples import Samples
from fedfill.errors import FedfillError

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")
DOMAIN_COLUMN = "domain"
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})

SPLITS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation"})
"""Names of folders, in small letters, that are parts of a data set and no domains of it."""

SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(-[0-9a-f]+)?\.parquet")
"""File names of shards: first words, number, how many there are, and the hash that older ones carry."""

# Pillow's modes by what they become; anything else (16-bit, floating point) would lose information in uint8
GREY = frozenset({"1", "L", "LA"})
COLOUR = frozenset({"RGB", "RGBA", "P", "PA", "CMYK", "YCbCr"})


@dataclass(frozen=True)
class Part:
    """One part of a data set, as it was read.

    Attributes:
        samples: Its samples.
        names: The classes' names; None where nothing tells them.
        place: Where its highest label stands, for the beginning of a sentence.
        domains: ``[n]`` names of the samples' domains; None where they have none.
    """

    samples: Samples
    names: tuple[str, ...] | None
    place: str
    domains: np.ndarray[Any, Any] | None = None


def find_layout(folder: Path) -> str | None:
    """How data lie there: ``parquet``, ``splits`` (train/), ``classes`` (CLASS/images), ``domains`` (DOMAIN/CLASS/images) or not at all."""
    if any(folder.glob("train*.parquet")):
        return "parquet"
    if (folder / "train").is_dir():
        return "splits"
    if any(_holds_images(child) for child in _children(folder)):
        return "classes"
    grandchildren = (grandchild for child in _children(folder) for grandchild in _children_if_readable(child))
    return "domains" if any(_holds_images(grandchild) for grandchild in grandchildren) else None


def holds_classes_alone(folder: Path) -> bool:
    """Whether every folder in it holds images, so that no data set or anything else lies beside the classes."""
    return all(_holds_images(child) for child in _children(folder))


def descend(folder: Path, where: str) -> Path:
    """The folder below that holds the Parquet files, as in a clone of a repository of the Hub; else the folder itself."""
    if find_layout(folder) in ("parquet", "splits"):
        return folder
    # goes before folders of images: such a repository may also have one with the pictures of its description
    found = [child for child in _children(folder) if any(child.glob("train*.parquet"))]
    if len(found) > 1:
        raise FedfillError(
            f"{where}: '{folder}' has train*.parquet files in {len(found)} folders "
            f"({', '.join(child.name for child in found)}); choose one, such as --data-dir '{folder}' --data "
            f"{found[0].name}"
        )
    return found[0] if found else folder


def _children(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__MACOSX")))


def _children_if_readable(folder: Path) -> list[Path]:
    """Its folders; none where nobody may look into it, as a layout is only looked for."""
    try:
        return _children(folder)
    except PermissionError:
        return []


def _holds_images(folder: Path) -> bool:
    """Whether images lie in it; likewise."""
    try:
        return any(_images(folder))
    except PermissionError:
        return False


def _images(folder: Path) -> Iterator[Path]:
    return (
        path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")
    )


def read_domains(folder: Path, names: tuple[str, ...] | None, size: int | None) -> dict[str, Part]:
    """The images of ``folder/DOMAIN/CLASS/`` by domain, ordered by `in_order`; one may lack classes that another has."""
    found = [folder / name for name in in_order(child.name for child in _children(folder))]
    for domain in found:
        if domain.name.lower() in SPLITS:
            raise FedfillError(
                f"data: '{domain}' would be a domain, but its name is that of a part of a data set; rename such folders "
                "to train and test"
            )
    classes = names or tuple(sorted({child.name for domain in found for child in _children(domain)}))
    return {domain.name: read_images(domain, classes, size) for domain in found}


def read_images(folder: Path, names: tuple[str, ...] | None, size: int | None = None) -> Part:
    """The images of ``folder/CLASS/``; where `names` are given, it may have no other classes."""
    found = tuple(path.name for path in _children(folder))
    if not found:
        raise FedfillError(f"data: '{folder}' holds no class folders")
    if names is not None and (extra := sorted(set(found) - set(names))):
        raise FedfillError(f"data: '{folder / extra[0]}' is a class that the training images don't have")
    names = names or found
    paths: list[Path] = []
    labels: list[int] = []
    for child in _children(folder):
        members = sorted(_images(child))
        if not members:
            raise FedfillError(f"data: the class folder '{child}' holds no images")
        paths += members
        labels += [names.index(child.name)] * len(members)
    inputs = _stack(_decode(paths, lambda row: f"'{paths[row]}'", size))
    return Part(Samples(inputs, torch.tensor(labels)), names, f"data: '{folder}'")


# ---- Parquet


def read_parquet(folder: Path, split: str, size: int | None = None) -> Part:
    """All shards of a split, in the order of their names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    images: list[Tensor] = []
    labels: list[np.ndarray[Any, Any]] = []
    domains: list[np.ndarray[Any, Any]] = []
    names: tuple[str, ...] | None = None
    has_domain = False
    highest, place = -1, ""
    files = sorted(folder.glob(f"{split}*.parquet"))
    _check_files(files, split)
    for index, file in enumerate(files):
        where = f"data: '{file}'"
        try:
            parquet = pq.ParquetFile(file)
            image, label = find_columns(parquet.schema_arrow.names, where)
            own_names = _class_names(parquet.schema_arrow.metadata, label)
            if index and own_names != names:
                raise FedfillError(f"{where} names its classes differently from '{files[0]}'")
            if index and (DOMAIN_COLUMN in parquet.schema_arrow.names) != has_domain:
                raise FedfillError(f"{where} and '{files[0]}' must both have a column '{DOMAIN_COLUMN}', or neither")
            names, start, has_domain = own_names, 0, DOMAIN_COLUMN in parquet.schema_arrow.names
            columns = [image, label, *[DOMAIN_COLUMN] * has_domain]
            for batch in parquet.iter_batches(batch_size=8192, columns=columns):
                read, wanted = from_arrow(
                    batch.column(image), batch.column(label), start, names, where, paths=False, size=size
                )
                if has_domain:
                    named = _class_names(parquet.schema_arrow.metadata, DOMAIN_COLUMN)
                    domains.append(read_domain_names(batch.column(DOMAIN_COLUMN), named, where))
                if images:
                    check_alike(images[0], read, where)
                images.append(read)
                labels.append(wanted)
                start += batch.num_rows
                if len(wanted) and wanted.max() > highest:
                    highest, place = int(wanted.max()), f"{where}, column '{label}'"
        except (pa.ArrowException, OSError) as error:
            raise FedfillError(f"{where} can't be read as Parquet, it may be cut short: {first_line(error)}") from error
    if not images:
        raise FedfillError(f"data: '{files[0]}' holds no samples")
    origin = np.concatenate(domains) if domains else None
    return Part(Samples(torch.cat(images), torch.from_numpy(np.concatenate(labels))), names, place, origin)


def read_domain_names(column: Any, names: tuple[str, ...] | None, where: str) -> np.ndarray[Any, Any]:
    """The domain of each row by name, from an Arrow array of strings or of integers that `names` may name."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise FedfillError(f"{where} has domains of type {kind}, but strings or integers are needed")
    values = column.to_pylist()
    if blank := column.null_count + values.count(""):
        raise FedfillError(f"{where}: column '{DOMAIN_COLUMN}' has {blank:,} empty cell{'s' if blank > 1 else ''}")
    if names is not None and pa.types.is_integer(kind):
        if wrong := [value for value in values if not 0 <= value < len(names)]:
            raise FedfillError(f"{where}: a domain is {wrong[0]}, but there are {len(names)} domain names")
        values = [names[value] for value in values]
    return np.array(values, dtype=str)


def _check_files(files: list[Path], split: str) -> None:
    """Refuse missing shards and files that look like the same data twice: neither would show in what is read."""
    series: dict[str, Path] = {}  # by what the names have in common
    shards: dict[int, Path] = {}
    for file in files:
        match = SHARD.fullmatch(file.name)
        kind = f"{match[1]}-of-{match[3]}" if match else file.name if file.stem == split else "unnumbered"
        twice = shards.get(int(match[2])) if match else None
        other = twice or next((first for key, first in series.items() if key != kind), None)
        if other is not None:
            raise FedfillError(
                f"data: '{other}' and '{file.name}' lie side by side, which may be the same samples twice; remove one"
            )
        series.setdefault(kind, file)
        if match:
            shards[int(match[2])] = file
    match = SHARD.fullmatch(files[0].name)
    if match is not None and (missing := next((n for n in range(int(match[3])) if n not in shards), None)) is not None:
        expected = f"{match[1]}-{missing:05d}-of-{match[3]}{'*' if match[4] else ''}.parquet"
        raise FedfillError(f"data: '{files[0].parent / expected}' is missing beside '{files[0].name}'")


def find_columns(found: Sequence[str], where: str) -> tuple[str, str]:
    """The names of the image and label columns."""
    chosen = []
    for allowed in (IMAGE_COLUMNS, LABEL_COLUMNS):
        column = next((column for column in allowed if column in found), None)
        if column is None:
            raise FedfillError(f"{where} has no column '{allowed[0]}' or '{allowed[1]}', only {', '.join(found)}")
        chosen.append(column)
    return chosen[0], chosen[1]


def _class_names(metadata: dict[bytes, bytes] | None, label: str) -> tuple[str, ...] | None:
    """The names of a ClassLabel column in the metadata that `datasets` writes; None where there are none."""
    try:
        names = json.loads((metadata or {})[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, ValueError, TypeError):
        return None
    return tuple(map(str, names)) if names else None


def from_arrow(
    images: Any, labels: Any, start: int, names: tuple[str, ...] | None, where: str, *, paths: bool, size: int | None
) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """Decoded images and checked labels of two Arrow arrays, of which the first row is row `start` of the file.

    Args:
        images: A struct array with a field ``bytes``, or a binary array.
        labels: An integer array.
        start: The number of the first row, for messages.
        names: The classes' names, where they are known.
        where: The beginning of an error sentence.
        paths: Whether to open the file at the struct's ``path`` where a row has no bytes.
        size: Pixels to a side to bring every image to, in colour; None: as they are.

    Returns:
        ``[n, c, h, w]`` uint8 images and ``[n]`` int64 labels.
    """
    import pyarrow as pa

    if not pa.types.is_integer(labels.type):
        raise FedfillError(f"{where} has labels of type {labels.type}, but integers are needed")
    if labels.null_count:
        raise FedfillError(f"{where} has {labels.null_count} empty labels")
    indices = labels.to_numpy(zero_copy_only=False).astype(np.int64)
    check_labels(indices, names, where)
    if pa.types.is_struct(images.type) and images.type.get_field_index("bytes") >= 0:
        encoded = images.field("bytes").to_pylist()
        if paths and images.type.get_field_index("path") >= 0:
            files = images.field("path").to_pylist()
            encoded = [data or (Path(file) if file else None) for data, file in zip(encoded, files, strict=True)]
    elif pa.types.is_binary(images.type) or pa.types.is_large_binary(images.type):
        encoded = images.to_pylist()
    else:
        raise FedfillError(
            f"{where} has images of type {images.type}, but encoded images as struct{{bytes, path}} are needed"
        )
    pixels = _decode(encoded, lambda row: f"row {start + row} of {where.removeprefix('data: ')}", size)
    return _stack(pixels), indices


# ---- decoding


def _decode(
    encoded: Sequence[bytes | Path | None], where: Callable[[int], str], size: int | None
) -> np.ndarray[Any, Any]:
    """``[n, h, w, c]`` uint8 from whatever Pillow reads; all must be of one size and all grey or all colour."""
    if not encoded:
        return np.empty((0, 0, 0, 0), np.uint8)
    first = _pixels(encoded[0], where(0), size)
    out = np.empty((len(encoded), *first.shape), np.uint8)

    def fill(begin: int) -> None:
        for row in range(begin, min(begin + 512, len(encoded))):
            pixels = _pixels(encoded[row], where(row), size)
            if pixels.shape != first.shape:
                raise FedfillError(
                    f"data: {where(row)} is {_describe(pixels.shape)}, but {where(0)} is {_describe(first.shape)}; "
                    "all images must have one size and be all grey or all colour; image_size brings them there"
                )
            out[row] = pixels

    # Pillow releases the interpreter lock while it decodes; results land by row, whatever the order of the threads
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(fill, range(0, len(encoded), 512)))
    return out


def resized(image: Image.Image, size: int) -> np.ndarray[Any, Any]:
    """The image in colour, ``[size, size, 3]`` uint8: grey repeated, stretched or shrunk to the square.

    Pillow's bilinear filter widens where it shrinks, so that nothing is skipped, and it computes in whole numbers: every
    machine gets the same bytes.
    """
    return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))


def _pixels(encoded: bytes | Path | None, where: str, size: int | None) -> np.ndarray[Any, Any]:
    """One image as ``[h, w, c]`` uint8."""
    if not encoded:
        raise FedfillError(f"data: {where} holds no image bytes")
    try:
        with Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded) as image:
            if size is not None and image.mode in GREY | COLOUR:
                return resized(image, size)
            if image.mode in GREY:
                return np.asarray(image if image.mode == "L" else image.convert("L"))[:, :, None]
            if image.mode in COLOUR:
                return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
            mode = image.mode
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        what = "no image that can be recognised" if isinstance(error, UnidentifiedImageError) else first_line(error)
        raise FedfillError(f"data: {where} can't be decoded as an image, it may be cut short: {what}") from error
    raise FedfillError(f"data: {where} is an image of mode '{mode}', but 8-bit grey or colour is needed")


def _describe(shape: Sequence[int]) -> str:
    return f"{shape[1]}x{shape[0]} {'grey' if shape[2] == 1 else 'colour'}"


def _stack(images: np.ndarray[Any, Any]) -> Tensor:
    """``[n, c, h, w]``, contiguous, from ``[n, h, w, c]``."""
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


# ---- checks


def check_labels(labels: np.ndarray[Any, Any], names: tuple[str, ...] | None, where: str) -> None:
    """Refuse labels that are negative or have no name, in a sentence that begins with `where`."""
    if not len(labels):
        return
    if labels.min() < 0:
        raise FedfillError(f"{where}: a label is {labels.min()}, but classes are counted from 0")
    if names is not None and labels.max() >= len(names):
        raise FedfillError(
            f"{where}: a label is {labels.max()}, but there are {len(names)} class names, so 0 to {len(names) - 1}"
        )


def check_alike(first: Tensor, second: Tensor, where: str) -> None:
    """Refuse samples of different shapes or types, in a sentence that begins with `where`."""
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
        images = first.dtype == second.dtype == torch.uint8
        hint = ", and image_size brings images in files to one shape" if images else ""
        raise FedfillError(
            f"{where}: some samples have shape {list(first.shape[1:])} and type {first.dtype}, others "
            f"{list(second.shape[1:])} and {second.dtype}; all must be alike{hint}"
        )


def in_order(words: Iterable[str]) -> list[str]:
    """Different words: whole numbers first and by their value, the others by the alphabet."""

    def key(word: str) -> tuple[bool, int, str]:
        whole = word.removeprefix("-").isdecimal()
        return not whole, int(word) if whole else 0, word

    return sorted(set(map(str, words)), key=key)


def first_line(error: Exception) -> str:
    """The first line of what an exception says, or its kind where it says nothing."""
    text = str(error).strip()
    line = text.splitlines()[0].rstrip(".") if text else ""
    return line if line else type(error).__name__
