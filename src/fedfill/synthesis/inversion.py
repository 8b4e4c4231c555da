"""Inversion: labelled images from nothing but a model, by matching the statistics that its normalisation layers keep.

Fed-ZDA's zero-shot data generation (Hao et al. 2021, section 3.2, equation 3 and algorithm 1), a plain form of DeepInversion (Yin
et al. 2020): pixels start as noise and are moved until every normalisation layer sees the means and deviations that it has
stored, and the model names the wanted class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fedfill.data.samples import Samples, quantise
from fedfill.errors import FedfillError

Statistic = Literal["std", "var"]


@dataclass(frozen=True)
class Inversion:
    """How images are made from a model; the paper gives neither steps nor optimizer, and weighs all terms with 1.

    Attributes:
        per_class: Images of each class.
        steps: Steps of Adam on the pixels.
        learning_rate: Of Adam.
        statistic: Whether deviations (the text below equation 3) or variances (the text above it) are matched.
        statistics_weight: Of the distance between statistics.
        class_weight: Of the cross-entropy.
        tv_weight: Of the total variation, which prefers smooth images.
        l2_weight: Of the mean squared pixel.
        jitter: Images are rolled by up to so many pixels in each direction before each step.
        clamp: Keep pixels in the range of real images, -1..1.
    """

    per_class: int = 64
    steps: int = 200
    learning_rate: float = 0.1
    statistic: Statistic = "std"
    statistics_weight: float = 1.0
    class_weight: float = 1.0
    tv_weight: float = 0.0
    l2_weight: float = 0.0
    jitter: int = 0
    clamp: bool = True


@dataclass(frozen=True)
class Inverted:
    """Images that a model brought forth.

    Attributes:
        samples: Class after class, ``per_class`` of each; uint8 as they are stored, or floats where the data are floats.
        first: Loss of statistics and cross-entropy of the noise that it began with.
        best: The same of the images that are returned, those of the least total loss.
    """

    samples: Samples
    first: tuple[float, float]
    best: tuple[float, float]


def statistics_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that keep running statistics of what they normalise, in the model's order."""
    return [layer for layer in model.modules() if getattr(layer, "running_mean", None) is not None]


def require_statistics(model: nn.Module, algorithm: str) -> None:
    """Check that a model can be inverted.

    Args:
        model: Any module.
        algorithm: For the error's sentence.

    Raises:
        FedfillError: Where no layer keeps running statistics.
    """
    if not statistics_layers(model):
        kinds = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.GroupNorm | nn.LayerNorm)})
        because = f"; {' and '.join(kinds)} keep none" if kinds else ""
        raise FedfillError(
            f"model: {algorithm} needs normalisation layers with running statistics, such as BatchNorm2d, and "
            f"{type(model).__name__} has none{because}; allowed: --model cnn2bn or resnet18, --set width=wide, or a module with such layers"
        )


def invert(
    model: nn.Module,
    classes: Sequence[int],
    sample: Samples,
    settings: Inversion,
    generator: torch.Generator,
    check: Callable[[], None] = lambda: None,
) -> Inverted:
    """Class-balanced images from a model (algorithm 1), all classes as one batch.

    The statistics are those of the joint batch: the stored ones describe a mixture of classes, and no single one.

    Args:
        model: In evaluation mode; neither its tensors nor its gradients are touched.
        classes: Wanted classes.
        sample: One sample, with the type and shape of the data.
        settings: How.
        generator: Stream of the noise and the jitter, on the model's device.
        check: Called before each step; what it raises ends the inversion.

    Returns:
        The images with the least loss of all steps.
    """
    labels = torch.tensor([c for c in classes for _ in range(settings.per_class)], device=generator.device)
    pixels = torch.empty(len(labels), *sample.inputs.shape[1:], device=generator.device)  # [n, ...]
    pixels.normal_(generator=generator).requires_grad_()
    optimizer = torch.optim.Adam([pixels], settings.learning_rate)
    first: tuple[float, float] | None = None
    best, least = (float("nan"), float("nan")), float("inf")
    kept = pixels.detach()
    with _statistics(model, settings.statistic) as seen:
        for step in range(settings.steps + 1):
            check()
            seen.clear()
            images = pixels
            if settings.jitter and step < settings.steps:
                span = 2 * settings.jitter + 1
                shifts = torch.randint(span, (2,), generator=generator, device=generator.device) - settings.jitter
                images = torch.roll(pixels, shifts.tolist(), dims=(-2, -1))
            entropy = functional.cross_entropy(model(images), labels)
            distance = torch.stack(seen).sum()
            loss = settings.statistics_weight * distance + settings.class_weight * entropy
            if settings.tv_weight:
                loss = loss + settings.tv_weight * total_variation(images)
            if settings.l2_weight:
                loss = loss + settings.l2_weight * images.square().mean()
            value, parts = loss.item(), (distance.item(), entropy.item())
            first = first or parts
            if value < least:
                # a copy: the optimizer goes on writing into the pixels
                least, best, kept = value, parts, pixels.detach().clone()
            if step == settings.steps:
                break
            (pixels.grad,) = torch.autograd.grad(loss, pixels)
            optimizer.step()
            if settings.clamp:
                with torch.no_grad():
                    pixels.clamp_(-1, 1)
    inputs = quantise((kept + 1) / 2) if sample.inputs.dtype == torch.uint8 else kept
    return Inverted(Samples(inputs, labels), first or best, best)


class _Moments(torch.autograd.Function):
    """Means and deviations ``sqrt(var + eps)`` of each channel, ``[b, channels, ...]`` to two of ``[channels]``.

    By the kernel of batch norm's training, which has them in one pass: inversion is a third shorter than with `Tensor.var`,
    whose reduction over all dimensions but the second is slow. Their gradient is written out since that kernel's covers its
    output alone.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        _, mean, inverse = torch.native_batch_norm(x, None, None, None, None, True, 0.0, eps)
        ctx.save_for_backward(x, mean, inverse)
        # without eps the kernel has 0 for a channel without spread
        return mean, torch.where(inverse > 0, inverse.reciprocal(), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, mean_gradient: Tensor, spread_gradient: Tensor) -> tuple[Tensor, None]:
        x, mean, inverse = ctx.saved_tensors
        values = x.numel() // x.shape[1]
        # d mean / d x = 1 / n, d spread / d x = (x - mean) / (n * spread)
        slope = spread_gradient * inverse / values
        level = mean_gradient / values - slope * mean
        shape = [1, -1, *[1] * (x.dim() - 2)]
        return torch.addcmul(level.view(shape), x, slope.view(shape)), None


@contextmanager
def _statistics(model: nn.Module, statistic: Statistic) -> Iterator[list[Tensor]]:
    """Collect, at each pass, how far every layer's input is from the statistics that it keeps: the terms of equation 3."""
    seen: list[Tensor] = []

    def look(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        mean, spread = _Moments.apply(inputs[0], layer.eps)  # type: ignore[no-untyped-call]  # [channels] each
        stored = (layer.running_var + layer.eps).sqrt()  # type: ignore[operator]
        if statistic == "var":  # the two eps cancel in the difference
            spread, stored = spread.square(), stored.square()
        distance = (mean - layer.running_mean).square().sum() + (spread - stored).square().sum()
        seen.append(distance)

    hooks = [layer.register_forward_pre_hook(look) for layer in statistics_layers(model)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, ``[n, ..., height, width]`` to a scalar."""
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    right = (images[..., :, 1:] - images[..., :, :-1]).abs().mean()
    return down + right
