"""The examples of docs/own-parts.md run as they stand."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from tests.cli.calls import fedfill_

from fedfill.algorithms import known_algorithms
from fedfill.algorithms._registry import registered

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "own-parts.md").read_text()


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    net, by_size, python = blocks(PAGE, "python")
    algorithm = blocks((ROOT / "CONTRIBUTING.md").read_text(), "python")[0]
    Path("my.py").write_text(f"{algorithm}\n{net}\n{by_size}")
    known_algorithms()
    known = dict(registered)
    quick = ["--clients", "3", "--rounds", "1", "--set", "local_epochs=1"]
    for line in blocks(PAGE, "sh")[0].splitlines():
        words = line.split()
        more = {"run": quick, "compare": [*quick, "--seeds", "0"], "resume": []}[words[1]]
        words = ["2" if word == "100" else word for word in words]
        done = fedfill_(*words[1:], *more)
        assert done.exit_code == 0, (line, done.output)
    names: dict[str, object] = {"__name__": "page"}
    exec(net + by_size, names)
    exec(python.replace("rounds=2", "rounds=1, local_epochs=1"), names)
    registered.clear()
    registered.update(known)


def test_each_group_of_entry_points_is_named_as_in_the_code() -> None:
    groups = tomllib.loads(blocks(PAGE, "toml")[0])["project"]["entry-points"]
    assert set(groups) == {"fedfill.algorithms", "fedfill.models", "fedfill.partitions"}
