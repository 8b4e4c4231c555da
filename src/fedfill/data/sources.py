"""Sources: where a data set of a name comes from, read into memory once, with its test set kept apart.

Images stay uint8 ``[n, channels, height, width]`` as they were stored, unless a size is asked for; values are not scaled
here.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fedfill.data import synthetic
from fedfill.data.dataset import Part, Source, join, parts_of, refuse_fraction, source_of
from fedfill.data.folders import find_layout, from_folder, holds_classes_alone, readable
from fedfill.data.images import pixels
from fedfill.data.names import is_place, unknown
from fedfill.data.objects import from_dataset
from fedfill.data.samples import Samples
from fedfill.data.schema import Schema, from_toml
from fedfill.errors import FedfillError, first_line, path_of

log = logging.getLogger("fedfill")

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


def load(
    name: str, data_dir: Path | str | None = None, size: int | None = None, schema: Schema | None = None,
    test_fraction: float | None = None,
) -> Source:  # fmt: skip
    """The data set of this name: bundled, else from the data folder, else from the Hugging Face Hub.

    Args:
        name: ``digits``, a folder or a table (``NAME.csv``) below `data_dir`, one of `names.DATASETS`, the path of a folder or of a table
            (``./photos``), or a file of synthetic samples (``NAME.safetensors``), which is tested on the test set of the data set that it was made from.
        data_dir: Where tables and folders of Parquet files or images lie; the environment variable FEDFILL_DATA where None.
        size: Pixels to a side to bring every image to, grey where all are grey; None: as they are.
        schema: What a table's columns hold; None: as the training table says.
        test_fraction: As for `dataset.source_of`.

    Returns:
        The source. Loading it again in the same process costs nothing and gives the same tensors.

    Raises:
        FedfillError: Where there is no such data set, or it can't be read.
    """
    setting, folder = (
        ("data_dir", data_dir) if data_dir is not None else ("FEDFILL_DATA", os.environ.get("FEDFILL_DATA"))
    )
    place = os.path.abspath(path_of(setting, folder)) if folder else None
    if synthetic.is_file(name):  # never from the cache: the file may have been written anew
        refuse_fraction(test_fraction, f"data '{name}'", [name])

        def real(of: str, side: int | None, share: float | None) -> Source:
            return _load(of, place, setting, side, test_fraction=share)

        return synthetic.as_source(synthetic.locate(name, place), real, size)
    lies = os.path.abspath(path_of("data", name)) if is_place(name) else None
    source = _load(name, place, setting, size, lies, None if schema is None else schema.toml(), test_fraction)
    if schema is not None and source.columns is None:
        raise FedfillError(f"schema_file: found a schema with data '{name}', which are no table; allowed: none")
    return source


@functools.lru_cache(maxsize=2)
def _load(
    name: str, data_dir: str | None, setting: str, size: int | None, place: str | None = None, agreed: str | None = None,
    test_fraction: float | None = None,
) -> Source:  # fmt: skip
    schema = None if agreed is None else from_toml(agreed, "")  # as text, by which what was read can be found again
    if place is not None:
        return _at(name, Path(place), size, schema, test_fraction)
    if name == "digits":
        return _digits(size, test_fraction)
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FedfillError(
            f"{setting}: '{data_dir}' is not a folder; it should hold folders of Parquet files or images"
        )
    with readable(setting, Path(data_dir or ".")):
        folder = _folder(name, Path(data_dir)) if data_dir is not None else None
    if name in JOINED or (folder is None and name in HUB):
        log.info("reading %s", name)
    if folder is not None:
        return from_folder(name, folder, size=size, schema=schema, test_fraction=test_fraction)
    if name in JOINED or name in HUB:
        refuse_fraction(test_fraction, f"data '{name}'", [name])
    if name in JOINED:
        names, usual = JOINED[name]
        # past the cache, which would keep the parts beside the whole
        parts = {part: _load.__wrapped__(part, data_dir, setting, size or usual) for part in names}
        return join(name, f"data '{name}'", {part: parts_of(source) for part, source in parts.items()}, sized=True)
    if name in HUB:
        return _from_hub(name, size)
    local = [p.name for p in Path(data_dir).iterdir() if p.is_dir() or _is_table(p)] if data_dir is not None else []
    sentence = str(unknown(name, local))
    if data_dir is not None and find_layout(Path(data_dir)) == "classes":
        sentence += f"; '{data_dir}' itself is no data set, as not each of its folders holds images"
    raise FedfillError(sentence)


def _at(name: str, place: Path, size: int | None, schema: Schema | None, test_fraction: float | None) -> Source:
    """The data set of a folder or table that is named by its path, with what was found there."""
    if not (place.is_dir() or _is_table(place)):
        found = "no such folder or file" if not place.exists() else "a file of another kind"
        raise FedfillError(
            f"data: '{name}' is {found}{'' if str(place) == name else f' ({place})'}; allowed: a folder of images or Parquet files, or a table as .csv or .parquet"
        )
    source = from_folder(place.name, place, size=size, schema=schema, test_fraction=test_fraction)
    shape, names = source.train.inputs.shape[1:], source.class_names
    what = f"rows of {shape[0]} numbers"
    if len(shape) == 3:
        what = f"{'grey' if shape[0] == 1 else 'colour'} images of {shape[1]}x{shape[2]} pixels"
    told = f"{len(names)} classes ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
    if schema is not None and schema.target.kind != "classes":
        target = schema.target
        of_times = f"times to '{target.event}' on a grid of {len(target.grid)}"
        told = of_times if target.kind == "survival" else f"the number '{target.column}' to be told"
    domains = (
        "" if source.domains is None else f", {len(source.domains.names)} domains ({', '.join(source.domains.names)})"
    )
    # with a share of 0 samples are in both
    total = "" if test_fraction == 0 else f"{len(source.train) + len(source.test):,} "
    found = (
        f"Found in '{place}': {total}{what}, {told}{domains}; "
        f"{len(source.train):,} for training and {len(source.test):,} as the test set."
    )
    return replace(source, note=f"{found} {source.note}")


def _digits(size: int | None, test_fraction: float | None) -> Source:
    pictures, labels = _digits_of_scikit_learn()
    images = np.rint(pictures * (255 / 16)).astype(np.uint8)[:, None]
    if size is not None:
        images = np.stack([pixels(Image.fromarray(image[0]), size).transpose(2, 0, 1) for image in images])
    samples = Samples(torch.from_numpy(images), torch.from_numpy(labels))
    where = "data 'digits'"
    part = Part(samples, tuple(str(digit) for digit in range(10)), where)
    return source_of("digits", where, part, None, test_fraction=test_fraction)


def _digits_of_scikit_learn() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Images ``[n, 8, 8]`` from 0 to 16 and labels ``[n]``; from its file where that is, as importing it takes a second."""
    found = importlib.util.find_spec("sklearn")
    path = Path(found.origin if found and found.origin else "").parent / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        with gzip.open(path, "rt", encoding="ascii") as file:
            rows = np.array([line.split(",") for line in file], dtype=np.float64)  # [n, 65]
        images, labels = rows[:, :-1], rows[:, -1]
    else:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8), labels.astype(np.int64)


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


def _from_hub(name: str, size: int | None) -> Source:
    import datasets

    repository, configuration = HUB[name]
    problem = _unreachable(repository)
    try:
        # without a network the library retries for half a minute; its cache is asked at once instead
        with _offline(datasets.config) if problem else nullcontext():
            train, test = datasets.load_dataset(repository, configuration, split=["train", "test"])
    except Exception as error:  # the library has no common base for what can go wrong on the way
        raise FedfillError(
            f"data: '{name}' could not be fetched from the Hugging Face Hub ({problem or first_line(error)}); put its "
            f"Parquet files in a folder '{name}' below --data-dir or FEDFILL_DATA, or use --data digits, which needs "
            "no download"
        ) from error
    where = f"data '{name}' from the Hugging Face Hub"
    note = f"Test set: the official one. From the Hugging Face Hub: {repository}, revision {_revision(train)}."
    train, test = (from_dataset(part, where, size) for part in (train, test))
    return replace(source_of(name, where, train, test, sized=size is not None), note=note)


def _revision(dataset: Any) -> str:
    """The commit of the repository on the Hub that a data set came from: its folder in the library's cache has this name."""
    folders = (Path(file["filename"]).parent.name for file in dataset.cache_files)
    return next((name for name in folders if re.fullmatch("[0-9a-f]{40}", name)), "unknown")


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
