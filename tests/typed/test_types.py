"""What type checkers know of the public functions: a wrong keyword is an error, and the right ones are those that run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tools.options import TARGET, text

import fedfill
from fedfill import options
from fedfill.algorithms import known_algorithms
from fedfill.experiment.settings import INCIDENTAL, PLACES, TABLES, Experiment

ROOT = Path(__file__).parents[2]
CALLS = Path(__file__).with_name("calls.py")


def wrong() -> list[int]:
    return [number for number, line in enumerate(CALLS.read_text().splitlines(), 1) if line.endswith("# wrong")]


def test_the_keywords_are_those_of_this_version() -> None:
    """Where this fails: python tools/options.py."""
    written = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"],
        input=text(), text=True, capture_output=True, cwd=ROOT, check=True,
    ).stdout  # fmt: skip
    assert TARGET.read_text() == written


def test_the_keywords_are_all_that_can_be_given() -> None:
    named = {"algorithm", "data", "partition", "model"}
    fields = Experiment.model_fields.keys() - TABLES - named
    settings = {
        name
        for kind in known_algorithms().values()
        if kind.__module__.startswith("fedfill.")
        for name in kind.model_fields
    }
    assert fields | settings <= set(options.Options.__annotations__)
    assert set(options.Options.__annotations__) - set(options.Shared.__annotations__) == {"seed"}
    assert set(options.Changes.__annotations__) == (INCIDENTAL | PLACES) - {"workers", "device", "data_dir"}
    for table in (options.Options, options.Shared, options.Changes):
        assert not table.__required_keys__


@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_a_wrong_keyword_is_a_type_error_and_a_right_one_is_none(checker: str, tmp_path: Path) -> None:
    if checker == "mypy":
        words = ["mypy", "--no-error-summary", "--no-pretty", str(CALLS)]
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT)
        found = {int(line) for line in re.findall(r"calls\.py:(\d+): error:", done.stdout)}
        output = done.stdout + done.stderr
    else:
        pytest.importorskip("basedpyright")
        settings: dict[str, Any] = {
            "include": [str(CALLS)],
            "extraPaths": [str(ROOT / "src")],
            "typeCheckingMode": "standard",
        }
        (tmp_path / "pyright.json").write_text(json.dumps(settings))
        words = ["basedpyright", "-p", str(tmp_path / "pyright.json"), "--outputjson", "--pythonpath", sys.executable]
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT)
        output = done.stdout + done.stderr
        found = {entry["range"]["start"]["line"] + 1 for entry in json.loads(done.stdout)["generalDiagnostics"]}
    assert sorted(found) == wrong(), output[:5000]


def test_all_public_names_are_listed_before_they_are_imported() -> None:
    code = "import sys, fedfill; print(*dir(fedfill)); assert 'torch' not in sys.modules"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(fedfill.__all__) <= set(listed)
    for name in fedfill.__all__:
        assert getattr(fedfill, name) is not None
