"""Settings: what an experiment is told, from whatever source."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from fedfill.catalogue import built_in
from fedfill.errors import FedfillError, shown
from fedfill.own_parts import entry_points, is_reference

T = TypeVar("T")
Data = Annotated[T, "data"]
Incidental = Annotated[T, "incidental"]
Simulation = Annotated[T, "simulation"]
Place = Annotated[T, "place"]
Privacy = Annotated[T, "privacy"]

GROUPS = {
    "data": "Data and clients",
    "privacy": "Privacy",
    "simulation": "Engine and machine",
    "incidental": "Engine and machine",
    "": "Training",
}
"""Under which heading the help has a field, by the first of these words that it is marked with."""
HEADINGS = ("Data and clients", "Training", "Privacy", "Engine and machine")
"""In the order of the help."""

PYTHON = "python"
"""Stands in ``experiment.toml`` for what came from Python, where the name of its type may follow: ``python:Net``."""


class Experiment(BaseModel):
    """What to run. ``experiment.toml`` holds these fields, with the settings resolved.

    Every field is an option of the command line and a word of `fedfill.run`, and its docstring is the option's help:
    another field in backticks is shown as its option there, and ``None:`` says what happens without a value.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    algorithm: str
    """Algorithm: a name of 'fedfill list algorithms', or FILE.py:NAME of your own."""
    data: Data[str] = "digits"
    """Data set: a name of 'fedfill list datasets', the path of a folder or of a table (./photos, ./people.csv), a name in
    the folder `data_dir`, or a file of 'fedfill synthesise' (FILE.safetensors)."""
    data_dir: Data[Incidental[str | None]] = None
    """Folder with data sets as Parquet, images or CSV. None: $FEDFILL_DATA."""
    data_fraction: Data[float] = Field(default=1.0, gt=0, le=1)
    """Share of the training set that is used, the same of each class and of each domain."""
    domain_fractions: Data[str | None] = None
    """Shares of single domains in place of `data_fraction`, such as svhn=0.2,mnist_m=0.14. None: the same share of all."""
    image_size: Data[int | None] = Field(default=None, ge=1, le=4096)
    """Every image is brought to this many pixels on each side, in grey where all are grey. None: as they are stored."""
    # left out where there is none, so that digests of runs without one stay as they were
    schema_file: Data[Place[str | None]] = Field(default=None, exclude_if=lambda value: value is None)
    """What the columns of a table hold, as sites agreed on it: a TOML file, of which 'fedfill describe' makes a draft.
    None: as the training table says."""
    partition: Data[str] = "dirichlet:0.5"
    """How the training samples are divided among the clients: see 'fedfill list partitions', or FILE.py:NAME of a
    function of your own."""
    clients: Data[int | None] = Field(default=10, ge=1)
    """Number of clients (K). With `partition` domain there are as many as the domains need. None: as many as a list of
    data sets, the domains or a partitioner object make."""
    # left out where there is none, so that saved runs without one stay as they were
    test_fraction: Data[float | None] = Field(default=None, ge=0, le=0.5, exclude_if=lambda value: value is None)
    """Share of the samples that is held out as everyone's test set where the data bring none. With 0 none is held out, and the
    training samples are the test set too. None: a fifth."""
    client_test: Data[float] = Field(default=0.1, ge=0, le=0.5)
    """Share of each client's samples that is kept as its own test split."""
    client_validation: Data[float | None] = Field(default=None, ge=0, le=0.5)
    """Share of each client's other samples that is kept as its validation split. None: no validation split."""
    labelled_per_client: Data[int | None] = Field(default=None, ge=1)
    """How many of each client's training samples keep their labels. None: all."""
    extra: Place[str | None] = None
    """File of 'fedfill synthesise', whose samples each client has beside its own labelled ones. None: no such samples."""
    participation: float = Field(default=1.0, gt=0, le=1)
    """Share of the clients that take part in a round."""
    rounds: int = Field(default=50, ge=1, le=1_000_000)
    """Number of rounds (T)."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Rounds from one evaluation to the next. The last round is always evaluated. None: every round."""
    seed: int = Field(default=0, ge=0, le=2**64 - 1)
    """Seed of everything that is drawn at random."""
    model: str = "auto"
    """Network: see 'fedfill list models', or FILE.py:NAME of your own. With auto it is one that the algorithm can use, or
    with `start_from` that run's."""
    start_from: Place[str | None] = None
    """Folder of a finished run with one global model, whose final weights are the first ones here. None: as drawn."""
    engine: Simulation[str] = "local"
    """What runs the clients and carries their messages: see 'fedfill list engines'."""
    device: Incidental[str] = "auto"
    """Where data and models lie: cpu, cuda, cuda:N, or auto for a GPU when there is one."""
    workers: Simulation[Incidental[int | None]] = Field(default=None, ge=1, le=1024)
    """How many clients are trained at the same time, in threads or, with `engine` ray, in processes. It changes no
    result. None: one for each processor."""
    stack: Simulation[Incidental[int | None]] = Field(default=None, ge=1, le=1024)
    """With `engine` local: how many clients' local trainings run as one program, which changes results by rounding alone.
    None: on a GPU as many as are faster than one after another, elsewhere 1."""
    # left out where it is the default, so that digests of runs without it stay as they were
    precision: Literal["float32", "bfloat16"] = Field(default="float32", exclude_if=lambda value: value == "float32")
    """What the network computes in where it is trained. With bfloat16 weights, optimizer, messages and evaluation stay in
    float32; it is refused where it is not faster."""
    ray_address: Simulation[Incidental[str | None]] = None
    """With `engine` ray: a running cluster to join, such as auto or HOST:6379. None: a Ray of its own on this machine."""
    gpus_per_worker: Simulation[Incidental[float]] = Field(default=0.0, ge=0)
    """With `engine` ray: share of a GPU for each worker."""
    min_replies: Incidental[int] = Field(default=1, ge=1)
    """Good replies that a call to a whole cohort needs. With fewer the run stops; 'fedfill resume' goes on from there."""
    reply_timeout: Incidental[float | None] = Field(default=None, gt=0)
    """Seconds that a client has for a reply. A later reply is left out. None: no limit."""
    delta: Privacy[float] = Field(default=1e-5, gt=0, lt=1)
    """Delta of the privacy account, at which it gives epsilon."""
    preset: Literal["paper"] | None = None
    """Training budget: with paper, that of the algorithm's own paper. None: the same one for all algorithms."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the algorithm and its local training."""
    model_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the built-in networks."""
    own: dict[str, str] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """Where parts of one's own come from, by setting, as FILE.py:NAME."""

    @model_validator(mode="before")
    @classmethod
    def _clients_of_domains(cls, values: Any) -> Any:
        """Domains say how many clients there are where nobody else does."""
        if isinstance(values, dict) and str(values.get("partition", "")).partition(":")[0].strip() == "domain":
            return {"clients": None, **values}
        return values


def _marked(word: str) -> frozenset[str]:
    return frozenset(name for name, field in Experiment.model_fields.items() if word in field.metadata)


DATA = _marked("data")
"""Fields that say which data there are and how they are divided."""
INCIDENTAL = _marked("incidental")
"""What may be changed at a resume: where and how it runs, and how long it waits for whom."""
PLACES = _marked("place")
"""Where something lies that is known by what it holds: it may have moved before a resume."""
TABLES = frozenset({"settings", "model_settings", "own"})
"""Fields that nobody gives as they are."""
SIMULATION = _marked("simulation")
"""Fields that a federation of real hosts does not have."""


def group_of(field: FieldInfo) -> str:
    """The heading of a field in the help."""
    return next(heading for word, heading in GROUPS.items() if not word or word in field.metadata)


def refuse_settings(algorithm: str) -> None:
    """Refuse a name with settings behind it, which a comparison takes, where one algorithm is asked for.

    Args:
        algorithm: What was found.

    Raises:
        FedfillError: Where it is the name of an algorithm with something behind it.
    """
    name, colon, rest = algorithm.partition(":")
    if not colon or is_reference(algorithm) or name not in {*built_in(), *entry_points("algorithms")}:
        return
    setting, equals, value = rest.partition(",")[0].partition("=")
    beside = ""
    if equals and setting:
        flag = (
            f"--{setting.replace('_', '-')} {value}"
            if setting in Experiment.model_fields
            else f"--set {setting}={value}"
        )
        beside = f", and beside it {flag}, or {setting}={value} in Python"
    raise FedfillError(f"algorithm: found '{algorithm}'; allowed: {name}{beside}")


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Options, and over them others that were asked for later; epochs asked for later replace mini-batches, too."""
    replaced = {"local_steps"} if "local_epochs" in above else set()
    return {**{name: value for name, value in below.items() if name not in replaced}, **above}


def in_words(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as ``experiment.toml`` keeps them: of a path, and of a run that lies in a folder, its text."""
    held = {name: getattr(value, "directory", value) for name, value in options.items()}
    return {name: str(value) if isinstance(value, os.PathLike) else value for name, value in held.items()}


def whole_numbers(seeds: Sequence[int]) -> list[int]:
    """Seeds as whole numbers from 0."""
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise FedfillError(f"seeds: found {shown(seeds)}; allowed: a list of whole numbers, such as [0, 1, 2]")
    seeds = list(seeds)
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
            raise FedfillError(f"seed: found {seed!r}; allowed: a whole number, at least 0")
    return [int(seed) for seed in seeds]
