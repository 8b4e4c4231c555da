"""FRAug: losses, steps and rounds, by hand and by identities."""

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from tests.algorithms.fraug_world import INPUTS, LABELS, QUICK, WIDE, update_of
from tests.helpers import CLASSES, Run, run_rounds, scripted
from torch import Tensor, nn

from fedfill import tree
from fedfill.algorithms import fraug
from fedfill.algorithms.fedbn import FedBN
from fedfill.algorithms.fraug import FRAug, Shared, SharedUpdate, _LocalUpdate
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import normalisation, weights_of
from fedfill.protocol.client import State
from fedfill.streams import torch_stream
from fedfill.synthesis import embeddings
from fedfill.synthesis.embeddings import distance
from fedfill.tree import Weights


def moved(before: Weights, after: Weights, part: str) -> Weights:
    return {n: after[n] - t for n, t in before.items() if n.startswith(part) and t.is_floating_point()}


def step_of(update: _LocalUpdate) -> tuple[Weights, Weights]:
    """How far one step of the classification moves encoder and head, once prototypes are there."""
    update.prototypes = torch.rand(CLASSES, 16, generator=torch_stream(0, "prototypes"))
    update.seen = torch.ones(CLASSES, dtype=torch.bool)
    before = weights_of(update.model)
    update.classification(INPUTS, LABELS)
    after = weights_of(update.model)
    return moved(before, after, "encoder."), moved(before, after, "classifier.")


class Given(nn.Module):
    """An extractor whose embeddings have one number each, that of the label 0 or 1, in turn."""

    def __init__(self, *numbers: tuple[float, float]) -> None:
        super().__init__()
        self.numbers = list(numbers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor(self.numbers.pop(0)).repeat(len(x) // 2)[:, None].expand(-1, 16)


def losses_of(update: _LocalUpdate, monkeypatch: pytest.MonkeyPatch) -> list[tuple[nn.Module, float]]:
    """Network and loss of each step from now on; no step is taken, and the head says 1/6, 1/6, 1/6 and 1/2 of everything."""
    update.model.classifier.weight.data.zero_()
    update.model.classifier.bias.data = torch.tensor([1.0, 1.0, 1.0, 3.0]).log()
    update.seen = torch.ones(CLASSES, dtype=torch.bool)
    found: list[tuple[nn.Module, float]] = []
    monkeypatch.setattr(update, "step", lambda which, loss, module: found.append((module, loss.item())))
    return found


@pytest.mark.parametrize(
    ("switches", "loss"),
    [
        # the labels 0 and 1 have 1/6, and of all four classes in turn a quarter has 1/2
        ({}, 0.8 * math.log(6) + 0.2 * (0.75 * math.log(6) + 0.25 * math.log(2))),
        ({"on_real": False}, 0.6 * math.log(6) + 0.4 * (0.75 * math.log(6) + 0.25 * math.log(2))),
        ({"on_prototypes": False}, math.log(6)),
    ],
)
def test_the_models_loss_by_hand(switches: dict[str, bool], loss: float, monkeypatch: pytest.MonkeyPatch):
    update = update_of(synthetic=0.4, **switches)
    found = losses_of(update, monkeypatch)
    update.classification(INPUTS, LABELS)
    # 0.6 of it is of real embeddings, and both kinds of synthetic ones share the other 0.4
    assert found == [(update.model, pytest.approx(loss))]


def test_the_losses_of_generator_and_transformation_by_hand(monkeypatch: pytest.MonkeyPatch):
    """Equations 5 and 6, where every distance is 2: recognised and far, of no class in particular and near."""
    update = update_of(generator_weight=3.0, rtnet_weight=5.0)
    found = losses_of(update, monkeypatch)
    for room in (fraug, embeddings):
        monkeypatch.setattr(room, "distance", lambda kind, a, *others: 2 + 0 * a.sum())
    update.generation(INPUTS, LABELS)
    recognised = 0.75 * math.log(6) + 0.25 * math.log(2)
    entropy = 0.5 * math.log(6) + 0.5 * math.log(2)
    assert found == [
        (update.generator, pytest.approx(recognised - 3 * 2)),
        (update.rtnet, pytest.approx(5 * 2 - entropy)),
    ]


def test_the_transformation_is_trained_at_full_weight(monkeypatch: pytest.MonkeyPatch):
    """However little of it the head sees in this round."""
    update = update_of(residual=0.25)
    update.classification(INPUTS, LABELS)
    added: list[Tensor] = []
    compared: list[tuple[Tensor, Tensor]] = []

    def watched(kind: Any, made: Tensor, wanted: Tensor, base: Tensor, *others: Tensor) -> Tensor:
        compared.append((made.detach(), base))
        return distance(kind, made, wanted, base, *others)

    for room in (fraug, embeddings):
        monkeypatch.setattr(room, "distance", watched)
    update.rtnet.register_forward_hook(lambda net, given, made: added.append(made.detach()))
    update.generation(INPUTS, LABELS)
    (_, *pairs) = compared  # the first is the generator's
    assert len(pairs) == len(added) == 2  # on real embeddings and on prototypes
    for (made, base), residual in zip(pairs, added, strict=True):
        assert residual.abs().max() > 0.1
        assert torch.allclose(made, base + residual, atol=1e-6)


@pytest.mark.parametrize("rate", ["generator_rate", "rtnet_rate"])
def test_each_step_size_is_its_own_networks(rate: str):
    update = update_of(**{rate: 1e-30})
    update.seen = torch.ones(CLASSES, dtype=torch.bool)
    nets = {"generator_rate": update.generator, "rtnet_rate": update.rtnet}
    before = {name: [p.detach().clone() for p in net.parameters()] for name, net in nets.items()}
    update.generation(INPUTS, LABELS)
    stayed = {
        name: all(
            torch.allclose(p, old, rtol=0, atol=1e-12) for p, old in zip(net.parameters(), before[name], strict=True)
        )
        for name, net in nets.items()
    }
    assert stayed == {name: name == rate for name in nets}


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_synthetic_embeddings_leave_the_extractors_gradient_alone(share: float):
    real = update_of(synthetic=0.0)
    parameters = {f"encoder.{n}" for n, _ in real.model.encoder.named_parameters()}
    (encoder, head), (alone, head_alone) = step_of(update_of(synthetic=share)), step_of(real)
    # plain SGD: a step is the gradient, and that of the real loss has the weight 1 - b
    for name in parameters:
        assert torch.allclose(encoder[name], (1 - share) * alone[name], atol=1e-6)
    assert max(float(t.abs().max()) for t in alone.values()) > 1e-4
    # running statistics see real images alone
    assert all(torch.equal(t, alone[n]) for n, t in encoder.items() if n not in parameters)
    assert not torch.allclose(head["classifier.weight"], (1 - share) * head_alone["classifier.weight"], atol=1e-4)


def test_the_first_stage_moves_the_model_alone_and_the_second_the_others():
    update = update_of()
    nets = {"model": update.model, "generator": update.generator, "rtnet": update.rtnet}

    def changed(step, *given: Tensor) -> dict[str, set[str]]:
        before = {name: weights_of(net) for name, net in nets.items()}
        step(*given)
        now = {name: weights_of(net) for name, net in nets.items()}
        return {k: {n for n, t in before[k].items() if not torch.equal(t, now[k][n])} for k in nets}

    for _ in range(2):  # without prototypes and with them
        first = changed(update.classification, INPUTS, LABELS)
        assert not first["generator"] | first["rtnet"]
        assert {"encoder.trunk.0.weight", "classifier.weight", "encoder.trunk.2.running_mean"} <= first["model"]
        second = changed(update.generation, INPUTS, LABELS)
        assert not second["model"]
        assert {"layers.0.weight", "layers.3.weight", "layers.1.running_mean"} <= second["generator"]
        assert {"layers.0.weight", "layers.3.weight", "layers.1.running_mean"} <= second["rtnet"]
    # the transformation's step takes the generator as it is: its batch norm saw one batch each time
    assert int(update.generator.layers[1].num_batches_tracked) == 2


def test_parameters_that_are_frozen_stay():
    update = update_of()
    update.model.encoder.trunk[0].weight.requires_grad_(False)
    before = weights_of(update.model)
    update.classification(INPUTS, LABELS)
    update.generation(INPUTS, LABELS)
    after = weights_of(update.model)
    assert torch.equal(after["encoder.trunk.0.weight"], before["encoder.trunk.0.weight"])
    assert not torch.equal(after["encoder.trunk.3.weight"], before["encoder.trunk.3.weight"])


def test_prototypes_of_classes_that_were_not_seen_never_train_the_head():
    update = update_of(on_real=False)
    v = torch.rand(8, 16)
    assert update.embeddings(v, LABELS, 1.0) == []
    update.classification(INPUTS, LABELS)
    assert update.seen.tolist() == [True, True, False, False]
    assert not update.prototypes[2:].any()
    for _ in range(4):
        ((made, wanted),) = update.embeddings(v, LABELS, 1.0)
        assert set(wanted.tolist()) == {0, 1}
        assert len(made) == len(wanted) == 4  # 8 labels of all four classes in turn, half of which were seen


def test_nor_do_they_train_the_transformation():
    trained = []
    for unseen in (0.0, 1e3):
        update = update_of()
        update.classification(INPUTS, LABELS)
        update.prototypes[2:] = unseen
        update.generation(INPUTS, LABELS)
        trained.append(tree.sha256(weights_of(update.rtnet)))
    assert len(set(trained)) == 1


def test_prototypes_go_on_from_step_to_step_and_from_round_to_round():
    update = update_of()
    update.model.encoder = Given((1.0, 3.0), (2.0, 7.0))
    for expected in ([1.0, 3.0, 0.0, 0.0], [1.3, 4.2, 0.0, 0.0]):  # 0.7 * 1 + 0.3 * 2 and 0.7 * 3 + 0.3 * 7
        update.classification(INPUTS, LABELS)
        assert update.prototypes[:, 0].tolist() == pytest.approx(expected)
    update.rotations = [1, 3]
    after = update_of(kept=update.private({}))
    assert after.rotations == [1, 3]
    after.model.encoder = Given((11.3, 14.2))
    after.classification(INPUTS, LABELS)
    assert after.prototypes[:, 0].tolist() == pytest.approx([4.3, 7.2, 0.0, 0.0])  # ten more, of which 0.3
    assert after.seen.tolist() == [True, True, False, False]


def test_head_and_generator_each_go_on_with_labels_of_their_own():
    update = update_of()
    update.seen = torch.ones(CLASSES, dtype=torch.bool)
    update.generation(INPUTS[:6], LABELS[:6])
    assert update.rotations == [0, 2]  # six labels of four classes
    update.classification(INPUTS[:6], LABELS[:6])
    assert update.rotations == [2, 2]


def test_noise_has_half_the_size_of_an_embedding():
    assert update_of().latent(3).shape == (3, 8)
    assert update_of(embedding_latent=3).latent(2).shape == (2, 3)


def test_schedules_keep_their_bounds():
    algorithm = FRAug()
    residual = [algorithm.residual_weight(t, 300) for t in range(300)]
    synthetic = [algorithm.synthetic_weight(t, 300) for t in range(300)]
    assert residual[0] == pytest.approx(math.exp(-3)) == pytest.approx(0.0498, abs=1e-4)
    assert residual[-1] == pytest.approx(0.99, abs=1e-4)
    assert residual == sorted(residual)
    assert max(residual) < 1
    assert synthetic == [min(0.5, a) for a in residual]
    assert synthetic[230] < 0.5 == synthetic[231] == synthetic[-1]  # from exp(-0.69) on
    constant = FRAug(residual_schedule="constant", synthetic_gamma=0.0, synthetic_limit=0.3)
    assert {constant.residual_weight(t, 300) for t in (0, 299)} == {1.0}
    assert {constant.synthetic_weight(t, 300) for t in (0, 299)} == {0.3}
    digits = FRAug(**FRAug.presets["digits-domains"])
    assert {digits.synthetic_weight(t, 300) for t in range(300)} == {0.5}


def test_what_travels_by_the_bytes():
    server = run_rounds(FRAug(**QUICK), rounds=2, model=WIDE)
    model = 4 * ((9 * 32 + 32) + (9 * 32 * 32 + 32) + (9 * 32 * 64 + 64) + 3 + (256 * 16 + 16) + (16 * 4 + 4))
    # noise of 8 and four classes to 16, to 16, each with batch norm: scales, shifts, means, variances and a counter
    linear, norm = 4 * ((12 * 16 + 16) + (16 * 16 + 16)), 2 * (4 * 4 * 16 + 8)
    generator = linear + norm
    assert server.costs.legs == {"train_augmented": [8 * (model + generator + 16), 8 * (model + generator + 8)]}
    local = run_rounds(FRAug(**QUICK, generator_norm="local"), rounds=2, model=WIDE)
    assert local.costs.legs == {"train_augmented": [8 * (model + linear + 16), 8 * (model + linear + 8)]}
    assert {item.name for item in fields(SharedUpdate)} == {"weights", "samples", "scale", "control", "generator"}
    # what stays: normalisation layers, transformation, prototypes, momenta; and the generator's batch norm where it is local
    for run, own in ((server, 0), (local, 10)):
        private = run.client_states[0]["private"]
        assert len(private.generator) == own
        assert [len(state) for state in private.momenta][1:] == [8, 8]
        assert private.prototypes.shape == (CLASSES, 16)
    assert server.ledger.account(1e-5)["total_epsilon"] is None


def test_a_round_by_hand():
    model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(**WIDE), seed=0)
    local = normalisation(model)
    for weighting, shares in (("samples", (0.25, 0.75)), ("uniform", (0.5, 0.5))):
        algorithm = FRAug(weighting=weighting).resolved(rounds=10, model=model, inputs=INPUTS[:1])
        server, engine = scripted(2, weights_of(model), model=model)
        server.state = State(algorithm.server_state(weights_of(model)))

        def answer(i: int, message: Shared, t: int) -> SharedUpdate:
            def filled(weights: Weights) -> Weights:
                return {
                    n: torch.full_like(x, 4 + 4 * i) if x.is_floating_point() else x + i for n, x in weights.items()
                }

            return SharedUpdate(filled(message.weights), 1 + 2 * i, filled(message.generator))

        engine.script["train_augmented"] = answer
        algorithm.round(server, 0)
        (_, _, _, first), (_, _, _, second) = engine.sent
        # one draw of the server's for all: an average of each client's own would be a smaller network
        assert all(torch.equal(t, second.generator[n]) for n, t in first.generator.items())
        drawn = first.generator["layers.0.weight"]
        assert 0.9 / math.sqrt(12) < float(drawn.abs().max()) <= 1 / math.sqrt(12)
        assert first.weights.keys() == server.initial.keys() - local
        assert (first.residual, first.synthetic) == (pytest.approx(math.exp(-0.1)), 0.5)
        mean = 4 * shares[0] + 8 * shares[1]
        for name, tensor in server.state.weights.items():
            expected = server.initial[name] if name in local else torch.full_like(tensor, mean)
            assert torch.equal(tensor, expected)
        floats = [t for t in server.state.generator.values() if t.is_floating_point()]
        assert all(torch.allclose(t, torch.full_like(t, mean)) for t in floats)
        algorithm.round(server, 1)
        assert float(engine.sent[-1][3].generator["layers.0.bias"][0]) == pytest.approx(mean)


def test_without_synthetic_embeddings_it_is_fedbn():
    """With SGD and the same momentum; FRAug's momenta outlast a round, so that a second round agrees without momentum alone."""
    for rounds, momentum, same in ((1, 0.5, True), (3, 0.0, True), (2, 0.5, False)):
        shared = {"batch_size": 8, "learning_rate": 0.05, "local_epochs": 1, "momentum": momentum, "weight_decay": 1e-3}
        shared["optimizer"] = "sgd"
        plain = run_rounds(FedBN(**shared), rounds=rounds, model=WIDE)
        bare = run_rounds(
            FRAug(**shared, local_steps=None, weighting="uniform", synthetic_limit=0.0), rounds=rounds, model=WIDE
        )
        near = [torch.allclose(bare.state.weights[n], t, atol=1e-6) for n, t in plain.state.weights.items()]
        assert all(near) is same
        if same:
            for i in range(4):
                own = bare.client_states[i]["own"]
                assert all(torch.allclose(own[n], t, atol=1e-6) for n, t in plain.client_states[i]["own"].items())
        assert bare.costs.train_samples == plain.costs.train_samples


@pytest.mark.parametrize("kind", ["mmd", "mmd_per_class", "mean_cov", "l2"])
def test_distances_are_maximised_by_the_generator_and_minimised_by_the_transformation(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    def gradients(generator_weight: float, rtnet_weight: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Of the whole loss, and of the distance alone, by the generator's and twice the transformation's embeddings."""
        update = update_of(
            generator_weight=generator_weight, rtnet_weight=rtnet_weight, generator_distance=kind, rtnet_distance=kind,
            generator_rate=1e-30, rtnet_rate=1e-30,  # nothing moves, so that both see the same
        )  # fmt: skip
        update.classification(INPUTS, LABELS)
        whole: dict[int, torch.Tensor] = {}
        alone: list[torch.Tensor] = []

        def watched(kind: Any, a: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            value, place = distance(kind, a, *others), len(alone)
            alone.extend(torch.autograd.grad(value, a, retain_graph=True))
            a.register_hook(lambda gradient: whole.__setitem__(place, gradient))
            return value

        for room in (fraug, embeddings):
            monkeypatch.setattr(room, "distance", watched)
        update.generation(INPUTS, LABELS)
        return [whole[place] for place in range(len(alone))], alone

    (off, alone), (on, again) = gradients(0.0, 0.0), gradients(30.0, 10.0)
    assert len(off) == len(on) == 3
    for factor, without, weighted, own, same in zip((-30, 10 / 2, 10 / 2), off, on, alone, again, strict=True):
        assert torch.equal(own, same)
        assert own.abs().max() > 0
        torch.testing.assert_close(weighted - without, factor * own, rtol=1e-3, atol=1e-5)


def test_squared_differences_are_to_the_prototype_of_the_same_class():
    update = update_of(generator_distance="l2")
    update.prototypes, update.seen = (
        torch.tensor([[1.0, 1.0], [5.0, 5.0], [9.0, 9.0]]),
        torch.tensor([True, True, False]),
    )
    g, wanted = torch.tensor([[2.0, 1.0], [5.0, 8.0], [0.0, 0.0]]), torch.tensor([0, 1, 2])
    far = torch.full((3, 2), 1e6)  # the client's own embeddings, of whatever classes, play no part
    assert float(update.apart(g, wanted, far, wanted)) == pytest.approx((1 + 0 + 0 + 9) / 4)
    assert float(update.apart(g[2:], wanted[2:], far, wanted)) == 0  # a class that was not seen has no prototype


@pytest.mark.parametrize(
    ("uses", "moves"),
    [({}, True), ({"on_real": False, "on_prototypes": False}, False), ({"synthetic_limit": 0.0}, False)],
)
def test_a_generator_that_nothing_uses_is_not_trained(uses: dict[str, bool], moves: bool) -> None:
    run = Run(FRAug(**QUICK, **uses), WIDE, workers=1, participation=1.0, rounds=2)
    before = {}
    for t in range(2):
        run.server.begin(t)
        run.algorithm.round(run.server, t)
        before = before or dict(run.server.state.generator)
    after = run.server.state.generator
    learnt = [name for name in after if not torch.equal(after[name], before[name])]
    assert bool(learnt) == moves


def test_it_has_the_budget_of_all_others() -> None:
    assert FRAug().training(0) == FedBN().training(0)
    assert FRAug(optimizer="adam").optimizer == "adam"
