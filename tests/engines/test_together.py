"""Handlers in turn whose local trainings are stacked, and how the engine finds out whether that pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import refused, small_federation
from torch import nn

import fedfill
from fedfill.engines.runner import make_resident
from fedfill.engines.together import Calibration, Together, Train
from fedfill.models.views import weights_of
from fedfill.training.fit import Fit, Interrupted, LocalTraining
from fedfill.training.losses import cross_entropy

SETTINGS = {"data": "digits", "clients": 5, "rounds": 2, "local_epochs": 1, "seed": 1, "quiet": True}


def world() -> tuple[Together, list[Fit]]:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))

    def loss(model: nn.Module, batch: Any, context: Any) -> torch.Tensor:
        return cross_entropy(model, batch)

    start = weights_of(net)
    requests = [Fit(start, loss, client.train, LocalTraining(batch_size=8)) for client in small_federation().clients]
    return Together(make_resident(net, torch.device("cpu"))), requests


def streams(k: int) -> tuple[torch.Generator, torch.Generator]:
    return torch.Generator().manual_seed(k), torch.Generator().manual_seed(100 + k)


def test_handlers_go_on_in_turn_and_train_as_often_as_they_like() -> None:
    together, requests = world()
    seen: list[str] = []

    def job(k: int, times: int) -> Any:
        def run(train: Train) -> int:
            for _ in range(times):
                seen.append(f"{k} asks")
                fitted, seconds = train(together._resident, requests[k], *streams(k))
                seen.append(f"{k} has {fitted.steps}")
                assert seconds > 0
            return k

        return run

    assert together.run([job(0, 1), job(1, 2), job(2, 0)]) == [0, 1, 2]
    assert seen == ["0 asks", "1 asks", "0 has 5", "1 has 5", "1 asks", "1 has 5"]


def test_the_first_error_is_raised_when_all_are_done() -> None:
    together, requests = world()
    done: list[int] = []

    def good(train: Train) -> None:
        train(together._resident, requests[0], *streams(0))
        done.append(0)

    def bad(train: Train) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        together.run([bad, good])
    assert done == [0]


def test_a_run_that_is_stopped_ends_all_handlers() -> None:
    together, requests = world()
    together._resident.stop = True
    ended: list[int] = []

    def job(k: int) -> Any:
        def run(train: Train) -> None:
            try:
                train(together._resident, requests[k], *streams(k))
            except Interrupted:
                ended.append(k)
                raise

        return run

    with pytest.raises(Interrupted):
        together.run([job(0), job(1)])
    assert ended == [0, 1]


def test_where_the_memory_does_not_do_fewer_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    together, requests = world()
    expected = [
        together.run([lambda train, k=k: train(together._resident, requests[k], *streams(k))])[0] for k in (0, 1)
    ]

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("fedfill.engines.together.fit_stacked", full)
    most = together.most
    found = together.run([lambda train, k=k: train(together._resident, requests[k], *streams(k)) for k in (0, 1)])
    assert together.most == most // 2
    for (one, _), (other, _) in zip(expected, found, strict=True):  # from streams as they were before the attempt
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.mark.parametrize(("seconds", "stacks"), [((4.0, 9.0, 3.0), True), ((4.0, 9.0, 5.0), False)])
def test_the_faster_way_is_kept(seconds: tuple[float, ...], stacks: bool) -> None:
    calibration = Calibration()
    calibration.took(1.0, 0)  # no training
    assert not calibration.stacks
    tried = []
    for took in seconds:
        tried.append(calibration.stacks)
        calibration.took(took, 10)
    assert tried == [False, True, True]
    calibration.took(100.0, 10)
    assert calibration.stacks == stacks


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("fedavg", {}), ("scaffold", {}), ("fedbn", {"model": "cnn2bn"}), ("fedprox", {"head": "fed3r"}), ("local", {}),
        ("fedmix", {"group_size": 16}), ("fedavg", {"width": "wide", "dropout": 0.2}),
    ],
)  # fmt: skip
def test_a_run_is_the_same_but_for_rounding(algorithm: str, more: dict[str, Any], tmp_path: Path) -> None:
    one, other = (
        fedfill.run(algorithm, **SETTINGS, **more, **how, out=tmp_path / str(k))
        for k, how in enumerate(({"workers": 1}, {"stack": 3}))
    )
    for key in ("accuracy", "mean_client_accuracy"):
        assert one.summary[key] == pytest.approx(other.summary[key], abs=0.01)
    assert one.summary["bytes_by_handler"] == other.summary["bytes_by_handler"]
    assert [r["train_samples"] for r in one.rounds] == [r["train_samples"] for r in other.rounds]


@pytest.mark.parametrize("how", [{"workers": 2}, {"reply_timeout": 5.0}])
def test_what_does_not_go_with_it_is_refused(how: dict[str, Any], tmp_path: Path) -> None:
    with refused("stack", "3", next(iter(how))):
        fedfill.run("fedavg", **SETTINGS, **how, stack=3, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_it_is_for_the_local_engine(tmp_path: Path) -> None:
    with refused("stack", "3", "ray"):
        fedfill.run("fedavg", **SETTINGS, stack=3, engine="ray", out=tmp_path / "run")
