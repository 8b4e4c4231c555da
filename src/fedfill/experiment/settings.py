"""Settings: what an experiment is told, from whatever source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedfill.errors import FedfillError


class Experiment(BaseModel):
    """What to run. ``experiment.toml`` holds these fields, with the settings resolved."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    algorithm: str
    """Name of the algorithm."""
    data: str = "digits"
    """Name of the data set, or of a folder or table below `data_dir`."""
    data_dir: str | None = None
    """Folder with data sets as Parquet, images or CSV; none: the environment variable FEDFILL_DATA."""
    data_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the training set that is used, of each class and domain alike."""
    domain_fractions: str | None = None
    """Shares of single domains, such as ``svhn=0.2,mnist_m=0.14``, in place of `data_fraction`."""
    image_size: int | None = Field(default=None, ge=1, le=4096)
    """Pixels to a side to which every image is brought, in grey where all are grey; none: images stay as they are stored."""
    partition: str = "dirichlet:0.5"
    """How the training set is divided among the clients."""
    clients: int | None = Field(default=10, ge=1)
    """Number of clients (K); none: as many as a list of data sets, the domains or a partitioner object make."""
    client_test: float = Field(default=0.1, ge=0, le=0.5)
    """Share of each client's samples that is kept as its own test split."""
    client_validation: float | None = Field(default=None, ge=0, le=0.5)
    """Share of what is left of each client's samples that is kept for validation; none: nothing is."""
    labelled_per_client: int | None = Field(default=None, ge=1)
    """How many of each client's training samples keep their labels; none: all."""
    participation: float = Field(default=1.0, gt=0, le=1)
    """Share of the clients that take part in a round."""
    rounds: int = Field(default=50, ge=1)
    """Rounds (T)."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Rounds from one evaluation to the next, the last round always being one; none: every round."""
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
    preset: Literal["paper"] | None = None
    """Budget of the local training: paper for that of the algorithm's own paper; none: the same one for all algorithms."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the algorithm and its local training."""
    model_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the built-in networks."""

    @model_validator(mode="before")
    @classmethod
    def _clients_of_domains(cls, values: Any) -> Any:
        """Domains say how many clients there are where nobody else does."""
        if isinstance(values, dict) and str(values.get("partition", "")).partition(":")[0].strip() == "domain":
            return {"clients": None, **values}
        return values


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Options, and over them others that were asked for later or more precisely.

    Args:
        below: By name.
        above: Likewise.

    Returns:
        Both, where a name stands in both the second's; and where the second asks for epochs, no mini-batches of the first.
    """
    replaced = {"local_steps"} if "local_epochs" in above else set()
    return {**{name: value for name, value in below.items() if name not in replaced}, **above}


def whole_numbers(seeds: Sequence[int]) -> list[int]:
    """Seeds as whole numbers from 0.

    Args:
        seeds: As given.

    Returns:
        The same, as Python's own numbers.

    Raises:
        FedfillError: Where one is none.
    """
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
            raise FedfillError(f"seed: found {seed!r}; allowed: a whole number, at least 0")
    return [int(seed) for seed in seeds]
