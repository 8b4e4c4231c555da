"""The contract between algorithms and engines. Every test runs on every engine of `ENGINES`."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.helpers import small_federation
from torch import Tensor, nn

from fedfill import tree
from fedfill.algorithms import Algorithm, Broadcast
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fedbn import FedBN
from fedfill.algorithms.fraug import FRAug
from fedfill.algorithms.local import Local
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.engines.flower import FlowerEngine
from fedfill.engines.local import LocalEngine
from fedfill.engines.runner import make_resident, prefers_channels_last
from fedfill.errors import ContractError, DivergedError, FedfillError
from fedfill.models.layers import with_streams
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.privacy.releases import public, unbounded
from fedfill.protocol.client import Client, State, client_handler
from fedfill.protocol.engine import Engine
from fedfill.protocol.messages import Message, reason
from fedfill.protocol.server import Server
from fedfill.streams import torch_stream
from fedfill.training.aggregation import weighted_mean
from fedfill.training.evaluation import Evaluation, gather_personal, score_all, shares, splits_of
from fedfill.training.fit import Batch, Context, Fit, LocalTraining, Resident, fit
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


@pytest.fixture(scope="module")
def three(make_federation: Callable[..., Federation]) -> Federation:
    """Clients 0, 1 and 2 with 1, 2 and 3 points on the line y = x."""
    return make_federation(
        [Samples(torch.arange(1.0, k + 1)[:, None], torch.arange(1, k + 1)) for k in (1, 2, 3)], classes=5
    )


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
        return Answer(torch.rand(2, generator=client.noise("a")))

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


# Messages


@pytest.mark.parametrize("handler", [P.write, P.write_and_fail])
def test_a_handler_that_writes_into_a_received_tensor_ends_the_run(
    start: Start, three: Federation, handler: Any
) -> None:
    server, _ = start(P, three)
    with mistake(server, "wrote into"):
        server.call(ALL, handler, Ask(listed=[1]))


def test_writes_deep_in_a_message_and_through_a_view_are_seen(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    with mistake(server, "wrote into"):
        server.call(ALL, P.write_deep, Ask(named={"deep": [torch.ones(3)]}))


def test_a_loss_that_writes_into_what_was_received_ends_the_run(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    with mistake(server, "wrote into"):
        server.call(ALL, P.write_in_loss, Ask(named=weights_of(line())))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("handler", [P.replace, P.append])
def test_the_containers_of_a_message_cannot_be_changed_for_others(
    start: Start, three: Federation, handler: Any, workers: int
) -> None:
    server, _ = start(P, three, workers=workers)
    ask = Ask(named={"a": torch.ones(1)}, listed=[2])
    try:
        replies = server.call(ALL, handler, ask)
    except ContractError:
        return
    assert ask.listed == [2]
    assert torch.equal(ask.named["a"], torch.ones(1))
    if handler == P.replace:
        assert [float(replies[i].value) for i in ALL] == [1.0, 1.0, 0.0]


def test_each_client_gets_its_own_message(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    asks = {i: Ask(named={"a": torch.tensor([float(i)])}) for i in (2, 0)}
    replies = server.call([2, 0], P.replace, asks)
    assert {i: reply.value.item() for i, reply in replies.items()} == {0: 0.0, 2: 2.0}


def test_an_unmarked_handler_is_refused(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    with pytest.raises(ContractError, match="'unmarked' is not marked with @client_handler"):
        server.call(ALL, P.unmarked, Ask())


@pytest.mark.parametrize(("what", "kind"), [("none", "NoneType"), ("dict", "dict"), ("ask", "type")])
def test_a_reply_that_is_no_message_is_refused(start: Start, three: Federation, what: str, kind: str) -> None:
    server, _ = start(P, three)
    with mistake(server, rf"'answer_with' returned a {kind} in place of a Message"):
        server.call(ALL, P.answer_with, Ask(named={"what": what}))


@pytest.mark.parametrize("what", ["set", "array"])
def test_a_reply_that_is_no_tree_is_refused(start: Start, three: Federation, what: str) -> None:
    server, _ = start(P, three)
    with mistake(server, "can't be sent or stored"):
        server.call(ALL, P.answer_with, Ask(named={"what": what}))


def test_a_message_that_is_no_tree_is_refused(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    with pytest.raises((ContractError, TypeError), match="can't be sent or stored"):
        server.call(ALL, P.hello, Ask(named={"array": np.zeros(3)}))


def test_a_client_sees_itself_and_its_round(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    server.begin(4)
    replies = server.call(ALL, P.sees, Ask())
    assert [replies[i].value for i in ALL] == [[i, 4, 5, i + 1, False] for i in ALL]


@pytest.fixture(scope="module")
def half(three: Federation) -> Federation:
    """The clients of `three`, and two points without a label for client 0, three for client 2."""
    points = {0: torch.tensor([[10.0], [20.0]]), 2: torch.tensor([[1.0], [2.0], [4.0]])}
    given = {i: Samples(inputs, torch.full((len(inputs),), -1)) for i, inputs in points.items()}
    clients = (replace(client, unlabelled=given.get(i)) for i, client in enumerate(three.clients))
    return replace(three, clients=tuple(clients))


def test_a_client_sees_its_samples_without_labels(start: Start, half: Federation) -> None:
    server, _ = start(P, half)
    found = {i: reply.value for i, reply in server.call(ALL, P.unlabelled, Ask()).items()}
    assert found == {0: [2, 30.0, [2, 1], [-1], 1], 1: [0, 0.0, [0, 1], [], 2], 2: [3, 7.0, [3, 1], [-1], 3]}


def test_samples_without_labels_cannot_be_changed(start: Start, half: Federation) -> None:
    server, _ = start(P, half)
    with mistake(server, "'write_unlabelled' wrote into a received message, its data"):
        server.call(ALL, P.write_unlabelled, Ask(listed=[2]))


# State


def look(server: Server) -> dict[int, Any]:
    return {i: reply.value for i, reply in server.call(ALL, P.look, Ask()).items()}


def test_state_commits_on_return_and_not_on_raise(start: Start, three: Federation) -> None:
    server, engine = start(P, three)
    server.call(ALL, P.count, Ask(listed=[1]))
    server.call(ALL, P.count, Ask(listed=[2]))
    seen = look(server)
    assert {i: (count, kept.tolist(), rows) for i, (count, kept, rows) in seen.items()} == {
        0: (2, [2.0] * 3, [0, 1, 2]),
        1: (1, [1.0] * 3, [0, 1]),
        2: (1, [1.0] * 3, [0, 1]),
    }
    assert engine.states()[1]["new"] == {"round": 0}


def test_a_reply_that_is_not_finite_commits_nothing(start: Start, three: Federation) -> None:
    """Otherwise a client that diverged once would keep a NaN, and be lost for the rest of the run."""
    server, _ = start(P, three)
    server.call(ALL, P.count_and_diverge, Ask(listed=[1]))
    assert [loss["client"] for loss in server.lost] == [1]
    assert {i: count for i, (count, *_) in look(server).items()} == {0: 1, 1: 0, 2: 1}


def test_a_first_call_that_raises_leaves_no_trace(start: Start, three: Federation) -> None:
    server, engine = start(P, three)
    server.call(ALL, P.count, Ask(listed=[1]))
    assert list(engine.states()) == [0, 2]


def test_a_stored_tensor_cannot_be_changed_in_place(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    server.call(ALL, P.count, Ask())
    with mistake(server, "a stored tensor"):
        server.call(ALL, P.write_state, Ask())


def test_a_handler_that_writes_into_a_stored_tensor_and_raises_ends_the_run(start: Start, three: Federation) -> None:
    """As a mere lost reply it would leave the write in the state."""
    server, _ = start(P, three)
    server.call(ALL, P.count, Ask())
    with mistake(server, "a stored tensor"):
        server.call(ALL, P.write_state_and_fail, Ask())


@pytest.mark.parametrize("view", [False, True])
def test_state_shares_no_memory_with_messages(start: Start, three: Federation, view: bool) -> None:
    server, _ = start(P, three)
    ask = Ask(named={"m": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, number=float(view))
    replies = server.call(ALL, P.keep, ask)
    ask.w.fill_(9)
    ask.named["m"].fill_(9)
    for reply in replies.values():
        reply.value.fill_(9)
    expected = [[1, 2, 3][view:], [[1, 3], [2, 4]], [0, 1, 2][view:]]
    for reply in server.call(ALL, P.kept_values, Ask()).values():
        assert [tensor.tolist() for tensor in reply.value] == expected


def test_what_is_no_tree_cannot_be_kept(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    with mistake(server, "can't be sent or stored"):
        server.call(ALL, P.keep_a_set, Ask())


def test_states_go_through_bytes_to_another_engine(start: Start, three: Federation) -> None:
    server, engine = start(P, three)
    server.call(ALL, P.count, Ask(listed=[1]))
    data = tree.to_bytes(engine.states())
    other, successor = start(P, three)
    successor.restore(tree.from_bytes(data))
    for which in (server, other):
        which.call(ALL, P.count, Ask())
    assert tree.to_bytes(engine.states()) == tree.to_bytes(successor.states())
    assert [look(other)[i][0] for i in ALL] == [2, 1, 2]


def test_what_a_server_writes_into_its_own_tensors_leaves_the_clients_initial_weights_alone(
    start: Start, three: Federation
) -> None:
    server, _ = start(P, three)
    server.state.weights["weight"].add_(5)
    assert [float(reply.value) for reply in server.call(ALL, P.first, Ask()).values()] == [1.0] * 3


@pytest.mark.parametrize("workers", [1, 2])
def test_tensors_of_a_workers_model_do_not_leave_with_a_reply_or_a_state(
    start: Start, three: Federation, workers: int
) -> None:
    server, _ = start(P, three, workers=workers)
    replies = server.call(ALL, P.resident, Ask())
    assert [float(replies[i].value) for i in ALL] == [0.0, 1.0, 2.0]
    assert [float(look(server)[i][1]) for i in ALL] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("workers", [1, 3])
def test_no_gradient_of_another_client_is_left_in_a_workers_model(
    start: Start, three: Federation, workers: int
) -> None:
    server, _ = start(P, three, workers=workers)
    for _ in range(2):  # the gradient of w * sum(x) is sum(x)
        replies = server.call(ALL, P.gradient, Ask())
        assert [float(replies[i].value) for i in ALL] == [1.0, 3.0, 6.0]


# Replies that fail


def test_errors_become_lost_replies_and_the_others_go_on(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    replies = server.call(ALL, P.fail, Ask(listed=[1]))
    assert {i: reply.value for i, reply in replies.items()} == {0: 0, 2: 2}
    assert server.lost == [{"client": 1, "handler": "fail", "reason": "ValueError: boom 1"}]
    assert server.costs.bytes_down == 3 * (12 + 8 + 8)  # three floats, one listed client, one number
    assert server.costs.bytes_up == 2 * (8 + 12)
    assert [entry["clients"] for entry in server.ledger.account()["entries"]] == [2, 2]
    server.begin(1)
    assert server.lost == []
    assert list(server.call(ALL, P.fail, Ask())) == ALL  # it can be asked again


def test_a_part_of_the_cohort_may_fail_altogether(start: Start, three: Federation) -> None:
    """An algorithm that asks one client again must not end the run of the others."""
    server, _ = start(P, three)
    server.begin(0)
    assert server.select(0) == ALL
    assert server.call([1], P.fail, Ask(listed=ALL)) == {}
    assert [(lost["client"], lost["handler"]) for lost in server.lost] == [(1, "fail")]


def test_all_replies_lost_raises(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    server.begin(6)
    with pytest.raises((ContractError, FedfillError), match=r"'fail'") as caught:
        server.call(ALL, P.fail, Ask(listed=ALL))
    if isinstance(caught.value, ContractError):
        assert str(caught.value) == "no client could run 'fail' in round 7"
        assert caught.value.__cause__ is not None
        assert reason(caught.value.__cause__) == "ValueError: boom 0"
    else:
        assert str(caught.value).startswith("min_replies: in round 7 0 of 3 clients gave a good reply to 'fail'")
        assert "ValueError: boom 0" in str(caught.value)
    assert [loss["client"] for loss in server.lost] == ALL


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_replies_that_are_not_finite_are_left_out_and_reported(start: Start, three: Federation, number: float) -> None:
    server, _ = start(P, three)
    assert list(server.call(ALL, P.nan, Ask(listed=[0, 2], number=number))) == [1]
    assert [(loss["client"], loss["reason"]) for loss in server.lost] == [
        (0, "the reply holds a NaN or an infinity"),
        (2, "the reply holds a NaN or an infinity"),
    ]
    assert server.costs.bytes_up == 3 * 8  # they crossed nonetheless
    assert server.ledger.account()["entries"][0]["clients"] == 3
    with pytest.raises(DivergedError, match="training diverged: in round 1"):
        server.call(ALL, P.nan, Ask(listed=ALL, number=number))


def test_a_users_slip_ends_the_run_as_it_is(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    with mistake(server, r"mu: found -1"):
        server.call(ALL, P.user_slip, Ask())


@pytest.mark.parametrize("cohort", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_replies_come_in_client_order_whoever_answers_first(start: Start, three: Federation, cohort: list[int]) -> None:
    server, _ = start(P, three, workers=3)
    assert list(server.call(cohort, P.slow, Ask())) == ALL


def test_an_empty_cohort_has_no_replies(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    assert server.call([], P.hello, Ask()) == {}
    assert (server.costs.bytes_down, server.costs.bytes_up) == (0, 0)


# What is counted and what is released


def test_undeclared_fields_reach_the_ledger_as_no_guarantee(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    server.call(ALL, P.released, Ask())
    account = server.ledger.account()
    found = {e["released"]: (e["mechanism"], e["epsilon"], e["clients"], e["times"]) for e in account["entries"]}
    assert found == {
        "Answer.value": ("sent as it is", None, 3, 1),
        "Answer.known": ("declared with the class", None, 3, 1),
        "Answer.noise": (
            "drawn from a fixed distribution",
            0.0,
            3,
            1,
        ),  # what is declared counts, also where a field stays empty
    }
    assert account["total_epsilon"] is None


def test_bytes_of_a_round_by_hand(start: Start, three: Federation, make_federation: Callable[..., Federation]) -> None:
    program = FedAvg(local_epochs=2, batch_size=2)
    two = make_federation([Samples(torch.ones(n, 2), torch.zeros(n, dtype=torch.int64)) for n in (3, 4)])
    server, _ = start(program, two, nn.Linear(2, 3))
    for t in range(2):
        server.begin(t)
        program.round(server, t)
    # 2 * 3 + 3 = 9 numbers of 4 bytes to each client, the same back with the number of samples in 8
    assert server.costs.legs == {"train": [2 * 2 * 36, 2 * 2 * (36 + 8)]}
    assert (server.costs.bytes_down, server.costs.bytes_up) == (144, 176)
    assert server.costs.train_samples == 2 * 2 * (3 + 4)
    assert server.costs.fit_seconds > 0


# Cohorts and streams


def cohorts(start: Start, three: Federation, clients: int, participation: float, seed: int = 0) -> list[list[int]]:
    server, _ = start(P, three, seed=seed, participation=participation)
    server.clients = clients
    return [server.select(t) for t in range(30)]


def test_cohorts_are_sorted_and_depend_on_seed_and_round_alone(start: Start, three: Federation) -> None:
    chosen = cohorts(start, three, 10, 0.3)
    assert all(len(cohort) == 3 and cohort == sorted(set(cohort)) for cohort in chosen)
    assert set().union(*chosen) == set(range(10))
    assert chosen == cohorts(start, three, 10, 0.3)
    assert chosen != cohorts(start, three, 10, 0.3, seed=1)
    assert len({tuple(cohort) for cohort in chosen}) > 10


@pytest.mark.parametrize(
    ("clients", "participation", "size"), [(10, 1.0, 10), (10, 0.01, 1), (7, 0.5, 4), (3, 0.9, 3), (1, 0.1, 1)]
)
def test_size_of_a_cohort(start: Start, three: Federation, clients: int, participation: float, size: int) -> None:
    assert {len(cohort) for cohort in cohorts(start, three, clients, participation)} == {size}


def test_streams_of_a_client(start: Start, three: Federation) -> None:
    server, _ = start(P, three, seed=5)
    server.begin(3)
    replies = server.call(ALL, P.draws, Ask())
    for i in ALL:
        once, again, other = replies[i].value
        stream = torch_stream(5, "a", 3, i)  # asked for again, a stream goes on: noise is never drawn twice
        assert torch.equal(once, torch.rand(2, generator=stream))
        assert torch.equal(again, torch.rand(2, generator=stream))
        assert not torch.equal(once, other)


def test_two_trainings_of_a_handler_draw_differently(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    for reply in server.call(ALL, P.two_fits, Ask()).values():
        assert not torch.equal(*reply.value)


# FedAvg


class Squares(FedAvg):
    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        return ((model(batch.inputs)[:, 0] - batch.labels) ** 2).mean()


@pytest.mark.parametrize(("weighting", "expected"), [("samples", 3.8 / 3), ("uniform", 1.15)])
def test_a_round_of_fedavg_by_hand(
    start: Start, make_federation: Callable[..., Federation], weighting: str, expected: float
) -> None:
    # From w = 1. Points (1, 2), (2, 4): errors -1, -2, gradient (2*-1*1 + 2*-2*2) / 2 = -5, w = 1.5.
    # Point (1, 0): error 1, gradient 2, w = 0.8. Mean (2 * 1.5 + 0.8) / 3, or (1.5 + 0.8) / 2 if all count the same.
    clients = [
        Samples(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 4])),
        Samples(torch.tensor([[1.0]]), torch.tensor([0])),
    ]
    program = Squares(local_epochs=1, optimizer="sgd", learning_rate=0.1, weighting=weighting)  # type: ignore[arg-type]
    server, _ = start(program, make_federation(clients, classes=5))
    program.round(server, 0)
    assert server.state.weights["weight"].item() == pytest.approx(expected, rel=1e-6)
    assert server.initial["weight"].item() == 1.0


def test_a_lost_client_is_left_out_of_the_average(start: Start, make_federation: Callable[..., Federation]) -> None:
    points = Samples(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 4]))
    broken = Samples(torch.tensor([[float("nan")]]), torch.tensor([0]))
    program = Squares(local_epochs=1, optimizer="sgd", learning_rate=0.1)
    server, _ = start(program, make_federation([broken, points], classes=5))
    program.round(server, 0)
    assert server.state.weights["weight"].item() == pytest.approx(1.5)
    assert [loss["client"] for loss in server.lost] == [0]


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


def test_a_message_to_all_is_measured_once_and_counted_for_each(start: Start, three: Federation) -> None:
    server, _ = start(FedAvg(local_epochs=1), three, nn.Linear(1, 5))
    server.call(ALL, FedAvg(local_epochs=1).train, Broadcast(server.state.weights))
    assert server.costs.legs["train"][0] == 3 * 10 * 4


# Means


@dataclass(frozen=True)
class Part(Message):
    weights: Any
    more: Any
    n: Any
    id: int


class Parts(Program):
    """Clients whose replies are there to be averaged; `ask.listed` names those that answer nonsense, of a kind."""

    @client_handler
    def part(self, client: Client, ask: Ask) -> Part:
        i = client.id
        weights = {"w": torch.tensor([1.0, float(i)]), "steps": torch.tensor(i)}
        n: Any = i + 1
        if i in ask.listed:
            weights |= {
                "nan": {"w": torch.tensor([1.0, float("nan")])},
                "shape": {"w": torch.zeros(3)},
                "dtype": {"w": torch.zeros(2, dtype=torch.float64)},
                "name": {"x": torch.zeros(2)},
                "weight": {},
                "heavy": {},
                "none": {},
                "nothing": {},
            }[ask.named["what"]]
            n = {"weight": -1, "heavy": 10**400, "none": None, "nothing": 0}.get(ask.named["what"], n)
        return Part(weights, {"d": torch.tensor([float(i)])} if ask.number else None, n, i)


PP = Parts()
LIKE = {"weights": {"w": torch.zeros(2), "steps": torch.tensor(0)}, "more": {"d": torch.zeros(1)}}


def test_a_mean_by_hand(start: Start, three: Federation) -> None:
    server, _ = start(PP, three)
    replies, mean = server.average(ALL, PP.part, Ask(number=1.0), of=LIKE, by="n")
    assert mean["weights"]["w"].tolist() == pytest.approx([1.0, (0 + 2 + 6) / 6])
    assert mean["weights"]["steps"].item() == 2  # of the heaviest
    assert mean["more"]["d"].tolist() == pytest.approx([8 / 6])
    assert {i: (r.weights, r.more, r.n, r.id) for i, r in replies.items()} == {i: (None, None, i + 1, i) for i in ALL}
    assert server.costs.legs["part"][1] == 3 * (2 * 4 + 8 + 4 + 8 + 8)  # every client's own, averaged or not


def test_a_field_that_no_reply_holds_has_no_mean_and_none_weighs_all_the_same(start: Start, three: Federation) -> None:
    server, _ = start(PP, three)
    _, mean = server.average([0, 2], PP.part, Ask(), of=LIKE, by=None)
    assert list(mean) == ["weights"]
    assert mean["weights"]["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("what", ["nan", "shape", "dtype", "name", "weight", "heavy", "none"])
def test_nonsense_is_left_out_of_the_mean(start: Start, three: Federation, what: str) -> None:
    server, _ = start(PP, three)
    replies, mean = server.average(ALL, PP.part, Ask(listed=[0, 2], named={"what": what}), of=LIKE, by="n")
    assert list(replies) == [1]
    assert mean["weights"]["w"].tolist() == [1.0, 1.0]
    assert [loss["client"] for loss in server.lost] == [0, 2]
    assert [entry["released"] for entry in server.ledger.account(1e-5)["entries"]]  # what was sent was sent


def test_when_nobody_weighs_anything_there_is_no_mean(start: Start, three: Federation) -> None:
    server, _ = start(PP, three)
    with pytest.raises(FedfillError, match=r"every reply to 'part' weighs nothing in 'n'"):
        server.average(ALL, PP.part, Ask(listed=ALL, named={"what": "nothing"}), of=LIKE, by="n")


def test_many_clients_are_averaged_in_groups_and_the_same_everywhere(
    start: Start, make_federation: Callable[..., Federation]
) -> None:
    many = make_federation(
        [Samples(torch.ones(1, 1) * k, torch.ones(1, dtype=torch.int64)) for k in range(150)], classes=5
    )
    cohort = [k for k in range(150) if k % 7]
    server, _ = start(PP, many)
    _, mean = server.average(cohort, PP.part, Ask(), of=LIKE, by="n")
    groups: dict[int, list[int]] = {}
    for k in cohort:
        groups.setdefault(k * 64 // 150, []).append(k)
    inner = [
        (weighted_mean([({"w": torch.tensor([1.0, float(k)])}, k + 1) for k in members]), sum(k + 1 for k in members))
        for members in groups.values()
    ]
    assert torch.equal(mean["weights"]["w"], weighted_mean(inner)["w"])
    assert mean["weights"]["w"][1].item() == pytest.approx(
        sum(k * (k + 1) for k in cohort) / sum(k + 1 for k in cohort)
    )


# Time, and how many are enough


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


def test_fewer_replies_than_needed_end_the_run(start: Start, three: Federation) -> None:
    server, _ = start(P, three, min_replies=2)
    assert list(server.call(server.select(0), P.fail, Ask(listed=[1]))) == [0, 2]
    with pytest.raises(
        FedfillError, match=r"^min_replies: in round 1 1 of 3 clients gave a good reply to 'fail', but 2"
    ):
        server.call(server.select(0), P.fail, Ask(listed=[0, 1]))


def test_a_part_of_the_cohort_may_be_lost_whole(start: Start, three: Federation) -> None:
    server, _ = start(P, three, min_replies=2)
    server.select(0)
    assert server.call([1], P.nan, Ask(listed=[1], number=float("nan"))) == {}
    assert [loss["client"] for loss in server.lost] == [1]


def test_noise_of_a_simulation_can_be_repeated(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    first, second = (server.call(ALL, P.noise, Ask())[1].value for _ in range(2))
    assert torch.equal(first, second)


# Personal models


PERSONAL: dict[str, Algorithm] = {
    "local": Local(local_steps=2, batch_size=8, learning_rate=0.01),
    "fedbn": FedBN(local_steps=2, batch_size=8, learning_rate=0.1),
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
        assert repr(found) == repr(gather_personal(scored, splits_of(federation), federation.classes))
        return
    hits = [own.predicted == c.test.labels for (_, own, _), c in zip(scored, federation.clients, strict=True)]
    correct = torch.cat(hits)
    labels = torch.cat([client.test.labels for client in federation.clients])
    assert found.accuracy == correct.double().mean().item()
    assert found.loss == pytest.approx(torch.cat([own.losses for _, own, _ in scored]).mean().item(), rel=1e-6)
    assert found.accuracy_by_class == shares(correct, labels, federation.classes)
    assert found.accuracy_by_client[:3] == [own.double().mean().item() for own in hits[:3]]
    assert found.accuracy_by_client[3] is None
