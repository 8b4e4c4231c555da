"""What identifies an experiment: two runs of one digest end with the same bits, and a run goes on with no other."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from fedfill import __version__, tree
from fedfill.experiment.settings import INCIDENTAL, PLACES
from fedfill.tree import Weights

_VOUCHED = {"fedfill", "torch", "pydantic", "builtins", "abc", "typing"}


def digest(
    experiment: Mapping[str, Any], algorithm: type, model: nn.Module, fingerprint: str, initial: Weights, *,
    version: str | None = None,
) -> str:  # fmt: skip
    """16 hexadecimal digits for an experiment: version, settings, data, initial weights and code of one's own, not where it runs."""
    # one that is none counts as absent: a new setting leaves the experiments that don't use it what they were
    settings = {k: value for k, value in experiment.items() if k not in INCIDENTAL | PLACES and value is not None}
    modules = list(model.modules())
    code = [repr(model), *_programs(algorithm, *map(type, modules)), *_values(modules)]
    identity = [version or __version__, settings, fingerprint, tree.sha256(initial), code]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _programs(*classes: type) -> list[str]:
    """The source and the constants of classes that neither fedfill nor torch vouches for, their bases included."""
    own = {base for kind in classes for base in kind.__mro__ if not _vouched(base)}
    found = []
    for kind in own:
        found.append(f"{kind.__qualname__}: {_source(kind)}")
        for name, value in vars(kind).items():
            # a function may come from elsewhere, and a class may have no source
            parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
            found += [
                f"{kind.__qualname__}.{name}: {_source(f) or _names(f.__code__)}"
                for f in parts
                if inspect.isfunction(f)
            ]
            if not name.startswith("__") and _is_plain(value):
                found.append(f"{kind.__qualname__}.{name} = {value!r}")
    return sorted(found)


def _values(modules: Sequence[nn.Module]) -> list[str]:
    """Numbers and words that modules of the user's own hold beside their tensors, such as a factor that `forward` reads."""
    plain = vars(nn.Module())
    return [
        f"{i}.{name} = {value!r}"
        for i, module in enumerate(modules)
        if not _vouched(type(module))
        for name, value in sorted(vars(module).items())
        if name not in plain and _is_plain(value)
    ]


def _vouched(kind: type) -> bool:
    """Whether the version of fedfill or of a package says what it does."""
    return kind.__module__.split(".")[0] in _VOUCHED


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes)


def _source(thing: type | FunctionType) -> str:
    """The source without comments, docstrings and layout, which another patch version of Python reads alike; "" without one."""
    try:
        text = inspect.getsource(thing)
        # what stands indented in its file becomes a block of its own: taking the blanks away would change texts within
        parsed = ast.parse(f"if True:\n{text}" if text[:1].isspace() else text)
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(parsed):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(parsed)


def _names(code: CodeType) -> str:
    """A function without source, such as text that was executed: its byte code, names and constants."""
    # a set's order is another one in each process
    constants = [
        _names(c) if isinstance(c, CodeType) else sorted(map(str, c)) if isinstance(c, frozenset) else str(c)
        for c in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"
