"""Sources: where a data set comes from, read into memory once, with its test set kept apart.

Images stay uint8 ``[n, channels, height, width]`` as they were stored, unless a size is asked for; values are not scaled here.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedfill.data.images import (
    DOMAIN_COLUMN,
    Part,
    check_alike,
    check_labels,
    descend,
    find_columns,
    find_layout,
    first_line,
    from_arrow,
    holds_classes_alone,
    in_order,
    read_domain_names,
    read_domains,
    read_images,
    read_parquet,
    resized,
)
from fedfill.data.partitions import Indices, hold_out
from fedfill.data.samples import Samples
from fedfill.data.tables import find_tables, read_tables, standardised
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
    "mnist_m": "32x32 colour: MNIST's digits on patches of photographs, 59,001 + 9,001, 10 classes",
    "digits-domains": "mnist, mnist_m, svhn and usps brought to 32x32 colour: four domains, 10 classes",
}
"""The data sets that are known by name, with one line for people; any folder below the data folder is known too."""

HUB: dict[str, tuple[str, str | None]] = {
    "mnist": ("ylecun/mnist", None),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", None),
    "cifar10": ("uoft-cs/cifar10", None),
    "cifar100": ("uoft-cs/cifar100", None),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
    "usps": ("flwrlabs/usps", None),
    "mnist_m": ("Mike0307/MNIST-M", None),
}
"""Repository and configuration on the Hugging Face Hub, by name."""

JOINED: dict[str, tuple[tuple[str, ...], int]] = {"digits-domains": (("mnist", "mnist_m", "svhn", "usps"), 32)}
"""Data sets that are joined of others, each of them a domain, and the pixels to a side to which all images are brought."""

TEST_SHARE = 0.2
"""The share of each class that becomes the test set where a data set brings none."""

OFFICIAL = "Test set: the official one."
OWN = "Test set: the one given with the data."
SPLIT = (
    "Test set: none came with the data, so a fixed stratified fifth is kept as the test set, the same for every seed."
)

NONE = "Test set: none came with the data, and the samples are too few to hold one out."


@dataclass(frozen=True)
class Domains:
    """Which domain each sample of a data set comes from.

    Attributes:
        names: The domains' names in the order of their indices; each has training samples.
        train: ``[n]`` int64 indices, one for each training sample.
        test: ``[m]`` int64 indices, one for each test sample.
    """

    names: tuple[str, ...]
    train: Indices
    test: Indices


@dataclass(frozen=True)
class Source:
    """A data set in memory. Its tensors are shared by all who load it and must never be written to.

    Attributes:
        name: Its name.
        train: The training samples.
        test: The test samples; nothing may be chosen by them. Empty only for one of several clients.
        class_names: The classes' names in the order of their indices.
        note: One sentence on where the test set comes from.
        domains: Where its samples come from; None where nothing tells it.
    """

    name: str
    train: Samples
    test: Samples
    class_names: tuple[str, ...]
    note: str
    domains: Domains | None = None


def load(name: str, data_dir: Path | str | None = None, size: int | None = None) -> Source:
    """The data set of this name: bundled, else from the data folder, else from the Hugging Face Hub.

    Args:
        name: ``digits``, a folder or a table (``NAME.csv``) below `data_dir`, or one of `NAMES`.
        data_dir: Where tables and folders of Parquet files or images lie; the environment variable FEDFILL_DATA where None.
        size: Pixels to a side to bring every image to, in colour; None: as they are.

    Returns:
        The source. Loading it again in the same process costs nothing and gives the same tensors.

    Raises:
        FedfillError: Where there is no such data set, or it can't be read.
    """
    setting, folder = (
        ("data_dir", data_dir) if data_dir is not None else ("FEDFILL_DATA", os.environ.get("FEDFILL_DATA"))
    )
    return _load(name, os.path.abspath(os.path.expanduser(folder)) if folder else None, setting, size)


@functools.lru_cache(maxsize=2)
def _load(name: str, data_dir: str | None, setting: str, size: int | None) -> Source:
    if name == "digits":
        return _digits(size)
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FedfillError(
            f"{setting}: '{data_dir}' is not a folder; it should hold folders of Parquet files or images"
        )
    with _readable(setting, Path(data_dir or ".")):
        folder = _folder(name, Path(data_dir)) if data_dir is not None else None
    if folder is not None:
        return from_folder(name, folder, size=size)
    if name in JOINED:
        names, usual = JOINED[name]
        # past the cache, which would keep the parts beside the whole
        parts = {part: _load.__wrapped__(part, data_dir, setting, size or usual) for part in names}
        return _join(name, f"data '{name}'", {part: _parts_of(source) for part, source in parts.items()})
    if name in HUB:
        return _from_hub(name, size)
    local = [p.name for p in Path(data_dir).iterdir() if p.is_dir() or _is_table(p)] if data_dir is not None else []
    sentence = f"data: '{name}' is unknown; {did_you_mean(name, {*NAMES, *local})}"
    if data_dir is not None and find_layout(Path(data_dir)) == "classes":
        sentence += f"; '{data_dir}' itself is no data set, as not each of its folders holds images"
    raise FedfillError(sentence)


def from_python(data: Any, name: str = "python") -> Source | list[Source]:
    """A source from objects in memory, of one or several domains, or one source per client from a list of them.

    Accepted are a tuple ``(inputs, labels)`` or ``(inputs, labels, test_inputs, test_labels)`` of numpy arrays or torch
    tensors, a `datasets.Dataset`, a `datasets.DatasetDict` with ``train`` and perhaps ``test``, and a `Source`. Inputs
    are uint8 images ``[n, h, w]``, ``[n, h, w, c]`` or ``[n, c, h, w]`` with 1 or 3 channels (read as ``[n, c, h, w]``
    where both fit), or floats ``[n, ...]``, which keep their values and become float32. Where no test set is given, a
    fixed stratified fifth is held out; in a list, the test set of a client with too few samples for that is empty, and in
    a dict that of a domain.

    Args:
        data: One of these forms, a dict with one of them by domain, or a list with one of them per client.
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
    if isinstance(data, dict) and not _is_datasets(data):
        return _by_domain(data, name)
    return data if isinstance(data, Source) else _source(name, "data", *_one_from_python(data, "data"))


# ---- bundled


def _digits(size: int | None) -> Source:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    if size is not None:
        images = np.stack([resized(Image.fromarray(image[0]), size).transpose(2, 0, 1) for image in images])
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
    if everyone is None and (train.domains is not None or (test is not None and test.domains is not None)):
        return _join(name, where, _by_name(train, test, where))
    parts = (train,) if test is None else (train, test)
    class_names = _names(parts, everyone or sum(len(part.samples) for part in parts))
    if test is not None:
        if None not in (train.names, test.names) and train.names != test.names:
            raise FedfillError(
                f"{where}: the class names in the train and test splits differ; give both the same names in the same "
                "order"
            )
        check_alike(train.samples.inputs, test.samples.inputs, where)
        check_labels(test.samples.labels.numpy(), class_names, f"{where}, test set")
        return Source(name, train.samples, test.samples, class_names, note)
    # the seed is fixed forever: every experiment on a data set has the same test set
    kept, held = hold_out(train.samples.labels.numpy(), TEST_SHARE, numpy_stream(0, "fixed-test"))
    if not len(held) and everyone is None:
        raise FedfillError(_too_few(where, f"{len(train.samples):,} samples"))
    samples, note = train.samples, SPLIT if len(held) else NONE
    return Source(name, samples[torch.from_numpy(kept)], samples[torch.from_numpy(held)], class_names, note)


def _by_name(train: Part, test: Part | None, where: str) -> dict[str, tuple[Part, Part | None]]:
    """What was read, taken apart by the names of the domains: numbers in their order, else by the alphabet."""
    if train.domains is None or (test is not None and test.domains is None):
        one, other = ("test", "training") if train.domains is None else ("training", "test")
        raise FedfillError(
            f"{where}: the {one} samples have a column '{DOMAIN_COLUMN}' and the {other} samples have none"
        )
    own, given = (np.unique(np.empty(0, str) if p is None or p.domains is None else p.domains) for p in (train, test))
    if len(extra := np.setdiff1d(given, own)):
        raise FedfillError(f"{where}: the test samples have a domain '{extra[0]}' that the training samples don't have")
    names = in_order(own)

    def of(part: Part, domain: str) -> Part:
        assert part.domains is not None
        return Part(part.samples[torch.from_numpy(np.flatnonzero(part.domains == domain))], part.names, part.place)

    return {n: (of(train, n), of(test, n) if test is not None and n in given else None) for n in names}


def _parts_of(source: Source) -> tuple[Part, Part | None]:
    """A source as the parts of a larger one."""
    train, test = (Part(part, source.class_names, f"data '{source.name}'") for part in (source.train, source.test))
    return train, test if len(source.test) else None


def _join(name: str, where: str, parts: Mapping[str, tuple[Part, Part | None]]) -> Source:
    """The source of several domains, one after the other, of each of which a part is held out where it brings no test set.

    Args:
        name: The source's name.
        where: The beginning of an error sentence.
        parts: The training part and, where there is one, the test part of each domain.

    Returns:
        The source.
    """
    everything = [part for pair in parts.values() for part in pair if part is not None]
    class_names = _names(
        sorted(everything, key=lambda part: part.names is None), sum(len(p.samples) for p in everything)
    )
    halves: list[tuple[Samples, Samples]] = []
    without = []
    for domain, (train, test) in parts.items():
        if not len(train.samples):
            raise FedfillError(f"{where}: domain '{domain}' has no training samples, but at least one is needed")
        for part in (train, test):
            if part is None:
                continue
            check_alike(everything[0].samples.inputs, part.samples.inputs, f"{where}, domain '{domain}'")
            if part.names not in (None, class_names):
                raise FedfillError(
                    f"{where}: the classes of domain '{domain}' are {', '.join(part.names or ())}, but those of another are "
                    f"{', '.join(class_names)}; all domains need the same classes in the same order"
                )
            check_labels(part.samples.labels.numpy(), class_names, f"{where}, domain '{domain}'")
        if test is not None:
            halves.append((train.samples, test.samples))
            continue
        without.append(domain)
        kept, held = hold_out(train.samples.labels.numpy(), TEST_SHARE, numpy_stream(0, "fixed-test", domain))
        halves.append((train.samples[torch.from_numpy(kept)], train.samples[torch.from_numpy(held)]))
    trains, tests = zip(*halves, strict=True)
    if not any(map(len, tests)):
        raise FedfillError(_too_few(where, f"samples of each of {len(parts)} domains"))
    note = SPLIT if len(without) == len(parts) else OWN
    if without and note == OWN:
        note += f" Of {', '.join(without)}, which came without one, a fixed stratified fifth."
    index = [np.repeat(np.arange(len(parts)), [len(samples) for samples in half]) for half in (trains, tests)]
    return Source(name, _joined(trains), _joined(tests), class_names, note, Domains(tuple(parts), index[0], index[1]))


def _joined(parts: Sequence[Samples]) -> Samples:
    return Samples(torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts]))


def _too_few(where: str, what: str) -> str:
    return f"{where}: there is no test set and the {what} are too few to hold one out; give at least 3 of a class"


# ---- folders


def _folder(name: str, data_dir: Path) -> Path | None:
    """The folder or table of this name, or the data folder where data lie directly in it."""
    if name and name == Path(name).name and name != "..":
        place = data_dir / name
        if place.is_dir() or _is_table(place):
            return place
    if (data_dir / "train.csv").is_file():
        return data_dir
    layout = find_layout(data_dir)
    # folders of folders of images may as well be several data sets, and so may a folder of pictures among others
    alone = layout in ("parquet", "splits") or (layout == "classes" and holds_classes_alone(data_dir))
    return data_dir if alone else None


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in (".csv", ".parquet") and path.is_file()


def from_folder(name: str, folder: Path, one_of_many: bool = False, size: int | None = None) -> Source:
    """A source from a folder of Parquet files, images or tables.

    Args:
        name: What to call it.
        folder: The folder, or the file of a table.
        one_of_many: Whether it holds the data of one client alone, which may lack classes and a test set.
        size: Pixels to a side to bring every image to, in colour; None: as they are.

    Returns:
        The source.

    Raises:
        FedfillError: Where it can't be read.
    """
    with _readable(f"data '{name}'", folder):
        return _from_folder(name, folder, one_of_many, size)


@contextmanager
def _readable(where: str, folder: Path) -> Iterator[None]:
    """One sentence where the system lets nobody read."""
    try:
        yield
    except OSError as error:
        raise FedfillError(f"{where}: '{folder}' can't be read ({first_line(error)})") from error


def _from_folder(name: str, folder: Path, one_of_many: bool, size: int | None) -> Source:
    where = f"data '{name}'"
    if (tables := find_tables(folder)) is not None:
        if one_of_many:
            raise FedfillError(
                f"{where}: '{tables[0]}' is a table, and a host alone can't know all words of its columns; encode it and give "
                "it as safetensors"
            )
        if size is not None:
            raise FedfillError(f"image_size: found {size}, but '{tables[0]}' is a table and holds no images")
        train, test, numbers, note = read_tables(*tables, where)
        raw = _source(name, where, train, test)
        own, held = standardised(raw.train, raw.test, numbers)
        return replace(raw, train=own, test=held, note=f"{raw.note} {note}")
    folder = descend(folder, where)
    layout = find_layout(folder)
    if layout is None:
        raise FedfillError(
            f"{where}: '{folder}' holds neither train*.parquet files, nor train.csv, nor one folder with them, nor a train folder, nor "
            "a folder of images for each class, nor a folder for each domain with these"
        )
    if layout == "domains":
        return _join(name, where, {domain: (part, None) for domain, part in read_domains(folder, None, size).items()})
    if layout == "splits" and find_layout(folder / "train") == "domains":
        return _join(name, where, _split_domains(folder, where, size))
    if layout == "parquet":
        train = read_parquet(folder, "train", size)
        test = read_parquet(folder, "test", size) if any(folder.glob("test*.parquet")) else None
        if test is not None and train.names != test.names:
            raise FedfillError(f"{where}: the class names in the train and test files of '{folder}' differ")
    elif layout == "splits":
        train = read_images(folder / "train", None, size)
        test = read_images(folder / "test", train.names, size) if (folder / "test").is_dir() else None
    else:
        train, test = read_images(folder, None, size), None
    return _source(name, where, train, test, everyone=sys.maxsize if one_of_many else None)


def _split_domains(folder: Path, where: str, size: int | None) -> dict[str, tuple[Part, Part | None]]:
    """The images of ``train/DOMAIN/CLASS/`` and, where there are any, of ``test/DOMAIN/CLASS/``."""
    train = read_domains(folder / "train", None, size)
    names = next(iter(train.values())).names
    test = read_domains(folder / "test", names, size) if (folder / "test").is_dir() else {}
    if extra := sorted(test.keys() - train.keys()):
        raise FedfillError(f"{where}: '{folder / 'test' / extra[0]}' is a domain that the training images don't have")
    return {domain: (part, test.get(domain)) for domain, part in train.items()}


# ---- the Hugging Face Hub


def _from_hub(name: str, size: int | None) -> Source:
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
    return _source(name, where, _from_dataset(train, where, size), _from_dataset(test, where, size), OFFICIAL)


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


def _is_datasets(data: Any) -> bool:
    """Whether it is of the library `datasets`, which takes long to import; a DatasetDict is a dict too."""
    return type(data).__module__.partition(".")[0] == "datasets"


def _by_domain(data: dict[Any, Any], name: str) -> Source:
    """The source of a dict of data sets by domain."""
    if not data:
        raise FedfillError("data: the dict of domains is empty, but at least one is needed")
    parts: dict[str, tuple[Part, Part | None]] = {}
    for domain, item in data.items():
        if not isinstance(domain, str | int):
            raise FedfillError(
                f"data: the domain {domain!r} is a {type(domain).__name__}, but a name or number is needed"
            )
        if str(domain) in parts:
            raise FedfillError(f"data: the domain '{domain}' is there twice, as a name and as a number")
        parts[str(domain)] = (
            _parts_of(item) if isinstance(item, Source) else _one_from_python(item, f"data of domain '{domain}'")
        )
    return _join(name, "data", parts)


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
    if _is_datasets(data):
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
        "Source, or a list or a dict with one of these per client or per domain is needed"
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
    if isinstance(inputs, np.ndarray) and inputs.dtype != np.uint8:
        # torch knows neither other byte orders nor wider floats
        with np.errstate(over="ignore"):
            inputs = inputs.astype(np.float32)
    tensor = inputs.detach().cpu() if isinstance(inputs, Tensor) else torch.from_numpy(np.ascontiguousarray(inputs))
    if tensor.is_floating_point():
        tensor = tensor.to(torch.float32).contiguous()
        if not torch.isfinite(tensor).all():
            raise FedfillError(f"{where}: inputs hold NaN or infinite values, or values beyond the range of float32")
        return tensor
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


def _from_dataset(data: Any, where: str, size: int | None = None) -> Part:
    """A `datasets.Dataset` with an image column (encoded images or arrays), a label column and perhaps a domain column."""
    import datasets

    image, label = find_columns(data.column_names, where)
    if not len(data):
        raise FedfillError(f"{where}: the Dataset holds no samples")
    feature = data.features[label]
    names = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None
    place = f"{where}, column '{label}'"
    domains = None
    if DOMAIN_COLUMN in data.column_names:
        column = data.select_columns([DOMAIN_COLUMN]).with_format("arrow")[:].column(DOMAIN_COLUMN).combine_chunks()
        domains = read_domain_names(column, getattr(data.features[DOMAIN_COLUMN], "names", None), where)
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
        return Part(samples, names, place, domains)
    table = data.cast_column(image, datasets.Image(decode=False)).with_format("arrow")[:]
    images, labels = (table.column(column).combine_chunks() for column in (image, label))
    pixels, indices = from_arrow(images, labels, 0, names, where, paths=True, size=size)
    return Part(Samples(pixels, torch.from_numpy(indices)), names, place, domains)


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
