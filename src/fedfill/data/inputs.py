"""What a network takes, as a record that outlives the training data, and how new files become it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedfill.data.cells import without_rows
from fedfill.data.columns import Columns
from fedfill.data.folders import IMAGE_SUFFIXES
from fedfill.data.frames import as_arrow, is_frame
from fedfill.data.images import fitted
from fedfill.data.parquet import IMAGE_COLUMNS
from fedfill.data.schema import from_document
from fedfill.data.tables import read_rows, rows_of
from fedfill.errors import FedfillError, first_line, path_of, shown

if TYPE_CHECKING:
    from fedfill.data.dataset import Source
    from fedfill.data.federation import Federation
    from fedfill.data.schema_target import Target

TABLES = frozenset({".csv", ".parquet"})
AT_ONCE = 1000
"""Images that are decoded before they are scored."""
_SCALING = {
    "images": "each value of a pixel, 0..255, becomes value / 127.5 - 1",
    "table": "each number less its mean, over its deviation; then one input for each word, 1 where the row has it and else 0",
    "numbers": "none: the numbers as they are",
}


@dataclass(frozen=True)
class Records:
    """New inputs, and where each was found.

    Attributes:
        inputs: As they are stored, ``[n, ...]``.
        files: The file of each.
        rows: Its row there, from 0; None of a file that is one image.
    """

    inputs: Tensor
    files: Sequence[str]
    rows: Sequence[int | None]


@dataclass(frozen=True)
class Inputs:
    """What a network takes.

    Attributes:
        shape: Of one input: (channels, height, width) of images.
        dtype: ``uint8`` of images, else ``float32``.
        image_size: To which the training images were brought; None: they had one size.
        columns: Of a table; None where the data were none.
    """

    shape: tuple[int, ...]
    dtype: str
    image_size: int | None = None
    columns: Columns | None = None

    @property
    def kind(self) -> Literal["images", "table", "numbers"]:
        """What it is made of."""
        return "images" if self.dtype == "uint8" else "numbers" if self.columns is None else "table"

    @property
    def target(self) -> Target | None:
        """What is told of a row, by the schema; None without one."""
        schema = None if self.columns is None else self.columns.schema
        return None if schema is None else schema.target

    @property
    def grid(self) -> tuple[float, ...]:
        """The times at which a model of times to an event tells something, by the schema; empty of any other."""
        return () if self.target is None else self.target.grid

    @property
    def number(self) -> Target | None:
        """The target of a model of a number; None of any other."""
        return self.target if self.target is not None and self.target.kind == "number" else None

    @property
    def words(self) -> str:
        """What it is, for a sentence."""
        if self.kind == "images":
            channels, height, width = self.shape
            return f"{'grey' if channels == 1 else 'colour'} images of {width}x{height}"
        if self.columns is not None:
            return f"rows of a table with {len(self.columns.numbers) + len(self.columns.words)} columns"
        return f"float32 numbers of shape {list(self.shape)}"

    @classmethod
    def of(cls, data: Federation | Source, image_size: int | None) -> Inputs:
        """Those of some data."""
        inputs = data.test.inputs
        return cls(tuple(inputs.shape[1:]), str(inputs.dtype).removeprefix("torch."), image_size, data.columns)

    def document(self) -> dict[str, Any]:
        """As JSON keeps it."""
        document: dict[str, Any] = {"kind": self.kind, "shape": list(self.shape), "dtype": self.dtype}
        if self.kind == "images":
            document["image_size"] = self.image_size
        document["scaling"] = _SCALING[self.kind]
        if (columns := self.columns) is not None:
            rows = zip(columns.numbers, columns.mean, columns.deviation, strict=True)
            document["numbers"] = [{"name": name, "mean": mean, "deviation": d} for name, mean, d in rows]
            document["words"] = [{"name": name, "words": list(words)} for name, words in columns.words.items()]
            if columns.schema is not None:
                document["schema"] = columns.schema.document()
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Inputs:
        """What `document` wrote.

        Args:
            document: From JSON.

        Returns:
            The same inputs.

        Raises:
            KeyError: Where a part of it is missing.
            TypeError: Where one is of another type.
            ValueError: Likewise, or where it makes no sense.
        """
        columns = None
        if document["kind"] == "table":
            numbers = document["numbers"]
            columns = Columns(
                tuple(str(column["name"]) for column in numbers),
                {str(column["name"]): tuple(map(str, column["words"])) for column in document["words"]},
                tuple(float(column["mean"]) for column in numbers),
                tuple(float(column["deviation"]) for column in numbers),
                None if document.get("schema") is None else from_document(document["schema"], "of the model"),
            )
        found = cls(tuple(map(int, document["shape"])), str(document["dtype"]), document.get("image_size"), columns)
        if found.kind != document["kind"] or (columns is not None and (columns.size,) != found.shape):
            raise ValueError("kind, shape and columns of the inputs don't fit together")
        if found.kind == "images" and (len(found.shape) != 3 or found.shape[0] not in (1, 3)):
            raise ValueError(f"images of shape {list(found.shape)}")
        return found


@dataclass
class Reader:
    """Reads what a user has as a network takes it.

    Attributes:
        inputs: What the network takes.
        images: Images that were read.
        resized: How many of them had another size.
        recoloured: How many of them had other channels.
        others: Sentences on tables.
    """

    inputs: Inputs
    images: int = 0
    resized: int = 0
    recoloured: int = 0
    others: dict[str, None] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what was changed or left out so far."""
        found: list[str] = list(self.others)
        many = f"of {self.images:,} image{'s' if self.images != 1 else ''}"
        if self.resized and self.inputs.image_size is None:
            height, width = self.inputs.shape[1:]
            found.append(
                f"{self.resized:,} {many} had another size and {'was' if self.resized == 1 else 'were'} brought to "
                f"{width}x{height}; the model was trained on images of that size."
            )
        if self.recoloured and (self.inputs.image_size is None or self.inputs.shape[0] == 1):
            was, now = ("in colour", "grey") if self.inputs.shape[0] == 1 else ("grey", "in colour")
            found.append(
                f"{self.recoloured:,} {many} {'was' if self.recoloured == 1 else 'were'} {was} and became {now}."
            )
        return tuple(found)

    def files(self, paths: Iterable[str | Path]) -> Iterator[Records]:
        """What lies at some places.

        Args:
            paths: Images, folders of images at any depth, Parquet and CSV files.

        Yields:
            In their order, in a folder by the names; at most a few thousand at once.

        Raises:
            FedfillError: Where nothing lies there that the network takes.
        """
        if self.inputs.kind == "numbers":
            raise FedfillError(
                f"paths: this model takes {self.inputs.words}, which no file is read as; allowed: arrays, in Python: model.predict(array)"
            )
        pending: list[Path] = []
        for file in [file for path in paths for file in self._found(path_of("paths", path, "files and folders"))]:
            if self.inputs.kind == "images" and file.suffix.lower() not in TABLES:
                pending.append(file)
                if len(pending) < AT_ONCE:
                    continue
            if pending:
                yield self._of_images(pending)
                pending = []
            if file.suffix.lower() in TABLES:
                yield from self._of_table(file)
        if pending:
            yield self._of_images(pending)

    def _found(self, path: Path) -> list[Path]:
        """The files at a place."""
        wanted = TABLES if self.inputs.kind == "table" else IMAGE_SUFFIXES | {".parquet"}
        try:
            if path.is_file():
                if path.suffix.lower() not in wanted and not (self.inputs.kind == "images" and not path.suffix):
                    raise FedfillError(
                        f"paths: found {path}, and the model takes {self.inputs.words}; allowed: files that end in "
                        f"{', '.join(sorted(wanted))}, and folders of them"
                    )
                return [path]
            if not path.is_dir():
                raise FedfillError(f"paths: found nothing at {path}; allowed: files and folders that are there")
            files = sorted(
                file
                for file in path.rglob("*")
                if file.suffix.lower() in wanted
                and not any(part.startswith((".", "__MACOSX")) for part in file.relative_to(path).parts)
                and file.is_file()
            )
        except OSError as error:
            raise FedfillError(f"paths: {path} can't be read ({error.strerror or error})") from error
        if not files:
            raise FedfillError(
                f"paths: the folder {path} holds no file for this model, which takes {self.inputs.words}; allowed: files that end in "
                f"{', '.join(sorted(wanted))}"
            )
        return files

    def _of_images(self, files: Sequence[Path]) -> Records:
        inputs = self.fit(files, lambda row: f"'{files[row]}'")
        return Records(inputs, list(map(str, files)), [None] * len(files))

    def fit(self, encoded: Sequence[bytes | Path | Image.Image | None], where: Any) -> Tensor:
        """Images of the network's shape, ``[n, channels, height, width]`` uint8, counted for the notes."""
        found = fitted(encoded, where, self.inputs.shape)
        self.images += len(encoded)
        self.resized += found.resized
        self.recoloured += found.recoloured
        return found.inputs

    def _of_table(self, file: Path) -> Iterator[Records]:
        if self.inputs.columns is not None:
            inputs, notes = read_rows(file, self.inputs.columns)
            self.others |= dict.fromkeys(notes)
            yield Records(inputs, [str(file)] * len(inputs), range(len(inputs)))
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        begin = 0
        try:
            parquet = pq.ParquetFile(file)
            names = parquet.schema_arrow.names
            column = next((name for name in IMAGE_COLUMNS if name in names), None)
            if column is None:
                raise FedfillError(
                    f"data: '{file}' has no column '{IMAGE_COLUMNS[0]}' or '{IMAGE_COLUMNS[1]}' with images, only {', '.join(names)}; the "
                    f"model takes {self.inputs.words}"
                )
            for batch in parquet.iter_batches(AT_ONCE, columns=[column]):
                encoded = _bytes_in(batch.column(0), f"data: '{file}'")
                inputs = self.fit(encoded, lambda row, start=begin: f"row {start + row} of '{file}'")
                yield Records(inputs, [str(file)] * len(inputs), range(begin, begin + len(inputs)))
                begin += len(inputs)
        except (pa.ArrowException, OSError) as error:
            raise FedfillError(f"data: '{file}' can't be read as Parquet: {first_line(error)}") from error
        if not begin:
            raise FedfillError(f"data: '{file}' holds no samples")

    def objects(self, data: Any) -> Tensor:
        """What Python has: paths, images, arrays, or rows of a table.

        Args:
            data: A path or several; of images also Pillow's, one or several, and uint8 arrays of one (``[h, w]``, ``[h, w, c]``)
                or of several (``[n, h, w]``, ``[n, h, w, c]``, ``[n, c, h, w]``), of any size; of a table a pandas DataFrame, a dict of
                columns or a list of dicts; of numbers a float array, of one or several inputs.

        Returns:
            ``[n, ...]`` as they are stored.

        Raises:
            FedfillError: Where it is none of these.
        """
        if isinstance(data, str | os.PathLike):
            data = [data]
        if isinstance(data, list | tuple) and data and all(isinstance(item, str | os.PathLike) for item in data):
            return torch.cat([records.inputs for records in self.files(data)])
        if self.inputs.columns is not None:
            return self._rows(data, self.inputs.columns)
        if self.inputs.kind == "images":
            images = [data] if isinstance(data, Image.Image) else data
            if isinstance(images, list | tuple) and images and all(isinstance(x, Image.Image) for x in images):
                return self.fit(images, lambda row: f"image {row}")
        if isinstance(data, np.ndarray | Tensor):
            array = data.detach().cpu() if isinstance(data, Tensor) else torch.from_numpy(np.ascontiguousarray(data))
            if self.inputs.kind == "images" and array.dtype == torch.uint8 and 2 <= array.dim() <= 4 and array.numel():
                return self._images(array)
            shape = tuple(array.shape)
            if self.inputs.kind == "numbers" and array.is_floating_point() and self.inputs.shape in (shape, shape[1:]):
                return array.to(torch.float32).reshape(-1, *self.inputs.shape)
            found = f"{str(array.dtype).removeprefix('torch.')} of shape {list(shape)}"
        else:
            found = shown(data)
        allowed = {
            "images": "paths, Pillow images, or uint8 arrays [h, w], [h, w, c], [n, h, w], [n, h, w, c] or [n, c, h, w]",
            "numbers": f"float arrays of shape {list(self.inputs.shape)} or with n in front",
        }[self.inputs.kind]
        raise FedfillError(f"data: found {found}, and the model takes {self.inputs.words}; allowed: {allowed}")

    def _images(self, array: Tensor) -> Tensor:
        """Those of a uint8 array."""
        if array.dim() == 2 or (
            array.dim() == 3 and (array.shape[2] in (1, 3) or tuple(array.shape) == self.inputs.shape)
        ):
            array = array[None]
        if array.dim() == 3:
            array = array[:, None]
        if array.shape[1] not in (1, 3) and array.shape[3] in (1, 3):
            array = array.permute(0, 3, 1, 2)
        if array.shape[1] not in (1, 3):
            raise FedfillError(f"data: found uint8 of shape {list(array.shape)}; allowed: images of 1 or 3 channels")
        if tuple(array.shape[1:]) == self.inputs.shape:
            self.images += len(array)
            return array.contiguous()
        pictures = [Image.fromarray(image.permute(1, 2, 0).squeeze(2).contiguous().numpy()) for image in array]
        return self.fit(pictures, lambda row: f"image {row}")

    def _rows(self, data: Any, columns: Columns) -> Tensor:
        """Those of a table in memory."""
        import pyarrow as pa

        try:
            if is_frame(data):
                table = as_arrow(data, "data")
            elif isinstance(data, Mapping):
                table = pa.table(dict(data))
            elif isinstance(data, list) and data and all(isinstance(row, Mapping) for row in data):
                table = pa.Table.from_pylist([dict(row) for row in data])
            else:
                raise FedfillError(
                    f"data: found {shown(data)}, and the model takes {self.inputs.words}; allowed: paths, a pandas DataFrame, a "
                    "dict of columns, or a list of dicts"
                )
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise FedfillError(f"data: the rows can't be read as a table: {without_rows(error)}") from error
        if not len(table):
            raise FedfillError("data: found a table without rows; allowed: one row or more")
        inputs, notes = rows_of(table, columns, Path("table"))
        self.others |= dict.fromkeys(notes)
        return inputs


def _bytes_in(images: Any, where: str) -> list[bytes | None]:
    """The encoded images of an Arrow array."""
    import pyarrow as pa

    if pa.types.is_struct(images.type) and images.type.get_field_index("bytes") >= 0:
        images = images.field("bytes")
    if not (pa.types.is_binary(images.type) or pa.types.is_large_binary(images.type)):
        raise FedfillError(
            f"{where} has images of type {images.type}, but encoded images as struct{{bytes, path}} are needed"
        )
    found: list[bytes | None] = images.to_pylist()
    return found
