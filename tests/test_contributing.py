"""The example of CONTRIBUTING.md runs as it stands, and is as short as the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.helpers import run_rounds, scripted

from fedfill.algorithms import Update
from fedfill.algorithms._registry import registered
from fedfill.algorithms.fedvae import FedVAE
from fedfill.catalogue import when


class One(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))


TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


@pytest.fixture
def example():
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL).group(1)
    assert len(code.splitlines()) <= 30
    names = {"__name__": "heavyball"}
    exec(compile(code, "heavyball.py", "exec"), names)
    yield names["HeavyBall"]
    registered.pop("heavyball")


def test_the_example_passes_the_linter():
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL).group(1)
    words = ["check", "--quiet", "--stdin-filename", "src/fedfill/algorithms/heavyball.py", "-"]
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-m", "ruff", *words], input=code, text=True, capture_output=True, cwd=root)
    assert done.returncode == 0, done.stdout


def test_the_example_says_when_to_use_it(example):
    assert re.fullmatch(r"Use it \S.*\.", when(example.__doc__))


def test_the_example_is_server_momentum_by_hand(example):
    server, engine = scripted(clients=2, weights={"w": torch.tensor([0.0]), "mean": torch.tensor([0.0])}, model=One())
    algorithm = example(server_momentum=0.5)
    server.state.velocity = algorithm.server_state(server.initial)["velocity"]
    engine.script["train"] = lambda i, message, t: Update({k: w + 1 for k, w in message.weights.items()}, 1)
    algorithm.round(server, 0)
    assert server.state.weights["w"].item() == 1.0
    algorithm.round(server, 1)
    assert server.state.weights["w"].item() == 1.0 + 1.5
    assert server.state.weights["mean"].item() == 2.0


def test_the_example_composes(example):
    plain = run_rounds(FedVAE(local_epochs=1, batch_size=8), rounds=3).state.weights
    composed = run_rounds(FedVAE(local_epochs=1, batch_size=8, aggregation="heavyball"), rounds=3).state.weights
    assert not all(torch.equal(composed[name], tensor) for name, tensor in plain.items())


def test_the_example_runs_by_its_name(example, tmp_path):
    import fedfill

    result = fedfill.run("heavyball", rounds=2, clients=3, local_epochs=1, server_momentum="0.8", out=tmp_path / "run")
    assert result.summary["algorithm"] == "heavyball"
