"""Models of runs and of folders from strangers: read without the code that trained them, and never believed unchecked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import fedfill

TINY: dict[str, Any] = {
    "clients": 2, "partition": "iid", "workers": 1, "data_fraction": 0.1, "rounds": 1, "local_epochs": 1, "model": "mlp",
}  # fmt: skip
WITH_RECORDS: dict[str, dict[str, Any]] = {
    "feddpms": {"rounds": 3, "model": "cnn2"},
    "fedmix": {},
    "fedzdac": {"rounds": 2, "model": "cnn2bn"},
    "fraug": {"model": "cnn2"},
    "naivemix": {},
}
"""Algorithms that keep records of classes of their own in the checkpoint."""

ALONE = """
import os, sys
import fedfill.studies.saved
assert not [name for name in sys.modules if name in sys.argv[1].split()], "an algorithm is imported before a run is read"
for run in sys.argv[2:]:
    if os.fork() == 0:  # so that no run is read after another one's algorithm was imported
        model = fedfill.studies.saved.saved_at(run)
        os._exit(0 if model.model(model.card["weights"][0].get("number")).class_names else 1)
    assert os.wait()[1] == 0, run
"""


def test_a_model_is_read_where_nothing_else_has_imported_its_algorithm(tmp_path: Path):
    for name, settings in WITH_RECORDS.items():
        fedfill.run(name, out=tmp_path / name, **{**TINY, **settings})
        held = (tmp_path / name / "checkpoint" / "state.safetensors").read_bytes()
        assert b'\\"record\\"' in held, name  # else it shows nothing
    modules = [f"fedfill.algorithms.{name}" for name in ("feddpms", "fedmix", "fedzda", "fraug", "naivemix")]
    runs = [str(tmp_path / name) for name in WITH_RECORDS]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, " ".join(modules), *runs], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
