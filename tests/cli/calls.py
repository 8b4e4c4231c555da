"""Calls of the command line, and what a refusal looks like."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from fedfill.cli import app

TINY = ["--clients", "4", "--rounds", "1", "--set", "local_epochs=1"]


def fedfill_(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def sha(result: Result) -> str:
    return next(line for line in result.stdout.splitlines() if "SHA-256" in line)


def refused(words: Sequence[str], setting: str) -> str:
    """One sentence about this setting, exit code 2, and nothing written; returns the sentence."""
    before = _tree(Path())
    result = fedfill_(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert re.match(rf"fedfill: {re.escape(setting)}(?!\w)", result.stderr), result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("\n")
    assert _tree(Path()) == before
    return result.stderr.removeprefix("fedfill: ").rstrip("\n")


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}
