"""Sums whose parts the server never sees: what reaches it, who may be left out, and what hosts refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from scipy import stats
from tests.engines.in_process import InProcessEngine, parties_of
from tests.helpers import refused
from tests.protocol.sums_world import Points, Question, Summer, drawn, federation_of, pooled, spoilt
from tests.protocol.world import CPU
from torch import Tensor

from fedfill.deployment.keys import make_node_key, read_parties
from fedfill.engines import flower_host, flower_keys
from fedfill.engines.flower_messages import Answer, Hidden, encode, pack, unpack
from fedfill.engines.runner import make_resident
from fedfill.errors import FedfillError
from fedfill.experiment.loop import execute
from fedfill.experiment.prepare import arrange
from fedfill.models.views import weights_of
from fedfill.privacy.ledger import Ledger
from fedfill.privacy.masking import Parties
from fedfill.privacy.sums import MASKED
from fedfill.privacy.sums import pack as triangle
from fedfill.protocol.client import Client, State, client_handler
from fedfill.protocol.messages import Message as Reply
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Collected, Sums
from fedfill.runs.directory import RunDirectory

SECURE = Summer(trust="secure", target_epsilon=3.0)
LARGE = Summer(trust="secure", target_epsilon=3.0, d=40)
FOUR = drawn(8, 9, 10, 11)


class Federation:
    """Hosts with keys, and a server; everything that crosses is kept."""

    def __init__(
        self, program: Summer = SECURE, points: Points = FOUR, *, folder: Path | None = None, secret: bool = True,
        parties: list[Parties] | tuple[()] | None = None,
    ) -> None:  # fmt: skip
        model = torch.nn.Linear(2, 2)
        self.engine = InProcessEngine(
            program, federation_of(points), model, weights_of(model), folder=folder, secret=secret, parties=parties
        )
        self.program = program
        self.received: list[tuple[int, Any]] = []
        self.change: Callable[[Message, Message], Message | None] = lambda message, reply: reply
        self.engine.grid.spoil = self._keep
        self.server = Server(
            self.engine, clients=len(points), classes=2, rounds=10, participation=1.0, seed=0, initial=weights_of(model),
            resident=make_resident(model, CPU), sample=federation_of(points).sample,
        )  # fmt: skip
        self.server.state = State({})
        self.server.begin(0)

    def _keep(self, message: Message, reply: Message) -> Message | None:
        reply_or_none = self.change(message, reply)
        if reply_or_none is not None and reply_or_none.has_content():
            self.received.append((message.metadata.dst_node_id - 100, unpack(reply_or_none.content, 2**30)[0]))
        return reply_or_none

    def ask(self, **options: Any) -> Collected:
        return self.program.ask(self.server, **options)

    @property
    def parts(self) -> list[tuple[int, Sums]]:
        return [(i, answer.reply) for i, answer in self.received if isinstance(answer.reply, Sums)]

    @property
    def account(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.ledger.account(1e-5)
        return found


def uniform(part: Sums) -> bool:
    """Whether all 64 bits of a message look like coins: each bit's frequency, and the highest byte's law."""
    numbers = torch.cat([x.flatten() for x in part.sums.values()])
    bits = torch.stack([(numbers >> k) & 1 for k in range(64)]).double()
    z = (bits.mean(1) - 0.5).abs() * 2 * len(numbers) ** 0.5
    bytes_ = torch.bincount((numbers >> 60) & 15, minlength=16).numpy()
    return bool(z.max() < 5) and bool(stats.chisquare(bytes_).pvalue > 1e-6)


def difference(one: Collected, other: Collected) -> float:
    return max(float((x - other.sums[name]).abs().max()) for name, x in one.sums.items())


def test_what_the_server_receives_of_one_host_is_uniform_and_the_sum_is_right() -> None:
    world = Federation(LARGE, drawn(300, 200, 5, 0, d=40))
    collected = world.ask()
    assert [i for i, _ in world.parts] == [0, 1, 2, 3]
    assert all(uniform(part) for _, part in world.parts)
    # three of the four together are uniform as well, and all four are no more
    sums = [{name: x.clone() for name, x in part.sums.items()} for _, part in world.parts]
    assert uniform(Sums({name: sums[0][name] + sums[1][name] + sums[2][name] for name in sums[0]}))
    assert not uniform(Sums({name: sum(part[name] for part in sums) for name in sums[0]}))
    exact = pooled(drawn(300, 200, 5, 0, d=40))
    packed = {**collected.sums, "gram": triangle(collected.sums["gram"])}
    for name, x in packed.items():
        z = (x - exact[name]) / collected.stds[name]
        assert float(z.abs().max()) < 6
    assert "noise" in world.account["statement"]
    assert MASKED in world.account["statement"]
    assert world.account["total_epsilon_added"] == pytest.approx(3, rel=1e-6)


def test_without_the_mask_what_the_server_receives_is_not_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted mistake that the test before this one is for."""

    def none(secret: bytes, client: int, circle: Any, occasion: Any, numbers: int) -> Tensor:
        return torch.zeros(numbers, dtype=torch.int64)

    monkeypatch.setattr(flower_keys, "mask", none)
    world = Federation(LARGE, drawn(300, 200, 5, 0, d=40))
    world.ask()
    assert not any(uniform(part) for _, part in world.parts)


def lost_once(client: int, kind: str = "train") -> Callable[[Message, Message], Message | None]:
    """The first reply of one kind of a client can't be read."""
    left = [1]

    def change(message: Message, reply: Message) -> Message | None:
        if message.metadata.dst_node_id == 100 + client and message.metadata.message_type.startswith(kind) and left:
            left.clear()
            return Message(pack(encode(Answer(error="no power"))), reply_to=message)
        return reply

    return change


def test_who_drops_out_is_left_out_by_a_fresh_circle_that_counts_as_a_second_release() -> None:
    world = Federation()
    world.change = lost_once(1)
    collected = world.ask()
    assert [(loss["client"], loss["handler"]) for loss in world.server.lost] == [(1, "sums")]
    assert collected.replies == 3
    assert [i for i, _ in world.parts] == [0, 2, 3, 0, 2, 3]
    parts = [part.sums for _, part in world.parts]
    assert all((parts[k]["gram"] != parts[k + 3]["gram"]).all() for k in range(3))
    exact = pooled(FOUR, 1)
    for name, x in {**collected.sums, "gram": triangle(collected.sums["gram"])}.items():
        assert float(((x - exact[name]) / collected.stds[name]).abs().max()) < 6
    (entry,) = world.account["entries"]
    assert (entry["times"], entry["clients"]) == (2, 3)
    assert world.account["total_epsilon_added"] > 4  # mu is the root of two times what it was


def test_who_gives_no_key_is_left_out_before_anything_was_sent() -> None:
    world = Federation()
    world.change = lost_once(2, "query.sum_key")
    assert world.ask().replies == 3
    assert [i for i, _ in world.parts] == [0, 1, 3]
    assert world.account["total_epsilon_added"] == pytest.approx(3, rel=1e-6)


def test_too_few_are_not_opened_and_what_was_sent_tells_nothing() -> None:
    world = Federation(Summer(trust="secure", target_epsilon=3.0, honest=4))
    world.change = lost_once(0)
    with refused("honest", "3 of 4", "resume", "nothing was opened"):
        world.ask()
    assert all((part.sums["gram"].abs() > 2**53).any() for _, part in world.parts)


def test_a_round_that_is_done_again_has_the_same_noise_and_another_mask(tmp_path: Path) -> None:
    """With the same circle, so that it is no second release; in a smaller one all noise is other noise."""
    first, again = Federation(folder=tmp_path), Federation(folder=tmp_path)
    one, two = first.ask(), again.ask()
    assert difference(one, two) == 0
    assert all(
        (a.sums["gram"] != b.sums["gram"]).all() for (_, a), (_, b) in zip(first.parts, again.parts, strict=True)
    )
    smaller = Federation(folder=tmp_path)
    smaller.engine.grid.online.discard(101)
    part = smaller.ask()
    rest = pooled(FOUR, 1)["moments"]
    whole = one.sums["moments"] - pooled(FOUR)["moments"]  # the noise of all
    assert ((part.sums["moments"] - rest - whole).abs() > 1e-3).all()


def test_where_one_hosts_data_change_the_noise_of_all_changes(tmp_path: Path) -> None:
    """Else two sums would have all but one host's noise in common, and their difference would show its change."""
    shown: list[dict[int, Tensor]] = []
    for points in (FOUR, [FOUR[0], FOUR[1], FOUR[2], drawn(12, seed=5)[0]]):
        found: dict[int, Tensor] = {}

        def kept(reply: Reply, pending: Any, circle: Any, found: dict[int, Tensor] = found) -> Reply:
            found[pending.key.client] = reply.sums["counts"]  # type: ignore[attr-defined]
            return flower_keys.hidden(reply, pending, circle)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flower_host, "hidden", kept)
            Federation(points=points, folder=tmp_path).ask()
        shown.append(found)
    assert all((shown[0][i] != shown[1][i]).all() for i in range(4))


@pytest.mark.parametrize("how", ["another's key", "another circle", "used before", "too small", "in the clear"])
def test_what_a_host_refuses(how: str) -> None:
    """A server that puts itself in the middle, or asks for less than all: hosts send nothing, and say why."""
    world = Federation()
    push = world.engine.grid.push_messages
    words = {
        "another's key": "not signed", "another circle": "not in the circle", "used before": "used before", "too small": "honest",
        "in the clear": "trust",
    }[how]  # fmt: skip

    def meddle(messages: Any) -> Any:
        for message in messages:
            if message.metadata.message_type == "train.sums":
                value, told = unpack(message.content, 2**30)
                circle = list(value.circle)
                if how == "another's key":
                    circle[3] = flower_keys.make_key(
                        flower_keys.Occasion("digest", "sums", 0, flower_keys.question_of(value.message)), 3, "x",
                        parties_of(5)[4].own,
                    )[0]  # fmt: skip
                elif how == "another circle":
                    circle = [key for key in circle if key.client != told["client"]]
                elif how == "too small":
                    circle = sorted({told["client"], 0, 1} - {2, 3} | {told["client"]})[:2]
                    circle = [key for key in value.circle if key.client in circle]
                changed = value.message if how == "in the clear" else Hidden(value.message, circle)
                message.content["tree"]["safetensors"] = encode(changed)
        names = list(push(messages))
        if how == "used before":  # the same question once more, after it was answered
            for message in messages:
                if message.metadata.message_type == "train.sums":
                    world.engine.grid.apps[message.metadata.dst_node_id](
                        message, world.engine.grid.contexts[message.metadata.dst_node_id]
                    )
        return names

    world.engine.grid.push_messages = meddle
    with pytest.raises(FedfillError):
        world.ask()
    said = [answer.error or "" for _, answer in world.received if isinstance(answer, Answer)]
    assert any(words in text for text in said), said
    assert world.parts == []


def test_a_host_without_keys_says_what_it_needs() -> None:
    world = Federation(parties=())
    with refused("honest", "peers", "node0.pub"):
        world.ask()
    assert world.parts == []
    assert world.account["total_epsilon_added"] in (0, 0.0)


class More(Summer):
    """Answers with more than a sum where it is asked for a hidden one."""

    @client_handler
    def sums(self, client: Client, message: Question) -> Question:  # type: ignore[override]
        return Question(1, [])


def test_what_is_more_than_a_sum_is_not_sent_in_its_place() -> None:
    world = Federation(More(trust="secure", target_epsilon=3.0))
    with refused("honest", "sums alone", "Question"):
        world.ask()


@pytest.mark.parametrize("how", ["other shape", "int16"])
def test_a_part_of_another_shape_is_left_out(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def strange(reply: Sums, pending: Any, circle: Any) -> Sums:
        found = flower_keys.hidden(reply, pending, circle)
        return Sums(spoilt(found.sums, how)) if pending.key.client == 2 else found  # type: ignore[attr-defined]

    monkeypatch.setattr(flower_host, "hidden", strange)
    world = Federation()
    assert world.ask().replies == 3
    assert "types or shapes" in world.server.lost[0]["reason"]


def test_a_part_that_is_nonsense_spoils_the_sum_and_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def strange(reply: Sums, pending: Any, circle: Any) -> Sums:
        return reply if pending.key.client == 2 else flower_keys.hidden(reply, pending, circle)  # type: ignore[return-value]

    monkeypatch.setattr(flower_host, "hidden", strange)
    world = Federation()
    with refused("min_replies", "makes no sense"):
        world.ask()


def test_secret_parts_of_keys_are_gone_after_use(tmp_path: Path) -> None:
    Federation(folder=tmp_path).ask()
    assert list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("*.sum_key"))


def test_a_server_that_says_that_there_are_fewer_clients_gets_nothing() -> None:
    """Two hosts would answer under shares for two; with the other's share known, half of the noise were left."""
    world = Federation()
    world.server.clients = 2
    with pytest.raises(FedfillError):
        world.ask()
    said = [answer.error for _, answer in world.received if isinstance(answer, Answer) and answer.error]
    assert said
    assert all("says 2" in text and "keys of 4" in text for text in said)
    assert world.parts == []


def test_one_key_under_two_numbers_is_refused(tmp_path: Path) -> None:
    """Its holder would count as two hosts, each with a share of the noise."""
    for i in range(3):
        make_node_key(tmp_path / f"node{i}.key")
    assert set(read_parties(str(tmp_path / "node0.key"), str(tmp_path), 3).all) == {0, 1, 2}
    (tmp_path / "node2.pub").write_bytes((tmp_path / "node1.pub").read_bytes())
    with refused("peers", "node1.pub", "node2.pub"):
        read_parties(str(tmp_path / "node0.key"), str(tmp_path), 3)


def test_parts_of_a_run_that_failed_count_when_it_goes_on(tmp_path: Path) -> None:
    """The next circle is another one, under other noise: what was sent to the first can still be opened."""
    options: dict[str, Any] = {"data": "digits", "model": "auto", "clients": 4, "partition": "iid", "data_fraction": 0.1, "client_test": 0.0, "target_epsilon": 3.0, "trust": "secure", "rounds": 1, "features": "none"}  # fmt: skip
    prepared = arrange("fed3r", engine="flower", **options)
    parts = (prepared.algorithm, prepared.federation, prepared.model, prepared.initial)

    def connect(run_id: int, away: set[int], lost: set[int]) -> Any:
        def engine(*_: Any) -> InProcessEngine:
            made = InProcessEngine(*parts, folder=tmp_path / "hosts", secret=True, digest=prepared.digest)
            made.grid.online -= {100 + i for i in away}
            for context in made.grid.contexts.values():
                context.run_id = run_id

            def spoil(message: Message, reply: Message) -> Message:
                i = message.metadata.dst_node_id - 100
                if i in lost and message.metadata.message_type.startswith("train"):
                    return Message(pack(encode(Answer(error="no power"))), reply_to=message)
                return reply

            made.grid.spoil = spoil
            return made

        return engine

    with refused("honest", "nothing was opened"):
        execute(prepared, tmp_path / "run", connect=connect(1, set(), {2, 3}))
    kept = RunDirectory(tmp_path / "run").read_checkpoint()
    assert kept is not None
    assert kept["rounds"] == 0
    entries = Ledger.restore(kept["ledger"]).account(1e-5)["entries"]
    assert [entry["clients"] for entry in entries] == [2]  # two more said that they send nothing
    account = execute(prepared, tmp_path / "run", connect=connect(2, {3}, set())).summary["privacy"]
    assert sorted(entry["times"] for entry in account["entries"] if entry["released"] == "Sums.sums") == [1, 2]


def test_an_opened_sum_counts_too_where_the_round_fails_behind_it(tmp_path: Path) -> None:
    """Here because fewer answered than `min_replies` allows; the next circle is another one."""
    options: dict[str, Any] = {"data": "digits", "model": "auto", "clients": 4, "partition": "iid", "data_fraction": 0.1, "client_test": 0.0, "target_epsilon": 3.0, "trust": "secure", "rounds": 1, "features": "none", "min_replies": 4}  # fmt: skip
    prepared = arrange("fed3r", engine="flower", **options)
    parts = (prepared.algorithm, prepared.federation, prepared.model, prepared.initial)

    def connect(*_: Any) -> InProcessEngine:
        made = InProcessEngine(*parts, folder=tmp_path / "hosts", secret=True, digest=prepared.digest)
        made.grid.online -= {103}
        return made

    with refused("min_replies"):
        execute(prepared, tmp_path / "run", connect=connect)
    kept = RunDirectory(tmp_path / "run").read_checkpoint()
    assert kept is not None
    assert [entry["clients"] for entry in Ledger.restore(kept["ledger"]).account(1e-5)["entries"]] == [3]
