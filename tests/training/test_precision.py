"""Local training in bfloat16: numbers worked by hand, what stays in float32, and where it is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.helpers import refused, small_federation
from torch import Tensor, nn

from fedfill.data.samples import Batch, Samples
from fedfill.models.views import weights_of
from fedfill.training import precision
from fedfill.training.fit import Context, Fit, Fitted, LocalTraining, Resident, fit
from fedfill.training.losses import cross_entropy
from fedfill.training.precision import autocast, require_fast, slowdown

CPU = torch.device("cpu")
LAST_BIT = 2.0**-9
"""1 + 2^-9 is a number in float32; in bfloat16, with eight bits, it is 1."""


class Spy(nn.Module):
    """Lets its input through, and says of which type it is."""

    def __init__(self, note: Callable[[torch.dtype], None]) -> None:
        super().__init__()
        self.note = note

    def forward(self, x: Tensor) -> Tensor:
        self.note(x.dtype)
        return x


def train(net: nn.Module, data: Samples, loss: Any, kind: precision.Precision, **training: Any) -> Fitted:
    resident = Resident(net, CPU, channels_last=False, precision=kind)
    order, draws = (torch.Generator().manual_seed(k) for k in range(2))
    return fit(resident, Fit(weights_of(net), loss, data, LocalTraining(**training)), order, draws)


@pytest.mark.parametrize(("kind", "slope"), [("float32", 2 * (1 + LAST_BIT)), ("bfloat16", 2.0)])
def test_a_step_by_hand(kind: precision.Precision, slope: float) -> None:
    """Of (wx)^2 at w = 1 + 2^-9 and x = 1: the product is rounded, the weight that moves is not."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 1 + LAST_BIT)

    def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        return model(batch.inputs).square().mean()  # type: ignore[no-any-return]

    data = Samples(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))
    done = train(net, data, loss, kind, optimizer="sgd", learning_rate=0.25)
    assert done.weights["weight"].dtype == torch.float32
    assert done.weights["weight"].item() == 1 + LAST_BIT - slope / 4
    assert done.loss == (slope / 2) ** 2


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_layers_and_losses_compute_in_it_and_nothing_else_does(kind: precision.Precision) -> None:
    seen: list[torch.dtype] = []
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        Spy(seen.append),
        nn.Flatten(),
        nn.Linear(144, 8),
        Spy(seen.append),
        nn.Linear(8, 4),
    )
    kept: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        kept.extend(p.grad.dtype for p in model.parameters() if p.grad is not None)
        kept.extend([batch.inputs.dtype, *(tensor.dtype for tensor in context.received.values())])
        found = cross_entropy(model, batch)
        kept.append(found.dtype)
        return found

    done = train(net, small_federation().clients[0].train, loss, kind, batch_size=16)
    assert set(seen) == {getattr(torch, kind)}
    assert not torch.is_autocast_enabled("cpu")
    assert {dtype for dtype in kept if dtype.is_floating_point} == {torch.float32}
    assert {tensor.dtype for tensor in done.weights.values() if tensor.is_floating_point()} == {torch.float32}


def test_what_comes_of_it_is_near_and_not_the_same() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4))

    def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model, batch)

    full, low = (
        train(net, small_federation().clients[0].train, loss, kind, optimizer="sgd", learning_rate=0.1)
        for kind in ("float32", "bfloat16")
    )
    for name, weight in full.weights.items():
        step = (weight - weights_of(net)[name]).norm()
        assert 0 < (low.weights[name] - weight).norm() < 0.05 * step


def test_no_thread_changes_what_another_one_rounds() -> None:
    """Torch keeps weights that were cast for all threads, until any of them leaves its autocast; so it must keep none."""
    net = nn.Linear(64, 4)
    nn.init.normal_(net.weight, generator=torch.Generator().manual_seed(0))

    def elsewhere() -> None:
        with autocast(CPU, "bfloat16"):
            pass
        with torch.autocast("cpu", torch.bfloat16):
            pass

    def trained(meddling: bool) -> Tensor:
        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            images = batch.inputs.flatten(1)
            first = model(images)
            if meddling:
                other = threading.Thread(target=elsewhere)
                other.start()
                other.join()
            scores = first + model(-images * 0.3).exp()  # the weight is used twice: its gradients are added
            return torch.nn.functional.cross_entropy(scores, batch.labels)

        data = small_federation().clients[0].train
        return train(net, data, loss, "bfloat16", optimizer="sgd", learning_rate=0.1).weights["weight"]

    assert torch.equal(trained(True), trained(False))


# Where it is refused


@pytest.mark.parametrize("times", [0.91, 6.54])
def test_a_processor_that_is_not_faster_is_refused_with_the_factor(
    times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "slowdown", lambda: times)
    with refused("precision", "bfloat16", f"{times:.2g} times", "allowed: float32"):
        require_fast(CPU)


def test_a_processor_that_is_faster_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "slowdown", lambda: 0.9)
    require_fast(CPU)


@pytest.mark.parametrize("has", [True, False])
def test_a_gpu_s_driver_is_asked(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device) or nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has or including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old 1000")
    monkeypatch.setattr(precision, "slowdown", lambda: pytest.fail("the processor trains nothing"))
    with nullcontext() if has else refused("precision", "bfloat16", "Old 1000", "float32"):
        require_fast(torch.device("cuda", 1))
    assert asked == [torch.device("cuda", 1)]


def test_the_factor_is_the_median_over_pairs_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves by what a step is said to take: bfloat16's steps below, float32's two seconds each."""
    now = 0.0
    lower = iter([100.0, 3.0, 9.0, 3.0, 1.0, 3.0])
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    real = autocast

    def timed(device: torch.device, kind: precision.Precision) -> Any:
        nonlocal now
        now += next(lower) if kind == "bfloat16" else 2.0
        return real(device, kind)

    monkeypatch.setattr(precision, "autocast", timed)
    monkeypatch.setattr(precision.time, "perf_counter", lambda: now)
    assert slowdown.__wrapped__() == 1.5
    assert next(lower, None) is None
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_this_processor_is_timed() -> None:
    assert 0 < slowdown() < 1000
    assert slowdown() is slowdown(), "once in a process"
