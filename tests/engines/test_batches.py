"""Handlers that take the steps of a training themselves: the mini-batches of `fit`, counted and ended like it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
from tests.helpers import Run, bars
from torch import nn
from torch.nn import functional

from fedfill.algorithms import Algorithm
from fedfill.engines.runner import make_resident
from fedfill.models.views import weights_of
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.streams import torch_stream
from fedfill.training.fit import Interrupted, LocalTraining, batches, mini_batches, training_mode
from fedfill.tree import Weights


@dataclass(frozen=True)
class Task(Message):
    weights: Weights
    by_hand: bool


@dataclass(frozen=True)
class Done(Message):
    weights: Weights
    seen: list[list[int]]


class Stepping(Algorithm):
    """Trains twice, by `fit` or step by step."""

    optimizer: str = "sgd"
    batch_size: int = 16
    local_epochs: int = 2

    def round(self, server: Server, t: int) -> None:
        server.replies = server.call([0, 2], self.train, Task(server.initial, t % 2 == 1))  # type: ignore[attr-defined]

    @client_handler
    def train(self, client: Client, message: Task) -> Done:
        weights, seen = message.weights, []
        training = LocalTraining(self.local_epochs, None, self.batch_size, "sgd", 0.05)

        def loss(model: nn.Module, batch, context) -> torch.Tensor:
            seen.append(batch.index.tolist())
            return functional.cross_entropy(model(batch.inputs), batch.labels)

        for _ in range(2):
            if not message.by_hand:
                weights = (client.fit(weights, loss, training)).weights
                continue
            model = client.model(weights)
            assert not model.training
            training_mode(model, "average")
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            for batch in client.batches(training):
                optimizer.zero_grad()
                loss(model, batch, None).backward()
                optimizer.step()
            weights = weights_of(model)
        return Done(weights, seen)


def test_steps_by_hand_are_those_of_fit():
    run = Run(Stepping(), {"width": "wide"}, 1, 1.0, 2)
    found = []
    for t in (0, 1):
        run.server.begin(0)  # the streams of both are those of one round
        run.algorithm.round(run.server, t)
        found.append((run.server.replies, run.server.costs.train_samples, run.server.costs.fit_seconds))
    run.engine.close()
    (fitted, samples, seconds), (stepped, both, after) = found
    for i in (0, 2):
        assert stepped[i].seen == fitted[i].seen
        assert len(fitted[i].seen) == 2 * 2 * 3  # 40 samples in batches of 16
        assert fitted[i].seen[:6] != fitted[i].seen[6:]  # the second training has an order of its own
        assert all(torch.allclose(stepped[i].weights[n], t, atol=1e-6) for n, t in fitted[i].weights.items())
    assert fitted[0].seen != fitted[2].seen
    assert (samples, both - samples) == (2 * 2 * 2 * 40, 2 * 2 * 2 * 40)
    assert after > seconds > 0


def test_mini_batches_by_hand():
    data = bars(10, [0, 1], 0)
    resident = make_resident(nn.Conv2d(1, 1, 1), torch.device("cpu"))

    def found(training: LocalTraining, per_epoch: int | None = None) -> list:
        return list(mini_batches(resident, data, training, torch_stream(0, "x"), per_epoch))

    order = torch_stream(0, "x")
    expected = [index for _ in range(2) for index in batches(torch.randperm(10, generator=order), 4)]
    got = found(LocalTraining(epochs=2, batch_size=4))
    assert [batch.index.tolist() for batch in got] == [index.tolist() for index in expected]
    for batch in got:
        assert torch.equal(batch.labels, data.labels[batch.index])
        assert torch.allclose(batch.inputs, data.inputs[batch.index].float() / 127.5 - 1)
        assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
    assert [len(b.index) for b in found(LocalTraining(steps=4, batch_size=4))] == [4, 4, 2, 4]
    assert found(LocalTraining(steps=0)) == []
    assert [len(b.index) for b in found(LocalTraining(epochs=2, batch_size=4), 5)] == [5, 5]  # 4, and 1 that joins them
    assert list(mini_batches(resident, data[:0], LocalTraining(steps=3), torch_stream(0, "x"))) == []


def test_they_end_where_a_training_would():
    resident = make_resident(nn.Linear(1, 1), torch.device("cpu"))
    taking = mini_batches(resident, bars(10, [0], 0), LocalTraining(batch_size=2), torch_stream(0, "x"))
    next(taking)
    resident.stop = True
    with pytest.raises(Interrupted):
        next(taking)
    resident.stop, resident.deadline = False, time.monotonic() - 1
    with pytest.raises(TimeoutError):
        next(mini_batches(resident, bars(10, [0], 0), LocalTraining(), torch_stream(0, "x")))


def test_frozen_statistics_are_normalised_with_and_stay():
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.5), nn.BatchNorm1d(1, track_running_stats=False)).eval()
    training_mode(model, "frozen")
    assert [layer.training for layer in model] == [False, True, True]  # the last has none that could be frozen
    training_mode(model, "average")
    assert all(layer.training for layer in model)
