"""A Ray to work on: one that runs, or one of its own; what it has room for; what it says when something fails."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from ray.exceptions import RayTaskError

from fedfill.engines.ray_worker import Setup
from fedfill.errors import FedfillError
from fedfill.protocol.messages import RemoteError
from fedfill.tree import Record

log = logging.getLogger("fedfill")


def affordable(count: int, wanted: int | None, share: float) -> int:
    """How many workers with this share of a GPU Ray has room for, which are `count` where a number was asked for."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    room = gpus * int(1 / share) if 0 < share < 1 else gpus // int(share) if share else cpus
    if share and (room < 1 or (wanted and room < count)):
        raise FedfillError(
            f"gpus_per_worker: found {share:g} for {count} workers, and Ray has {gpus} GPUs; allowed: as much as they have"
        )
    if cpus < 1 or (wanted and cpus < count):
        raise FedfillError(f"workers: found {count}, and Ray has {cpus} CPUs; allowed: one worker for each")
    return min(count, cpus, room)


def connect(address: str | None, cpus: int, undo: ExitStack) -> None:
    """Connect this process to a cluster, or to a Ray of its own, where it is not connected yet."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False} if address is None else {}
    ending = signal.getsignal(signal.SIGTERM)
    try:
        with _impatience(address):
            log.info(
                "starting Ray" if address is None else "joining Ray at %s", *([] if address is None else [address])
            )
            ray.init(address=address or "local", log_to_driver=False, logging_level=logging.CRITICAL, **own)
    except Exception as error:
        if address is None:
            raise FedfillError(f"engine: Ray can't be started on this machine ({first_line(error)})") from error
        raise FedfillError(
            f"ray_address: found '{address}', and no cluster answers there ({first_line(error)}); "
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


def unimportable() -> dict[str, type[Record]]:
    """The records of a script: workers can't import it, and so they are sent."""
    return {name: kind for name, kind in Record._kinds.items() if kind.__module__ == "__main__"}


def put(setup: Setup) -> Any:
    """Put what workers start with into the object store."""
    try:
        return ray.put(setup)
    except (TypeError, AttributeError) as error:
        raise FedfillError(
            f"engine: the algorithm or the model can't be sent to Ray's workers ({first_line(error.__cause__ or error)})"
        ) from error


def foreign(error: RayTaskError, ready: bool) -> Exception:
    """What a worker raised on its own: before it is ready most likely because it lacks a module."""
    if ready:
        return RemoteError(first_line(error.cause))
    if isinstance(error.cause, FedfillError):
        return FedfillError(str(error.cause))
    return FedfillError(
        f"engine: Ray's workers can't load the algorithm or the model ({first_line(error.cause)}); "
        "allowed: classes of the script itself, or of modules that every machine has"
    )


def first_line(error: BaseException) -> str:
    """The kind of an error, and the first line of its words."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
