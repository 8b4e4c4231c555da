"""Small experiments, and what is compared of their folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.experiment.world import EACH, TINY, Stop, stop

import fedfill


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fedfill.Result]:
    """An undisturbed run of each algorithm on one worker."""
    folder = tmp_path_factory.mktemp("whole")
    return {name: fedfill.run(name, **options, workers=1, out=folder / name) for name, options in EACH.items()}


@pytest.fixture
def stopped(tmp_path: Path, whole: dict[str, fedfill.Result]) -> Path:
    """A run that was stopped after its first round."""
    with pytest.raises(Stop):
        fedfill.run("fedavg", **TINY, out=tmp_path, on_round=stop)
    return tmp_path
