"""A program of many handlers, three clients on a line, and the engines on which every test of the protocol runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.protocol.world import ENGINES, Start, line
from torch import nn

from fedfill.algorithms import Algorithm
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.engines.runner import make_resident
from fedfill.models.views import weights_of
from fedfill.protocol.client import State
from fedfill.protocol.engine import Engine
from fedfill.protocol.server import Server


@pytest.fixture(params=ENGINES)
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """A function (program, federation, model, ...) -> server and engine, ready for round 0."""
    engines: list[Engine] = []

    def starter(
        program: Algorithm,
        federation: Federation,
        model: nn.Module | None = None,
        *,
        seed: int = 0,
        workers: int = 2,
        participation: float = 1.0,
        rounds: int = 10,
        timeout: float | None = None,
        min_replies: int = 1,
    ) -> tuple[Server, Engine]:
        model = model or line()
        initial = weights_of(model)
        engine = ENGINES[request.param](program, federation, model, initial, seed, workers, timeout)
        engines.append(engine)
        server = Server(
            engine,
            clients=len(federation.clients),
            classes=federation.classes,
            rounds=rounds,
            participation=participation,
            seed=seed,
            initial=initial,
            resident=make_resident(model, torch.device("cpu")),
            sample=federation.sample,
            min_replies=min_replies,
        )
        server.state = State(program.server_state(initial))
        server.begin(0)
        return server, engine

    yield starter
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def three(make_federation: Callable[..., Federation]) -> Federation:
    """Clients 0, 1 and 2 with 1, 2 and 3 points on the line y = x."""
    return make_federation(
        [Samples(torch.arange(1.0, k + 1)[:, None], torch.arange(1, k + 1)) for k in (1, 2, 3)], classes=5
    )
