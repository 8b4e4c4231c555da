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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError
from torch import nn

from fedfill import tree
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.engines.local import processors
from fedfill.engines.ray_worker import (
    Actor,
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
from fedfill.protocol.messages import Answers, Average, Lost, Message, Outcome, RemoteError
from fedfill.training.aggregation import Mean, group_of, mean_of
from fedfill.training.evaluation import (
    CHUNK,
    Evaluation,
    Scored,
    Splits,
    gather,
    gather_personal,
    splits_of,
)
from fedfill.tree import Record, Tree, Weights

START = 60.0
"""Seconds in which the next of the workers that are being started has to be ready."""
GRACE = 10.0
"""Seconds beyond its clients' time after which a worker that doesn't answer is given up."""

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
        self.evaluated: Sequence[int] = ()
        self.origin = ""
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
            setup = Setup(
                program=program,
                template=copy.deepcopy(template).cpu(),
                kinds=_unimportable(),
                initial=pack(initial),
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
        broken: list[SentError] = []

        def submit(worker: _Worker, job: _Job) -> Any:
            group = job.group
            assert group is not None
            keys, stored = outbox.store(job.clients)
            data, states = self._missing(worker, group)
            return worker.actor.serve.remote(Task(group, handler, t, average, keys, states), data, *stored)

        def finish(job: _Job, served: Served) -> None:
            assert job.group is not None
            for i, sent in served.outcomes.items():
                outcomes[i] = receive_outcome(sent, self._device)
                outbox.done(i)
            for i, state in served.states.items():
                self._states[i] = state.tobytes()
            merge.add(job.group, job.clients, {} if served.means is None else unpack(served.means, self._device))
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
            raise receive_error(broken[0])
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
        key, packed = next(self._numbers), ray.put(pack(weights))
        scored: dict[int, Scored] = {}

        def submit(worker: _Worker, job: _Job) -> Any:
            split, start = chunks[job.chunk]
            return worker.actor.score.remote(key, packed, *self._tests[split], start)

        def finish(job: _Job, result: Outcomes) -> None:
            scored[job.chunk] = receive_scored(result)

        self._run([_Job(chunk=k) for k in range(len(chunks))], submit, finish, _once_more)
        ordered = [scored[k] for k in range(len(chunks))]
        return gather(ordered, self._splits, self._classes)

    def _evaluate_personal(self, weights: Weights) -> Evaluation:
        """Where the clients' states are, group by group."""
        key, packed = next(self._numbers), ray.put(pack(weights))
        assert self._splits is not None
        places = self._splits.places()
        scored: dict[int, tuple[Scored, Scored, Scored]] = {}

        def submit(worker: _Worker, job: _Job) -> Any:
            group = job.group
            assert group is not None
            data, states = self._missing(worker, group)
            task = Judging(group, key, {i: places[i] for i in self._groups[group]}, states)
            stored = itertools.chain.from_iterable(self._tests)
            return worker.actor.score_personal.remote(task, data, packed, *stored)

        def finish(job: _Job, result: dict[int, tuple[Outcomes, Outcomes, Outcomes]]) -> None:
            scored.update(
                (i, (receive_scored(test), receive_scored(own), receive_scored(held)))
                for i, (test, own, held) in result.items()
            )

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


def _put(setup: Setup) -> Any:
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
