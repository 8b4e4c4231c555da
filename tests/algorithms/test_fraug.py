"""FRAug: what each of its three kinds of steps may move, what travels, its schedules, its switches, and its traps."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import CLASSES, bars, run_rounds, scripted
from torch import Tensor, nn

import fedfill
from fedfill import tree
from fedfill.algorithms import fraug
from fedfill.algorithms.fedbn import FedBN
from fedfill.algorithms.fraug import FRAug, Private, Shared, SharedUpdate, _LocalUpdate
from fedfill.data.samples import normalise
from fedfill.errors import FedfillError
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import normalisation, weights_of
from fedfill.protocol.client import Client, State
from fedfill.streams import torch_stream
from fedfill.synthesis import embeddings
from fedfill.synthesis.embeddings import distance, initial
from fedfill.tree import Weights

WIDE = {"width": "wide"}  # with batch norm; embeddings of size 16
QUICK = {"batch_size": 8, "local_steps": 2, "learning_rate": 0.05}
INPUTS, LABELS = normalise(bars(8, [0, 1], 0).inputs), bars(8, [0, 1], 0).labels


def update_of(
    *, synthetic: float = 0.5, residual: float = 1.0, kept: Private | None = None, **settings: Any
) -> _LocalUpdate:
    """The local update of a client that exists in a test alone, at its first iteration."""
    model = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(**WIDE), seed=0)
    given = {"batch_size": 8, "optimizer": "sgd", "learning_rate": 0.1, **settings}
    algorithm = FRAug(**given).resolved(rounds=300, model=model, inputs=INPUTS[:1])
    client = Client(
        id=0, round=0, data=bars(8, [0, 1], 0), classes=CLASSES, state=State({"own": None, "private": kept}),
        initial=weights_of(model), seed=0, resident=lambda weights: model,
    )  # fmt: skip
    generator = initial(algorithm.makers(model, CLASSES)[0], torch_stream(0, "generator"))
    message = Shared({}, generator, residual, synthetic)
    return _LocalUpdate(algorithm, client, model, algorithm.networks(client, model, generator), message)


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


# Losses


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


# What may move


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


# Prototypes and labels


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


def test_embeddings_are_bases_with_weighted_residuals():
    update = update_of()
    update.generator.eval()
    update.rtnet.eval()
    v, labels = torch.rand(8, 16), LABELS
    update.prototypes, update.seen = torch.rand(CLASSES, 16), torch.ones(CLASSES, dtype=torch.bool)
    state = update.stream.get_state()
    with torch.no_grad():
        whole = update.embeddings(v, labels, 1.0)
        update.stream.set_state(state)
        part = update.embeddings(v, labels, 0.25)
        none = update.embeddings(v, labels, 0.0)
        update.stream.set_state(state)
        z = torch.randn(8, 8, generator=update.stream)
        residual = update.rtnet(update.generator(z, labels), labels)
    assert [wanted.tolist() for _, wanted in whole] == [labels.tolist(), [0, 1, 2, 3] * 2]
    assert torch.allclose(whole[0][0], v + residual)
    assert torch.allclose(part[0][0], v + 0.25 * residual)
    assert torch.equal(none[0][0], v)
    assert torch.equal(none[1][0], update.prototypes[none[1][1]])


@pytest.mark.parametrize("b", [2, 3, 4, 7])
def test_balanced_labels_reach_all_classes_at_head_and_generator(b: int):
    update = update_of()
    met = [torch.zeros(CLASSES), torch.zeros(CLASSES)]
    for _ in range(4):
        for which in (0, 1):  # in turns, as in the local update
            labels = update.balanced(which, b)
            met[which] += torch.bincount(labels, minlength=CLASSES)
    assert all(counts.tolist() == [b] * CLASSES for counts in met)
    assert update.rotations == [0, 0]


def test_head_and_generator_each_go_on_with_labels_of_their_own():
    update = update_of()
    update.seen = torch.ones(CLASSES, dtype=torch.bool)
    update.generation(INPUTS[:6], LABELS[:6])
    assert update.rotations == [0, 2]  # six labels of four classes
    update.classification(INPUTS[:6], LABELS[:6])
    assert update.rotations == [2, 2]


def test_noise():
    normal, uniform = update_of().latent(1000), update_of(latent_noise="uniform").latent(1000)
    assert normal.shape == uniform.shape == (1000, 8)  # half of an embedding
    assert normal.min() < -2
    assert 0 <= uniform.min() < uniform.max() < 1
    assert update_of(embedding_latent=3).latent(2).shape == (2, 3)


# Schedules


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


# Messages


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


# Identities


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


def test_switches():
    both, real, prototypes, none = (
        run_rounds(FRAug(**QUICK, on_real=a, on_prototypes=b), rounds=2, model=WIDE).state.weights
        for a, b in ((True, True), (True, False), (False, True), (False, False))
    )
    assert len({tree.sha256(weights) for weights in (both, real, prototypes, none)}) == 4
    off = run_rounds(FRAug(**QUICK, synthetic_limit=0.0), rounds=2, model=WIDE).state.weights
    assert all(torch.equal(none[n], tensor) for n, tensor in off.items())  # the whole weight is the real loss's then


def test_without_the_transformation_the_generators_embeddings_are_used_as_they_are():
    update = update_of(personalised=False)
    before = weights_of(update.rtnet)
    for _ in range(2):
        update.classification(INPUTS, LABELS)
        update.generation(INPUTS, LABELS)
    assert all(torch.equal(t, before[n]) for n, t in weights_of(update.rtnet).items())
    with torch.no_grad():
        update.generator.eval()
        state = update.stream.get_state()
        found = update.embeddings(torch.full((8, 16), 1e6), LABELS, 0.1)
        update.stream.set_state(state)
        alone = update.generator(torch.randn(8, 8, generator=update.stream), LABELS)
    assert torch.equal(found[0][0], alone)
    assert max(float(made.max()) for made, _ in found) < 100


@pytest.mark.parametrize(("every", "steps"), [(1, 5), (2, 3), (5, 1), (9, 1)])
def test_generator_every(every: int, steps: int):
    settings = {**QUICK, "local_steps": 5, "generator_every": every}
    server = run_rounds(FRAug(**settings), rounds=1, model=WIDE)
    assert int(server.state.generator["layers.1.num_batches_tracked"]) == steps
    counted = {int(s["private"].rtnet["layers.1.num_batches_tracked"]) for s in server.client_states.values()}
    assert counted == {2 * steps}  # on real embeddings and on prototypes


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


# Runs


def test_same_bits_on_one_and_two_workers():
    one, two = (
        run_rounds(FRAug(**QUICK, generator_norm="local"), rounds=3, model=WIDE, workers=n, participation=0.75)
        for n in (1, 2)
    )
    for name in ("weights", "generator"):
        assert tree.sha256(getattr(one.state, name)) == tree.sha256(getattr(two.state, name))
    for i, state in one.client_states.items():
        assert tree.sha256(state["private"].rtnet) == tree.sha256(two.client_states[i]["private"].rtnet)
    assert one.client_states.keys() == two.client_states.keys()


def test_clients_learn_their_classes_and_torchs_generator_stays():
    torch.manual_seed(4)
    before = torch.get_rng_state()
    server = run_rounds(
        FRAug(**{**QUICK, "local_steps": 5}), rounds=8, model={**WIDE, "latent_activation": "relu"}, workers=1
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert min(server.evaluation.accuracy_by_client) > 0.9


def test_a_network_without_normalisation_is_shared_whole(tmp_path: Path):
    fedfill.run("fraug", clients=2, rounds=2, data_fraction=0.1, local_steps=2, model="cnn2", out=tmp_path)
    kept = tree.from_bytes((tmp_path / "checkpoint" / "state.safetensors").read_bytes())["clients"]
    assert [state["own"] for state in kept.values()] == [{}, {}]
    assert all(bool(state["private"].seen.any()) for state in kept.values())


class Particular(nn.Module):
    """That takes images alone, and has a part that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Shares(), nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.classifier = nn.Linear(8, 10)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x))


class Shares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().max()) > 1:
            raise IndexError("no image")
        return x


def test_the_model_is_tried_on_what_samples_may_be(tmp_path: Path):
    given = Particular()
    fedfill.run("fraug", model=given, clients=2, rounds=1, data_fraction=0.1, local_steps=1, out=tmp_path)
    before = weights_of(given)
    FRAug().resolved(rounds=1, model=given, inputs=torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    assert given.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(given).items())


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.classifier = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x))


class Between(nn.Module):
    """With a layer that the two parts leave out."""

    def __init__(self, zero: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.neck = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 10)
        if zero:  # all scores are 0 at first, with the neck and without
            nn.init.zeros_(self.classifier.weight)
            nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.neck(self.encoder(x)))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Pair(nn.Module):
    """Whose encoder makes more than embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), Twice())
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x)[0])


class Tokens(nn.Module):
    """Whose pooling is no part of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.Unflatten(1, (3, 8)))
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x).mean(1))


class Flat(nn.Module):
    """Whose forward changes the samples before the encoder sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x.flatten(1)))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": Flat()}, "and Flat or its encoder does not take x (RuntimeError)"),
        ({"model": Deep()}, "needs a linear head named classifier on an encoder, and Deep has a Sequential there"),
        ({"model": "cnn2bn", "projection": 5}, "and Classifier has a projection before it"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))}, "Sequential has no 'encoder'"),
        ({"model": Between()}, "and Between makes other scores than its classifier on its encoder"),
        ({"model": Between(zero=True)}, "and Between makes other scores than its classifier on its encoder"),
        ({"model": Pair()}, "and Pair makes a tuple of them; allowed: embeddings of shape [samples, 8]"),
        ({"model": Tokens()}, "and Tokens makes embeddings of shape [1, 3, 8]"),
        (
            {"model": "cnn2bn", "embedding_latent": 10**12},
            "embedding_latent: found 1000000000000; allowed: at most 65536",
        ),
        ({"model": "cnn2bn", "local": "fedprox"}, "local: found fedprox with fraug"),
        ({"model": "cnn2bn", "aggregation": "fednova"}, "aggregation: found fednova with fraug"),
        ({"model": "cnn2bn", "residual_schedule": "constant", "residual_gamma": 0.1}, "residual_gamma: found 0.1 with"),
        ({"model": "cnn2bn", "synthetic_limit": 2}, "synthetic_limit: found 2; allowed: at most 1"),
    ],
)
def test_what_is_refused(given: dict, sentence: str):
    with pytest.raises(FedfillError) as refusal:
        fedfill.run("fraug", clients=3, rounds=1, data_fraction=0.2, **given)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)
