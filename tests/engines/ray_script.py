"""A user's script with classes of its own: ``ray_script.py FOLDER [ADDRESS]``, the address being a cluster's to join."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from torch import nn

from fedfill import tree
from fedfill.algorithms import Algorithm
from fedfill.data.federation import ClientData, Federation
from fedfill.data.samples import Samples
from fedfill.engines.local import LocalEngine
from fedfill.engines.ray import RayEngine
from fedfill.engines.runner import make_resident
from fedfill.models.views import weights_of
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.tree import Record


@dataclass(frozen=True)
class Part(Record):
    number: int = 1


@dataclass(frozen=True)
class Question(Message):
    folder: str
    parts: list[Part] = field(default_factory=lambda: [Part(2)])


def local_class() -> Any:
    @dataclass(frozen=True)
    class Reply(Message):
        weights: dict[str, torch.Tensor]
        part: Part

    return Reply


Reply = local_class()


class Net(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs * 2)


class Mine(Algorithm):
    @client_handler
    def answer(self, client: Client, question: Question) -> Any:
        model = client.model(client.initial)
        assert type(model).__name__ == "Net"
        client.state.kept = Part(client.id)
        if question.folder and client.id == 2 and not (Path(question.folder) / "died").exists():
            (Path(question.folder) / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        weights = {"sum": model(client.data.inputs).sum(0).detach()}
        return Reply(weights, Part(question.parts[0].number + client.id))

    @client_handler
    def wait(self, client: Client, question: Question) -> Any:
        ready = Path(question.folder, "ready")
        ready.with_suffix(".part").write_text(str(os.getpid()))
        ready.with_suffix(".part").rename(ready)
        time.sleep(600)


def start(kind: Any, **options: Any) -> Server:
    train = [Samples(torch.full((2, 3), i + 0.1), torch.zeros(2, dtype=torch.int64)) for i in range(4)]
    clients = tuple(ClientData(samples, samples) for samples in train)
    torch.manual_seed(0)
    model = Net(3, 2)
    federation = Federation("script", clients, train[0], ("a", "b"), (), "")
    initial = weights_of(model)
    engine = kind(Mine(), federation, model, initial, seed=0, device=torch.device("cpu"), workers=2, **options)
    return Server(
        engine, clients=4, classes=2, rounds=1, participation=1, seed=0, initial=initial,
        resident=make_resident(model, torch.device("cpu")), sample=federation.sample,
    )  # fmt: skip


def outcome(server: Server, folder: str = "") -> Any:
    like = {"weights": {"sum": torch.zeros(2)}}
    replies, means = server.average(range(4), Mine().answer, Question(folder), of=like, by=None)
    assert all(type(reply) is Reply and type(reply.part) is Part for reply in replies.values())
    engine = server._engine
    evaluation = engine.evaluate(server.initial, 0)
    return tree.sha256(means["weights"]), replies, evaluation, engine.states()


def main(address: str | None, folder: str) -> None:
    expected = outcome(start(LocalEngine))
    server = start(RayEngine, address=address)
    print(f"same bits {outcome(server, folder) == expected}, lost {server.lost}", flush=True)
    try:
        server.call([0], Mine().wait, Question(folder))  # until somebody stops the script
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except SystemExit:
        print("terminated", flush=True)
    server._engine.close()
    print(f"connected {ray.is_initialized()}")


if __name__ == "__main__":
    main(sys.argv[2] if len(sys.argv) > 2 else None, sys.argv[1])
