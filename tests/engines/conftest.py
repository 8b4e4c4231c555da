"""A federation on Flower's messages without its processes, and what it is compared with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="fedfill")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "fedfill"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """An engine sets the number of torch's threads for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
