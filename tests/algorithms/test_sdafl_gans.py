"""SDA-FL's GANs: pre-training, the upload, classes, noise and what the account says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.algorithms.sdafl_world import QUICK, TINY, N, World, net, partly_labelled
from tests.helpers import CLASSES, bars, refused, run_rounds, small_federation, start_of
from torch import nn

import fedfill
from fedfill.algorithms.sdafl import SDAFL, SDAFLAC, Images, ImagesRequest, Pretrain
from fedfill.data.federation import Federation
from fedfill.privacy.accountant import replaced_epsilon
from fedfill.protocol.client import Client, State
from fedfill.synthesis import gan


def test_before_the_first_round_gans_in_chunks_and_then_images_in_the_order_of_clients():
    world = World().prepare()
    sent = [(t, name, m.iterations) for t, name, i, m in world.engine.sent if i == 0 and name == "pretrain_gan"]
    assert sent == [
        (-4, "pretrain_gan", 2),
        (-3, "pretrain_gan", 4),
        (-2, "pretrain_gan", 5),
    ]  # sums, so that a lost one is made up for
    assert [(t, m.images) for t, name, i, m in world.engine.sent if i == 0 and name == "upload"] == [(-1, N)]
    pool, owners = world.server.state.pool, world.server.state.owners
    assert owners.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert pool.labels.tolist() == [-1] * 9
    assert pool.inputs.dtype == torch.uint8
    assert all(torch.equal(pool.inputs[owners == i], bars(N, [i], i).inputs) for i in range(3))


def test_a_lost_upload_is_asked_for_three_times_and_then_the_others_go_on():
    world = World()
    answer, asked = world.engine.script["upload"], []

    def unreliable(i: int, message: Any, t: int) -> Images:
        asked.append(i)
        if i == 1:
            raise RuntimeError("gone")
        return answer(i, message, t)

    world.engine.script["upload"] = unreliable
    world.prepare()
    assert sorted(asked) == [0, 1, 1, 1, 2]
    assert world.server.warnings == ["no images came from these clients, and the others go on without them: 1"]
    assert world.server.state.owners.tolist() == [0] * N + [2] * N
    world.round(0)  # client 1 trains all the same, and its model labels nothing
    assert world.labels == [[0] * N, [2] * N]


@pytest.mark.parametrize(
    ("kind", "labels"), [(SDAFL, [[-1] * N] * 3), (SDAFLAC, [[0] * N, [1] * N, [2] * N])], ids=["sdafl", "sdafl-ac"]
)
def test_an_upload_that_comes_the_second_time_is_taken(kind: type[SDAFL], labels: list[list[int]]):
    world = World(kind=kind)
    answer, asked = world.engine.script["upload"], []

    def late(i: int, message: Any, t: int) -> Images:
        asked.append(i)
        if asked.count(1) == 1 and i == 1:
            raise RuntimeError("late")
        return answer(i, message, t)

    world.engine.script["upload"] = late
    world.prepare()
    assert world.server.warnings == []
    pool, owners = world.server.state.pool, world.server.state.owners
    assert owners.tolist() == [0] * N + [1] * N + [2] * N
    assert all(torch.equal(pool.inputs[owners == i], bars(N, [i], i).inputs) for i in range(3))
    assert world.labels == labels


IMAGES = bars(N, [0], 0).inputs


@pytest.mark.parametrize(
    ("kind", "reply"),
    [
        (SDAFL, Images(IMAGES[:2], None)),
        (SDAFL, Images(IMAGES[:, :, :4], None)),
        (SDAFL, Images(IMAGES.float(), None)),
        (SDAFL, Images(IMAGES, torch.zeros(N, dtype=torch.int64))),  # nobody asked for labels
        (SDAFLAC, Images(IMAGES, None)),
        (SDAFLAC, Images(IMAGES, torch.full((N,), CLASSES))),
        (SDAFLAC, Images(IMAGES, torch.full((N,), -1))),
        (SDAFLAC, Images(IMAGES, torch.zeros(N))),
        (SDAFLAC, Images(IMAGES, torch.zeros(N + 1, dtype=torch.int64))),
    ],
)
def test_images_that_were_not_asked_for_are_left_out(kind: type[SDAFL], reply: Images):
    world = World(kind=kind)
    answer = world.engine.script["upload"]
    world.engine.script["upload"] = lambda i, m, t: reply if i == 0 else answer(i, m, t)
    world.prepare()
    assert world.server.state.owners.tolist() == [1] * N + [2] * N
    assert {(lost["client"], lost["reason"]) for lost in world.server.lost} == {
        (0, "its images are not those that were asked for")
    }
    assert len(world.server.warnings) == 1


def test_no_images_at_all_end_the_run_in_one_sentence():
    world = World()
    world.engine.script["upload"] = lambda i, m, t: Images(IMAGES[:1], None)
    with refused("engine", "no client"):
        world.prepare()


def test_clients_let_go_of_their_gans_and_hold_the_pool():
    server = run_rounds(SDAFL(**QUICK, tau=0.0), 4, participation=0.5)
    assert server.state.delivered.clients == sorted(server.client_states)
    for i in server.state.delivered.clients:
        state = server.client_states[i]
        assert state["gan"] is None
        assert torch.equal(state["pool"], server.state.pool.inputs)


def test_sdafl_ac_knows_its_labels_and_never_asks_again():
    labels = []
    server = run_rounds(SDAFLAC(**QUICK), 3, after=lambda s, t: labels.append(s.state.pool.labels))
    assert all(torch.equal(labels[0], later) for later in labels[1:])
    for i in range(4):
        assert set(labels[0][server.state.owners == i].tolist()) <= {i, (i + 1) % 4}
    assert server.history[0]["labelled"] == 1.0
    told = {entry["released"]: entry["epsilon"] for entry in server.ledger.account(1e-5)["entries"]}
    assert told["Images.labels"] is None
    down, _ = server.costs.legs["train_aided"]
    model = 4 * sum(tensor.numel() for tensor in server.state.weights.values())
    assert down == 4 * (3 * (model + 24) + 24 * 64)


def test_sdafl_ac_asks_for_classes_by_their_shares_and_says_which_image_is_of_which(monkeypatch: pytest.MonkeyPatch):
    asked: list[torch.Tensor] = []
    original = gan.generate
    monkeypatch.setattr(
        gan, "generate", lambda now, wanted, *rest: asked.append(wanted) or original(now, wanted, *rest)
    )
    algorithm = SDAFLAC(**QUICK)
    client = Client(
        id=0, round=-1, data=bars(40, [2] * 7 + [3], 0), classes=CLASSES, state=State(algorithm.client_state()), initial={},
        seed=0, resident=lambda weights: net(),
    )  # fmt: skip
    reply = algorithm.upload(client, ImagesRequest(800))
    assert torch.equal(reply.labels, asked[0])
    counts = torch.bincount(reply.labels, minlength=CLASSES).tolist()
    assert counts[:2] == [0, 0]
    assert counts[2:] == pytest.approx([700, 100], abs=40)  # 35 and 5 of 40 images


@pytest.mark.parametrize(("noise", "own"), [("none", True), ("paper_eq3", True), ("dpsgd", False)])
def test_a_conditional_generator_is_asked_for_its_clients_classes(
    monkeypatch: pytest.MonkeyPatch, noise: str, own: bool
):
    asked: list[list[int] | None] = []
    original = gan.train
    monkeypatch.setattr(gan, "train", lambda *given: asked.append(given[-1]) or original(*given))
    run_rounds(SDAFLAC(**QUICK, noise=noise), 1)
    assert {tuple(classes) if classes else None for classes in asked} == (
        {tuple(sorted({i, (i + 1) % 4})) for i in range(4)} if own else {None}
    )
    asked.clear()
    run_rounds(SDAFL(**QUICK), 1)
    assert set(asked) == {None}


def test_gans_are_trained_on_unlabelled_images_too_unless_they_need_labels(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    original = gan.train
    monkeypatch.setattr(gan, "train", lambda now, data, *rest: sizes.append(len(data)) or original(now, data, *rest))
    run_rounds(SDAFL(**QUICK), 1, federation=partly_labelled())
    assert set(sizes) == {40}
    sizes.clear()
    run_rounds(SDAFLAC(**QUICK), 1, federation=partly_labelled())
    assert set(sizes) == {8}


def entries(server: Any) -> dict[str, dict[str, Any]]:
    return {entry["released"]: entry for entry in server.ledger.account(1e-5)["entries"]}


@pytest.mark.parametrize("federation", [small_federation, partly_labelled])
def test_dpsgd_has_a_figure_for_the_images_and_none_in_total(
    federation: Callable[[], Federation], monkeypatch: pytest.MonkeyPatch
):
    """The same 40 images, of which the account takes as many as the training, with labels and without."""
    used: list[float] = []
    original = gan.train
    monkeypatch.setattr(gan, "train", lambda *given: used.append(given[6]) or original(*given))
    server = run_rounds(SDAFL(**QUICK, noise="dpsgd", target_epsilon=5.0), 1, federation=federation())
    images = entries(server)["Images.inputs"]
    multiplier = SDAFL(**QUICK, noise="dpsgd", target_epsilon=5.0).gan().noise_multiplier(40, 3)
    # 3 steps of the generator with 2 of the critic each, and 8 of 40 images expected in each
    assert images["epsilon"] == replaced_epsilon(0.0, ((multiplier, 0.2, 6),), 1e-5)
    assert set(used) == {multiplier}
    assert images["epsilon"] > 5 > entries(server)["Pretrained.iterations"]["epsilon"] == 0
    assert "epsilon 5 at delta 1e-05 for a record added or removed" in images["mechanism"]
    assert [words.split(" is public")[0] for words in images["conditions"]] == ["the number of the client's records"]
    account = server.ledger.account(1e-5)
    assert account["total_epsilon"] is None
    assert "No guarantee covers AidedUpdate.samples and AidedUpdate.weights" in account["statement"]


def test_labels_that_are_drawn_by_the_shares_of_classes_take_these_as_known():
    images = entries(run_rounds(SDAFLAC(**QUICK, noise="dpsgd", target_epsilon=5.0), 1))["Images.inputs"]
    assert any("share of each class" in words for words in images["conditions"])


@pytest.mark.parametrize("noise", ["none", "paper_eq3"])
def test_without_clipping_the_images_have_no_guarantee(noise: str):
    images = entries(run_rounds(SDAFL(**QUICK, noise=noise), 1))["Images.inputs"]
    assert images["epsilon"] is None
    assert images["conditional_epsilon"] is None
    assert ("not private" in images["mechanism"]) is (noise == "paper_eq3")


def test_a_pre_training_that_was_lost_is_made_up_for_at_the_upload(monkeypatch: pytest.MonkeyPatch):
    """Client 1 hears of no chunk; its GAN has had all its steps when it uploads."""
    done: list[int] = []
    original = gan.generate
    monkeypatch.setattr(gan, "generate", lambda now, *rest: done.append(now.iterations) or original(now, *rest))

    class Deaf(SDAFL):
        def train_gan(self, client: Client, iterations: int) -> Any:
            if client.id == 1 and client.round < -1:
                raise RuntimeError("gone")
            return super().train_gan(client, iterations)

    server = run_rounds(Deaf(**QUICK), 1)
    assert done == [3] * 4
    assert server.state.owners.tolist() == [i for i in range(4) for _ in range(6)]


def test_a_client_that_is_stopped_stops_in_mid_training():
    class Stopped(Exception):
        pass

    def check() -> None:
        raise Stopped

    algorithm = SDAFL(**QUICK)
    start = start_of({})
    client = Client(
        id=0, round=-2, data=start.data, classes=CLASSES, state=State(algorithm.client_state()), initial={}, seed=0,
        resident=lambda weights: net(), check=check,
    )  # fmt: skip
    with pytest.raises(Stopped):
        algorithm.pretrain_gan(client, Pretrain(3))


@pytest.mark.parametrize(("noise", "moment"), [("none", 1), ("none", 3), ("dpsgd", 2), ("none", "round 1")])
def test_stopped_at_any_step_it_goes_on_with_the_same_bits_on_other_workers(
    noise: str, moment: Any, whole: dict[str, fedfill.Result], tmp_path: Path
):
    def stop(record: dict[str, Any], rounds: int) -> None:
        if moment in (record.get("step"), f"round {record.get('round')}"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedfill.run("sdafl", **TINY, noise=noise, out=tmp_path / "r", on_round=stop, workers=2)
    again = fedfill.resume(tmp_path / "r", workers=2)
    assert again.resumed_after == (1 if moment == "round 1" else 0)
    assert again.summary["weights_sha256"] == whole[noise].summary["weights_sha256"]
    assert again.summary["privacy"] == whole[noise].summary["privacy"]
    assert again.summary["bytes_by_handler"] == whole[noise].summary["bytes_by_handler"]


def test_data_that_no_gan_can_make_are_refused(tmp_path: Path):
    inputs, labels = torch.randn(60, 6), torch.arange(60) % 3
    with refused("data", "sdafl", "square"):
        fedfill.run("sdafl", data=(inputs, labels), model=nn.Linear(6, 3), clients=2, rounds=1, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()
