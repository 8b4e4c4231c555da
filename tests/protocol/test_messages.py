"""Messages: what crosses, what it costs, and means over replies. Every test runs on every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import refused, weighted_mean
from tests.protocol.world import (
    ALL,
    Ask,
    P,
    Program,
    Start,
    line,
    look,
    mistake,
)
from torch import nn

from fedfill.algorithms import Broadcast
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.errors import ContractError
from fedfill.models.views import weights_of
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message


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
    with pytest.raises(ContractError, match="'unmarked'"):
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
    with pytest.raises((ContractError, TypeError), match="ndarray"):
        server.call(ALL, P.hello, Ask(named={"array": np.zeros(3)}))


@pytest.mark.parametrize("workers", [1, 2])
def test_tensors_of_a_workers_model_do_not_leave_with_a_reply_or_a_state(
    start: Start, three: Federation, workers: int
) -> None:
    server, _ = start(P, three, workers=workers)
    replies = server.call(ALL, P.resident, Ask())
    assert [float(replies[i].value) for i in ALL] == [0.0, 1.0, 2.0]
    assert [float(look(server)[i][1]) for i in ALL] == [0.0, 1.0, 2.0]


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


def test_a_message_to_all_is_measured_once_and_counted_for_each(start: Start, three: Federation) -> None:
    server, _ = start(FedAvg(local_epochs=1), three, nn.Linear(1, 5))
    server.call(ALL, FedAvg(local_epochs=1).train, Broadcast(server.state.weights))
    assert server.costs.legs["train"][0] == 3 * 10 * 4


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
    with refused("engine", "'part'", "'n'"):
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
