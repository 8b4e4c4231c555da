"""The Flower engine against a server that is killed, strangers, and hosts that send nonsense."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from tests.engines.in_process import InProcessEngine, hosts
from tests.helpers import CLASSES, TINY_GAN, prepare, run_rounds, small_federation

from fedfill import tree
from fedfill.algorithms import Algorithm, Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.feddpms import FedDPMS, Shared
from fedfill.algorithms.fedmix import FedMix
from fedfill.algorithms.local import Local
from fedfill.algorithms.scaffold import Scaffold
from fedfill.algorithms.sdafl import SDAFL
from fedfill.data.samples import Samples
from fedfill.engines.flower import GRACE, FlowerEngine
from fedfill.engines.flower_host import Kept, _stored
from fedfill.engines.flower_messages import EVALUATE, HELLO, Answer, Hello, Scores, encode, pack, unpack
from fedfill.engines.local import LocalEngine
from fedfill.engines.runner import make_resident
from fedfill.errors import DivergedError, FedfillError
from fedfill.experiment.loop import _evaluate, execute
from fedfill.experiment.prepare import arrange
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.privacy.releases import Release
from fedfill.protocol.client import Client, State, client_handler
from fedfill.protocol.server import Server
from fedfill.runs.directory import RunDirectory
from fedfill.streams import secret_stream
from fedfill.training.evaluation import Evaluation
from fedfill.tree import Record

TWO: dict[str, Algorithm] = {
    "fedavg": FedAvg(local_epochs=1, batch_size=8),
    "feddpms": FedDPMS(local_epochs=1, batch_size=8, preliminary_rounds=2, n_classes=1, alpha=4, max_candidates=40),
}
MORE: dict[str, Algorithm] = {
    "scaffold": Scaffold(local_epochs=1, batch_size=8),
    "fedmix with moon and qffl": FedMix(
        local_epochs=1, batch_size=8, group_size=8, local="moon:contrast=latent", aggregation="qffl", optimizer="sgd"
    ),
    "sdafl": SDAFL(**TINY_GAN, images_per_client=6, local_steps=4, batch_size=8, server_steps=2, tau=0.1),
}
ROUNDS = 5
HALF = 0.5


class World:
    """An algorithm on four clients, half of them in a round, on a Flower grid in this process."""

    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        self.federation = options.pop("federation", None) or small_federation()
        algorithm = options.pop("algorithm", None) or {**TWO, **MORE}[name]
        self.net = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), needs=algorithm.needs(), seed=0)
        self.algorithm = algorithm.resolved(rounds=ROUNDS, model=self.net, inputs=self.federation.sample.inputs)
        self.initial = weights_of(self.net)
        self.folder = folder
        self.options = options
        self.engine = self.connect()
        self.server = self.serve()

    def connect(self, run_id: int = 1) -> InProcessEngine:
        engine = InProcessEngine(
            self.algorithm, self.federation, self.net, self.initial, folder=self.folder, **self.options
        )
        engine.origin = "origin"  # as from a checkpoint
        engine.grid.run_id = run_id
        for context in engine.grid.contexts.values():
            context.run_id = run_id
        return engine

    def serve(self, participation: float = HALF) -> Server:
        server = Server(
            self.engine, clients=4, classes=CLASSES, rounds=ROUNDS, participation=participation, seed=0,
            initial=self.initial, resident=make_resident(self.net, torch.device("cpu")), sample=self.federation.sample,
        )  # fmt: skip
        server.state = State(self.algorithm.server_state(self.initial))
        return server

    def round(self, t: int) -> None:
        self.server.begin(t)
        self.algorithm.round(self.server, t)

    def pooled(self) -> Evaluation:
        """How the initial weights do on all own test splits together."""
        self.engine._test = self.federation.test[:0]
        return self.engine.evaluate(self.initial, 0)

    @property
    def sha256(self) -> str:
        return tree.sha256(self.algorithm.global_weights(self.server))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="fedfill")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "fedfill"]


def expected(name: str) -> str:
    algorithm = {**TWO, **MORE}[name]
    return tree.sha256(algorithm.global_weights(run_rounds(algorithm, ROUNDS, participation=HALF)))


# Same bits


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
    with pytest.raises(
        FedfillError, match="asks for round 2, and this client has been in round 4; what it had before is gone"
    ):
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


# Strangers


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
        (Hello(9, 1, "digest", True), "its client number is 9; allowed: 0 to 3"),
        (Hello(-1, 1, "digest", True), "its client number is -1"),
        (Hello("0", 1, "digest", True), "'client' of a Hello is wrong"),  # type: ignore[arg-type]
        (Update({}, 3), "a Update in place of a Hello"),
    ],
)
def test_a_node_that_says_nonsense_of_itself_is_refused(hello: Any, why: str, tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    grid = world.engine.grid
    grid.spoil = lambda message, reply: Message(pack(encode(Answer(hello))), reply_to=message)
    with pytest.raises(FedfillError, match=r"clients: 0 of 4 hosts were there .*refused.*" + why):
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


# Nonsense from hosts


def spoilt(client: int, make: Callable[[Message], Message | None]) -> Callable[[Message, Message], Message | None]:
    def spoil(message: Message, reply: Message) -> Message | None:
        if message.metadata.dst_node_id != 100 + client or message.metadata.message_type.startswith("query"):
            return reply
        return make(message)

    return spoil


def content(body: Any) -> Callable[[Message], Message]:
    return lambda message: Message(body, reply_to=message)


@dataclass(frozen=True)
class Foreign(Record):
    declared: ClassVar = {}
    x: int = 0


GOOD = Update({}, 3)
NONSENSE: dict[str, tuple[Any, str]] = {
    "empty": (RecordDict(), "malformed message"),
    "words only": (RecordDict({"words": ConfigRecord({"a": 1})}), "malformed message"),
    "garbage": (pack(Array(dtype="uint8", shape=(9,), stype="fedfill.safetensors", data=b"\xff" * 9)), "hold no tree"),
    "numpy": (
        RecordDict({"tree": ArrayRecord({"safetensors": Array(torch.ones(3).numpy())}), "words": ConfigRecord({})}),
        "numpy.ndarray",
    ),
    "no answer": (pack(encode({"reply": 1})), "a dict in place of a Answer"),
    "nothing": (pack(encode(Answer())), "neither a reply nor an error"),
    "another kind": (pack(encode(Answer(Broadcast({})))), "a Broadcast in place of a Update"),
    "a hello": (pack(encode(Answer(Hello(1, 1, "digest", True)))), "a Hello in place of a Update"),
    "wrong type": (pack(encode(Answer(Update({}, "3")))), "'samples' of a Update is wrong"),  # type: ignore[arg-type]
    "no weights": (pack(encode(Answer(Update(None, 3)))), "'weights' of a Update is wrong"),  # type: ignore[arg-type]
    "not tensors": (pack(encode(Answer(Update({"a": 3}, 3)))), "'weights.a' of a Update"),  # type: ignore[dict-item]
    "other names": (pack(encode(Answer(GOOD))), "other names, types or shapes"),
    "releases": (pack(encode(Answer(GOOD, releases=((3, Release("x", 0.0)),)))), "'releases.0.0'"),  # type: ignore[arg-type]
    "too many": (pack(encode(Answer(Update({}, 10**400)))), "a weight is a number from 0 to 2^53"),
    "float8": (
        pack(encode(Answer(Update({"w": torch.zeros(2).to(torch.float8_e5m2)}, 3)))),
        "tensors of the type torch.float8",
    ),
    "infinite time": (pack(encode(Answer(GOOD, None, (), float("inf"), 10**4299))), "other names, types or shapes"),
    "foreign": (pack(encode(Answer(Foreign()))), "of a Answer is wrong"),  # type: ignore[arg-type]
}


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


def test_a_reply_that_never_comes_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfill.engines.flower.GRACE", 0.5)
    world = World("fedavg", tmp_path, timeout=1.0)
    world.server = world.serve(participation=1.0)
    world.engine.grid.spoil = spoilt(3, lambda message: None)
    world.round(0)
    assert world.server.lost == [{"client": 3, "handler": "train", "reason": "no answer within 1.5 s"}]


def test_a_reply_that_is_too_large_is_refused(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path, limit=2000)
    with pytest.raises(FedfillError, match=r"oversized message: [\d,]+ bytes, and max-message-bytes is 2,000"):
        world.round(0)


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


# Nonsense from a server


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


def test_a_message_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    message = Message(pack(encode(None)), 100, "train.nothing")
    (name,) = world.engine.grid.push_messages([message])
    (reply,) = world.engine.grid.pull_messages([name])
    assert reply.has_error()
    world.round(0)
    assert world.server.lost == []


# Evaluation


def test_evaluation_is_the_one_of_one_process(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    for t in range(2):
        world.round(t)
    local = run_rounds(TWO["fedavg"], 2, participation=HALF)
    assert repr(world.engine.evaluate(world.server.state.weights, 1)) == repr(local.evaluation)


def test_the_hosts_validation_splits_are_scored_where_they_lie(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    assert world.engine.evaluate(world.initial, 0).validation_by_client == []
    whole = world.federation
    clients = [replace(c, validation=c.train[:5] if i else c.train[:0]) for i, c in enumerate(whole.clients)]
    federation = replace(whole, clients=tuple(clients))
    engines = [
        InProcessEngine(world.algorithm, federation, world.net, world.initial, folder=tmp_path / "hosts"),
        LocalEngine(
            world.algorithm, federation, world.net, world.initial, seed=0, device=torch.device("cpu"), workers=1
        ),
    ]
    flower, local = (engine.evaluate(world.initial, 0) for engine in engines)
    assert flower.validation_by_client == local.validation_by_client
    assert [share is None for share in flower.validation_by_client] == [True, False, False, False]


def test_without_a_test_set_the_hosts_scores_stand_in(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    own = [client.test for client in world.federation.clients]
    together = Samples(torch.cat([s.inputs for s in own]), torch.cat([s.labels for s in own]))
    engine = world.engine
    engine._test = together
    one = engine.evaluate(world.initial, 0)
    engine._test = together[:0]
    other = engine.evaluate(world.initial, 0)
    assert other.accuracy == one.accuracy
    assert other.accuracy_by_class == one.accuracy_by_class
    assert other.accuracy_by_client == one.accuracy_by_client
    assert other.loss == pytest.approx(one.loss)


@pytest.mark.parametrize(
    "scores",
    [
        Scores([9] * 4, [1] * 4, 0.0, 0, 0),
        Scores([1], [1], 0.0, 0, 0),
        Scores([0] * 4, [1] * 4, float("nan"), 0, 0),
        Scores([0] * 4, [1] * 4, 0.0, 2, 1),
        Scores([0] * 4, [1] * 4, 0.0, -1, 1),
    ],
)
def test_scores_that_make_no_sense_are_none(scores: Scores, tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    world = World("fedavg", tmp_path)

    def spoil(message: Message, reply: Message) -> Message:
        lies = message.metadata.dst_node_id == 101 and message.metadata.message_type == EVALUATE
        return Message(pack(encode(Answer(scores))), reply_to=message) if lies else reply

    world.engine.grid.spoil = spoil
    by_client = world.engine.evaluate(world.initial, 0).accuracy_by_client
    assert [accuracy is None for accuracy in by_client] == [False, True, False, False]
    assert any(line.startswith("client 1 gave no scores") for line in warned())


@pytest.mark.parametrize("what", ["late", "garbage", "no sense", "refused"])
def test_scores_that_left_a_host_are_in_the_account(
    what: str, tmp_path: Path, warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedfill.engines.flower.GRACE", 2.0)
    world = World("fedavg", tmp_path, timeout=3.0)
    bodies = {
        "garbage": NONSENSE["garbage"][0],
        "no sense": pack(encode(Answer(Scores([9] * 4, [1] * 4, 0.0, 0, 0)))),
        "refused": pack(encode(Answer(error="nothing left"))),
    }

    def spoil(message: Message, reply: Message) -> Message | None:
        if message.metadata.dst_node_id != 101 or message.metadata.message_type != EVALUATE:
            return reply
        return None if what == "late" else Message(bodies[what], reply_to=message)

    world.engine.grid.spoil = spoil
    figures = _evaluate(world.algorithm, world.server, world.engine, 0)
    assert figures["accuracy_by_client"][1] is None
    (entry,) = world.server.ledger.account(1e-5)["entries"]
    assert (entry["released"], entry["clients"]) == ("evaluation", 3 if what == "refused" else 4)
    reasons = {
        "late": "no answer within",
        "garbage": "malformed",
        "no sense": "its scores make no sense",
        "refused": "nothing left",
    }
    assert any(f"client 1 gave no scores: {reasons[what]}" in line for line in warned())


def test_a_model_that_diverged_is_told_as_one_without_a_test_set_too(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    world.engine._test = world.federation.test[:0]
    weights = {k: v * 1e25 if v.is_floating_point() else v for k, v in world.initial.items()}
    with pytest.raises(DivergedError, match=r"training diverged: after round 1 the loss on the test set is (nan|inf)"):
        world.engine.evaluate(weights, 0)


def test_a_server_needs_something_to_evaluate_on(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    nothing = world.federation.test[:0]
    with pytest.raises(FedfillError, match="client_test: found 0 on a server without a test set"):
        FlowerEngine(
            world.engine.grid, world.algorithm, clients=4, classes=CLASSES, test=nothing, template=world.net,
            digest="digest", device=torch.device("cpu"), evaluate_clients=False, wait=0,
        )  # fmt: skip


# Personal models


LOCAL = Local(local_steps=2, batch_size=8, learning_rate=0.01)


def test_hosts_judge_the_model_that_the_server_means(tmp_path: Path) -> None:
    """A host that has committed in a round that is begun anew goes back for the evaluation too, called again or not."""
    world = World("local", tmp_path, algorithm=LOCAL)
    world.server = world.serve(participation=1.0)
    for t in range(2):
        world.round(t)
    before = world.engine.evaluate(world.initial, 1)
    world.round(2)
    after = world.engine.evaluate(world.initial, 2)
    assert after.loss != before.loss
    world.engine = world.connect(run_id=2)  # the server was killed before it could write round 2 down
    assert world.engine.evaluate(world.initial, 2) == before
    world.server = world.serve(participation=1.0)
    world.round(2)
    assert world.engine.evaluate(world.initial, 2) == after
    # set back further than a round, hosts have nothing to go back to
    world.engine = world.connect(run_id=3)
    with pytest.raises(FedfillError, match="clients: after round 2 no host gave scores on its own test split"):
        world.engine.evaluate(world.initial, 1)
    # begun anew, everybody begins with the initial weights
    assert world.connect(run_id=4).evaluate(world.initial, 0) == World("fedavg", tmp_path / "new").pooled()


def test_personal_models_stay_with_their_hosts_and_their_scores_are_released(tmp_path: Path) -> None:
    world = World("local", tmp_path, algorithm=LOCAL)
    assert world.engine.evaluation is not None
    assert world.engine.evaluation.mu is None
    assert "own model" in world.engine.evaluation.mechanism
    world.round(0)
    world.engine.grid.sent.clear()
    answers: list[Any] = []

    def spy(message: Message, reply: Message) -> Message:
        answers.append(unpack(reply.content, 2**30)[0].reply)
        return reply

    world.engine.grid.spoil = spy
    world.engine.evaluate(world.initial, 0)
    assert {message.metadata.message_type for message in world.engine.grid.sent} == {EVALUATE}
    assert [type(answer) for answer in answers] == [Scores] * 4
    assert all(not list(tree.tensors(answer)) for answer in answers)


@pytest.mark.parametrize("personal", [True, False])
def test_a_federation_without_any_test_split_is_told_before_the_first_round(personal: bool, tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    nobody = tuple(replace(client, test=client.test[:0]) for client in world.federation.clients)
    federation = replace(world.federation, clients=nobody)
    if not personal:
        federation = replace(federation, test=federation.test[:0])
    why = "personal models never leave their hosts" if personal else "the server has no test set"
    with pytest.raises(
        FedfillError, match=f"client_test: no host that is there has a test split of its own, and {why};"
    ):
        InProcessEngine(LOCAL if personal else world.algorithm, federation, world.net, world.initial)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("stop_after", [None, 1])
def test_a_run_with_personal_models_on_hosts(stop_after: int | None, tmp_path: Path) -> None:
    """The loop, and its resume: the checkpoint holds the shared model and no client's."""

    class Deployed(InProcessEngine):
        states, restore = FlowerEngine.states, FlowerEngine.restore

    data = [(c.train.inputs, c.train.labels, c.test.inputs, c.test.labels) for c in small_federation().clients]
    options = {"data": data, "partition": "iid", "rounds": 2, "local_steps": 2, "batch_size": 8, "participation": HALF}
    simulated = execute(arrange("fedbn", model="cnn2bn", **options), tmp_path / "local")
    prepared = arrange("fedbn", model="cnn2bn", engine="flower", **options)
    parts = (prepared.algorithm, prepared.federation, prepared.model, prepared.initial)

    def connect(run_id: int) -> Any:
        def engine(*_: Any) -> InProcessEngine:
            made = Deployed(*parts, folder=tmp_path / "hosts")
            for context in made.grid.contexts.values():
                context.run_id = run_id
            return made

        return engine

    def stop(record: dict[str, Any], rounds: int) -> None:
        if record["round"] == stop_after:
            raise Stopped

    path = tmp_path / "flower"
    if stop_after is not None:
        with pytest.raises(Stopped):
            execute(prepared, path, stop, connect(1))
    result = execute(prepared, path, connect=connect(2))
    kept, theirs = (RunDirectory(place).read_checkpoint() for place in (path, tmp_path / "local"))
    assert kept is not None
    assert theirs is not None
    assert kept["clients"] == {}
    assert tree.sha256(kept["weights"]) == tree.sha256(theirs["server"]["weights"]) == result.summary["weights_sha256"]
    assert [r["accuracy_by_client"] for r in result.rounds] == [r["accuracy_by_client"] for r in simulated.rounds]
    # the splits are of one size, so that the share of all samples is the mean over clients
    assert result.summary["accuracy"] == pytest.approx(result.summary["mean_client_accuracy"])
    assert any("weights_sha256 is that of the shared model" in note for note in result.summary["notes"])
    entries = {entry["released"]: entry for entry in result.summary["privacy"]["entries"]}
    assert (entries["evaluation"]["epsilon"], entries["evaluation"]["clients"]) == (None, 4)
    assert execute(prepared, path, connect=connect(3)).was_finished


@pytest.mark.parametrize(
    ("client_test", "splits"),
    [(0.0, "the client's own validation split, exact"), (0.2, "the client's own test and validation splits, exact")],
)
def test_scores_of_validation_splits_are_releases(client_test: float, splits: str, tmp_path: Path) -> None:
    options = {"clients": 3, "rounds": 1, "local_steps": 1, "client_test": client_test, "client_validation": 0.2}
    prepared = arrange("fedavg", data="digits", partition="iid", model="auto", engine="flower", **options)
    parts = (prepared.algorithm, prepared.federation, prepared.model, prepared.initial)

    def connect(*_: Any) -> InProcessEngine:
        return InProcessEngine(
            *parts, folder=tmp_path / "hosts", evaluate_clients=client_test > 0, validate_clients=True
        )

    summary = execute(prepared, tmp_path / "run", connect=connect).summary
    assert summary["selected_round"] == 1
    (entry,) = [entry for entry in summary["privacy"]["entries"] if entry["released"] == "evaluation"]
    assert (entry["mechanism"], entry["clients"]) == (f"accuracy on {splits}", 3)


def test_noise_of_a_deployment_follows_from_a_key_that_only_the_host_has() -> None:
    def draw(key: bytes, *name: str | int) -> float:
        return float(torch.rand(1, generator=secret_stream(key, *name), dtype=torch.float64))

    keys = [bytes([k]) * 32 for k in range(4)]
    draws = {draw(key, purpose, t) for key in keys for purpose in ("a", "b") for t in range(3)}
    assert len(draws) == 24
    assert draw(keys[0], "a", 0) == draw(keys[0], "a", 0)
    normal = torch.empty(20000).normal_(generator=secret_stream(keys[0], "normal"))
    assert float(normal.mean()) == pytest.approx(0, abs=0.05)
    assert float(normal.std()) == pytest.approx(1, abs=0.05)


class Noisy(FedAvg):
    @client_handler
    def noisy(self, client: Client, message: Broadcast) -> Hello:
        draws = [torch.randint(10**9, (1,), generator=make("a")).item() for make in (client.stream, client.noise)]
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
            draws = [torch.randint(10**9, (1,), generator=client.noise(purpose)).item() for purpose in ("a", "b")]
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


# A server that was killed, in all detail


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
    with pytest.raises(ValueError, match="what it had before is gone"):
        _stored(stored("a", 3, {"x": 1}, {"x": 2}), run, t, begun, "origin")


def test_the_folder_of_a_host_holds_no_half_written_file(tmp_path: Path) -> None:
    world = World("feddpms", tmp_path)
    for t in range(ROUNDS):
        world.round(t)
    names = {path.name.split("-")[0] + path.suffix for path in tmp_path.glob("host*/*")}
    assert names == {"client.safetensors", "client.lock"}


# Calls that fail, and what a client keeps


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


def test_a_client_that_fails_in_the_first_call_after_a_resume_does_not_get_back_what_was_undone(tmp_path: Path) -> None:
    """The server was killed in its second round, so that what happened there never was; and it is killed once more."""
    world = World("fedavg", tmp_path, algorithm=Counted())
    assert [ask(world, 1.0, round=t) for t in range(2)] == [1, 2]
    world.engine = world.connect(run_id=2)
    assert ask(world, 0.0, round=1, begun=1) is None
    world.engine = world.connect(run_id=3)
    assert ask(world, 1.0, round=3, begun=3) == 2
