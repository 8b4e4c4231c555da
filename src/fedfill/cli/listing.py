"""``fedfill list``: what there is, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer
from rich.table import Table

from fedfill.catalogue import built_in, require_algorithm
from fedfill.cli.options import words_of
from fedfill.cli.terminal import out
from fedfill.data.names import DATASETS, PARTITIONS
from fedfill.engines import NAMES as ENGINES
from fedfill.errors import FedfillError, did_you_mean
from fedfill.models.names import NAMES as NETWORKS
from fedfill.own_parts import entry_points

Rows = Iterable[tuple[str, ...]]


def list_names(
    what: Annotated[str, typer.Argument(help="algorithms, datasets, partitions, models, engines or settings")],
    algorithm: Annotated[str | None, typer.Argument(help="With settings: whose.")] = None,
) -> None:
    """List algorithms, datasets, engines, models and the like."""
    kinds: dict[str, Callable[[], Rows]] = {
        "algorithms": _algorithms,
        "datasets": DATASETS.items,
        "partitions": lambda: [*PARTITIONS.items(), *_offered("partitions")],
        "models": lambda: [*NETWORKS.items(), *_offered("models")],
        "engines": ENGINES.items,
        "settings": lambda: settings_of(algorithm),
    }
    if what not in kinds:
        raise FedfillError(f"list: found '{what}'; {did_you_mean(what, kinds)}")
    if what == "settings" and algorithm is not None:
        require_algorithm(algorithm)  # before torch is imported
    table = Table(show_header=False, box=None, pad_edge=False)
    for row in kinds[what]():
        table.add_row(*row)
    out.print(table)


def _algorithms() -> Rows:
    return sorted([*built_in().items(), *_offered("algorithms")])


def _offered(group: str) -> Rows:
    """What installed packages offer: their names alone, as nothing of them is imported."""
    for name, entry in entry_points(group).items():
        yield name, f"of the package {entry.dist.name if entry.dist is not None else entry.module}"


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
