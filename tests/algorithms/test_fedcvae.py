"""FedCVAE: whom the server asks for which classes, one client alone, lost and senseless replies, the account, the same bits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import CLASSES, bars, refused, run_rounds, scripted
from tests.synthesis.test_cvae import constant

import fedfill
from fedfill.algorithms.fedcvae import Begin, FedCVAE, Own
from fedfill.data.federation import ClientData, Federation
from fedfill.data.samples import Samples
from fedfill.engines.runner import ClientRunner, make_resident
from fedfill.errors import FedfillError
from fedfill.experiment.loop import synthetic_images
from fedfill.experiment.prepare import prepare
from fedfill.experiment.settings import Experiment
from fedfill.models.networks import ModelSettings, build
from fedfill.models.views import weights_of
from fedfill.privacy import sums as privacy
from fedfill.privacy.accountant import added_epsilon
from fedfill.privacy.keyed import KeyedStream, seeded
from fedfill.protocol.client import State
from fedfill.runs.directory import RunDirectory
from fedfill.streams import torch_stream
from fedfill.synthesis import cvae
from fedfill.synthesis.cvae import Mixture, Privacy
from fedfill.synthesis.cvae_networks import decoder_of, start
from fedfill.training.fit import Fit, fit
from fedfill.tree import Weights, size

QUICK: dict[str, Any] = {
    "local_epochs": 1, "batch_size": 8, "latent": 3, "classifier_samples": 40, "classifier_epochs": 1, "decoder_samples": 40,
    "decoder_epochs": 1,
}  # fmt: skip
COUNTS = [[30, 0, 10, 0], [0, 0, 30, 0], [10, 20, 0, 0]]
LEVELS = [2, 128, 253]
"""Of all pixels of the images of the three scripted clients' decoders."""


def world(counts: list[list[int]] = COUNTS, **settings: Any) -> Any:
    """Clients whose decoders make images of one level each, and what the server's classifier was trained on."""
    weights = {"w": torch.zeros(2)}
    server, engine = scripted(len(counts), weights)
    algorithm = FedCVAE(**{**QUICK, **settings})
    server.state = State(algorithm.server_state(weights))
    built = replace(algorithm.networks(server.sample.inputs, CLASSES))
    replies = {
        i: Own(constant(level, built) if any(row) else None, torch.tensor(row))
        for i, (row, level) in enumerate(zip(counts, (-5.0, 0.0, 5.0, 1.0), strict=False))
    }
    engine.script = {"train_cvae": lambda i, message, t: replies[i]}
    fitted: list[Samples] = []

    def spied(weights: Weights, loss: Any, training: Any, *, data: Samples) -> Any:
        fitted.append(data)
        return type("Fitted", (), {"weights": {"w": torch.ones(2)}})()

    server.fit = spied
    return algorithm, server, engine, replies, fitted


def test_one_exchange_with_everybody_from_one_start() -> None:
    algorithm, server, engine, _, fitted = world()
    algorithm.round(server, 0)
    assert [(name, i) for _, name, i, _ in engine.sent] == [("train_cvae", i) for i in (2, 1, 0)] or len(
        engine.sent
    ) == 3
    assert len({id(message) for _, _, _, message in engine.sent}) == 1
    assert len(fitted) == 1
    assert server.state.weights["w"].tolist() == [1, 1]


def test_ens_asks_each_client_for_its_share_and_its_own_classes() -> None:
    algorithm, server, _, _, (*_,) = world(aggregate="ens", classifier_samples=4000)
    fitted = trained_on(algorithm, server)
    makers = fitted.inputs.float().mean((1, 2, 3))
    found = [
        [int(((makers - level).abs() < 3).logical_and(fitted.labels == c).sum()) for c in range(CLASSES)]
        for level in LEVELS
    ]
    assert sum(map(sum, found)) == 4000
    for row, counts in zip(found, COUNTS, strict=True):
        assert [n / 40 for n in row] == pytest.approx(counts, abs=3.5)
        assert all(n == 0 for n, held in zip(row, counts, strict=True) if not held)


def test_balanced_ens_has_all_classes_alike_and_divides_each_by_its_records() -> None:
    algorithm, server, *_ = world(aggregate="ens", classifier_samples=3000, balanced=True)
    fitted = trained_on(algorithm, server)
    assert fitted.counts(CLASSES) == [1000, 1000, 1000, 0]
    of_class_0 = fitted.inputs[fitted.labels == 0].float().mean((1, 2, 3))
    assert float((of_class_0 < 5).float().mean()) == pytest.approx(30 / 40, abs=0.05)


def trained_on(algorithm: FedCVAE, server: Any) -> Samples:
    seen: list[Samples] = []
    server.fit = lambda weights, loss, training, *, data: seen.append(data) or type("F", (), {"weights": weights})()
    algorithm.round(server, 0)
    (found,) = seen
    return found


@pytest.mark.parametrize("average_start", [True, False])
def test_kd_learns_from_what_ens_would_draw_and_draws_held_classes_alike(
    average_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def spied(weights: Weights, drawn: Any, *rest: Any) -> Weights:
        given.append((weights, drawn))
        return weights

    monkeypatch.setattr(cvae, "distil", spied)
    algorithm, server, *_ = world(decoder_samples=4000, classifier_samples=31, average_start=average_start)
    fitted = trained_on(algorithm, server)
    ((first, drawn),) = given
    assert drawn.codes.shape == (4000, 3)
    assert float(drawn.codes.abs().max()) <= 2
    assert [n / 40 for n in drawn.samples.counts(CLASSES)] == pytest.approx([40, 20, 40, 0], abs=3.5)
    assert fitted.counts(CLASSES) == [11, 10, 10, 0]  # never the class that nobody holds
    bias = first["layers.9.bias"]
    begin = start(algorithm.networks(server.sample.inputs, CLASSES), server.stream("other"))
    assert bias.shape == decoder_of(begin)["layers.9.bias"].shape
    if average_start:  # (40 * -5 + 30 * 0 + 30 * 5) / 100
        assert bias.tolist() == pytest.approx([-0.5])
    else:
        assert float(first["head.weight"].abs().max()) > 0
    assert server.state.decoders.counts.tolist() == [[40, 20, 40, 0]]
    assert len(server.state.decoders.decoders) == 1


def test_classes_that_nobody_holds_are_named() -> None:
    algorithm, server, *_ = world(aggregate="ens")
    algorithm.round(server, 0)
    assert server.warnings == ["Nobody holds these classes, so they are neither drawn nor learned: 3."]


def test_who_does_not_answer_is_left_out() -> None:
    algorithm, server, engine, replies, fitted = world(aggregate="ens", classifier_samples=500)

    def unreliable(i: int, message: Any, t: int) -> Own:
        if i == 1:
            raise RuntimeError("gone")
        return replies[i]

    engine.script["train_cvae"] = unreliable
    algorithm.round(server, 0)
    assert [loss["client"] for loss in server.lost] == [1]
    assert len(engine.sent) == 3  # it is asked once
    assert server.state.decoders.counts.tolist() == [COUNTS[0], COUNTS[2]]
    levels = fitted[0].inputs.float().mean((1, 2, 3))
    assert not bool(((levels > 100) & (levels < 150)).any())


@pytest.mark.parametrize(
    ("counts", "decoder"),
    [
        (torch.tensor([1, 2, 3]), {}),
        (torch.tensor([1.0, 2.0, 3.0, 4.0]), {}),
        (torch.tensor([1, -2, 3, 4]), {}),
        (torch.tensor([1, 2**62, 3, 4]), {}),
        (torch.tensor([[1, 2, 3, 4]]), {}),
        (torch.tensor([1, 2, 3, 4]), {"head.weight": torch.zeros(2, 2)}),
        (torch.tensor([1, 2, 3, 4]), {"strange": torch.zeros(1)}),
        (torch.tensor([1, 2, 3, 4]), {"head.weight": torch.full((64, 7), float("nan"))}),
    ],
)
def test_nonsense_is_refused_at_the_door(counts: torch.Tensor, decoder: Weights) -> None:
    algorithm, server, _, replies, _ = world(aggregate="ens")
    replies[0] = Own({**replies[0].decoder, **decoder}, counts)
    algorithm.round(server, 0)
    assert [loss["client"] for loss in server.lost] == [0]
    assert server.state.decoders.counts.tolist() == COUNTS[1:]


def test_without_any_decoder_there_is_nothing_to_train_on() -> None:
    algorithm, server, *_ = world([[0, 0, 0, 0]] * 2)
    with refused("engine", "no client sent a decoder", "2 records"):
        algorithm.round(server, 0)


def test_decoders_without_a_count_above_0_are_told_from_none() -> None:
    algorithm, server, _, replies, _ = world(aggregate="ens")
    for i, reply in list(replies.items()):
        replies[i] = Own(reply.decoder, torch.zeros_like(reply.counts))
    with refused("target_epsilon", "no client a count above 0"):
        algorithm.round(server, 0)


# With real clients


def lonely(*sizes: int) -> Federation:
    """Four clients, of which most have few records or none."""
    members = tuple(
        ClientData(bars(60, [i, (i + 1) % CLASSES], seed=i)[:n], bars(8, [0], seed=9)) for i, n in enumerate(sizes)
    )
    return Federation("bars", members, bars(80, list(range(CLASSES)), seed=1000), tuple("abcd"), (), "bars")


def test_one_client_alone_is_training_on_the_images_of_its_own_decoder() -> None:
    algorithm = FedCVAE(**QUICK, aggregate="ens")
    server = run_rounds(algorithm, 1, federation=lonely(40, 0, 1, 0))
    assert server.lost == []
    assert server.history[0]["warnings"] == [
        (
            "These clients have too few records for a decoder, or noise has left no count of theirs above 0, and the others go on without "
            "them: 1, 2, 3."
        ),
        "Nobody holds these classes, so they are neither drawn nor learned: 2, 3.",
    ]
    mixture: Mixture = server.state.decoders
    assert mixture.counts.tolist() == [[20, 20, 0, 0]]

    def stream(purpose: str) -> torch.Generator:
        return torch_stream(0, "server", purpose, 0)

    wanted = torch.bincount(torch.tensor([0, 1])[torch.multinomial(
        torch.tensor([20.0, 20.0], dtype=torch.float64), 40, replacement=True, generator=stream("classifier classes")
    )], minlength=CLASSES)[None]  # fmt: skip
    built = algorithm.networks(server.sample.inputs, CLASSES)
    images = cvae.decode(mixture, wanted, built, 2.0, stream("classifier codes")).samples
    net = build("cnn2", (1, 8, 8), CLASSES, ModelSettings(), seed=0)
    training = replace(algorithm.training(0), epochs=1)
    request = Fit(weights_of(net), algorithm.loss, images, training)
    resident = make_resident(net, torch.device("cpu"))
    by_hand = fit(resident, request, *(torch_stream(0, "server", name, 0, 0) for name in ("fit", "draws"))).weights
    assert all(torch.equal(server.state.weights[name], x) for name, x in by_hand.items())
    again = algorithm.synthetic(server)
    assert again is not None
    assert torch.equal(again.inputs, images.inputs)


@pytest.mark.parametrize("aggregate", ["ens", "kd"])
def test_it_learns_from_images_alone_and_never_predicts_what_nobody_holds(aggregate: str) -> None:
    settings = {
        "local_epochs": 20, "learning_rate": 5e-3, "classifier_samples": 200, "classifier_epochs": 6, "decoder_samples": 300,
        "decoder_epochs": 8, "batch_size": 16, "average_start": False,
    }  # fmt: skip
    members = tuple(ClientData(bars(60, [c], seed=c), bars(8, [c], seed=9)) for c in (0, 1, 2, 0))
    world = Federation("bars", members, bars(80, list(range(CLASSES)), seed=1000), tuple("abcd"), (), "bars")
    server = run_rounds(FedCVAE(**settings, aggregate=aggregate), 1, federation=world)
    by_class = server.evaluation.accuracy_by_class
    assert min(by_class[:3]) > 0.8
    assert by_class[3] == 0


def test_a_decoder_at_the_server_that_diverges_is_told() -> None:
    for rate, told in ((1e-3, 0), (1e30, 1)):
        server = run_rounds(FedCVAE(**QUICK, aggregate="kd", decoder_learning_rate=rate), 1)
        assert sum("decoder_learning_rate" in text for text in server.warnings) == told


def test_what_follows_the_exchange_needs_no_client() -> None:
    ens, kd = (run_rounds(FedCVAE(**QUICK, aggregate=how), 1) for how in ("ens", "kd"))
    algorithm = FedCVAE(**QUICK)
    begin = start(algorithm.networks(ens.sample.inputs, CLASSES), ens.stream("cvae"))
    again, (found,) = algorithm.distilled(ens, ens.state.decoders, begin), kd.state.decoders.decoders
    assert all(torch.equal(x, found[name]) for name, x in again.decoders[0].items())
    assert torch.equal(again.counts, kd.state.decoders.counts)


def test_bytes_by_hand() -> None:
    server = run_rounds(FedCVAE(**QUICK), 1, federation=lonely(20, 1, 20, 20), participation=0.5)
    begin = start(FedCVAE(**QUICK).networks(server.sample.inputs, CLASSES), torch.Generator())
    assert server.costs.legs == {"train_cvae": [4 * size(begin), 3 * size(decoder_of(begin)) + 4 * 8 * CLASSES]}
    assert server.costs.train_samples == 60  # the server's own are not the clients'


def test_no_augmented_image_reaches_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfill.training.fit.augmented", lambda images, kind, generator: torch.full_like(images, 0.25))
    one, other = (run_rounds(FedCVAE(**QUICK, augmentation=kind), 1) for kind in (None, "shift"))
    for name, x in one.state.decoders.decoders[0].items():
        assert torch.equal(x, other.state.decoders.decoders[0][name])
    name = "classifier.weight"
    assert not torch.equal(one.state.weights[name], other.state.weights[name])


@pytest.mark.parametrize(
    "extra", [{"aggregate": "ens"}, {"aggregate": "kd"}, {"noise": "dpsgd", "target_epsilon": 20.0}]
)
def test_any_number_of_workers_gives_the_same_bits(extra: dict[str, Any]) -> None:
    one, three = (run_rounds(FedCVAE(**QUICK, **extra), 1, workers=n) for n in (1, 3))
    assert all(torch.equal(x, three.state.weights[name]) for name, x in one.state.weights.items())


def test_images_of_each_class_on_request() -> None:
    algorithm = FedCVAE(**QUICK, aggregate="ens")
    server = run_rounds(algorithm, 1, federation=lonely(20, 20, 0, 0))
    found = algorithm.synthetic(server, per_class=7)
    assert found is not None
    assert found.counts(CLASSES) == [7, 7, 7, 0]
    server.state = State(algorithm.server_state(server.initial))
    assert algorithm.synthetic(server, per_class=7) is None


# Privacy

PRIVATE: dict[str, Any] = {**QUICK, "noise": "dpsgd", "target_epsilon": 8.0}


def test_the_account_is_what_was_promised_for_decoder_and_counts_together() -> None:
    server = run_rounds(FedCVAE(**PRIVATE), 1)
    account = server.ledger.account(1e-5)
    assert 0.98 * 8 < account["total_epsilon_added"] <= 8
    assert account["total_epsilon"] > account["total_epsilon_added"]
    told = {entry["released"]: entry for entry in account["entries"]}
    spent = FedCVAE(**PRIVATE).spent(40)
    assert (spent.probability, spent.steps) == (0.2, 5)
    mu = math.sqrt(0.02) * privacy.mu_for(8.0, 1e-5)
    assert account["total_epsilon_added"] == added_epsilon(mu, ((spent.multiplier, 0.2, 5),), 1e-5)
    assert told["Own.counts"]["epsilon"] == 0  # a replaced record leaves the counts as they are
    assert told["Own.counts"]["epsilon_added"] > 0


def test_the_multiplier_of_the_account_is_that_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Privacy] = []
    original = cvae.train_privately

    def spied(weights: Weights, data: Any, built: Any, rate: float, beta: float, spent: Privacy, *rest: Any) -> Weights:
        assert built.norm == "group"
        used.append(spent)
        return original(weights, data, built, rate, beta, spent, *rest)

    monkeypatch.setattr(cvae, "train_privately", spied)
    run_rounds(FedCVAE(**PRIVATE, clip=0.3), 1)
    assert used == [FedCVAE(**PRIVATE, clip=0.3).spent(40)] * 4
    assert used[0].clip == 0.3


def test_without_noise_there_is_no_guarantee() -> None:
    account = run_rounds(FedCVAE(**QUICK), 1).ledger.account(1e-5)
    assert {entry["released"]: entry["epsilon"] for entry in account["entries"]} == {
        "Own.counts": None, "Own.decoder": None,
    }  # fmt: skip
    assert account["total_epsilon"] is account["total_epsilon_added"] is None


def test_noise_on_counts_is_as_booked_and_hides_small_classes() -> None:
    algorithm = FedCVAE(**PRIVATE)
    std = 1 / algorithm.counts_mu

    class Listening:
        seed = 0

        def noise(self, purpose: str) -> KeyedStream:
            self.seed += 1
            return seeded(self.seed)

        def release(self, name: str, release: Any) -> None:
            assert (name, release.mu, release.added_mu) == ("counts", 0.0, pytest.approx(1 / std))

    client: Any = Listening()
    found = algorithm.noisy(client, torch.tensor([1000] * 4000 + [0, 1] * 2000)).double()
    large, small = found[:4000], found[4000:]
    assert large.std().item() == pytest.approx(std, rel=0.05)
    assert large.mean().item() == pytest.approx(1000, abs=4 * std / math.sqrt(4000))
    assert float((small > 0).double().mean()) < 0.01
    assert bool((found >= 0).all())


def test_coins_and_noise_are_as_secret_as_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[int]] = []

    def spy(weights: Weights, data: Any, built: Any, rate: float, beta: float, spent: Any, *rest: Any) -> Weights:
        given.append([int(stream.words(1)[0]) for stream in rest[:2]])
        return weights

    monkeypatch.setattr(cvae, "train_privately", spy)
    algorithm, cpu, data = FedCVAE(**PRIVATE), torch.device("cpu"), bars(400, [0, 1], 0)
    begin = Begin(start(algorithm.networks(data.inputs[:1], CLASSES), torch.Generator().manual_seed(0)))
    resident, counts = make_resident(torch.nn.Linear(1, 1), cpu), []
    for key in (b"a" * 32, b"a" * 32, b"b" * 32, None):
        host = ClientRunner(algorithm, classes=CLASSES, initial={}, seed=0, device=cpu, secret=key)
        outcome, _ = host.serve(resident, "train_cvae", 0, data, data[:0], None, begin, 0)
        assert outcome.error is None
        counts.append(outcome.reply.counts.tolist())  # type: ignore[union-attr]
    assert given[0] == given[1]
    assert len({tuple(numbers) for numbers in given}) == 3
    assert len({*given[0], *given[2], *given[3]}) == 6
    assert counts[0] == counts[1] != counts[2] != counts[3]


# Settings and whole runs


@pytest.mark.parametrize(
    ("setting", "settings", "facts"),
    [
        ("target_epsilon", {"noise": "dpsgd"}, ["none", "noise=dpsgd", "above 0"]),
        ("target_epsilon", {"target_epsilon": 3.0}, ["3", "noise=none"]),
        ("target_epsilon", {"noise": "dpsgd", "target_epsilon": 0.0}, ["0"]),
        ("target_delta", {"noise": "dpsgd", "target_epsilon": 1.0, "target_delta": 1.0}, ["1.0"]),
        ("aggregate", {"aggregate": "both"}, ["both", "kd", "ens"]),
        ("noise", {"noise": "paper_eq3"}, ["paper_eq3", "dpsgd"]),
        ("latent", {"latent": 0}, ["0"]),
        ("beta", {"beta": -1.0}, ["-1"]),
        ("truncation", {"truncation": 0.0}, ["0"]),
        ("classifier_samples", {"classifier_samples": 0}, ["0"]),
        ("decoder_epochs", {"decoder_epochs": 0}, ["0"]),
        ("clip", {"clip": 0.0}, ["0"]),
    ],
)
def test_bad_settings_are_one_sentence(setting: str, settings: dict[str, Any], facts: list[str]) -> None:
    with refused(setting, *facts) as caught:
        prepare(Experiment(algorithm="fedcvae", data="digits", settings=settings))
    assert "\n" not in str(caught.value)


def test_floats_are_refused() -> None:
    floats = Samples(torch.rand(60, 5), torch.arange(60) % 3)
    with pytest.raises(FedfillError, match=r"^data: fedcvae .*8-bit"):
        fedfill.run("fedcvae", data=(floats.inputs.numpy(), floats.labels.numpy()), clients=2, partition="iid")


DIGITS: dict[str, Any] = {
    **QUICK, "data": "digits", "clients": 4, "data_fraction": 0.2, "partition": "classes:3", "rounds": 3,
}  # fmt: skip


def test_a_run_has_one_round_and_its_images_come_from_its_checkpoint(tmp_path: Path) -> None:
    def stop(record: dict[str, Any], rounds: int) -> None:
        raise KeyboardInterrupt

    whole = fedfill.run("fedcvae", **DIGITS, workers=1, out=tmp_path / "whole")
    assert len(whole.rounds) == 1
    with pytest.raises(KeyboardInterrupt):
        fedfill.run("fedcvae", **DIGITS, workers=2, out=tmp_path / "stopped", on_round=stop)
    again = fedfill.resume(tmp_path / "stopped", workers=2)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert (whole.directory / "samples" / "round-0001.png").exists()
    document = RunDirectory(whole.directory).read_experiment("resume")
    names = {name: value for name, value in document.items() if name in Experiment.model_fields}
    found = synthetic_images(prepare(Experiment(**names)), RunDirectory(whole.directory), torch.device("cpu"))
    assert found is not None
    held = {
        c
        for row in json.loads((whole.directory / "partition.json").read_text())["clients"]
        for c, n in enumerate(row)
        if n
    }
    assert set(found.labels.tolist()) == held
    assert len(found) == QUICK["classifier_samples"]
