"""Nothing that a test reads is found again by the next one."""

from __future__ import annotations

import pytest

from fedfill.data import sources


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDFILL_DATA", raising=False)
    sources._load.cache_clear()
