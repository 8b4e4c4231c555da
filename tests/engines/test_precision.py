"""Local training in bfloat16 on all engines: the setting reaches the clients, and who is slow at it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from ray.exceptions import RayTaskError
from tests.engines.in_process import InProcessEngine
from tests.engines.pooled_ray import PooledEngine
from tests.helpers import CLASSES, refused, small_federation

from fedfill import tree
from fedfill.algorithms.fedavg import FedAvg
from fedfill.deployment import programs
from fedfill.deployment.host_data import Task
from fedfill.engines.local import LocalEngine
from fedfill.engines.ray_cluster import foreign
from fedfill.engines.ray_worker import Actor, Setup, pack
from fedfill.engines.runner import make_resident
from fedfill.errors import FedfillError
from fedfill.experiment.prepare import arrange
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.protocol.client import State
from fedfill.protocol.server import Server
from fedfill.training import precision

CPU = torch.device("cpu")
NET = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), needs=(), seed=0)


def trained(kind: Any, **options: Any) -> str:
    """The hash of the weights after a round on an engine."""
    federation, initial, algorithm = small_federation(), weights_of(NET), FedAvg(local_epochs=1, batch_size=8)
    engine = kind(algorithm, federation, NET, initial, seed=0, **options)
    try:
        server = Server(
            engine, clients=4, classes=CLASSES, rounds=1, participation=1.0, seed=0, initial=initial,
            resident=make_resident(NET, CPU), sample=federation.sample,
        )  # fmt: skip
        server.state = State(algorithm.server_state(initial))
        server.begin(0)
        algorithm.round(server, 0)
        assert server.lost == []
        return tree.sha256(server.state.weights)
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_every_engine_gives_the_same_bits(kind: str) -> None:
    here = trained(LocalEngine, device=CPU, workers=2, precision=kind)
    assert trained(PooledEngine, device=CPU, workers=2, precision=kind) == here
    assert trained(InProcessEngine, precision=kind) == here
    other = {"float32": "bfloat16", "bfloat16": "float32"}[kind]
    assert trained(LocalEngine, device=CPU, workers=1, precision=other) != here


@pytest.mark.parametrize("joined", [True, False])
def test_a_worker_of_a_cluster_looks_at_its_own_processor(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "slowdown", lambda: 7.0)
    actor = Actor([])
    setup = Setup(
        program=FedAvg(), template=NET, kinds={}, initial=pack(weights_of(NET)), classes=CLASSES, schema=None, clients=4, seed=0,
        device="cpu", timeout=None, precision="bfloat16", joined=joined,
    )  # fmt: skip
    if not joined:  # the driver of this machine did
        actor.setup(setup)
        return
    with refused("precision", "bfloat16", "7 times"):
        actor.setup(setup)


def test_what_a_worker_says_is_the_driver_s_sentence() -> None:
    said = FedfillError("precision: found bfloat16, ...")
    found = foreign(RayTaskError("setup", "", said), ready=False)
    assert type(found) is FedfillError
    assert str(found) == str(said)


def test_a_host_looks_at_its_own_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"data": "digits", "data_fraction": 0.1, "partition": "iid", "model": "cnn2", "clients": 2}
    prepared = arrange("fedavg", **words, precision="bfloat16")
    given = {"partition-id": 1, "num-partitions": 2, "state-dir": str(tmp_path), "device": "cpu"}
    context = Context(run_id=1, node_id=1, node_config=given, state=RecordDict(), run_config={})
    monkeypatch.setattr(precision, "slowdown", lambda: 0.5)
    assert programs._site(prepared, Task.of(prepared.federation), context).precision == "bfloat16"
    monkeypatch.setattr(precision, "slowdown", lambda: 7.0)
    with refused("precision", "bfloat16", "7 times"):
        programs._site(prepared, Task.of(prepared.federation), context)
