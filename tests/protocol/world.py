"""A program of many handlers, three clients on a line, and the engines on which every test of the protocol runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedfill.algorithms import Algorithm
from fedfill.data.federation import Federation
from fedfill.engines.flower import FlowerEngine
from fedfill.engines.local import LocalEngine
from fedfill.errors import ContractError, FedfillError
from fedfill.privacy.releases import public, unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.engine import Engine
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.training.fit import Batch, Context, LocalTraining
from fedfill.tree import Weights

CPU = torch.device("cpu")


def local(
    program: Algorithm,
    federation: Federation,
    model: nn.Module,
    initial: Weights,
    seed: int,
    workers: int,
    timeout: float | None,
) -> Engine:
    return LocalEngine(program, federation, model, initial, seed=seed, device=CPU, workers=workers, timeout=timeout)


def ray(
    program: Algorithm,
    federation: Federation,
    model: nn.Module,
    initial: Weights,
    seed: int,
    workers: int,
    timeout: float | None,
) -> Engine:
    from tests.engines.pooled_ray import PooledEngine  # here: a run of the other engines needs no Ray

    return PooledEngine(program, federation, model, initial, seed=seed, device=CPU, workers=workers, timeout=timeout)


def flower(
    program: Algorithm,
    federation: Federation,
    model: nn.Module,
    initial: Weights,
    seed: int,
    workers: int,
    timeout: float | None,
) -> Engine:
    from tests.engines.in_process import InProcessEngine

    return InProcessEngine(program, federation, model, initial, seed=seed, timeout=timeout)


ENGINES = {"local": local, "ray": ray, "flower": flower}


Start = Callable[..., tuple[Server, Engine]]


@contextmanager
def mistake(server: Server, words: str) -> Iterator[None]:
    """A mistake in the algorithm ends the run; on flower it is one host's word, and as such a lost reply."""
    remote = isinstance(server._engine, FlowerEngine)
    raised: Exception | None = None
    try:
        yield
    except (ContractError, FedfillError) as error:
        raised = error
    reasons = [str(raised)] if raised is not None else [loss["reason"] for loss in server.lost]
    assert [re.search(words, text) is not None for text in reasons] == [True]
    assert remote == (raised is None or str(raised).startswith("min_replies:"))


def line(weight: float = 1.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


@dataclass(frozen=True)
class Ask(Message):
    w: Tensor = field(default_factory=lambda: torch.tensor([1.0, 2.0, 3.0]))
    named: dict[str, Any] = field(default_factory=dict)
    listed: list[int] = field(default_factory=list)
    number: float = 0.0


@dataclass(frozen=True)
class Answer(Message):
    declared: ClassVar = {"known": unbounded("declared with the class"), "noise": unbounded("declared with the class")}

    value: Any = None
    known: Any = None
    noise: Any = None


class Program(Algorithm):
    """Handlers that each try one thing; `ask.listed` names the clients that misbehave."""

    def client_state(self) -> dict[str, Any]:
        return {"count": 0, "kept": torch.zeros(3), "rows": [0]}

    @client_handler
    def hello(self, client: Client, ask: Ask) -> Answer:
        return Answer(client.id)

    @client_handler
    def write(self, client: Client, ask: Ask) -> Answer:
        if client.id in ask.listed:
            ask.w.mul_(2)
        return Answer(client.id)

    @client_handler
    def write_deep(self, client: Client, ask: Ask) -> Answer:
        ask.named["deep"][0][1:].zero_()
        return Answer(client.id)

    @client_handler
    def write_and_fail(self, client: Client, ask: Ask) -> Answer:
        if client.id in ask.listed:
            ask.w.zero_()
            raise ValueError("after writing")
        return Answer(client.id)

    @client_handler
    def replace(self, client: Client, ask: Ask) -> Answer:
        if client.id in ask.listed:
            ask.named["a"] = torch.zeros(1)
        return Answer(ask.named["a"].clone())

    @client_handler
    def append(self, client: Client, ask: Ask) -> Answer:
        ask.listed.append(client.id)
        return Answer(client.id)

    @client_handler
    def write_in_loss(self, client: Client, ask: Ask) -> Answer:
        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            context.received["weight"].add_(1)
            return model(batch.inputs).mean()

        client.fit(ask.named, loss, LocalTraining())
        return Answer(client.id)

    @client_handler
    def count(self, client: Client, ask: Ask) -> Answer:
        client.state.count += 1
        client.state.kept = client.state.kept + 1
        client.state.rows.append(client.state.count)
        client.state.new = {"round": client.round}
        if client.id in ask.listed:
            raise ValueError(f"boom {client.id}")
        return Answer(client.state.count)

    @client_handler
    def look(self, client: Client, ask: Ask) -> Answer:
        return Answer([client.state.count, client.state.kept, client.state.rows])

    @client_handler
    def write_state_and_fail(self, client: Client, ask: Ask) -> Answer:
        client.state.kept.add_(7)
        raise ValueError("after writing")

    @client_handler
    def write_state(self, client: Client, ask: Ask) -> Answer:
        client.state.kept.add_(7)
        return Answer(client.id)

    @client_handler
    def keep(self, client: Client, ask: Ask) -> Answer:
        mine = torch.arange(3.0)
        client.state.received = ask.w[1:] if ask.number else ask.w
        client.state.deep = {"x": [ask.named["m"].T]}
        client.state.sent = mine[1:] if ask.number else mine
        return Answer(mine)

    @client_handler
    def kept_values(self, client: Client, ask: Ask) -> Answer:
        return Answer([client.state.received, client.state.deep["x"][0], client.state.sent])

    @client_handler
    def first(self, client: Client, ask: Ask) -> Answer:
        return Answer(client.initial["weight"].clone())

    @client_handler
    def resident(self, client: Client, ask: Ask) -> Answer:
        model = client.model({"weight": torch.full((1, 1), float(client.id))})
        client.state.kept = model.state_dict()["weight"]
        return Answer(model.state_dict()["weight"])

    @client_handler
    def gradient(self, client: Client, ask: Ask) -> Answer:
        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            return model(batch.inputs).sum()

        model = client.model(client.initial)
        model(client.data.inputs).sum().backward()
        gradient = model.weight.grad.clone()  # type: ignore[union-attr]
        client.fit(client.initial, loss, LocalTraining())
        return Answer(gradient)

    @client_handler
    def fail(self, client: Client, ask: Ask) -> Answer:
        if client.id in ask.listed:
            raise ValueError(f"boom {client.id}")
        return Answer(client.id, known=torch.zeros(3))

    @client_handler
    def user_slip(self, client: Client, ask: Ask) -> Answer:
        raise FedfillError("mu: found -1, but 0 or more is needed")

    @client_handler
    def nan(self, client: Client, ask: Ask) -> Answer:
        return Answer([torch.tensor([1.0, ask.number if client.id in ask.listed else 2.0])])

    @client_handler
    def count_and_diverge(self, client: Client, ask: Ask) -> Answer:
        client.state.count += 1
        return Answer([float("nan") if client.id in ask.listed else 1.0])

    @client_handler
    def slow(self, client: Client, ask: Ask) -> Answer:
        time.sleep(0.1 * (2 - client.id))
        return Answer(client.id)

    @client_handler
    def released(self, client: Client, ask: Ask) -> Answer:
        client.release("noise", public("drawn from a fixed distribution"))
        return Answer(value=1, known=2, noise=3 if client.id else None)

    @client_handler
    def answer_with(self, client: Client, ask: Ask) -> Any:
        return {"none": None, "dict": {"value": 1}, "ask": Ask, "set": Answer({1}), "array": Answer(np.zeros(9))}[
            ask.named["what"]
        ]

    @client_handler
    def keep_a_set(self, client: Client, ask: Ask) -> Answer:
        client.state.bad = {1, 2}
        return Answer(1)

    @client_handler
    def draws(self, client: Client, ask: Ask) -> Answer:
        return Answer([torch.rand(2, generator=client.stream(purpose)) for purpose in ("a", "a", "b")])

    @client_handler
    def noise(self, client: Client, ask: Ask) -> Answer:
        return Answer(client.noise("a").uniform(2))

    @client_handler
    def two_fits(self, client: Client, ask: Ask) -> Answer:
        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            return model(batch.inputs).sum() * torch.rand((), generator=context.generator)

        fits = [client.fit(client.initial, loss, LocalTraining(optimizer="sgd")) for _ in range(2)]
        return Answer([fitted.weights["weight"] for fitted in fits])

    @client_handler
    def sees(self, client: Client, ask: Ask) -> Answer:
        return Answer(
            [client.id, client.round, client.classes, len(client.data), client.model(client.initial).training]
        )

    @client_handler
    def unlabelled(self, client: Client, ask: Ask) -> Answer:
        samples = client.unlabelled
        labels = sorted(set(samples.labels.tolist()))
        return Answer([len(samples), samples.inputs.sum().item(), list(samples.inputs.shape), labels, len(client.data)])

    @client_handler
    def write_unlabelled(self, client: Client, ask: Ask) -> Answer:
        if client.id in ask.listed:
            client.unlabelled.inputs.zero_()
        return Answer(client.id)

    def unmarked(self, client: Client, ask: Ask) -> Answer:
        return Answer(client.id)


P = Program()


ALL = [0, 1, 2]


def look(server: Server) -> dict[int, Any]:
    return {i: reply.value for i, reply in server.call(ALL, P.look, Ask()).items()}
