"""A Ray engine for tests that are about something else than how processes start and stop."""

from __future__ import annotations

import functools
import logging
from typing import Any, ClassVar

import ray

from fedfill.engines.ray import RayEngine
from fedfill.engines.ray_worker import Actor


@functools.cache
def connect() -> None:
    """Connect the tests of this process to one Ray, which ends with it."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL)
    ray._private.worker._worker_logs_enabled = False  # as in an engine that connects on its own


class PooledEngine(RayEngine):
    """Leaves its processes to the next engine, as each takes seconds to import torch."""

    pool: ClassVar[list[Any]] = []

    def __init__(self, *parts: Any, **options: Any) -> None:
        connect()
        super().__init__(*parts, **options)

    def _process(self) -> Any:
        return self.pool.pop() if self.pool else ray.remote(Actor).options(num_cpus=0).remote([])

    def close(self) -> None:
        self.pool += [worker.actor for worker in self._workers]
        self._workers = []
        super().close()
