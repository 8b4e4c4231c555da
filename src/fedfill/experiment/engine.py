"""Whether an engine can run what an experiment asks for, and all that it imports is installed."""

from __future__ import annotations

from importlib.util import find_spec

from fedfill.algorithms import Algorithm
from fedfill.engines import require
from fedfill.errors import FedfillError
from fedfill.experiment.settings import Experiment


def require_engine(experiment: Experiment, kind: type[Algorithm], *, party: bool) -> None:
    """Refuse options that the engine does not have, and what is not installed, before any data are read.

    Args:
        experiment: What is asked for.
        kind: Its algorithm.
        party: Whether the data are at hand already, as with the parties of a deployed app.

    Raises:
        FedfillError: With the option, or the extra that has to be installed.
    """
    require(experiment.engine)
    # of an app's parties the server alone needs them
    missing = [package for package in kind.packages if find_spec(package) is None]
    if missing and not (party and experiment.engine == "flower"):
        raise FedfillError(
            f"algorithm: {kind.name} needs {' and '.join(missing)}, which is not installed; run: pip install 'fedfill[{kind.name}]'"
        )
    for name, others in (
        ("ray_address", ("ray",)),
        ("gpus_per_worker", ("ray",)),
        ("workers", ("local", "ray")),
        ("stack", ("local",)),
    ):
        if getattr(experiment, name) and experiment.engine not in others:
            raise FedfillError(
                f"{name}: found {getattr(experiment, name)} with engine={experiment.engine}; allowed with {' and '.join(others)}"
            )
    for name, alone in (("workers", 1), ("reply_timeout", None), ("precision", "float32")):
        if (experiment.stack or 1) > 1 and getattr(experiment, name) not in (None, alone):
            raise FedfillError(
                f"stack: found {experiment.stack} with {name}={getattr(experiment, name)}; leave one of them out"
            )
    if kind.pooled and experiment.engine == "flower":
        raise FedfillError(
            f"engine: found flower with algorithm={kind.name}, which is no federation of hosts; allowed: local and ray"
        )
    if experiment.extra is not None and experiment.engine == "flower":
        raise FedfillError(
            f"extra: found {experiment.extra} with engine=flower, whose hosts don't have the file; allowed: engine=local or ray"
        )
