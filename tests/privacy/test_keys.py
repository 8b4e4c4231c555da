"""With a key of a host's own, neither the noise nor the coins that protect its client follow from the seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers import CLASSES, TINY_GAN, bars
from torch import nn

from fedfill.algorithms.feddpgan import FedDPGAN
from fedfill.algorithms.fedgan import Common
from fedfill.algorithms.sdafl import SDAFL, SDAFLAC, ImagesRequest, Pretrain
from fedfill.engines.runner import ClientRunner, make_resident
from fedfill.synthesis import gan


def common() -> Common:
    """A GAN to go on with, and for how long."""
    begin = gan.start((1, 8, 8), FedDPGAN(**TINY_GAN).gan(CLASSES), torch.Generator().manual_seed(0))
    return Common(begin.generator, begin.critic, 2)


@pytest.mark.parametrize(
    ("kind", "handler", "message"),
    [
        (SDAFL, "pretrain_gan", Pretrain(3)),
        (SDAFLAC, "pretrain_gan", Pretrain(3)),
        (SDAFL, "upload", ImagesRequest(2)),  # which makes up for a pre-training that was lost
        (FedDPGAN, "train_gan", common()),
    ],
    ids=["sdafl", "sdafl-ac", "sdafl's upload", "feddpgan"],
)
@pytest.mark.parametrize("noise", ["dpsgd", "paper_eq3"])
def test_noise_and_coins_of_a_gan_are_as_secret_as_the_key(
    kind: type[Any], handler: str, message: Any, noise: str, monkeypatch: pytest.MonkeyPatch
):
    given: list[list[int]] = []

    def spy(now: Any, data: Any, left: int, settings: Any, draws: Any, protection: Any, *rest: Any) -> Any:
        given.append([int(torch.randint(10**9, (1,), generator=draws)), int(protection.words(1)[0])])
        return now

    monkeypatch.setattr(gan, "train", spy)
    cpu, data = torch.device("cpu"), bars(40, [0, 1], 0)
    resident = make_resident(nn.Linear(1, 1), cpu)
    for key in (b"a" * 32, b"a" * 32, b"b" * 32, None):
        host = ClientRunner(kind(**TINY_GAN, noise=noise), classes=CLASSES, initial={}, seed=0, device=cpu, secret=key)
        outcome, _ = host.serve(resident, handler, 0, data, data[:0], None, message, -1)
        assert outcome.error is None
    (draws, protection), again, (other_draws, other_protection), (seeded_draws, seeded_protection) = given
    assert [draws, protection] == again
    assert len({protection, other_protection, seeded_protection, draws}) == 4
    # the latent noise, as much whatever was drawn, and a mini-batch that is no Poisson sample protect nothing: from the seed
    assert len({draws, other_draws, seeded_draws}) == 1
