"""A host's worker: a process that stays for all messages of a run, where Flower would start a fresh one for each.

A SuperNode that was started with ``--isolation process`` starts nothing itself; it hands out its tasks at its Runtime API. This
program, run as ``python -m fedfill.deployment.worker ADDRESS OWNER HOME``, fetches them there and does with each what
``flwr-clientapp`` does. So libraries, the app, the host's data and its model are loaded once, at the first message.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import NoReturn

import httpx
from flwr.app import Error, Message
from flwr.cli.install import install_from_fab
from flwr.clientapp.client_app import LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.utils import disable_process_dumping
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedfill.deployment import programs  # what every app asks for

assert programs
log = logging.getLogger("fedfill")

POLL = 0.2
"""Seconds from one look for a task to the next."""
_TASK = "FEDFILL_TASK"
"""Carries a task's token past `_begin_anew`: a command line is for all eyes, an environment for its owner's."""


def serve(address: str, owner: int) -> NoReturn:
    """Do the tasks of a SuperNode, those of one run in one image of this process.

    Args:
        address: Of the SuperNode's Runtime API.
        owner: The process with which this one ends.
    """
    threading.Thread(target=_leave_with, args=(owner,), daemon=True).start()
    disable_process_dumping(strict=False)  # as Flower's own program that holds the tokens
    client, run = _connect(address), None
    token = os.environ.pop(_TASK, "")
    while True:
        try:
            if token:
                run = _do(address, token)
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            token = found.token
            if not token:
                time.sleep(POLL)
            elif run not in (None, found.task.run_id):
                _begin_anew(token)  # its app is another one, and what the last one left behind is of no use to it
        except httpx.TransportError:  # the SuperNode is not there yet
            token = ""
            time.sleep(POLL)
        except KeyboardInterrupt:  # Flower's way to say that nobody waits for this task any more
            log.warning("a task was given up")
            _begin_anew()


def _connect(address: str, token: str = "") -> RuntimeHttpClient:
    """A client of the Runtime API, which is on this host's loopback interface; with a token one that may see its task."""
    version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=[version, RuntimeTokenHttpInterceptor(token)] if token else [version],
        retry_invoker=make_simple_http_retry_invoker() if token else None,
    )


def _do(address: str, token: str) -> int | None:
    """Run an app on one message, and tell of which run it is; as Flower's own program does, errors are replies."""
    client = _connect(address, token)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    message = context = reply = None
    status, details = SubStatus.FAILED, "stopped"
    try:
        message, context, run, fab = pull_task_input(client)
        install_from_fab(fab.content, skip_prompt=True)
        load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
        reply = load(run.fab_id, run.fab_version, fab.hash_str)(message=message, context=context)
        status, details = SubStatus.COMPLETED, ""
    except Exception as error:
        log.exception("the app failed")
        unloaded = isinstance(error, LoadClientAppError)
        code = ErrorCode.LOAD_CLIENT_APP_EXCEPTION if unloaded else ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        details = f"{type(error)}:<'{error}'>"
        if message is not None:
            reply = Message(Error(code=code, reason=details), reply_to=message)
    try:
        if reply is not None and context is not None:
            push_message(client, reply, context)
    except Exception:  # the run is over, or the reply can't be sent: the server hears nothing
        log.exception("a reply was not taken")
    finally:
        if heartbeat.is_running:
            heartbeat.stop()
        push_task_output(client, context, status, details)
        client.close()
    return context.run_id if context is not None else None


def _begin_anew(token: str = "") -> NoReturn:
    """Put a fresh Python in the place of this one."""
    if token:
        os.environ[_TASK] = token
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _leave_with(owner: int) -> None:
    """End this process at once when its owner is gone, whatever it does."""
    while True:
        try:
            os.kill(owner, 0)
        except OSError:
            os._exit(0)
        time.sleep(POLL)


if __name__ == "__main__":
    _, where, whose, home = sys.argv
    os.environ["FLWR_HOME"] = home  # apps are unpacked there
    serve(where, int(whose))
