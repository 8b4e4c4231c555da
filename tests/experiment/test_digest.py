"""Which experiments are the same."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import refused
from torch import nn

import fedfill
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fedbn import FedBN
from fedfill.data.division import federate
from fedfill.experiment.digest import _programs
from fedfill.experiment.prepare import Prepared, arrange
from fedfill.experiment.settings import Experiment
from fedfill.models.networks import ModelSettings


def test_a_setting_that_is_none_leaves_an_experiment_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """This digest is of the time before there was `labelled_per_client`; a release alone may change it."""
    monkeypatch.setattr("fedfill.experiment.digest.__version__", "0")
    inputs, labels = np.arange(6, dtype=np.float32)[:, None], np.arange(6) % 2
    clients = [(inputs, labels, inputs, labels)] * 2
    initial = {"weight": torch.ones(2, 1), "bias": torch.zeros(2)}

    def digest(number: int | None, share: float | None = None) -> str:
        federation = federate(clients, seed=0)
        experiment = Experiment(algorithm="fedavg", labelled_per_client=number, test_fraction=share)
        assert ("test_fraction" in experiment.model_dump()) == (share is not None)
        return Prepared(experiment, FedAvg(), federation, nn.Linear(1, 2), initial).digest

    assert digest(None) == "41a3ed242c72c05c"
    assert len({digest(number) for number in (None, 1, 100)}) == 3
    assert len({digest(None, share) for share in (None, 0, 0.1)}) == 3


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
        with refused("out", tmp_path / "run", "another experiment"):
            fedfill.run(program(2), clients=2, rounds=1, local_epochs=1, out=tmp_path / "run")
        nets = [
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), kind())
            for kind in (torch.nn.ReLU, torch.nn.Tanh)
        ]
        nets[1].load_state_dict(nets[0].state_dict())
        fedfill.run("fedavg", model=nets[0], clients=2, rounds=1, local_epochs=1, out=tmp_path / "net")
        with refused("out", tmp_path / "net", "another experiment"):
            fedfill.run("fedavg", model=nets[1], clients=2, rounds=1, local_epochs=1, out=tmp_path / "net")
    finally:
        from fedfill.algorithms._registry import registered

        registered.pop("mine", None)


@pytest.mark.parametrize(("algorithm", "found"), [(object, "<class 'object'>"), (3, "found 3"), ("nope", "'nope'")])
def test_what_is_no_algorithm_is_refused(algorithm: Any, found: str) -> None:
    with refused("algorithm", found):
        fedfill.run(algorithm, rounds=1)


def test_an_algorithm_without_a_name_of_its_own_is_refused(tmp_path: Path) -> None:
    from fedfill.algorithms.fedavg import FedAvg

    class Nameless(FedAvg):
        pass

    with refused("algorithm", "Nameless", "no name"):
        fedfill.run(Nameless, rounds=1, out=tmp_path / "run")
    with refused("algorithm", "'fedavg'", "Thief", "FedAvg"):

        class Thief(FedAvg):
            name = "fedavg"


WORDS: dict[str, Any] = {"data": "digits", "partition": "dirichlet:0.5", "clients": 4, "rounds": 2, "seed": 0}


def test_a_default_that_does_not_apply_to_a_network_moves_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    def digests() -> dict[str, str]:
        return {
            model: arrange("fedavg", **{**WORDS, "model": model}).digest for model in ("mlp", "cnn2fc-small", "cnn2")
        }

    before = digests()
    monkeypatch.setattr(ModelSettings.model_fields["latent_activation"], "default", "relu")
    ModelSettings.model_rebuild(force=True)
    try:
        after = digests()
    finally:
        monkeypatch.undo()
        ModelSettings.model_rebuild(force=True)
    assert {model for model in before if before[model] != after[model]} == {"cnn2"}


def test_the_papers_preset_is_the_same_experiment_as_its_settings() -> None:
    def of(**options: Any) -> str:
        return arrange("fedbn", **{**WORDS, "model": "cnn2bn", **options}).digest

    own = FedBN.paper[""]
    explicit = {"learning_rate": 0.01, "optimizer": "sgd", "lr_decay": 1.0, "batch_size": 32}
    assert {name: own[name] for name in explicit} == explicit
    assert of(preset="paper", local_epochs=1) == of(**{**own, "local_epochs": 1})
    assert of(preset="paper") != of()
    assert of(preset="paper", learning_rate=0.5) == of(**{**own, "learning_rate": 0.5})


PROGRAM = '''
from fedfill.algorithms.fedavg import FedAvg


class Mine(FedAvg):
    """{doc}"""

    name = "mine-{name}"

    def combine(self, server, weights, mean, replies):
        {comment}
        return {{k: {value} for k, v in mean.items()}}
'''


def test_comments_docstrings_and_layout_of_ones_own_class_move_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def of(name: str, doc: str, comment: str, value: str) -> list[str]:
        (tmp_path / f"own_{name}.py").write_text(PROGRAM.format(name=name, doc=doc, comment=comment, value=value))
        return _programs(importlib.import_module(f"own_{name}").Mine)

    def functions(found: list[str]) -> list[str]:
        return [line.replace("-first", "").replace("-second", "").replace("-third", "") for line in found]

    first = functions(of("first", "One.", "pass", "v"))
    assert first == functions(of("second", "Two.", "pass  # nothing to do", "(v)"))
    assert first != functions(of("third", "One.", "pass", "-v"))


STEP = 1.0
SEEN: list[int] = []


def _stepped(factor: float) -> float:
    return factor * STEP


class _Stepping(FedAvg):
    def step(self) -> float:
        SEEN.append(1)  # what a run may change is no part of the experiment
        return max([_stepped(factor) for factor in (1.0, 2.0)])


def test_what_a_class_names_in_its_file_makes_another_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _programs(_Stepping)
    assert [line for line in before if line.startswith(("_stepped: ", "STEP = 1.0"))] != []
    SEEN.append(2)
    assert _programs(_Stepping) == before
    monkeypatch.setitem(globals(), "STEP", 2.0)
    assert _programs(_Stepping) != before
    monkeypatch.undo()

    def _stepped(factor: float) -> float:
        return factor + STEP

    monkeypatch.setitem(globals(), "_stepped", _stepped)
    assert _programs(_Stepping) != before
