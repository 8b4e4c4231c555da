"""Wasserstein GANs with gradient penalty, as in SDA-FL (Li et al. 2022, section 3.2), optionally private.

Arjovsky et al. 2017 and Gulrajani et al. 2017, with the penalty's sign as in the latter: SDA-FL's equation 1 prints it with a
plus under the maximum, where it would reward what it shall forbid. The auxiliary classifier of Odena et al. 2017 makes the
labels known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedfill.data.samples import Samples, normalise, quantise
from fedfill.privacy.dpsgd import noisy_sum, poisson_sample
from fedfill.privacy.keyed import KeyedStream
from fedfill.privacy.releases import Release, dpsgd, unbounded
from fedfill.synthesis.gan_networks import Critic, GANSettings, Generator, gradient_penalty
from fedfill.tree import Record, Tree, Weights


@dataclass(frozen=True)
class GAN(Record):
    """Where the training of a GAN stands; enough to go on.

    Attributes:
        generator: Its tensors.
        critic: Its tensors.
        averaged: The generator's moving average; None where none is kept.
        optimizers: States of both optimizers.
        iterations: Steps of the generator that were done.
    """

    generator: Weights
    critic: Weights
    averaged: Weights | None
    optimizers: Tree
    iterations: int


def _built(shape: tuple[int, ...], settings: GANSettings, device: torch.device) -> tuple[Generator, Critic]:
    """Both networks without values: their constructors would draw from torch's global generator, which threads share."""
    with torch.device("meta"):
        generator, critic = Generator(shape, settings), Critic(shape, settings)
    return generator.to_empty(device=device), critic.to_empty(device=device)


def start(shape: tuple[int, ...], settings: GANSettings, stream: torch.Generator) -> GAN:
    """An untrained GAN.

    Args:
        shape: (channels, side, side) of an image.
        settings: Its sizes.
        stream: Of the initial weights, which live on its device: those of convolutions are normal with deviation 0.02, as in
            DCGAN, and those of the last layer uniform; biases are 0.

    Returns:
        Where its training starts.
    """
    modules = _built(shape, settings, stream.device)
    for layer in (layer for module in modules for layer in module.modules()):
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()
        elif isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(layer.weight, 0.0, 0.02, generator=stream)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Linear):
            bound = 1 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound, generator=stream)
            nn.init.zeros_(layer.bias)
    made, scored = map(_tensors, modules)
    return GAN(made, scored, dict(made) if settings.average else None, None, 0)


def train(
    gan: GAN,
    data: Samples,
    iterations: int,
    settings: GANSettings,
    draws: torch.Generator,
    noise: KeyedStream,
    noise_multiplier: float = 0.0,
    check: Callable[[], None] = lambda: None,
    classes: Sequence[int] | None = None,
) -> GAN:
    """Steps of the generator, each after `critic_steps` of the critic.

    Args:
        gan: Where the training stands.
        data: Real images, at least one; labels are used by an auxiliary classifier alone.
        iterations: Steps of the generator.
        settings: How.
        draws: Stream of mini-batches, latent noise and interpolation.
        noise: Stream of the noise that protects, and with ``dpsgd`` of the mini-batches' coins and of what depends on their size.
        noise_multiplier: With ``dpsgd``, from `GANSettings.noise_multiplier`.
        check: Called before each iteration; what it raises ends the training.
        classes: Those that the generator is asked for, with an auxiliary classifier; None: all.

    Returns:
        Where it stands then.
    """
    device, shape = data.labels.device, tuple(data.inputs.shape[1:])
    generator, critic = _built(shape, settings, device)
    generator.load_state_dict(gan.generator)
    critic.load_state_dict(gan.critic)
    averaged = None if gan.averaged is None else {name: x.clone() for name, x in gan.averaged.items()}
    optimizers = [_adam(module, settings) for module in (generator, critic)]
    for optimizer, state in zip(optimizers, gan.optimizers or [], strict=False):
        optimizer.load_state_dict({"state": _plain(state), "param_groups": optimizer.state_dict()["param_groups"]})
    of_generator, of_critic = optimizers
    rng = _Draws(draws, noise, settings, device, classes)
    for _ in range(iterations):
        check()
        for _ in range(settings.critic_steps):
            _step_critic(critic, generator, data, settings, rng, noise, noise_multiplier)
            of_critic.step()
        z, labels = rng.latent(settings.batch_size)
        score, logits = critic(generator(z, labels))
        loss = -score.mean()
        if labels is not None:
            loss = loss + settings.class_weight * functional.cross_entropy(logits, labels)
        of_generator.zero_grad()
        loss.backward(inputs=list(generator.parameters()))
        of_generator.step()
        if averaged is not None:
            _follow(averaged, generator.state_dict(), settings.average)
    states = [_plain(optimizer.state_dict()["state"]) for optimizer in optimizers]
    return GAN(_tensors(generator), _tensors(critic), averaged, states, gan.iterations + iterations)


def generate(
    gan: GAN, labels: int | Tensor, sample: Samples, settings: GANSettings, draws: torch.Generator, chunk: int = 500
) -> Tensor:
    """Images of a trained generator.

    Args:
        gan: Trained.
        labels: How many images; with an auxiliary classifier the wanted classes ``[n]``.
        sample: One sample, with the type and shape of the data.
        settings: As in the training.
        draws: Stream of the latent noise.
        chunk: Images that are made at a time.

    Returns:
        ``[n, channels, side, side]``, uint8 as images are stored, or floats in -1..1 where the data are floats.
    """
    device = draws.device
    generator, _ = _built(tuple(sample.inputs.shape[1:]), settings, device)
    generator.load_state_dict(gan.generator if gan.averaged is None else gan.averaged)
    generator.eval()
    n = labels if isinstance(labels, int) else len(labels)
    z = torch.randn(n, settings.latent, generator=draws, device=device)  # [n, latent]
    made = []
    with torch.inference_mode():
        for start in range(0, n, chunk):
            wanted = None if isinstance(labels, int) else labels[start : start + chunk]
            images = generator(z[start : start + chunk], wanted)
            made.append(quantise((images + 1) / 2) if sample.inputs.dtype == torch.uint8 else images)
    return torch.cat(made).clone()


class _Draws:
    """What the training draws, in a fixed order."""

    def __init__(
        self, stream: torch.Generator, secret: KeyedStream, settings: GANSettings, device: torch.device,
        classes: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._stream, self._secret, self._settings, self._device = stream, secret, settings, device
        wanted = range(settings.classes) if classes is None else classes
        self._classes = torch.tensor(list(wanted), dtype=torch.int64, device=device)

    def latent(self, b: int) -> tuple[Tensor, Tensor | None]:
        """Latent noise ``[b, latent]``, and labels ``[b]`` where there are classes."""
        z = torch.randn(b, self._settings.latent, generator=self._stream, device=self._device)
        if not self._settings.classes:
            return z, None
        return z, self._classes[torch.randint(len(self._classes), (b,), generator=self._stream, device=self._device)]

    def batch(self, n: int) -> Tensor:
        """Positions of a mini-batch ``[b]``: without replacement, or a Poisson sample."""
        size = self._settings.batch_size
        if self._settings.noise == "dpsgd":
            return poisson_sample(n, self._settings.probability(n), self._secret)
        return torch.randperm(n, generator=self._stream, device=self._device)[:size]

    def partners(self, b: int) -> Tensor:
        """Which fake each of `b` real images is mixed with, ``[b]``: the first ones, or each by a draw of its own."""
        if self._settings.noise == "dpsgd":
            return (self._secret.uniform(b) * self._settings.batch_size).long()
        return torch.arange(b, device=self._device)

    def share(self, b: int) -> Tensor:
        """Uniform numbers in 0..1, ``[b]``."""
        if self._settings.noise == "dpsgd":
            return self._secret.uniform(b).float()
        return torch.rand(b, generator=self._stream, device=self._device)


def _step_critic(
    critic: Critic, generator: Generator, data: Samples, settings: GANSettings, rng: _Draws, noise: KeyedStream,
    noise_multiplier: float,
) -> None:  # fmt: skip
    """Gradients of one step: E D(fake) - E D(real) + gamma E (||grad D|| - 1)^2, and what protects them."""
    index = rng.batch(len(data))
    real, labels = normalise(data.inputs[index]), data.labels[index]  # [b, ...]
    # as many fakes whatever the sample's size: with dpsgd neither they nor an image's partner may depend on other real images
    z, wanted = rng.latent(settings.batch_size)
    share = rng.share(len(index))
    with torch.no_grad():
        fake = generator(z, wanted)
    near = fake[rng.partners(len(index))]
    for parameter in critic.parameters():
        parameter.grad = None
    if settings.noise != "dpsgd":
        score, logits = critic(torch.cat([fake, real]))
        loss = score[: len(fake)].mean() - score[len(fake) :].mean()
        loss = loss + settings.penalty * gradient_penalty(lambda x: critic(x)[0], real, near, share).mean()
        if settings.classes:
            loss = loss + settings.class_weight * functional.cross_entropy(logits[len(fake) :], labels)
        loss.backward()
        if settings.noise == "paper_eq3":
            # of the sum over the mini-batch, as in Xie et al. 2018, whom the paper follows; these gradients are its mean
            std = settings.paper_std(len(data)) / len(index)
            for parameter in critic.parameters():
                shaken = noise.normal(parameter.shape).to(parameter) * std
                parameter.grad = shaken if parameter.grad is None else parameter.grad + shaken
        return

    def touching(weights: Weights, x: Tensor, f: Tensor, e: Tensor, y: Tensor) -> Tensor:
        """The terms of one real image and its partner.

        The fake's score needs no protection, but outside the clipping it would pull far harder than the penalty, which is
        clipped, can hold: the critic's slope would run away.
        """
        score, logits = functional_call(critic, weights, (torch.stack([x, f]),))
        loss: Tensor = score[1] - score[0]

        def scored(image: Tensor) -> Tensor:
            return functional_call(critic, weights, (image[None],))[0][0]  # type: ignore[no-any-return]

        slope: Tensor = torch.func.grad(scored)(torch.lerp(f, x, e))
        # the root has no derivative at 0
        length: Tensor = slope.square().sum().clamp_min(1e-24).sqrt()
        loss = loss + settings.penalty * (length - 1).square()
        if settings.classes:
            loss = loss + settings.class_weight * functional.cross_entropy(logits[:1], y[None])
        return loss

    weights = {name: parameter.detach() for name, parameter in critic.named_parameters()}
    total = noisy_sum(touching, weights, (real, near, share, labels), settings.clip, noise_multiplier, noise)
    expected = settings.probability(len(data)) * len(data)
    for name, parameter in critic.named_parameters():
        parameter.grad = total[name] / expected


def _adam(module: nn.Module, settings: GANSettings) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), settings.learning_rate, betas=settings.betas, fused=True)


def _follow(averaged: Weights, tensors: Weights, decay: float) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            averaged[name].lerp_(tensor, 1 - decay)
        else:
            averaged[name].copy_(tensor)


def _tensors(module: nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _plain(state: Tree) -> Tree:
    return {index: {name: value.detach().clone() for name, value in values.items()} for index, values in state.items()}


def released(
    what: str, settings: GANSettings, samples: int, iterations: int, noise_multiplier: float, conditions: Iterable[str] = ()
) -> Release:  # fmt: skip
    """What is given away by anything that was made with a critic and its generator.

    Args:
        what: In plain words.
        settings: As in the training.
        samples: Real images that it was trained on; their number counts as known.
        iterations: Steps of the generator that were trained.
        noise_multiplier: With ``dpsgd``.
        conditions: Under which its figure holds, beside that the number of images is public.

    Returns:
        A guarantee with ``dpsgd``, and none otherwise.
    """
    if settings.noise == "dpsgd":
        target = settings.target_epsilon, settings.delta
        steps = iterations * settings.critic_steps
        return dpsgd(what, noise_multiplier, settings.probability(samples), steps, target, conditions)
    if settings.noise == "paper_eq3":
        return unbounded(f"{what}, with the noise of equation 3, which neither clips nor counts its steps: not private")
    return unbounded(f"{what}, trained without noise")
