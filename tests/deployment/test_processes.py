from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.deployment.nodes import dismiss_node
from tests.helpers import refused

from fedfill.deployment import commands, keys, processes, warden
from fedfill.deployment.processes import LocalFederation, local_federation

APP = {
    "pyproject.toml": """
[project]
name = "roll-call"
version = "1.0.0"
dependencies = ["flwr>=1.41"]
[tool.flwr.app]
publisher = "fedfill"
components = { serverapp = "roll_call:server", clientapp = "roll_call:client" }
config = { out = "", mood = "" }
""",
    "roll_call.py": """
import time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()

@client.query("who")
def who(message, context):
    return Message(RecordDict({"who": ConfigRecord({"name": context.node_config["name"]})}), reply_to=message)

@server.main()
def main(grid, context):
    if context.run_config["mood"] == "bad":
        raise ValueError("no roll call today")
    asked = set(grid.push_messages([Message(RecordDict(), n, "query.who") for n in grid.get_node_ids()]))
    replies = []
    while asked:
        replies += grid.pull_messages(asked)
        asked -= {reply.metadata.reply_to_message_id for reply in replies}
        time.sleep(0.1)
    names = [reply.content["who"]["name"] if reply.has_content() else reply.error.reason for reply in replies]
    Path(context.run_config["out"]).write_text(chr(10).join(sorted(names)))
""",
}


@pytest.fixture
def app(tmp_path: Path) -> Path:
    folder = tmp_path / "app"
    folder.mkdir()
    for name, text in APP.items():
        (folder / name).write_text(text)
    return folder


def running(folder: Path) -> list[str]:
    """The command lines of everything that runs in the process groups of a federation, or mentions its folder."""
    table = subprocess.run(
        ["ps", "-ww", "-A", "-o", "pid=,pgid=,stat=,command="], capture_output=True, text=True
    ).stdout
    rows = [line.split(None, 3) for line in table.splitlines()]
    groups = {pgid for _, pgid, _, *command in rows if str(folder) in " ".join(command)}
    return [" ".join(row) for row in rows if row[1] in groups and "Z" not in row[2]]


def wait_until_gone(folder: Path, patience: float = 20) -> None:
    deadline = time.monotonic() + patience
    while running(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(folder)


def finish(federation: LocalFederation, run: int) -> tuple[str, str]:
    for _ in range(60):
        status, details = federation.status(run)
        if status.startswith("finished"):
            break
    return status, details


def orphan(folder: Path, then: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Another program with a federation of one node, and what then runs in the folder."""
    script = f"""
import os, signal, sys, time
from pathlib import Path
from fedfill.deployment.processes import local_federation
with local_federation(Path({str(folder)!r}), [{{}}]) as federation:
    print("up", flush=True)
    {then}
    time.sleep(600)
"""
    program = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert program.stdout is not None
    with program.stdout:
        assert program.stdout.readline() == "up\n"
    return program, running(folder)


@pytest.mark.deploy
def test_a_federation_runs_an_app_and_leaves_nothing_running(
    tmp_path: Path, app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("a long name with spaces and 'quotes', " * 4).strip() / "federation"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1]])
        free = processes._free_port
        monkeypatch.setattr(processes, "_free_port", lambda: next(ports, None) or free())
        with local_federation(folder, [{"name": 'Ann\'s "node" = 0'}, {"name": "Bo"}]) as federation:
            assert len(running(folder)) >= 7, (
                "a warden, a SuperLink with its SuperExec, and two SuperNodes with a worker each"
            )
            with refused("folder", "a federation runs in"):
                local_federation(folder, []).__enter__()
            run = federation.submit(app, {"out": str(tmp_path / "the names")})
            assert finish(federation, run) == ("finished:completed", "")
            assert (tmp_path / "the names").read_text() == 'Ann\'s "node" = 0\nBo'
            federation.check()
            run = federation.submit(app, {"mood": "bad"})
            status, details = finish(federation, run)
            assert status == "finished:failed"
            assert "no roll call today" in details
            with refused("engine", "flwr run", "pyproject.toml"):
                federation.submit(tmp_path)
    assert not running(folder)
    assert not list(folder.glob("*.pid"))
    for key in ("server.key", "node0.key", "node1.key"):
        assert stat.S_IMODE((folder / key).stat().st_mode) == 0o600
    federation.superlink.wait(0)  # raises if it had not ended


@pytest.mark.deploy
def test_faults_are_told_and_everything_is_stopped(tmp_path: Path, app: Path) -> None:
    folder, keys = tmp_path / "f", {}

    def stumble() -> None:
        with local_federation(folder, [{"name": "Cy"}]):
            keys.update({name: (folder / name).read_bytes() for name in ("node0.key", "server.key", "ca.crt")})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stumble()
    assert not running(folder)

    def lose_everything() -> None:
        with local_federation(folder, [{"name": "Cy"}, {"name": "Di"}]) as federation:
            assert keys == {name: (folder / name).read_bytes() for name in keys}
            before = federation.wait_for_node(0)
            federation.kill_node(0)
            federation.check()  # one node is enough to go on
            dismiss_node(federation, 0)
            federation.start_node(0)
            assert federation.wait_for_node(0) != before
            run = federation.submit(app, {"out": str(tmp_path / "names")})
            assert finish(federation, run) == ("finished:completed", "")
            assert (tmp_path / "names").read_text() == "Cy\nDi"
            federation.kill_node(0)
            federation.kill_node(1)
            with refused("engine", "every SuperNode"):
                federation.check()
            os.killpg(federation.superlink.pid, signal.SIGKILL)
            federation.superlink.wait()
            federation.check()

    with refused("engine", "SuperLink", "-9", "superlink.log"):
        lose_everything()
    assert not running(folder)


@pytest.mark.deploy
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_a_program_that_is_killed(tmp_path: Path, kind: signal.Signals) -> None:
    program, started = orphan(tmp_path / "f", "")
    assert len(started) >= 5
    program.send_signal(kind)
    program.wait(30)
    wait_until_gone(tmp_path / "f")
    assert not list((tmp_path / "f").glob("*.pid"))


@pytest.mark.deploy
def test_what_is_left_behind_is_stopped_by_the_next_federation_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    program, started = orphan(folder, "os.kill(federation._warden.pid, 9); os.kill(os.getpid(), 9)")
    program.wait(30)
    time.sleep(1)
    left = running(folder)
    assert len(left) >= 3, "nobody was left to stop them"
    assert not [row for row in left if "fedfill.deployment.worker" in row], "who has read data ends by itself"
    with local_federation(folder, []):
        old = {row.split()[0] for row in started}
        assert not old & {row.split()[0] for row in running(folder)}
    assert not running(folder)


@pytest.mark.deploy
def test_a_superlink_that_cannot_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    keys.make_certificate(tmp_path)
    (tmp_path / "server.crt").write_text("not a certificate")
    with refused("engine", "SuperLink", "superlink.log"):
        local_federation(tmp_path, []).__enter__()
    assert not running(tmp_path)


def test_a_pid_that_belongs_to_somebody_else_by_now_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    ours = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path)], start_new_session=True
    )
    (tmp_path / "superlink.pid").write_text(str(stranger.pid))
    (tmp_path / "node0.pid").write_text(str(ours.pid))
    (tmp_path / "node1.pid").write_text("")
    try:
        warden.stop(tmp_path, [ours])
        assert ours.wait(0) == -signal.SIGTERM
        assert stranger.poll() is None
        assert not list(tmp_path.glob("*.pid"))
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_that_is_just_being_started_has_not_ended() -> None:
    """For a moment after its start a program has no command line, as one has that has ended."""
    for _ in range(20):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        try:
            assert "time.sleep(60)" in warden.command_line(child.pid)
        finally:
            child.kill()
            child.wait()
        assert not warden.command_line(child.pid)


def test_what_ignores_a_polite_request_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warden, "GRACE", 0.5)
    script = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
os.write(1, b"up\\n")  # in one piece, whatever the other does
time.sleep(60)
"""
    stubborn = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert stubborn.stdout is not None
    with stubborn.stdout:
        assert [stubborn.stdout.readline(), stubborn.stdout.readline()] == ["up\n", "up\n"]
        (tmp_path / "node0.pid").write_text(str(stubborn.pid))
        assert len(running(tmp_path)) == 2
        warden.stop(tmp_path, [stubborn])
        assert not running(tmp_path)
        assert stubborn.wait(0) == -signal.SIGKILL


def test_flower_keeps_to_itself_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("FLWR_DISABLE_UPDATE_CHECK", raising=False)
    environment = commands.environment_of(Path("home"))
    assert environment["FLWR_TELEMETRY_ENABLED"] == environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert environment["NO_PROXY"] == "127.0.0.1,example.org"
    assert environment["FLWR_HOME"] == "home"


def test_flower_that_is_not_installed_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with refused("engine", "flower-superlink", "pip install 'fedfill[flower]'"):
        commands.program("flower-superlink")


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "it logged nothing"),
        ("\x1b[92mINFO \x1b[0m:   Starting\n\n", "INFO :   Starting"),
        (
            "ERROR :  Exit Code: 305\nIt failed to activate.\n\nFor more information, visit: <x>\nINFO:  Shutting down\n",
            "It failed to activate.",
        ),
        ("ERROR: a port is taken\n2026-11-20T13:21:00.065Z INFO [uvicorn.error] Finished\n", "ERROR: a port is taken"),
    ],
)
def test_the_last_words_of_a_log(log: str, words: str) -> None:
    assert commands.last_words(log) == words
