"""A pool of Ray's workers: started, given jobs one at a time, watched, and replaced when they die."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from fedfill.engines.ray_cluster import foreign
from fedfill.engines.ray_worker import Actor
from fedfill.errors import FedfillError
from fedfill.own_parts import sources

START = 60.0
"""Seconds in which the next of the workers that are being started has to be ready."""
GRACE = 10.0
"""Seconds beyond its clients' time after which a worker that doesn't answer is given up."""


@dataclass(frozen=True)
class Job:
    """Something for one worker to do; `again` if a worker died over it.

    It is a call to clients of a group, an evaluation of the models of a whole group, or a chunk to score.
    """

    group: int | None = None
    clients: tuple[int, ...] = ()
    chunk: int = 0
    again: bool = False


@dataclass(eq=False)
class Worker:
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
    job: Job | None = None
    since: float = field(default_factory=time.monotonic)
    groups: set[int] = field(default_factory=set)
    holds: set[int] = field(default_factory=set)


class WorkerPool:
    """Workers that share groups of clients between them.

    Args:
        groups: Clients by group.
        timeout: Seconds that a client has for one call; None: as long as it takes.
        gpus_per_worker: The share of a GPU that each worker gets.

    Attributes:
        workers: How many there are.
    """

    workers: int

    def __init__(self, groups: Mapping[int, list[int]], timeout: float | None, gpus_per_worker: float) -> None:
        self._groups = groups
        self._sizes: dict[int, int] = {}
        self._timeout = timeout
        self._gpus_per_worker = gpus_per_worker
        self._setup: Any = None
        self._workers: list[Worker] = []

    def _start(self) -> Worker:
        """Start a worker; its first answer says that it is ready."""
        actor = self._process()
        if files := sources():
            actor.execute.remote(files)  # an actor does one thing after the other, so the next finds their classes
        return Worker(actor, actor.setup.remote(self._setup))

    def _process(self) -> Any:
        options = {"num_cpus": 1, "num_gpus": self._gpus_per_worker, "max_restarts": 0, "max_task_retries": 0}
        return ray.remote(Actor).options(**options).remote(sys.path)

    def _replace(self, worker: Worker) -> None:
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

    def _claim(self, group: int, owner: Worker) -> None:
        """Make a group one worker's; what another holds of it is old."""
        for worker in self._workers:
            if worker is not owner and group in worker.groups:
                worker.groups.remove(group)
                worker.holds.discard(group)
                worker.actor.forget.remote(group)
        owner.groups.add(group)

    def _run(
        self,
        jobs: list[Job],
        submit: Callable[[Worker, Job], Any],
        finish: Callable[[Job, Any], None],
        give_up: Callable[[Job, bool], list[Job]],
    ) -> None:
        """Have all jobs done, each worker one at a time."""

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

    def _choose(self, worker: Worker, jobs: list[Job]) -> Job:
        """Take out a worker's next job: of its own groups, or else of nobody's, or of whoever has the most to do."""
        own = (k for k, job in enumerate(jobs) if job.group is None or job.group in worker.groups)
        k = next(own, None)
        if k is None:
            owner = {group: other for other in self._workers for group in other.groups}
            owners = [None if job.group is None else owner.get(job.group) for job in jobs]
            left = Counter(owners)
            k = owners.index(None if None in left else max(left, key=left.__getitem__))
        return jobs.pop(k)

    def _next(self) -> tuple[list[tuple[Worker, Job, Any]], list[tuple[Worker, bool]]]:
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
                raise foreign(error, worker.ready) from error
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

    def _deadline(self, worker: Worker) -> float:
        if not worker.ready:
            return worker.since + START
        if self._timeout is None or worker.job is None or not worker.job.clients:
            return math.inf
        return worker.since + self._timeout * len(worker.job.clients) + GRACE


def once_more(job: Job, late: bool) -> list[Job]:
    """What to do in place of a part of an evaluation whose worker died."""
    if job.again:
        raise FedfillError(
            "engine: Ray's workers died over the evaluation; finished rounds are kept, and 'fedfill resume' goes on from there"
        )
    return [replace(job, again=True)]
