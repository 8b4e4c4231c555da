"""What a handler sees of its client: data, state, streams. Every test runs on every engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.protocol.world import (
    ALL,
    Ask,
    P,
    Start,
    look,
    mistake,
)

from fedfill import tree
from fedfill.data.federation import Federation
from fedfill.data.samples import Samples
from fedfill.streams import torch_stream


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


@pytest.mark.parametrize("workers", [1, 3])
def test_no_gradient_of_another_client_is_left_in_a_workers_model(
    start: Start, three: Federation, workers: int
) -> None:
    server, _ = start(P, three, workers=workers)
    for _ in range(2):  # the gradient of w * sum(x) is sum(x)
        replies = server.call(ALL, P.gradient, Ask())
        assert [float(replies[i].value) for i in ALL] == [1.0, 3.0, 6.0]


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


def test_noise_of_a_simulation_can_be_repeated(start: Start, three: Federation) -> None:
    server, _ = start(P, three)
    first, second = (server.call(ALL, P.noise, Ask())[1].value for _ in range(2))
    assert torch.equal(first, second)
