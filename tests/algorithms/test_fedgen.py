"""FedGEN: both losses by hand, what is FedAvg, what the generator learns, and what travels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import CLASSES, bars, refused, run_rounds, scripted, small_federation, start_of
from torch import Tensor, nn
from torch.nn import functional

import fedfill
from fedfill.algorithms.fedavg import FedAvg
from fedfill.algorithms.fedgen import CountedUpdate, FedGEN, Guided, diversity_loss, ensemble_loss
from fedfill.data.samples import Batch, normalise
from fedfill.errors import DivergedError
from fedfill.models.layers import inputs_of
from fedfill.models.networks import ModelSettings, build
from fedfill.protocol.client import Client
from fedfill.protocol.server import Server
from fedfill.synthesis.embeddings import empty, initial
from fedfill.training.fit import Context
from fedfill.tree import Weights

QUICK: dict[str, Any] = {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.01}
SMALL: dict[str, Any] = {**QUICK, "generator_steps": 5, "generator_width": 8, "generator_latent": 4}


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], tensor) for name, tensor in other.items())


# What is FedAvg


def test_without_a_weight_it_is_fedavg_to_the_bit_and_there_is_no_generator():
    plain, without = (run_rounds(a, rounds=3) for a in (FedAvg(**QUICK), FedGEN(**QUICK, latent_weight=0)))
    assert equal(without.state.weights, plain.state.weights)
    assert without.costs.legs == plain.costs.legs
    assert without.state.generator is None


def test_the_first_round_is_fedavgs_and_the_second_is_not():
    one, other = ([run_rounds(a, rounds=n).state.weights for n in (1, 2)] for a in (FedAvg(**QUICK), FedGEN(**QUICK)))
    assert equal(one[0], other[0])
    assert not equal(one[1], other[1])


# The losses


def test_the_ensembles_loss_by_hand():
    """Two heads on two latents of classes 0 and 1: the first head's client has 3/4 of class 0 and nothing of class 1."""
    scores = torch.tensor([[[1.0, 0.0], [5.0, 0.0]], [[0.0, 0.0], [0.0, 2.0]]])
    shares = torch.tensor([[0.75, 0.0], [0.25, 1.0]])
    each = [math.log(1 + math.exp(-1)), math.log(2), math.log(1 + math.exp(-2))]
    found = ensemble_loss(scores, torch.tensor([0, 1]), shares, "losses")
    assert float(found) == pytest.approx((0.75 * each[0] + 0.25 * each[1] + each[2]) / 2)
    # the mean scores are (.5, 0) and (2.5, 1)
    mean = (math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(1.5))) / 2
    assert float(ensemble_loss(scores, torch.tensor([0, 1]), shares, "scores")) == pytest.approx(mean)


@pytest.mark.parametrize("kind", ["losses", "scores"])
def test_equal_heads_are_one_head(kind: Any):
    stream = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(6, 3, generator=stream), torch.randint(3, (6,), generator=stream)
    counts = torch.tensor([[1, 5, 2], [3, 0, 2]])
    shares = (counts / counts.sum(0))[:, labels]
    found = ensemble_loss(scores.expand(2, 6, 3), labels, shares, kind)
    assert float(found) == pytest.approx(float(functional.cross_entropy(scores, labels)), rel=1e-6)


def test_the_diversity_loss_by_hand():
    """Two latents (0, 0) and (1, 3), 2 apart in the mean; their noise 0 and 2, 4 apart; half of all pairs are of different ones."""
    z = torch.tensor([[0.0, 0.0], [1.0, 3.0]], requires_grad=True)
    loss = diversity_loss(z, torch.tensor([[0.0], [2.0]]))
    assert float(loss.detach()) == pytest.approx(math.exp(-2 * 4 / 2))
    (slope,) = torch.autograd.grad(loss, z)
    assert slope[0].min() > 0 > slope[1].max()  # a step apart makes it smaller
    assert float(diversity_loss(torch.ones(4, 3), torch.randn(4, 2))) == 1


# At a client


def world(algorithm: FedGEN) -> tuple[nn.Module, Guided, Client]:
    model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), seed=0)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    made = initial(algorithm.maker(CLASSES, 16), torch.Generator().manual_seed(1))
    message = Guided(weights, made, torch.tensor([0.5, 0.0, 0.25, 0.25]))
    return model, message, start_of(weights, model=model).client


def batch_of(n: int = 8) -> Batch:
    data = bars(n, [0, 1], 0)
    return Batch(normalise(data.inputs), data.labels, torch.arange(n))


def test_the_local_loss_by_hand_and_its_decay():
    algorithm = FedGEN(**SMALL, latent_weight=3.0, latent_decay=0.5)
    model, message, client = world(algorithm)
    for t, alpha in ((1, 1.5), (3, 0.375)):
        client.round = t
        found = algorithm.guided(client, message)(model, batch_of(), Context({}, torch.Generator().manual_seed(5), 0))
        stream = torch.Generator().manual_seed(5)
        y = torch.multinomial(message.labels, 8, replacement=True, generator=stream)
        e = torch.randn(8, 4, generator=stream)
        generator = empty(algorithm.maker(CLASSES, 16), "cpu").eval()
        generator.load_state_dict(message.generator)
        term = functional.cross_entropy(model.classifier(generator(e, y)), y)
        expected = functional.cross_entropy(model(batch_of().inputs), batch_of().labels) + alpha * term
        torch.testing.assert_close(found, expected)
        assert 1 not in y  # nobody has it


def test_latents_train_the_head_alone_and_nobody_who_watches_it_sees_them():
    algorithm = FedGEN(**SMALL)
    model, message, client = world(algorithm)
    client.round = 1
    with inputs_of(model.classifier) as seen:
        algorithm.guided(client, message)(model, batch_of(), Context({}, torch.Generator(), 0)).backward()
    assert [len(x) for x in seen] == [8]
    assert torch.equal(seen[0], model.encoder(batch_of().inputs))
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    functional.cross_entropy(model(batch_of().inputs), batch_of().labels).backward()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p.grad, found[name])}
    assert moved == {"classifier.weight", "classifier.bias"}


# At the server


def reply(head: Tensor, counts: list[int], samples: int = 1) -> CountedUpdate:
    return CountedUpdate(
        {"classifier.weight": head, "classifier.bias": torch.zeros(len(head))}, samples, counts=counts, head=None
    )


def rounds_of(algorithm: FedGEN, replies: list[CountedUpdate], rounds: int = 1) -> tuple[Server, Any]:
    size = replies[0].weights["classifier.weight"].shape[1]
    weights = {"classifier.weight": torch.zeros(CLASSES, size), "classifier.bias": torch.zeros(CLASSES)}
    server, engine = scripted(len(replies), weights)
    server.state = type(server.state)(algorithm.server_state(weights))
    engine.script["train_guided"] = lambda i, message, t: replies[i]
    for t in range(rounds):
        server.begin(t)
        algorithm.round(server, t)
    return server, engine


def latents(algorithm: FedGEN, server: Server, y: Tensor) -> Tensor:
    generator = empty(algorithm.maker(CLASSES, server.state.weights["classifier.weight"].shape[1]), "cpu").eval()
    generator.load_state_dict(server.state.generator)
    made: Tensor = generator(
        torch.randn(len(y), algorithm.generator_latent, generator=torch.Generator().manual_seed(0)), y
    )
    return made.detach()


def test_the_generator_goes_down_the_heads_loss_and_eta_times_the_diversity_loss():
    """After one step Adam's first moment is .1 of the gradient."""
    algorithm = FedGEN(**{**SMALL, "generator_steps": 1}, diversity=3.0, generator_weight_decay=0.0)
    head = torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(0))
    server, _ = rounds_of(algorithm, [reply(head, [2, 1, 1, 0])])
    make = algorithm.maker(CLASSES, 6)
    generator = empty(make, "cpu")
    generator.load_state_dict(initial(make, server.stream("generator")))
    e, y = algorithm.draw(torch.tensor([0.5, 0.25, 0.25, 0.0]), algorithm.generator_batch, server.stream("latents"))
    z = generator(e, y)
    (functional.cross_entropy(functional.linear(z, head), y) + 3 * diversity_loss(z, e)).backward()
    for k, parameter in enumerate(generator.parameters()):
        torch.testing.assert_close(server.state.momenta[k]["exp_avg"], 0.1 * parameter.grad)


@pytest.mark.parametrize("ensemble", ["losses", "scores"])
def test_the_generator_learns_what_the_heads_tell_apart(ensemble: Any):
    algorithm = FedGEN(ensemble=ensemble, generator_steps=200, generator_learning_rate=0.01)
    one, other = torch.eye(CLASSES, 8), torch.eye(CLASSES, 8).roll(CLASSES, 1)  # the first and the last four dimensions
    server, _ = rounds_of(algorithm, [reply(one, [5] * 4), reply(other, [5] * 4)])
    y = torch.arange(CLASSES).repeat(20)
    made = latents(algorithm, server, y)
    for head in (one, other):
        assert float((functional.linear(made, head).argmax(1) == y).float().mean()) > 0.9
    assert float(torch.pdist(made[::CLASSES]).mean()) > 0.1  # of one class, by different noise
    assert 0 < server.notes["generator_loss"] < math.log(CLASSES)


def test_each_class_is_learnt_from_the_heads_of_those_that_have_it():
    """The second client has no sample of class 0, and its head calls everything else than the first one's."""
    algorithm = FedGEN(generator_steps=200, generator_learning_rate=0.01)
    right, wrong = torch.eye(CLASSES), torch.eye(CLASSES).roll(1, 0)
    server, _ = rounds_of(algorithm, [reply(right, [9, 0, 0, 0]), reply(wrong, [0, 3, 3, 3])])
    y = torch.arange(CLASSES).repeat(20)
    scores = [functional.linear(latents(algorithm, server, y), head) for head in (right, wrong)]
    assert (scores[0].argmax(1) == y)[y == 0].float().mean() > 0.9
    assert (scores[1].argmax(1) == y)[y != 0].float().mean() > 0.9


def test_a_head_of_no_samples_changes_nothing():
    algorithm = FedGEN(**SMALL)
    head = torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(0))
    alone, _ = rounds_of(algorithm, [reply(head, [2, 1, 1, 0])])
    beside, _ = rounds_of(algorithm, [reply(head, [2, 1, 1, 0]), reply(-head, [0] * 4)])
    for name, tensor in alone.state.generator.items():
        torch.testing.assert_close(beside.state.generator[name], tensor)


@pytest.mark.parametrize(("how", "expected"), [("shares", [0.5, 0.25, 0.25, 0]), ("uniform", [1 / 3, 1 / 3, 1 / 3, 0])])
def test_clients_ask_for_classes_by_all_that_was_heard_of(how: Any, expected: list[float]):
    replies = [reply(torch.eye(4), [4, 0, 1, 0]), reply(torch.eye(4), [0, 2, 1, 0])]
    server, engine = rounds_of(FedGEN(**SMALL, latent_labels=how), replies, rounds=2)
    assert server.state.labels.tolist() == pytest.approx(expected)
    sent = {t: message for t, _, _, message in engine.sent}
    assert (sent[0].generator, sent[0].labels) == (None, None)
    assert sent[1].labels.tolist() == pytest.approx(expected)
    assert sent[1].generator.keys() == server.state.generator.keys()


def test_counts_of_clients_that_were_not_asked_again_stay():
    algorithm = FedGEN(**SMALL)
    server, engine = rounds_of(algorithm, [reply(torch.eye(4), [4, 0, 0, 0]), reply(torch.eye(4), [0, 4, 0, 0])])

    def silent(i: int, message: Any, t: int) -> CountedUpdate:
        if i == 0:
            raise RuntimeError("gone")
        return reply(torch.eye(4), [0, 0, 8, 0])

    engine.script["train_guided"] = silent
    server.begin(1)
    algorithm.round(server, 1)
    assert server.state.counts.tolist() == [[4, 0, 0, 0], [0, 0, 8, 0]]
    assert server.state.labels.tolist() == pytest.approx([1 / 3, 0, 2 / 3, 0])


@pytest.mark.parametrize("counts", [[1, 2, 3], [1, 2, 3, -4], [1, 2, 3, 2**62]])
def test_counts_that_make_no_sense_are_left_out_of_the_generator(counts: list[int]):
    server, _ = rounds_of(FedGEN(**SMALL), [reply(torch.eye(4), [1] * 4), reply(torch.eye(4), counts)])
    assert [lost["client"] for lost in server.lost] == [1]
    assert server.state.counts.tolist() == [[1] * 4, [0] * 4]
    nobody, _ = rounds_of(FedGEN(**SMALL), [reply(torch.eye(4), counts)])
    assert nobody.state.generator is None
    assert torch.equal(nobody.state.weights["classifier.weight"], torch.eye(4))


def test_momenta_outlive_a_round():
    replies = [reply(torch.eye(4), [1] * 4)]
    two, _ = rounds_of(FedGEN(**SMALL), replies, rounds=2)
    assert {int(of["step"]) for of in two.state.momenta.values()} == {10}


# Whole runs


@pytest.mark.parametrize(
    "settings", [{}, {"latent_noise": "uniform", "latent_labels": "uniform", "ensemble": "scores"}]
)
def test_it_learns_with_half_of_the_clients(settings: dict[str, Any]):
    server = run_rounds(FedGEN(**{**QUICK, "local_epochs": 2}, **settings), rounds=10, participation=0.5)
    assert server.evaluation.accuracy > 0.7
    assert server.lost == []


def test_where_the_aggregation_changes_the_model_the_head_comes_beside_it():
    """Momentum of 0 at the server is the mean, so that nothing differs but how the head travels."""
    plain, composed = (run_rounds(FedGEN(**SMALL, aggregation=value), rounds=3) for value in (None, "fedavgm:beta1=0"))
    assert equal(composed.state.generator, plain.state.generator)
    for name, tensor in plain.state.weights.items():
        torch.testing.assert_close(composed.state.weights[name], tensor)
    head = 4 * (16 * CLASSES + CLASSES)
    assert composed.costs.legs["train_guided"][1] - plain.costs.legs["train_guided"][1] == 3 * 4 * head


@pytest.mark.parametrize(
    "value",
    [
        {"local": "fedprox:mu=1"}, {"local": "moon:contrast=latent"}, {"local": "feddecorr"}, {"local": "fedlc"}, {"local": "fedsam"},
        {"local": "scaffold", "optimizer": "sgd"}, {"aggregation": "fednova"}, {"aggregation": "qffl", "optimizer": "sgd"},
    ],
)  # fmt: skip
def test_on_top_of_others(value: dict[str, str]):
    alone, composed = (
        run_rounds(FedGEN(**SMALL, **extra), rounds=3)
        for extra in ({k: v for k, v in value.items() if k == "optimizer"}, value)
    )
    assert composed.lost == []
    # all clients make as many steps here, where FedNova is FedAvg
    assert not equal(composed.state.weights, alone.state.weights) or value == {"aggregation": "fednova"}


def test_clients_of_one_sample_and_networks_with_batch_norm_and_without_biases(tmp_path: Path):
    assert run_rounds(FedGEN(**SMALL), rounds=2, federation=small_federation(samples=1, per_client=1)).lost == []

    class Plain(nn.Sequential):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())
            self.classifier = nn.Linear(8, 10, bias=False)

    result = fedfill.run("fedgen", model=Plain(), clients=3, rounds=2, data_fraction=0.2, out=tmp_path, **SMALL)
    assert math.isfinite(result.rounds[-1]["generator_loss"])


def test_workers_change_nothing(tmp_path: Path):
    options = {"clients": 4, "rounds": 3, "data_fraction": 0.2, "participation": 0.5, "partition": "classes:3", **SMALL}
    one, two = (
        fedfill.run("fedgen", **options, workers=n, out=tmp_path / str(n)).summary["weights_sha256"] for n in (1, 2)
    )
    assert one == two


def test_a_generator_that_diverges_ends_the_run_in_a_sentence():
    with pytest.raises(DivergedError, match="generator_learning_rate"):
        rounds_of(FedGEN(**SMALL, generator_learning_rate=1e30), [reply(torch.eye(4), [1] * 4)])


def test_slips():
    with refused("aggregation", "dpfedavg", "fedgen"):
        run_rounds(FedGEN(aggregation="dpfedavg"), rounds=1)
    model = nn.Sequential()
    model.classifier = nn.Linear(64, 8)
    model.last = nn.Linear(8, 4)
    with refused("model", "fedgen", "last"):
        FedGEN().resolved(rounds=1, model=model, inputs=torch.zeros(1, 64))
    gaussian = build("features", (1, 8, 8), CLASSES, ModelSettings(features="conv(4)", last_layer="gaussian"), seed=0)
    with refused("model", "fedgen", "Quadratic"):
        FedGEN().resolved(rounds=1, model=gaussian, inputs=torch.zeros(1, 1, 8, 8))
    for name, value in (("generator_batch", 1), ("latent_decay", 0), ("latent_weight", -1)):
        with refused(name, value):
            fedfill.run("fedgen", **{name: value})
