"""Models of algorithms that keep records of their own are read by a process that has not run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedfill


@pytest.mark.parametrize("algorithm", ["feddpms", "naivemix"])
def test_a_new_process_reads_the_model(algorithm: str, tmp_path: Path) -> None:
    result = fedfill.run(
        algorithm, data="digits", partition="dirichlet:0.5", clients=3, rounds=3, local_epochs=1, data_fraction=0.2,
        out=tmp_path / "run", quiet=True,
    )  # fmt: skip
    assert result.directory is not None
    words = "import sys, fedfill; print(type(fedfill.load(sys.argv[1])).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", words, str(result.directory)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "Model"), done.stderr
