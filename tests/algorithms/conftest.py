"""A small world of SDA-FL."""

from __future__ import annotations

import pytest
from tests.algorithms.sdafl_world import TINY

import fedfill


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fedfill.Result]:
    folder = tmp_path_factory.mktemp("whole")
    return {
        noise: fedfill.run("sdafl", **TINY, noise=noise, workers=1, out=folder / noise) for noise in ("none", "dpsgd")
    }
