"""Algorithms found by name: fedfill's own files, those of installed packages, and whatever subclasses the user defined."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint
from typing import Any

from fedfill import own_parts
from fedfill.algorithms._base import Algorithm
from fedfill.algorithms._registry import import_file_of, registered
from fedfill.errors import FedfillError, did_you_mean


@functools.cache
def _import_built_in() -> None:
    package = importlib.import_module("fedfill.algorithms")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def lookup(name: str) -> type[Algorithm] | None:
    """The algorithm of this name, None where it is not known; nothing of the user's is executed."""
    if name not in registered:
        import_file_of(name)
    return registered.get(name) or known_algorithms().get(name)


def known_algorithms() -> dict[str, type[Algorithm]]:
    """All algorithms by name: fedfill's, those of installed packages that can be loaded, and whatever subclasses the user defined."""
    _import_built_in()
    for entry in own_parts.entry_points("algorithms").values():
        if entry.name not in registered:
            with suppress(FedfillError):  # `find` says what is wrong with it
                _of_package(entry)
    return dict(sorted(registered.items()))


def _of_package(entry: EntryPoint) -> type[Algorithm]:
    kind = as_algorithm(own_parts.load_entry(entry, "algorithm"), entry.name)
    if kind.name != entry.name:
        raise FedfillError(
            f"algorithm: the entry point '{entry.name}' is the algorithm '{kind.name}'; allowed: one name for both"
        )
    return kind


def as_algorithm(thing: Any, called: str) -> type[Algorithm]:
    """Make sure that something is an algorithm.

    Args:
        thing: Anything.
        called: Where it came from, such as ``my.py:HeavyBall``.

    Returns:
        The class.

    Raises:
        FedfillError: Where it is no subclass of `Algorithm`, or has no name of its own.
    """
    place = f" ({where})" if (where := own_parts.place_of(thing)) else ""
    if not isinstance(thing, type) or not issubclass(thing, Algorithm):
        raise FedfillError(
            f"algorithm: found {called}{place}; allowed: a name of 'fedfill list algorithms', or a subclass of Algorithm or FILE.py:NAME of one"
        )
    if "name" not in thing.__dict__:
        raise FedfillError(f'algorithm: {thing.__qualname__}{place} has no name of its own; give it one: name = "..."')
    return thing


def find(name: str) -> type[Algorithm]:
    """The algorithm of this name.

    Args:
        name: Such as ``"feddpms"``, or ``"FILE.py:NAME"``, which executes the file.

    Returns:
        Its class.

    Raises:
        FedfillError: Where there is none, or the file or the package that has it can't be loaded.
    """
    if own_parts.is_reference(name):
        return as_algorithm(own_parts.load(name, "algorithm"), name)
    if (kind := lookup(name)) is not None:
        return kind
    offered = own_parts.entry_points("algorithms")
    if name in offered:
        return _of_package(offered[name])
    raise FedfillError(f"algorithm: unknown name '{name}'; {did_you_mean(name, {*known_algorithms(), *offered})}")


def parse_variant(text: str) -> tuple[str, dict[str, str]]:
    """An algorithm with settings of its own.

    Args:
        text: ``"fedavg"``, ``"fedavg:latent_activation=none,local_epochs=1"`` or ``"my.py:HeavyBall:server_momentum=0.9"``.

    Returns:
        The name, or the reference, and its settings.

    Raises:
        FedfillError: Where a setting has no value.
    """
    name, _, rest = text.partition(":")
    if own_parts.is_reference(text):
        name, rest = own_parts.split(text)
    settings: dict[str, str] = {}
    for pair in filter(None, re.split(r",(?![^(]*\))", rest)):  # no comma of patches(300, cells=4)
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise FedfillError(
                f"algorithm: found '{pair}' in '{text}'; allowed: NAME or NAME:setting=value,setting=value"
            )
        settings[key.strip()] = value.strip()
    return name, settings


def labels_of(algorithms: Sequence[Any]) -> list[Any]:
    """Algorithms of a comparison by name, whatever they were given as.

    Args:
        algorithms: Classes, and texts as for `parse_variant`.

    Returns:
        Texts that begin with the algorithm's name, by which `find` knows it now: ``"heavyball:server_momentum=0.9"``. Anything
        else is left as it is.

    Raises:
        FedfillError: Where one can't be loaded, or two have one name.
    """
    labels, kinds = [], dict[str, type[Algorithm]]()
    for item in algorithms:
        rest, kind = "", None
        if isinstance(item, type):
            kind = as_algorithm(item, repr(item))
        elif own_parts.is_reference(item):
            word, rest = own_parts.split(item)
            kind = find(word)
        if kind is not None and kinds.setdefault(kind.name, kind) is not kind:
            raise FedfillError(f"algorithm: two are called '{kind.name}'; allowed: one name for each")
        labels.append(item if kind is None else f"{kind.name}:{rest}".removesuffix(":"))
    return labels
