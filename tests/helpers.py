"""Small worlds for tests: four clients with images that a small network learns, and a server whose clients are scripted."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedfill import tree
from fedfill.algorithms import Algorithm, Start, aim
from fedfill.algorithms.aim import AIM
from fedfill.data.federation import ClientData, Federation
from fedfill.data.samples import Samples
from fedfill.engines.local import LocalEngine
from fedfill.engines.runner import make_resident
from fedfill.errors import FedfillError
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.protocol.client import Client, State
from fedfill.protocol.messages import Answers, Average, Message, Outcome, releases_of
from fedfill.protocol.server import Server
from fedfill.statistics.marginals import Network, Noisy, simplex
from fedfill.statistics.markov import elimination, network_of
from fedfill.streams import numpy_stream
from fedfill.training.aggregation import Mean, combined
from fedfill.training.evaluation import Evaluation, PersonalScores, Scored, Splits
from fedfill.training.fit import LocalTraining, Resident
from fedfill.tree import Weights

CLASSES = 4


@contextmanager
def refused(
    setting: str, *facts: object, kind: type[Exception] = FedfillError
) -> "Iterator[pytest.ExceptionInfo[Exception]]":
    """Expects the error about one setting that names some facts; its wording is not what tests hold."""
    with pytest.raises(kind, match=rf"^{re.escape(setting)}(?!\w)") as caught:
        yield caught
    assert [fact for fact in facts if str(fact) not in str(caught.value)] == [], str(caught.value)


TINY_GAN = {
    "gan_iterations": 3,
    "gan_chunk": 2,
    "gan_width": 4,
    "gan_latent": 4,
    "gan_batch_size": 8,
    "gan_critic_steps": 2,
}


def bars(n: int, classes: list[int], seed: int) -> Samples:
    """n 8x8 images: class k is a bright bar in the rows 2k and 2k + 1, on noise."""
    stream = torch.Generator().manual_seed(seed)
    labels = torch.tensor([classes[k % len(classes)] for k in range(n)])
    images = torch.randint(0, 60, (n, 1, 8, 8), generator=stream)
    for k, label in enumerate(labels.tolist()):
        images[k, :, 2 * label : 2 * label + 2] += 180
    return Samples(images.to(torch.uint8), labels)


def small_federation(
    clients: int = 4, samples: int = 40, per_client: int = 2, labelled: int | None = None
) -> Federation:
    """Client i holds the classes i, i + 1, ... (modulo 4), `per_client` of them, and labels for `labelled` samples or all."""
    members = tuple(
        ClientData(
            bars(samples, [(i + k) % CLASSES for k in range(per_client)], seed=i),
            bars(8, [(i + k) % CLASSES for k in range(per_client)], seed=100 + i),
        )
        for i in range(clients)
    )
    members = tuple(c.with_labels(labelled, numpy_stream(0, "labelled", i)) for i, c in enumerate(members))
    test = bars(80, list(range(CLASSES)), seed=1000)
    return Federation("bars", members, test, tuple("abcd"), (), "bars")


def two_kinds() -> Federation:
    """Clients 0 and 1 call the bars by their numbers, 2 and 3 by the next number but one."""
    whole = small_federation(per_client=CLASSES)
    members = []
    for i, client in enumerate(whole.clients):
        train, test = bars(40, list(range(CLASSES)), i), bars(20, list(range(CLASSES)), 100 + i)
        if i > 1:
            train, test = (Samples(part.inputs, (part.labels + 2) % CLASSES) for part in (train, test))
        members.append(replace(client, train=train, test=test))
    return replace(whole, clients=tuple(members))


class Run:
    """Some rounds of an algorithm on the local engine, with everything that a test may look at."""

    def __init__(
        self, algorithm: Algorithm, model: Mapping[str, Any], workers: int, participation: float, rounds: int,
        federation: Federation | None = None,
    ) -> None:  # fmt: skip
        federation = federation or small_federation()
        net = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(**model), needs=algorithm.needs(), seed=0)
        self.algorithm = algorithm.resolved(rounds=rounds, model=net, inputs=federation.test.inputs[:1])
        self.net = net
        initial = weights_of(net)
        self.engine = LocalEngine(
            self.algorithm, federation, net, initial, seed=0, device=torch.device("cpu"), workers=workers
        )
        self.server = Server(
            self.engine, clients=4, classes=CLASSES, rounds=rounds, participation=participation, seed=0, initial=initial,
            resident=make_resident(net, torch.device("cpu")), sample=federation.sample,
        )  # fmt: skip
        self.server.state = State(self.algorithm.server_state(initial))


def prepare(algorithm: Algorithm, server: Server) -> None:
    """All steps before the first round."""
    steps = algorithm.pretraining_steps()
    for step in range(steps):
        server.begin(step - steps)
        algorithm.pretrain(server, step)


def run_rounds(
    algorithm: Algorithm,
    rounds: int,
    *,
    model: Mapping[str, Any] | None = None,
    workers: int = 2,
    participation: float = 1.0,
    after: Callable[[Server, int], None] | None = None,
    labelled: int | None = None,
    federation: Federation | None = None,
) -> Server:
    """The server after some rounds, with `notes` and `warnings` of all of them in ``history``."""
    if federation is None:
        federation = small_federation(labelled=labelled)
    run = Run(algorithm, model or {}, workers, participation, rounds, federation)
    prepare(run.algorithm, run.server)
    history: list[dict[str, Any]] = []
    for t in range(rounds):
        run.server.begin(t)
        run.algorithm.round(run.server, t)
        history.append({**run.server.notes, "warnings": run.server.warnings})
        if after is not None:
            after(run.server, t)
    run.server.history = history
    run.server.evaluation = run.engine.evaluate(run.algorithm.global_weights(run.server), rounds - 1)
    run.server.client_states = run.engine.states()
    run.engine.close()
    return run.server


def start_of(
    weights: Weights, *, control: Weights | None = None, model: torch.nn.Module | None = None, data: Samples | None = None,
    training: LocalTraining | None = None, **state: Any,
) -> Start:  # fmt: skip
    """What a local training starts from, at a client that exists in a test alone."""
    data = bars(8, [0, 1], 0) if data is None else data

    def resident(loaded: Weights) -> torch.nn.Module:
        assert model is not None
        model.load_state_dict(loaded, strict=False)
        return model

    client = Client(
        id=0, round=0, data=data, classes=CLASSES, state=State(state), initial=weights, seed=0, resident=resident
    )
    return Start(client, data, weights, control, training or LocalTraining())


class ScriptedEngine:
    """Clients that answer by a script: handler name -> function (client, message, round) -> reply."""

    workers = 1
    evaluation = None
    evaluated = ()
    origin = ""

    def __init__(self) -> None:
        self.script: dict[str, Callable[[int, Any, int], Message]] = {}
        self.sent: list[tuple[int, str, int, Message]] = []

    def call(self, handler: str, messages: Mapping[int, Message], t: int, average: Average | None = None) -> Answers:
        outcomes = {}
        for i in reversed(list(messages)):  # answers arrive in any order
            self.sent.append((t, handler, i, messages[i]))
            try:
                reply = self.script[handler](i, messages[i], t)
                outcomes[i] = Outcome(reply, releases=tuple(releases_of(reply, {})), size=tree.size(reply))
            except RuntimeError as error:
                outcomes[i] = Outcome(error=error)
        return Answers(outcomes)


class Scripted(Resident):
    """A server's model that takes no weights: the scripts' tensors have names of their own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def load(self, weights: Weights) -> torch.nn.Module:
        return self.model


class Codes(torch.nn.Module):
    """A model of which nothing is known but that its codes have three coordinates."""

    def encoder(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.new_zeros(len(inputs), 3)


def scripted(
    clients: int,
    weights: Weights,
    participation: float = 1.0,
    model: torch.nn.Module | None = None,
    secret: Callable[[], bytes] | None = None,
) -> tuple[Server, ScriptedEngine]:
    """A server in round 0 whose clients are scripted."""
    engine = ScriptedEngine()
    known = Codes() if model is None else model
    server = Server(
        engine, clients=clients, classes=CLASSES, rounds=10, participation=participation, seed=0, initial=weights,
        resident=Scripted(known), sample=bars(1, [0], 0), secret=secret,
    )  # fmt: skip
    server.state = State({"weights": weights})
    server.begin(0)
    return server, engine


def weighted_mean(updates: Iterable[tuple[Weights, float]]) -> Weights:
    """The weighted mean of the clients' tensors (McMahan et al. 2017, algorithm 1), taken in the order given."""
    total = combined(Mean(weights, float(weight), float(weight)) for weights, weight in updates)
    assert total is not None
    return total.tensors


def gathered(scored: Sequence[tuple[Scored, Scored, Scored]], splits: Splits, classes: int) -> Evaluation:
    """The evaluation of personal models from each client's outcomes on the test set and on its own splits."""
    scores = PersonalScores(splits, classes)
    for i, outcomes in enumerate(scored):
        scores.add(i, *outcomes)
    return scores.gather()


def by_proportions(sizes: Sequence[int], tables: Sequence[Noisy], total: float, root: int) -> Network:
    """What `fedfill.statistics.markov.fitted` finds, from the table of all columns at once, by proportional fitting: slow, without mbi."""
    joint = np.full(sizes, total / math.prod(sizes))
    for _ in range(200):
        for table in tables:
            rest = tuple(k for k in range(len(sizes)) if k not in table.clique)
            now = joint.sum(rest, keepdims=True)
            wanted = simplex(table.counts, total).reshape(now.shape)
            joint = joint * np.divide(wanted, now, out=np.zeros_like(now), where=now > 0)
    everything = tuple(range(len(sizes)))
    parents = elimination(sizes, [everything], root)
    return network_of(sizes, {everything: np.log(np.maximum(joint, 1e-300))}, parents, total)


def without_mbi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let aim run where its extra is not installed."""
    monkeypatch.setattr(AIM, "packages", ())
    monkeypatch.setattr(aim, "fitted", by_proportions)
