"""What hosts send: nonsense, sizes, releases."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, Message
from tests.engines.flower_world import GOOD, NONSENSE, World, spoilt
from tests.helpers import refused

from fedfill import tree
from fedfill.algorithms import Update
from fedfill.engines.flower_messages import Answer, encode, pack, unpack
from fedfill.privacy.releases import Release


def content(body: Any) -> Callable[[Message], Message]:
    return lambda message: Message(body, reply_to=message)


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_from_a_host_is_its_loss_alone(name: str, tmp_path: Path) -> None:
    body, why = NONSENSE[name]
    world = World("fedavg", tmp_path)
    world.server = world.serve(participation=1.0)
    world.engine.grid.spoil = spoilt(1, content(body))
    world.round(0)
    assert [lost["client"] for lost in world.server.lost] == [1]
    assert why in world.server.lost[0]["reason"]
    world.engine.grid.spoil = lambda message, reply: reply
    world.round(1)
    assert world.server.lost == []


def test_a_reply_that_is_too_large_is_refused(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path, limit=2000)
    with refused("min_replies", "oversized", "max-message-bytes is 2,000"):
        world.round(0)


def test_one_tensor_in_many_places_is_as_large_as_all_of_them(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path, limit=2**24)
    world.server = world.serve(participation=1.0)
    once = torch.zeros(2**18)  # stored once in a megabyte
    many = pack(encode(Answer(Update({str(i): once for i in range(100)}, 3))))
    assert len(many.array_records["tree"]["safetensors"].data) < 2**21
    world.engine.grid.spoil = spoilt(1, content(many))
    world.round(0)
    (lost,) = world.server.lost
    assert "oversized message: 104,857," in lost["reason"]


def test_a_structure_that_would_swell_is_refused_before_it_is_read(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    world.server = world.serve(participation=1.0)
    header = json.dumps({"__metadata__": {"tree": "[" + "[]," * 2**21 + "[]]"}}).encode()
    data = len(header).to_bytes(8, "little") + header
    body = pack(Array(dtype="uint8", shape=(len(data),), stype="fedfill.safetensors", data=data))
    world.engine.grid.spoil = spoilt(1, content(body))
    world.round(0)
    (lost,) = world.server.lost
    assert "their structure has 6,291," in lost["reason"]


def test_what_a_host_says_of_its_releases_leaves_no_field_out(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    world.server = world.serve(participation=1.0)

    def spoil(message: Message, reply: Message) -> Message:
        if message.metadata.message_type.startswith("query"):
            return reply
        answer, _ = unpack(reply.content, 2**30)
        told = (("Update.weights", Release("mine", 0.0)), ("Update.nothing", Release("x", 0.0)))
        return Message(pack(encode(replace(answer, releases=told))), reply_to=message)

    world.engine.grid.spoil = spoil
    world.round(0)
    released = {entry["released"]: entry["mechanism"] for entry in world.server.ledger.account(1e-5)["entries"]}
    assert released == {"Update.weights": "mine", "Update.samples": "number of samples, sent as it is"}


@pytest.mark.parametrize(
    "told",
    [
        {"sampled": (-1.0, 0.5, 10)},
        {"sampled": (1.0, 2.0, -5)},
        {"mechanism": "x" * 10**6},
        {"conditions": ("x",) * 99},
    ],
)
def test_a_release_that_can_t_be_is_a_lost_reply(told: dict[str, Any], tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    world.server = world.serve(participation=1.0)
    release = Release("mine", 0.0)
    for name, value in told.items():
        object.__setattr__(release, name, value)
    world.engine.grid.spoil = spoilt(1, content(pack(encode(Answer(GOOD, releases=(("Update.samples", release),))))))
    world.round(0)
    assert [lost["client"] for lost in world.server.lost] == [1]
    assert "of a release" in world.server.lost[0]["reason"] or "a release has" in world.server.lost[0]["reason"]
    assert len(tree.to_bytes(world.server.ledger.state())) < 10**5
