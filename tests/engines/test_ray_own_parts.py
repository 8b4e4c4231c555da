"""Parts of one's own from a file on Ray's workers, which execute its text: the same bits as in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.engines.pooled_ray import PooledEngine
from tests.test_own_parts import FILE

import fedfill
from fedfill import own_parts
from fedfill.algorithms import find
from fedfill.algorithms._registry import registered


def test_parts_of_a_file_on_rays_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfill.engines.ray.RayEngine", PooledEngine)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(own_parts, "_executed", {})
    file = tmp_path / "my.py"
    file.write_text(FILE)
    (tmp_path / "beside.py").write_text("SCALE = 1.0\n")
    find("fedavg")
    known = dict(registered)
    shas = {
        engine: fedfill.run(
            f"{file}:Slow", model=f"{file}:Net", partition=f"{file}:halves", clients=3, rounds=2, local_epochs=1, step=0.5,
            engine=engine, workers=1, out=tmp_path / engine,
        ).summary["weights_sha256"]
        for engine in ("local", "ray")
    }  # fmt: skip
    assert shas["local"] == shas["ray"]
    registered.clear()
    registered.update(known)
    for name in ("own_my", "beside"):
        del sys.modules[name]
