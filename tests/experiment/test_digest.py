"""Which experiments are the same."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedfill
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.division import federate
from fedfill.errors import FedfillError
from fedfill.experiment.prepare import Prepared
from fedfill.experiment.settings import Experiment


def test_a_setting_that_is_none_leaves_an_experiment_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """This digest is of the time before there was `labelled_per_client`; a release alone may change it."""
    monkeypatch.setattr("fedfill.experiment.digest.__version__", "0")
    inputs, labels = np.arange(6, dtype=np.float32)[:, None], np.arange(6) % 2
    clients = [(inputs, labels, inputs, labels)] * 2
    initial = {"weight": torch.ones(2, 1), "bias": torch.zeros(2)}

    def digest(number: int | None) -> str:
        federation = federate(clients, seed=0)
        experiment = Experiment(algorithm="fedavg", labelled_per_client=number)
        return Prepared(experiment, FedAvg(), federation, nn.Linear(1, 2), initial).digest

    assert digest(None) == "41a3ed242c72c05c"
    assert len({digest(number) for number in (None, 1, 100)}) == 3


def test_what_a_network_of_ones_own_holds_beside_its_tensors_makes_another_experiment(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        power = 1

        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor
            self.linear = nn.Linear(64, 10)
            nn.init.zeros_(self.linear.weight)

        @staticmethod
        def shaped(x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.shaped(x)) * self.factor**self.power

    class Powered(Scaled):
        power = 2

    class Reshaped(Scaled):
        @staticmethod
        def shaped(x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1).flip(1)

    Powered.__qualname__ = Reshaped.__qualname__ = Scaled.__qualname__
    Powered.__name__ = Reshaped.__name__ = Scaled.__name__
    nets = [Scaled(1.0), Scaled(1.0), Scaled(2.0), Powered(1.0), Reshaped(1.0)]
    for net in nets:
        net.linear.bias.data.zero_()
    runs = [
        fedfill.run("fedavg", model=net, clients=2, rounds=1, local_epochs=1, out=tmp_path / str(i))
        for i, net in enumerate(nets)
    ]
    digests = [tomllib.loads((run.directory / "experiment.toml").read_text())["digest"] for run in runs]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_another_program_is_another_experiment(tmp_path: Path) -> None:
    """What a user's own classes do is part of the experiment, not only their settings and weights."""
    from fedfill.algorithms.fedavg import FedAvg

    def program(factor: float) -> type[FedAvg]:
        class Mine(FedAvg):
            name = "mine"

        if factor != 1:

            class Mine(FedAvg):  # type: ignore[no-redef]
                name = "mine"

                def loss(self, model: Any, batch: Any, context: Any) -> Any:
                    return 2 * super().loss(model, batch, context)

        return Mine

    try:
        fedfill.run(program(1), clients=2, rounds=1, local_epochs=1, out=tmp_path / "run")
        with pytest.raises(FedfillError, match="holds another experiment"):
            fedfill.run(program(2), clients=2, rounds=1, local_epochs=1, out=tmp_path / "run")
        nets = [
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), kind())
            for kind in (torch.nn.ReLU, torch.nn.Tanh)
        ]
        nets[1].load_state_dict(nets[0].state_dict())
        fedfill.run("fedavg", model=nets[0], clients=2, rounds=1, local_epochs=1, out=tmp_path / "net")
        with pytest.raises(FedfillError, match="holds another experiment"):
            fedfill.run("fedavg", model=nets[1], clients=2, rounds=1, local_epochs=1, out=tmp_path / "net")
    finally:
        from fedfill.algorithms._base import _registry

        _registry.pop("mine", None)


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [(object, "algorithm: found <class 'object'>"), (3, "algorithm: found 3"), ("nope", "unknown name 'nope'")],
)
def test_what_is_no_algorithm_is_refused(algorithm: Any, sentence: str) -> None:
    with pytest.raises(FedfillError, match=sentence):
        fedfill.run(algorithm, rounds=1)


def test_an_algorithm_without_a_name_of_its_own_is_refused(tmp_path: Path) -> None:
    from fedfill.algorithms.fedavg import FedAvg

    class Nameless(FedAvg):
        pass

    with pytest.raises(FedfillError, match="Nameless has no name of its own"):
        fedfill.run(Nameless, rounds=1, out=tmp_path / "run")
    with pytest.raises(FedfillError, match=r"the name 'fedavg' of .*Thief is taken by FedAvg"):

        class Thief(FedAvg):
            name = "fedavg"
