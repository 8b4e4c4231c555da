"""The local engine: one process, resident data, a few threads over clients with one torch thread each."""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn

from fedfill import tree
from fedfill.data.federation import Federation
from fedfill.engines.runner import ClientRunner, make_resident
from fedfill.engines.together import MOST, Calibration, Together, Train, alone
from fedfill.errors import FedfillError
from fedfill.privacy.releases import Release
from fedfill.protocol.messages import Answers, Average, Averaging, Message, Outcome
from fedfill.training.aggregation import group_of
from fedfill.training.evaluation import CHUNK, Evaluation, PersonalScores, Scored, gather, score, score_all, splits_of
from fedfill.training.fit import Interrupted, Resident
from fedfill.training.precision import Precision
from fedfill.tree import Tree, Weights


def choose_device(name: str) -> torch.device:
    """The device of this name: ``auto`` (a GPU when there is one), ``cpu``, ``cuda`` or ``cuda:N``."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise FedfillError(f"device: found '{name}'; allowed: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise FedfillError(
            f"device: found '{name}', and this machine has {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    return device


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalEngine:
    """Runs every client in this process.

    Args:
        program: The algorithm: its handlers are looked up by name.
        federation: The clients' data and the test set.
        template: The model.
        initial: The experiment's initial weights.
        seed: Of the experiment.
        device: Where data and models live.
        workers: Threads over clients, each with its own model; None: one for each processor, one on a GPU.
        timeout: Seconds that a client has for one call; None: as long as it takes.
        stack: How many clients' local trainings are one program; None: on a GPU as many as pay, found out in the first rounds.
        precision: Of local trainings.
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
        stack: int | None = None,
        precision: Precision = "float32",
    ) -> None:
        self.device = device
        self.evaluation: Release | None = None
        self.evaluated: Sequence[int] = ()
        self.origin = ""
        stacks = stack is not None and stack > 1
        self.workers = workers or (processors() if device.type == "cpu" and not stacks else 1)
        # one torch thread for each worker: faster than threads inside operations, and the same bits for any number
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        self._residents = [make_resident(template, device, precision) for _ in range(self.workers)]
        self._pool = ThreadPoolExecutor(self.workers, "fedfill", initializer=torch.set_num_threads, initargs=(1,))
        self._program = program
        self._classes = federation.classes
        self._data = [client.train.to(device) for client in federation.clients]
        self._unlabelled = [client.unlabelled.to(device) for client in federation.clients]
        self._splits = splits_of(federation, device)
        self._runner = ClientRunner(
            program,
            classes=federation.classes,
            initial=initial,
            seed=seed,
            device=device,
            timeout=timeout,
            schema=federation.schema,
        )
        self._states: dict[int, Tree] = {}
        possible = stacks or (stack is None and device.type == "cuda" and timeout is None and self.workers == 1)
        possible = possible and precision == "float32"  # under vmap torch casts a part of the layers alone
        self._together = Together(self._residents[0], stack or MOST) if possible else None
        self._calibrations: defaultdict[str, Calibration] = defaultdict(lambda: Calibration(stacks=bool(stack)))

    def call(self, handler: str, messages: Mapping[int, Message], t: int, average: Average | None = None) -> Answers:
        """Run a handler on every client that has a message."""
        groups: dict[int, list[int]] = {}
        for i in sorted(messages):
            groups.setdefault(group_of(i, len(self._data)), []).append(i)
        # the largest groups first, so that no worker is left with a long one at the end
        sizes = {group: sum(len(self._data[i]) for i in members) for group, members in groups.items()}
        queue = deque(sorted(groups, key=lambda group: (-sizes[group], group)))
        outcomes: dict[int, Outcome] = {}
        averaging = Averaging(average, len(self._data))

        def serve(resident: Resident, i: int, train: Train = alone) -> Outcome:
            outcome, state = self._runner.serve(
                resident,
                handler,
                i,
                self._data[i],
                self._unlabelled[i],
                self._states.get(i),
                messages[i],
                t,
                train=train,
            )
            if state:
                self._states[i] = state
            return outcome

        def work(resident: Resident) -> None:
            while queue:
                try:
                    group = queue.popleft()
                except IndexError:
                    return
                for i in groups[group]:
                    outcomes[i] = averaging.add(i, serve(resident, i))

        def stacked(resident: Resident) -> None:
            assert self._together is not None
            left = deque(sorted(messages))
            while left:
                if resident.stop:
                    raise Interrupted
                members = [left.popleft() for _ in range(min(self._together.most, len(left)))]
                jobs = [functools.partial(serve, resident, i) for i in members]
                for i, outcome in zip(members, self._together.run(jobs), strict=True):
                    outcomes[i] = averaging.add(i, outcome)

        calibration = self._calibrations[handler]
        start = time.perf_counter()
        if self._together is not None and calibration.stacks and len(messages) > 1:
            self._run(stacked, queue, 1)
        else:
            self._run(work, queue, len(groups))
        if self._together is not None and len(messages) > 1:
            calibration.took(time.perf_counter() - start, sum(outcome.train_samples for outcome in outcomes.values()))
        self._runner.check(handler)
        return Answers(outcomes, averaging.total())

    def evaluate(self, weights: Weights, t: int) -> Evaluation:
        """Score weights on the test set and on the clients' own splits for test and validation."""
        if getattr(self._program, "personal", False):
            return self._evaluate_personal(weights)
        chunks = [(data, start) for data in self._splits.all for start in range(0, len(data), CHUNK)]
        queue, splits = deque(enumerate(chunks)), self._splits
        scored: dict[int, Scored] = {}

        def work(resident: Resident) -> None:
            resident.load(weights)
            while queue:
                try:
                    k, (data, start) = queue.popleft()
                except IndexError:
                    return
                scored[k] = score(resident, data[start : start + CHUNK], splits.times)

        self._run(work, queue, len(chunks))
        ordered = [scored[k] for k in range(len(chunks))]
        return gather(ordered, self._splits, self._classes)

    def _evaluate_personal(self, weights: Weights) -> Evaluation:
        queue = deque(range(len(self._data)))
        scores = PersonalScores(self._splits, self._classes)
        splits, places = self._splits, self._splits.places()

        def work(resident: Resident) -> None:
            while queue:
                try:
                    i = queue.popleft()
                except IndexError:
                    return
                resident.load(self._program.personal_weights(self._states.get(i) or {}, weights))
                own, held = places[i]
                parts = (splits.test, splits.own[own], splits.validation[held])
                scores.add(i, *(score_all(resident, part, splits.times) for part in parts))

        self._run(work, queue, len(self._data))
        return scores.gather()

    def states(self) -> dict[int, Tree]:
        """The committed states of the clients that have one."""
        return dict(sorted(self._states.items()))

    def restore(self, states: Mapping[int, Tree]) -> None:
        """Put the clients' states back."""
        self._states = {i: tree.to(state, self.device) for i, state in states.items()}

    def close(self) -> None:
        """Stop the workers and give torch its threads back."""
        self._pool.shutdown()
        torch.set_num_threads(self._threads_before)

    def _run(self, work: Callable[[Resident], None], queue: deque[Any], jobs: int) -> None:
        futures: list[Future[None]] = [self._pool.submit(work, resident) for resident in self._residents[:jobs]]
        try:
            wait(futures)
        except BaseException:  # Ctrl-C: the workers stop at their next mini-batch
            queue.clear()
            for resident in self._residents:
                resident.stop = True
            wait(futures)
            raise
        for future in futures:
            future.result()
