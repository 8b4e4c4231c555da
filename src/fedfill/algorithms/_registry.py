"""Which classes of algorithms there are by name, as soon as their files are imported."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from fedfill.errors import FedfillError

if TYPE_CHECKING:
    from fedfill.algorithms._base import Algorithm

registered: dict[str, type[Algorithm]] = {}


def register(kind: type[Algorithm]) -> None:
    """Enter a class that has a name of its own.

    Args:
        kind: The class.

    Raises:
        FedfillError: Where the name is taken by another one.
    """
    if _is_own(kind):
        import_file_of(kind.name)
    other = registered.get(kind.name)
    # a class of one's own may be made again, in another file or in the same
    if other is not None and not (
        other.__qualname__ == kind.__qualname__
        and (other.__module__ == kind.__module__ or (_is_own(other) and _is_own(kind)))
    ):
        late, first = (other, kind) if _is_own(other) and not _is_own(kind) else (kind, other)
        raise FedfillError(f"algorithm: the name '{kind.name}' of {late.__qualname__} is taken by {first.__qualname__}")
    registered[kind.name] = kind


def _is_own(kind: type[Algorithm]) -> bool:
    return kind.__module__.split(".")[0] != "fedfill"


def import_file_of(name: str) -> None:
    """Import the one of fedfill's files that bears an algorithm's name, where there is one: all of them take a second."""
    module = f"fedfill.algorithms.{name}"
    if name.isidentifier() and not name.startswith("_") and importlib.util.find_spec(module) is not None:
        importlib.import_module(module)
