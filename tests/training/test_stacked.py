"""Local trainings as one stacked program, beside the same ones one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfill.data.samples import Batch, Samples
from fedfill.models.layers import Gaussian, with_streams
from fedfill.training.fit import Context, Fit, Fitted, LocalTraining, Penalty, Resident, fit
from fedfill.training.losses import cross_entropy
from fedfill.training.stacked import NotStackedError, fit_stacked, kind_of
from fedfill.tree import Weights

CPU = torch.device("cpu")


def plain(model: nn.Module, batch: Batch, context: Context) -> Tensor:
    return cross_entropy(model, batch)


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(36, 4)
    )  # fmt: skip


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


class Drawing(nn.Module):
    """Codes with noise from the client's stream."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.noise, self.last = nn.Linear(64, 6), Gaussian(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        code = self.code(x.flatten(1))
        return self.last(self.noise(code, code.square()))  # type: ignore[no-any-return]


class World:
    """Clients of some sizes with a network, and what each way of training them brings."""

    def __init__(
        self, make: Callable[[], nn.Module], sizes: Sequence[int], training: LocalTraining, *,
        loss: Any = plain, penalty: bool = False, apart: bool = False,
    ) -> None:  # fmt: skip
        stream = torch.Generator().manual_seed(0)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = with_streams(make())
        self.weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        self.requests = []
        for k, n in enumerate(sizes):
            images = torch.randint(0, 256, (n, 1, 8, 8), dtype=torch.uint8, generator=stream)
            data = Samples(images, torch.randint(0, 4, (n,), generator=stream))
            start = {name: w + 0.01 * k * apart if w.is_floating_point() else w for name, w in self.weights.items()}
            start = start if apart else self.weights
            slope = {name: torch.full_like(w, 0.01 * (k + 1)) for name, w in start.items() if w.is_floating_point()}
            self.requests.append(
                Fit(start, loss, data, training, None, Penalty(0.3, start, slope) if penalty else None)
            )
        self.resident = Resident(net, CPU, channels_last=False)

    def streams(self, first: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(first + k) for k in range(len(self.requests))]

    def alone(self) -> list[Fitted]:
        streams = zip(self.requests, self.streams(10), self.streams(50), strict=True)
        return [fit(self.resident, request, order, draws) for request, order, draws in streams]

    def stacked(self) -> list[Fitted]:
        return fit_stacked(self.resident, self.requests, self.streams(10), self.streams(50))

    def agree(self, tolerance: float = 2e-6) -> None:
        for one, other in zip(self.alone(), self.stacked(), strict=True):
            assert (one.steps, one.samples) == (other.steps, other.samples)
            assert one.loss == pytest.approx(other.loss, abs=1e-5)
            assert list(one.weights) == list(other.weights)
            for name, tensor in one.weights.items():
                assert tensor.dtype == other.weights[name].dtype
                assert torch.allclose(tensor.double(), other.weights[name].double(), atol=tolerance), name
            moved = max(float((w.double() - self.weights[n].double()).abs().max()) for n, w in one.weights.items())
            assert moved > 1000 * tolerance or not one.steps


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "learning_rate": 0.1},
    "momentum": {"optimizer": "sgd", "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "learning_rate": 0.01, "weight_decay": 0.01},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.1},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sizes", [(16, 16, 16), (40, 23, 8, 0, 17)], ids=["alike", "unlike"])
def test_each_client_has_what_it_has_alone(sizes: tuple[int, ...], optimizer: str) -> None:
    World(dense, sizes, LocalTraining(epochs=2, batch_size=8, **OPTIMIZERS[optimizer])).agree(1e-5)


@pytest.mark.parametrize("make", [convolutions, batch_norm, Drawing])
def test_layers_draw_from_each_clients_stream_and_keep_its_statistics(make: Callable[[], nn.Module]) -> None:
    World(make, (24, 17, 8), LocalTraining(epochs=2, batch_size=8, optimizer="sgd", learning_rate=0.05)).agree()


def test_frozen_statistics_stay() -> None:
    training = LocalTraining(epochs=1, batch_size=8, optimizer="sgd", learning_rate=0.05, buffers="frozen")
    world = World(batch_norm, (16, 24), training)
    world.agree()
    for fitted in world.stacked():
        assert torch.equal(fitted.weights["1.running_mean"], world.weights["1.running_mean"])


@pytest.mark.parametrize("apart", [False, True])
def test_penalties_and_starts_are_each_clients_own(apart: bool) -> None:
    training = LocalTraining(steps=7, batch_size=8, optimizer="sgd", learning_rate=0.05)
    World(dense, (24, 17, 9), training, penalty=True, apart=apart).agree()


def test_augmentation_draws_from_each_clients_stream() -> None:
    World(dense, (24, 17), LocalTraining(epochs=2, batch_size=8, augmentation="shift", learning_rate=0.01)).agree(1e-5)


def test_a_loss_may_look_at_what_was_received_at_positions_and_at_the_step() -> None:
    def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        far = sum((p - context.received[name]).square().sum() for name, p in model.named_parameters())
        return cross_entropy(model, batch) * (1 + 0.01 * batch.index.double().mean()) + context.step * far

    training = LocalTraining(epochs=2, batch_size=8, optimizer="sgd", learning_rate=0.01)
    World(dense, (24, 17), training, loss=loss, apart=True).agree()


def branches(model: nn.Module, batch: Batch, context: Context) -> Tensor:
    value = cross_entropy(model, batch)
    return value * 2 if value > 1 else value


def draws(model: nn.Module, batch: Batch, context: Context) -> Tensor:
    return cross_entropy(model, batch) * torch.rand((), generator=context.generator)


def draws_globally(model: nn.Module, batch: Batch, context: Context) -> Tensor:
    return cross_entropy(model, batch) * torch.rand(())


@pytest.mark.parametrize("loss", [branches, draws, draws_globally])
def test_what_can_not_be_stacked_is_refused(loss: Any) -> None:
    with pytest.raises(NotStackedError):
        World(dense, (16, 16), LocalTraining(batch_size=8), loss=loss).stacked()


def test_what_trainings_of_one_kind_have_in_common() -> None:
    training = LocalTraining(batch_size=8)
    one, other = World(dense, (16, 9), training).requests
    assert kind_of(one) == kind_of(other)
    for different in (
        World(dense, (16,), LocalTraining(batch_size=9)),
        World(dense, (16,), training, loss=branches),
        World(dense, (16,), training, penalty=True),
        World(convolutions, (16,), training),
    ):
        assert kind_of(different.requests[0]) != kind_of(one)


@pytest.mark.parametrize("moving", ["4.", "0."], ids=["head", "body"])
@pytest.mark.parametrize("apart", [False, True])
def test_tensors_that_are_fixed(moving: str, apart: bool) -> None:
    """With batch norm among them: its statistics are normalised with, and stay."""
    world = World(batch_norm, (16, 16, 9), LocalTraining(epochs=2, batch_size=8, **OPTIMIZERS["momentum"]), apart=apart)
    for k, request in enumerate(world.requests):
        parts: list[Weights] = [
            {name: w for name, w in request.weights.items() if name.startswith(moving) is own} for own in (True, False)
        ]
        world.requests[k] = replace(request, weights=parts[0], fixed=parts[1])
    world.agree(4e-6)
    for request, fitted in zip(world.requests, world.alone(), strict=True):
        assert fitted.weights.keys() == request.weights.keys()
        assert all(torch.equal(world.resident.tensors[name], w) for name, w in world.requests[-1].fixed.items())
    assert kind_of(world.requests[0]) != kind_of(replace(world.requests[0], weights=world.weights, fixed={}))
