"""Sources: where a data set comes from, read into memory once, with its test set kept apart.

Images stay uint8 ``[n, channels, height, width]`` as they were stored; nothing is resized or scaled here.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedfill.data.partitions import hold_out
from fedfill.data.samples import Samples
from fedfill.errors import FedfillError, did_you_mean
from fedfill.streams import numpy_stream

NAMES = {
    "digits": "scikit-learn's bundled 8x8 grey digits, 1,797 samples, 10 classes; needs no download",
    "mnist": "28x28 grey digits, 60,000 + 10,000, 10 classes",
    "fashion_mnist": "28x28 grey clothes, 60,000 + 10,000, 10 classes",
    "cifar10": "32x32 colour photographs, 50,000 + 10,000, 10 classes",
    "cifar100": "32x32 colour photographs, 50,000 + 10,000, 100 classes",
    "svhn": "32x32 colour house numbers, 73,257 + 26,032, 10 classes",
    "usps": "16x16 grey digits, 7,291 + 2,007, 10 classes",
}
"""The data sets that are known by name, with one line for people; any folder below the data folder is known too."""

HUB: dict[str, tuple[str, str | None]] = {
    "mnist": ("ylecun/mnist", None),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", None),
    "cifar10": ("uoft-cs/cifar10", None),
    "cifar100": ("uoft-cs/cifar100", None),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
    "usps": ("flwrlabs/usps", None),
}
"""Repository and configuration on the Hugging Face Hub, by name."""

TEST_SHARE = 0.2
"""The share of each class that becomes the test set where a data set brings none."""

OFFICIAL = "Test set: the official one."
OWN = "Test set: the one given with the data."
SPLIT = (
    "Test set: none came with the data, so a fixed stratified fifth is kept as the test set, the same for every seed."
)

NONE = "Test set: none came with the data, and the samples are too few to hold one out."

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})

SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(-[0-9a-f]+)?\.parquet")
"""File names of shards: first words, number, how many there are, and the hash that older ones carry."""

# Pillow's modes by what they become; anything else (16-bit, floating point) would lose information in uint8
GREY = frozenset({"1", "L", "LA"})
COLOUR = frozenset({"RGB", "RGBA", "P", "PA", "CMYK", "YCbCr"})


@dataclass(frozen=True)
class Source:
    """A data set in memory. Its tensors are shared by all who load it and must never be written to.

    Attributes:
        name: Its name.
        train: The training samples.
        test: The test samples; nothing may be chosen by them. Empty only for one of several clients.
        class_names: The classes' names in the order of their indices.
        note: One sentence on where the test set comes from.
    """

    name: str
    train: Samples
    test: Samples
    class_names: tuple[str, ...]
    note: str


@dataclass(frozen=True)
class _Part:
    """One part of a data set, as it was read.

    Attributes:
        samples: Its samples.
        names: The classes' names; None where nothing tells them.
        place: Where its highest label stands, for the beginning of a sentence.
    """

    samples: Samples
    names: tuple[str, ...] | None
    place: str


def load(name: str, data_dir: Path | str | None = None) -> Source:
    """The data set of this name: bundled, else from the data folder, else from the Hugging Face Hub.

    Args:
        name: ``digits``, a folder below `data_dir`, or one of `NAMES`.
        data_dir: Where folders of Parquet files or images lie; the environment variable FEDFILL_DATA where None.

    Returns:
        The source. Loading it again in the same process costs nothing and gives the same tensors.

    Raises:
        FedfillError: Where there is no such data set, or it can't be read.
    """
    setting, folder = (
        ("data_dir", data_dir) if data_dir is not None else ("FEDFILL_DATA", os.environ.get("FEDFILL_DATA"))
    )
    return _load(name, os.path.abspath(os.path.expanduser(folder)) if folder else None, setting)


@functools.lru_cache(maxsize=2)
def _load(name: str, data_dir: str | None, setting: str) -> Source:
    if name == "digits":
        return _digits()
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FedfillError(
            f"{setting}: '{data_dir}' is not a folder; it should hold folders of Parquet files or images"
        )
    folder = _folder(name, Path(data_dir)) if data_dir is not None else None
    if folder is not None:
        return _from_folder(name, folder)
    if name in HUB:
        return _from_hub(name)
    local = [path.name for path in Path(data_dir).iterdir() if path.is_dir()] if data_dir is not None else []
    raise FedfillError(f"data: '{name}' is unknown; {did_you_mean(name, {*NAMES, *local})}")


def from_python(data: Any, name: str = "python") -> Source | list[Source]:
    """A source from objects in memory, or one source per client from a list of them.

    Accepted are a tuple ``(inputs, labels)`` or ``(inputs, labels, test_inputs, test_labels)`` of numpy arrays or torch
    tensors, a `datasets.Dataset`, a `datasets.DatasetDict` with ``train`` and perhaps ``test``, and a `Source`. Inputs
    are uint8 images ``[n, h, w]``, ``[n, h, w, c]`` or ``[n, c, h, w]`` with 1 or 3 channels (read as ``[n, c, h, w]``
    where both fit), or floats ``[n, ...]``, which keep their values and become float32. Where no test set is given, a
    fixed stratified fifth is held out; in a list, the test set of a client with too few samples for that is empty.

    Args:
        data: One of these forms, or a list with one of them per client.
        name: What to call it.

    Returns:
        A source, or for a list one source per client.

    Raises:
        FedfillError: Where the form, a shape, a type or a value doesn't fit.
    """
    if isinstance(data, list):
        if not data:
            raise FedfillError("data: the list of clients' data sets is empty, but at least one is needed")
        return _many_from_python(data, name)
    return data if isinstance(data, Source) else _source(name, "data", *_one_from_python(data, "data"))


# ---- bundled


def _digits() -> Source:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    samples = Samples(torch.from_numpy(images), torch.from_numpy(bunch.target.astype(np.int64)))
    where = "data 'digits'"
    return _source("digits", where, _Part(samples, tuple(str(digit) for digit in range(10)), where), None)


def _source(
    name: str, where: str, train: _Part, test: _Part | None, note: str = OWN, everyone: int | None = None
) -> Source:
    """The source of what was read, with a part of it held out where it brought no test set.

    Args:
        name: The source's name.
        where: The beginning of an error sentence.
        train: The training part.
        test: The test part, where there is one.
        note: What to say of that test part.
        everyone: For the data of one client, how many samples all clients have. Its own may then be too few for a test
            set, and classes that it lacks may outnumber them.

    Returns:
        The source.
    """
    parts = (train,) if test is None else (train, test)
    class_names = _names(parts, everyone or sum(len(part.samples) for part in parts))
    if test is not None:
        _check_alike(train.samples.inputs, test.samples.inputs, where)
        return Source(name, train.samples, test.samples, class_names, note)
    # the seed is fixed forever: every experiment on a data set has the same test set
    kept, held = hold_out(train.samples.labels.numpy(), TEST_SHARE, numpy_stream(0, "fixed-test"))
    if not len(held) and everyone is None:
        raise FedfillError(_too_few(where, f"{len(train.samples):,} samples"))
    samples, note = train.samples, SPLIT if len(held) else NONE
    return Source(name, samples[torch.from_numpy(kept)], samples[torch.from_numpy(held)], class_names, note)


def _too_few(where: str, what: str) -> str:
    return f"{where}: there is no test set and the {what} are too few to hold one out; give at least 3 of a class"


# ---- folders


def _folder(name: str, data_dir: Path) -> Path | None:
    """The folder that holds the data set: the one of its name, or the data folder where data lie directly in it."""
    if name and name == Path(name).name and name != ".." and (data_dir / name).is_dir():
        return data_dir / name
    return data_dir if _layout(data_dir) else None


def _layout(folder: Path) -> str | None:
    """How data lie there: ``parquet``, ``splits`` (train/CLASS/images), ``classes`` (CLASS/images) or not at all."""
    if any(folder.glob("train*.parquet")):
        return "parquet"
    if (folder / "train").is_dir():
        return "splits"
    return "classes" if any(any(_images(child)) for child in _children(folder)) else None


def _from_folder(name: str, folder: Path) -> Source:
    where = f"data '{name}'"
    folder = _below(folder, where)
    layout = _layout(folder)
    if layout is None:
        raise FedfillError(
            f"{where}: '{folder}' holds neither train*.parquet files, nor one folder with them, nor a train folder, nor "
            "a folder of images for each class"
        )
    if layout == "parquet":
        train = _read_parquet(folder, "train")
        test = _read_parquet(folder, "test") if any(folder.glob("test*.parquet")) else None
        if test is not None and train.names != test.names:
            raise FedfillError(f"{where}: the class names in the train and test files of '{folder}' differ")
    elif layout == "splits":
        train = _read_images(folder / "train", None)
        test = _read_images(folder / "test", train.names) if (folder / "test").is_dir() else None
    else:
        train, test = _read_images(folder, None), None
    return _source(name, where, train, test)


def _below(folder: Path, where: str) -> Path:
    """The folder below that holds the Parquet files, as in a clone of a repository of the Hub; else the folder itself."""
    if _layout(folder) in ("parquet", "splits"):
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
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(folder: Path) -> Iterator[Path]:
    return (
        path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")
    )


def _read_images(folder: Path, names: tuple[str, ...] | None) -> _Part:
    """The images of ``folder/CLASS/``; for a test split `names` are the training classes, and it may have no other."""
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
    inputs = _stack(_decode(paths, lambda row: f"'{paths[row]}'"))
    return _Part(Samples(inputs, torch.tensor(labels)), names, f"data: '{folder}'")


# ---- Parquet


def _read_parquet(folder: Path, split: str) -> _Part:
    """All shards of a split, in the order of their names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    images: list[Tensor] = []
    labels: list[np.ndarray[Any, Any]] = []
    names: tuple[str, ...] | None = None
    highest, place = -1, ""
    files = sorted(folder.glob(f"{split}*.parquet"))
    _check_files(files, split)
    for index, file in enumerate(files):
        where = f"data: '{file}'"
        try:
            parquet = pq.ParquetFile(file)
            image, label = _columns(parquet.schema_arrow.names, where)
            own_names = _class_names(parquet.schema_arrow.metadata, label)
            if index and own_names != names:
                raise FedfillError(f"{where} names its classes differently from '{files[0]}'")
            names, start = own_names, 0
            for batch in parquet.iter_batches(batch_size=8192, columns=[image, label]):
                read, wanted = _from_arrow(batch.column(image), batch.column(label), start, names, where, paths=False)
                if images:
                    _check_alike(images[0], read, where)
                images.append(read)
                labels.append(wanted)
                start += batch.num_rows
                if len(wanted) and wanted.max() > highest:
                    highest, place = int(wanted.max()), f"{where}, column '{label}'"
        except (pa.ArrowException, OSError) as error:
            raise FedfillError(
                f"{where} can't be read as Parquet, it may be cut short: {_first_line(error)}"
            ) from error
    if not images:
        raise FedfillError(f"data: '{files[0]}' holds no samples")
    return _Part(Samples(torch.cat(images), torch.from_numpy(np.concatenate(labels))), names, place)


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


def _columns(found: Sequence[str], where: str) -> tuple[str, str]:
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


def _from_arrow(
    images: Any, labels: Any, start: int, names: tuple[str, ...] | None, where: str, *, paths: bool
) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """Decoded images and checked labels of two Arrow arrays, of which the first row is row `start` of the file.

    Args:
        images: A struct array with a field ``bytes``, or a binary array.
        labels: An integer array.
        start: The number of the first row, for messages.
        names: The classes' names, where they are known.
        where: The beginning of an error sentence.
        paths: Whether to open the file at the struct's ``path`` where a row has no bytes.

    Returns:
        ``[n, c, h, w]`` uint8 images and ``[n]`` int64 labels.
    """
    import pyarrow as pa

    if not pa.types.is_integer(labels.type):
        raise FedfillError(f"{where} has labels of type {labels.type}, but integers are needed")
    if labels.null_count:
        raise FedfillError(f"{where} has {labels.null_count} empty labels")
    indices = labels.to_numpy(zero_copy_only=False).astype(np.int64)
    _check_labels(indices, names, where)
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
    return _stack(_decode(encoded, lambda row: f"row {start + row} of {where.removeprefix('data: ')}")), indices


# ---- decoding


def _decode(encoded: Sequence[bytes | Path | None], where: Callable[[int], str]) -> np.ndarray[Any, Any]:
    """``[n, h, w, c]`` uint8 from whatever Pillow reads; all must be of one size and all grey or all colour."""
    if not encoded:
        return np.empty((0, 0, 0, 0), np.uint8)
    first = _pixels(encoded[0], where(0))
    out = np.empty((len(encoded), *first.shape), np.uint8)

    def fill(begin: int) -> None:
        for row in range(begin, min(begin + 512, len(encoded))):
            pixels = _pixels(encoded[row], where(row))
            if pixels.shape != first.shape:
                raise FedfillError(
                    f"data: {where(row)} is {_describe(pixels.shape)}, but {where(0)} is {_describe(first.shape)}; "
                    "all images must have one size and be all grey or all colour"
                )
            out[row] = pixels

    # Pillow releases the interpreter lock while it decodes; results land by row, whatever the order of the threads
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(fill, range(0, len(encoded), 512)))
    return out


def _pixels(encoded: bytes | Path | None, where: str) -> np.ndarray[Any, Any]:
    """One image as ``[h, w, c]`` uint8."""
    if not encoded:
        raise FedfillError(f"data: {where} holds no image bytes")
    try:
        with Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded) as image:
            if image.mode in GREY:
                return np.asarray(image if image.mode == "L" else image.convert("L"))[:, :, None]
            if image.mode in COLOUR:
                return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
            mode = image.mode
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        what = "no image that can be recognised" if isinstance(error, UnidentifiedImageError) else _first_line(error)
        raise FedfillError(f"data: {where} can't be decoded as an image, it may be cut short: {what}") from error
    raise FedfillError(f"data: {where} is an image of mode '{mode}', but 8-bit grey or colour is needed")


def _describe(shape: Sequence[int]) -> str:
    return f"{shape[1]}x{shape[0]} {'grey' if shape[2] == 1 else 'colour'}"


def _stack(images: np.ndarray[Any, Any]) -> Tensor:
    """``[n, c, h, w]``, contiguous, from ``[n, h, w, c]``."""
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


# ---- the Hugging Face Hub


def _from_hub(name: str) -> Source:
    import datasets

    repository, configuration = HUB[name]
    problem = _unreachable(repository)
    try:
        # without a network the library retries for half a minute; its cache is asked at once instead
        with _offline(datasets.config) if problem else _nothing():
            train, test = datasets.load_dataset(repository, configuration, split=["train", "test"])
    except Exception as error:  # the library has no common base for what can go wrong on the way
        raise FedfillError(
            f"data: '{name}' could not be fetched from the Hugging Face Hub ({problem or _first_line(error)}); put its "
            f"Parquet files in a folder '{name}' below --data-dir or FEDFILL_DATA, or use --data digits, which needs "
            "no download"
        ) from error
    where = f"data '{name}' from the Hugging Face Hub"
    return _source(name, where, _from_dataset(train, where), _from_dataset(test, where), OFFICIAL)


def _unreachable(repository: str) -> str | None:
    """Why the Hub doesn't answer for this repository within five seconds; None where it does."""
    import datasets
    from huggingface_hub import HfApi

    try:
        HfApi(endpoint=datasets.config.HF_ENDPOINT).dataset_info(repository, timeout=5)
    except Exception as error:  # network, proxy, name service, repository: nothing can be fetched
        return _first_line(error)
    return None


@contextmanager
def _offline(config: Any) -> Iterator[None]:
    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


@contextmanager
def _nothing() -> Iterator[None]:
    yield


# ---- Python objects


def _many_from_python(data: list[Any], name: str) -> list[Source]:
    """One source per client. Each may be small, so what needs many samples is asked of all clients together."""
    read: list[Source | tuple[_Part, _Part | None]] = []
    everyone = 0
    for client, item in enumerate(data):
        if isinstance(item, Source):
            read.append(item)
            everyone += len(item.train) + len(item.test)
        else:
            parts = _one_from_python(item, f"data of client {client}")
            read.append(parts)
            everyone += sum(len(part.samples) for part in parts if part is not None)
    sources = [
        item if isinstance(item, Source) else _source(name, f"data of client {client}", *item, everyone=everyone)
        for client, item in enumerate(read)
    ]
    if not any(len(source.test) for source in sources):
        raise FedfillError(_too_few("data", "samples of each client"))
    return sources


def _one_from_python(data: Any, where: str) -> tuple[_Part, _Part | None]:
    """The training part and, where one was given, the test part."""
    if isinstance(data, tuple):
        if len(data) not in (2, 4):
            raise FedfillError(
                f"{where}: found a tuple of {len(data)}, but (inputs, labels) or (inputs, labels, test_inputs, "
                "test_labels) is needed"
            )
        train = _Part(_pair(data[0], data[1], where), None, where)
        where += ", test set"
        return train, None if len(data) == 2 else _Part(_pair(data[2], data[3], where), None, where)
    if type(data).__module__.partition(".")[0] == "datasets":
        import datasets

        if isinstance(data, datasets.DatasetDict):
            if "train" not in data:
                raise FedfillError(f"{where}: the DatasetDict has no split 'train', only {', '.join(data)}")
            test = _from_dataset(data["test"], f"{where}, test set") if "test" in data else None
            return _from_dataset(data["train"], where), test
        if isinstance(data, datasets.Dataset):
            return _from_dataset(data, where), None
    raise FedfillError(
        f"{where}: found {type(data).__name__}, but a tuple (inputs, labels), a datasets.Dataset or DatasetDict, a "
        "Source, or a list with one of these per client is needed"
    )


def _pair(inputs: Any, labels: Any, where: str) -> Samples:
    return Samples(_inputs(inputs, where), torch.from_numpy(_labels(labels, len(inputs), where)))


def _inputs(inputs: Any, where: str) -> Tensor:
    if not isinstance(inputs, np.ndarray | Tensor):
        raise FedfillError(
            f"{where}: inputs are a {type(inputs).__name__}, but a numpy array or torch tensor is needed"
        )
    if inputs.ndim < 2 or not len(inputs) or 0 in inputs.shape:
        raise FedfillError(
            f"{where}: inputs have shape {list(inputs.shape)}, but at least one sample [n, ...] is needed"
        )
    if isinstance(inputs, np.ndarray) and not np.issubdtype(inputs.dtype, np.floating) and inputs.dtype != np.uint8:
        raise FedfillError(f"{where}: inputs are {inputs.dtype}, but uint8 images or floats are needed")
    tensor = inputs.detach().cpu() if isinstance(inputs, Tensor) else torch.from_numpy(np.ascontiguousarray(inputs))
    if tensor.is_floating_point():
        if not torch.isfinite(tensor).all():
            raise FedfillError(f"{where}: inputs hold NaN or infinite values")
        return tensor.to(torch.float32).contiguous()
    if tensor.dtype != torch.uint8:
        raise FedfillError(
            f"{where}: inputs are {str(tensor.dtype).removeprefix('torch.')}, but uint8 images or floats are needed"
        )
    if tensor.ndim == 3:
        return tensor[:, None].contiguous()
    if tensor.ndim == 4 and tensor.shape[1] in (1, 3):
        return tensor.contiguous()
    if tensor.ndim == 4 and tensor.shape[3] in (1, 3):
        return tensor.permute(0, 3, 1, 2).contiguous()
    raise FedfillError(
        f"{where}: uint8 inputs have shape {list(tensor.shape)}, but [n, h, w], [n, h, w, c] or [n, c, h, w] with 1 or "
        "3 channels is needed"
    )


def _labels(labels: Any, expected: int, where: str) -> np.ndarray[Any, Any]:
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise FedfillError(
            f"{where}: labels are {array.dtype} of shape {list(array.shape)}, but one integer per sample is needed"
        )
    if len(array) != expected:
        raise FedfillError(f"{where}: there are {expected} inputs but {len(array)} labels")
    array = array.astype(np.int64)
    _check_labels(array, None, where)
    return array


def _from_dataset(data: Any, where: str) -> _Part:
    """A `datasets.Dataset` with an image column (encoded images or arrays) and a label column."""
    import datasets

    image, label = _columns(data.column_names, where)
    if not len(data):
        raise FedfillError(f"{where}: the Dataset holds no samples")
    feature = data.features[label]
    names = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None
    place = f"{where}, column '{label}'"
    data = data.select_columns([image, label])
    if not isinstance(data.features[image], datasets.Image):
        columns = data.with_format("numpy")[:]
        inner = data.features[image]
        while hasattr(inner, "feature"):
            inner = inner.feature
        # the numpy format widens every integer to int64
        inputs = columns[image].astype(np.uint8) if inner.dtype == "uint8" else columns[image]
        samples = _pair(inputs, columns[label], where)
        _check_labels(samples.labels.numpy(), names, where)
        return _Part(samples, names, place)
    table = data.cast_column(image, datasets.Image(decode=False)).with_format("arrow")[:]
    images, labels = (table.column(column).combine_chunks() for column in (image, label))
    pixels, indices = _from_arrow(images, labels, 0, names, where, paths=True)
    return _Part(Samples(pixels, torch.from_numpy(indices)), names, place)


# ---- checks


def _check_labels(labels: np.ndarray[Any, Any], names: tuple[str, ...] | None, where: str) -> None:
    if not len(labels):
        return
    if labels.min() < 0:
        raise FedfillError(f"{where}: a label is {labels.min()}, but classes are counted from 0")
    if names is not None and labels.max() >= len(names):
        raise FedfillError(
            f"{where}: a label is {labels.max()}, but there are {len(names)} class names, so 0 to {len(names) - 1}"
        )


def _check_alike(first: Tensor, second: Tensor, where: str) -> None:
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
        raise FedfillError(
            f"{where}: some samples have shape {list(first.shape[1:])} and type {first.dtype}, others "
            f"{list(second.shape[1:])} and "
            f"{second.dtype}; all must be alike"
        )


def _names(parts: Sequence[_Part], samples: int) -> tuple[str, ...]:
    """The classes' names, or their numbers as far as the labels go, of which there may be no more than `samples`."""
    if parts[0].names is not None:
        return parts[0].names
    highest, place = max((int(part.samples.labels.max()), part.place) for part in parts)
    if highest >= samples:
        raise FedfillError(
            f"{place}: the highest label is {highest}, which makes {highest + 1:,} classes of {samples:,} samples; "
            "number the classes from 0, or give their names with the data"
        )
    return tuple(map(str, range(highest + 1)))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    line = text.splitlines()[0].rstrip(".") if text else ""
    return line if line else type(error).__name__
