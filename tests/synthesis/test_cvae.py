"""Conditional VAEs: sizes, the loss by hand, codes, whom a mixture asks, decoders in evaluation mode, DP-SGD, distillation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from tests.helpers import bars, refused
from torch.func import functional_call, grad, vmap

from fedfill.data.samples import Batch, Samples, normalise
from fedfill.privacy import accountant
from fedfill.privacy.dpsgd import noisy_sum
from fedfill.privacy.keyed import KeyedStream, seeded
from fedfill.synthesis import cvae
from fedfill.synthesis.cvae import Drawn, Mixture, Privacy
from fedfill.synthesis.cvae_networks import (
    CVAE,
    CVAESettings,
    Decoder,
    decoder_of,
    loaded,
    negative_elbo,
    pixel_loss,
    require_images,
    start,
)
from fedfill.tree import Weights

SMALL = CVAESettings((1, 8, 8), 4, latent=3)
CPU = torch.device("cpu")


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mini_batches(data: Samples, epochs: int, size: int = 16) -> list[Batch]:
    order, found = stream(5), []
    for _ in range(epochs):
        for index in torch.randperm(len(data), generator=order).split(size):
            found.append(Batch(normalise(data.inputs[index]), data.labels[index], index))
    return found


def constant(level: float, settings: CVAESettings = SMALL) -> Weights:
    """A decoder whose pixels are all sigmoid(level)."""
    weights = {name: torch.zeros_like(x) for name, x in decoder_of(start(settings, stream())).items()}
    last = max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    weights[f"layers.{last}.bias"] += level
    return {name: torch.ones_like(x) if name.endswith("running_var") else x for name, x in weights.items()}


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (1, 20, 33), (3, 16, 48)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_images_have_the_shape_of_the_data_whatever_it_is(shape: tuple[int, ...], norm: Any) -> None:
    settings = CVAESettings(shape, 4, 3, norm)
    model = loaded(CVAE, settings, start(settings, stream()), CPU)
    onehot = torch.eye(4)[:2]
    logits, mean, logvar = model(torch.rand(2, *shape), onehot, torch.zeros(2, 3))
    assert logits.shape == (2, *shape)
    assert mean.shape == logvar.shape == (2, 3)


def test_the_papers_decoder_has_120961_parameters() -> None:
    settings = CVAESettings((1, 28, 28), 10)
    decoder = loaded(Decoder, settings, decoder_of(start(settings, stream())), CPU)
    assert sum(p.numel() for p in decoder.parameters()) == 120_961
    names = [type(m).__name__ for m in decoder.modules()]
    assert (names.count("ConvTranspose2d"), names.count("BatchNorm2d"), names.count("Linear")) == (4, 3, 1)


def test_the_start_follows_from_its_stream_alone() -> None:
    torch.manual_seed(1)
    one = start(SMALL, stream(3))
    torch.manual_seed(2)
    again, other = start(SMALL, stream(3)), start(SMALL, stream(4))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["encoder.head.weight"], other["encoder.head.weight"])
    assert float(one["encoder.head.weight"].abs().max()) <= 1 / math.sqrt(one["encoder.head.weight"].shape[1])


def test_the_loss_by_hand() -> None:
    # two pixels of logit 0 cost log 2 each, whatever they are; KL is (1 + 1 - 1 - 0) / 2 and (0 + 4 - 1 - log 4) / 2
    logits, images = torch.zeros(1, 1, 1, 2), torch.tensor([[[[1.0, 0.25]]]])
    mean, logvar = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, math.log(4)]])
    divergence = 0.5 + (3 - math.log(4)) / 2
    for beta in (0.0, 1.0, 2.5):
        found = negative_elbo(logits, images, mean, logvar, beta)
        assert found.tolist() == pytest.approx([2 * math.log(2) + beta * divergence])


def test_pixels_are_summed_and_the_sigmoid_is_applied_once() -> None:
    images = torch.tensor([0.0, 1.0, 1.0, 0.5]).view(1, 1, 2, 2)
    logits = torch.tensor([-30.0, 30.0, 0.0, math.log(3)]).view(1, 1, 2, 2)
    # nothing, nothing, log 2, and -(log .75 + log .25) / 2; a sigmoid too many would cost log(1 + 1/e) where there is nothing
    by_hand = math.log(2) - 0.5 * (math.log(0.75) + math.log(0.25))
    assert pixel_loss(logits, images).tolist() == pytest.approx([by_hand])


def test_training_is_one_step_of_adam_by_hand() -> None:
    data = bars(6, [0, 1], 0)
    begin = start(SMALL, stream())
    (batch,) = mini_batches(data, 1)
    found = cvae.train(begin, [batch], SMALL, 0.01, 0.5, stream(7))
    model = loaded(CVAE, SMALL, begin, CPU)
    images, onehot = data.inputs[batch.index].float() / 255, torch.eye(4)[batch.labels]
    logits, mean, logvar = model(images, onehot, torch.randn(6, 3, generator=stream(7)))
    pixels = -(images * logits.sigmoid().log() + (1 - images) * (-logits).sigmoid().log()).sum((1, 2, 3))
    divergence = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum(1)
    (pixels + 0.5 * divergence).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        clear = parameter.grad.abs() > 1e-4  # where Adam's first step is the learning rate
        moved = (found[name] - begin[name])[clear]
        torch.testing.assert_close(moved, -0.01 * parameter.grad.sign()[clear], rtol=0.01, atol=1e-6)


def test_it_learns_to_draw_what_it_is_asked_for_and_only_its_images_are_in_evaluation_mode() -> None:
    data = bars(200, [0, 2], 0)
    trained = decoder_of(cvae.train(start(SMALL, stream()), mini_batches(data, 25), SMALL, 3e-3, 1.0, stream()))
    mixture = Mixture([trained], torch.tensor([[100, 0, 100, 0]]))
    drawn = cvae.decode(mixture, torch.tensor([[30, 0, 30, 0]]), SMALL, 2.0, stream()).samples
    assert drawn.labels.tolist() == [0] * 30 + [2] * 30
    rows = drawn.inputs.float().mean((1, 3))  # [n, 8]
    assert set(rows.argmax(1).div(2, rounding_mode="floor")[:30].tolist()) == {0}
    assert set(rows.argmax(1).div(2, rounding_mode="floor")[30:].tolist()) == {2}
    # as many others as there may be beside it, an image is the same: no statistics of the batch
    fewer = cvae.decode(mixture, torch.tensor([[5, 0, 0, 0]]), SMALL, 2.0, stream()).samples
    assert torch.equal(fewer.inputs, drawn.inputs[:5])
    # and the running statistics that came with it are those that are used
    shifted = {name: x + 3.0 if name.endswith("running_mean") else x for name, x in trained.items()}
    other = cvae.decode(Mixture([shifted], mixture.counts), torch.tensor([[5, 0, 0, 0]]), SMALL, 2.0, stream())
    assert not torch.equal(other.samples.inputs, fewer.inputs)


@pytest.mark.parametrize(("width", "variance"), [(1.0, 0.2911), (2.0, 0.7737), (3.0, 0.9733)])
def test_truncated_codes_have_the_variance_of_theirs_and_stay_within(width: float, variance: float) -> None:
    codes = cvae.truncated_normal(20_000, 5, width, stream())
    assert codes.shape == (20_000, 5)
    assert float(codes.abs().max()) <= width
    assert float(codes.var()) == pytest.approx(variance, rel=0.02)
    assert variance == pytest.approx(float(stats.truncnorm(-width, width).var()), abs=1e-4)
    assert abs(float(codes.mean())) < 0.01
    # the whole distribution, and not its variance alone
    assert stats.kstest(codes.flatten()[:20_000].numpy(), stats.truncnorm(-width, width).cdf).pvalue > 1e-3


COUNTS = torch.tensor([[30, 0, 10, 0], [0, 0, 30, 0], [10, 20, 0, 0]])


def test_a_decoder_makes_its_share_with_its_own_distribution_of_classes() -> None:
    found = cvae.allocate(COUNTS, 100_000, balanced=False, stream=stream())
    assert int(found.sum()) == 100_000
    torch.testing.assert_close(found / 1000, COUNTS.float(), rtol=0, atol=0.6)


def test_balanced_classes_are_divided_by_the_records_of_each() -> None:
    found = cvae.allocate(COUNTS, 30_001, balanced=True, stream=stream())
    assert found.sum(0).tolist() == [10_001, 10_000, 10_000, 0]
    torch.testing.assert_close(found[:, 0] / 10_001, torch.tensor([0.75, 0, 0.25]), rtol=0, atol=0.02)
    torch.testing.assert_close(found[:, 2] / 10_000, torch.tensor([0.25, 0.75, 0]), rtol=0, atol=0.02)


@pytest.mark.parametrize("balanced", [False, True])
def test_no_decoder_is_asked_for_what_it_does_not_hold(balanced: bool) -> None:
    draws = stream()
    for n in (1, 3, 50):
        for _ in range(20):
            counts = torch.randint(0, 3, (4, 4), generator=draws) * torch.randint(0, 2, (4, 4), generator=draws)
            counts[0, 0] = 1
            found = cvae.allocate(counts, n, balanced, draws)
            assert int(found.sum()) == n
            assert not found[counts == 0].any()
    with pytest.raises(ValueError, match="never seen"):
        cvae.decode(Mixture([constant(0.0)], COUNTS[:1]), torch.tensor([[1, 1, 0, 0]]), SMALL, 2.0, stream())


def test_images_come_from_the_decoder_that_was_asked() -> None:
    mixture = Mixture([constant(-5.0), constant(0.0), constant(5.0)], COUNTS)
    wanted = torch.tensor([[2, 0, 1, 0], [0, 0, 3, 0], [1, 1, 0, 0]])
    drawn = cvae.decode(mixture, wanted, SMALL, 2.0, stream())
    assert drawn.samples.labels.tolist() == [0, 0, 2, 2, 2, 2, 0, 1]
    levels = [2, 2, 2, 128, 128, 128, 253, 253]  # 255 sigmoid(-5), of 0 and of 5
    assert drawn.samples.inputs.float().mean((1, 2, 3)).tolist() == pytest.approx(levels, abs=0.51)
    assert drawn.samples.inputs.dtype == torch.uint8
    assert drawn.codes.shape == (8, 3)


def test_a_server_decoder_learns_what_the_others_make_of_a_code() -> None:
    data = bars(120, [0, 1, 2, 3], 0)
    teacher = decoder_of(cvae.train(start(SMALL, stream()), mini_batches(data, 10), SMALL, 3e-3, 1.0, stream()))
    mixture = Mixture([teacher], torch.full((1, 4), 30))
    drawn = cvae.decode(mixture, torch.full((1, 4), 50), SMALL, 2.0, stream())
    begin = decoder_of(start(SMALL, stream(9)))
    taught = cvae.distil(begin, drawn, SMALL, 10, 32, 0.01, stream(1))
    again = cvae.distil(begin, drawn, SMALL, 10, 32, 0.01, stream(1))
    assert all(torch.equal(taught[name], again[name]) for name in taught)

    def distance(decoder: Weights) -> float:
        made = cvae.decode(Mixture([decoder], mixture.counts), torch.full((1, 4), 50), SMALL, 2.0, stream())
        assert torch.equal(made.codes, drawn.codes)  # the same codes and classes
        return float((made.samples.inputs.float() - drawn.samples.inputs.float()).abs().mean())

    assert distance(teacher) == 0
    assert distance(taught) < 0.25 * distance(begin)


def test_without_epochs_a_server_decoder_stays_where_it_starts() -> None:
    begin = decoder_of(start(SMALL, stream()))
    drawn = Drawn(torch.zeros(4, 3), bars(4, [0], 0))
    assert all(
        torch.equal(x, begin[name]) for name, x in cvae.distil(begin, drawn, SMALL, 0, 2, 0.01, stream()).items()
    )


GROUP = CVAESettings((1, 8, 8), 4, latent=3, norm="group")


def test_with_group_norm_no_image_changes_what_is_clipped_of_another() -> None:
    model = loaded(CVAE, GROUP, start(GROUP, stream()), CPU)
    assert not any("running" in name for name in model.state_dict())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    data = bars(3, [0, 1, 2], 0)
    images, onehot, draws = data.inputs.float() / 255, torch.eye(4)[data.labels], torch.randn(3, 3, generator=stream())

    def total(weights: Weights, images: Any, onehot: Any, draws: Any) -> Any:
        logits, mean, logvar = functional_call(model, weights, (images, onehot, draws))
        return negative_elbo(logits, images, mean, logvar, 1.0).sum()

    def one(weights: Weights, image: Any, onehot: Any, draws: Any) -> Any:
        return total(weights, image[None], onehot[None], draws[None])

    each = vmap(grad(one), in_dims=(None, 0, 0, 0))(weights, images, onehot, draws)
    whole = grad(total)(weights, images, onehot, draws)
    for name, g in whole.items():
        torch.testing.assert_close(each[name].sum(0), g, rtol=1e-3, atol=1e-3)


def test_private_steps_are_clipped_noisy_and_divided_by_the_expected_number(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[tuple[int, Weights]] = []

    def spied(loss: Any, weights: Weights, batch: Any, clip: float, multiplier: float, noise: KeyedStream) -> Any:
        assert (clip, multiplier) == (0.5, 3.0)
        found = noisy_sum(loss, weights, batch, clip, multiplier, noise)
        sums.append((len(batch[0]), found))
        return found

    monkeypatch.setattr(cvae, "noisy_sum", spied)
    data = bars(40, [0, 1], 0)
    spent = Privacy(clip=0.5, probability=0.2, steps=12, multiplier=3.0)
    given = (start(GROUP, stream()), data, GROUP, 1e-3, 1.0, spent)
    checks: list[int] = []
    found = cvae.train_privately(*given, seeded(1), seeded(2), lambda: checks.append(1))
    sizes = [n for n, _ in sums]
    assert len(sums) == len(checks) == 12
    assert len(set(sizes)) > 1  # Poisson samples: their number is no secret-free constant
    # sums of 8 gradients no longer than .5 are at most 4 long; noise of std 1.5 on every one of all coordinates is what is seen
    numbers = torch.cat([x.flatten() for x in sums[0][1].values()])
    assert float(numbers.std()) == pytest.approx(1.5, rel=0.01)
    other = cvae.train_privately(*given, seeded(1), seeded(3))
    assert not torch.equal(other["decoder.head.weight"], found["decoder.head.weight"])
    sums.clear()
    nobody = cvae.train_privately(*given[:1], data, GROUP, 1e-3, 1.0, Privacy(0.5, 1e-9, 2, 3.0), seeded(1), seeded(2))
    assert [n for n, _ in sums] == [0, 0]  # an empty sample gets its noise too
    assert not torch.equal(nobody["decoder.head.weight"], given[0]["decoder.head.weight"])


@pytest.mark.parametrize(("epsilon", "probability", "steps"), [(1.0, 0.05, 60), (8.0, 0.2, 25), (3.0, 1.0, 10)])
def test_the_noise_is_the_least_that_keeps_both_releases_within_the_promise(
    epsilon: float, probability: float, steps: int
) -> None:
    mu = math.sqrt(0.02) / accountant.std_for(1.0, epsilon, 1e-5)
    noise = cvae.multiplier(epsilon, 1e-5, probability, steps, mu)
    assert accountant.added_epsilon(mu, ((noise, probability, steps),), 1e-5) <= epsilon
    assert accountant.added_epsilon(mu, ((0.99 * noise, probability, steps),), 1e-5) > epsilon
    # what the other release costs is small, and is not left out
    assert accountant.sampled_noise(epsilon, probability, steps, 1e-5) < noise < 1.1 * accountant.sampled_noise(
        epsilon, probability, steps, 1e-5
    )  # fmt: skip


def test_a_release_that_breaks_the_promise_alone_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="leaves nothing"):
        cvae.multiplier(1.0, 1e-5, 0.1, 10, 5.0)


def test_only_images_of_8_bits() -> None:
    require_images(torch.zeros(1, 3, 9, 7, dtype=torch.uint8), "fedcvae")
    for inputs in (torch.zeros(1, 1, 8, 8), torch.zeros(1, 30, dtype=torch.uint8)):
        with refused("data", "fedcvae", list(inputs.shape[1:])):
            require_images(inputs, "fedcvae")
