"""The Python of README.md runs as it stands."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert 0 <= names["result"].summary["accuracy"] <= 1
    if "comparison" in names:
        assert capsys.readouterr().out.count("feddpms (") == 1


def test_there_are_examples():
    assert len(EXAMPLES) == 2
