"""SDA-FL: labels, losses and rounds, by hand and by identities."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.algorithms.sdafl_world import QUICK, N, World, net, partly_labelled, sure_of
from tests.helpers import CLASSES, refused, run_rounds, small_federation
from torch import nn
from torch.nn import functional

from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.sdafl import SDAFL, SDAFLAC, Aided, AidedUpdate
from fedfill.data.samples import Batch, Samples, normalise
from fedfill.models.views import weights_of
from fedfill.training.fit import Context
from fedfill.tree import size


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_image_has_its_label_from_its_owners_own_model_alone():
    world = World().prepare()
    world.round(0)
    assert world.labels == [[0] * N, [1] * N, [2] * N]
    assert world.server.notes == {
        "labelled": 1.0,
        "labelled_by_class": [N, N, N, 0],
        "labelled_by_owner": {"0": [N, 0, 0, 0], "1": [0, N, 0, 0], "2": [0, 0, N, 0]},
    }
    # the newest: each is sure of another class now, and of the mean nobody is asked
    world.sure = lambda i, t: [3, None, 0][i]
    world.round(1)
    assert world.labels == [[3] * N, [-1] * N, [0] * N]
    assert world.server.notes["labelled"] == pytest.approx(2 / 3)


def test_the_threshold_is_exceeded_and_not_met():
    for tau, label in ((0.25, -1), (0.24, 0)):
        world = World(tau=tau).prepare()
        world.sure = lambda i, t: None  # a quarter for each of four classes
        world.round(0)
        assert world.labels == [[label] * N] * 3


def test_who_is_not_asked_keeps_old_labels():
    world = World(clients=4, participation=0.5).prepare()
    seen: dict[int, int] = {}
    for t in range(4):
        world.sure = lambda i, t: t % CLASSES
        seen |= dict.fromkeys(world.round(t), t % CLASSES)
        assert world.labels == [[seen.get(i, -1)] * N for i in range(4)]
    assert len(set(seen.values())) > 1


def test_the_pool_is_sent_until_a_client_was_heard_of_and_labels_in_each_round():
    world = World().prepare()
    answer = world.engine.script["train_aided"]

    def unreliable(i: int, message: Aided, t: int) -> AidedUpdate:
        if (i, t) == (1, 0):
            raise RuntimeError("gone")
        return answer(i, message, t)

    world.engine.script["train_aided"] = unreliable
    rounds = [world.round(t) for t in range(3)]
    assert [[rounds[t][i].pool is not None for i in range(3)] for t in range(3)] == [
        [True, True, True], [False, True, False], [False, False, False],
    ]  # fmt: skip
    assert all(message.labels is None for message in rounds[0].values())  # nobody has labelled anything yet
    assert rounds[1][0].labels.dtype == torch.int8
    assert rounds[1][0].labels.tolist() == [0] * N + [-1] * N + [2] * N
    model = 4 * (64 * CLASSES + CLASSES)
    assert [size(rounds[t][0]) for t in range(3)] == [model + 9 * 64, model + 9, model + 9]


def test_after_relabel_rounds_labels_stay():
    world = World(relabel_rounds=2).prepare()
    for t in range(4):
        world.sure = lambda i, t: t
        world.round(t)
    assert world.labels == [[1] * N] * 3


def test_the_average_is_uniform_by_default():
    world = World().prepare()
    world.round(0)
    assert world.server.state.weights["1.bias"].tolist() == pytest.approx([10 / 3, 10 / 3, 10 / 3, 0])


def test_where_the_aggregation_is_sent_something_else_the_model_beside_it_labels():
    world = World(aggregation="fednova").prepare()
    world.engine.script["train_aided"] = lambda i, m, t: AidedUpdate(sure_of(3), 10, sure_of(i), scale=1.0)
    world.round(0)
    assert world.labels == [[0] * N, [1] * N, [2] * N]


@pytest.mark.parametrize("model", [None, {}, {"1.weight": torch.zeros(2)}])
def test_a_model_that_is_none_labels_nothing(model: Any):
    world = World(aggregation="fednova").prepare()
    world.engine.script["train_aided"] = lambda i, m, t: AidedUpdate(
        sure_of(3), 10, model if i == 1 else sure_of(i), scale=1.0
    )
    world.round(0)
    assert world.labels == [[0] * N, [-1] * N, [2] * N]
    assert [lost["client"] for lost in world.server.lost] == [1]


def filled(*values: int) -> torch.Tensor:
    return torch.stack([torch.full((1, 8, 8), value, dtype=torch.uint8) for value in values])


def linear() -> nn.Module:
    model = net()
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def context() -> Context:
    return Context({}, torch.Generator().manual_seed(0), 0)


REAL = Batch(normalise(filled(0, 255)), torch.tensor([0, 1]), torch.arange(2))


POOL = Samples(filled(90, 90), torch.tensor([2, 2]))  # two alike, so that nothing hangs on the draw


def test_the_loss_with_synthetic_images_alone_in_the_mixture():
    model = linear()
    loss = SDAFL(mixup_alpha=0, real_weight=0.5).aided(POOL, None)(model, REAL, context())
    real = functional.cross_entropy(model(REAL.inputs), REAL.labels)
    mixed = functional.cross_entropy(model(normalise(POOL.inputs)), POOL.labels)
    assert loss.item() == pytest.approx((mixed + 0.5 * real).item(), rel=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_loss_of_a_given_share(share: float, monkeypatch: pytest.MonkeyPatch):
    """Equations 5 to 8: the share is that of the synthetic images."""
    monkeypatch.setattr("fedfill.algorithms.sdafl.draw_lambda", lambda alpha, generator: share)
    model = linear()
    loss = SDAFL(real_weight=2.0).aided(POOL, None)(model, REAL, context())
    mixed = model(share * normalise(POOL.inputs) + (1 - share) * REAL.inputs)  # [2, 4]
    logs = mixed.log_softmax(1)
    by_hand = -(share * logs[[0, 1], [2, 2]] + (1 - share) * logs[[0, 1], [0, 1]]).mean()
    by_hand = by_hand + 2.0 * functional.cross_entropy(model(REAL.inputs), REAL.labels)
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)


@pytest.mark.parametrize("synthetic", [None, POOL[:0]])
def test_without_labelled_images_there_is_the_real_loss_alone(synthetic: Samples | None):
    model = linear()
    loss = SDAFL(real_weight=0.1).aided(synthetic, None)(model, REAL, context())
    assert loss.item() == functional.cross_entropy(model(REAL.inputs), REAL.labels).item()


def test_unlabelled_images_join_the_mini_batch_with_the_models_labels():
    model = linear()
    unlabelled = Samples(filled(200, 200), torch.tensor([3, 3]))
    loss = SDAFL(unlabelled_batch_size=6).aided(None, unlabelled)(model, REAL, context())
    inputs = torch.cat([REAL.inputs, normalise(filled(*[200] * 6))])
    labels = torch.tensor([0, 1, *[3] * 6])
    assert loss.item() == pytest.approx(functional.cross_entropy(model(inputs), labels).item(), rel=1e-6)


def test_mini_batches_are_mixed_with_as_many_synthetic_images(monkeypatch: pytest.MonkeyPatch):
    sizes = []

    def spy(model: nn.Module, x: Any, y: Any, other: Any, other_labels: Any, share: float) -> torch.Tensor:
        sizes.append((len(x), len(y), len(other), len(other_labels)))
        return model(x).sum()

    monkeypatch.setattr("fedfill.algorithms.sdafl.mixup_loss", spy)
    unlabelled = Samples(filled(200), torch.tensor([3]))
    SDAFL(unlabelled_batch_size=6).aided(POOL, unlabelled)(linear(), REAL, context())
    assert sizes == [(8, 8, 8, 8)]


def test_the_servers_step_by_hand():
    """All labelled images are one image of class 2, so both mini-batches are, whatever is drawn and mixed."""
    world = World(server_steps=1, optimizer="sgd", learning_rate=0.1, real_weight=0.5, batch_size=4)
    world.server.state.pool = Samples(filled(90, 90, 90, 30), torch.tensor([2, 2, 2, -1]))
    before = {name: tensor.clone() for name, tensor in weights_of(linear()).items()}
    world.server.state.weights = before
    world.algorithm.update(world.server, 0)
    model = linear()
    (1.5 * functional.cross_entropy(model(normalise(filled(90))), torch.tensor([2]))).backward()
    for name, parameter in model.named_parameters():
        stepped = parameter.detach() - 0.1 * parameter.grad
        torch.testing.assert_close(world.server.state.weights[name], stepped, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("steps", "labels"), [(0, [2, 2]), (3, [-1, -1]), (3, [2, -1])])
def test_the_server_rests_without_steps_or_labelled_images(steps: int, labels: list[int]):
    world = World(server_steps=steps)
    world.server.state.pool = Samples(filled(90, 30), torch.tensor(labels))
    before = world.server.state.weights
    world.algorithm.update(world.server, 0)
    assert world.server.state.weights is before


PLAIN = {key: value for key, value in QUICK.items() if key in FedAvg.model_fields}


def plain(rounds: int = 3, **settings: Any) -> Any:
    same = {**PLAIN, "optimizer": "sgd", "lr_decay": 1.0, "weighting": "uniform", **settings}
    return run_rounds(FedAvg(**same), rounds, participation=0.5)


def test_without_labels_it_is_fedavg_to_the_bit():
    """No probability is above 1, and what losses draw has a stream of its own."""
    aided = run_rounds(SDAFL(**QUICK, tau=1.0), 3, participation=0.5)
    assert equal(aided.state.weights, plain().state.weights)


def test_the_first_round_has_fedavgs_mean_before_the_servers_step():
    alike = [run_rounds(SDAFL(**{**QUICK, "server_steps": s}, tau=0.0), 1, participation=0.5) for s in (0, 2)]
    assert equal(alike[0].state.weights, plain(1).state.weights)
    assert not equal(alike[1].state.weights, plain(1).state.weights)
    second = run_rounds(SDAFL(**{**QUICK, "server_steps": 0}, tau=0.0), 2, participation=0.5)
    assert not equal(second.state.weights, plain(2).state.weights)


def test_a_client_of_one_class_knows_only_that_class_after_round_0():
    one_class = small_federation(per_client=1)
    server = run_rounds(
        SDAFL(**{**QUICK, "local_steps": 40}, tau=0.5), 1, federation=one_class, model={"latent_activation": "sigmoid"}
    )
    pool, owners = server.state.pool, server.state.owners
    assert server.history[0]["labelled"] > 0.9
    for i in range(4):
        assert set(pool.labels[owners == i].tolist()) <= {i, -1}


def test_labels_are_those_of_the_owners_model_in_a_real_run():
    """Four classes for everybody and a threshold of nothing: each image gets what its owner's model says, and no other."""
    models: dict[int, Any] = {}

    class Watched(SDAFL):
        def label(self, server: Any, replies: Any) -> None:
            models.update({i: reply.weights for i, reply in replies.items()})
            super().label(server, replies)

    found = {}

    def after(server: Any, t: int) -> None:
        for i, weights in models.items():
            own = server.state.owners == i
            scores = server.model(weights)(normalise(server.state.pool.inputs[own]))
            found[i] = torch.equal(server.state.pool.labels[own], scores.argmax(1))

    run_rounds(Watched(**QUICK, tau=0.0), 2, after=after)
    assert found == dict.fromkeys(range(4), True)


def test_bytes_by_hand():
    server = run_rounds(SDAFL(**QUICK, tau=0.0), 2)
    model = 4 * sum(tensor.numel() for tensor in server.state.weights.values())
    assert server.costs.legs == {
        "pretrain_gan": [4 * 2 * 8, 4 * 2 * 8],  # two chunks
        "upload": [4 * 8, 4 * 6 * 64],
        "train_aided": [4 * (2 * model + 24 * 64 + 24), 4 * 2 * (model + 8)],  # images first, labels second
    }
    assert server.costs.train_samples == 2 * 4 * 5 * 8  # the server's own steps are no client's


def test_unlabelled_images_train_once_the_model_is_sure_of_some():
    settings = {**QUICK, "server_steps": 0}
    runs = {}
    for tau in (0.0, 1.0):
        runs[tau] = run_rounds(SDAFL(**settings, tau=tau), 1, federation=partly_labelled()).state.weights
    without = dataclasses.replace(partly_labelled(), clients=tuple(
        dataclasses.replace(c, unlabelled=c.train[:0]) for c in partly_labelled().clients
    ))  # fmt: skip
    labelled_alone = run_rounds(SDAFL(**settings, tau=1.0), 1, federation=without).state.weights
    assert equal(runs[1.0], labelled_alone)
    assert not equal(runs[0.0], labelled_alone)  # of the round in which no synthetic image has a label yet


@pytest.mark.parametrize("kind", [SDAFL, SDAFLAC])
@pytest.mark.parametrize(
    "value",
    [
        {"local": "fedprox:mu=0.5"}, {"local": "scaffold"}, {"local": "moon:contrast=latent,mu=2"},
        {"aggregation": "qffl:q=0.5"}, {"local": "fedprox:mu=0.5", "aggregation": "fednova"},
    ],
)  # fmt: skip
def test_on_top_of_others(kind: type[SDAFL], value: dict[str, str]):
    alone, composed = (run_rounds(kind(**QUICK, tau=0.0, **extra), 2) for extra in ({}, value))
    assert composed.lost == []
    assert not equal(composed.state.weights, alone.state.weights)
    # a model beside what the aggregation wants, where labels need it
    model = 4 * sum(tensor.numel() for tensor in alone.state.weights.values())
    up = composed.costs.legs["train_aided"][1] - alone.costs.legs["train_aided"][1]
    beside = kind is SDAFL and "aggregation" in value
    assert (up >= 4 * 2 * model) is (beside or value.get("local") == "scaffold")


@pytest.mark.parametrize("local", [None, "fedprox:mu=1"])
def test_an_aggregation_that_hides_the_clients_models_is_refused(local: str | None):
    with refused("aggregation", "dpfedavg", "sdafl"):
        run_rounds(SDAFL(**QUICK, aggregation="dpfedavg", local=local), 1)


def test_the_papers_numbers_are_defaults():
    paper = SDAFL()
    assert (paper.gan_iterations, paper.gan_penalty, paper.images_per_client) == (18_000, 10.0, 4000)
    assert (paper.tau, paper.real_weight, paper.local_steps, paper.batch_size) == (0.95, 1.0, None, 64)
    assert (paper.server_steps, paper.weighting) == (50, "uniform")
    assert SDAFL.presets["cifar10"] == {"gan_iterations": 36_000, "server_steps": 10}
    assert SDAFL.presets["covid"] == {"gan_iterations": 4_500, "server_steps": 10}
    budget = {"local_steps": 90, "optimizer": "sgd", "learning_rate": 0.03, "lr_decay": 1.0}
    assert SDAFL.paper == {"": budget, "covid": {"local_steps": 30}}
