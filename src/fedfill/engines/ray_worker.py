"""Ray's worker processes, and what crosses between them and the driver."""

from __future__ import annotations

import itertools
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedfill import tree
from fedfill.data.samples import Samples
from fedfill.data.schema import Schema
from fedfill.engines.runner import ClientRunner, make_resident
from fedfill.errors import ContractError, FedfillError
from fedfill.own_parts import Source, execute
from fedfill.protocol.messages import Average, Averaging, Lost, Outcome, RemoteError, reason
from fedfill.training.evaluation import CHUNK, Scored, score, score_all
from fedfill.training.precision import Precision, require_fast
from fedfill.tree import Record, Tree

Bytes = npt.NDArray[np.uint8]
"""A tree's bytes; as an array they lie in the object store and aren't copied on the way."""
Array = npt.NDArray[Any]
Outcomes = tuple[Array, Array]
"""A `Scored`, as it crosses."""


def pack(thing: Tree) -> Bytes:
    """A tree as bytes."""
    return np.frombuffer(tree.to_bytes(thing), np.uint8)


def unpack(data: Bytes, device: torch.device) -> Tree:
    """The tree that was packed, on a device."""
    return tree.to(tree.from_bytes(data.tobytes()), device)


def in_place(inputs: Array, labels: Array) -> Samples:
    """Samples on arrays of the object store.

    Torch warns of arrays that are marked read-only, as its tensors can't carry the mark. A handler that writes into its
    data all the same ends the run, on every engine.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return Samples(torch.from_numpy(inputs), torch.from_numpy(labels))


# What crosses


@dataclass(frozen=True)
class Setup:
    """What a worker knows from the start; program and model cross in Ray's own form, with the classes of a script.

    With `joined` it may run on another machine than the driver, and looks itself whether its processor suits the precision.
    """

    program: Any
    template: nn.Module
    kinds: dict[str, type[Record]]
    initial: Bytes
    classes: int
    schema: Schema | None
    clients: int
    seed: int
    device: str
    timeout: float | None
    precision: Precision
    joined: bool


@dataclass(frozen=True)
class Stack:
    """The samples of some clients, one after the other."""

    sizes: tuple[int, ...]
    inputs: Array
    labels: Array


@dataclass(frozen=True)
class Group:
    """What a group's clients hold."""

    clients: tuple[int, ...]
    train: Stack
    unlabelled: Stack


@dataclass(frozen=True)
class Task:
    """A call to clients of one group, whose committed states come along where the worker doesn't hold them."""

    group: int
    handler: str
    t: int
    average: Average | None
    keys: dict[int, int]
    states: dict[int, Bytes] | None


@dataclass(frozen=True)
class Judging:
    """An evaluation of the own models of one group's clients, with their states as in `Task`.

    Attributes:
        group: Which one.
        key: Of the global weights.
        splits: Where each client's own test split, and its validation split, are among all of them.
        states: Or None, where the worker holds them.
        times: Where labels are cells of a time to an event, the number of the grid's times; else 0.
    """

    group: int
    key: int
    splits: dict[int, tuple[slice, slice]]
    states: dict[int, Bytes] | None
    times: int


@dataclass(frozen=True)
class SentError:
    """An exception: the name of one of our own, or none, and the place where a user's was raised.

    A user's exception may not survive the way; its words do.
    """

    kind: str
    text: str
    trace: str = ""


@dataclass(frozen=True)
class SentOutcome:
    """An `Outcome`, with reply and releases in one."""

    reply: Bytes | None
    error: SentError | None
    size: int
    fit_seconds: float
    train_samples: int


@dataclass(frozen=True)
class Served:
    """What came of a task: outcomes without what was averaged, the means, states to commit, and what ends the run."""

    outcomes: dict[int, SentOutcome]
    means: Bytes | None
    states: dict[int, Bytes]
    error: SentError | None = None


_OURS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (Lost, FedfillError, ContractError)}


def send_error(error: BaseException) -> SentError:
    """An error as it crosses: ours by name, another's as text with its traceback."""
    for name, kind in _OURS.items():
        if isinstance(error, kind):
            return SentError(name, str(error))
    return SentError("", reason(error), "".join(traceback.format_exception(error)))


def receive_error(sent: SentError) -> Exception:
    """The error that was sent."""
    if sent.kind:
        return _OURS[sent.kind](sent.text)
    error = RemoteError(sent.text)
    error.add_note(sent.trace)
    return error


def send_outcome(outcome: Outcome) -> SentOutcome:
    """An outcome as it crosses."""
    error = None if outcome.error is None else send_error(outcome.error)
    reply = None if outcome.reply is None else pack((outcome.reply, outcome.releases))
    return SentOutcome(reply, error, outcome.size, outcome.fit_seconds, outcome.train_samples)


def receive_outcome(sent: SentOutcome, device: torch.device) -> Outcome:
    """The outcome that was sent, on a device."""
    error = None if sent.error is None else receive_error(sent.error)
    reply, releases = (None, ()) if sent.reply is None else unpack(sent.reply, device)
    return Outcome(reply, error, releases, sent.size, sent.fit_seconds, sent.train_samples)


# In a worker


class Actor:
    """A worker process: one runner, one model, and the data and states of some groups.

    Args:
        path: Where the driver finds modules.
    """

    def __init__(self, path: Sequence[str]) -> None:
        sys.path.extend(folder for folder in path if folder not in sys.path)
        torch.set_num_threads(1)  # as on the local engine: the same bits for any number of workers

    def execute(self, sources: Sequence[Source]) -> None:
        """Execute the files of a user's own parts, whose classes `setup` then finds as the driver does."""
        for source in sources:
            execute(source, "engine")

    def setup(self, setup: Setup) -> None:
        """Make runner and model."""
        for name, kind in setup.kinds.items():
            kind.__qualname__ = name.removeprefix(f"{kind.__module__}.")
            Record._kinds[name] = kind
        self._device = torch.device(setup.device)
        self._clients = setup.clients
        if setup.joined and setup.precision != "float32":
            require_fast(self._device)
        self._resident = make_resident(setup.template, self._device, setup.precision)
        self._program = setup.program
        initial = unpack(setup.initial, self._device)
        self._runner = ClientRunner(
            setup.program, classes=setup.classes, initial=initial, seed=setup.seed, device=self._device, timeout=setup.timeout,
            schema=setup.schema,
        )  # fmt: skip
        self._data: dict[int, dict[int, tuple[Samples, Samples]]] = {}
        self._states: dict[int, dict[int, Tree]] = {}
        self._received: dict[int, Tree] = {}

    def serve(self, task: Task, data: Group | None, *packed: Bytes) -> Served:
        """Run a handler on clients of one group, whose data come along where the worker doesn't hold them."""
        outcomes: dict[int, SentOutcome] = {}
        states: dict[int, Bytes] = {}
        averaging = Averaging(task.average, self._clients)
        try:
            if data is not None:
                self._adopt(task.group, data, task.states or {})
            messages = self._receive(dict.fromkeys(task.keys.values()), packed)
            mine, kept = self._data[task.group], self._states[task.group]
            for i, key in task.keys.items():
                outcome, state = self._runner.serve(
                    self._resident, task.handler, i, *mine[i], kept.get(i), messages[key], task.t
                )
                try:
                    committed = {i: pack(state)} if state else {}
                    outcomes[i] = send_outcome(averaging.add(i, outcome))
                except TypeError as error:  # what can be measured and not be sent: a dict whose keys are pairs, say
                    outcomes[i] = send_outcome(Outcome(error=ContractError(f"'{task.handler}' {error}")))
                    continue
                if state:
                    kept[i] = state
                    states |= committed
            self._runner.check(task.handler)
            means = averaging.groups.get(task.group)
            return Served(outcomes, pack(means) if means else None, states)
        except Exception as error:
            return Served(outcomes, None, states, send_error(error))

    def forget(self, group: int) -> None:
        """Let go of a group that is another worker's now."""
        self._data.pop(group, None)
        self._states.pop(group, None)

    def score(self, key: int, weights: Bytes, inputs: Array, labels: Array, start: int, times: int) -> Outcomes:
        """What each sample of a chunk was taken for, and its loss."""
        self._resident.load(self._receive([key], [weights])[key])
        chunk = slice(start, start + CHUNK)
        return send_scored(score(self._resident, in_place(inputs[chunk], labels[chunk]).to(self._device), times))

    def score_personal(
        self, task: Judging, data: Group | None, packed: Bytes,
        inputs: Array, labels: Array, own_inputs: Array, own_labels: Array, held_inputs: Array, held_labels: Array,
    ) -> dict[int, tuple[Outcomes, Outcomes, Outcomes]]:  # fmt: skip
        """The same of each client's own model, on the test set and on its own splits; states and models stay here."""
        if data is not None:
            self._adopt(task.group, data, task.states or {})
        weights = self._receive([task.key], [packed])[task.key]
        test = in_place(inputs, labels).to(self._device)
        scored = {}
        for i, (mine, held) in task.splits.items():
            state = self._states[task.group].get(i) or {}
            self._resident.load(self._program.personal_weights(state, weights))
            own = in_place(own_inputs[mine], own_labels[mine]).to(self._device)
            kept = in_place(held_inputs[held], held_labels[held]).to(self._device)
            first, second, third = (
                send_scored(score_all(self._resident, part, task.times)) for part in (test, own, kept)
            )
            scored[i] = first, second, third
        return scored

    def _adopt(self, group: int, data: Group, states: Mapping[int, Bytes]) -> None:
        train, unlabelled = (self._divide(stack) for stack in (data.train, data.unlabelled))
        self._data[group] = dict(zip(data.clients, zip(train, unlabelled, strict=True), strict=True))
        self._states[group] = {i: unpack(state, self._device) for i, state in states.items()}

    def _divide(self, stack: Stack) -> list[Samples]:
        samples = in_place(stack.inputs, stack.labels).to(self._device)
        ends = itertools.accumulate(stack.sizes)
        return [samples[end - size : end] for size, end in zip(stack.sizes, ends, strict=True)]

    def _receive(self, keys: Iterable[int], packed: Iterable[Bytes]) -> dict[int, Tree]:
        """Decode what the task before did not bring already; the messages of one task are kept."""
        known = self._received
        self._received = {
            key: known[key] if key in known else unpack(data, self._device)
            for key, data in zip(keys, packed, strict=True)
        }
        return self._received


def send_scored(scored: Scored) -> Outcomes:
    """What was scored, as it crosses."""
    return scored.predicted.cpu().numpy(), scored.losses.cpu().numpy()


def receive_scored(outcomes: Outcomes) -> Scored:
    """What was scored, in the driver."""
    return Scored(*map(torch.tensor, outcomes))
