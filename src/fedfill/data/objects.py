"""Data from Python: arrays, `datasets` objects, and dicts and lists of them by domain and by client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfill.data.cells import DOMAIN_COLUMN
from fedfill.data.dataset import (
    Part,
    Source,
    check_labels,
    check_names,
    in_order,
    join,
    label_array,
    numbered,
    parts_of,
    refuse_fraction,
    source_of,
    too_few,
)
from fedfill.data.frames import from_frames, holds_frame
from fedfill.data.parquet import find_columns, from_arrow, read_domain_names
from fedfill.data.samples import Samples
from fedfill.data.schema import Schema
from fedfill.errors import FedfillError, shown


def dataset(data: Any, *, class_names: Sequence[str] | None = None) -> Source | list[Source]:
    """Data of your own with names for the classes, for ``data=`` of `fedfill.run` and the like.

    Without names they are not needed: ``data=`` takes the same forms as they are.

    Example::

        mine = fedfill.dataset((images, labels), class_names=["cat", "dog"])
        fedfill.run("fedavg", data=mine)

    Args:
        data: As ``data=`` of `fedfill.run` takes it, but no name and no path.
        class_names: A list, in the order of their indices: label 0 is the first. Labels that are words must be among them. None: words are
            classes in the order of the alphabet, and numbers are called by themselves.

    Returns:
        A data set, or for a list one for each client; `data=` takes either.

    Raises:
        FedfillError: Where the form, a shape, a type or a value doesn't fit.
    """
    return from_python(data, class_names=class_names)


def from_python(
    data: Any, name: str = "python", class_names: Sequence[str] | None = None, schema: Schema | None = None,
    test_fraction: float | None = None,
) -> Source | list[Source]:  # fmt: skip
    """A source from objects in memory, of one or several domains, or one source per client from a list of them.

    Accepted are what `frames.from_frames` takes, a tuple ``(inputs, labels)`` or ``(inputs, labels, test_inputs, test_labels)`` of numpy arrays or torch
    tensors, a `datasets.Dataset`, a `datasets.DatasetDict` with ``train`` and perhaps ``test``, and a `Source`. Inputs
    are uint8 images ``[n, h, w]``, ``[n, h, w, c]`` or ``[n, c, h, w]`` with 1 or 3 channels (read as ``[n, c, h, w]``
    where both fit), or floats ``[n, ...]``, which keep their values and become float32. Where no test set is given, a
    fixed stratified fifth is held out, or what `test_fraction` says; in a list, the test set of a client with too few samples for that is empty, and in
    a dict that of a domain. A `Source` has its test set already.

    Args:
        data: One of these forms, a dict with one of them by domain, or a list with one of them per client.
        name: What to call it.
        class_names: In the order of their indices; None: of labels that are words these, in the order of the alphabet.
        schema: What a table's columns hold, the target and the site among them; None: as the training table says.
        test_fraction: As for `dataset.source_of`.

    Returns:
        A source, or for a list one source per client.

    Raises:
        FedfillError: Where the form, a shape, a type or a value doesn't fit.
    """
    if class_names is not None:
        class_names = _checked_names(class_names)
        if isinstance(data, Source):
            raise FedfillError(
                f"class_names: found {shown(class_names)} with a data set that has its own; allowed: none"
            )
    if schema is not None and not holds_frame(data):
        raise FedfillError(f"schema_file: found a schema with {shown(data)}, which is no table; allowed: none")
    if holds_frame(data):
        return from_frames(data, name, class_names, schema, test_fraction)
    names = class_names or _words_of(data)
    if isinstance(data, list):
        return _by_client(data, name, names, test_fraction)
    if isinstance(data, dict) and not _is_datasets(data):
        return _by_domain(data, name, names, test_fraction)
    if isinstance(data, Source):
        if test_fraction is not None:
            raise FedfillError(
                f"test_fraction: found {test_fraction:g} with a data set whose test set is apart already; allowed: none, or the arrays or the table that it was made of"
            )
        return data
    return source_of(name, "data", *_one(data, "data", names), test_fraction=test_fraction)


def _checked_names(class_names: Any) -> tuple[str, ...]:
    """Names for classes, each once, of what has an order that its writer sees: that of a set is by chance."""
    ordered = isinstance(class_names, Sequence) or len(getattr(class_names, "shape", ())) == 1
    names = tuple(class_names) if ordered and not isinstance(class_names, str | bytes) else ()
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise FedfillError(
            f"class_names: found {shown(class_names)}; allowed: a list of words, each once, in the order of the classes' numbers"
        )
    check_names(names, "class_names")
    return tuple(map(str, names))


def _words_of(data: Any) -> tuple[str, ...] | None:
    """The classes that all training labels name, where they are words."""
    items = list(data.values()) if type(data) is dict else data if isinstance(data, list) else [data]
    given = [item[1] for item in items if isinstance(item, tuple) and len(item) in (2, 4)]
    words = [array for array in (label_array(one, "data") for one in given) if _are_words(array)]
    if words and len(words) < len(items):
        raise FedfillError(
            "data: labels are words in one part and none in another; allowed: words in all, or class_names"
        )
    tests = [item[3] for item in items if words and isinstance(item, tuple) and len(item) == 4]
    if not all(_are_words(label_array(one, "data, test set")) for one in tests):
        raise FedfillError(
            "data: labels are words for training and none in a test set; allowed: words in both, or class_names"
        )
    return tuple(in_order(word for array in words for word in np.unique(array))) if words else None


def _are_words(labels: np.ndarray[Any, Any]) -> bool:
    return bool(labels.size) and labels.ndim == 1 and all(isinstance(label, str) for label in labels)


def _by_client(data: list[Any], name: str, names: tuple[str, ...] | None, test_fraction: float | None) -> list[Source]:
    """One source per client. Each may be small, so what needs many samples is asked of all clients together."""
    if not data:
        raise FedfillError("data: the list of clients' data sets is empty, but at least one is needed")
    read = [
        item if isinstance(item, Source) else _one(item, f"data of client {client}", names)
        for client, item in enumerate(data)
    ]
    refuse_fraction(test_fraction, "data", [item.test if isinstance(item, Source) else item[1] for item in read])
    parts = (part for item in read for part in (parts_of(item) if isinstance(item, Source) else item))
    everyone = sum(len(part.samples) for part in parts if part is not None)
    sources = [
        item
        if isinstance(item, Source)
        else source_of(name, f"data of client {client}", *item, everyone=everyone, test_fraction=test_fraction)
        for client, item in enumerate(read)
    ]
    if not any(len(source.test) for source in sources):
        raise FedfillError(too_few("data", "samples of each client", test_fraction))
    return sources


def _is_datasets(data: Any) -> bool:
    """Whether it is of the library `datasets`, which takes long to import; a DatasetDict is a dict too."""
    return type(data).__module__.partition(".")[0] == "datasets"


def _by_domain(data: dict[Any, Any], name: str, names: tuple[str, ...] | None, test_fraction: float | None) -> Source:
    """The source of a dict of data sets by domain."""
    if not data:
        raise FedfillError("data: the dict of domains is empty, but at least one is needed")
    parts: dict[str, tuple[Part, Part | None]] = {}
    for domain, item in data.items():
        if not isinstance(domain, str | int):
            raise FedfillError(
                f"data: the domain {domain!r} is a {type(domain).__name__}, but a name or number is needed"
            )
        if (called := str(domain).strip()) in parts:
            raise FedfillError(
                f"data: the domain '{called}' is there twice; a number counts as its name, and blanks around it don't count"
            )
        parts[called] = parts_of(item) if isinstance(item, Source) else _one(item, f"data of domain '{called}'", names)
    return join(name, "data", parts, test_fraction=test_fraction)


def _one(data: Any, where: str, names: tuple[str, ...] | None) -> tuple[Part, Part | None]:
    """The training part and, where one was given, the test part."""
    if isinstance(data, tuple):
        if len(data) not in (2, 4):
            raise FedfillError(
                f"{where}: found a tuple of {len(data)}, but (inputs, labels) or (inputs, labels, test_inputs, "
                "test_labels) is needed"
            )
        train = Part(_pair(data[0], data[1], where, names), names, where)
        where += ", test set"
        return train, None if len(data) == 2 else Part(_pair(data[2], data[3], where, names), names, where)
    if _is_datasets(data):
        import datasets

        if isinstance(data, datasets.DatasetDict):
            if "train" not in data:
                raise FedfillError(f"{where}: the DatasetDict has no split 'train', only {', '.join(data)}")
            test = from_dataset(data["test"], f"{where}, test set", class_names=names) if "test" in data else None
            return from_dataset(data["train"], where, class_names=names), test
        if isinstance(data, datasets.Dataset):
            return from_dataset(data, where, class_names=names), None
    raise FedfillError(
        f"{where}: found {type(data).__name__}, but a tuple (inputs, labels), a DataFrame with a column 'label', a datasets.Dataset or "
        "DatasetDict, or a list or a dict with one of these per client or per domain is needed; a data set on disk is given by its path"
    )


def _pair(inputs: Any, labels: Any, where: str, names: tuple[str, ...] | None = None) -> Samples:
    return Samples(_inputs(inputs, where), torch.from_numpy(_labels(labels, len(inputs), where, names)))


def _inputs(inputs: Any, where: str) -> Tensor:
    if not isinstance(inputs, np.ndarray | Tensor):
        raise FedfillError(
            f"{where}: inputs are a {type(inputs).__name__}, but a numpy array or torch tensor is needed"
        )
    if inputs.ndim < 2 or not len(inputs) or 0 in inputs.shape:
        raise FedfillError(
            f"{where}: inputs have shape {list(inputs.shape)}, but at least one sample [n, ...] is needed"
        )
    floating = inputs.is_floating_point() if isinstance(inputs, Tensor) else np.issubdtype(inputs.dtype, np.floating)
    if not floating and (kind := str(inputs.dtype).removeprefix("torch.")) != "uint8":
        raise FedfillError(f"{where}: inputs are {kind}, but uint8 images or floats are needed")
    if isinstance(inputs, np.ndarray):
        with np.errstate(over="ignore"):  # torch knows neither other byte orders nor wider floats
            inputs = torch.from_numpy(inputs.astype(np.float32) if floating else np.ascontiguousarray(inputs))
    tensor: Tensor = inputs.detach().cpu()
    if floating:
        tensor = tensor.to(torch.float32).contiguous()
        if not torch.isfinite(tensor).all():
            raise FedfillError(f"{where}: inputs hold NaN or infinite values, or values beyond the range of float32")
        return tensor
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


def _labels(labels: Any, expected: int, where: str, names: tuple[str, ...] | None) -> np.ndarray[Any, Any]:
    array = label_array(labels, where)
    words = _are_words(array)
    if array.ndim != 1 or not (words or np.issubdtype(array.dtype, np.integer)):
        raise FedfillError(
            f"{where}: labels are {array.dtype} of shape {list(array.shape)}, but one whole number or one word per sample is needed"
        )
    if len(array) != expected:
        raise FedfillError(f"{where}: there are {expected} inputs but {len(array)} labels")
    if words:
        if names is None:
            raise FedfillError(
                f"{where}: labels are words, and those of the training samples whole numbers; allowed: the same in both, or class_names"
            )
        return numbered(array.astype(str), names, where)
    check_labels(array, names, where)
    return array.astype(np.int64)


def from_dataset(data: Any, where: str, size: int | None = None, class_names: tuple[str, ...] | None = None) -> Part:
    """A `datasets.Dataset` with an image column (encoded images or arrays), a label column and perhaps a domain column."""
    import datasets

    image, label = find_columns(data.column_names, where)
    if not len(data):
        raise FedfillError(f"{where}: the Dataset holds no samples")
    feature = data.features[label]
    if getattr(feature, "dtype", "") in ("string", "large_string"):
        raise FedfillError(
            f"{where}: column '{label}' holds words; allowed: whole numbers, which data.class_encode_column('{label}') makes of them"
        )
    names = class_names or (tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None)
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
    return Part(from_arrow(images, labels, 0, names, where, paths=True, size=size), names, place, domains)
