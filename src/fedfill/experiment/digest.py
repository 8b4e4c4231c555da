"""What identifies an experiment: two runs of one digest end with the same bits, and a run goes on with no other."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
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
    settings = {
        k: value for k, value in experiment.items() if k not in INCIDENTAL | PLACES | {"own"} and value is not None
    }
    modules = list(model.modules())
    code = [repr(model), *_programs(algorithm, *map(type, modules)), *_values(modules)]
    identity = [version or __version__, settings, fingerprint, tree.sha256(initial), code]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _programs(*classes: type) -> list[str]:
    """Source and constants of classes that neither fedfill nor torch vouches for, of their bases, and of what they name in their file."""
    waiting: list[type | FunctionType] = [
        base for kind in dict.fromkeys(classes) for base in kind.__mro__ if not _vouched(base)
    ]
    seen: set[type | FunctionType] = set()
    found: set[str] = set()
    while waiting:
        thing = waiting.pop()
        if thing in seen:
            continue
        seen.add(thing)
        functions = [thing] if inspect.isfunction(thing) else []
        found.add(f"{thing.__qualname__}: {_source(thing) or ''.join(_names(f.__code__) for f in functions)}")
        for name, value in vars(thing).items() if isinstance(thing, type) else ():
            # a function may come from elsewhere, and a class may have no source
            parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
            own = [part for part in parts if inspect.isfunction(part)]
            functions += own
            found |= {f"{thing.__qualname__}.{name}: {_source(f) or _names(f.__code__)}" for f in own}
            if not name.startswith("__") and _is_plain(value):
                found.add(f"{thing.__qualname__}.{name} = {value!r}")
        for function in functions:
            for name, value in _beside(function):
                if inspect.isfunction(value) or isinstance(value, type):
                    waiting += [base for base in getattr(value, "__mro__", (value,)) if not _vouched(base)]
                else:
                    found.add(f"{name} = {value!r}")
    return sorted(found)


def _beside(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function of one's own names in its file: functions, classes, and constants, which no run can change."""
    place = function.__globals__
    if str(place.get("__name__")).split(".")[0] in _VOUCHED:
        return
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in code.co_names:
            value = place.get(name)
            if inspect.isfunction(value):
                here = value.__globals__ is place
            elif isinstance(value, type):
                here = value.__module__ == place.get("__name__")
            else:
                here = name in place and not isinstance(value, list) and _is_plain(value)
            if here and not name.startswith("__"):
                yield name, value


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


def _vouched(kind: type | FunctionType) -> bool:
    """Whether the version of fedfill or of a package says what it does."""
    return str(kind.__module__).split(".")[0] in _VOUCHED


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
