"""Folders on disk: which layout their data have, and images in one folder for each class."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from fedfill.data.dataset import Part, Parts, Source, in_order, join, source_of
from fedfill.data.images import decode
from fedfill.data.parquet import read_parquet
from fedfill.data.samples import Samples
from fedfill.data.schema import Schema
from fedfill.data.tables import find_tables, fitted, read_tables
from fedfill.errors import FedfillError, first_line

log = logging.getLogger("fedfill")

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})

SPLITS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation"})
"""Names of folders, in small letters, that are parts of a data set and no domains of it."""


def from_folder(
    name: str, folder: Path, one_of_many: bool = False, size: int | None = None, schema: Schema | None = None,
    test_fraction: float | None = None,
) -> Source:  # fmt: skip
    """A source from a folder of Parquet files, images or tables.

    Args:
        name: What to call it.
        folder: The folder, or the file of a table.
        one_of_many: Whether it holds the data of one client alone, which may lack classes and a test set.
        size: Pixels to a side to bring every image to, grey where all are grey; None: as they are.
        schema: What a table's columns hold; None: as the training table says.
        test_fraction: As for `dataset.source_of`.

    Returns:
        The source.

    Raises:
        FedfillError: Where it can't be read.
    """
    with readable(f"data '{name}'", folder):
        return _from_folder(name, folder, one_of_many, size, schema, test_fraction)


@contextmanager
def readable(where: str, folder: Path) -> Iterator[None]:
    """One sentence where the system lets nobody read."""
    try:
        yield
    except OSError as error:
        raise FedfillError(f"{where}: '{folder}' can't be read ({first_line(error)})") from error


def _from_folder(
    name: str, folder: Path, one_of_many: bool, size: int | None, schema: Schema | None, test_fraction: float | None
) -> Source:
    where = f"data '{name}'"
    if (tables := find_tables(folder)) is not None:
        if one_of_many and schema is None:
            raise FedfillError(
                f"{where}: '{tables[0]}' is a table, and a host alone can't know all words of its columns; agree on a schema "
                "(schema_file), or encode it and give it as safetensors"
            )
        if size is not None:
            raise FedfillError(f"image_size: found {size}, but '{tables[0]}' is a table and holds no images")
        log.info("reading %s", name)
        train, test, columns, note = read_tables(*tables, where, schema, sited=not one_of_many)
        everyone = sys.maxsize if one_of_many else None
        source = source_of(name, where, train, test, everyone=everyone, test_fraction=test_fraction)
        return fitted(source, columns, note)
    folder = descend(folder, where)
    layout = find_layout(folder)
    if layout is None:
        raise FedfillError(
            f"{where}: '{folder}' holds neither train*.parquet files, nor train.csv, nor one folder with them, nor a train folder, nor "
            "a folder of images for each class, nor a folder for each domain with these"
        )
    log.info("reading %s", name)
    sized = size is not None
    if layout == "domains":
        parts: Parts = {domain: (part, None) for domain, part in read_domains(folder, None, size).items()}
        return join(name, where, parts, sized, test_fraction)
    if layout == "splits" and find_layout(folder / "train") == "domains":
        return join(name, where, _split_domains(folder, where, size), sized, test_fraction)
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
    everyone = sys.maxsize if one_of_many else None
    return source_of(name, where, train, test, everyone=everyone, sized=sized, test_fraction=test_fraction)


def _split_domains(folder: Path, where: str, size: int | None) -> Parts:
    """The images of ``train/DOMAIN/CLASS/`` and, where there are any, of ``test/DOMAIN/CLASS/``."""
    train = read_domains(folder / "train", None, size)
    names = next(iter(train.values())).names
    test = read_domains(folder / "test", names, size) if (folder / "test").is_dir() else {}
    if extra := sorted(test.keys() - train.keys()):
        raise FedfillError(f"{where}: '{folder / 'test' / extra[0]}' is a domain that the training images don't have")
    return {domain: (part, test.get(domain)) for domain, part in train.items()}


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
    with suppress(PermissionError):
        return _children(folder)
    return []


def _holds_images(folder: Path) -> bool:
    """Whether images lie in it; likewise."""
    with suppress(PermissionError):
        return any(_images(folder))
    return False


def _images(folder: Path) -> Iterator[Path]:
    return (
        path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")
    )


def read_domains(folder: Path, names: tuple[str, ...] | None, size: int | None) -> dict[str, Part]:
    """The images of ``folder/DOMAIN/CLASS/`` by domain, ordered by `in_order`; one may lack classes that another has."""
    found: dict[str, Path] = {}
    for child in _children(folder):
        domain = child.name.strip()
        if domain.lower() in SPLITS:
            raise FedfillError(
                f"data: '{child}' would be a domain, but its name is that of a part of a data set; rename such folders "
                "to train and test"
            )
        if domain in found:
            raise FedfillError(f"data: '{found[domain]}' and '{child}' differ in blanks alone; rename one of them")
        found[domain] = child
    classes = names or tuple(sorted({child.name for place in found.values() for child in _children(place)}))
    return {domain: read_images(found[domain], classes, size) for domain in in_order(found)}


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
    inputs = decode(paths, lambda row: f"'{paths[row]}'", size)
    return Part(Samples(inputs, torch.tensor(labels)), names, f"data: '{folder}'")
