"""A Flower federation on this host: its SuperLink and SuperNodes, started, watched and stopped as one.

Everything lies in one folder: keys, logs, and a ``.pid`` file for each process. Every process leads a group of its own, so
that the processes which it starts itself are stopped with it. Should this program be killed, a small warden, which is
`fedfill.deployment.warden` run as a program, reads the ``.pid`` files and stops the rest; should that be killed too, the next federation
in the same folder does. Flower itself is never imported here, only run.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout

from fedfill.deployment.commands import START, environment_of, flwr, last_words, program
from fedfill.deployment.keys import HOST, make_certificate, make_node_key
from fedfill.deployment.warden import TICK, send, stop
from fedfill.errors import FedfillError

Setting = str | int | float | bool
"""What Flower's run configuration and node configuration may hold."""

# what Flower's processes log
_TAKEN = "address already in use"
_ONLINE = re.compile(r"SuperNode ID: (\d+)")
_STILL_ONLINE = "Failed to activate SuperNode"


class LocalFederation:
    """A running federation; made by ``local_federation``.

    Args:
        folder: Holds everything, as an absolute path.
        nodes: The node configuration of each SuperNode.

    Attributes:
        superlink: The process that carries the messages.
        supernodes: One process for each node, None while it is killed.
        workers: The process of each node that runs its apps, for all messages of a run.
        connection: Name of the SuperLink for the ``flwr`` command.
        run: Of the app that it was started with, or None.
        environment: For every Flower program that is to meet this federation.
    """

    connection = "local"
    superlink: subprocess.Popen[bytes]
    run: int | None = None

    def __init__(self, folder: Path, nodes: Sequence[Mapping[str, Setting]]) -> None:
        self.folder = folder
        self.environment: Mapping[str, str] = environment_of(folder / "flower" / "superlink")
        self.supernodes: list[subprocess.Popen[bytes] | None] = [None] * len(nodes)
        self.workers: list[subprocess.Popen[bytes] | None] = [None] * len(nodes)
        self._nodes = nodes
        self._ports = [0] * len(nodes)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logged: dict[str, int] = {}

    def start(self, app: Path | None = None) -> None:
        """Start everything, and a run of an app if there is one, and wait until every SuperNode is online."""
        folder = self.folder
        shutil.rmtree(folder / "flower", ignore_errors=True)  # a kill may have left half an app there
        self._warden = self._launch(
            *("warden", sys.executable, "-P", "-m", "fedfill.deployment.warden", str(os.getpid()), str(folder)),
        )
        for k in range(len(self._nodes)):  # first: what they load takes longest
            self._ports[k] = _free_port()
            self._start_worker(k)
        self.superlink, self._address = self._start_superlink()
        # Flower's own choice, a SuperExec that the SuperLink starts, leaves the SuperLink's process group
        self._superexec = self._launch(
            *("serverapp", program("flower-superexec"), "--runtime-api-address", self._address),
            *("--root-certificates", str(folder / "ca.crt"), "--parent-pid", str(self.superlink.pid)),
        )
        with ThreadPoolExecutor(4) as pool:  # each call spends a second on imports
            run = pool.submit(self.submit, app) if app is not None else None  # the server waits for its hosts
            list(pool.map(self._register, range(len(self._nodes))))
            for k in range(len(self._nodes)):
                self._start_supernode(k)
        self.run = run.result() if run is not None else None
        for k in range(len(self._nodes)):
            self.wait_for_node(k)
        self.check()

    def submit(self, app: Path, run_config: Mapping[str, Setting] | None = None) -> int:
        """Start a run of a Flower app."""
        config = self.folder / "run.toml"  # values in a file need no quoting
        config.write_bytes(tomli_w.dumps(dict(run_config or {})).encode())
        answer = self._flwr("run", str(app.resolve()), self.connection, "--run-config", str(config))
        return int(answer["run-id"])

    def status(self, run_id: int) -> tuple[str, str]:
        """How a run is doing."""
        (run,) = self._flwr("list", self.connection, "--run-id", str(run_id))["runs"]
        details = str(run["status-details"])
        return str(run["status"]), "" if details == "N/A" else details

    def start_node(self, k: int, wait: bool = True) -> None:
        """Start a SuperNode and its worker, with the key that it had before; one that still runs is killed."""
        self.kill_node(k)
        self._ports[k] = _free_port()
        self._start_worker(k)
        self._start_supernode(k)
        if wait:
            self.wait_for_node(k)

    def wait_for_node(self, k: int) -> int:
        """Wait until a SuperNode is online; start it again as long as the SuperLink has not missed its killed forerunner."""
        name, deadline = f"node{k}", time.monotonic() + START
        while True:
            node = self.supernodes[k]
            if node is None or not self._wait(node, lambda: _ONLINE.search(self._log(name)) is not None):
                log = self._log(name)
                if time.monotonic() > deadline or not (_TAKEN in log or _STILL_ONLINE in log):
                    raise self._failure(f"SuperNode {k}", name, node)
                time.sleep(1)
                self.start_node(k, wait=False)
            elif found := _ONLINE.search(self._log(name)):
                return int(found[1])

    def kill_node(self, k: int) -> None:
        """Kill a SuperNode and what it started, with no warning, as a power cut would."""
        killed = [process for process in (self.supernodes[k], self.workers[k]) if process is not None]
        self.supernodes[k] = self.workers[k] = None
        send([process.pid for process in killed], signal.SIGKILL, self.folder)
        for process in killed:
            process.wait()

    def check(self) -> None:
        """Complain where the federation can't go on."""
        for process in self._processes:
            process.poll()  # its own children wait for it to leave the process table before they end themselves
        for what, name, process in (
            ("the warden", "warden", self._warden),
            ("the SuperLink", "superlink", self.superlink),
            ("the SuperExec of the SuperLink", "serverapp", self._superexec),
        ):
            if process.poll() is not None:
                raise self._failure(what, name, process)
        for k, worker in enumerate(self.workers):
            if worker is None or (code := worker.poll()) is None or self._has_ended(k):
                continue
            if code >= 0:
                raise self._failure(f"the worker of SuperNode {k}", f"worker{k}", worker)
            self._start_worker(k)  # killed in the middle of a message: that one is lost, the next ones are not
        if self.supernodes and all(map(self._has_ended, range(len(self.supernodes)))):
            last = len(self.supernodes) - 1
            raise self._failure("every SuperNode", f"node{last}", self.supernodes[last])

    def stop(self) -> None:
        """Stop everything that was started, and wait until it is gone."""
        stop(self.folder, self._processes)
        for process in self._processes:
            process.wait()

    def _start_superlink(self) -> tuple[subprocess.Popen[bytes], str]:
        """The SuperLink, once it accepts connections, and its address."""
        for again in (True, False):
            port = _free_port()
            superlink = self._launch(
                *("superlink", program("flower-superlink"), "--host", HOST, "--port", str(port)),
                *("--ssl-ca-certfile", str(self.folder / "ca.crt"), "--ssl-certfile", str(self.folder / "server.crt")),
                *("--ssl-keyfile", str(self.folder / "server.key"), "--enable-supernode-auth"),
                *("--isolation", "process", "--disable-runtime-dependency-installation"),
            )
            if self._wait(superlink, partial(_answers, port, self.folder / "ca.crt")):
                break
            if not (again and _TAKEN in self._log("superlink")):
                raise self._failure("the SuperLink", "superlink", superlink)
        address = f"{HOST}:{port}"
        connection = {"address": address, "root-certificates": str(self.folder / "ca.crt")}
        settings = {"superlink": {"default": self.connection, self.connection: connection}}
        home = Path(self.environment["FLWR_HOME"])
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_bytes(tomli_w.dumps(settings).encode())
        return superlink, address

    def _start_supernode(self, k: int) -> None:
        name, home = f"node{k}", self.folder / "flower" / f"node{k}"
        shutil.rmtree(home, ignore_errors=True)
        make_node_key(self.folder / name)
        config = self.folder / f"{name}.toml"
        config.write_bytes(tomli_w.dumps(dict(self._nodes[k])).encode())
        self.supernodes[k] = self._launch(
            *(name, sys.executable, "-P", "-m", "fedfill.deployment.supernode"),
            *("--superlink", self._address, "--isolation", "process"),
            *("--root-certificates", str(self.folder / "ca.crt"), "--host", HOST, "--port", str(self._ports[k])),
            *("--auth-supernode-private-key", str(self.folder / f"{name}.key"), "--node-config", str(config)),
            home=home,
        )

    def _start_worker(self, k: int) -> None:
        """Start the process that runs a SuperNode's apps; it waits for the SuperNode, and ends with this program."""
        self.workers[k] = self._launch(
            *(f"worker{k}", sys.executable, "-P", "-m", "fedfill.deployment.worker"),
            *(f"{HOST}:{self._ports[k]}", str(os.getpid()), str(self.folder / "flower" / f"node{k}")),
        )

    def _has_ended(self, k: int) -> bool:
        """Whether a node's SuperNode was killed or ended by itself."""
        node = self.supernodes[k]
        return node is None or node.poll() is not None

    def _register(self, k: int) -> None:
        """Make a node's key known to the SuperLink."""
        self._flwr("supernode", "register", str(self.folder / f"node{k}.pub"), self.connection, "--name", f"node{k}")

    def _launch(self, name: str, *command: str, home: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a process that leads a group of its own and writes to a log of its own."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._logged[name] = log.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.environment, **({"FLWR_HOME": str(home)} if home else {})},
                cwd=self.folder,
                start_new_session=True,
            )
        self._processes.append(process)
        (self.folder / f"{name}.pid").write_text(str(process.pid))
        return process

    def _wait(self, process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> bool:
        """Whether a process became ready, before it ended or took too long."""
        deadline = time.monotonic() + START
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(TICK)
        return True

    def _log(self, name: str) -> str:
        """What a process has logged since it was last started."""
        with (self.folder / f"{name}.log").open("rb") as log:
            log.seek(self._logged[name])
            return log.read().decode(errors="replace")

    def _failure(self, what: str, name: str, process: subprocess.Popen[bytes] | None) -> FedfillError:
        """The sentence about a process that failed."""
        code = process and process.poll()
        found = f"ended with status {code}" if code is not None else "was killed" if process is None else "is not ready"
        return FedfillError(
            f"engine: {what} of the Flower federation {found}: {last_words(self._log(name))}; "
            f"see {self.folder / name}.log"
        )

    def _flwr(self, *command: str) -> dict[str, Any]:
        """What a ``flwr`` command answers about this federation."""
        return flwr(*command, environment=self.environment)


@contextmanager
def local_federation(
    folder: Path, nodes: Sequence[Mapping[str, Setting]], app: Path | None = None
) -> Iterator[LocalFederation]:
    """Run a SuperLink and SuperNodes on this host, over TLS, with a key for each node.

    Args:
        folder: Holds keys, logs and all else that the federation needs; keys in it are used again, and what an earlier
            federation in it left running is stopped.
        nodes: The node configuration of each SuperNode.
        app: A Flower app to run, which is submitted while SuperNodes come up.

    Yields:
        The federation, with every SuperNode online. All of its processes are gone afterwards.

    Raises:
        FedfillError: Where Flower is not installed, a process does not come up, or the folder is in use.
    """
    if os.name != "posix":
        raise FedfillError("engine: a Flower federation on one host needs Linux or macOS")
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout:
        raise FedfillError(f"folder: a federation runs in {folder}; stop it or choose another folder") from None
    except OSError as error:
        raise FedfillError(f"folder: can't use {folder} ({error.strerror or error}); choose another one") from error
    with lock:
        stop(folder)
        make_certificate(folder)
        for k in range(len(nodes)):
            make_node_key(folder / f"node{k}")
        federation = LocalFederation(folder, nodes)
        try:
            federation.start(app)
            yield federation
        finally:
            federation.stop()


def _free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _answers(port: int, authority: Path) -> bool:
    """Whether the server with our certificate, and no other, answers at this port."""
    try:
        context = ssl.create_default_context(cafile=authority)
        with (
            socket.create_connection((HOST, port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=HOST),
        ):
            return True
    except OSError:
        return False
