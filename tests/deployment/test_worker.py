"""A host's worker: one process for all messages of a run, which leaves nothing to the next run and to nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory
from tests.deployment.test_processes import finish, running, wait_until_gone
from tests.helpers import refused

from fedfill.deployment import supernode, worker
from fedfill.deployment.processes import LocalFederation, local_federation

APP = {
    "pyproject.toml": """
[project]
name = "counting"
version = "1.0.0"
dependencies = ["flwr>=1.41"]
[tool.flwr.app]
publisher = "fedfill"
components = { serverapp = "counting:server", clientapp = "counting:client" }
config = { out = "" }
""",
    "counting.py": """
import json
import os
import time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()
calls = []

@client.query("count")
def count(message, context):
    calls.append(message)
    said = {"edition": "EDITION", "process": os.getpid(), "calls": len(calls), "node": context.node_config["name"]}
    return Message(RecordDict({"said": ConfigRecord(said)}), reply_to=message)

@client.query("fail")
def fail(message, context):
    raise ZeroDivisionError("no luck")

@server.main()
def main(grid, context):
    (node,) = grid.get_node_ids()
    told = []
    for what in ("count", "count", "fail", "nothing", "count"):
        asked = list(grid.push_messages([Message(RecordDict(), node, "query." + what)]))
        replies = []
        while not replies:
            replies = list(grid.pull_messages(asked))
            time.sleep(0.1)
        (reply,) = replies
        told.append(dict(reply.content["said"]) if reply.has_content() else [reply.error.code, reply.error.reason])
    Path(context.run_config["out"]).write_text(json.dumps(told))
""",
}


def count(federation: LocalFederation, folder: Path, edition: str) -> list[Any]:
    """What the host answers in a run of the app."""
    app = folder / edition
    app.mkdir()
    for name, text in APP.items():
        (app / name).write_text(text.replace("EDITION", edition))
    run = federation.submit(app, {"out": str(app / "told")})
    assert finish(federation, run) == ("finished:completed", "")
    told = json.loads((app / "told").read_text())
    assert isinstance(told, list)
    return told


@pytest.mark.deploy
def test_one_process_answers_all_messages_of_a_run_and_begins_anew_with_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    with local_federation(folder, [{"name": "Ann"}]) as federation:
        (process,) = federation.workers
        assert process is not None
        for edition in ("first", "second"):
            one, two, failed, unknown, three = count(federation, tmp_path, edition)
            assert [said["calls"] for said in (one, two, three)] == [1, 2, 3]
            assert {said["process"] for said in (one, two, three)} == {process.pid}
            assert {said["edition"] for said in (one, two, three)} == {edition}
            assert {said["node"] for said in (one, two, three)} == {"Ann"}
            assert failed[0] == unknown[0] == 2
            assert "ZeroDivisionError" in failed[1]
            assert "no luck" in failed[1]
        (row,) = [row for row in running(folder) if "fedfill.deployment.worker" in row]
        assert row.endswith(str(folder / "flower" / "node0")), "nothing that others may not know is on its command line"

        process.kill()  # one that was killed is replaced, as soon as somebody looks
        process.wait()
        federation.check()
        assert federation.workers[0] is not None
        assert federation.workers[0].pid != process.pid
        assert {said["process"] for said in count(federation, tmp_path, "third") if isinstance(said, dict)} == {
            federation.workers[0].pid
        }

        federation.workers[0].kill()
        federation.workers[0].wait()
        federation.workers[0] = federation._launch("worker0", sys.executable, "-c", "raise SystemExit('no torch')")
        federation.workers[0].wait()
        with refused("engine", "the worker of SuperNode 0", "status 1", "no torch", "worker0.log"):
            federation.check()
    assert not running(folder)


def test_a_worker_ends_with_its_owner_whatever_becomes_of_the_others(tmp_path: Path) -> None:
    """Nobody else is there to stop it, and it has not met its SuperNode yet."""
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    words = [sys.executable, "-P", "-m", "fedfill.deployment.worker", "127.0.0.1:9", str(owner.pid), str(tmp_path)]
    program = subprocess.Popen(words, start_new_session=True)
    try:
        time.sleep(1)
        assert program.poll() is None
        owner.kill()
        owner.wait()
        assert program.wait(60) == 0
    finally:
        program.kill()
        program.wait()
    wait_until_gone(tmp_path)
    assert not list(tmp_path.iterdir()), "no socket, no token, nothing"


class Replaced(Exception):
    """In place of a fresh Python."""


def test_a_task_that_was_given_up_and_a_run_that_is_new_get_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    tasks: list[tuple[str, int] | Exception] = []
    done: list[str] = []

    def acquire(request: Any) -> Any:
        assert list(request.supported_task_types) == ["flwr-clientapp"]
        task = tasks.pop(0)
        if isinstance(task, Exception):
            raise task
        return SimpleNamespace(token=task[0], task=SimpleNamespace(run_id=task[1]))

    def do(address: str, token: str) -> int:
        done.append(token)
        if token == "given up":
            raise KeyboardInterrupt
        return int(token[0])

    def replace(program: str, words: list[str]) -> None:
        found.append((program, words, os.environ.get(worker._TASK)))
        raise Replaced

    monkeypatch.setattr(worker, "_connect", lambda address: SimpleNamespace(AcquireTask=acquire))
    monkeypatch.setattr(worker, "_do", do)
    monkeypatch.setattr(worker, "_leave_with", lambda owner: None)
    monkeypatch.setattr(worker, "disable_process_dumping", lambda strict: None)
    monkeypatch.setattr(worker, "POLL", 0.0)
    monkeypatch.setattr("os.execv", replace)
    monkeypatch.delenv(worker._TASK, raising=False)

    tasks += [httpx.ConnectError("not up yet"), ("", 0), ("1 a", 1), ("1 b", 1), ("2 a", 2)]
    with pytest.raises(Replaced):
        worker.serve("host:1", 1)
    assert done == ["1 a", "1 b"]
    assert found == [(sys.executable, [sys.executable, *sys.orig_argv[1:]], "2 a")]

    tasks += [("given up", 2)]  # the fresh one begins with the task that the last one had fetched
    with pytest.raises(Replaced):
        worker.serve("host:1", 1)
    assert done[2:] == ["2 a", "given up"]
    assert found[1][2] is None
    assert worker._TASK not in os.environ


def test_a_supernode_of_a_rehearsal_looks_for_messages_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own loop, without a SuperLink; this fails where another release of Flower pauses in another way."""
    pauses: list[float] = []

    @contextmanager
    def connection(**options: Any) -> Iterator[Any]:
        yield (1, lambda: None, *[None] * 6)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        raise Replaced

    monkeypatch.setattr(start_client_internal, "time", start_client_internal.time)  # put back afterwards
    monkeypatch.setattr(start_client_internal, "_init_connection", connection)
    monkeypatch.setattr(start_client_internal, "register_signal_handlers", lambda **options: None)
    supernode.look_often()
    monkeypatch.setattr(time, "sleep", pause)
    with pytest.raises(Replaced):
        start_client_internal.start_client_internal(
            state_factory=NodeStateFactory(ObjectStoreFactory()), server_address="", node_config={}, isolation="process"
        )
    assert pauses == [supernode.LOOK]
    assert supernode.LOOK < 3
