"""Stops the processes of a federation on this host; as a program, once whoever started it is gone.

Every process leads a group of its own, and a ``.pid`` file in the federation's folder names it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

GRACE = 5.0
"""Seconds to end politely; Flower's programs end themselves by force after as long."""
TICK = 0.05


def stop(folder: Path, children: Iterable[subprocess.Popen[bytes]] = ()) -> None:
    """Stop what the ``.pid`` files of a folder name, and all that it started; the warden last, so that it outlives a kill."""
    groups = {}
    for file in folder.glob("*.pid"):
        with suppress(ValueError):  # an empty file: whoever wrote it was killed just then
            groups[file.stem] = int(file.read_text())
    warden = groups.pop("warden", os.getpid())
    for kind in (signal.SIGTERM, signal.SIGKILL):
        signalled = send(groups.values(), kind, folder)
        deadline = time.monotonic() + GRACE
        while _alive(signalled) and time.monotonic() < deadline:
            time.sleep(TICK)
            for child in children:
                child.poll()
    if warden != os.getpid():
        signalled = send([warden], signal.SIGKILL, folder)
        while _alive(signalled):
            time.sleep(TICK)
    for file in folder.glob("*.pid"):
        file.unlink(missing_ok=True)


def send(groups: Iterable[int], kind: signal.Signals, folder: Path) -> set[int]:
    """Signal process groups, and tell which; not those whose number now belongs to a process that is not the folder's."""
    signalled = set()
    for group in groups:
        command = command_line(group)
        # a group outlives its leader, and its number is not given to another process as long as it does
        if not command or str(folder) in command:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, kind)
                signalled.add(group)
    return signalled


def command_line(pid: int) -> str:
    """The command line of a process; empty where it has ended."""
    if not Path("/proc/self/cmdline").exists():
        return subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True).stdout
    command, deadline = "", time.monotonic() + GRACE
    with suppress(OSError):
        # a program that is just being started runs, and has no command line yet
        while not command and _state(Path(f"/proc/{pid}/stat"))[0] not in "ZX":
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if not command and time.monotonic() > deadline:  # one of the kernel's own threads never has one
                return "nameless"
            time.sleep(0 if command else TICK)
    return command


def _state(stat: Path) -> tuple[str, int]:
    """The state letter of a process and the number of its group, of its ``/proc/<pid>/stat``."""
    state, _, group, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
    return state, int(group)


def _alive(groups: Iterable[int]) -> set[int]:
    """Which process groups have a member that runs, and does not merely wait for its parent to notice its end."""
    wanted, found = set(groups), set()
    if Path("/proc/self/stat").exists():
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, number = _state(stat)
                if state not in "ZX":
                    found.add(number)
        return wanted & found
    for group in wanted:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, 0)
            found.add(group)
    return found


def _guard(owner: int, folder: Path) -> None:
    """The warden: once the program that started it is gone, stop what it left behind."""
    while os.getppid() == owner:
        time.sleep(4 * TICK)
    stop(folder)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), Path(sys.argv[2]))
