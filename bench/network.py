"""A federation of three hosts in network namespaces of their own, one of which loses its network for a minute.

Everything is what `fedfill deploy init` says to type: certificates, keys, a SuperLink over TLS, SuperNodes that it knows by their
keys, a process for each message. Only the machine is the same. Needs root, Linux's ``ip``, ``openssl`` and ``ssh-keygen``.
Prints each round's seconds and who was missing, and then what was asked of the record.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

HOSTS = 3
SERVER = "10.77.0.1"
BIN = Path(sys.executable).parent
QUIET = ("FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_UPDATE_CHECK=1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1")


def sh(command: str, where: Path | None = None) -> str:
    """What a command says; the end of this program where it fails."""
    done = subprocess.run(command, shell=True, cwd=where, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{command}\n{done.stdout}{done.stderr}")
    return done.stdout


def namespaces(stack: ExitStack) -> None:
    """A network for each party: one bridge, and nothing else, joins them."""
    for name in ("server", *(f"host{k}" for k in range(HOSTS))):
        sh(f"ip netns add ff-{name}")
        stack.callback(sh, f"ip netns del ff-{name}")
        sh(f"ip -n ff-{name} link set lo up")
    sh("ip -n ff-server link add hub type bridge && ip -n ff-server link set hub up")
    sh(f"ip -n ff-server addr add {SERVER}/24 dev hub")
    for k in range(HOSTS):
        sh(f"ip -n ff-server link add to{k} type veth peer name net netns ff-host{k}")
        sh(f"ip -n ff-server link set to{k} master hub up")
        sh(f"ip -n ff-host{k} addr add 10.77.0.{10 + k}/24 dev net && ip -n ff-host{k} link set net up")


def start(stack: ExitStack, party: str, home: Path, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A program of a party, in its network, with a home of its own."""
    home.mkdir(parents=True, exist_ok=True)
    # Flower's programs start others by name
    environment = [*QUIET, f"HOME={home}", f"FLWR_HOME={home}/.flwr", f"PATH={BIN}:{os.environ['PATH']}"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["ip", "netns", "exec", f"ff-{party}", "env", *environment, *words],
            stdout=file, stderr=subprocess.STDOUT, cwd=home, start_new_session=True,
        )  # fmt: skip

    def stop() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    stack.callback(stop)
    return process


def certificates(keys: Path) -> None:
    """An authority, a certificate for the server's address, and a key for each host."""
    keys.mkdir()
    sh(
        "openssl ecparam -name secp384r1 -genkey -noout -out ca.key && openssl req -x509 -new -key ca.key -sha384 -days 2 "
        "-subj '/CN=federation CA' -addext keyUsage=critical,keyCertSign -out ca.crt && "
        "openssl ecparam -name secp384r1 -genkey -noout -out server.key && "
        "openssl req -new -key server.key -subj /CN=federation -out server.csr && "
        f"printf 'subjectAltName=IP:{SERVER}' > san.txt && openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key "
        "-CAcreateserial -days 2 -sha384 -extfile san.txt -out server.crt",
        keys,
    )
    for k in range(HOSTS):
        sh(f"ssh-keygen -q -t ecdsa -b 384 -N '' -f node{k}.key && mv node{k}.key.pub node{k}.pub", keys)


def rounds_of(run: Path) -> list[dict[str, Any]]:
    """What stands in a run's record so far."""
    path = run / "rounds.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def wait_for(what: Any, seconds: float, why: str) -> None:
    """Until something is so; the end of this program where it is not in time."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            raise SystemExit(why)
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--before", type=int, default=5, help="rounds until host 1 loses its network")
    parser.add_argument("--away", type=float, default=60.0, help="seconds without it")
    parser.add_argument(
        "--keep", type=Path, help="folder for everything that the federation leaves; default: a temporary one"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that everything is undone
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="network-")))
        folder.mkdir(parents=True, exist_ok=True)
        run, app, keys, home = folder / "run", folder / "app", folder / "keys", folder / "server"
        namespaces(stack)
        certificates(keys)
        settings = f"--clients {HOSTS} --data digits --rounds {options.rounds} --set local_epochs=1"
        sh(f"{BIN}/fedfill deploy init {app} fedavg {settings}")
        config = app / "pyproject.toml"
        own = [line for line in config.read_text().splitlines() if not line.startswith("out = ")]
        own.insert(own.index("[tool.flwr.app.config]") + 1, f'out = "{run}"')
        config.write_text("\n".join(own) + "\n")
        start(
            stack, "server", home,
            ["flower-superlink", "--host", SERVER, "--port", "8000", "--ssl-ca-certfile", f"{keys}/ca.crt", "--ssl-certfile",
             f"{keys}/server.crt", "--ssl-keyfile", f"{keys}/server.key", "--enable-supernode-auth",
             "--disable-runtime-dependency-installation", "--database", f"{home}/superlink.db"],
            folder / "superlink.log",
        )  # fmt: skip
        connection = f'[superlink.federation]\naddress = "{SERVER}:8000"\nroot-certificates = "{keys}/ca.crt"\n'
        (home / ".flwr").mkdir()
        (home / ".flwr" / "config.toml").write_text(connection)
        words = ["ip", "netns", "exec", "ff-server", "env", *QUIET, f"HOME={home}", f"FLWR_HOME={home}/.flwr"]
        flwr = f"{shlex.join(words)} PATH={BIN}:$PATH {BIN}/flwr"
        answers = f"{flwr} supernode list federation > {folder}/list.log 2>&1"
        wait_for(lambda: subprocess.run(answers, shell=True).returncode == 0, 120, "the SuperLink did not come up")
        for k in range(HOSTS):
            sh(f"{flwr} supernode register {keys}/node{k}.pub federation --name host{k}")
            node = f'client={k} partition-id={k} num-partitions={HOSTS} state-dir="{folder}/host{k}/state" noise="seed"'
            start(
                stack, f"host{k}", folder / f"host{k}",
                ["flower-supernode", "--superlink", f"{SERVER}:8000", "--root-certificates", f"{keys}/ca.crt",
                 "--auth-supernode-private-key", f"{keys}/node{k}.key", "--node-config", node],
                folder / f"host{k}.log",
            )  # fmt: skip
        began = time.monotonic()
        command = ["flwr", "run", str(app), "federation", "--stream"]
        running = start(stack, "server", home, command, folder / "run.log")
        patience = 120.0 * options.rounds

        def rounds_or_an_end(number: int) -> bool:
            return running.poll() is not None or len(rounds_of(run)) >= number

        wait_for(lambda: rounds_or_an_end(options.before), patience, f"no {options.before} rounds in time")
        if running.poll() is not None:
            raise SystemExit((folder / "run.log").read_text())
        sh("ip -n ff-host1 link set net down")
        gone, seen = time.monotonic(), len(rounds_of(run))
        time.sleep(options.away)
        sh("ip -n ff-host1 link set net up")
        back = time.monotonic()
        wait_for(lambda: rounds_or_an_end(options.rounds), patience, "the run did not end")
        took = time.monotonic() - began
        records = rounds_of(run)
        for number, record in enumerate(records, 1):
            lost = {entry["client"]: entry["reason"] for entry in record.get("lost", [])}
            print(f"round {number:2}: {record['seconds']:6.1f} s, missing: {lost or 'nobody'}")
        usual = statistics.median(r["seconds"] for r in records[1 : options.before])
        longest = max(r["seconds"] for r in records)
        missed = [n for n, r in enumerate(records, 1) if r.get("lost")]
        print(
            f"host 1 without network for {back - gone:.0f} s after round {seen}; replies lost in rounds {missed}; a usual round "
            f"{usual:.1f} s, the longest {longest:.1f} s; the whole run {took:.0f} s"
        )


if __name__ == "__main__":
    main()
