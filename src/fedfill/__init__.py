"""fedfill: federated learning when clients' data differ, with the gaps filled by synthetic data.

The words of the command line and of Python are the same::

    import fedfill

    result = fedfill.run("feddpms", data="digits", partition="dirichlet:0.5", clients=10, rounds=20, seed=0)
    print(result.summary["accuracy"])
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

__all__ = [
    "Comparison",
    "Experiment",
    "FedfillError",
    "Result",
    "__version__",
    "audit",
    "compare",
    "dataset",
    "describe",
    "export",
    "load",
    "measure",
    "predict",
    "report",
    "reproduce",
    "resume",
    "run",
    "study",
    "synthesise",
]

_HOME = {
    "Comparison": "fedfill.studies.comparison",
    "Experiment": "fedfill.experiment.settings",
    "FedfillError": "fedfill.errors",
    "Result": "fedfill.experiment.summary",
    "audit": "fedfill.studies.audit",
    "compare": "fedfill.studies.compare",
    "dataset": "fedfill.data.objects",
    "describe": "fedfill.studies.describe",
    "export": "fedfill.studies.export",
    "load": "fedfill.studies.use",
    "measure": "fedfill.studies.measure",
    "predict": "fedfill.studies.use",
    "report": "fedfill.studies.report",
    "reproduce": "fedfill.studies.reproduce",
    "resume": "fedfill.studies.run",
    "run": "fedfill.studies.run",
    "study": "fedfill.studies.study",
    "synthesise": "fedfill.studies.synthesise",
}

if TYPE_CHECKING:
    from fedfill.data.objects import dataset
    from fedfill.errors import FedfillError
    from fedfill.experiment.settings import Experiment
    from fedfill.experiment.summary import Result
    from fedfill.studies.audit import audit
    from fedfill.studies.compare import compare
    from fedfill.studies.comparison import Comparison
    from fedfill.studies.describe import describe
    from fedfill.studies.export import export
    from fedfill.studies.measure import measure
    from fedfill.studies.report import report
    from fedfill.studies.reproduce import reproduce
    from fedfill.studies.run import resume, run
    from fedfill.studies.study import study
    from fedfill.studies.synthesise import synthesise
    from fedfill.studies.use import load, predict


def __dir__() -> list[str]:
    """All public names, those that are not imported yet among them, and no helpers of this file."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """Import what is asked for, so that ``import fedfill`` itself costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'fedfill' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
