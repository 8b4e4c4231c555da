"""FedVAE: the whole auto-encoder, every round."""

import torch
from tests.helpers import bars, run_rounds

from fedfill.algorithms.fedvae import FedVAE
from fedfill.data.samples import Batch, normalise
from fedfill.models.layers import draws_from
from fedfill.models.networks import ModelSettings, build
from fedfill.synthesis.vae import vae_loss


def test_its_loss_is_feddpms_preliminary_loss():
    model = build("cnn2", (1, 8, 8), 4, ModelSettings(), needs=("decoder",), seed=0)
    data = bars(8, [0, 1], 0)
    batch = Batch(normalise(data.inputs), data.labels, torch.arange(8))
    losses = []
    for loss in (
        lambda: FedVAE(vae_weight=0.3, reconstruction="bce_sum", kl="mean").loss(model, batch, None),
        lambda: vae_loss(model, batch, weight=0.3, reconstruction="bce_sum", kl="mean"),
    ):
        with draws_from(model, torch.Generator().manual_seed(3)):
            losses.append(loss().item())
    assert losses[0] == losses[1]


def test_the_decoder_travels_and_is_averaged_in_every_round():
    server = run_rounds(FedVAE(local_epochs=1, batch_size=8), rounds=2)
    changed = [n for n, t in server.initial.items() if not torch.equal(t, server.state.weights[n])]
    assert any(name.startswith("decoder") for name in changed)
    model = sum(t.numel() * t.element_size() for t in server.initial.values())
    assert server.costs.legs["train"][0] == 2 * 4 * model
