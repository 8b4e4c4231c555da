"""FedDPGAN: the common GAN is the clients' mean, every client adds the same number of each class, the steps are accounted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import CLASSES, TINY_GAN, prepare, refused, run_rounds, scripted

import fedfill
from fedfill.algorithms import Update
from fedfill.algorithms.feddpgan import FedDPGAN
from fedfill.algorithms.fedgan import Own
from fedfill.privacy.accountant import replaced_epsilon
from fedfill.protocol.client import State
from fedfill.synthesis import gan

QUICK: dict[str, Any] = {
    **TINY_GAN, "images_per_class": 2, "local_epochs": 1, "batch_size": 8, "learning_rate": 0.01,
}  # fmt: skip


def world(clients: int = 2, **settings: Any) -> Any:
    """Client i adds i + 1 to all that it is sent."""
    weights = {"w": torch.zeros(2)}
    server, engine = scripted(clients, weights)
    algorithm = FedDPGAN(**{**QUICK, "gan_iterations": 5, **settings})
    server.state = State(algorithm.server_state(weights))

    def more(tensors: dict[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
        return {name: x + i + 1 if x.is_floating_point() else x for name, x in tensors.items()}

    engine.script = {
        "train_gan": lambda i, message, t: Own(more(message.generator, i), more(message.critic, i), None),
        "train_augmented": lambda i, message, t: Update(more(message.weights, i), 10 * (i + 1)),
    }
    return algorithm, server, engine


def test_the_common_gan_is_the_plain_mean_of_the_clients():
    algorithm, server, engine = world()
    prepare(algorithm, server)
    sent = [message for _, name, i, message in engine.sent if i == 0]
    assert [message.iterations for message in sent] == [2, 2, 1]
    first = sent[0]
    for k, message in enumerate(sent):  # each exchange adds the mean of 1 and 2
        for part in ("generator", "critic"):
            for name, tensor in getattr(message, part).items():
                if tensor.is_floating_point():
                    torch.testing.assert_close(tensor, getattr(first, part)[name] + 1.5 * k)
    assert server.state.gan.iterations == 5
    torch.testing.assert_close(server.state.gan.critic["head.bias"], first.critic["head.bias"] + 4.5)


def test_everybody_starts_from_one_gan_and_trains_it():
    seen = []

    class Watched(FedDPGAN):
        def pretrain(self, server: Any, step: int) -> None:
            super().pretrain(server, step)
            seen.append(server.state.gan)

    server = run_rounds(Watched(**QUICK), 1, participation=0.5)
    assert [found.iterations for found in seen] == [2, 3]
    assert not torch.equal(seen[0].generator["layers.0.weight"], seen[1].generator["layers.0.weight"])
    assert server.costs.legs["train_gan"][0] > 0
    assert server.lost == []


def test_the_generator_is_sent_until_a_client_was_heard_of():
    algorithm, server, engine = world()
    prepare(algorithm, server)
    answer = engine.script["train_augmented"]

    def unreliable(i: int, message: Any, t: int) -> Update:
        if (i, t) == (1, 0):
            raise RuntimeError("gone")
        return answer(i, message, t)

    engine.script["train_augmented"] = unreliable
    for t in range(3):
        server.begin(t)
        algorithm.round(server, t)
    held = {(t, i): m.generator is not None for t, name, i, m in engine.sent if name == "train_augmented"}
    assert held == {(0, 0): True, (0, 1): True, (1, 0): False, (1, 1): True, (2, 0): False, (2, 1): False}
    # 1 of client 0 alone, and then twice the mean of 1 and 2 by samples, 5 / 3
    assert server.state.weights["w"].tolist() == pytest.approx([1 + 2 * 5 / 3] * 2)


def test_clients_add_equally_many_images_of_each_class_and_weigh_by_real_ones():
    counted: list[int] = []

    class Watched(FedDPGAN):
        def gather(self, *given: Any, **options: Any) -> Any:
            replies, mean = super().gather(*given, **options)
            counted.extend(reply.samples for reply in replies.values())
            return replies, mean

    server = run_rounds(Watched(**QUICK), 2)
    assert counted == [40] * 8
    for state in server.client_states.values():
        synthetic = state["synthetic"]
        assert synthetic.labels.tolist() == [c for c in range(CLASSES) for _ in range(2)]
        assert synthetic.inputs.shape == (8, 1, 8, 8)
        assert synthetic.inputs.dtype == torch.uint8
    assert server.costs.train_samples == 2 * 4 * (40 + 8)
    own = [state["synthetic"].inputs for state in server.client_states.values()]
    assert not torch.equal(own[0], own[1])  # each draws for itself


def test_bytes_by_hand():
    server = run_rounds(FedDPGAN(**QUICK), 2)
    model, generator, critic = (
        sum(x.numel() * x.element_size() for x in tensors.values())
        for tensors in (server.state.weights, server.state.gan.generator, server.state.gan.critic)
    )
    both = generator + critic
    assert server.costs.legs == {
        "train_gan": [2 * 4 * (both + 8), 2 * 4 * both],
        "train_augmented": [4 * (2 * model + generator), 2 * 4 * (model + 8)],
    }


def test_dpsgd_of_all_exchanges_adds_up_to_that_of_all_steps(monkeypatch: pytest.MonkeyPatch):
    """A client's noise is that of the whole pre-training, and what it costs is that of the whole as well."""
    used: list[float] = []
    original = gan.train
    monkeypatch.setattr(gan, "train", lambda *given: used.append(given[6]) or original(*given))
    server = run_rounds(FedDPGAN(**QUICK, noise="dpsgd", target_epsilon=4.0), 1)
    told = {entry["released"]: entry for entry in server.ledger.account(1e-5)["entries"]}
    multiplier = FedDPGAN(**QUICK, noise="dpsgd", target_epsilon=4.0).gan(CLASSES).noise_multiplier(40, 3)
    whole = replaced_epsilon(0.0, ((multiplier, 0.2, 3 * 2),), 1e-5)
    assert told["Own.critic"]["epsilon"] == whole > 4.0
    assert used == [multiplier] * 8
    # the same noisy steps, which are not counted twice
    assert told["Own.generator"]["epsilon"] == 0
    assert told["Own.critic"]["times"] == 2
    assert told["Update.weights"]["epsilon"] is None
    assert server.ledger.account(1e-5)["total_epsilon"] is None


@pytest.mark.parametrize("noise", ["none", "paper_eq3"])
def test_without_clipping_there_is_no_guarantee(noise: str):
    server = run_rounds(FedDPGAN(**QUICK, noise=noise), 1)
    told = {entry["released"]: entry["epsilon"] for entry in server.ledger.account(1e-5)["entries"]}
    assert told["Own.generator"] is told["Own.critic"] is None


@pytest.mark.parametrize(
    "value", [{"local": "fedprox:mu=0.5"}, {"local": "moon:contrast=latent,mu=2"}, {"aggregation": "fednova"}]
)
def test_on_top_of_others(value: dict[str, str]):
    alone, composed = (run_rounds(FedDPGAN(**QUICK, **extra), 2) for extra in ({}, value))
    assert composed.lost == []
    name = "classifier.weight"
    assert not torch.equal(composed.state.weights[name], alone.state.weights[name])


def test_a_moving_average_has_no_place():
    with refused("gan_average", "0.9", "feddpgan"):
        run_rounds(FedDPGAN(**QUICK, gan_average=0.9), 1)


def test_stopped_between_two_exchanges_it_goes_on_with_the_same_bits(tmp_path: Path):
    options = {
        **TINY_GAN, "clients": 4, "rounds": 2, "data_fraction": 0.2, "participation": 0.6, "images_per_class": 2,
        "local_epochs": 1,
    }  # fmt: skip
    whole = fedfill.run("feddpgan", **options, workers=1, out=tmp_path / "whole")

    def stop(record: dict[str, Any], rounds: int) -> None:
        if record.get("step") == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedfill.run("feddpgan", **options, workers=2, out=tmp_path / "stopped", on_round=stop)
    again = fedfill.resume(tmp_path / "stopped", workers=2)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert [record["step"] for record in again.summary["preparation"]] == [1, 2]
    assert again.summary["bytes_by_handler"] == whole.summary["bytes_by_handler"]
