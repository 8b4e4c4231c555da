"""Small experiments, and what is compared of their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

TINY: dict[str, Any] = {"data": "digits", "clients": 4, "local_epochs": 1, "rounds": 5, "participation": 0.5}


EACH: dict[str, dict[str, Any]] = {
    "fedavg": TINY,
    "feddpms": {**TINY, "preliminary_rounds": 2, "alpha": 5, "max_candidates": 100},
}


INCIDENTAL = ("seconds", "seconds_in_fit", "workers")


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in INCIDENTAL}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [without_times(json.loads(line)) for line in (folder / "rounds.jsonl").read_text().splitlines()]


class Stop(Exception):
    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__()
        self.round = record["round"]


def stop(record: dict[str, Any], rounds: int) -> None:
    raise Stop(record)


class Net(nn.Module):
    """Two layers and no named parts but its own."""

    def __init__(self, features: int = 64, classes: int = 10) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(5)
        self.first, self.second = nn.Linear(features, 16), nn.Linear(16, classes)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1, generator=stream)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.flatten(1))))  # type: ignore[no-any-return]


def digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    bunch = load_digits()
    return (bunch.images * 15).astype(np.uint8), bunch.target.astype(np.int64)


PLAIN: dict[str, Any] = {"rounds": 2, "local_epochs": 1}
