"""``fedfill list``: what there is, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Annotated

import typer
from rich.table import Table

from fedfill.cli.options import words_of
from fedfill.cli.terminal import out
from fedfill.errors import FedfillError, did_you_mean

Rows = Iterable[tuple[str, ...]]


def list_names(
    what: Annotated[str, typer.Argument(help="algorithms, datasets, partitions, models, engines or settings")],
    algorithm: Annotated[str | None, typer.Argument(help="With settings: whose.")] = None,
) -> None:
    """List algorithms, datasets, engines, models and the like."""
    kinds: dict[str, Callable[[], Rows]] = {
        "algorithms": _algorithms,
        "datasets": lambda: _names("fedfill.data.sources"),
        "partitions": lambda: _names("fedfill.data.partitions"),
        "models": lambda: _names("fedfill.models.networks"),
        "engines": lambda: _names("fedfill.engines"),
        "settings": lambda: settings_of(algorithm),
    }
    if what not in kinds:
        raise FedfillError(f"list: found '{what}'; {did_you_mean(what, kinds)}")
    table = Table(show_header=False, box=None, pad_edge=False)
    for row in kinds[what]():
        table.add_row(*row)
    out.print(table)


def _names(room: str) -> Rows:
    names: dict[str, str] = import_module(room).NAMES
    return names.items()


def _algorithms() -> Rows:
    from fedfill.algorithms import known_algorithms

    return [(name, when(kind)) for name, kind in known_algorithms().items()]


def when(algorithm: type) -> str:
    """When to use an algorithm: the line of its docstring that begins with "Use it"; without one, the first."""
    lines = inspect.cleandoc(algorithm.__doc__ or "").splitlines() or [""]
    return next((line for line in lines if line.startswith("Use it ")), lines[0])


def settings_of(algorithm: str | None) -> list[tuple[str, str, str]]:
    """Name, default with those for single data sets, and meaning with the words that are allowed."""
    if algorithm is None:
        raise FedfillError("list settings: name an algorithm, such as 'fedfill list settings feddpms'")
    from fedfill.algorithms import find
    from fedfill.models.networks import ModelSettings

    rows = []
    kind = find(algorithm)
    for prefix, fields in (("", kind.model_fields), ("model.", ModelSettings.model_fields)):
        for name, info in fields.items():
            words = words_of(info.annotation)
            default = "none" if info.default is None else str(info.default).lower()
            for data, preset in (
                *kind.presets.items(),
                *((f"paper {data}".strip(), own) for data, own in kind.paper.items()),
            ):
                if preset.get(f"{prefix}{name}", info.default) != info.default:
                    default += f"; {data}: {str(preset[f'{prefix}{name}']).lower()}"
            meaning = (info.description or "") + (f" [{', '.join(words)}]" if words else "")
            rows.append((f"{prefix}{name}", default, meaning))
    return rows
