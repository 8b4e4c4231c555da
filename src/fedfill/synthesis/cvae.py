"""Conditional variational auto-encoders: training, optionally private, images, and one decoder that learns from others.

As in FedCVAE (Heinbaugh, Luz-Ricca and Shao, ICLR 2023); networks and loss are those of `fedfill.synthesis.cvae_networks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from fedfill.data.samples import Batch, Samples, normalise, quantise
from fedfill.privacy import accountant
from fedfill.privacy.dpsgd import noisy_sum, poisson_sample
from fedfill.privacy.keyed import KeyedStream
from fedfill.synthesis.cvae_networks import (
    CVAE,
    CVAESettings,
    Decoder,
    loaded,
    negative_elbo,
    pixel_loss,
    tensors_of,
    unit,
)
from fedfill.tree import Record, Weights

_CHUNK = 500


@dataclass(frozen=True)
class Mixture(Record):
    """Decoders, and how many records of each class stand behind each of them.

    Attributes:
        decoders: Tensors of each.
        counts: ``[decoders, classes]`` int64; a decoder is never asked for a class of which it has none.
    """

    decoders: list[Weights]
    counts: Tensor


@dataclass(frozen=True)
class Drawn:
    """Images with the codes that they were decoded from.

    Attributes:
        codes: ``[n, latent]``.
        samples: Images as they are stored, and the classes that were asked for.
    """

    codes: Tensor
    samples: Samples


def train(
    weights: Weights, data: Iterable[Batch], settings: CVAESettings, learning_rate: float, beta: float, draws: torch.Generator
) -> Weights:  # fmt: skip
    """Train encoder and decoder on mini-batches.

    Args:
        weights: Where the training starts.
        data: Mini-batches, one after the other.
        settings: How it is built.
        learning_rate: Of Adam.
        beta: Weight of the divergence.
        draws: Stream of the latent noise.

    Returns:
        Trained tensors.
    """
    model = loaded(CVAE, settings, weights, draws.device)
    optimizer = torch.optim.Adam(model.parameters(), learning_rate, fused=True)
    for batch in data:
        images, onehot = unit(batch.inputs), functional.one_hot(batch.labels, settings.classes).float()
        noise = torch.randn(len(images), settings.latent, generator=draws, device=draws.device)
        logits, mean, logvar = model(images, onehot, noise)
        optimizer.zero_grad()
        negative_elbo(logits, images, mean, logvar, beta).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return tensors_of(model)


@dataclass(frozen=True)
class Privacy:
    """DP-SGD on the whole conditional VAE.

    Attributes:
        clip: Largest norm of one image's gradient.
        probability: With which an image is in a step.
        steps: How many.
        multiplier: Standard deviation of the noise on a sum of gradients over `clip`.
    """

    clip: float
    probability: float
    steps: int
    multiplier: float


def multiplier(epsilon: float, delta: float, probability: float, steps: int, mu: float) -> float:
    """The least noise of DP-SGD that keeps a promise together with a Gaussian mechanism about the same record.

    Args:
        epsilon: What is promised, above 0, where one record is added or removed.
        delta: Between 0 and 1, both excluded.
        probability: With which a record is in a step, in (0, 1].
        steps: How many, at least 1.
        mu: Of the other mechanism; of itself it must keep the promise.

    Returns:
        A noise multiplier, hardly above the least.

    Raises:
        ValueError: Where the other mechanism alone breaks the promise.
    """
    if accountant.epsilon(mu, delta) >= epsilon:
        raise ValueError(f"a mu of {mu:g} leaves nothing of an epsilon of {epsilon:g}")

    def kept(noise: float) -> bool:
        return accountant.added_epsilon(mu, ((noise, probability, steps),), delta) <= epsilon

    low, high = 0.0, 1.0
    while not kept(high):
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if kept(middle) else (middle, high)
    return high


def train_privately(
    weights: Weights, data: Samples, settings: CVAESettings, learning_rate: float, beta: float, privacy: Privacy,
    coins: KeyedStream, noise: KeyedStream, check: Callable[[], None] = lambda: None,
) -> Weights:  # fmt: skip
    """Train encoder and decoder by steps on Poisson samples, whose gradients are clipped image by image and summed with noise.

    Args:
        weights: Where the training starts; of a decoder with group norm.
        data: Real images.
        settings: How it is built.
        learning_rate: Of Adam.
        beta: Weight of the divergence.
        privacy: Steps, clipping and noise.
        coins: Stream of the samples and of the latent noise; as secret as the noise.
        noise: Stream of the noise that protects.
        check: Called before each step; what it raises ends the training.

    Returns:
        Trained tensors.
    """
    model = loaded(CVAE, settings, weights, coins.device)

    def loss(tensors: Weights, image: Tensor, onehot: Tensor, draws: Tensor) -> Tensor:
        given = image[None], onehot[None], draws[None]
        logits, mean, logvar = functional_call(model, tensors, given)
        return negative_elbo(logits, given[0], mean, logvar, beta)[0]

    optimizer = torch.optim.Adam(model.parameters(), learning_rate, fused=True)
    for _ in range(privacy.steps):
        check()
        index = poisson_sample(len(data), privacy.probability, coins)
        onehot = functional.one_hot(data.labels[index], settings.classes).float()
        latent = coins.normal((len(index), settings.latent)).float()
        batch = unit(normalise(data.inputs[index])), onehot, latent
        now = {name: parameter.detach() for name, parameter in model.named_parameters()}
        total = noisy_sum(loss, now, batch, privacy.clip, privacy.multiplier, noise)
        for name, parameter in model.named_parameters():
            parameter.grad = total[name] / (
                privacy.probability * len(data)
            )  # the expected number, whatever this one is
        optimizer.step()
    return tensors_of(model)


def truncated_normal(n: int, latent: int, width: float, stream: torch.Generator) -> Tensor:
    """Codes whose coordinates are standard normal on the condition that they lie in -width..width.

    Args:
        n: How many codes.
        latent: Coordinates of each.
        width: Above 0; at 2 the variance is .774, at 3 it is .973.
        stream: Of the draws.

    Returns:
        ``[n, latent]``.
    """
    v = torch.rand(n, latent, generator=stream, device=stream.device, dtype=torch.float64)
    low = torch.special.ndtr(torch.tensor(-width, dtype=torch.float64, device=stream.device))
    u: Tensor = torch.special.ndtri(low + v * (1 - 2 * low))
    return u.clamp(-width, width).float()


def allocate(counts: Tensor, n: int, balanced: bool, stream: torch.Generator) -> Tensor:
    """How many images of each class each decoder is asked for.

    Args:
        counts: Records of each class behind each decoder, ``[k, classes]`` int64, at least one of them.
        n: Images altogether.
        balanced: Whether there are as many of each class that somebody holds, the first ones getting what is left over, in
            place of as many as a draw of n records would have.
        stream: Of the draws.

    Returns:
        ``[k, classes]`` int64. Each image of class c comes from decoder i with probability counts[i, c] / sum_j counts[j, c]; so
        unbalanced ones come from a decoder by its number of records, and with that decoder's own distribution of classes.
    """
    totals = counts.sum(0)
    held = totals.nonzero()[:, 0]
    if balanced:
        labels = held.repeat(n // len(held) + 1)[:n]
    else:
        labels = held[torch.multinomial(totals[held].double(), n, replacement=True, generator=stream)]
    wanted = torch.zeros_like(counts)
    for c, asked in enumerate(torch.bincount(labels, minlength=counts.shape[1]).tolist()):
        having = counts[:, c].nonzero()[:, 0]  # no other has a chance, however a draw is rounded
        if asked:
            drawn = torch.multinomial(counts[having, c].double(), asked, replacement=True, generator=stream)
            wanted[having, c] = torch.bincount(drawn, minlength=len(having))
    return wanted


def decode(
    mixture: Mixture, wanted: Tensor, settings: CVAESettings, width: float, stream: torch.Generator
) -> Drawn:  # fmt: skip
    """Images of decoders in evaluation mode, from truncated normal codes.

    Args:
        mixture: The decoders.
        wanted: Images of each class of each decoder, ``[k, classes]`` int64.
        settings: How the decoders are built.
        width: As in `truncated_normal`.
        stream: Of the codes.

    Returns:
        By decoder, and by class within it.

    Raises:
        ValueError: Where a decoder is asked for a class of which it has no record: it never learned what to do with it.
    """
    if bool((wanted[mixture.counts == 0] > 0).any()):
        raise ValueError("a decoder is asked for a class that it has never seen")
    classes = torch.arange(settings.classes, device=wanted.device)
    codes, images, labels = [], [], []
    for weights, row in zip(mixture.decoders, wanted, strict=True):
        own = classes.repeat_interleave(row)
        u = truncated_normal(len(own), settings.latent, width, stream)
        codes.append(u)
        labels.append(own)
        images.append(_images(weights, u, own, settings))
    return Drawn(torch.cat(codes), Samples(torch.cat(images), torch.cat(labels)))


@torch.no_grad()
def _images(weights: Weights, codes: Tensor, labels: Tensor, settings: CVAESettings) -> Tensor:
    decoder = loaded(Decoder, settings, weights, codes.device).eval()
    onehot = functional.one_hot(labels, settings.classes).float()
    made = [codes.new_empty(0, *settings.shape, dtype=torch.uint8)]
    for start in range(0, len(codes), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        made.append(quantise(decoder(codes[chunk], onehot[chunk]).sigmoid()))
    return torch.cat(made)


def distil(
    weights: Weights, drawn: Drawn, settings: CVAESettings, epochs: int, batch_size: int, learning_rate: float,
    order: torch.Generator,
) -> Weights:  # fmt: skip
    """Train one decoder to make of codes and classes what others made of them.

    Args:
        weights: Where it starts.
        drawn: Codes, classes, and the others' images.
        settings: How it is built.
        epochs: Passes over these.
        batch_size: Images in a mini-batch.
        learning_rate: Of Adam.
        order: Stream of the mini-batches.

    Returns:
        Trained tensors.
    """
    decoder = loaded(Decoder, settings, weights, order.device)
    optimizer = torch.optim.Adam(decoder.parameters(), learning_rate, fused=True)
    for _ in range(epochs):
        permuted = torch.randperm(len(drawn.codes), generator=order, device=order.device)
        for index in torch.split(permuted, batch_size):
            taught = drawn.samples[index]
            onehot = functional.one_hot(taught.labels, settings.classes).float()
            optimizer.zero_grad()
            loss = pixel_loss(decoder(drawn.codes[index], onehot), unit(normalise(taught.inputs))).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return tensors_of(decoder)
