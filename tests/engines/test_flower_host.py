"""One host of a federation: what it refuses, its noise, the states that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from tests.engines.flower_world import ROUNDS, World, expected
from tests.helpers import small_federation

from fedfill import tree
from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.engines.flower_host import Kept, _stored
from fedfill.engines.flower_messages import Answer, Hello, encode, pack, unpack
from fedfill.privacy.keyed import KeyedStream
from fedfill.protocol.client import Client, State, client_handler


def test_a_state_from_before_runs_had_names_goes_on_with_a_checkpoint_from_then(tmp_path: Path) -> None:
    world = World("scaffold", tmp_path)
    for t in range(2):
        world.round(t)
    for path in tmp_path.glob("host*/client-*.safetensors"):
        data = path.read_bytes()
        field = b', \\"origin\\": \\"origin\\"'
        assert data.count(field) == 1
        path.write_bytes(data.replace(field, b" " * len(field)))
        assert tree.from_bytes(path.read_bytes()).origin == ""
    world.engine.origin = ""
    for t in range(2, ROUNDS):
        world.round(t)
    assert world.sha256 == expected("scaffold")


def test_a_damaged_state_is_a_lost_reply_and_says_so(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    world.server = world.serve(participation=1.0)
    world.round(0)
    (damaged,) = (tmp_path / "host2").glob("client-2-*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    world.round(1)
    assert [(lost["client"], lost["reason"][:10]) for lost in world.server.lost] == [(2, "state-dir:")]


def say(world: World, action: str, value: Any, **words: Any) -> Answer:
    message = Message(
        pack(encode(value), **{"digest": "digest", "round": 0, "begun": 0, "origin": "origin", "client": 0, **words}),
        100,
        action,
    )
    (name,) = world.engine.grid.push_messages([message])
    (reply,) = world.engine.grid.pull_messages([name])
    assert reply.has_content(), reply.error
    answer, _ = unpack(reply.content, 2**30)
    return answer


@pytest.mark.parametrize(
    ("value", "words", "why"),
    [
        (Broadcast({}), {"digest": "another"}, "the message is another experiment's"),
        (Broadcast({}), {"client": 2}, "the message is for client 2, and this is client 0"),
        (Broadcast({}), {"round": -1}, "round -1"),
        (Broadcast({}), {"origin": 3}, "origin 3"),
        (Broadcast({}), {"round": "x"}, "round 'x'"),
        (Update({}, 1), {}, "a Update in place of a Broadcast"),
        (None, {}, "a NoneType in place of a Broadcast"),
        (Broadcast({"w": 3}), {}, "'weights.w' of a Broadcast"),  # type: ignore[dict-item]
    ],
)
def test_a_host_refuses_nonsense(
    value: Any, words: dict[str, Any], why: str, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    world = World("fedavg", tmp_path)
    answer = say(world, "train.train", value, **words)
    assert answer.reply is None
    assert why in str(answer.error)
    assert any(why in line for line in warned())
    assert not list((tmp_path / "host0").glob("*.safetensors"))


def test_a_message_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    message = Message(pack(encode(None)), 100, "train.nothing")
    (name,) = world.engine.grid.push_messages([message])
    (reply,) = world.engine.grid.pull_messages([name])
    assert reply.has_error()
    world.round(0)
    assert world.server.lost == []


def test_noise_of_a_deployment_follows_from_a_key_that_only_the_host_has() -> None:
    def draw(key: bytes, *name: str | int) -> float:
        return float(KeyedStream(key, *name).uniform(1))

    keys = [bytes([k]) * 32 for k in range(4)]
    draws = {draw(key, purpose, t) for key in keys for purpose in ("a", "b") for t in range(3)}
    assert len(draws) == 24
    assert draw(keys[0], "a", 0) == draw(keys[0], "a", 0)
    normal = KeyedStream(keys[0], "normal").normal(20000)
    assert float(normal.mean()) == pytest.approx(0, abs=0.05)
    assert float(normal.std()) == pytest.approx(1, abs=0.05)


class Noisy(FedAvg):
    @client_handler
    def noisy(self, client: Client, message: Broadcast) -> Hello:
        draws = torch.randint(10**9, (1,), generator=client.stream("a")).item(), int(client.noise("a").words(1)[0]) >> 1
        return Hello(draws[0], draws[1], "", True)


def test_noise_is_the_same_to_the_same_question_and_other_noise_to_another(tmp_path: Path) -> None:
    def ask(folder: str, secret: bool, value: float, t: int) -> tuple[int, int]:
        world = World("fedavg", tmp_path / folder, algorithm=Noisy(), secret=secret)
        world.server.begin(t)
        message = Broadcast({"w": torch.tensor([value])})
        (reply,) = world.server.call([1], world.algorithm.noisy, message).values()
        return reply.client, reply.protocol

    seeded = ask("x", False, 1.0, 0)
    assert seeded == ask("y", False, 2.0, 0)
    first = ask("a", True, 1.0, 0)
    assert first[0] == seeded[0]  # what protects nothing still comes from the seed
    assert first == ask("a", True, 1.0, 0)
    noises = {first[1], ask("a", True, 2.0, 0)[1], ask("a", True, 1.0, 1)[1], ask("b", True, 1.0, 0)[1], seeded[1]}
    assert len(noises) == 5
    assert (tmp_path / "a" / "host1" / "noise.key").stat().st_mode & 0o777 == 0o600


def test_noise_is_other_noise_where_anything_differs_that_the_answer_is_made_of(tmp_path: Path) -> None:
    """The same noise on two answers that differ could be subtracted, and what it hides be read off the difference."""

    class Counting(Noisy):
        def client_state(self) -> dict[str, Any]:
            return {"asked": 0}

        @client_handler
        def counted(self, client: Client, message: Broadcast) -> Hello:
            client.state.asked += 1
            return self.noisy(client, message)

    def ask(folder: str, times: int = 1, **options: Any) -> list[int]:
        world = World("fedavg", tmp_path / folder, algorithm=Counting(), secret=True, **options)
        world.server.begin(0)
        message = Broadcast({"w": torch.tensor([1.0])})
        return [world.server.call([1], world.algorithm.counted, message)[1].protocol for _ in range(times)]

    first, later = ask("a", times=2)
    assert later != first  # the client's state is another
    key = (tmp_path / "a" / "host1" / "noise.key").read_bytes()

    def with_that_key(folder: str, **options: Any) -> int:
        (tmp_path / folder / "host1").mkdir(parents=True)
        (tmp_path / folder / "host1" / "noise.key").write_bytes(key)
        return ask(folder, **options)[0]

    federation = small_federation()
    own = federation.clients[1]
    inputs = own.train.inputs.clone()
    inputs[0] = 255 - inputs[0]
    changed = replace(own, train=replace(own.train, inputs=inputs))
    clients = (federation.clients[0], changed, *federation.clients[2:])
    assert with_that_key("same") == first
    assert with_that_key("data", federation=replace(federation, clients=clients)) != first
    assert with_that_key("settings", digest="another") != first


def test_noise_for_two_purposes_is_not_the_same(tmp_path: Path) -> None:
    class Twice(FedAvg):
        @client_handler
        def twice(self, client: Client, message: Broadcast) -> Hello:
            draws = [int(client.noise(purpose).words(1)[0]) >> 1 for purpose in ("a", "b")]
            return Hello(draws[0], draws[1], "", True)

    world = World("fedavg", tmp_path, algorithm=Twice(), secret=True)
    world.server.begin(0)
    reply = world.server.call([1], world.algorithm.twice, Broadcast({"w": torch.tensor([1.0])}))[1]
    assert reply.client != reply.protocol


def test_a_round_that_is_done_again_releases_the_same_noise(tmp_path: Path) -> None:
    """Else the account, which goes back with the checkpoint, would have one release where there were two."""
    world = World("feddpms", tmp_path, secret=True)
    world.server = world.serve(participation=1.0)
    for t in range(2):
        world.round(t)
    checkpoint = tree.to_bytes(world.server.state.tree())
    world.round(2)
    first = tree.to_bytes(world.server.state.shared)
    assert world.server.state.shared
    world.engine = world.connect(run_id=2)
    world.server = world.serve(participation=1.0)
    world.server.state = State(tree.from_bytes(checkpoint))
    world.round(2)
    assert tree.to_bytes(world.server.state.shared) == first


def stored(run: str, t: int, before: Any, now: Any) -> Kept:
    return Kept(run, t, before, now, "origin")


@pytest.mark.parametrize(
    ("kept", "run", "t", "begun", "expected"),
    [
        (None, "a", 3, 1, (None, None)),
        (stored("a", 2, {"x": 1}, {"x": 2}), "a", 3, 0, ({"x": 2}, {"x": 2})),  # the next round
        (stored("a", 2, {"x": 1}, {"x": 2}), "a", 2, 0, ({"x": 2}, {"x": 1})),  # another call of the same round
        (stored("a", 2, {"x": 1}, {"x": 2}), "b", 2, 2, ({"x": 1}, {"x": 1})),  # the round is begun anew
        (
            stored("a", 2, {"x": 1}, {"x": 2}),
            "b",
            4,
            2,
            ({"x": 1}, {"x": 1}),
        ),  # in which this client is not called again
        (
            stored("a", 2, {"x": 1}, {"x": 2}),
            "b",
            4,
            3,
            ({"x": 2}, {"x": 2}),
        ),  # this client had no part in what was lost
        (stored("a", 9, {"x": 1}, {"x": 2}), "b", 0, 0, (None, None)),  # the whole experiment is begun anew
        (stored("a", 9, {"x": 1}, {"x": 2}), "b", 3, 0, (None, None)),
    ],
)
def test_which_state_a_client_goes_on_with(
    kept: Kept | None, run: str, t: int, begun: int, expected: tuple[Any, Any]
) -> None:
    assert _stored(kept, run, t, begun, "origin") == expected
    assert _stored(kept, run, t, begun, "another") == (None, None)


@pytest.mark.parametrize(("run", "t", "begun"), [("b", 3, 2), ("a", 2, 0), ("b", 1, 1)])
def test_a_state_that_is_gone_is_not_made_up(run: str, t: int, begun: int) -> None:
    with pytest.raises(ValueError, match=f"round {t + 1}, .* round 4;"):
        _stored(stored("a", 3, {"x": 1}, {"x": 2}), run, t, begun, "origin")


def test_the_folder_of_a_host_holds_no_half_written_file(tmp_path: Path) -> None:
    world = World("feddpms", tmp_path)
    for t in range(ROUNDS):
        world.round(t)
    names = {path.name.split("-")[0] + path.suffix for path in tmp_path.glob("host*/*")}
    assert names == {"client.safetensors", "client.lock"}


class Counted(FedAvg):
    """A client that counts how often it was asked; asked with 0 it fails."""

    def client_state(self) -> dict[str, Any]:
        return {"asked": 0}

    @client_handler
    def count(self, client: Client, message: Broadcast) -> Update:
        client.state.asked += 1
        if not message.weights["w"].any():
            raise RuntimeError("out of memory")
        return Update(message.weights, client.state.asked)


def ask(world: World, w: float, **words: int) -> int | None:
    reply = say(world, "train.count", Broadcast({"w": torch.tensor([w])}), **words).reply
    return None if reply is None else reply.samples


def test_a_client_that_diverges_in_a_later_call_keeps_what_it_had_from_the_earlier_one(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path, algorithm=Counted())
    assert ask(world, 1.0) == 1
    assert ask(world, float("nan")) == 2  # the second call of the same round, which is not kept
    assert ask(world, 1.0) == 2
    assert ask(world, 1.0, round=1) == 3


def test_a_host_does_not_go_on_with_the_state_of_other_code(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path, algorithm=Counted())
    assert ask(world, 1.0) == 1
    (place,) = (tmp_path / "host0").glob("client-0-*.safetensors")
    place.write_bytes(place.read_bytes().replace(b"asked", b"heard"))
    answer = say(world, "train.count", Broadcast({"w": torch.tensor([1.0])}), round=1)
    assert answer.reply is None
    assert answer.error.startswith("state-dir:")
    assert "'asked'" in answer.error


def test_a_client_that_fails_in_the_first_call_after_a_resume_does_not_get_back_what_was_undone(tmp_path: Path) -> None:
    """The server was killed in its second round, so that what happened there never was; and it is killed once more."""
    world = World("fedavg", tmp_path, algorithm=Counted())
    assert [ask(world, 1.0, round=t) for t in range(2)] == [1, 2]
    world.engine = world.connect(run_id=2)
    assert ask(world, 0.0, round=1, begun=1) is None
    world.engine = world.connect(run_id=3)
    assert ask(world, 1.0, round=3, begun=3) == 2
