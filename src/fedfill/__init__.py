"""fedfill: federated learning when clients' data differ, with the gaps filled by synthetic data.

The words of the command line and of Python are the same::

    import fedfill

    result = fedfill.run("feddpms", data="digits", partition="dirichlet:0.5", clients=10, rounds=20, seed=0)
    print(result.summary["accuracy"])
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["Experiment", "FedfillError", "Result", "__version__", "compare", "measure", "reproduce", "resume", "run"]

_HOME = {
    "Experiment": "fedfill.settings",
    "FedfillError": "fedfill.errors",
    "Result": "fedfill.loop",
    "compare": "fedfill.comparison",
    "measure": "fedfill.measuring",
    "reproduce": "fedfill.reproduction",
    "resume": "fedfill.experiment",
    "run": "fedfill.experiment",
}

if TYPE_CHECKING:
    from fedfill.comparison import compare
    from fedfill.errors import FedfillError
    from fedfill.experiment import resume, run
    from fedfill.loop import Result
    from fedfill.measuring import measure
    from fedfill.reproduction import reproduce
    from fedfill.settings import Experiment


def __getattr__(name: str) -> Any:
    """Import what is asked for, so that ``import fedfill`` itself costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'fedfill' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
