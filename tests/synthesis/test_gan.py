"""Wasserstein GANs: shapes, the penalty by hand, going on after a stop, privacy of the critic's steps."""

import dataclasses
import math

import pytest
import torch
from pydantic import ValidationError
from tests.helpers import refused

from fedfill.data.samples import Samples
from fedfill.privacy.accountant import sampled_epsilon
from fedfill.privacy.keyed import seeded
from fedfill.privacy.ledger import Ledger
from fedfill.synthesis import gan, gan_networks
from fedfill.synthesis.gan_networks import Critic, GANSettings, Generator
from fedfill.synthesis.gan_options import NoisyGANOptions
from fedfill.tree import from_bytes, to_bytes

SMALL = GANSettings(latent=5, width=4, batch_size=8, critic_steps=2, learning_rate=1e-3)


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def blobs(n=40, side=8, channels=1):
    """Bright images with a dark half, by class."""
    labels = torch.arange(n) % 2
    inputs = torch.full((n, channels, side, side), 220, dtype=torch.uint8)
    inputs[labels == 0, :, : side // 2] = 20
    inputs[labels == 1, :, side // 2 :] = 20
    return Samples(inputs, labels)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 12, 12), (1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 20, 20)])
@pytest.mark.parametrize("classes", [0, 3])
def test_shapes(shape, classes):
    settings = dataclasses.replace(SMALL, classes=classes)
    labels = torch.tensor([0, 1]) if classes else None
    images = Generator(shape, settings)(torch.randn(2, 5, generator=stream()), labels)
    assert images.shape == (2, *shape)
    assert images.abs().max() <= 1
    scores, logits = Critic(shape, settings)(images)
    assert scores.shape == (2,)
    assert logits.shape == (2, classes)


def test_four_transposed_convolutions_four_convolutions_and_a_linear_layer():
    settings = GANSettings()
    kinds = [type(m).__name__ for m in Generator((1, 28, 28), settings).modules()]
    assert kinds.count("ConvTranspose2d") == 4
    kinds = [type(m).__name__ for m in Critic((1, 28, 28), settings).modules()]
    assert (kinds.count("Conv2d"), kinds.count("Linear")) == (4, 1)
    assert not any("Norm" in kind for kind in kinds)


def test_the_penalty_by_hand():
    # the slope of 3 x0 + 4 x1 is 5 everywhere: (5 - 1)^2; of x0^2 it is 2 x0 in the point between
    real, fake = torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 0.0]])
    flat = gan_networks.gradient_penalty(lambda x: x @ torch.tensor([3.0, 4.0]), real, fake, torch.tensor([0.5]))
    assert flat.item() == pytest.approx(16.0)
    curved = gan_networks.gradient_penalty(lambda x: x[:, 0].square(), real, fake, torch.tensor([0.75]))
    assert curved.item() == pytest.approx((2 * 1.5 - 1) ** 2)  # 0.75 * 1 + 0.25 * 3 = 1.5


def test_it_learns_what_the_data_look_like_with_a_slope_near_1():
    settings = dataclasses.replace(SMALL, width=8, learning_rate=5e-3)
    data = blobs()
    begin = gan.start((1, 8, 8), settings, stream())
    trained = gan.train(begin, data, 200, settings, stream(1), seeded(2))
    made = gan.generate(trained, 64, data, settings, stream(3))
    bright = made.float() / 255
    halves = torch.stack([bright[:, :, :4].mean((1, 2, 3)), bright[:, :, 4:].mean((1, 2, 3))], 1)  # [n, 2]
    # one half bright and the other dark, as in every real image, and now the one and now the other
    assert float((halves.max(1).values - halves.min(1).values).median()) > 0.5
    assert 0.2 < float((halves[:, 0] > halves[:, 1]).float().mean()) < 0.8
    penalties = []
    for weights in (begin.critic, trained.critic):
        critic = Critic((1, 8, 8), settings)
        critic.load_state_dict(weights)
        real, fake = data.inputs[:32] / 127.5 - 1, made[:32] / 127.5 - 1
        slope = gan_networks.gradient_penalty(lambda x, critic=critic: critic(x)[0], real, fake, torch.full((32,), 0.5))
        penalties.append(slope.mean().item())
    # with the sign of the paper's equation 1 it would run away
    assert penalties[1] < 0.4 < 0.9 < penalties[0]


def test_an_auxiliary_classifier_makes_the_wanted_class():
    settings = dataclasses.replace(SMALL, width=8, learning_rate=2e-3, classes=2)
    data = blobs()
    trained = gan.train(gan.start((1, 8, 8), settings, stream()), data, 150, settings, stream(1), seeded(2))
    labels = torch.tensor([0, 1]).repeat_interleave(20)
    made = gan.generate(trained, labels, data, settings, stream(3)).float()
    top_is_dark = made[:, :, :4].mean((1, 2, 3)) < made[:, :, 4:].mean((1, 2, 3))
    assert float((top_is_dark == (labels == 0)).float().mean()) > 0.9


def test_the_generator_is_asked_for_the_wanted_classes_alone():
    settings = dataclasses.replace(SMALL, classes=5)
    for wanted, expected in (([3, 1], {1, 3}), (None, {0, 1, 2, 3, 4}), ([4], {4})):
        _, labels = gan._Draws(stream(), seeded(0), settings, torch.device("cpu"), wanted).latent(200)
        assert set(labels.tolist()) == expected
    assert gan._Draws(stream(), seeded(0), SMALL, torch.device("cpu")).latent(2)[1] is None


@pytest.mark.parametrize("change", [{}, {"average": 0.9}, {"noise": "dpsgd"}, {"noise": "paper_eq3"}, {"classes": 2}])
def test_it_goes_on_where_it_stopped(change):
    settings = dataclasses.replace(SMALL, **change)
    data, begin = blobs(), gan.start((1, 8, 8), settings, stream())
    at_once = gan.train(begin, data, 4, settings, (draws := stream(1)), (noise := seeded(2)), 1.0)
    draws, noise = stream(1), seeded(2)
    half = gan.train(begin, data, 2, settings, draws, noise, 1.0)
    half = from_bytes(to_bytes(half))
    whole = gan.train(half, data, 2, settings, draws, noise, 1.0)
    assert whole.iterations == at_once.iterations == 4
    for part in ("generator", "critic"):
        for name, tensor in getattr(at_once, part).items():
            assert torch.equal(tensor, getattr(whole, part)[name]), (part, name)
    assert (at_once.averaged is None) == ("average" not in change)


def test_the_moving_average_by_hand_and_it_makes_the_images():
    settings = dataclasses.replace(SMALL, average=0.9)
    data, begin = blobs(), gan.start((1, 8, 8), settings, stream())
    trained = gan.train(begin, data, 1, settings, stream(1), seeded(2))
    moved = 0.0
    for name, tensor in trained.averaged.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, 0.9 * begin.generator[name] + 0.1 * trained.generator[name])
            moved = max(moved, float((trained.generator[name] - begin.generator[name]).abs().max()))
    assert moved > 1e-4

    def images(trained):
        floats = Samples(data.inputs / 127.5 - 1, data.labels)  # in bytes an untrained generator makes one grey
        return gan.generate(trained, 4, floats, settings, stream(3))

    without = dataclasses.replace(trained, averaged=None)
    assert not torch.equal(images(trained), images(without))
    assert torch.equal(images(trained), images(dataclasses.replace(without, generator=trained.averaged)))


def test_what_raises_ends_the_training():
    def check():
        raise TimeoutError

    with pytest.raises(TimeoutError):
        gan.train(gan.start((1, 8, 8), SMALL, stream()), blobs(), 5, SMALL, stream(1), seeded(2), check=check)


@pytest.mark.parametrize("classes", [0, 2])
def test_without_clipping_and_noise_dpsgd_is_the_plain_gradient(classes):
    """Every image in every batch, a clip that never clips and noise that is nothing: the gradient of the plain loss."""
    data = blobs(8)
    private = dataclasses.replace(SMALL, noise="dpsgd", clip=1e9, batch_size=8, classes=classes)
    generator, critic = Generator((1, 8, 8), private), Critic((1, 8, 8), private)
    begin = gan.start((1, 8, 8), private, stream())
    generator.load_state_dict(begin.generator)
    critic.load_state_dict(begin.critic)

    class InOrder(gan._Draws):
        def batch(self, n):
            return torch.arange(n)

        def partners(self, b):
            return torch.arange(b)

        def share(self, b):
            return torch.linspace(0.1, 0.9, b)

    found = []
    for settings in (private, dataclasses.replace(private, noise="none")):
        draws = InOrder(stream(1), seeded(1), settings, torch.device("cpu"))
        gan._step_critic(critic, generator, data, settings, draws, seeded(2), 1e-15)
        found.append([p.grad.clone() for p in critic.parameters()])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


class Bright(torch.nn.Module):
    """A critic that likes bright images: its score is w times the mean."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))

    def forward(self, images):
        return self.w * images.mean((1, 2, 3)), images.new_zeros(len(images), 0)


@pytest.mark.parametrize(("clip", "expected"), [(100.0, -6 / 8), (0.5, -1.5 / 8)])
def test_a_private_step_is_divided_by_the_expected_batch_and_not_by_the_one_at_hand(clip, expected):
    """Three images of 1 and fakes of -1: each has the gradient -2, and eight of 40 images are expected."""
    settings = dataclasses.replace(SMALL, noise="dpsgd", clip=clip, penalty=0.0, batch_size=8)
    data = Samples(torch.full((40, 1, 8, 8), 255, dtype=torch.uint8), torch.zeros(40, dtype=torch.int64))

    class Three(gan._Draws):
        def batch(self, n):
            return torch.tensor([4, 17, 30])

    critic, draws = Bright(), Three(stream(1), seeded(1), settings, torch.device("cpu"))
    gan._step_critic(
        critic, lambda z, labels: torch.full((len(z), 1, 8, 8), -1.0), data, settings, draws, seeded(2), 1e-15
    )
    assert critic.w.grad.item() == pytest.approx(expected, rel=1e-5)


class Nobody(gan._Draws):
    def batch(self, n):
        return torch.arange(0)


@pytest.mark.parametrize("kind", [gan._Draws, Nobody])
def test_the_noise_of_a_private_step_by_hand(kind):
    """3 times the clip of 0.1, on a sum that is divided by the expected 8 of 40 images; where nobody was drawn, too."""
    settings = dataclasses.replace(SMALL, noise="dpsgd", clip=0.1, batch_size=8)
    found = []
    for multiplier in (3.0, 1e-15):
        generator, critic = Generator((1, 28, 28), settings), Critic((1, 28, 28), settings)
        begin = gan.start((1, 28, 28), settings, stream())
        generator.load_state_dict(begin.generator)
        critic.load_state_dict(begin.critic)
        draws = kind(stream(1), seeded(1), settings, torch.device("cpu"))
        gan._step_critic(critic, generator, blobs(40, 28), settings, draws, seeded(2), multiplier)
        found.append(torch.cat([p.grad.flatten() for p in critic.parameters()]))
    noise = found[0] - found[1]
    assert len(noise) > 5000
    assert float(noise.std()) == pytest.approx(0.0375, rel=0.05)
    assert abs(float(noise.mean())) < 0.002


def test_with_dpsgd_each_image_is_in_a_batch_by_a_coin_of_its_own():
    settings = dataclasses.replace(SMALL, noise="dpsgd", batch_size=8)
    draws = gan._Draws(stream(), seeded(0), settings, torch.device("cpu"))
    batches = [draws.batch(40) for _ in range(400)]
    sizes = torch.tensor([len(batch) for batch in batches], dtype=torch.float64)
    # binomial: 40 * 0.2, and 40 * 0.2 * 0.8
    assert float(sizes.mean()) == pytest.approx(8, abs=0.5)
    assert float(sizes.var()) == pytest.approx(6.4, rel=0.25)
    times = torch.bincount(torch.cat(batches), minlength=40)
    assert 45 < int(times.min()) <= int(times.max()) < 115  # 400 * 0.2, with a deviation of 8
    plain = gan._Draws(stream(), seeded(0), SMALL, torch.device("cpu"))
    assert {len(plain.batch(40).unique()) for _ in range(20)} == {8}


def test_one_image_moves_a_private_step_by_no_more_than_the_clip():
    settings = dataclasses.replace(SMALL, noise="dpsgd", clip=0.1, batch_size=8)
    data = blobs(8)
    other = Samples(data.inputs.clone(), data.labels)
    other.inputs[3] = 255 - other.inputs[3]
    found = []
    for held in (data, other):
        generator, critic = Generator((1, 8, 8), settings), Critic((1, 8, 8), settings)
        begin = gan.start((1, 8, 8), settings, stream())
        generator.load_state_dict(begin.generator)
        critic.load_state_dict(begin.critic)
        draws = gan._Draws(stream(1), seeded(1), settings, torch.device("cpu"))
        gan._step_critic(critic, generator, held, settings, draws, seeded(2), 1e-12)
        found.append(torch.cat([p.grad.flatten() for p in critic.parameters()]))
    moved = float((found[0] - found[1]).norm())
    assert 0 < moved <= 2 * 0.1 / 8 * (1 + 1e-4)  # the sum moves by twice the clip, divided by the expected batch


@pytest.mark.parametrize("noise", ["none", "dpsgd"])
def test_the_penalty_holds_the_slope_with_clipping_too(noise):
    """The fake's score pulls the slope up and the penalty holds it: clipped apart from each other they lose balance."""
    settings = dataclasses.replace(
        SMALL, width=8, latent=20, batch_size=32, critic_steps=50, learning_rate=2e-3, noise=noise
    )
    data = blobs(64)
    trained = gan.train(gan.start((1, 8, 8), settings, stream()), data, 1, settings, stream(1), seeded(2), 1e-9)
    critic = Critic((1, 8, 8), settings)
    critic.load_state_dict(trained.critic)
    real, fake = data.inputs[:32] / 127.5 - 1, gan.generate(trained, 32, data, settings, stream(3)) / 127.5 - 1
    penalty = gan_networks.gradient_penalty(lambda x: critic(x)[0], real, fake, torch.full((32,), 0.5))
    assert penalty.mean() < 0.25  # a slope between 0.5 and 1.5; without clipping, and with it


def test_the_noise_of_equation_3_is_on_the_sum():
    found = []
    for noise in ("none", "paper_eq3"):
        settings = dataclasses.replace(SMALL, noise=noise, batch_size=8)
        generator, critic = Generator((1, 28, 28), settings), Critic((1, 28, 28), settings)
        begin = gan.start((1, 28, 28), settings, stream())
        generator.load_state_dict(begin.generator)
        critic.load_state_dict(begin.critic)
        draws = gan._Draws(stream(1), seeded(1), settings, torch.device("cpu"))
        gan._step_critic(critic, generator, blobs(40, 28), settings, draws, seeded(2), 0.0)
        found.append(torch.cat([p.grad.flatten() for p in critic.parameters()]))
    shaken = found[1] - found[0]
    assert len(shaken) > 5000
    assert float(shaken.std()) == pytest.approx(settings.paper_std(40) / 8, rel=0.05)


def test_equation_3_has_the_papers_figures():
    # MNIST: 6,000 images of a client, mini-batches of 64, 94 of them, epsilon 5
    settings = GANSettings(noise="paper_eq3", target_epsilon=5, delta=1e-5)
    q = 64 / 6000
    assert settings.paper_std(6000) == pytest.approx(2 * q / 5 * math.sqrt(94 * math.log(1e5)))
    assert settings.paper_std(6000) == pytest.approx(0.14, abs=0.005)


@pytest.mark.parametrize(
    ("samples", "iterations", "epsilon", "expected"),
    [(6000, 3600, 5, 1.54), (6000, 3600, 10, 1.01), (6000, 18_000, 5, 3.14), (6000, 18_000, 10, 1.86)],
)
def test_the_noise_that_is_really_needed(samples, iterations, epsilon, expected):
    """A little less than what Renyi accounting asks for, as distributions of the privacy loss are tighter."""
    settings = GANSettings(noise="dpsgd", target_epsilon=epsilon, delta=1e-5)
    found = settings.noise_multiplier(samples, iterations)
    assert 0.85 * expected < found <= expected * 1.01


def test_what_the_noise_of_equation_3_would_be_worth_with_clipping():
    """Its promise of epsilon 5 is off by three orders of magnitude, and without clipping there is no promise at all."""
    from fedfill.privacy.accountant import sampled_epsilon

    settings = GANSettings(noise="paper_eq3", target_epsilon=5, delta=1e-5)
    assert sampled_epsilon(settings.paper_std(6000), settings.probability(6000), 18_000, 1e-5) > 4e3


def test_releases():
    ledger = Ledger()
    settings = GANSettings(noise="dpsgd", target_epsilon=5)
    multiplier = settings.noise_multiplier(600, 10)
    ledger.add(0, "Images.inputs", gan.released("images", settings, 600, 10, multiplier))
    account = ledger.account(1e-5)
    assert 5 < account["total_epsilon"] < 12  # one image replaced counts as one removed and one added
    assert "epsilon 5 at delta 1e-05" in account["entries"][0]["mechanism"]
    for noise in ("none", "paper_eq3"):
        ledger = Ledger()
        ledger.add(0, "Images.inputs", gan.released("images", GANSettings(noise=noise), 600, 10, 0.0))
        assert ledger.account(1e-5)["total_epsilon"] is None
    assert "not private" in ledger.account(1e-5)["entries"][0]["mechanism"]


@pytest.mark.parametrize("shape", [(1, 64), (2, 8, 8), (1, 8, 12), (1, 6, 6), (1, 4, 4), (1, 30, 30)])
def test_what_no_gan_here_can_make(shape):
    with refused("data", "sdafl", list(shape)):
        gan_networks.require_images(torch.zeros(1, *shape), "sdafl")


def test_with_dpsgd_the_fakes_do_not_tell_how_many_real_images_were_drawn():
    """One fake more for one image more would move the batch norm of all fakes, which no clipping bounds."""
    settings = dataclasses.replace(SMALL, noise="dpsgd", batch_size=4)
    begin = gan.start((1, 8, 8), settings, stream())

    class All(gan._Draws):
        def batch(self, n):
            return torch.arange(n)

    states = []
    for n in (3, 4, 9):
        generator, critic = Generator((1, 8, 8), settings), Critic((1, 8, 8), settings)
        generator.load_state_dict(begin.generator)
        critic.load_state_dict(begin.critic)
        draws = All(stream(1), seeded(1), settings, torch.device("cpu"))
        gan._step_critic(critic, generator, blobs(n), settings, draws, seeded(2), 1.0)
        states.append(generator.state_dict())
    assert all(torch.equal(state[name], states[0][name]) for state in states[1:] for name in states[0])


def test_an_image_more_moves_the_other_images_partners_by_no_rule():
    settings = dataclasses.replace(SMALL, noise="dpsgd", batch_size=4)
    partners = gan._Draws(stream(), seeded(0), settings, torch.device("cpu")).partners(4000)
    assert torch.bincount(partners).tolist() == pytest.approx([1000] * 4, rel=0.1)
    plain = gan._Draws(stream(), seeded(0), SMALL, torch.device("cpu")).partners(3)
    assert plain.tolist() == [0, 1, 2]


def test_torchs_global_generator_is_left_alone():
    """Clients' GANs are trained in threads side by side, and that generator is one for all of them."""
    before = torch.random.get_rng_state()
    made = gan.train(gan.start((1, 8, 8), SMALL, stream()), blobs(), 1, SMALL, stream(1), seeded(2))
    gan.generate(made, 3, blobs(), SMALL, stream(3))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_delta_at_the_accountants_rounding_is_refused_and_one_that_is_allowed_can_be_accounted() -> None:
    with pytest.raises(ValidationError, match="target_delta"):
        NoisyGANOptions(target_delta=1e-13)
    delta = NoisyGANOptions(target_delta=1e-12).target_delta
    assert math.isfinite(sampled_epsilon(2.5, 64 / 6000, 90_000, delta))
