"""Evaluation where the data lie on hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.same_bits import GIVEN, times
from flwr.app import Message
from tests.engines.flower_world import HALF, NONSENSE, TWO, World
from tests.engines.in_process import InProcessEngine
from tests.experiment.test_numbers import TINY, TOML, stays
from tests.helpers import CLASSES, refused, run_rounds, small_federation

from fedfill import tree
from fedfill.algorithms.local import Local
from fedfill.data.samples import Samples
from fedfill.engines.flower import FlowerEngine
from fedfill.engines.flower_messages import EVALUATE, Answer, encode, pack, unpack
from fedfill.engines.flower_scores import NumberScores, Scores, TimeScores
from fedfill.engines.local import LocalEngine
from fedfill.errors import DivergedError
from fedfill.experiment.loop import _evaluate, execute
from fedfill.experiment.prepare import arrange
from fedfill.runs.directory import RunDirectory


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
    with refused("training diverged", "round 1", kind=DivergedError):
        world.engine.evaluate(weights, 0)


def test_a_server_needs_something_to_evaluate_on(tmp_path: Path) -> None:
    world = World("fedavg", tmp_path)
    nothing = world.federation.test[:0]
    with refused("client_test", "found 0"):
        FlowerEngine(
            world.engine.grid, world.algorithm, clients=4, classes=CLASSES, test=nothing, template=world.net,
            digest="digest", device=torch.device("cpu"), evaluate_clients=False, wait=0,
        )  # fmt: skip


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
    with refused("clients", "round 2"):
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
    why = "personal models" if personal else "the server has no test set"
    with refused("client_test", why):
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


@pytest.mark.parametrize("name", ["fedavg", "local"])
def test_numbers_are_scored_as_in_one_process(name: str, tmp_path: Path) -> None:
    """Of hosts' own splits no more is sent than what R² needs; without a test set these sums are added up."""
    (tmp_path / "schema.toml").write_text(TOML)
    options = {"schema_file": tmp_path / "schema.toml", "client_validation": 0.2, **TINY}
    prepared = arrange(name, data=stays(), model="auto", **options)
    parts = (prepared.algorithm, prepared.federation, prepared.model, prepared.initial)
    hosts = InProcessEngine(*parts, folder=tmp_path / "hosts", validate_clients=True)
    one = LocalEngine(*parts, seed=0, device=torch.device("cpu"), workers=1)
    flower, local = (engine.evaluate(prepared.initial, 0) for engine in (hosts, one))
    assert flower.accuracy_by_client == pytest.approx(local.accuracy_by_client, abs=1e-6)
    assert flower.validation_by_client == pytest.approx(local.validation_by_client, abs=1e-6)
    assert (flower.most_predicted, flower.largest_class) == (None, None)
    if name == "fedavg":
        assert (flower.accuracy, flower.loss) == (local.accuracy, local.loss)
    own = [client.test for client in prepared.federation.clients]
    together = Samples(torch.cat([s.inputs for s in own]), torch.cat([s.labels for s in own]))
    hosts._test = together
    whole = hosts.evaluate(prepared.initial, 0)
    hosts._test = together[:0]
    pooled = hosts.evaluate(prepared.initial, 0)
    assert pooled.accuracy == pytest.approx(whole.accuracy, abs=1e-6)
    assert pooled.accuracy_by_class == [pooled.accuracy]
    assert pooled.loss == pytest.approx(whole.loss, rel=1e-6)


@pytest.mark.parametrize(
    ("scores", "sound"),
    [
        (NumberScores([3, 1.0, 1.5, 1.0], [0, 0, 0, 0]), True),
        (NumberScores([3, 1.0, 1.5], [0, 0, 0, 0]), False),
        (NumberScores([2.5, 1.0, 1.5, 1.0], [0, 0, 0, 0]), False),
        (NumberScores([-1, 0.0, 0.0, 0.0], [0, 0, 0, 0]), False),
        (NumberScores([3, float("nan"), 1.5, 1.0], [0, 0, 0, 0]), False),
        (NumberScores([float("nan"), 0.0, 0.0, 0.0], [0, 0, 0, 0]), False),
        (NumberScores([float("inf"), 0.0, 0.0, 0.0], [0, 0, 0, 0]), False),
        (NumberScores([3, 1.0, 3.5, 3.0], [0, 0, 0, 0]), False),
        (NumberScores([3, 1.0, 2.0, 1.0], [0, 0, 0, 0]), False),  # a mean of 2/3 needs squares of 4/3
        (NumberScores([3, 1.0, 1.5, 1.0], [1, -1.0, 0, 0]), False),
    ],
)
def test_which_sums_of_numbers_make_sense(scores: NumberScores, sound: bool) -> None:
    assert scores.plausible(1) is sound


def test_r_squared_from_sums_by_hand() -> None:
    """Numbers 0, .5, 1 with a mean of .5, predicted as .5 each but for the last, which is 1."""
    scores = NumberScores([3, 0.25, 1.5, 1.25], [2, 0.1, 1.0, 0.5])
    assert scores.own == pytest.approx(1 - 0.25 / 0.5)
    assert scores.held is None, "two times .5: nothing varies"
    whole = NumberScores.together({0: scores, 3: NumberScores([1, 0.0, 1.0, 1.0], [0, 0, 0, 0])})
    assert whole is not None
    assert whole.accuracy == pytest.approx(1 - 0.25 / (2.25 - 2.5**2 / 4))
    assert NumberScores.together({}) is None


@pytest.mark.parametrize("name", ["fedavg", "local"])
def test_times_are_scored_as_in_one_process(name: str, tmp_path: Path) -> None:
    """Of hosts' own splits no more is sent than counts of pairs of rows."""
    options = {"client_validation": 0.2, "client_test": 0.2, "rounds": 1, "local_epochs": 1, "model": "auto"}
    prepared = arrange(name, data=times(), partition="domain", schema_file=GIVEN["their schema"](), **options)
    parts = (prepared.algorithm, prepared.federation, prepared.model, prepared.initial)
    hosts = InProcessEngine(*parts, folder=tmp_path / "hosts", validate_clients=True)
    one = LocalEngine(*parts, seed=0, device=torch.device("cpu"), workers=1)
    assert hosts.evaluation is not None
    assert "pairs of rows" in hosts.evaluation.mechanism
    flower, local = (engine.evaluate(prepared.initial, 0) for engine in (hosts, one))
    assert None not in local.accuracy_by_client
    assert flower.accuracy_by_client == local.accuracy_by_client
    assert flower.validation_by_client == local.validation_by_client
    assert (flower.most_predicted, flower.largest_class) == (None, None)
    hosts._test = hosts._test[:0]
    pooled = hosts.evaluate(prepared.initial, 0)
    assert min(local.accuracy_by_client) <= pooled.accuracy <= max(local.accuracy_by_client)
    assert pooled.accuracy_by_class == [pooled.accuracy]


def test_the_c_index_from_counts_by_hand() -> None:
    scores = TimeScores(4, 2.0, [3.0, 1.0, 5.0], [0.0, 0.0, 0.0])
    assert (scores.own, scores.held) == (0.7, None)
    whole = TimeScores.together({0: scores, 2: TimeScores(2, 1.0, [1.0, 0.0, 1.0], [0.0, 0.0, 0.0])})
    assert whole is not None
    assert (whole.accuracy, whole.loss) == (pytest.approx(4.5 / 6), 0.5)
    assert TimeScores.together({}) is None


@pytest.mark.parametrize(
    ("scores", "sound"),
    [
        (TimeScores(4, 2.0, [3.0, 1.0, 5.0], [0.0, 0.0, 1.0]), True),
        (TimeScores(4, 2.0, [3.0, 3.0, 5.0], [0.0, 0.0, 0.0]), False),
        (TimeScores(2, 2.0, [3.0, 1.0, 5.0], [0.0, 0.0, 0.0]), False),  # two rows have one pair
        (TimeScores(4, 2.0, [3.0, 1.0], [0.0, 0.0, 0.0]), False),
        (TimeScores(4, 2.0, [3.0, 1.0, 5.0], [-1.0, 0.0, 0.0]), False),
        (TimeScores(4, float("nan"), [3.0, 1.0, 5.0], [0.0, 0.0, 0.0]), False),
        (TimeScores(4, 2.0, [float("nan"), 1.0, 5.0], [0.0, 0.0, 0.0]), False),
        (TimeScores(-1, 0.0, [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]), False),
    ],
)
def test_which_counts_of_pairs_make_sense(scores: TimeScores, sound: bool) -> None:
    assert scores.plausible(19) is sound


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
