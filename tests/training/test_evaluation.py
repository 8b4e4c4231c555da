"""Evaluation: outcomes and shares by hand, and the same figures for any number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.engines.local import LocalEngine
from fedfill.models.layers import with_streams
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.training.evaluation import CHUNK, Evaluation, Scored, score, summarise
from fedfill.training.local import Resident
from fedfill.tree import Weights

CPU = torch.device("cpu")


class Line(nn.Module):
    """Scores (factor * x, 0) through dropout and batch norm, which in evaluation leave them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.drop = nn.Dropout(0.9)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.drop(torch.cat([x * self.factor, torch.zeros_like(x)], 1)))


def test_score_by_hand() -> None:
    # scores (x, 0) with x = ln 3: softmax (3/4, 1/4); dropout is off, batch norm keeps its running statistics
    model = with_streams(Line())
    model.norm.eps = 0.0  # type: ignore[union-attr, assignment]
    resident = Resident(model, CPU, False)
    resident.model.train()
    before = {name: tensor.clone() for name, tensor in resident.tensors.items()}
    x = math.log(3)
    scored = score(resident, Samples(torch.tensor([[x], [x], [-x]]), torch.tensor([0, 1, 0])))
    assert scored.correct.tolist() == [True, False, False]
    assert scored.losses.tolist() == pytest.approx([math.log(4 / 3), math.log(4), math.log(4)], abs=1e-6)
    assert all(torch.equal(before[name], tensor) for name, tensor in resident.tensors.items())


def test_summary_by_hand() -> None:
    test = Scored(torch.tensor([True, True, False, True]), torch.tensor([0.5, 1.0, 2.5, 0.0]))
    own = Scored(torch.tensor([False, True, True]), torch.zeros(3))
    result = summarise(test, torch.tensor([0, 2, 2, 2]), 4, own, torch.tensor([0, 0, 2]), 4)
    assert result == Evaluation(
        accuracy=0.75,
        loss=1.0,
        accuracy_by_class=[1.0, None, 2 / 3, None],
        accuracy_by_client=[0.5, None, 1.0, None],
    )


def test_summary_where_no_client_has_a_test_split() -> None:
    nothing = Scored(torch.zeros(0, dtype=torch.bool), torch.zeros(0))
    empty = torch.zeros(0, dtype=torch.int64)
    result = summarise(Scored(torch.tensor([True]), torch.zeros(1)), torch.tensor([1]), 2, nothing, empty, 3)
    assert result.accuracy_by_class == [None, 1.0]
    assert result.accuracy_by_client == [None, None, None]


@pytest.fixture(scope="module")
def federation(random_samples: Callable[..., Samples], make_federation: Callable[..., Federation]) -> Federation:
    """More than two chunks of test data, and test splits that cross the chunks' borders; the second client has none."""
    everything = random_samples(2 * CHUNK + 300)
    first, last = everything[:700], everything[700:1900]
    own = [Samples(first.inputs, first.labels * 0), everything[:0], Samples(last.inputs, last.labels * 0 + 1)]
    return make_federation([everything[:5]] * 3, own, everything)


def evaluate(federation: Federation, workers: int, weights: Weights) -> Evaluation:
    model = build("auto", (1, 8, 8), 3, ModelSettings(width="wide", dropout=0.5), seed=0)
    engine = LocalEngine(FedAvg(), federation, model, weights, seed=0, device=CPU, workers=workers)
    try:
        return engine.evaluate(weights)
    finally:
        engine.close()


def test_figures_are_the_same_for_any_number_of_workers_and_right(federation: Federation) -> None:
    model = build("auto", (1, 8, 8), 3, ModelSettings(width="wide", dropout=0.5), seed=4)
    weights = weights_of(model)
    one, two, five = (evaluate(federation, workers, weights) for workers in (1, 2, 5))
    assert one == two == five

    model.eval()
    with torch.no_grad():
        scores = model(federation.test.inputs.float() / 127.5 - 1)
    found, labels = scores.argmax(1), federation.test.labels
    hits = (found == labels).double()
    near = 3e-3  # a tie may fall the other way by rounding
    assert one.accuracy == pytest.approx(float(hits.mean()), abs=near)
    assert one.loss == pytest.approx(float(nn.functional.cross_entropy(scores, labels)), abs=1e-4)
    assert one.accuracy_by_class == pytest.approx([float(hits[labels == c].mean()) for c in range(3)], abs=near)
    clients = [float((found[:700] == 0).double().mean()), float((found[700:1900] == 1).double().mean())]
    assert abs(clients[0] - clients[1]) > 0.1
    assert one.accuracy_by_client[1] is None
    assert one.accuracy_by_client[::2] == pytest.approx(clients, abs=near)
