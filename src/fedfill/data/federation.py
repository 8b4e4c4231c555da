"""Federations: data divided among clients, each with its own test split, and a test set that nobody trains on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedfill.data.columns import Columns
from fedfill.data.dataset import together
from fedfill.data.samples import Samples
from fedfill.data.schema import Schema
from fedfill.data.stratified import Indices, keep_labels, set_aside


@dataclass(frozen=True)
class ClientData:
    """What one client holds.

    Attributes:
        train: The labelled samples that it trains on, at least one.
        test: Its own test split; may be empty.
        unlabelled: Samples whose labels nobody knows; may be empty, and is where nothing is given.
        validation: Samples that it neither trains nor is tested on, to choose a round by; likewise.
    """

    train: Samples
    test: Samples
    unlabelled: Samples = None  # type: ignore[assignment]  # never None: what is empty has train's shape
    validation: Samples = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Fill in what was not given."""
        for part in ("unlabelled", "validation"):
            if getattr(self, part) is None:
                object.__setattr__(self, part, self.train[:0])

    def with_validation(
        self, share: float | None, stream: np.random.Generator, strata: Indices | None = None
    ) -> ClientData:
        """The same client, of whose training samples some are kept for validation.

        Args:
            share: How many, stratified (see `set_aside`); None: none.
            stream: Where the draws come from.
            strata: ``[n]``, of what the shares are kept; None: of classes.

        Returns:
            The client.
        """
        if not share:
            return self
        kept, held = set_aside(self.train.strata if strata is None else strata, share, stream)
        return replace(self, train=take(self.train, kept), validation=take(self.train, held))

    def with_labels(self, number: int | None, stream: np.random.Generator) -> ClientData:
        """The same client, of whose training samples no more than some keep their labels.

        Args:
            number: How many, stratified by class (see `keep_labels`); None: all.
            stream: Where the draws come from.

        Returns:
            The client; the others of its training samples are unlabelled, behind those that were.
        """
        if number is None or len(self.train) <= number:
            return self
        kept, others = keep_labels(self.train.labels.numpy(), number, stream)
        unlabelled = self.unlabelled + take(self.train, others).unlabelled()
        return replace(self, train=take(self.train, kept), unlabelled=unlabelled)


@dataclass(frozen=True)
class Federation:
    """All clients' data and the global test set. The tensors must never be written to.

    Attributes:
        name: The data set's name.
        clients: What each client holds.
        test: The global test set; nothing may be chosen by it.
        class_names: The classes' names in the order of their indices; of numbers the name of what they are.
        notes: Sentences for people: where the test set comes from, how the data were divided.
        fingerprint: SHA-256 over every sample and who holds it.
        domains: The name of each client's domain, where the data were divided by these, or of each client, where the partition names
            them; else empty.
        columns: How rows of a table became inputs; None where the data are no table.
    """

    name: str
    clients: tuple[ClientData, ...]
    test: Samples
    class_names: tuple[str, ...]
    notes: tuple[str, ...]
    fingerprint: str
    domains: tuple[str, ...] = ()
    columns: Columns | None = None

    @property
    def of_numbers(self) -> bool:
        """Whether numbers are learnt, and no classes."""
        return self.test.of_numbers

    @property
    def times(self) -> int:
        """Where labels are cells of a time to an event, the number of the grid's times; else 0."""
        return 0 if self.schema is None else len(self.schema.target.grid)

    @property
    def schema(self) -> Schema | None:
        """What was agreed on about the table before any data were read; None where nothing was."""
        return None if self.columns is None else self.columns.schema

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample's inputs."""
        return tuple(self.test.inputs.shape[1:])

    @property
    def sample(self) -> Samples:
        """One sample of nothing, with the type and shape of all others."""
        inputs = self.test.inputs
        return Samples(torch.zeros(1, *inputs.shape[1:], dtype=inputs.dtype), torch.zeros(1, dtype=torch.int64))

    def pooled(self) -> Federation:
        """The same data in one place: client 0 holds all samples but own splits for test and validation, which all keep."""
        train, unlabelled = (together([getattr(c, part) for c in self.clients]) for part in ("train", "unlabelled"))
        first, *others = self.clients
        nothing = train[:0]
        kept = (replace(client, train=nothing, unlabelled=nothing) for client in others)
        clients = (replace(first, train=train, unlabelled=unlabelled), *kept)
        note = "The training samples of all clients are pooled."
        return replace(self, clients=clients, notes=(*self.notes, note))

    @property
    def told(self) -> tuple[str, ...]:
        """Sentences on what is known of the records before anything is sent, for an account of privacy."""
        return () if self.columns is None else self.columns.told

    @property
    def counts(self) -> list[list[int]]:
        """For each client, how many labelled training samples of each class it holds."""
        return [client.train.counts(self.classes) for client in self.clients]

    @property
    def client_names(self) -> list[str]:
        """For people: each client's number, and the name of its domain where it has one."""
        return [" ".join([str(i), *self.domains[i : i + 1]]) for i in range(len(self.clients))]

    @property
    def called(self) -> list[str]:
        """What each client is called where no number stands beside it: ``north``; ``3 north`` of several there; else ``client 3``."""
        if not self.domains:
            return [f"client {i}" for i in range(len(self.clients))]
        return list(self.domains) if len(set(self.domains)) == len(self.domains) else self.client_names


def class_table(federation: Federation) -> tuple[list[str], list[list[Any]]]:
    """Who holds what, as a table to print.

    Args:
        federation: The federation.

    Returns:
        The header (client, samples, every class, unlabelled and validation where there are any, own test) and one row per
        client: what it is called, and numbers; samples and classes count labelled training samples.
    """
    some = [part for part in ("unlabelled", "validation") if any(len(getattr(c, part)) for c in federation.clients)]
    header = ["client", "samples", *federation.class_names, *some, "own test"]
    rows = [
        [name, len(client.train), *counts, *(len(getattr(client, part)) for part in some), len(client.test)]
        for name, client, counts in zip(federation.client_names, federation.clients, federation.counts, strict=True)
    ]
    return header, rows


def take(samples: Samples, index: Indices) -> Samples:
    """The samples at these positions."""
    # numpy's gather: torch's wakes its thread pool, which for a client's few samples can cost a thousand times the copy
    return Samples(torch.from_numpy(samples.inputs.numpy()[index]), torch.from_numpy(samples.labels.numpy()[index]))


def fingerprint(federation: Federation) -> str:
    """SHA-256 over the names of classes and domains, and over every sample and who holds it."""
    digest = hashlib.sha256("\n".join(federation.class_names).encode())
    update: Callable[[Any], None] = digest.update
    update("".join(f"\n{name}" for name in federation.domains).encode())
    everything = [federation.test]
    for client in federation.clients:
        everything += [client.train, client.test]
        everything += [
            part for part in (client.unlabelled, client.validation) if len(part)
        ]  # what is empty is left out
    for samples in everything:
        for tensor in (samples.inputs, samples.labels):
            update(f"\n{tensor.dtype} {tuple(tensor.shape)}\n".encode())  # shapes keep neighbours apart
            update(tensor.contiguous().numpy().reshape(-1).view(np.uint8))
    return digest.hexdigest()
