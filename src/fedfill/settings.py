"""Settings: what an experiment is told, from whatever source, checked, and refused in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedfill.algorithms import Algorithm
from fedfill.errors import FedfillError, did_you_mean
from fedfill.models.networks import ModelSettings


class Experiment(BaseModel):
    """What to run. ``experiment.toml`` holds these fields, with the settings resolved."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    algorithm: str
    """Name of the algorithm."""
    data: str = "digits"
    """Name of the data set, or of a folder below `data_dir`."""
    data_dir: str | None = None
    """Folder with data sets as Parquet or images; none: the environment variable FEDFILL_DATA."""
    data_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the training set that is used."""
    partition: str = "dirichlet:0.5"
    """How the training set is divided among the clients."""
    clients: int | None = Field(default=10, ge=1)
    """Number of clients (K); none: as many as a list of data sets or a partitioner object makes."""
    client_test: float = Field(default=0.1, ge=0, le=0.5)
    """Share of each client's samples that is kept as its own test split."""
    participation: float = Field(default=1.0, gt=0, le=1)
    """Share of the clients that take part in a round."""
    rounds: int = Field(default=50, ge=1)
    """Rounds (T)."""
    seed: int = Field(default=0, ge=0)
    """Seed of every stream of randomness."""
    model: str = "auto"
    """Name of the network."""
    engine: str = "local"
    """Engine that carries messages and runs clients."""
    device: str = "auto"
    """Where data and models live: auto, cpu, cuda, cuda:N."""
    workers: int | None = Field(default=None, ge=1, le=1024)
    """Threads over clients, or processes with engine ray, each with a model of its own; none: one for each processor."""
    ray_address: str | None = None
    """With engine ray: a running cluster to join; none: a Ray of its own on this machine."""
    gpus_per_worker: float = Field(default=0.0, ge=0)
    """With engine ray: the share of a GPU that each worker gets."""
    min_replies: int = Field(default=1, ge=1)
    """Good replies that a call to a whole cohort must have; with fewer the run stops, its last checkpoint intact."""
    reply_timeout: float | None = Field(default=None, gt=0)
    """Seconds that a client has for one call; a later reply is left out; none: as long as it takes."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """Delta at which the privacy account gives epsilon."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the algorithm and its local training."""
    model_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the built-in networks."""


B = TypeVar("B", bound=BaseModel)


def checked(kind: type[B], values: Mapping[str, Any], what: str = "setting") -> B:
    """An instance of settings from values of any origin, or one sentence on what is wrong.

    Args:
        kind: Settings class.
        values: By name; text is converted where the setting is a number or a truth value, ``none`` where it may be empty.
        what: What an unknown name is called in the sentence.

    Returns:
        The settings.

    Raises:
        FedfillError: Where a name is unknown or a value is not allowed.
    """
    for name in values:
        if name not in kind.model_fields:
            raise FedfillError(f"{what}: unknown name '{name}'; {did_you_mean(name, kind.model_fields)}")
    # a truth value is no number: Python and pydantic would read True as 1
    given = {
        name: str(value) if isinstance(value, bool) and kind.model_fields[name].annotation is not bool else value
        for name, value in values.items()
    }
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else what
    optional = name in given and type(None) in get_args(kind.model_fields[name].annotation)
    if optional and str(given[name]).lower() == "none":
        return checked(kind, {**given, name: None}, what)
    raise FedfillError(f"{name}: found {first['input']!r}; allowed: {_allowed(first)}")


def _allowed(error: Mapping[str, Any]) -> str:
    context = error.get("ctx", {})
    words = {
        "greater_than": "more than {gt}",
        "greater_than_equal": "at least {ge}",
        "less_than": "less than {lt}",
        "less_than_equal": "at most {le}",
        "literal_error": "{expected}",
        "int_parsing": "a whole number",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_parsing": "a number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_parsing": "true or false",
        "bool_type": "true or false",
        "string_type": "text",
        "dict_type": "a table of settings",
    }
    kind = str(error["type"])
    return words[kind].format(**context) if kind in words else str(error["msg"])


def split_settings(algorithm: type[Algorithm], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Which settings are the algorithm's and which the model's.

    Args:
        algorithm: Its class.
        values: By name; ``model.NAME`` is always the model's, and so is a name that only the model knows.

    Returns:
        The algorithm's and the model's.

    Raises:
        FedfillError: Where nobody knows a name.
    """
    own: dict[str, Any] = {}
    models: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith("model."):
            models[name.removeprefix("model.")] = value
        elif name in algorithm.model_fields:
            own[name] = value
        elif name in ModelSettings.model_fields:
            models[name] = value
        else:
            known = [*algorithm.model_fields, *ModelSettings.model_fields]
            raise FedfillError(f"setting: {algorithm.name} has no '{name}'; {did_you_mean(name, known)}")
    return own, models
