"""The Flower engine: same bits, hosts that are away, servers and hosts that were killed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message
from tests.engines.flower_world import MORE, ROUNDS, TWO, World, expected, spoilt
from tests.engines.in_process import hosts
from tests.helpers import CLASSES, prepare, refused

from fedfill import tree
from fedfill.algorithms import Update
from fedfill.algorithms.feddpms import Shared
from fedfill.engines.flower import GRACE, FlowerEngine
from fedfill.engines.flower_messages import HELLO, PROTOCOL, Answer, Hello, encode, pack, unpack
from fedfill.protocol.client import State


@pytest.mark.parametrize("name", [*TWO, *MORE])
def test_same_bits_as_in_one_process(name: str, tmp_path: Path) -> None:
    world = World(name, tmp_path)
    prepare(world.algorithm, world.server)
    for t in range(ROUNDS):
        world.round(t)
    assert world.sha256 == expected(name)


@pytest.mark.parametrize("killed_in", [-3, -2, -1, 0])
def test_a_server_that_was_killed_before_the_first_round_does_its_last_step_again(
    killed_in: int, tmp_path: Path
) -> None:
    """Two chunks of pre-training, the upload and the first round: what hosts keep of the steps before is not begun anew."""
    world = World("sdafl", tmp_path)

    def moment(t: int) -> None:
        world.server.begin(t)
        if t < 0:
            world.algorithm.pretrain(world.server, t + world.algorithm.pretraining_steps())
        else:
            world.algorithm.round(world.server, t)

    assert world.algorithm.pretraining_steps() == 3
    for t in range(-3, killed_in):
        moment(t)
    checkpoint = tree.to_bytes(world.server.state.tree())
    moment(killed_in)  # everything arrived, and nothing was written
    world.engine = world.connect(run_id=2)
    world.server = world.serve()
    world.server.state = State(tree.from_bytes(checkpoint))
    for t in range(killed_in, ROUNDS):
        moment(t)
    assert world.sha256 == expected("sdafl")


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("killed_in", range(ROUNDS))
def test_a_server_that_was_killed_in_a_round_does_it_again_with_the_same_bits(
    name: str, killed_in: int, tmp_path: Path
) -> None:
    """Hosts have committed by then; they go back to where the round began."""
    world = World(name, tmp_path)
    for t in range(killed_in):
        world.round(t)
    checkpoint = tree.to_bytes(world.server.state.tree())
    world.round(killed_in)  # everything arrived, and nothing was written
    world.engine = world.connect(run_id=2)
    world.server = world.serve()
    world.server.state = State(tree.from_bytes(checkpoint))
    for t in range(killed_in, ROUNDS):
        world.round(t)
    assert world.sha256 == expected(name)


def test_a_host_that_was_started_anew_goes_on(tmp_path: Path) -> None:
    world = World("feddpms", tmp_path)
    for t in range(ROUNDS):
        world.engine = world.connect()  # new processes each time; only the disk remains
        world.server._engine = world.engine
        world.round(t)
    assert world.sha256 == expected("feddpms")


def test_a_server_that_lost_more_than_a_round_is_refused(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    world.server = world.serve(participation=1.0)
    for t in range(4):
        world.round(t)
    world.engine = world.connect(run_id=2)
    world.server = world.serve(participation=1.0)
    with refused("min_replies", "round 2", "round 4"):
        world.round(1)


def test_an_experiment_that_is_begun_anew_begins_anew_everywhere(tmp_path: Path) -> None:
    world = World("feddpms", tmp_path)
    for t in range(ROUNDS):
        world.round(t)
    world.engine = world.connect(run_id=2)
    world.server = world.serve()
    for t in range(ROUNDS):
        world.round(t)
    assert world.sha256 == expected("feddpms")


@pytest.mark.parametrize("first", [3, ROUNDS])
def test_a_resumed_run_does_not_meet_what_another_run_left(first: int, tmp_path: Path) -> None:
    """Run 1 leaves its states; run 2 is killed before it has called every host; run 3 resumes run 2."""
    world = World("scaffold", tmp_path)
    world.engine.origin = "of run 1"
    for t in range(first):
        world.round(t)
    world.engine = world.connect(run_id=2)
    world.server = world.serve()
    world.round(0)
    checkpoint = tree.to_bytes(world.server.state.tree())
    world.engine = world.connect(run_id=3)
    world.server = world.serve()
    world.server.state = State(tree.from_bytes(checkpoint))
    for t in range(1, ROUNDS):
        world.round(t)
        assert world.server.lost == []
    assert world.sha256 == expected("scaffold")


def test_strangers_are_refused_once_and_disturb_nobody(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    world = World("fedavg", tmp_path)
    world.server = world.serve(participation=1.0)
    grid = world.engine.grid
    arguments = (world.algorithm, world.federation, world.net, world.initial, tmp_path / "strangers")
    another = hosts(*arguments, digest="another")
    twin = hosts(*arguments)
    for node, app in {7: another.apps[100], 8: twin.apps[101]}.items():
        grid.apps[node], grid.contexts[node] = app, grid.contexts[100]
        grid.online.add(node)
    for t in range(2):
        world.round(t)
    assert world.server.lost == []
    assert warned() == [
        "node 7 is refused: it runs another experiment or release, or its initial weights are others",
        "node 8 is refused: another node is client 1 already",
    ]
    assert {message.metadata.message_type for message in grid.sent if message.metadata.dst_node_id in (7, 8)} == {HELLO}


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (Hello(0, 99, "digest", True), "another release"),
        (Hello(9, PROTOCOL, "digest", True), "its client number is 9; allowed: 0 to 3"),
        (Hello(-1, PROTOCOL, "digest", True), "its client number is -1"),
        (Hello("0", PROTOCOL, "digest", True), "'client' of a Hello is wrong"),  # type: ignore[arg-type]
        (Update({}, 3), "a Update in place of a Hello"),
    ],
)
def test_a_node_that_says_nonsense_of_itself_is_refused(hello: Any, why: str, tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    grid = world.engine.grid
    grid.spoil = lambda message, reply: Message(pack(encode(Answer(hello))), reply_to=message)
    with refused("clients", "0 of 4 hosts", "refused", why):
        FlowerEngine(
            grid, world.algorithm, clients=4, classes=CLASSES, test=world.federation.test, template=world.net,
            digest="digest", device=torch.device("cpu"), wait=0,
        )  # fmt: skip


def test_a_host_that_is_away_is_lost_and_called_again_when_it_is_back(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    world.server = world.serve(participation=1.0)
    world.engine.grid.online.discard(102)
    world.round(0)
    assert world.server.lost == [{"client": 2, "handler": "train", "reason": "its host is not there"}]
    world.engine.grid.online.add(102)
    world.round(1)
    assert world.server.lost == []


def test_a_reply_that_never_comes_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfill.engines.flower.GRACE", 0.5)
    world = World("fedavg", tmp_path, timeout=1.0)
    world.server = world.serve(participation=1.0)
    world.engine.grid.spoil = spoilt(3, lambda message: None)
    world.round(0)
    assert world.server.lost == [{"client": 3, "handler": "train", "reason": "no answer within 1.5 s"}]


def test_an_error_of_flower_itself_is_a_loss(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    world.server = world.serve(participation=1.0)

    def broken(message: Message, context: Any) -> Message:
        raise RuntimeError("killed\nby the system")

    world.engine.grid.apps[101] = broken  # type: ignore[assignment]
    world.round(0)
    assert [lost["client"] for lost in world.server.lost] == [1]
    assert "killed" in world.server.lost[0]["reason"]


def test_codes_of_a_wrong_shape_are_not_passed_on(tmp_path: Path) -> None:
    world = World("feddpms", tmp_path)
    world.server = world.serve(participation=1.0)
    for t in range(2):
        world.round(t)

    def spoil(message: Message, reply: Message) -> Message:
        answer, _ = unpack(reply.content, 2**30)
        if message.metadata.dst_node_id == 100 and message.metadata.message_type == "train.secondary_client":
            lie = Shared([0], [1], torch.zeros(1, 3))
            answer = Answer(replace(answer.reply, shared=lie), None, answer.releases)
        return Message(pack(encode(answer)), reply_to=message)

    world.engine.grid.spoil = spoil
    world.round(2)
    assert [(lost["client"], lost["handler"]) for lost in world.server.lost] == [(0, "DPMS")]
    assert world.server.lost[0]["reason"].startswith("'codes' is torch.float32 of shape [1, 3]")
    assert 0 not in world.server.state.shared


def test_a_node_that_turns_out_to_be_another_client_is_asked_anew(tmp_path: Path) -> None:
    """Two hosts' people swap their numbers between two rounds, and the nodes stay what they are."""
    world = World("fedavg", tmp_path)
    world.server = world.serve(participation=1.0)
    world.round(0)
    apps = world.engine.grid.apps
    apps[100], apps[101] = apps[101], apps[100]
    world.round(1)
    assert [lost["reason"] for lost in world.server.lost] == [
        f"the message is for client {i}, and this is client {1 - i}" for i in (0, 1)
    ]
    world.round(2)
    assert world.server.lost == []
    apps[100], apps[101] = apps[101], apps[100]
    missing = [accuracy is None for accuracy in world.engine.evaluate(world.initial, 2).accuracy_by_client]
    assert missing == [True, True, False, False]
    assert None not in world.engine.evaluate(world.initial, 2).accuracy_by_client


def test_a_reply_that_came_too_late_counts_as_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfill.engines.flower.GRACE", 0.2)
    world = World("fedavg", tmp_path, timeout=1.0)
    world.server = world.serve(participation=1.0)
    world.engine.grid.spoil = spoilt(3, lambda message: None)
    world.round(0)
    entries = world.server.ledger.account(1e-5)["entries"]
    assert "a reply that could not be read" in [entry["released"] for entry in entries]


@pytest.mark.parametrize(("code", "booked"), [(2, False), (3, True), (4, True), (5, True), (8, False)])
def test_a_reply_that_flower_may_have_had_counts_as_released(code: int, booked: bool, tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    world.server = world.serve(participation=1.0)
    world.engine.grid.spoil = spoilt(1, lambda message: Message(Error(code=code, reason="database"), reply_to=message))
    world.round(0)
    entries = {entry["released"]: entry["clients"] for entry in world.server.ledger.account(1e-5)["entries"]}
    assert entries.get("a reply that could not be read") == (1 if booked else None)
    (lost,) = world.server.lost
    assert lost["reason"].startswith(f"Flower error {code}: ")
    assert ("database" in lost["reason"]) != booked


def test_flower_keeps_a_message_for_longer_than_the_server_waits(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path, timeout=10.0)
    world.round(0)
    lives = {m.metadata.ttl for m in world.engine.grid.sent if m.metadata.message_type == "train.train"}
    assert lives == {10.0 + 2 * GRACE}
