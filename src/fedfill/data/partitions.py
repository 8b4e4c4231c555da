"""Partitions by name: a spec such as ``dirichlet:0.5``, or a partitioner object, divides the samples among the clients.

Each partition is a pure function from labels, a number of clients and a seed to one sorted index array per client.
The same arguments always give the same arrays, and no sample belongs to two clients. Only `domain` looks at something
else than labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fedfill.data.names import parse
from fedfill.data.skew import checked, classes, dirichlet, domain, iid, multimodal, quantity, unimodal
from fedfill.data.stratified import Indices
from fedfill.errors import FedfillError
from fedfill.own_parts import told
from fedfill.streams import numpy_stream


class Partitioner(Protocol):
    """The part of a `flwr_datasets` partitioner that is used here; a settable `dataset` belongs to it too."""

    @property
    def num_partitions(self) -> int:
        """How many partitions it makes."""

    def load_partition(self, partition_id: int) -> Any:
        """The rows of one partition, as a `datasets.Dataset`."""


Partition = str | Partitioner | Callable[..., Any] | Sequence[Any] | Mapping[str, Any]
"""A spec, a partitioner, a function of one's own, or a list of indices for each client, perhaps by their names."""


def is_partitioner(value: Any) -> TypeGuard[Partitioner]:
    """Whether it is a `Partitioner`, by its class: most of them can't say how many partitions they make before they have data."""
    given = getattr(value, "__dict__", {})
    return all(hasattr(type(value), name) or name in given for name in ("num_partitions", "load_partition"))


def partition(
    spec: str, labels: NDArray[Any], clients: int | None, seed: int, domains: NDArray[Any] | None = None
) -> list[Indices]:
    """The partition that a spec names; see `names.PARTITIONS`.

    Args:
        spec: Such as ``iid``, ``dirichlet:BETA`` or ``classes:C``.
        labels: ``[n]`` integers.
        clients: How many clients; None is enough for ``domain``, which makes as many as the domains need.
        seed: The experiment's seed.
        domains: ``[n]`` integers, the samples' domains; None where they have none.

    Returns:
        One sorted int64 index array per client.

    Raises:
        FedfillError: Where the spec is malformed or can't be met with these samples and clients.
    """
    name, numbers = parse(spec)
    if name == "domain":
        if domains is None:
            raise FedfillError(
                f"partition: '{spec}' needs data whose samples have domains, such as digits-domains, and these have none; "
                "tables and Parquet files name them in a column 'domain', folders of images are domain/class"
            )
        parts = domain(domains, seed, *map(int, numbers))
        if clients not in (None, len(parts)):
            raise FedfillError(
                f"clients: found {clients:,}, but partition '{spec}' makes {len(parts):,} of these domains; allowed: that many, "
                "and with partition=domain:K K times the domains"
            )
        return parts
    if clients is None:
        raise FedfillError(f"clients: a number is needed to divide the data by '{spec}'")
    if name == "multimodal" and numbers[1:]:
        return multimodal(labels, clients, seed, int(numbers[0]), numbers[1:])
    makers: dict[str, Callable[..., list[Indices]]] = {
        "iid": iid, "dirichlet": dirichlet, "classes": classes, "unimodal": unimodal, "multimodal": multimodal,
        "quantity": quantity,
    }  # fmt: skip
    return makers[name](labels, clients, seed, *numbers)


def from_partitioner(partitioner: Partitioner, labels: NDArray[Any]) -> list[Indices]:
    """The index arrays that a `flwr_datasets` partitioner makes of these labels.

    The partitioner sees a data set with two columns: the labels, under the name that it partitions by (``label`` where
    it has none), and positions. It draws from its own seed, not the experiment's, and may leave samples out.
    The object itself isn't changed, so that it can be used again.

    Args:
        partitioner: An object with a settable `dataset`, `load_partition` and `num_partitions`.
        labels: ``[n]`` integers.

    Returns:
        One sorted int64 index array per client.

    Raises:
        FedfillError: Where the partitioner refuses, gives a sample to two clients or gives a client nothing.
    """
    import datasets

    kind = type(partitioner).__name__
    labels = checked(labels, 1)
    column = getattr(partitioner, "_partition_by", None) or "label"
    position = "fedfill_position"
    rows = datasets.Dataset.from_dict({column: labels, position: np.arange(len(labels))})
    partitioner = copy.deepcopy(partitioner)
    try:
        partitioner.dataset = rows  # type: ignore[attr-defined]
        parts = [
            np.sort(np.asarray(partitioner.load_partition(client).with_format("numpy")[position][:], np.int64))
            for client in range(partitioner.num_partitions)
        ]
    except Exception as error:  # any user's object may stand here, and its complaint is what helps
        raise FedfillError(f"partition: the {kind} can't divide these {len(labels):,} samples: {error}") from error
    return from_indices(parts, len(labels), f"the {kind}")


def is_function(value: Any) -> TypeGuard[Callable[..., Any]]:
    """Whether it divides as a function does: called with labels, a number of clients and a generator."""
    return callable(value) and not is_partitioner(value)


def from_function(function: Callable[..., Any], labels: NDArray[Any], clients: int, seed: int) -> list[Indices]:
    """The index arrays that a function of one's own makes of these labels.

    Args:
        function: Called as ``function(labels, clients, generator)``, with ``[n]`` int64 labels that it may change, a number, and a
            `numpy.random.Generator` from the experiment's seed. It returns as many lists or arrays of positions.
        labels: ``[n]`` integers.
        clients: How many clients.
        seed: The experiment's seed.

    Returns:
        One sorted int64 index array per client.

    Raises:
        FedfillError: Where the function fails or what it returns is no partition.
    """
    name = getattr(function, "__name__", type(function).__name__)
    labels = checked(labels, clients)
    try:
        parts = function(labels.copy(), clients, numpy_stream(seed, "partition of one's own"))
        parts = list(parts)
    except Exception as error:  # whatever a user's code may raise
        code = getattr(function, "__code__", None)
        where = told(error, code.co_filename) if code else f"{type(error).__name__}: {error}"
        raise FedfillError(f"partition: {name} can't divide these {len(labels):,} samples: {where}") from error
    if len(parts) != clients:
        raise FedfillError(
            f"partition: {name} made {len(parts):,} lists of indices; allowed: one for each of {clients:,} clients"
        )
    return from_indices(parts, len(labels), name)


def from_indices(parts: Sequence[Any], samples: int, who: str) -> list[Indices]:
    """Lists of indices as a partition: inside the range, none twice, none of them empty; samples may be left out.

    Args:
        parts: Whole numbers from 0, one list or array per client.
        samples: How many there are to divide.
        who: What made the lists, for an error's sentence.

    Returns:
        One sorted int64 index array per client.

    Raises:
        FedfillError: Where they are no partition.
    """
    found = []
    for client, part in enumerate(parts):
        array = np.asarray(part)
        if array.ndim != 1 or (len(array) and not np.issubdtype(array.dtype, np.integer)):
            raise FedfillError(
                f"partition: {who} gave client {client} {array.dtype} of shape {list(array.shape)}; allowed: a list of whole numbers"
            )
        if not len(array):
            raise FedfillError(f"partition: {who} gave client {client} no samples; allowed: at least one")
        if array.min() < 0 or array.max() >= samples:
            wrong = array.min() if array.min() < 0 else array.max()
            raise FedfillError(
                f"partition: {who} gave client {client} the index {wrong}; allowed: 0 to {samples - 1:,}, the training samples"
            )
        found.append(np.sort(array.astype(np.int64)))
    if not found:
        raise FedfillError(f"partition: {who} made no clients; allowed: at least one")
    held = np.sort(np.concatenate(found))
    if len(twice := held[1:][held[1:] == held[:-1]]):
        owners = [client for client, part in enumerate(found) if twice[0] in part]
        raise FedfillError(
            f"partition: {who} gave the sample {twice[0]} twice, to client {owners[0]} and to client {owners[-1]}; allowed: once"
        )
    return found
