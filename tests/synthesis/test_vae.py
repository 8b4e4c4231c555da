"""Variational auto-encoders: the loss by hand, means of latent codes, and the filter."""

import math

import pytest
import torch
from tests.helpers import bars
from torch import nn

from fedfill.data.samples import Batch, Samples
from fedfill.models.networks import ModelSettings, build
from fedfill.synthesis.vae import accepted_codes, class_means, decode, latent_size, vae_loss


class Fixed(nn.Module):
    """A model whose reconstruction, mean and logvar are given."""

    def __init__(self, images, mu, logvar):
        super().__init__()
        self.answer = images, mu, logvar

    def reconstruct(self, x):
        return torch.zeros(len(x), 2), *self.answer


def test_loss_by_hand():
    # two images of two pixels: -1 and 1 are 0 and 1 in the decoder's range
    batch = Batch(torch.tensor([[-1.0, 1.0], [-1.0, 1.0]]), torch.tensor([0, 1]), torch.arange(2))
    images = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    mu, logvar = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, math.log(2.0)], [0.0, 0.0]])
    # divergences of the first code: 1/2 * 1 and 1/2 * (2 - 1 - ln 2); of the second none
    divergence = 0.5 + 0.5 * (1 - math.log(2))
    model = Fixed(images, mu, logvar)

    def loss(**settings):
        return vae_loss(model, batch, **{"weight": 0.1, "reconstruction": "mse", "kl": "sum", **settings}).item()

    chance = math.log(2)  # two equal scores
    assert loss() == pytest.approx(chance + 0.1 * (divergence / 2 + 0.5 / 4))
    assert loss(kl="mean") == pytest.approx(chance + 0.1 * (divergence / 4 + 0.5 / 4))
    assert loss(reconstruction="mse_sum") == pytest.approx(chance + 0.1 * (divergence / 2 + 0.5 / 2))
    assert loss(reconstruction="bce_sum") == pytest.approx(chance + 0.1 * (divergence / 2 + 2 * math.log(2) / 2))
    assert loss(weight=0.0) == pytest.approx(chance)


def vae(**settings):
    return build("cnn2", (1, 8, 8), 4, ModelSettings(**settings), needs=("decoder",), seed=0).eval()


@pytest.mark.parametrize(
    "settings", [{"latent_activation": "sigmoid"}, {"latent_activation": "sigmoid", "width": "wide"}]
)
def test_means_are_vectors_of_real_data_in_evaluation_mode(settings):
    model, data = vae(**settings), bars(60, [0, 1, 2], seed=5)
    means = class_means(model, data, [2, 0], "sigmoid", 1.0)
    assert means.shape == (2, 16)
    assert means.min() >= 0
    assert means.max() <= 1
    assert torch.equal(means, class_means(model, data, [2, 0], "sigmoid", 1.0))
    with torch.no_grad():  # slow and obvious: one image at a time
        for row, label in zip(means, [2, 0], strict=True):
            codes = [
                model.encoder(x[None].float() / 127.5 - 1)[0]
                for x, y in zip(data.inputs, data.labels, strict=True)
                if y == label
            ]
            assert torch.allclose(row, torch.stack(codes).mean(0), atol=1e-6)


def test_one_record_moves_a_mean_by_no_more_than_the_sensitivity():
    model = vae(latent_activation="none")
    data = bars(20, [0], seed=1)
    other = Samples(data.inputs.clone(), data.labels)
    other.inputs[3] = 255 - other.inputs[3]
    a, b = (class_means(model, d, [0], "clip", 0.5)[0] for d in (data, other))
    assert 0 < (a - b).norm() <= 2 * 0.5 / 20
    assert class_means(model, data, [0], "clip", 0.5)[0].norm() <= 0.5 + 1e-6


def test_sigmoid_bound_holds_whatever_the_encoder_gives():
    model, data = vae(latent_activation="none"), bars(8, [0], seed=1)
    with torch.no_grad():
        model.encoder.mu.bias += 5
    assert class_means(model, data, [0], "none", 1.0).max() > 1
    assert class_means(model, data, [0], "sigmoid", 1.0).max() <= 1


def test_mean_of_a_missing_class_is_an_error():
    with pytest.raises(ValueError, match="class 3"):
        class_means(vae(), bars(8, [0], seed=1), [3], "sigmoid", 1.0)


class Sign(nn.Module):
    """Decodes a code to one pixel, and sees class 1 in bright ones."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Sequential(nn.Sigmoid(), nn.Unflatten(1, (1, 1, 1)))

    def forward(self, x):
        bright = x.flatten(1)
        return torch.cat([-bright, bright], 1)


def draw(**settings):
    options = {"quota": 10, "candidates": 1000, "exhaust": False, "generator": torch.Generator().manual_seed(0)}
    return accepted_codes(Sign(), torch.zeros(1), 1.0, 1, **{**options, **settings})


def test_filter_keeps_only_what_is_recognised_and_stops_at_the_quota():
    codes, drawn = draw()
    assert codes.shape == (10, 1)
    assert (codes > 0).all()
    assert 10 <= drawn < 60  # about every second draw is bright, and draws behind the last one taken do not count


@pytest.mark.parametrize(
    ("centre", "candidates", "drawn"), [(-3.2, 730, 730), (-50.0, 20_000, 2000), (-50.0, 730, 730)]
)
def test_filter_gives_up_at_the_bound_or_where_nothing_comes(centre, candidates, drawn):
    generator = torch.Generator().manual_seed(0)
    quota = 100 if candidates == 20_000 else 10
    codes, tried = accepted_codes(
        Sign(), torch.tensor([centre]), 1.0, 1, quota=quota, candidates=candidates, exhaust=False, generator=generator
    )
    assert len(codes) < quota
    assert tried == drawn


def test_exhausting_filter_draws_all_whatever_it_accepts():
    assert draw(exhaust=True)[1] == 1000


def test_accepted_share_and_spread_are_those_of_the_half_normal_law():
    codes, drawn = draw(quota=20_000, candidates=20_000)
    assert drawn == 20_000
    assert len(codes) / drawn == pytest.approx(0.5, abs=0.02)
    assert codes.mean().item() == pytest.approx(math.sqrt(2 / math.pi), abs=0.02)


def test_decoded_images_are_stored_in_eight_bits():
    model = vae()
    images = decode(model, torch.zeros(3, 16))
    assert images.dtype == torch.uint8
    assert images.shape == (3, 1, 8, 8)
    assert torch.allclose(images / 255, model.decoder(torch.zeros(3, 16)), atol=0.5 / 255 + 1e-6)
    assert decode(model, torch.zeros(0, 16)).shape == (0, 1, 8, 8)


def test_latent_size():
    assert latent_size(vae(latent=7), bars(3, [0], seed=0)) == 7
