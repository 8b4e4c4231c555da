"""Whether a network fits its data and can be trusted."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.experiment.world import PLAIN, Net, lines
from tests.helpers import refused
from torch import nn

import fedfill
from fedfill.experiment.prepare import arrange


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        (Net(features=32), ("Net", "[1, 8, 8]", "1x64")),
        (Net(classes=7), ("Net", "[1, 7]", "[1, 10]")),
        ("cnn3", ("'cnn3'", "'cnn4'")),
    ],
)
def test_a_model_that_does_not_fit(model: Any, facts: tuple[str, ...], tmp_path: Path) -> None:
    with refused("model", *facts):
        fedfill.run("fedavg", model=model, clients=4, **PLAIN, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def with_batch_norm() -> nn.Module:
    """The trial on one sample gets as far as the second batch norm, past one that follows it and a layer that draws."""
    first = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(64, 8))
    return nn.Sequential(first, nn.BatchNorm1d(8), nn.Linear(8, 2))


def with_sizes(*sizes: int) -> list[Any]:
    images = np.arange(1280, dtype=np.uint8).reshape(20, 8, 8)
    return [(images[:n], np.arange(n) % 2, images, np.arange(20) % 2) for n in sizes]


ONE = r"^On one labelled sample at a time the batch norm .*: clients with one training sample: 1 of 3 \(1\)\. Where"


@pytest.mark.parametrize(
    ("algorithm", "model"), [("fedavg", "mlp"), ("fedbn", "mlp"), ("fraug", "mlp"), ("fedavg", None)]
)
def test_a_client_with_one_sample_under_batch_norm_is_lost_and_counted(
    algorithm: str, model: str | None, tmp_path: Path
) -> None:
    given = {"data": with_sizes(20, 1, 20), "model": model or with_batch_norm(), "rounds": 1, "local_steps": 2}
    state = torch.get_rng_state()
    result = fedfill.run(algorithm, **given, out=tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(re.match(ONE, note) is not None for note in result.summary["notes"]) == 1
    (lost,) = lines(tmp_path / "run")[0]["lost"]
    assert lost["client"] == 1
    assert lost["reason"].startswith("batch norm can't be trained on one sample, but buffers=frozen or")
    frozen = fedfill.run(algorithm, **given, buffers="frozen", out=tmp_path / "frozen")
    assert frozen.summary["lost_replies"] == 0
    assert not any(re.match(ONE, note) for note in frozen.summary["notes"])


def test_trying_one_sample_leaves_the_network() -> None:
    model = with_batch_norm()
    initial = arrange("fedavg", data=with_sizes(20, 1, 20), partition="given", model=model, rounds=1).initial
    assert initial.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, initial[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("sizes", "given"),
    [((1, 1), {}), ((20, 1), {"participation": 0.5}), ((20, 20, 1), {"min_replies": 3}), ((20, 20), {"batch_size": 1})],
)
@pytest.mark.parametrize("own", [False, True])
def test_one_sample_is_refused_where_a_round_could_not_do_without(
    sizes: tuple[int, ...], given: dict[str, Any], own: bool, tmp_path: Path
) -> None:
    found = "batch_size=1" if "batch_size" in given else "clients with one training sample: "
    model = with_batch_norm() if own else "mlp"
    with refused("model", "batch norm", "one sample", found, "two samples"):
        fedfill.run("fedavg", data=with_sizes(*sizes), model=model, **given, rounds=1, out=tmp_path / "x")
    assert not list(tmp_path.iterdir())


class Contrasts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) < 2:
            raise ValueError("two are needed")
        return self.linear(x.flatten(1))


def test_a_network_that_takes_no_single_sample_for_another_reason() -> None:
    with refused("model", "Contrasts", "one sample", "two are needed", "client 1"):
        fedfill.run("fedavg", data=with_sizes(20, 1, 20), model=Contrasts(), rounds=1)


FEW: dict[str, Any] = {"clients": 3, "rounds": 1, "data_fraction": 0.2, "labelled_per_client": 1, "model": "mlp"}


@pytest.mark.parametrize("algorithm", ["fedavg", "mixup"])
def test_where_all_lose_their_replies_to_batch_norm_the_run_ends_with_a_sentence(algorithm: str) -> None:
    with refused("min_replies", "batch norm"):
        fedfill.run(algorithm, **FEW, local_steps=1)


def test_one_label_beside_samples_without_is_enough_for_fixmatch_and_semifl() -> None:
    assert fedfill.run("fixmatch", **FEW, local_steps=1).summary["lost_replies"] == 0
    assert fedfill.run("fixmatch", **FEW, local_steps=1, batch_size=1).summary["lost_replies"] == 0
    prepared = arrange("semifl", data="digits", partition="iid", **FEW)
    assert not any(note.startswith("On one labelled sample") for note in prepared.federation.notes)


def test_a_module_without_the_named_parts(tmp_path: Path) -> None:
    with refused("model", "feddpms", "encoder, classifier, decoder", "Net has no 'encoder'"):
        fedfill.run("feddpms", model=Net(), clients=4, **PLAIN, out=tmp_path / "run")
    with refused("model setting", "latent"):
        fedfill.run("fedavg", model=Net(), clients=4, **PLAIN, latent=3, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


class Noisy(Net):
    """Draws from the global generator behind the library's back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn(1) * self.training


class Hidden(Net):
    """Keeps a buffer that the state dict does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1), persistent=False)


def frozen() -> Net:
    net = Net()
    return net.requires_grad_(False)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return nn.Sequential(nn.Flatten(), torch.nn.utils.weight_norm(nn.Linear(64, 10)))


def test_a_network_with_dropout_is_taken_and_gives_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 10))
    sums = {
        fedfill.run(
            "fedavg",
            data="digits",
            model=net,
            clients=3,
            rounds=2,
            local_steps=2,
            workers=workers,
            out=tmp_path / str(workers),
        ).summary["weights_sha256"]
        for workers in (1, 2)
    }
    assert len(sums) == 1


class OnlyEvaluated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise NotImplementedError
        return self.linear(x.flatten(1))


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        (Noisy(), ("Noisy", "global generator")),
        (Hidden(), ("Hidden", "'seen'", "state dict")),
        (frozen(), ("Net", "nothing to train")),
        (old_weight_norm(), ("Sequential", "copied", "torch.nn.utils.parametrizations.weight_norm")),
        (3, ("3", "a torch.nn.Module")),
        (None, ("None",)),
        (OnlyEvaluated(), ("OnlyEvaluated", "trained", "NotImplementedError")),
    ],
)
def test_models_whose_results_could_not_be_trusted_are_refused(
    model: Any, facts: tuple[object, ...], tmp_path: Path
) -> None:
    images, labels = np.zeros((41, 8, 8), np.uint8), np.arange(41) % 10
    clients = [(images[:40], labels[:40], images, labels), (images[40:], labels[40:], images, labels)]
    with refused("model", *facts):
        fedfill.run("fedavg", data=clients, model=model, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_lazy_model_gets_its_shape_before_its_weights_are_taken(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10))
    result = fedfill.run("fedavg", model=net, clients=2, rounds=1, local_epochs=1, out=tmp_path / "run")
    assert result.weights["1.weight"].shape == (10, 64)
