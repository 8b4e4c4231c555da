"""What is measured of the final model's probabilities: on which samples, by which model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import roc_auc_score

import fedfill
from fedfill.data.federation import ClientData, Federation
from fedfill.data.samples import Samples
from fedfill.experiment.quality import quality
from fedfill.training.fit import Resident

CPU = torch.device("cpu")


class Slope(torch.nn.Module):
    """Scores of the second class: a factor times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.zeros(len(x)), self.factor * x[:, 0]], dim=1)


def of(*pairs: tuple[float, int]) -> Samples:
    inputs, labels = ([pair[k] for pair in pairs] for k in (0, 1))
    return Samples(torch.tensor(inputs, dtype=torch.float32)[:, None], torch.tensor(labels, dtype=torch.int64))


@pytest.fixture
def federation() -> Federation:
    train = of((0, 0))
    # each client's own samples are ranked the wrong way round, all together the right way: the first one's inputs are low, and so
    # are its labels; the third has one class, and the last no test split
    tests = [
        of((-5, 1), (-4, 0), (-3, 0)), of((3, 1), (4, 1), (5, 0)), of((1, 1)), train[:0],
    ]  # fmt: skip
    members = tuple(ClientData(train, test) for test in tests)
    return Federation("made", members, of((-1, 0), (1, 1)), ("a", "b"), (), "")


def test_of_one_model_by_hand(federation: Federation) -> None:
    found = quality(Resident(Slope(), CPU, False), federation, {"factor": torch.ones(1)}, None, CPU)
    p = 1 / (1 + np.exp(-1.0))
    assert found["auc"] == 1
    assert found["auc_within_clients"] == 0
    assert found["auc_by_client"] == [0, 0, None, None]  # one class, and no samples
    assert found["brier"] == pytest.approx((1 - p) ** 2)
    assert found["calibration_error"] == pytest.approx(1 - p)


def test_of_personal_models_each_on_its_own_split(federation: Federation) -> None:
    own = {0: {"factor": -torch.ones(1)}, 1: {"factor": torch.ones(1)}}
    found = quality(Resident(Slope(), CPU, False), federation, {}, own, CPU)
    # the first one's is turned round, so it is right; the scores of both together are 5, 4, 3 | 3, 4, 5
    assert found["auc_within_clients"] == 0.5
    assert found["auc_by_client"] == [1, 0, None, None]
    assert found["auc"] == pytest.approx(roc_auc_score([1, 0, 0, 1, 1, 0], [5, 4, 3, 3, 4, 5]))


def test_nothing_to_judge_by(federation: Federation) -> None:
    found = quality(Resident(Slope(), CPU, False), federation, {}, {}, CPU)
    assert set(found.values()) == {None}


def test_a_run_has_them(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    age = draw.normal(50, 10, 400)
    frame = pd.DataFrame({"age": age, "label": np.where(age + draw.normal(0, 10, 400) > 50, "yes", "no")})
    result = fedfill.run("fed3r", data=frame, clients=3, partition="iid", out=tmp_path / "run")
    found = result.summary
    assert found["auc"] > 0.7
    assert 0 < found["brier"] < 0.25
    assert found["auc_within_clients"] is not None
    assert 0 <= found["calibration_error"] < 0.5


def test_personal_models_of_a_run(tmp_path: Path) -> None:
    result = fedfill.run("local", clients=3, rounds=1, local_steps=2, out=tmp_path / "run")
    assert 0 <= result.summary["auc"] <= 1
    assert 0 <= result.summary["brier"] <= 1
