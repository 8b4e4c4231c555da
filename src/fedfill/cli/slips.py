"""Slips that can be told without torch, before anything that takes seconds is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedfill.catalogue import built_in, require_algorithm
from fedfill.data.names import DATASETS, PARTITIONS, is_place, parse, unknown
from fedfill.engines import NAMES as ENGINES
from fedfill.engines import require
from fedfill.errors import FedfillError, checked, did_you_mean
from fedfill.experiment.settings import PYTHON, TABLES, Experiment
from fedfill.models.names import NAMES as NETWORKS
from fedfill.own_parts import entry_points, is_reference, split


def check_algorithms(labels: Iterable[str]) -> None:
    """Refuse names that no algorithm has; settings may stand behind them.

    Args:
        labels: Such as ``fedavg`` or ``fedprox:mu=0.1``.

    Raises:
        FedfillError: For the first that is none.
    """
    for label in labels:
        require_algorithm(split(label)[0] if is_reference(label) else label.partition(":")[0])


def check_options(options: Mapping[str, Any], data: bool) -> None:
    """Refuse values that no experiment may have.

    Args:
        options: Fields of `Experiment`, and whatever else was given.
        data: Whether the data set is to be there.

    Raises:
        FedfillError: For the first that is wrong.
    """
    given = {name: value for name, value in options.items() if name in Experiment.model_fields.keys() - TABLES}
    experiment = checked(Experiment, {"algorithm": "", **given}, "option")
    require(experiment.engine)
    if _is_unknown(experiment.model, NETWORKS, "models"):
        raise FedfillError(f"model: unknown name '{experiment.model}'; {did_you_mean(experiment.model, NETWORKS)}")
    if _is_unknown(experiment.partition, (), "partitions") and experiment.partition != "given":
        parse(experiment.partition)
    if data and not experiment.data_dir and not os.environ.get("FEDFILL_DATA"):
        name = experiment.data
        if name not in DATASETS and not is_place(name) and not name.lower().endswith(".safetensors") and name != PYTHON:
            raise unknown(name)


def _is_unknown(word: str, names: Iterable[str], group: str) -> bool:
    own = word.partition(":")[0] == PYTHON or is_reference(word)
    return word not in names and not own and word not in entry_points(group)


def completer(what: str) -> Callable[[str], list[str]]:
    """What offers a shell the names for a field of `Experiment` that begin with what was typed; none for other fields."""

    def complete(incomplete: str) -> list[str]:
        names: dict[str, Callable[[], Iterable[str]]] = {
            "algorithm": built_in,
            "data": DATASETS.keys,
            "partition": lambda: [usage.partition(":")[0] for usage in PARTITIONS],
            "model": NETWORKS.keys,
            "engine": ENGINES.keys,
        }
        return [name for name in names[what]() if name.startswith(incomplete)] if what in names else []

    return complete
