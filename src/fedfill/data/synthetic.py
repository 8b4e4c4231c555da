"""Synthetic samples as a file: inputs and labels with how they were made, to train on, to add to clients' data, to measure.

One safetensors file: the tensors ``inputs`` and ``labels``, and in its header one JSON text of an `Origin`. No path of the
machine that made it is in there. A table with a schema may be a Parquet file, with both in its metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from fedfill.data.dataset import Source
from fedfill.data.federation import Federation, fingerprint
from fedfill.data.samples import Samples
from fedfill.data.schema import Schema, from_toml
from fedfill.errors import FedfillError, first_line, path_of

SUFFIX = ".safetensors"
TABLE = ".parquet"
KEY = "fedfill"
"""Of the header's text."""
SCHEMA_KEY = "schema"
"""Of a table's schema, as TOML."""
ALLOWED = "a file of 'fedfill synthesise'"


@dataclass(frozen=True)
class Origin:
    """How synthetic samples were made, and what guarantee they carry.

    Attributes:
        class_names: In the order of their indices; where the target is a number its column alone.
        algorithm: That made them.
        data: Name of the data set that the run trained on, whose test set they are judged by; of one that was named by its path the
            last part of that.
        image_size: To which that data set's images were brought; None: none.
        seed: Of the run; None where the run has noise, as that of a simulation follows from the seed.
        digest: Of the run's experiment; None where the run has noise, as it is a function of every record without noise.
        version: Of fedfill.
        per_class: How many of each class were asked for.
        epsilon: Of the whole run, for a record replaced by another of the same class; None: no guarantee.
        epsilon_added: The same for a record added or removed; None: no guarantee, or no such figure.
        delta: Of both.
        privacy: What is protected, from whom, under which conditions, or that nothing is.
        test_fraction: With which the run held out that data set's test set; None: none was given.
    """

    class_names: tuple[str, ...]
    algorithm: str
    data: str
    image_size: int | None
    seed: int | None
    digest: str | None
    version: str
    per_class: int
    epsilon: float | None
    epsilon_added: float | None
    delta: float
    privacy: str
    test_fraction: float | None = None

    def document(self) -> dict[str, Any]:
        """As JSON keeps it: files of runs without a `test_fraction` have the bytes that they had before there was one."""
        return {name: value for name, value in asdict(self).items() if name != "test_fraction" or value is not None}

    @property
    def words(self) -> str:
        """Who made them, in a few words."""
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{self.algorithm} on {self.data}{seed}, fedfill {self.version}"

    @property
    def guarantee(self) -> str:
        """The guarantee in a few words: what the last sentence of the account says, or all of another text."""
        return self.privacy.rsplit("In total: ", 1)[-1].rstrip(".")


@dataclass(frozen=True)
class Synthetic:
    """What a file holds.

    Attributes:
        samples: At least one, each with a label.
        origin: How they were made.
    """

    samples: Samples
    origin: Origin


def to_bytes(synthetic: Synthetic) -> bytes:
    """The file's bytes: the same for the same samples and origin."""
    samples = synthetic.samples.to("cpu")
    tensors = {"inputs": samples.inputs.contiguous(), "labels": samples.labels.contiguous()}
    text = json.dumps(synthetic.origin.document(), sort_keys=True, allow_nan=False)
    # one key alone: the order of several is not the same each time
    return safetensors.torch.save(tensors, {KEY: text})


def read(path: Path | str, setting: str = "data") -> Synthetic:
    """Read a file, and check all of it.

    Args:
        path: The file.
        setting: What an error's sentence begins with.

    Returns:
        Samples ``[n, ...]``, uint8 or float32, n at least 1, with labels of the origin's classes.

    Raises:
        FedfillError: Where there is no such file, or it is not whole and sound.
    """
    place = Path(path)
    if not place.is_file():
        raise FedfillError(f"{setting}: found no file {path}; allowed: {ALLOWED}")
    try:
        with safe_open(place, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
    except (OSError, SafetensorError) as error:
        raise FedfillError(f"{setting}: {path} can't be read as safetensors ({error}); allowed: {ALLOWED}") from error
    if KEY not in header:
        raise FedfillError(
            f"{setting}: {path} doesn't say how its samples were made (no '{KEY}' in its header); allowed: {ALLOWED}"
        )
    origin = _origin(header[KEY], f"{setting}: {path}")
    if len(set(origin.class_names)) < 2:
        raise FedfillError(
            f"{setting}: {path} names the classes {list(origin.class_names)}; allowed: two or more different names"
        )
    for name in ("inputs", "labels"):
        if name not in tensors:
            raise FedfillError(f"{setting}: {path} has no tensor '{name}'; allowed: {ALLOWED}")
    inputs, labels = tensors["inputs"], tensors["labels"]
    if inputs.dtype not in (torch.uint8, torch.float32) or inputs.dim() < 2 or not inputs.numel():
        raise FedfillError(
            f"{setting}: inputs in {path} are {inputs.dtype} of shape {list(inputs.shape)}; allowed: uint8 images or float32 [n, ...], n at "
            "least 1"
        )
    if labels.dtype != torch.int64 or labels.shape != inputs.shape[:1]:
        raise FedfillError(
            f"{setting}: labels in {path} are {labels.dtype} of shape {list(labels.shape)}; allowed: one int64 for each of the "
            f"{len(inputs)} inputs"
        )
    if not 0 <= int(labels.min()) <= int(labels.max()) < len(origin.class_names):
        raise FedfillError(
            f"{setting}: labels in {path} are {int(labels.min())}..{int(labels.max())}; allowed: 0..{len(origin.class_names) - 1}, as it "
            f"names {len(origin.class_names)} classes"
        )
    if inputs.is_floating_point() and not bool(inputs.isfinite().all()):
        raise FedfillError(f"{setting}: inputs in {path} hold NaN or infinite values; allowed: finite numbers")
    return Synthetic(Samples(inputs, labels), origin)


def read_table(path: Path, setting: str) -> tuple[Synthetic, Schema]:
    """Read a table that `fedfill.synthesise` has written.

    Args:
        path: A Parquet file.
        setting: What an error's sentence begins with.

    Returns:
        What it holds, its inputs as a network takes them, and its schema.

    Raises:
        FedfillError: Where it is no such file, or its rows don't fit its schema.
    """
    import pyarrow.parquet as pq

    from fedfill.data import tables  # here: who reads images needs none of it

    where = f"{setting}: {path}"
    try:
        told = {key.decode(): value.decode() for key, value in (pq.read_schema(path).metadata or {}).items()}
    except (OSError, ValueError) as error:  # Arrow's and letters' errors are both
        raise FedfillError(f"{where} can't be read as Parquet ({first_line(error)}); allowed: {ALLOWED}") from error
    if missing := [key for key in (KEY, SCHEMA_KEY) if key not in told]:
        raise FedfillError(
            f"{where} doesn't say how its rows were made (no '{missing[0]}' in its metadata); allowed: {ALLOWED}"
        )
    origin, agreed = _origin(told[KEY], where), from_toml(told[SCHEMA_KEY], str(path), setting)
    part = tables.part_by(
        agreed, tables.read_table(path, agreed.words), where, sited=False
    )  # its rows come from nowhere
    if agreed.target.class_names != origin.class_names:
        raise FedfillError(f"{where} names other classes than its schema; allowed: {ALLOWED}")
    return Synthetic(agreed.encoding().samples(part.samples, where), origin), agreed


def _origin(text: str, where: str) -> Origin:
    try:
        found: Any = json.loads(text)
        origin = Origin(**{**found, "class_names": tuple(found["class_names"])})
    except (ValueError, TypeError, KeyError) as error:
        raise FedfillError(f"{where} has a header that is none of fedfill's; allowed: {ALLOWED}") from error
    kinds: dict[str, tuple[type, ...]] = {
        "class_names": (tuple,), "image_size": (int, type(None)), "seed": (int, type(None)), "digest": (str, type(None)), "per_class": (int,),
        "delta": (float,),
        "epsilon": (float, int, type(None)), "epsilon_added": (float, int, type(None)), "test_fraction": (float, type(None)),
    }  # fmt: skip
    for field in fields(Origin):
        value = getattr(origin, field.name)
        if not isinstance(value, kinds.get(field.name, (str,))) or isinstance(value, bool):
            raise FedfillError(f"{where} has {value!r} for '{field.name}' in its header; allowed: {ALLOWED}")
        if isinstance(value, int | float) and not 0 <= value < math.inf:  # a NaN is refused here too
            raise FedfillError(f"{where} has {value!r} for '{field.name}' in its header; allowed: {ALLOWED}")
    if origin.image_size == 0:
        raise FedfillError(f"{where} has 0 for 'image_size' in its header; allowed: {ALLOWED}")
    if not all(isinstance(name, str) for name in origin.class_names):
        raise FedfillError(f"{where} names the classes {list(origin.class_names)}; allowed: words")
    return origin


def is_file(name: str) -> bool:
    """Whether a data set's name is that of such a file."""
    return name.lower().endswith(SUFFIX)


def locate(name: str, data_dir: Path | str | None = None) -> Path:
    """Where a file lies: as it is named, or in the data folder.

    Args:
        name: Of the file.
        data_dir: The data folder.

    Returns:
        The first place that has one, or the name as it is.
    """
    place = path_of("data", name)
    places = [place] if data_dir is None else [place, Path(data_dir) / name]
    return next((one for one in places if one.is_file()), place)


Loader = Callable[[str, int | None, float | None], Source]
"""Loads the data set of a name, with its images brought to a size and a share of it held out as its test set."""


def as_source(path: Path, real: Loader, size: int | None, setting: str = "data") -> Source:
    """A file as a data set: its samples to train on, and the real data set's own test set.

    Args:
        path: The file.
        real: Loads the real data set.
        size: What the user asked for as `image_size`.
        setting: What an error's sentence begins with.

    Returns:
        The source.

    Raises:
        FedfillError: Where the file is not sound, or its data set can't be had or is another one.
    """
    found = read(path, setting)
    origin = found.origin
    if size not in (None, origin.image_size):
        raise FedfillError(
            f"image_size: found {size} with {path}, whose samples are made; allowed: none, or {origin.image_size or 'no number'} as there"
        )
    require_test(path, origin.test_fraction, setting)
    test = real_of(found, path, real, setting)
    how = f"{len(found.samples):,} synthetic samples of {path.name} ({origin.words})"
    note = f"Training set: {how}. Their own account: {origin.guarantee}. {test.note}"
    return Source(
        f"{origin.data} (synthetic)", found.samples, test.test, origin.class_names, note, columns=test.columns
    )


def require_test(path: Path, test_fraction: float | None, setting: str) -> None:
    """Refuse a run, or its file, without real samples that nobody trained on: its test set is the training samples themselves."""
    if test_fraction == 0:
        raise FedfillError(
            f"{setting}: {path} was made with test_fraction 0, so that there are no real samples that nobody trained on; allowed: one made "
            "with some"
        )


def real_of(found: Synthetic, path: Path, real: Loader, setting: str = "data") -> Source:
    """The real data set that a file's samples stand for, which has their classes and their shape.

    Args:
        found: What the file holds.
        path: The file.
        real: As for `as_source`.
        setting: What an error's sentence begins with.

    Returns:
        The source.

    Raises:
        FedfillError: Where it can't be had, or is another one.
    """
    origin = found.origin
    try:
        source = real(origin.data, origin.image_size, origin.test_fraction)
    except FedfillError as error:
        raise FedfillError(
            f"{setting}: {path} needs the test set of '{origin.data}', from which it was made ({error}); allowed: --data-dir with that data set"
        ) from error
    _require_fit(found, path, source.test, source.class_names, f"'{origin.data}'", setting)
    return source


def with_extra(
    federation: Federation, path: str, data_dir: Path | str | None = None, test_fraction: float | None = None
) -> Federation:
    """The same federation, each of whose clients that train has a file's samples beside its own labelled ones.

    Args:
        federation: Its clients' own test and validation splits stay as they are.
        path: The file; of a table with a schema a Parquet file.
        data_dir: Where it may lie as well.
        test_fraction: With which the federation's test set was held out; None: none was given.

    Returns:
        The federation, with a sentence on what was added and a fingerprint that holds it.

    Raises:
        FedfillError: Where the file is not sound, or doesn't fit the classes, the shape or the schema.
    """
    place = locate(path, data_dir)
    found = _rows_of(place, federation.schema) if place.suffix.lower() == TABLE else read(place, "extra")
    _require_fit(found, place, federation.test, federation.class_names, "these data", "extra")
    clients = tuple(
        replace(client, train=client.train + found.samples) if len(client.train) else client
        for client in federation.clients
    )
    some = sum(len(client.train) > 0 for client in clients)
    note = (
        f"Extra: {len(found.samples):,} samples of {place.name} ({found.origin.words}) beside the labelled samples of "
        f"{'the one client that trains' if some == 1 else f'each of {some:,} clients'}; the class counts hold them. Where they were made from the same records, their own account comes on top of this run's: "
        f"{found.origin.guarantee}."
    )
    if found.origin.test_fraction != test_fraction:
        theirs, here = (
            "none given" if one is None else f"{one:g}" for one in (found.origin.test_fraction, test_fraction)
        )
        note += f" Their run's test_fraction ({theirs}) is not that of this run ({here}): the test set may hold samples that they were made of."
    made = replace(federation, clients=clients, notes=(*federation.notes, note))
    return replace(made, fingerprint=fingerprint(made))


def _rows_of(path: Path, schema: Schema | None) -> Synthetic:
    """A table's rows as inputs of the same schema, but for its site column: its rows come from nowhere."""
    if not path.is_file():
        raise FedfillError(f"extra: found no file {path}; allowed: {ALLOWED}")
    found, own = read_table(path, "extra")
    if schema is None or replace(own, site=None) != replace(schema, site=None):
        raise FedfillError(
            f"extra: {path} has {'a schema' if schema is None else 'another schema'}, and these data have "
            f"{'none' if schema is None else 'their own'}; allowed: a table with the schema of these data"
        )
    return found


def _require_fit(
    found: Synthetic, path: Path, test: Samples, class_names: tuple[str, ...], whose: str, setting: str
) -> None:
    inputs, names = found.samples.inputs, found.origin.class_names
    if names != class_names:
        one, other = (", ".join(some[:12]) + (", ..." if len(some) > 12 else "") for some in (names, class_names))
        raise FedfillError(
            f"{setting}: {path} has {len(names)} classes ({one}); allowed: the {len(class_names)} of {whose} ({other})"
        )
    if inputs.shape[1:] != test.inputs.shape[1:] or inputs.dtype != test.inputs.dtype:
        raise FedfillError(
            f"{setting}: {path} has {inputs.dtype} samples of shape {list(inputs.shape[1:])}; allowed: {test.inputs.dtype} of shape "
            f"{list(test.inputs.shape[1:])}, as those of {whose}"
        )
