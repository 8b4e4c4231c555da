"""Aggregation: from the clients' tensors to the server's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

from fedfill.tree import Record, Weights

GROUPS = 64
"""Into how many groups clients are divided at the most, whatever runs them."""


def group_of(client: int, clients: int) -> int:
    """The group of a client: consecutive numbers share one, and up to `GROUPS` clients have one each.

    Means are taken within a group first and then over the groups, both in ascending order. So a worker that serves whole
    groups can send one mean in the place of many models, and no bit depends on how many workers there are.

    Args:
        client: 0..clients-1.
        clients: How many there are in the federation.

    Returns:
        0..min(clients, GROUPS)-1.
    """
    return client * min(clients, GROUPS) // clients


@dataclass
class Mean(Record):
    """A weighted mean that can be extended.

    Floating-point tensors, running statistics of normalisation layers among them, are averaged. Integer tensors, such as
    batch counters, can't be: they are copied from the update with the largest weight, the first of them on a tie.

    Attributes:
        tensors: By name; never written to where they may belong to someone else (see `owned`).
        weight: Of all updates together.
        largest: Weight of the heaviest of them.
        owned: Whether `tensors` may be written to.
    """

    tensors: Weights
    weight: float
    largest: float
    owned: bool = False

    def add(self, other: Mean) -> None:
        """Extend the mean by another's updates, in place.

        The running form m + (x - m) v / (w + v) leaves one update, and equal ones, exactly as they were.

        Args:
            other: The mean of other updates.

        Raises:
            ValueError: Where names or shapes differ.
        """
        if other.tensors.keys() != self.tensors.keys():
            raise ValueError("a mean needs updates with the same names")
        for name, tensor in self.tensors.items():
            if tensor.shape != other.tensors[name].shape:
                raise ValueError(f"a mean needs updates with the same shapes, and those of '{name}' differ")
        if not other.weight:
            return
        if not self.owned:
            self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
            self.owned = True
        share = other.weight / (self.weight + other.weight)
        floats = {name: tensor for name, tensor in self.tensors.items() if tensor.is_floating_point()}
        theirs = [other.tensors[name].to(tensor.dtype) for name, tensor in floats.items()]
        if floats:
            torch._foreach_lerp_(list(floats.values()), theirs, share)
        if other.largest > self.largest:
            for name in self.tensors.keys() - floats.keys():
                self.tensors[name].copy_(other.tensors[name])
        self.weight += other.weight
        self.largest = max(self.largest, other.largest)

    def begun(self) -> Mean:
        """The same mean, to be extended; what it was made of stays as it is."""
        return Mean(self.tensors, self.weight, self.largest, self.owned)


@dataclass
class Sum(Record):
    """A sum that can be extended: integers in int64, so that no order changes a bit, and all else in float64.

    Attributes:
        tensors: By name; written to once `begun` has made them its own.
    """

    tensors: Weights

    def begun(self) -> Sum:
        """The same sum, to be extended, in wide numbers of its own."""
        wide = {False: torch.int64, True: torch.float64}
        return Sum({name: t.to(wide[t.is_floating_point()], copy=True) for name, t in self.tensors.items()})

    def add(self, other: Sum) -> None:
        """Extend the sum by another, in place.

        Args:
            other: With the same names, shapes and kinds of numbers.
        """
        for name, tensor in self.tensors.items():
            tensor += other.tensors[name]


Part = Mean | Sum
"""What comes of some replies' tensors, to be joined with what comes of others'."""
P = TypeVar("P", bound=Part)


def combined(parts: Iterable[P]) -> P | None:
    """The mean of all updates behind some means, or the sum of sums, taken in the order given; None where there are none."""
    total: P | None = None
    for part in parts:
        if total is None:
            total = part.begun()  # type: ignore[assignment]
        else:
            total.add(part)  # type: ignore[arg-type]
    return total
