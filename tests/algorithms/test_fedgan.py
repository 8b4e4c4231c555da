"""FedGAN: the weighted mean of the clients' GANs by hand, one client alone, and where it is FedDPGAN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import CLASSES, TINY_GAN, Run, bars, prepare, refused, run_rounds, scripted, small_federation

import fedfill
from fedfill.algorithms.feddpgan import FedDPGAN
from fedfill.algorithms.fedgan import FedGAN, Own
from fedfill.privacy.keyed import seeded
from fedfill.protocol.client import State
from fedfill.streams import torch_stream
from fedfill.synthesis import gan
from fedfill.synthesis.gan import GAN
from fedfill.tree import Weights

QUICK: dict[str, Any] = {
    **TINY_GAN, "images_per_class": 2, "local_epochs": 1, "batch_size": 8, "learning_rate": 0.01,
}  # fmt: skip


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize(("weighting", "mean"), [("samples", (10 * 1 + 30 * 2) / 40), ("uniform", 1.5)])
def test_the_common_gan_is_the_mean_by_hand(weighting: Any, mean: float):
    """Of 10 and of 30 images; the clients add 1 and 2 to what they were sent."""
    algorithm, (server, engine) = FedGAN(**QUICK, gan_weighting=weighting), scripted(2, {"w": torch.zeros(2)})
    server.state = State(algorithm.server_state(server.initial))

    def train(i: int, message: Any, t: int) -> Own:
        more = [
            {name: x + i + 1 if x.is_floating_point() else x for name, x in tensors.items()}
            for tensors in (message.generator, message.critic)
        ]
        return Own(*more, (10, 30)[i] if weighting == "samples" else None)

    engine.script["train_gan"] = train
    prepare(algorithm, server)
    sent = [message for _, _, i, message in engine.sent if i == 0]
    assert [message.iterations for message in sent] == [2, 1]
    for part in ("generator", "critic"):
        for name, x in getattr(sent[0], part).items():
            if x.is_floating_point():
                torch.testing.assert_close(getattr(server.state.gan, part)[name], x + 2 * mean)


@pytest.mark.parametrize("chunk", [3, 2])
def test_one_client_alone_trains_its_gan_with_fresh_optimizers_in_each_exchange(chunk: int):
    algorithm = FedGAN(**{**QUICK, "gan_chunk": chunk})
    run = Run(algorithm, {}, 1, 1.0, 1, small_federation(clients=1, per_client=4))
    run.server.clients = 1
    prepare(run.algorithm, run.server)
    run.engine.close()

    settings, data, steps = algorithm.gan(CLASSES), bars(40, [0, 1, 2, 3], seed=0), algorithm.pretraining_steps()
    now = gan.start((1, 8, 8), settings, torch_stream(0, "server", "gan start", -steps))
    for step in range(steps):
        fresh = GAN(now.generator, now.critic, None, None, now.iterations)
        left = min(chunk, 3 - now.iterations)
        now = gan.train(fresh, data, left, settings, torch_stream(0, "gan", step - steps, 0), seeded(0, "none"))
    assert run.server.state.gan.iterations == now.iterations == 3
    assert equal(run.server.state.gan.generator, now.generator)
    assert equal(run.server.state.gan.critic, now.critic)


def test_with_equal_weights_it_is_feddpgan_without_noise_to_the_bit():
    one, other = (
        run_rounds(algorithm, 2) for algorithm in (FedGAN(**QUICK, gan_weighting="uniform"), FedDPGAN(**QUICK))
    )
    assert equal(one.state.gan.generator, other.state.gan.generator)
    assert equal(one.state.weights, other.state.weights)
    assert one.costs.legs == other.costs.legs


def test_clients_that_hold_more_move_the_common_gan_more():
    """Clients of one size: by samples is the plain mean."""
    by_samples, uniform = (run_rounds(FedGAN(**QUICK, gan_weighting=w), 1) for w in ("samples", "uniform"))
    assert equal(by_samples.state.gan.critic, uniform.state.gan.critic)
    federation = small_federation()
    first = replace(federation.clients[0], train=federation.clients[0].train[:4])
    fewer = replace(federation, clients=(first, *federation.clients[1:]))
    by_samples, uniform = (
        run_rounds(FedGAN(**QUICK, gan_weighting=w), 1, federation=fewer) for w in ("samples", "uniform")
    )
    assert not equal(by_samples.state.gan.critic, uniform.state.gan.critic)


def test_nothing_has_a_guarantee_and_no_setting_promises_one(tmp_path: Path):
    server = run_rounds(FedGAN(**QUICK), 1)
    account = server.ledger.account(1e-5)
    told = {entry["released"]: entry["epsilon"] for entry in account["entries"]}
    assert told["Own.generator"] is told["Own.critic"] is told["Own.samples"] is account["total_epsilon"] is None
    for setting, value in (("noise", "dpsgd"), ("target_epsilon", 1.0), ("clip", 1.0)):
        with refused("setting", "fedgan", setting):
            fedfill.run("fedgan", **{setting: value}, out=tmp_path)
    with refused("gan_average", "0.9", "fedgan"):
        run_rounds(FedGAN(**QUICK, gan_average=0.9), 1)


def test_one_sample_of_one_class_is_enough_to_take_part():
    federation = small_federation(samples=1, per_client=1)
    server = run_rounds(FedGAN(**QUICK), 1, federation=federation)
    assert server.lost == []
    assert all(bool(x.isfinite().all()) for x in server.state.gan.critic.values())


def test_stopped_between_two_exchanges_it_goes_on_with_the_same_bits(tmp_path: Path):
    options = {
        **TINY_GAN, "clients": 4, "rounds": 2, "data_fraction": 0.2, "participation": 0.6, "images_per_class": 2,
        "local_epochs": 1,
    }  # fmt: skip
    whole = fedfill.run("fedgan", **options, workers=1, out=tmp_path / "whole")

    def stop(record: dict[str, Any], rounds: int) -> None:
        if record.get("step") == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedfill.run("fedgan", **options, workers=2, out=tmp_path / "stopped", on_round=stop)
    again = fedfill.resume(tmp_path / "stopped", workers=2)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert again.summary["bytes_by_handler"] == whole.summary["bytes_by_handler"]
