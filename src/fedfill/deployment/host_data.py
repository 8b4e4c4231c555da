"""Data of a deployment: what all parties agree on beforehand, and what one host holds, which this room sends nowhere."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from fedfill.data.dataset import OWN
from fedfill.data.federation import ClientData, Federation
from fedfill.data.folders import from_folder
from fedfill.data.images import in_colour
from fedfill.data.samples import UNKNOWN, Samples
from fedfill.data.schema import Schema, from_toml
from fedfill.data.stratified import hold_out
from fedfill.errors import FedfillError, did_you_mean
from fedfill.streams import numpy_stream

FORMATS = {
    "parquet": "a folder with train*.parquet, and perhaps test*.parquet",
    "table": "a CSV or Parquet file, or a folder with train.csv, whose columns are those of the schema",
    "images": "a folder with a folder of images for each class, or with train and test folders of these",
    "safetensors": "a file with the tensors inputs and labels, and perhaps test_inputs with test_labels, validation_inputs with validation_labels, and unlabelled_inputs",
}
DTYPES = {"uint8": torch.uint8, "float32": torch.float32}


@dataclass(frozen=True)
class Task:
    """What all parties of a deployment agree on; none of it comes from anyone's samples.

    Attributes:
        name: What to call the data.
        clients: Number of hosts.
        class_names: In the order of their indices; where a number is learnt, its name alone.
        shape: Of one sample's inputs, channels first.
        dtype: ``uint8`` for images, ``float32`` for anything else.
        fingerprint: Of the data of a rehearsal; empty in a deployment, where nobody sees them all.
        schema: What the columns of a table hold, as TOML; empty where the data are none.
    """

    name: str
    clients: int
    class_names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str = "uint8"
    fingerprint: str = ""
    schema: str = ""

    def __post_init__(self) -> None:
        """Check what a person may have edited."""
        if self.dtype not in DTYPES:
            raise FedfillError(f"dtype: found '{self.dtype}'; allowed: {', '.join(DTYPES)}")
        if not isinstance(self.name, str):
            raise FedfillError(f"name: found {self.name!r}; allowed: text")
        if type(self.clients) is not int or self.clients < 1:
            raise FedfillError(f"clients: found {self.clients!r}; allowed: a whole number of at least 1")
        names = set(self.class_names)
        least = 1 if self.of_numbers else 2
        if (
            len(names) != len(self.class_names)
            or len(names) < least
            or not all(isinstance(n, str) and n for n in names)
        ):
            raise FedfillError(f"class_names: found {list(self.class_names)}; allowed: two or more different names")
        if not self.shape or not all(type(n) is int and n > 0 for n in self.shape):
            raise FedfillError(f"shape: found {list(self.shape)}; allowed: whole numbers such as [1, 28, 28]")
        if self.schema and (agreed := self.agreed) is not None:
            found, fits = (self.class_names, self.shape), (agreed.target.class_names, (agreed.encoding().size,))
            if found != fits:
                raise FedfillError(
                    f"schema: found classes and shape {found} beside one that makes {fits}; allowed: the same"
                )

    def document(self) -> dict[str, object]:
        """The fields as TOML holds them."""
        return {name: value for name, value in asdict(self).items() if name != "schema" or value}

    @classmethod
    def of(cls, federation: Federation) -> Task:
        """What a federation's parties would have agreed on."""
        return cls(
            federation.name,
            len(federation.clients),
            federation.class_names,
            federation.shape,
            str(federation.test.inputs.dtype).removeprefix("torch."),
            federation.fingerprint,
            "" if federation.columns is None or federation.columns.schema is None else federation.columns.schema.toml(),
        )

    @classmethod
    def by(cls, schema: Schema, name: str, clients: int) -> Task:
        """What parties agree on whose tables have a schema."""
        shape = (schema.encoding().size,)
        return cls(name, clients, schema.target.class_names, shape, "float32", schema=schema.toml())

    @property
    def agreed(self) -> Schema | None:
        """What the columns of a table hold; None where the data are none."""
        return from_toml(self.schema, "of the app") if self.schema else None

    @property
    def of_numbers(self) -> bool:
        """Whether a number is learnt, and no classes."""
        return (agreed := self.agreed) is not None and agreed.target.kind == "number"

    def strata(self, samples: Samples) -> NDArray[np.int64]:
        """What a stratified choice among some samples keeps the shares of."""
        labels = samples.strata
        return labels if (agreed := self.agreed) is None or self.of_numbers else agreed.target.strata(labels)

    @property
    def nothing(self) -> Samples:
        """No samples, of this task's type and shape."""
        labels = torch.float32 if self.of_numbers else torch.int64
        return Samples(torch.zeros(0, *self.shape, dtype=DTYPES[self.dtype]), torch.zeros(0, dtype=labels))

    def remote(self, test: Samples | None = None) -> Federation:
        """The federation as a party sees it that holds nobody's data."""
        nobody = ClientData(self.nothing, self.nothing)
        fingerprint = self.fingerprint or hashlib.sha256(repr(self).encode()).hexdigest()
        everyone = (nobody,) * self.clients
        columns = None if (schema := self.agreed) is None else schema.encoding()
        test = test or self.nothing
        return Federation(self.name, everyone, test, self.class_names, (), fingerprint, columns=columns)


def load_host(
    path: Path | str,
    form: str,
    task: Task,
    *,
    setting: str = "data",
    client: int = 0,
    share: float = 0.0,
    labelled: int | None = None,
    validation: float | None = None,
    size: int | None = None,
    seed: int = 0,
) -> ClientData:
    """What a host holds.

    Args:
        path: Folder or file.
        form: One of `FORMATS`.
        task: What all parties agreed on; the data's classes are found in it by name.
        setting: What an error sentence names.
        client: The host's number.
        share: Share of each class that is kept as the host's own test split where the data bring none; with 0 they need
            none, and what they bring is not used.
        labelled: How many of the training samples keep their labels; None: all. Samples that the data bring without
            labels come on top.
        validation: Share of what is left that is kept for validation where the data bring none; with none
            they need none, and what they bring is not used.
        size: Pixels to a side to bring every image of a folder to, with the channels of the task; None: as they are.
        seed: Of the experiment.

    Returns:
        Training samples, the own test split, samples without labels, and those for validation.

    Raises:
        FedfillError: Where there is nothing, or it doesn't fit the task.
    """
    if labelled is not None and task.of_numbers:
        raise FedfillError(f"labelled_per_client: found {labelled} with a number as target; allowed: none")
    if form not in FORMATS:
        raise FedfillError(f"format: found '{form}'; {did_you_mean(form, FORMATS)}")
    place = Path(path).expanduser()
    if not place.exists():
        raise FedfillError(f"{setting}: there is no '{place}'; it should be {FORMATS[form]}")
    if form not in ("safetensors", "table") and not place.is_dir():
        raise FedfillError(f"{setting}: '{place}' is no folder; it should be {FORMATS[form]}")
    if form == "safetensors":
        train, test, given, unlabelled = _read_safetensors(place, task, setting)
    else:
        train, test, given, unlabelled = (*_read_folder(place, task, setting, size), None, task.nothing)
    if not len(train):
        raise FedfillError(f"{setting}: '{place}' holds no samples; a host needs at least one")
    if test is None and share:
        kept, held = hold_out(task.strata(train), share, numpy_stream(seed, "client-test", client))
        train, test = train[torch.from_numpy(kept)], train[torch.from_numpy(held)]
    own = ClientData(train, test if test is not None and share else task.nothing, unlabelled)
    if given is not None and validation:
        own = replace(own, validation=given)
    else:
        own = own.with_validation(validation, numpy_stream(seed, "client-validation", client), task.strata(own.train))
    return own.with_labels(labelled, numpy_stream(seed, "labelled", client))


def save_host(path: Path, data: ClientData) -> None:
    """Write what `load_host` reads with the format ``safetensors``."""
    tensors = {
        "inputs": data.train.inputs.contiguous(),
        "labels": data.train.labels.contiguous(),
        # copies: the parts may be views of one tensor, which safetensors refuses
        "test_inputs": data.test.inputs.clone(memory_format=torch.contiguous_format),
        "test_labels": data.test.labels.clone(),
    }
    if len(data.unlabelled):
        tensors["unlabelled_inputs"] = data.unlabelled.inputs.clone(memory_format=torch.contiguous_format)
    if len(data.validation):
        tensors["validation_inputs"] = data.validation.inputs.clone(memory_format=torch.contiguous_format)
        tensors["validation_labels"] = data.validation.labels.clone()
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, path)


def _read_safetensors(path: Path, task: Task, setting: str) -> tuple[Samples, Samples | None, Samples | None, Samples]:
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise FedfillError(f"{setting}: '{path}' can't be read as safetensors ({error})") from error
    parts: list[Samples | None] = []
    for prefix in ("", "test_", "validation_"):
        inputs, labels = tensors.get(f"{prefix}inputs"), tensors.get(f"{prefix}labels")
        if inputs is None and labels is None and prefix:
            parts.append(None)
            continue
        if inputs is None or labels is None:
            raise FedfillError(f"{setting}: '{path}' needs both {prefix}inputs and {prefix}labels")
        samples = inputs.shape[:1]
        wanted = task.nothing.labels.dtype
        if labels.dtype != wanted or labels.dim() != 1 or labels.shape != samples:
            raise FedfillError(
                f"{setting}: {prefix}labels in '{path}' are {labels.dtype} of shape {list(labels.shape)}; "
                f"allowed: one {str(wanted).removeprefix('torch.')} for each of the {sum(samples)} samples"
            )
        if task.of_numbers:
            if not bool((labels.abs() <= 1).all()):
                raise FedfillError(f"{setting}: {prefix}labels in '{path}' go beyond -1..1, the scale of a number")
        elif len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(task.class_names):
            raise FedfillError(f"{setting}: {prefix}labels in '{path}' go beyond the {len(task.class_names)} classes")
        parts.append(_fitting(Samples(inputs, labels), task, f"{setting}: '{path}'"))
    train, test, validation = parts
    unlabelled = task.nothing
    if (inputs := tensors.get("unlabelled_inputs")) is not None:
        without = torch.full(inputs.shape[:1], UNKNOWN)
        unlabelled = _fitting(Samples(inputs, without), task, f"{setting}: unlabelled_inputs in '{path}'")
    return train or task.nothing, test, validation, unlabelled


def _read_folder(path: Path, task: Task, setting: str, size: int | None) -> tuple[Samples, Samples | None]:
    source = from_folder(path.name, path, one_of_many=True, size=size, schema=task.agreed)
    unknown = [name for name in source.class_names if name not in task.class_names]
    if unknown:
        raise FedfillError(
            f"{setting}: '{path}' has a class '{unknown[0]}'; {did_you_mean(unknown[0], task.class_names)}"
        )
    index = torch.tensor([task.class_names.index(name) for name in source.class_names])

    def ours(labels: Tensor) -> Tensor:
        return labels if task.of_numbers else index[labels]

    # what one host holds doesn't tell whether all hold grey images alone, so the agreed shape does
    colour = size is not None and task.shape[0] == 3
    train, test = (
        _fitting(
            Samples(in_colour(part.inputs) if colour else part.inputs, ours(part.labels)), task, f"{setting}: '{path}'"
        )
        for part in (source.train, source.test)
    )
    # a fifth that was only held out for want of a test set goes back: the share is the experiment's
    return (train, test) if source.note.startswith(OWN) else (train + test, None)


def _fitting(samples: Samples, task: Task, where: str) -> Samples:
    found, dtype = tuple(samples.inputs.shape[1:]), DTYPES[task.dtype]
    if found != task.shape or samples.inputs.dtype != dtype:
        channels = found != task.shape and found[1:] == task.shape[1:]
        hint = ", and image_size makes colour of grey images, but never grey of colour" if channels else ""
        raise FedfillError(
            f"{where} holds {samples.inputs.dtype} samples of shape {list(found)}; "
            f"this deployment's are {dtype} of shape {list(task.shape)}{hint}"
        )
    if samples.inputs.is_floating_point() and not samples.inputs.isfinite().all():
        raise FedfillError(f"{where} holds NaN or infinite values")
    return samples
