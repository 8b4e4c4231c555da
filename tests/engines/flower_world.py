"""A federation on Flower's messages without its processes, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from tests.engines.in_process import InProcessEngine
from tests.helpers import CLASSES, TINY_GAN, run_rounds, small_federation

from fedfill import tree
from fedfill.algorithms import Algorithm, Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.feddpms import FedDPMS
from fedfill.algorithms.fedmix import FedMix
from fedfill.algorithms.scaffold import Scaffold
from fedfill.algorithms.sdafl import SDAFL
from fedfill.engines.flower_messages import Answer, Hello, encode, pack
from fedfill.engines.runner import make_resident
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.privacy.releases import Release
from fedfill.protocol.client import State
from fedfill.protocol.server import Server
from fedfill.training.evaluation import Evaluation
from fedfill.tree import Record

TWO: dict[str, Algorithm] = {
    "fedavg": FedAvg(local_epochs=1, batch_size=8),
    "feddpms": FedDPMS(local_epochs=1, batch_size=8, preliminary_rounds=2, n_classes=1, alpha=4, max_candidates=40),
}


MORE: dict[str, Algorithm] = {
    "scaffold": Scaffold(local_epochs=1, batch_size=8),
    "fedmix with moon and qffl": FedMix(
        local_epochs=1, batch_size=8, group_size=8, local="moon:contrast=latent", aggregation="qffl", optimizer="sgd"
    ),
    "sdafl": SDAFL(**TINY_GAN, images_per_client=6, local_steps=4, batch_size=8, server_steps=2, tau=0.1),
}


ROUNDS = 5


HALF = 0.5


class World:
    """An algorithm on four clients, half of them in a round, on a Flower grid in this process."""

    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        self.federation = options.pop("federation", None) or small_federation()
        algorithm = options.pop("algorithm", None) or {**TWO, **MORE}[name]
        self.net = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), needs=algorithm.needs(), seed=0)
        self.algorithm = algorithm.resolved(rounds=ROUNDS, model=self.net, inputs=self.federation.sample.inputs)
        self.initial = weights_of(self.net)
        self.folder = folder
        self.options = options
        self.engine = self.connect()
        self.server = self.serve()

    def connect(self, run_id: int = 1) -> InProcessEngine:
        engine = InProcessEngine(
            self.algorithm, self.federation, self.net, self.initial, folder=self.folder, **self.options
        )
        engine.origin = "origin"  # as from a checkpoint
        engine.grid.run_id = run_id
        for context in engine.grid.contexts.values():
            context.run_id = run_id
        return engine

    def serve(self, participation: float = HALF) -> Server:
        server = Server(
            self.engine, clients=4, classes=CLASSES, rounds=ROUNDS, participation=participation, seed=0,
            initial=self.initial, resident=make_resident(self.net, torch.device("cpu")), sample=self.federation.sample,
        )  # fmt: skip
        server.state = State(self.algorithm.server_state(self.initial))
        return server

    def round(self, t: int) -> None:
        self.server.begin(t)
        self.algorithm.round(self.server, t)

    def pooled(self) -> Evaluation:
        """How the initial weights do on all own test splits together."""
        self.engine._test = self.federation.test[:0]
        return self.engine.evaluate(self.initial, 0)

    @property
    def sha256(self) -> str:
        return tree.sha256(self.algorithm.global_weights(self.server))


def expected(name: str) -> str:
    algorithm = {**TWO, **MORE}[name]
    return tree.sha256(algorithm.global_weights(run_rounds(algorithm, ROUNDS, participation=HALF)))


def spoilt(client: int, make: Callable[[Message], Message | None]) -> Callable[[Message, Message], Message | None]:
    def spoil(message: Message, reply: Message) -> Message | None:
        if message.metadata.dst_node_id != 100 + client or message.metadata.message_type.startswith("query"):
            return reply
        return make(message)

    return spoil


@dataclass(frozen=True)
class Foreign(Record):
    declared: ClassVar = {}
    x: int = 0


GOOD = Update({}, 3)


NONSENSE: dict[str, tuple[Any, str]] = {
    "empty": (RecordDict(), "malformed message"),
    "words only": (RecordDict({"words": ConfigRecord({"a": 1})}), "malformed message"),
    "garbage": (pack(Array(dtype="uint8", shape=(9,), stype="fedfill.safetensors", data=b"\xff" * 9)), "hold no tree"),
    "numpy": (
        RecordDict({"tree": ArrayRecord({"safetensors": Array(torch.ones(3).numpy())}), "words": ConfigRecord({})}),
        "numpy.ndarray",
    ),
    "no answer": (pack(encode({"reply": 1})), "a dict in place of a Answer"),
    "nothing": (pack(encode(Answer())), "neither a reply nor an error"),
    "another kind": (pack(encode(Answer(Broadcast({})))), "a Broadcast in place of a Update"),
    "a hello": (pack(encode(Answer(Hello(1, 1, "digest", True)))), "a Hello in place of a Update"),
    "wrong type": (pack(encode(Answer(Update({}, "3")))), "'samples' of a Update is wrong"),  # type: ignore[arg-type]
    "no weights": (pack(encode(Answer(Update(None, 3)))), "'weights' of a Update is wrong"),  # type: ignore[arg-type]
    "not tensors": (pack(encode(Answer(Update({"a": 3}, 3)))), "'weights.a' of a Update"),  # type: ignore[dict-item]
    "other names": (pack(encode(Answer(GOOD))), "other names, types or shapes"),
    "releases": (pack(encode(Answer(GOOD, releases=((3, Release("x", 0.0)),)))), "'releases.0.0'"),  # type: ignore[arg-type]
    "too many": (pack(encode(Answer(Update({}, 10**400)))), "a weight is a number from 0 to 2^53"),
    "float8": (
        pack(encode(Answer(Update({"w": torch.zeros(2).to(torch.float8_e5m2)}, 3)))),
        "tensors of the type torch.float8",
    ),
    "infinite time": (pack(encode(Answer(GOOD, None, (), float("inf"), 10**4299))), "other names, types or shapes"),
    "foreign": (pack(encode(Answer(Foreign()))), "of a Answer is wrong"),  # type: ignore[arg-type]
}
