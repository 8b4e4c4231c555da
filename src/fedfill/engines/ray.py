"""The Ray engine: resident worker processes, on this machine or a cluster, that hold the data and states of clients.

The server runs in the driver, the process that starts the run. Data lie in Ray's object store, one object for each
group of clients (`fedfill.training.aggregation.group_of`), where all workers of a machine read them in place. A job is
the part of one group that a call asks for; its worker sends back one mean in the place of many models. The driver keeps
the bytes of every state that was committed, so that any worker can take over any group at any time: when it has nothing
left to do, or when another died.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.exceptions import RayError, RayTaskError
from torch import nn

from fedfill import tree
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.engines.contract import Message
from fedfill.engines.exchange import Answers, Average, Averaging, Lost, Outcome, RemoteError, reason
from fedfill.engines.host import Host, make_resident
from fedfill.engines.local import processors
from fedfill.errors import ContractError, FedfillError
from fedfill.privacy.ledger import Release
from fedfill.training.aggregation import Mean, group_of, mean_of
from fedfill.training.evaluation import (
    CHUNK,
    Evaluation,
    Scored,
    Splits,
    gather,
    gather_personal,
    score,
    score_all,
    splits_of,
)
from fedfill.tree import Record, Tree, Weights

START = 60.0
"""Seconds in which the next of the workers that are being started has to be ready."""
GRACE = 10.0
"""Seconds beyond its clients' time after which a worker that doesn't answer is given up."""

Bytes = npt.NDArray[np.uint8]
"""A tree's bytes; as an array they lie in the object store and aren't copied on the way."""
Array = npt.NDArray[Any]
_Outcomes = tuple[Array, Array]
"""A `Scored`, as it crosses."""


def _pack(thing: Tree) -> Bytes:
    return np.frombuffer(tree.to_bytes(thing), np.uint8)


def _unpack(data: Bytes, device: torch.device) -> Tree:
    return tree.to(tree.from_bytes(data.tobytes()), device)


def _in_place(inputs: Array, labels: Array) -> Samples:
    """Samples on arrays of the object store.

    Torch warns of arrays that are marked read-only, as its tensors can't carry the mark. A handler that writes into its
    data all the same ends the run, on every engine.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return Samples(torch.from_numpy(inputs), torch.from_numpy(labels))


# What crosses


@dataclass(frozen=True)
class _Setup:
    """What a worker knows from the start; program and model cross in Ray's own form, with the classes of a script."""

    program: Any
    template: nn.Module
    kinds: dict[str, type[Record]]
    initial: Bytes
    classes: int
    clients: int
    seed: int
    device: str
    timeout: float | None


@dataclass(frozen=True)
class _Stack:
    """The samples of some clients, one after the other."""

    sizes: tuple[int, ...]
    inputs: Array
    labels: Array


@dataclass(frozen=True)
class _Group:
    """What a group's clients hold."""

    clients: tuple[int, ...]
    train: _Stack
    unlabelled: _Stack


@dataclass(frozen=True)
class _Task:
    """A call to clients of one group, whose committed states come along where the worker doesn't hold them."""

    group: int
    handler: str
    t: int
    average: Average | None
    keys: dict[int, int]
    states: dict[int, Bytes] | None


@dataclass(frozen=True)
class _Judging:
    """An evaluation of the own models of one group's clients, with their states as in `_Task`.

    Attributes:
        group: Which one.
        key: Of the global weights.
        splits: Where each client's own test split, and its validation split, are among all of them.
        states: Or None, where the worker holds them.
    """

    group: int
    key: int
    splits: dict[int, tuple[slice, slice]]
    states: dict[int, Bytes] | None


@dataclass(frozen=True)
class _Error:
    """An exception: the name of one of our own, or none, and the place where a user's was raised.

    A user's exception may not survive the way; its words do.
    """

    kind: str
    text: str
    trace: str = ""


@dataclass(frozen=True)
class _Sent:
    """An `Outcome`, with reply and releases in one."""

    reply: Bytes | None
    error: _Error | None
    size: int
    fit_seconds: float
    train_samples: int


@dataclass(frozen=True)
class _Served:
    """What came of a task: outcomes without what was averaged, the means, states to commit, and what ends the run."""

    outcomes: dict[int, _Sent]
    means: Bytes | None
    states: dict[int, Bytes]
    error: _Error | None = None


_OURS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (Lost, FedfillError, ContractError)}


def _send_error(error: BaseException) -> _Error:
    for name, kind in _OURS.items():
        if isinstance(error, kind):
            return _Error(name, str(error))
    return _Error("", reason(error), "".join(traceback.format_exception(error)))


def _receive_error(sent: _Error) -> Exception:
    if sent.kind:
        return _OURS[sent.kind](sent.text)
    error = RemoteError(sent.text)
    error.add_note(sent.trace)
    return error


def _send(outcome: Outcome) -> _Sent:
    error = None if outcome.error is None else _send_error(outcome.error)
    reply = None if outcome.reply is None else _pack((outcome.reply, outcome.releases))
    return _Sent(reply, error, outcome.size, outcome.fit_seconds, outcome.train_samples)


def _receive(sent: _Sent, device: torch.device) -> Outcome:
    error = None if sent.error is None else _receive_error(sent.error)
    reply, releases = (None, ()) if sent.reply is None else _unpack(sent.reply, device)
    return Outcome(reply, error, releases, sent.size, sent.fit_seconds, sent.train_samples)


# In a worker


class Actor:
    """A worker process: one host, one model, and the data and states of some groups.

    Args:
        path: Where the driver finds modules.
    """

    def __init__(self, path: Sequence[str]) -> None:
        sys.path.extend(folder for folder in path if folder not in sys.path)
        torch.set_num_threads(1)  # as on the local engine: the same bits for any number of workers

    def setup(self, setup: _Setup) -> None:
        """Make host and model."""
        for name, kind in setup.kinds.items():
            kind.__qualname__ = name.removeprefix(f"{kind.__module__}.")
            Record._kinds[name] = kind
        self._device = torch.device(setup.device)
        self._clients = setup.clients
        self._resident = make_resident(setup.template, self._device)
        self._program = setup.program
        initial = _unpack(setup.initial, self._device)
        self._host = Host(
            setup.program, classes=setup.classes, initial=initial, seed=setup.seed, device=self._device, timeout=setup.timeout
        )  # fmt: skip
        self._data: dict[int, dict[int, tuple[Samples, Samples]]] = {}
        self._states: dict[int, dict[int, Tree]] = {}
        self._received: dict[int, Tree] = {}

    def serve(self, task: _Task, data: _Group | None, *packed: Bytes) -> _Served:
        """Run a handler on clients of one group, whose data come along where the worker doesn't hold them."""
        outcomes: dict[int, _Sent] = {}
        states: dict[int, Bytes] = {}
        averaging = Averaging(task.average, self._clients)
        try:
            if data is not None:
                self._adopt(task.group, data, task.states or {})
            messages = self._receive(dict.fromkeys(task.keys.values()), packed)
            mine, kept = self._data[task.group], self._states[task.group]
            for i, key in task.keys.items():
                outcome, state = self._host.serve(
                    self._resident, task.handler, i, *mine[i], kept.get(i), messages[key], task.t
                )
                try:
                    committed = {i: _pack(state)} if state else {}
                    outcomes[i] = _send(averaging.add(i, outcome))
                except TypeError as error:  # what can be measured and not be sent: a dict whose keys are pairs, say
                    outcomes[i] = _send(Outcome(error=ContractError(f"'{task.handler}' {error}")))
                    continue
                if state:
                    kept[i] = state
                    states |= committed
            self._host.check(task.handler)
            means = averaging.groups.get(task.group)
            return _Served(outcomes, _pack(means) if means else None, states)
        except Exception as error:
            return _Served(outcomes, None, states, _send_error(error))

    def forget(self, group: int) -> None:
        """Let go of a group that is another worker's now."""
        self._data.pop(group, None)
        self._states.pop(group, None)

    def score(self, key: int, weights: Bytes, inputs: Array, labels: Array, start: int) -> _Outcomes:
        """Whether each sample of a chunk was recognised, and its loss."""
        self._resident.load(self._receive([key], [weights])[key])
        chunk = slice(start, start + CHUNK)
        return _plain(score(self._resident, _in_place(inputs[chunk], labels[chunk]).to(self._device)))

    def score_personal(
        self, task: _Judging, data: _Group | None, packed: Bytes,
        inputs: Array, labels: Array, own_inputs: Array, own_labels: Array, held_inputs: Array, held_labels: Array,
    ) -> dict[int, tuple[_Outcomes, _Outcomes, _Outcomes]]:  # fmt: skip
        """The same of each client's own model, on the test set and on its own splits; states and models stay here."""
        if data is not None:
            self._adopt(task.group, data, task.states or {})
        weights = self._receive([task.key], [packed])[task.key]
        test = _in_place(inputs, labels).to(self._device)
        scored = {}
        for i, (mine, held) in task.splits.items():
            state = self._states[task.group].get(i) or {}
            self._resident.load(self._program.personal_weights(state, weights))
            own = _in_place(own_inputs[mine], own_labels[mine]).to(self._device)
            kept = _in_place(held_inputs[held], held_labels[held]).to(self._device)
            first, second, third = (_plain(score_all(self._resident, part)) for part in (test, own, kept))
            scored[i] = first, second, third
        return scored

    def _adopt(self, group: int, data: _Group, states: Mapping[int, Bytes]) -> None:
        train, unlabelled = (self._divide(stack) for stack in (data.train, data.unlabelled))
        self._data[group] = dict(zip(data.clients, zip(train, unlabelled, strict=True), strict=True))
        self._states[group] = {i: _unpack(state, self._device) for i, state in states.items()}

    def _divide(self, stack: _Stack) -> list[Samples]:
        samples = _in_place(stack.inputs, stack.labels).to(self._device)
        ends = itertools.accumulate(stack.sizes)
        return [samples[end - size : end] for size, end in zip(stack.sizes, ends, strict=True)]

    def _receive(self, keys: Iterable[int], packed: Iterable[Bytes]) -> dict[int, Tree]:
        """Decode what the task before did not bring already; the messages of one task are kept."""
        known = self._received
        self._received = {
            key: known[key] if key in known else _unpack(data, self._device)
            for key, data in zip(keys, packed, strict=True)
        }
        return self._received


def _plain(scored: Scored) -> _Outcomes:
    return scored.correct.cpu().numpy(), scored.losses.cpu().numpy()


def _scored(outcomes: _Outcomes) -> Scored:
    return Scored(*map(torch.tensor, outcomes))


# In the driver


@dataclass(frozen=True)
class _Job:
    """Something for one worker to do; `again` if a worker died over it.

    It is a call to clients of a group, an evaluation of the models of a whole group, or a chunk to score.
    """

    group: int | None = None
    clients: tuple[int, ...] = ()
    chunk: int = 0
    again: bool = False


@dataclass(eq=False)
class _Worker:
    """What the driver knows of a worker.

    Attributes:
        actor: Ray's handle.
        answer: What it is to give next: that it is ready, or the result of its job.
        ready: Whether it is.
        job: What it does.
        since: When it began that, by `time.monotonic`.
        groups: Which are its own.
        holds: Of these, the ones whose data and last states it has.
    """

    actor: Any
    answer: Any
    ready: bool = False
    job: _Job | None = None
    since: float = field(default_factory=time.monotonic)
    groups: set[int] = field(default_factory=set)
    holds: set[int] = field(default_factory=set)


class _Outbox:
    """The messages of a call, each encoded once and in the object store from its first use to its last."""

    def __init__(self, messages: Mapping[int, Message], numbers: Iterable[int]) -> None:
        self._messages = messages
        self._numbers = iter(numbers)
        self._uses = Counter(map(id, messages.values()))
        self._stored: dict[int, tuple[int, Any]] = {}

    def store(self, clients: Iterable[int]) -> tuple[dict[int, int], list[Any]]:
        """The key of each client's message, and the messages in the order in which the keys are first met."""
        keys, stored = {}, {}
        for i in clients:
            message = self._messages[i]
            if id(message) not in self._stored:
                self._stored[id(message)] = next(self._numbers), ray.put(_pack(message))
            keys[i], stored[keys[i]] = self._stored[id(message)]
        return keys, list(stored.values())

    def done(self, client: int) -> None:
        """This client needs its message no more."""
        message = id(self._messages[client])
        self._uses[message] -= 1
        if not self._uses[message]:
            self._stored.pop(message, None)


class _Merge:
    """The mean over groups in ascending order, each taken in as soon as those before it are complete."""

    def __init__(self, groups: Mapping[int, Iterable[int]]) -> None:
        self.total: dict[str, Mean] = {}
        self._missing = {group: set(groups[group]) for group in sorted(groups)}
        self._parts: dict[int, dict[int, dict[str, Mean]]] = {group: {} for group in groups}

    def add(self, group: int, clients: Sequence[int], means: dict[str, Mean]) -> None:
        """Take in the means over a whole group, or those of one client of it."""
        self._missing[group].difference_update(clients)
        self._parts[group][clients[0]] = means
        for first in list(self._missing):
            if self._missing[first]:
                return
            del self._missing[first]
            whole: dict[str, Mean] = {}
            for _, part in sorted(self._parts.pop(first).items()):
                _extend(whole, part)
            _extend(self.total, whole)


def _extend(total: dict[str, Mean], means: Mapping[str, Mean]) -> None:
    for name, mean in means.items():
        total[name] = mean_of([total[name], mean]) if name in total else mean  # type: ignore[assignment]


class RayEngine:
    """Runs clients in resident worker processes of Ray, with the same bits as `LocalEngine`.

    A worker that dies is replaced, and what it had not answered is done again from the last committed states, one client
    at a time, so that a client over which a worker dies once more is known, reported and left out.

    Where this process is connected to Ray already, that connection is used and left as it is.

    Args:
        program: The algorithm: its handlers are looked up by name.
        federation: The clients' data and the test set.
        template: The model.
        initial: The experiment's initial weights.
        seed: Of the experiment.
        device: Where the server's tensors live; the workers' is the CPU, or with `gpus_per_worker` a GPU.
        workers: Processes over clients, each with its own model; None: one for each processor, of the machine or of the
            cluster. More than there are groups of clients, 64 at the most, are of no use and not started.
        timeout: Seconds that a client has for one call; None: as long as it takes.
        address: Of a running cluster, ``auto`` or ``HOST:PORT``; None: a Ray of its own on this machine.
        gpus_per_worker: The share of a GPU that each worker gets.

    Attributes:
        workers: How many there are.
        evaluation: None: a simulation's evaluation releases nothing.

    Raises:
        FedfillError: Where Ray can't be reached or doesn't have what is asked for.
    """

    def __init__(
        self,
        program: Any,
        federation: Federation,
        template: nn.Module,
        initial: Weights,
        *,
        seed: int,
        device: torch.device,
        workers: int | None = None,
        timeout: float | None = None,
        address: str | None = None,
        gpus_per_worker: float = 0.0,
    ) -> None:
        if device.type == "cuda" and not gpus_per_worker:
            raise FedfillError(
                "gpus_per_worker: found 0 with device=cuda; allowed: the share of a GPU for each worker, or device=cpu"
            )
        if gpus_per_worker > 1 and gpus_per_worker % 1:
            raise FedfillError(f"gpus_per_worker: found {gpus_per_worker}; allowed: a share up to 1, or a whole number")
        self.evaluation: Release | None = None
        self._program = program
        self._device = device
        self._timeout = timeout
        self._gpus_per_worker = gpus_per_worker
        self._classes = federation.classes
        self._clients = len(federation.clients)
        self._groups: dict[int, list[int]] = {}
        for i in range(self._clients):
            self._groups.setdefault(group_of(i, self._clients), []).append(i)
        self._states: dict[int, bytes] = {}
        self._setup: Any = None
        self._data: dict[int, Any] = {}
        self._tests: list[tuple[Any, Any]] = []
        self._splits: Splits | None = None
        self._numbers = itertools.count()
        self._workers: list[_Worker] = []
        self._undo = ExitStack()
        # the server's own sums shall have the bits that they have on the local engine
        self._undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        try:
            count = min(workers or (processors() if address is None else 1024), len(self._groups))
            _connect(address, count, self._undo)
            self.workers = self._affordable(count, workers)
            setup = _Setup(
                program=program,
                template=copy.deepcopy(template).cpu(),
                kinds=_unimportable(),
                initial=_pack(initial),
                classes=self._classes,
                clients=self._clients,
                seed=seed,
                device="cuda" if gpus_per_worker else "cpu",
                timeout=timeout,
            )
            self._setup = _put(setup)
            self._workers = [self._start() for _ in range(self.workers)]
            self._store(federation)
            self._deal()
            while not all(worker.ready for worker in self._workers):
                if self._next()[1]:
                    raise FedfillError(
                        f"workers: Ray could not start {self.workers}, for lack of time, memory or processors; use fewer"
                    )
        except BaseException:
            self.close()
            raise

    def call(self, handler: str, messages: Mapping[int, Message], t: int, average: Average | None = None) -> Answers:
        """Run a handler on every client that has a message.

        Args:
            handler: Name of a method of the algorithm.
            messages: By client.
            t: The round.
            average: Which fields of the replies to average.

        Returns:
            An outcome for every client, and the means.

        Raises:
            ContractError: Where a handler wrote into the initial weights.
            FedfillError: Where no worker is left.
            RemoteError: Where the algorithm failed in a worker outside of its handlers.
        """
        groups: dict[int, list[int]] = {}
        for i in sorted(messages):
            groups.setdefault(group_of(i, self._clients), []).append(i)
        outbox = _Outbox(messages, self._numbers)
        merge = _Merge(groups)
        outcomes: dict[int, Outcome] = {}
        broken: list[_Error] = []

        def submit(worker: _Worker, job: _Job) -> Any:
            group = job.group
            assert group is not None
            keys, stored = outbox.store(job.clients)
            data, states = self._missing(worker, group)
            return worker.actor.serve.remote(_Task(group, handler, t, average, keys, states), data, *stored)

        def finish(job: _Job, served: _Served) -> None:
            assert job.group is not None
            for i, sent in served.outcomes.items():
                outcomes[i] = _receive(sent, self._device)
                outbox.done(i)
            for i, state in served.states.items():
                self._states[i] = state.tobytes()
            merge.add(job.group, job.clients, {} if served.means is None else _unpack(served.means, self._device))
            if served.error is not None:
                broken.append(served.error)

        def give_up(job: _Job, late: bool) -> list[_Job]:
            assert job.group is not None
            if len(job.clients) > 1:  # over which of them it was shows when each is alone
                return [_Job(job.group, (i,), again=True) for i in job.clients]
            if not late and not job.again:
                return [replace(job, again=True)]
            why = f"took longer than reply_timeout={self._timeout} s" if late else "its worker died twice"
            outcomes[job.clients[0]] = Outcome(error=Lost(why))
            outbox.done(job.clients[0])
            merge.add(job.group, job.clients, {})
            return []

        self._run([_Job(group, tuple(members)) for group, members in sorted(groups.items())], submit, finish, give_up)
        if broken:
            raise _receive_error(broken[0])
        return Answers(outcomes, merge.total)

    def evaluate(self, weights: Weights, t: int) -> Evaluation:
        """Score weights on the test set and on the clients' own test splits.

        Args:
            weights: Of the whole model.
            t: The round that is over.

        Returns:
            As from `LocalEngine.evaluate`.

        Raises:
            FedfillError: Where workers die over it.
        """
        if getattr(self._program, "personal", False):
            return self._evaluate_personal(weights)
        assert self._splits is not None
        sizes = [len(part) for part in self._splits.all]
        chunks = [(split, start) for split, size in enumerate(sizes) for start in range(0, size, CHUNK)]
        key, packed = next(self._numbers), ray.put(_pack(weights))
        scored: dict[int, Scored] = {}

        def submit(worker: _Worker, job: _Job) -> Any:
            split, start = chunks[job.chunk]
            return worker.actor.score.remote(key, packed, *self._tests[split], start)

        def finish(job: _Job, result: _Outcomes) -> None:
            scored[job.chunk] = _scored(result)

        self._run([_Job(chunk=k) for k in range(len(chunks))], submit, finish, _once_more)
        ordered = [scored[k] for k in range(len(chunks))]
        return gather(ordered, self._splits, self._classes)

    def _evaluate_personal(self, weights: Weights) -> Evaluation:
        """Where the clients' states are, group by group."""
        key, packed = next(self._numbers), ray.put(_pack(weights))
        assert self._splits is not None
        places = self._splits.places()
        scored: dict[int, tuple[Scored, Scored, Scored]] = {}

        def submit(worker: _Worker, job: _Job) -> Any:
            group = job.group
            assert group is not None
            data, states = self._missing(worker, group)
            task = _Judging(group, key, {i: places[i] for i in self._groups[group]}, states)
            stored = itertools.chain.from_iterable(self._tests)
            return worker.actor.score_personal.remote(task, data, packed, *stored)

        def finish(job: _Job, result: dict[int, tuple[_Outcomes, _Outcomes, _Outcomes]]) -> None:
            scored.update((i, (_scored(test), _scored(own), _scored(held))) for i, (test, own, held) in result.items())

        self._run([_Job(group) for group in sorted(self._groups)], submit, finish, _once_more)
        ordered = [scored[i] for i in range(self._clients)]
        return gather_personal(ordered, self._splits, self._classes)

    def states(self) -> dict[int, Tree]:
        """The committed states of the clients that have one."""
        return {i: tree.to(tree.from_bytes(state), self._device) for i, state in sorted(self._states.items())}

    def restore(self, states: Mapping[int, Tree]) -> None:
        """Put the clients' states back.

        Args:
            states: What `states` returned.
        """
        self._states = {i: tree.to_bytes(state) for i, state in states.items()}
        for worker in self._workers:
            worker.holds.clear()

    def close(self) -> None:
        """Stop the workers, leave Ray as it was found, and give torch its threads back."""
        self._stop()
        self._setup, self._data, self._tests = None, {}, []
        self._undo.close()

    def _affordable(self, count: int, wanted: int | None) -> int:
        """How many workers Ray has room for, which are `count` where a number was asked for."""
        resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        cpus, gpus, share = int(resources.get("CPU", 0)), int(resources.get("GPU", 0)), self._gpus_per_worker
        room = gpus * int(1 / share) if 0 < share < 1 else gpus // int(share) if share else cpus
        if share and (room < 1 or (wanted and room < count)):
            raise FedfillError(
                f"gpus_per_worker: found {share:g} for {count} workers, and Ray has {gpus} GPUs; allowed: as much as they have"
            )
        if cpus < 1 or (wanted and cpus < count):
            raise FedfillError(f"workers: found {count}, and Ray has {cpus} CPUs; allowed: one worker for each")
        return min(count, cpus, room)

    def _store(self, federation: Federation) -> None:
        """Put all data into the object store, once."""
        clients = federation.clients

        def stored(samples: Sequence[Samples]) -> tuple[Array, Array]:
            return tuple(
                np.concatenate([part.numpy() for part in parts])
                for parts in zip(*((s.inputs, s.labels) for s in samples), strict=True)
            )  # type: ignore[return-value]

        def stacked(samples: Sequence[Samples]) -> _Stack:
            return _Stack(tuple(map(len, samples)), *stored(samples))

        self._sizes = {g: sum(len(clients[i].train) for i in members) for g, members in self._groups.items()}
        self._data = {
            group: ray.put(
                _Group(
                    tuple(members),
                    stacked([clients[i].train for i in members]),
                    stacked([clients[i].unlabelled for i in members]),
                )
            )
            for group, members in self._groups.items()
        }
        self._splits = splits_of(federation)
        self._tests = [(ray.put(s.inputs.numpy()), ray.put(s.labels.numpy())) for s in self._splits.all]

    def _missing(self, worker: _Worker, group: int) -> tuple[Any, dict[int, Bytes] | None]:
        """A group's data and committed states, where a worker that is about to need them doesn't hold them."""
        if group in worker.holds:
            return None, None
        worker.holds.add(group)
        return self._data[group], self._committed(group)

    def _committed(self, group: int) -> dict[int, Bytes]:
        return {i: np.frombuffer(self._states[i], np.uint8) for i in self._groups[group] if i in self._states}

    # Workers

    def _start(self) -> _Worker:
        """Start a worker; its first answer says that it is ready."""
        actor = self._process()
        return _Worker(actor, actor.setup.remote(self._setup))

    def _process(self) -> Any:
        options = {"num_cpus": 1, "num_gpus": self._gpus_per_worker, "max_restarts": 0, "max_task_retries": 0}
        return ray.remote(Actor).options(**options).remote(sys.path)

    def _replace(self, worker: _Worker) -> None:
        """Start another in the place of one that failed; one that was never ready is not tried again."""
        ray.kill(worker.actor)
        self._workers.remove(worker)
        if worker.ready:
            self._workers.append(self._start())
        self.workers = len(self._workers)

    def _stop(self) -> None:
        if ray.is_initialized():
            for worker in self._workers:
                ray.kill(worker.actor)
        self._workers = []

    def _deal(self) -> None:
        """Give every group to a worker, so that all have about as many samples."""
        load = dict.fromkeys(self._workers, 0)
        for group in sorted(self._groups, key=lambda group: (-self._sizes[group], group)):
            worker = min(load, key=load.__getitem__)
            worker.groups.add(group)
            load[worker] += self._sizes[group]

    def _claim(self, group: int, owner: _Worker) -> None:
        """Make a group one worker's; what another holds of it is old."""
        for worker in self._workers:
            if worker is not owner and group in worker.groups:
                worker.groups.remove(group)
                worker.holds.discard(group)
                worker.actor.forget.remote(group)
        owner.groups.add(group)

    def _run(
        self,
        jobs: list[_Job],
        submit: Callable[[_Worker, _Job], Any],
        finish: Callable[[_Job, Any], None],
        give_up: Callable[[_Job, bool], list[_Job]],
    ) -> None:
        """Have all jobs done, each worker one at a time.

        Args:
            jobs: In the order in which they are handed out.
            submit: Sends a job to a worker.
            finish: Takes the result.
            give_up: What to do in place of a job whose worker died, or was too late.
        """

        def dispatch() -> None:
            for worker in self._workers:
                if jobs and worker.ready and worker.job is None:
                    job = self._choose(worker, jobs)
                    if job.group is not None:
                        self._claim(job.group, worker)
                    worker.job, worker.since, worker.answer = job, time.monotonic(), submit(worker, job)

        try:
            dispatch()
            while jobs or any(worker.job for worker in self._workers):
                if not self._workers:
                    raise FedfillError(
                        "engine: Ray's workers died and none could be started in their place; finished rounds are kept, and 'fedfill resume' goes on from there"
                    )
                results, failed = self._next()
                for worker, late in failed:
                    if worker.job is not None:
                        jobs[:0] = give_up(worker.job, late)
                    self._replace(worker)
                # before more is handed out, which may go on from the states that came back here
                for worker, job, result in results:
                    if job.group is not None and job.group not in worker.groups:
                        self._claim(job.group, worker)  # who took the group over meanwhile has older states
                    finish(job, result)
                dispatch()
        except BaseException:  # Ctrl-C, say: nobody asks any more for what the workers are doing
            self._stop()
            raise

    def _choose(self, worker: _Worker, jobs: list[_Job]) -> _Job:
        """Take out a worker's next job: of its own groups, or else of nobody's, or of whoever has the most to do."""
        own = (k for k, job in enumerate(jobs) if job.group is None or job.group in worker.groups)
        k = next(own, None)
        if k is None:
            owner = {group: other for other in self._workers for group in other.groups}
            owners = [None if job.group is None else owner.get(job.group) for job in jobs]
            left = Counter(owners)
            k = owners.index(None if None in left else max(left, key=left.__getitem__))
        return jobs.pop(k)

    def _next(self) -> tuple[list[tuple[_Worker, _Job, Any]], list[tuple[_Worker, bool]]]:
        """Wait for the next results; and who failed, with whether it was too late."""
        busy = {worker.answer: worker for worker in self._workers if worker.job is not None or not worker.ready}
        until = min(map(self._deadline, busy.values()))
        done, _ = ray.wait(list(busy), timeout=None if until == math.inf else max(0.0, until - time.monotonic()))
        now = time.monotonic()
        results, failed = [], []
        for answer in done:
            worker = busy.pop(answer)
            try:
                result = ray.get(answer)
            except RayTaskError as error:
                raise _foreign(error, worker) from error
            except RayError:  # it died, or its machine did before the result was read
                failed.append((worker, False))
                continue
            if worker.job is not None:
                results.append((worker, worker.job, result))
            else:
                for other in self._workers:  # they share the processors
                    other.since = other.since if other.ready else now
            worker.ready, worker.job = True, None
        failed += [(worker, True) for worker in busy.values() if now > self._deadline(worker)]
        return results, failed

    def _deadline(self, worker: _Worker) -> float:
        if not worker.ready:
            return worker.since + START
        if self._timeout is None or worker.job is None or not worker.job.clients:
            return math.inf
        return worker.since + self._timeout * len(worker.job.clients) + GRACE


def _once_more(job: _Job, late: bool) -> list[_Job]:
    """What to do in place of a part of an evaluation whose worker died."""
    if job.again:
        raise FedfillError(
            "engine: Ray's workers died over the evaluation; finished rounds are kept, and 'fedfill resume' goes on from there"
        )
    return [replace(job, again=True)]


def _connect(address: str | None, cpus: int, undo: ExitStack) -> None:
    """Connect this process to a cluster, or to a Ray of its own, where it is not connected yet."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False} if address is None else {}
    ending = signal.getsignal(signal.SIGTERM)
    try:
        with _impatience(address):
            ray.init(address=address or "local", log_to_driver=False, logging_level=logging.CRITICAL, **own)
    except Exception as error:
        if address is None:
            raise FedfillError(f"engine: Ray can't be started on this machine ({_first_line(error)})") from error
        raise FedfillError(
            f"ray_address: found '{address}', and no cluster answers there ({_first_line(error)}); "
            "allowed: auto, HOST:PORT, or none for a Ray of its own on this machine"
        ) from error
    undo.callback(ray.shutdown)
    # Ray prints a paragraph for every worker that dies, whatever its options say
    ray._private.worker._worker_logs_enabled = False
    undo.callback(setattr, ray._private.worker, "_worker_logs_enabled", True)
    if threading.current_thread() is threading.main_thread():
        # Ray's own handler prints a stack and aborts; by default nothing would stop Ray's processes at once
        signal.signal(signal.SIGTERM, _terminate if ending is signal.SIG_DFL else ending)
        undo.callback(signal.signal, signal.SIGTERM, ending)


def _terminate(number: int, frame: object) -> None:
    sys.exit(128 + number)


@contextmanager
def _impatience(address: str | None) -> Iterator[None]:
    """Look for a cluster once: for an address where nothing answers, Ray would try for a quarter of an hour."""
    if address is None:
        yield
        return
    place = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    if place != "auto":
        host, _, port = place.rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()
    tries = "RAY_gcs_server_port_wait_time_s"
    before = os.environ.get(tries)
    os.environ[tries] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[tries]


def _unimportable() -> dict[str, type[Record]]:
    """The records of a script: workers can't import it, and so they are sent."""
    return {name: kind for name, kind in Record._kinds.items() if kind.__module__ == "__main__"}


def _put(setup: _Setup) -> Any:
    try:
        return ray.put(setup)
    except (TypeError, AttributeError) as error:
        raise FedfillError(
            f"engine: the algorithm or the model can't be sent to Ray's workers ({_first_line(error.__cause__ or error)})"
        ) from error


def _foreign(error: RayTaskError, worker: _Worker) -> Exception:
    """What a worker raised on its own: on its start most likely because it lacks a module."""
    if worker.ready:
        return RemoteError(_first_line(error.cause))
    return FedfillError(
        f"engine: Ray's workers can't load the algorithm or the model ({_first_line(error.cause)}); "
        "allowed: classes of the script itself, or of modules that every machine has"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
