"""Partitions by name: a spec such as ``dirichlet:0.5``, or a partitioner object, divides the samples among the clients.

Each partition is a pure function from labels, a number of clients and a seed to one sorted index array per client.
The same arguments always give the same arrays, and no sample belongs to two clients. Only `domain` looks at something
else than labels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fedfill.data.skew import checked, classes, dirichlet, domain, iid, multimodal, quantity, unimodal
from fedfill.data.stratified import Indices
from fedfill.errors import FedfillError, did_you_mean

NAMES = {
    "iid": "clients of equal size, labels at random",
    "dirichlet:BETA": "label skew: each class is divided by a draw from Dirichlet(BETA); a smaller BETA is more skewed",
    "classes:C": "label skew: every client holds at most C classes, in C pieces of one class each",
    "unimodal:C": "label skew: shards of one class and of nearly one size, C of them for each client (McMahan et al.)",
    "multimodal:C:SHARES": "label skew: groups of clients, of these SHARES (0.8,0.2), with groups of classes and unimodal:C in each",
    "quantity:BETA": "size skew: clients' sizes are a draw from Dirichlet(BETA), labels at random",
    "domain:K": "feature skew: K clients (1) for each domain of data that have domains, which share it at random",
}
"""The partitions that a spec can name, with one line for people."""


class Partitioner(Protocol):
    """The part of a `flwr_datasets` partitioner that is used here; a settable `dataset` belongs to it too."""

    @property
    def num_partitions(self) -> int:
        """How many partitions it makes."""

    def load_partition(self, partition_id: int) -> Any:
        """The rows of one partition, as a `datasets.Dataset`."""


def is_partitioner(value: Any) -> TypeGuard[Partitioner]:
    """Whether it is a `Partitioner`, by its class: most of them can't say how many partitions they make before they have data."""
    given = getattr(value, "__dict__", {})
    return all(hasattr(type(value), name) or name in given for name in ("num_partitions", "load_partition"))


def parse(spec: str) -> tuple[str, list[float]]:
    """A spec's name and numbers, checked as far as that goes without data.

    Args:
        spec: For example ``"iid"``, ``"dirichlet:0.5"`` or ``"multimodal:2:0.8,0.2"``.

    Returns:
        The name, and its numbers: none for ``iid``, perhaps none for ``domain``; for ``multimodal`` the classes per client
        and then the shares.

    Raises:
        FedfillError: Where the name is unknown, or a number missing, malformed or out of range.
    """
    name, colon, text = spec.strip().partition(":")
    known = [usage.partition(":")[0] for usage in NAMES]
    if name not in known:
        raise FedfillError(f"partition: '{spec}' is unknown; {did_you_mean(name, known)}")
    if name == "iid" and colon:
        raise FedfillError(f"partition: 'iid' takes no number, but '{spec}' was given")
    if name == "iid" or (name == "domain" and not colon):
        return name, []
    whole = name not in ("dirichlet", "quantity")
    things = "clients for each domain" if name == "domain" else "classes"
    what = f"a whole number of {things}, 1 or more" if whole else "a number above 0"
    text, colon, rest = text.partition(":") if name == "multimodal" else (text, "", "")
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        found = f"'{spec}' has '{text}'" if text else f"'{spec}' has none"
        example = f"{name}:{2 if whole else 0.5}"
        raise FedfillError(f"partition: '{name}' needs {what}, such as '{example}', but {found}") from None
    if not (0 < number < math.inf):
        raise FedfillError(f"partition: '{name}' needs {what}, but '{spec}' has {text}")
    try:
        shares = [float(share) for share in rest.split(",")] if colon else []
    except ValueError:
        raise FedfillError(
            f"partition: '{name}' takes shares of the clients, such as '{name}:2:0.8,0.2', but '{spec}' has '{rest}'"
        ) from None
    return name, [number, *shares]


def partition(
    spec: str, labels: NDArray[Any], clients: int | None, seed: int, domains: NDArray[Any] | None = None
) -> list[Indices]:
    """The partition that a spec names; see `NAMES`.

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
    for client, part in enumerate(parts):
        if not len(part):
            raise FedfillError(f"partition: the {kind} gave client {client} no samples")
    if not parts or len(np.unique(np.concatenate(parts))) < sum(map(len, parts)):
        raise FedfillError(
            f"partition: the {kind} must give each sample to one client at most, and make at least one client"
        )
    return parts
