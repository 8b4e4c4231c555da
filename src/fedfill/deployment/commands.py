"""Flower's own programs: where they are, what environment they get, and what the ``flwr`` command answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from fedfill.deployment.keys import HOST
from fedfill.errors import FedfillError

START = 90.0
"""Seconds for a process to come up; two are usual, but a killed SuperNode is missed for up to sixty."""


def flwr(*command: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a ``flwr`` command."""
    words = [program("flwr"), *command, "--format", "json"]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=START, env=environment or environment_of()
        )
        said = done.stdout.decode(errors="replace")
        answer = (
            json.loads(said)
            if said.startswith("{")
            else {"error-message": last_words(done.stderr.decode(errors="replace") + said)}
        )
    except subprocess.TimeoutExpired:
        answer = {"error-message": f"no answer within {START:.0f} seconds"}
    if not answer.get("success"):
        reason = re.sub(r"^Using SuperLink: \S+ \(\S+\) ", "", " ".join(str(answer.get("error-message")).split()))
        raise FedfillError(f"engine: 'flwr {command[0]}' failed: {reason}")
    return cast("dict[str, Any]", answer)


def program(name: str) -> str:
    """The path of a program that comes with Flower."""
    path = shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        raise FedfillError(f"engine: flower needs the program {name}; install it with: pip install 'fedfill[flower]'")
    return path


def environment_of(home: Path | None = None) -> Mapping[str, str]:
    """The environment of Flower's programs: one thread each, and silent towards the world unless the user wants it else."""
    programs = str(Path(sys.executable).parent)  # Flower's programs find each other by name
    return {
        "OMP_NUM_THREADS": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "UV_OFFLINE": "1",
        **os.environ,
        **({"FLWR_HOME": str(home)} if home else {}),
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
        # a proxy is of no use on the way to this host
        **{name: ",".join(filter(None, [HOST, os.environ.get(name)])) for name in ("NO_PROXY", "no_proxy")},
    }


def last_words(log: str) -> str:
    """The last line of a log that tells something."""
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*m", "", log).splitlines()]
    told = [line for line in lines if line and not line.startswith("For more information")]
    bad = [line for line in told if not re.match(r"(\S+Z )?INFO\b", line)]
    return (bad or told or ["it logged nothing"])[-1]
