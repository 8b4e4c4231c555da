"""Stratified choices: parts of the samples in which every class has its share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def hold_out(labels: NDArray[Any], share: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """A stratified split: this share of each class is held out, rounded to the nearest, and one sample always stays.

    Args:
        labels: ``[n]`` integers.
        share: The share to hold out, 0..1. From one state of `rng`, a larger share keeps part of what a smaller keeps.
        rng: Where the draws come from.

    Returns:
        Sorted int64 positions: those that stay, and those held out.
    """
    held = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        # half up, with a little slack for shares such as 1 - 0.9 that floats can't hold
        held.append(members[: min(math.floor(share * len(members) + 0.5 + 1e-9), len(members) - 1)])
    out = np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)
    return np.setdiff1d(np.arange(len(labels)), out, assume_unique=True), out


def set_aside(labels: NDArray[Any], share: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """A stratified split for small numbers: this share of all samples is set aside, though a class's share may be under one.

    Seats are given by largest remainders: each class has its share rounded down, and what is missing from the total goes to
    the classes that lost most by it, chance deciding between equals. One sample of each class always stays.

    Args:
        labels: ``[n]`` integers.
        share: The share to set aside, 0..0.5.
        rng: Where the draws come from.

    Returns:
        Sorted int64 positions: those that stay, and those set aside.
    """
    order = rng.permutation(len(labels))
    present, owner, sizes = np.unique(labels[order], return_inverse=True, return_counts=True)
    lost, seats = np.modf(share * sizes + 1e-9)
    total = math.floor(share * len(labels) + 0.5 + 1e-9)
    room = np.flatnonzero(seats < sizes - 1)
    first = room[np.lexsort((rng.permutation(len(room)), -lost[room]))]
    seats[first[: max(0, total - int(seats.sum()))]] += 1
    aside = [order[owner == row][: int(seats[row])] for row in range(len(present))]
    out = np.sort(np.concatenate(aside)) if aside else np.empty(0, np.int64)
    return np.setdiff1d(np.arange(len(labels)), out, assume_unique=True), out


def keep_labels(labels: NDArray[Any], number: int, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """A stratified choice of the samples that keep their labels: one of each class first, then by the classes' sizes.

    The seats beyond the first of each class go to the highest averages (Sainte-Lague); chance decides between equals. Where
    `number` is smaller than the number of classes, the largest have one sample each.

    Args:
        labels: ``[n]`` integers.
        number: How many keep theirs, at least 1; all, where there are no more. From one state of `rng`, a larger number keeps
            what a smaller keeps.
        rng: Where the draws come from.

    Returns:
        Sorted int64 positions: those that keep their labels, and the others.
    """
    order = rng.permutation(len(labels))
    _, owner, sizes = np.unique(labels[order], return_inverse=True, return_counts=True)
    # a sample's place in its shuffled class, 0, 1, ..., says which of the class's seats it would take
    place = np.empty(len(labels), np.int64)
    place[np.argsort(owner, kind="stable")] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ranked = np.lexsort((-sizes[owner] / (2 * place + 1), place > 0))  # by the last key first; equals stay shuffled
    return np.sort(order[ranked[:number]]), np.sort(order[ranked[number:]])
