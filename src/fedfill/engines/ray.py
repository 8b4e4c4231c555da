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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
from torch import nn

from fedfill import tree
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.engines.local import processors
from fedfill.engines.ray_cluster import affordable, connect, put, unimportable
from fedfill.engines.ray_pool import Job, Worker, WorkerPool, once_more
from fedfill.engines.ray_worker import (
    Array,
    Bytes,
    Group,
    Judging,
    Outcomes,
    SentError,
    Served,
    Setup,
    Stack,
    Task,
    pack,
    receive_error,
    receive_outcome,
    receive_scored,
    unpack,
)
from fedfill.errors import FedfillError
from fedfill.privacy.releases import Release
from fedfill.protocol.messages import Answers, Average, Lost, Message, Outcome
from fedfill.training.aggregation import Part, combined, group_of
from fedfill.training.evaluation import (
    CHUNK,
    Evaluation,
    PersonalScores,
    Scored,
    Splits,
    gather,
    splits_of,
)
from fedfill.training.precision import Precision
from fedfill.tree import Tree, Weights


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
                self._stored[id(message)] = next(self._numbers), ray.put(pack(message))
            keys[i], stored[keys[i]] = self._stored[id(message)]
        return keys, list(stored.values())

    def done(self, client: int) -> None:
        """This client needs its message no more."""
        message = id(self._messages[client])
        self._uses[message] -= 1
        if not self._uses[message]:
            self._stored.pop(message, None)


class _Merge:
    """The mean or sum over groups in ascending order, each taken in as soon as those before it are complete."""

    def __init__(self, groups: Mapping[int, Iterable[int]]) -> None:
        self.total: dict[str, Part] = {}
        self._missing = {group: set(groups[group]) for group in sorted(groups)}
        self._parts: dict[int, dict[int, dict[str, Part]]] = {group: {} for group in groups}

    def add(self, group: int, clients: Sequence[int], means: dict[str, Part]) -> None:
        """Take in the means over a whole group, or those of one client of it."""
        self._missing[group].difference_update(clients)
        self._parts[group][clients[0]] = means
        for first in list(self._missing):
            if self._missing[first]:
                return
            del self._missing[first]
            whole: dict[str, Part] = {}
            for _, part in sorted(self._parts.pop(first).items()):
                _extend(whole, part)
            _extend(self.total, whole)


def _extend(total: dict[str, Part], means: Mapping[str, Part]) -> None:
    for name, mean in means.items():
        total[name] = combined([total[name], mean]) if name in total else mean  # type: ignore[assignment]


class RayEngine(WorkerPool):
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
        precision: Of local trainings.

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
        precision: Precision = "float32",
    ) -> None:
        if device.type == "cuda" and not gpus_per_worker:
            raise FedfillError(
                "gpus_per_worker: found 0 with device=cuda; allowed: the share of a GPU for each worker, or device=cpu"
            )
        if gpus_per_worker > 1 and gpus_per_worker % 1:
            raise FedfillError(f"gpus_per_worker: found {gpus_per_worker}; allowed: a share up to 1, or a whole number")
        self.evaluation: Release | None = None
        self.evaluated: Sequence[int] = ()
        self.origin = ""
        self._program = program
        self._device = device
        self._classes = federation.classes
        self._clients = len(federation.clients)
        groups: dict[int, list[int]] = {}
        for i in range(self._clients):
            groups.setdefault(group_of(i, self._clients), []).append(i)
        super().__init__(groups, timeout, gpus_per_worker)
        self._states: dict[int, bytes] = {}
        self._data: dict[int, Any] = {}
        self._tests: list[tuple[Any, Any]] = []
        self._splits: Splits | None = None
        self._numbers = itertools.count()
        self._undo = ExitStack()
        # the server's own sums shall have the bits that they have on the local engine
        self._undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        try:
            count = min(workers or (processors() if address is None else 1024), len(self._groups))
            connect(address, count, self._undo)
            self.workers = affordable(count, workers, gpus_per_worker)
            setup = Setup(
                program=program,
                template=copy.deepcopy(template).cpu(),
                kinds=unimportable(),
                initial=pack(initial),
                classes=self._classes,
                schema=federation.schema,
                clients=self._clients,
                seed=seed,
                device="cuda" if gpus_per_worker else "cpu",
                timeout=timeout,
                precision=precision,
                joined=address is not None,
            )
            self._setup = put(setup)
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
        """Run a handler on every client that has a message."""
        groups: dict[int, list[int]] = {}
        for i in sorted(messages):
            groups.setdefault(group_of(i, self._clients), []).append(i)
        outbox = _Outbox(messages, self._numbers)
        merge = _Merge(groups)
        outcomes: dict[int, Outcome] = {}
        broken: list[SentError] = []

        def submit(worker: Worker, job: Job) -> Any:
            group = job.group
            assert group is not None
            keys, stored = outbox.store(job.clients)
            data, states = self._missing(worker, group)
            return worker.actor.serve.remote(Task(group, handler, t, average, keys, states), data, *stored)

        def finish(job: Job, served: Served) -> None:
            assert job.group is not None
            for i, sent in served.outcomes.items():
                outcomes[i] = receive_outcome(sent, self._device)
                outbox.done(i)
            for i, state in served.states.items():
                self._states[i] = state.tobytes()
            merge.add(job.group, job.clients, {} if served.means is None else unpack(served.means, self._device))
            if served.error is not None:
                broken.append(served.error)

        def give_up(job: Job, late: bool) -> list[Job]:
            assert job.group is not None
            if len(job.clients) > 1:  # over which of them it was shows when each is alone
                return [Job(job.group, (i,), again=True) for i in job.clients]
            if not late and not job.again:
                return [replace(job, again=True)]
            why = f"took longer than reply_timeout={self._timeout} s" if late else "its worker died twice"
            outcomes[job.clients[0]] = Outcome(error=Lost(why))
            outbox.done(job.clients[0])
            merge.add(job.group, job.clients, {})
            return []

        self._run([Job(group, tuple(members)) for group, members in sorted(groups.items())], submit, finish, give_up)
        if broken:
            raise receive_error(broken[0])
        return Answers(outcomes, merge.total)

    def evaluate(self, weights: Weights, t: int) -> Evaluation:
        """Score weights on the test set and on the clients' own test splits."""
        if getattr(self._program, "personal", False):
            return self._evaluate_personal(weights)
        assert self._splits is not None
        sizes = [len(part) for part in self._splits.all]
        chunks = [(split, start) for split, size in enumerate(sizes) for start in range(0, size, CHUNK)]
        key, packed = next(self._numbers), ray.put(pack(weights))
        scored: dict[int, Scored] = {}
        times = self._splits.times

        def submit(worker: Worker, job: Job) -> Any:
            split, start = chunks[job.chunk]
            return worker.actor.score.remote(key, packed, *self._tests[split], start, times)

        def finish(job: Job, result: Outcomes) -> None:
            scored[job.chunk] = receive_scored(result)

        self._run([Job(chunk=k) for k in range(len(chunks))], submit, finish, once_more)
        ordered = [scored[k] for k in range(len(chunks))]
        return gather(ordered, self._splits, self._classes)

    def _evaluate_personal(self, weights: Weights) -> Evaluation:
        """Where the clients' states are, group by group."""
        key, packed = next(self._numbers), ray.put(pack(weights))
        assert self._splits is not None
        places, times = self._splits.places(), self._splits.times
        scores = PersonalScores(self._splits, self._classes)

        def submit(worker: Worker, job: Job) -> Any:
            group = job.group
            assert group is not None
            data, states = self._missing(worker, group)
            task = Judging(group, key, {i: places[i] for i in self._groups[group]}, states, times)
            stored = itertools.chain.from_iterable(self._tests)
            return worker.actor.score_personal.remote(task, data, packed, *stored)

        def finish(job: Job, result: dict[int, tuple[Outcomes, Outcomes, Outcomes]]) -> None:
            for i, outcomes in result.items():
                scores.add(i, *map(receive_scored, outcomes))

        self._run([Job(group) for group in sorted(self._groups)], submit, finish, once_more)
        return scores.gather()

    def states(self) -> dict[int, Tree]:
        """The committed states of the clients that have one."""
        return {i: tree.to(tree.from_bytes(state), self._device) for i, state in sorted(self._states.items())}

    def restore(self, states: Mapping[int, Tree]) -> None:
        """Put the clients' states back."""
        self._states = {i: tree.to_bytes(state) for i, state in states.items()}
        for worker in self._workers:
            worker.holds.clear()

    def close(self) -> None:
        """Stop the workers, leave Ray as it was found, and give torch its threads back."""
        self._stop()
        self._setup, self._data, self._tests = None, {}, []
        self._undo.close()

    def _store(self, federation: Federation) -> None:
        """Put all data into the object store, once."""
        clients = federation.clients

        def stored(samples: Sequence[Samples]) -> tuple[Array, Array]:
            return tuple(
                np.concatenate([part.numpy() for part in parts])
                for parts in zip(*((s.inputs, s.labels) for s in samples), strict=True)
            )  # type: ignore[return-value]

        def stacked(samples: Sequence[Samples]) -> Stack:
            return Stack(tuple(map(len, samples)), *stored(samples))

        self._sizes = {g: sum(len(clients[i].train) for i in members) for g, members in self._groups.items()}
        self._data = {
            group: ray.put(
                Group(
                    tuple(members),
                    stacked([clients[i].train for i in members]),
                    stacked([clients[i].unlabelled for i in members]),
                )
            )
            for group, members in self._groups.items()
        }
        self._splits = splits_of(federation)
        self._tests = [(ray.put(s.inputs.numpy()), ray.put(s.labels.numpy())) for s in self._splits.all]

    def _missing(self, worker: Worker, group: int) -> tuple[Any, dict[int, Bytes] | None]:
        """A group's data and committed states, where a worker that is about to need them doesn't hold them."""
        if group in worker.holds:
            return None, None
        worker.holds.add(group)
        return self._data[group], self._committed(group)

    def _committed(self, group: int) -> dict[int, Bytes]:
        return {i: np.frombuffer(self._states[i], np.uint8) for i in self._groups[group] if i in self._states}
