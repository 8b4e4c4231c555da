"""Image sets in the layout of the Hugging Face Hub: Parquet files, and the Arrow columns in them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfill.data.cells import DOMAIN_COLUMN
from fedfill.data.dataset import Part, check_alike, check_labels, together
from fedfill.data.images import decode, in_colour
from fedfill.data.samples import Samples
from fedfill.errors import FedfillError, first_line, shown
from fedfill.files import check_regular

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")

SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(-[0-9a-f]+)?\.parquet")
"""File names of shards: first words, number, how many there are, and the hash that older ones carry."""


def read_parquet(folder: Path, split: str, size: int | None = None) -> Part:
    """All shards of a split, in the order of their names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts: list[Samples] = []
    domains: list[np.ndarray[Any, Any]] = []
    names: tuple[str, ...] | None = None
    has_domain = False
    highest = -1, ""
    files = sorted(folder.glob(f"{split}*.parquet"))
    _check_files(files, split)
    for index, file in enumerate(files):
        where = f"data: '{file}'"
        try:
            check_regular(file)
            parquet = pq.ParquetFile(file)
            found, metadata = parquet.schema_arrow.names, parquet.schema_arrow.metadata
            image, label = find_columns(found, where)
            own_names, start = _class_names(metadata, label, where), 0
            if index and own_names != names:
                raise FedfillError(f"{where} names its classes differently from '{files[0]}'")
            if index and (DOMAIN_COLUMN in found) != has_domain:
                raise FedfillError(f"{where} and '{files[0]}' must both have a column '{DOMAIN_COLUMN}', or neither")
            names, has_domain = own_names, DOMAIN_COLUMN in found
            for batch in parquet.iter_batches(8192, columns=[image, label, *[DOMAIN_COLUMN] * has_domain]):
                part = from_arrow(batch.column(image), batch.column(label), start, names, where, paths=False, size=size)
                if has_domain:
                    named = _class_names(metadata, DOMAIN_COLUMN, where)
                    domains.append(read_domain_names(batch.column(DOMAIN_COLUMN), named, where))
                if parts and size is None:
                    check_alike(parts[0].inputs, part.inputs, where)
                parts.append(part)
                start += batch.num_rows
                highest = max(highest, (int(part.labels.max()), f"{where}, column '{label}'"), key=lambda pair: pair[0])
        except (pa.ArrowException, OSError, UnicodeError) as error:  # the last of a path that is not in UTF-8
            raise FedfillError(f"{where} can't be read as Parquet, it may be cut short: {first_line(error)}") from error
    if not parts:
        raise FedfillError(f"data: '{files[0]}' holds no samples")
    if len({part.inputs.shape[1] for part in parts}) > 1:  # with a size
        parts = [Samples(in_colour(part.inputs), part.labels) for part in parts]
    return Part(together(parts), names, highest[1], np.concatenate(domains) if domains else None)


def read_domain_names(column: Any, names: tuple[str, ...] | None, where: str) -> np.ndarray[Any, Any]:
    """The domain of each row by name, from an Arrow array of strings or of integers that `names` may name."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise FedfillError(f"{where} has domains of type {kind}, but strings or integers are needed")
    # blanks around a name would make another domain of it
    values: list[Any] = [value.strip() if isinstance(value, str) else value for value in column.to_pylist()]
    if blank := column.null_count + values.count(""):
        raise FedfillError(f"{where}: column '{DOMAIN_COLUMN}' has {blank:,} empty cell{'s' if blank > 1 else ''}")
    if names is not None and pa.types.is_integer(kind):
        if wrong := [value for value in values if not 0 <= value < len(names)]:
            raise FedfillError(f"{where}: a domain is {wrong[0]}, but there are {len(names)} domain names")
        values = [names[value].strip() for value in values]
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
    for allowed in (IMAGE_COLUMNS, LABEL_COLUMNS):
        if not any(column in found for column in allowed):
            raise FedfillError(f"{where} has no column '{allowed[0]}' or '{allowed[1]}', only {', '.join(found)}")
    image, label = (next(name for name in allowed if name in found) for allowed in (IMAGE_COLUMNS, LABEL_COLUMNS))
    return image, label


def _class_names(metadata: dict[bytes, bytes] | None, column: str, where: str) -> tuple[str, ...] | None:
    """The names of a ClassLabel column in the metadata that `datasets` writes; None where there are none."""
    try:
        names = json.loads((metadata or {})[b"huggingface"])["info"]["features"][column]["names"]
    except (KeyError, TypeError):
        return None
    except (ValueError, RecursionError) as error:
        raise FedfillError(f"{where} has metadata 'huggingface' that can't be read, it may be damaged") from error
    if not names:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FedfillError(f"{where}: the names of column '{column}' are {shown(names)}; allowed: a list of words")
    return tuple(names)


def from_arrow(
    images: Any, labels: Any, start: int, names: tuple[str, ...] | None, where: str, *, paths: bool, size: int | None
) -> Samples:
    """The decoded images and checked labels of two Arrow arrays, of which the first row is row `start` of the file.

    Args:
        images: A struct array with a field ``bytes``, or a binary array.
        labels: An integer array.
        start: The number of the first row, for messages.
        names: The classes' names, where they are known.
        where: The beginning of an error sentence.
        paths: Whether to open the file at the struct's ``path`` where a row has no bytes.
        size: As for `decode`.

    Returns:
        ``[n, c, h, w]`` uint8 images with their labels.
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
    inputs = decode(encoded, lambda row: f"row {start + row} of {where.removeprefix('data: ')}", size)
    return Samples(inputs, torch.from_numpy(indices))
