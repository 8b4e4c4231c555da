"""What every engine holds: the same bits, late replies, personal models and their evaluation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.helpers import gathered, small_federation
from tests.protocol.world import ALL, CPU, Answer, Ask, Program, Start
from torch import Tensor, nn

from fedfill import tree
from fedfill.algorithms import Algorithm
from fedfill.algorithms.cfl import CFL
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fedbn import FedBN
from fedfill.algorithms.fedproto import FedProto
from fedfill.algorithms.fedrep import FedRep
from fedfill.algorithms.fraug import FRAug
from fedfill.algorithms.ifca import IFCA
from fedfill.algorithms.lgfedavg import LGFedAvg
from fedfill.algorithms.local import Local
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.engines.flower import FlowerEngine
from fedfill.engines.local import LocalEngine
from fedfill.engines.runner import make_resident, prefers_channels_last
from fedfill.models.layers import with_streams
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.protocol.client import Client, State, client_handler
from fedfill.protocol.engine import Engine
from fedfill.protocol.server import Server
from fedfill.streams import torch_stream
from fedfill.training.evaluation import Evaluation, score_all, shares, splits_of
from fedfill.training.fit import Batch, Context, Fit, LocalTraining, Resident, fit
from fedfill.tree import Weights


def test_one_client_is_central_training(
    start: Start, random_samples: Callable[..., Samples], make_federation: Callable[..., Federation]
) -> None:
    samples = random_samples(45)
    model = build("auto", (1, 8, 8), 3, ModelSettings(), seed=0)
    program = FedAvg(local_epochs=2, batch_size=16, lr_decay_every=1)
    server, _ = start(program, make_federation([samples]), model, seed=9)
    resident = Resident(model, CPU, prefers_channels_last(model))
    central = weights_of(model)
    for t in range(3):
        server.begin(t)
        program.round(server, t)
        budget = LocalTraining(epochs=2, batch_size=16, learning_rate=1e-3 * 0.5**t)
        streams = (torch_stream(9, name, t, 0, 0) for name in ("fit", "draws"))
        central = fit(resident, Fit(central, program.loss, samples, budget), *streams).weights
        assert all(torch.equal(central[name], server.state.weights[name]) for name in central)


def test_any_number_of_workers_gives_the_same_bits(
    start: Start, random_samples: Callable[..., Samples], make_federation: Callable[..., Federation]
) -> None:
    torch.manual_seed(0)
    model = with_streams(
        nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 3)
        )
    )  # fmt: skip
    federation = make_federation([random_samples(n, seed=n) for n in (40, 7, 23, 1, 2)], test=random_samples(50))
    program = FedAvg(local_epochs=2, batch_size=8)
    results = set()
    for workers in (1, 2, 3, 1):
        server, engine = start(program, federation, model, workers=workers, participation=0.8)
        torch.manual_seed(workers)  # the global generator has no say
        for t in range(3):
            server.begin(t)
            program.round(server, t)
        results.add((tree.sha256(server.state.weights), repr(engine.evaluate(server.state.weights, 2))))
    assert len(results) == 1


class Slow(Program):
    @client_handler
    def sleep(self, client: Client, ask: Ask) -> Answer:
        client.state.count += 1
        if client.id in ask.listed:
            time.sleep(0.6)
        return Answer(client.state.count)

    @client_handler
    def train(self, client: Client, ask: Ask) -> Answer:
        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            time.sleep(0.01)
            return model(batch.inputs).mean()

        client.fit(client.initial, loss, LocalTraining(steps=10**6 if client.id in ask.listed else 1))
        return Answer(client.id)


S = Slow()


@pytest.mark.parametrize("handler", [S.sleep, S.train])
def test_a_late_client_is_lost_and_commits_nothing(start: Start, three: Federation, handler: Any) -> None:
    server, _ = start(S, three, timeout=0.3)
    began = time.monotonic()
    assert list(server.call(ALL, handler, Ask(listed=[1]))) == [0, 2]
    assert time.monotonic() - began < 60
    assert [loss["client"] for loss in server.lost] == [1]
    if handler == S.sleep:
        assert server.lost[0]["reason"] == "took longer than reply_timeout=0.3 s"
        assert {i: r.value for i, r in server.call(ALL, S.sleep, Ask()).items()} == {0: 2, 1: 1, 2: 2}


PERSONAL: dict[str, Algorithm] = {
    "local": Local(local_steps=2, batch_size=8, learning_rate=0.01),
    "fedbn": FedBN(local_steps=2, batch_size=8, learning_rate=0.1),
    "fedproto": FedProto(local_steps=2, batch_size=8, learning_rate=0.1),
    "cfl": CFL(local_steps=2, batch_size=8, learning_rate=0.1, warm_rounds=0, still=9.0, gamma=0.0),
    "ifca": IFCA(local_steps=2, batch_size=8, learning_rate=0.1),
    "lgfedavg": LGFedAvg(local_steps=2, batch_size=8, learning_rate=0.1, warm_rounds=1),
    "fedrep": FedRep(local_steps=2, batch_size=8, learning_rate=0.1, head_epochs=1),
    "fraug": FRAug(local_steps=2, batch_size=8, learning_rate=0.1),
}


LATER = 3
"""Rounds, with half of the clients in each: some have no model of their own yet, and some an older one."""


@functools.cache
def personal_world(name: str) -> tuple[Algorithm, Federation, nn.Module]:
    """An algorithm, four clients of which the last has no test split, and a network with normalisation layers."""
    federation = small_federation()
    *others, last = federation.clients
    federation = replace(federation, clients=(*others, replace(last, test=last.test[:0])))
    net = build("cnn2bn", federation.shape, federation.classes, ModelSettings(), needs=PERSONAL[name].needs(), seed=0)
    return PERSONAL[name].resolved(rounds=LATER, model=net, inputs=federation.sample.inputs), federation, net


def rounds_of(program: Algorithm, server: Server, engine: Engine, rounds: range) -> list[Evaluation]:
    evaluations = []
    for t in rounds:
        server.begin(t)
        program.round(server, t)
        evaluations.append(engine.evaluate(program.global_weights(server), t))
    return evaluations


def models_of(program: Algorithm, server: Server, engine: Engine) -> list[Weights]:
    weights, states = program.global_weights(server), engine.states()
    return [program.personal_weights(states.get(i) or {}, weights) for i in range(server.clients)]


@functools.cache
def alone(name: str) -> tuple[list[Evaluation], bytes, bytes]:
    """Evaluations, everybody's model and states of one process with one worker."""
    program, federation, net = personal_world(name)
    initial = weights_of(net)
    engine = LocalEngine(program, federation, net, initial, seed=0, device=CPU, workers=1)
    server = Server(
        engine, clients=4, classes=federation.classes, rounds=LATER, participation=0.5, seed=0, initial=initial,
        resident=make_resident(net, CPU), sample=federation.sample,
    )  # fmt: skip
    server.state = State(program.server_state(initial))
    evaluations = rounds_of(program, server, engine, range(LATER))
    engine.close()
    return evaluations, tree.to_bytes(models_of(program, server, engine)), tree.to_bytes(engine.states())


@pytest.mark.parametrize("resumed_after", [None, 1])
@pytest.mark.parametrize("name", PERSONAL)
def test_personal_models_and_their_evaluation_are_the_same_on_every_engine(
    start: Start, name: str, resumed_after: int | None
) -> None:
    program, federation, net = personal_world(name)
    options: dict[str, Any] = {"participation": 0.5, "rounds": LATER}
    server, engine = start(program, federation, net, **options)
    evaluations = rounds_of(program, server, engine, range(resumed_after or LATER))
    if resumed_after is not None:
        kept = tree.to_bytes([server.state.tree(), engine.states()])
        server, engine = start(program, federation, net, **options)
        before, states = tree.from_bytes(kept)
        server.state = State(before)
        engine.restore(states)
        evaluations += rounds_of(program, server, engine, range(resumed_after, LATER))
    expected, models, states = alone(name)
    assert tree.to_bytes(models_of(program, server, engine)) == models
    assert tree.to_bytes(engine.states()) == states
    assert [e.accuracy_by_client for e in evaluations] == [e.accuracy_by_client for e in expected]
    if not isinstance(engine, FlowerEngine):
        assert repr(evaluations) == repr(expected)
    assert len({repr(evaluation) for evaluation in evaluations}) == LATER


@pytest.mark.parametrize("name", PERSONAL)
def test_personal_models_are_judged_one_by_one(start: Start, name: str) -> None:
    """Slow and obvious; by hosts, which keep them, on all own test splits together."""
    program, federation, net = personal_world(name)
    server, engine = start(program, federation, net, participation=0.5, rounds=LATER)
    found = rounds_of(program, server, engine, range(2))[-1]
    resident, scored = make_resident(net, CPU), []
    for client, weights in zip(federation.clients, models_of(program, server, engine), strict=True):
        resident.load(weights)
        scored.append(tuple(score_all(resident, s) for s in (federation.test, client.test, client.validation)))
    if not isinstance(engine, FlowerEngine):
        assert repr(found) == repr(gathered(scored, splits_of(federation), federation.classes))
        return
    hits = [own.predicted == c.test.labels for (_, own, _), c in zip(scored, federation.clients, strict=True)]
    correct = torch.cat(hits)
    labels = torch.cat([client.test.labels for client in federation.clients])
    assert found.accuracy == correct.double().mean().item()
    assert found.loss == pytest.approx(torch.cat([own.losses for _, own, _ in scored]).mean().item(), rel=1e-6)
    assert found.accuracy_by_class == shares(correct, labels, federation.classes)
    assert found.accuracy_by_client[:3] == [own.double().mean().item() for own in hits[:3]]
    assert found.accuracy_by_client[3] is None
