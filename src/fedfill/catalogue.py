"""What there is by name, found without importing it: an algorithm's name and purpose stand in its file."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path

from fedfill.errors import FedfillError, did_you_mean
from fedfill.own_parts import entry_points, is_reference


@functools.cache
def built_in() -> dict[str, str]:
    """When to use each of fedfill's algorithms, by name."""
    found = {}
    for file in sorted((Path(__file__).parent / "algorithms").glob("[!_]*.py")):
        for node in ast.parse(file.read_bytes()).body:
            if isinstance(node, ast.ClassDef) and (name := _name(node)):
                found[name] = when(ast.get_docstring(node))
    return dict(sorted(found.items()))


def _name(node: ast.ClassDef) -> str:
    """The name that a class gives itself; "" for none."""
    for line in node.body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        value = getattr(line, "value", None)
        if isinstance(target, ast.Name) and target.id == "name" and isinstance(value, ast.Constant):
            return str(value.value)
    return ""


def when(text: str | None) -> str:
    """When to use something: the line of its docstring that begins with "Use it"; without one, the first."""
    lines = inspect.cleandoc(text or "").splitlines() or [""]
    return next((line for line in lines if line.startswith("Use it ")), lines[0])


def require_algorithm(name: str) -> None:
    """Refuse what is no algorithm's name, and let references pass, whose files are for others to read.

    Args:
        name: Such as ``fedavg`` or ``my.py:HeavyBall``, without settings behind it.

    Raises:
        FedfillError: Where there is none.
    """
    known = built_in()
    if name not in known and not is_reference(name) and name not in (offered := entry_points("algorithms")):
        raise FedfillError(f"algorithm: unknown name '{name}'; {did_you_mean(name, {*known, *offered})}")
