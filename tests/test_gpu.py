"""Every algorithm on a GPU that is pretended, where mixing devices is refused as a real one refuses it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.same_bits import KEPT, RESUMED, run, without_idle
from tests.helpers import without_mbi
from tests.pretended_gpu import GPU, OnGPU, WrongDeviceError, pretended_gpu
from torch.nn import functional

import fedfill
from fedfill.algorithms import known_algorithms
from fedfill.algorithms.fedavg import FedAvg
from fedfill.errors import ContractError
from fedfill.privacy.keyed import KeyedStream, normal
from fedfill.protocol.client import Client, client_handler

CASES = json.loads(KEPT.read_text())["cases"]
SHORT = {"data_fraction": 0.2, "client_test": 0.2}
"""Less data than the recordings have: what is looked at is where tensors are."""
OFTEN = ("half of the clients", RESUMED)
"""What cases have in common that says nothing of devices, but for one resumed run."""


@pytest.fixture(autouse=True)
def gpu():
    with pretended_gpu():
        yield


def options_of(name: str) -> dict[str, Any]:
    options = {**without_idle(CASES[name]["options"]), **SHORT, "device": "cuda"}
    if options.get("noise") == "dpsgd" and "target_epsilon" in options:  # the search for its noise takes seconds
        options["target_epsilon"] = 1.0
    if "fewest" in options:  # of so few rows
        options["fewest"] = 1
    return options


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith(OFTEN) or name == f"scaffold, {RESUMED}"])
def test_all_that_a_run_needs_is_on_its_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    without_mbi(monkeypatch)
    result = run(name, options_of(name), tmp_path / "run", workers=1)
    assert result.summary["machine"].count("pretended GPU") == 1


def test_no_algorithm_is_left_out():
    ours = {name for name, kind in known_algorithms().items() if kind.__module__.startswith("fedfill.")}
    assert ours == {name for name in CASES if name in ours}


QUICK = {"data": "digits", "clients": 4, "data_fraction": 0.2, "device": "cuda", "quiet": True}


def test_a_finished_run_is_used_on_a_gpu(tmp_path: Path):
    fedfill.run("fed3r", **QUICK, out=tmp_path / "sums")
    found = fedfill.predict(tmp_path / "sums", np.zeros((2, 8, 8), dtype=np.uint8), device="cuda")
    assert len(found.classes) == 2
    further = fedfill.run("fedavg", **QUICK, rounds=1, start_from=tmp_path / "sums", out=tmp_path / "further")
    assert fedfill.resume(further.directory, rounds=2, quiet=True).summary["rounds"] == 2
    assert fedfill.resume(further.directory, rounds=3, device="cpu", quiet=True).summary["rounds"] == 3


def test_synthetic_images_are_made_and_measured_on_a_gpu(tmp_path: Path):
    settings = {"images_per_class": 8, "classifier_epochs": 1, "image_size": 8}
    run = fedfill.run("fedgauss", **QUICK, **settings, out=tmp_path / "run")
    fedfill.synthesise(run.directory, per_class=4, out=tmp_path / "made.safetensors")
    fedfill.measure(run.directory, per_class=4, out=tmp_path / "measures")
    extra = fedfill.run("fedavg", **QUICK, rounds=1, extra=tmp_path / "made.safetensors", out=tmp_path / "with")
    assert extra.summary["rounds"] == 1


class Mistaken(FedAvg):
    """Clients that weight with numbers which lie on the CPU."""

    name = "mistaken"

    @client_handler
    def train(self, client: Client, message: Any) -> Any:
        reply = super().train(client, message)
        weight = torch.ones(len(client.data))
        return replace(reply, samples=float((weight * client.data.labels).sum()))


def test_a_mistake_in_an_algorithm_is_caught(tmp_path: Path):
    with pytest.raises(ContractError, match="no client could run 'train'") as caught:
        fedfill.run(Mistaken, data="digits", clients=2, rounds=1, device="cuda", out=tmp_path / "run", quiet=True)
    assert isinstance(caught.value.__cause__, WrongDeviceError)


# What a GPU refuses, and what it does not


def on(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cuda")


MISTAKES: dict[str, Callable[[], Any]] = {
    "a sum of both": lambda: on(1, 2) + torch.zeros(2),
    "in place": lambda: torch.zeros(2).add_(on(1, 2)).detach(),
    "a number on the GPU, numbers on the CPU": lambda: torch.zeros(2) * on(1)[0],
    "a product": lambda: on(1, 2) @ torch.ones(2),
    "joined": lambda: torch.cat([on(1, 2), torch.ones(2)]),
    "stacked numbers": lambda: torch.stack([on(1)[0], torch.tensor(1.0)]),
    "a loss with labels on the CPU": lambda: functional.cross_entropy(on(1, 2)[None], torch.tensor([1])),
    "a layer that stayed behind": lambda: torch.nn.Linear(2, 2)(on(1, 2)).detach(),
    "an index on the GPU": lambda: torch.zeros(2)[on(1, 0).long()],
    "a mask on the GPU": lambda: torch.zeros(2)[on(1, 0) > 0],
    "into NumPy": lambda: on(1, 2).numpy(),
    "into NumPy, unsaid": lambda: np.asarray(on(1, 2)).detach(),
    "a generator of the CPU": lambda: torch.randn(2, device="cuda", generator=torch.Generator()),
    "a generator of the CPU, in place": lambda: on(1, 2).normal_(generator=torch.Generator()),
    "a generator of the GPU": lambda: torch.randperm(3, generator=torch.Generator("cuda")),
    "noise from a stream of the GPU": lambda: normal(torch.Generator("cuda"), (2,), torch.device("cpu")),
    "where": lambda: torch.where(on(1, 0) > 0, torch.zeros(2), on(1, 2)),
    "many at once": lambda: torch._foreach_add_([on(1, 2)], [torch.ones(2)]),
    "under vmap": lambda: torch.vmap(lambda x: x + torch.ones(2))(on(1, 2).expand(3, 2)) + torch.ones(3, 2),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(mistake: str):
    with pytest.raises(WrongDeviceError):
        MISTAKES[mistake]()


SOUND: dict[str, Callable[[], torch.Tensor]] = {
    "a number on the CPU": lambda: on(1, 2) * torch.tensor(2.0),
    "an index on the CPU": lambda: on(1, 2)[torch.tensor([1, 0])],
    "made alike": lambda: on(1, 2).new_zeros(2) + torch.zeros_like(on(1, 2)).detach(),
    "copied over": lambda: on(1, 2).copy_(torch.ones(2)),
    "moved": lambda: on(1, 2) + torch.ones(2).to("cuda") + torch.ones(2).cuda() + torch.ones(2).to(on(1)),
    "a generator of the GPU": lambda: torch.randn(2, device="cuda", generator=torch.Generator("cuda")),
    "a network that moved": lambda: torch.nn.Linear(2, 2).to("cuda")(on(1, 2)).detach(),
    "noise from a keyed stream": lambda: normal(KeyedStream(bytes(32), device="cuda"), (2,), GPU),
    "a gradient": lambda: torch.autograd.grad((x := on(1, 2).requires_grad_()).sum(), [x])[0],
    "under vmap": lambda: torch.vmap(lambda x: x + x)(on(1, 2)).detach(),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_passes_and_stays_on_the_gpu(name: str):
    found = SOUND[name]()
    assert isinstance(found, OnGPU)
    assert found.device == GPU
    assert not isinstance(found.cpu(), OnGPU)
    assert found.cpu().numpy().shape == found.shape
    assert found.tolist() == found.cpu().tolist()
