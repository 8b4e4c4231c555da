"""Sources: where a data set comes from, read into memory once, with its test set kept apart.

Images stay uint8 ``[n, channels, height, width]`` as they were stored; nothing is resized or scaled here.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfill.data.images import (
    Part,
    check_alike,
    check_labels,
    descend,
    find_columns,
    find_layout,
    first_line,
    from_arrow,
    read_images,
    read_parquet,
)
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
        return from_folder(name, folder)
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
    return _source("digits", where, Part(samples, tuple(str(digit) for digit in range(10)), where), None)


def _source(
    name: str, where: str, train: Part, test: Part | None, note: str = OWN, everyone: int | None = None
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
        check_alike(train.samples.inputs, test.samples.inputs, where)
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
    return data_dir if find_layout(data_dir) else None


def from_folder(name: str, folder: Path, one_of_many: bool = False) -> Source:
    """A source from a folder of Parquet files or images.

    Args:
        name: What to call it.
        folder: The folder.
        one_of_many: Whether it holds the data of one client alone, which may lack classes and a test set.

    Returns:
        The source.

    Raises:
        FedfillError: Where it can't be read.
    """
    where = f"data '{name}'"
    folder = descend(folder, where)
    layout = find_layout(folder)
    if layout is None:
        raise FedfillError(
            f"{where}: '{folder}' holds neither train*.parquet files, nor one folder with them, nor a train folder, nor "
            "a folder of images for each class"
        )
    if layout == "parquet":
        train = read_parquet(folder, "train")
        test = read_parquet(folder, "test") if any(folder.glob("test*.parquet")) else None
        if test is not None and train.names != test.names:
            raise FedfillError(f"{where}: the class names in the train and test files of '{folder}' differ")
    elif layout == "splits":
        train = read_images(folder / "train", None)
        test = read_images(folder / "test", train.names) if (folder / "test").is_dir() else None
    else:
        train, test = read_images(folder, None), None
    return _source(name, where, train, test, everyone=sys.maxsize if one_of_many else None)


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
            f"data: '{name}' could not be fetched from the Hugging Face Hub ({problem or first_line(error)}); put its "
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
        return first_line(error)
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
    read: list[Source | tuple[Part, Part | None]] = []
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


def _one_from_python(data: Any, where: str) -> tuple[Part, Part | None]:
    """The training part and, where one was given, the test part."""
    if isinstance(data, tuple):
        if len(data) not in (2, 4):
            raise FedfillError(
                f"{where}: found a tuple of {len(data)}, but (inputs, labels) or (inputs, labels, test_inputs, "
                "test_labels) is needed"
            )
        train = Part(_pair(data[0], data[1], where), None, where)
        where += ", test set"
        return train, None if len(data) == 2 else Part(_pair(data[2], data[3], where), None, where)
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
    check_labels(array, None, where)
    return array


def _from_dataset(data: Any, where: str) -> Part:
    """A `datasets.Dataset` with an image column (encoded images or arrays) and a label column."""
    import datasets

    image, label = find_columns(data.column_names, where)
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
        check_labels(samples.labels.numpy(), names, where)
        return Part(samples, names, place)
    table = data.cast_column(image, datasets.Image(decode=False)).with_format("arrow")[:]
    images, labels = (table.column(column).combine_chunks() for column in (image, label))
    pixels, indices = from_arrow(images, labels, 0, names, where, paths=True)
    return Part(Samples(pixels, torch.from_numpy(indices)), names, place)


# ---- checks


def _names(parts: Sequence[Part], samples: int) -> tuple[str, ...]:
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
