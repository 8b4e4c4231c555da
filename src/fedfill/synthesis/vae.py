"""Variational auto-encoders: the loss, class means of latent codes, and images decoded from codes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional

from fedfill.data.samples import Batch, Samples, normalise, quantise
from fedfill.errors import FedfillError
from fedfill.privacy.keyed import KeyedStream, normal

Reconstruction = Literal["mse", "mse_sum", "bce_sum"]
Bound = Literal["sigmoid", "clip", "none"]

_CHUNK = 500


def vae_loss(
    model: nn.Module, batch: Batch, *, weight: float, reconstruction: Reconstruction, kl: str,
    reconstruction_weight: float = 1.0,
) -> Tensor:  # fmt: skip
    """Cross-entropy plus `weight` times divergence and reconstruction loss (FedDPMS, section 3.2).

    Args:
        model: With ``reconstruct``, see `fedfill.models.networks.VAEClassifier`.
        batch: Normalised images and labels.
        weight: The paper's lambda.
        reconstruction: ``mse`` averages the squared error over pixels, ``mse_sum`` and ``bce_sum`` (binary
            cross-entropy) sum over pixels; all average over the batch.
        kl: ``sum`` or ``mean`` over the latent's coordinates.
        reconstruction_weight: Factor of the reconstruction loss beside the divergence.

    Returns:
        A scalar.
    """
    scores, images, mu, logvar = model.reconstruct(batch.inputs)  # type: ignore[operator]
    target = (batch.inputs + 1) / 2  # back to 0..1, the decoder's range
    divergence = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp())  # [b, l]
    divergence = divergence.sum(1).mean() if kl == "sum" else divergence.mean()
    if reconstruction == "bce_sum":
        error = functional.binary_cross_entropy(images, target, reduction="sum") / len(target)
    elif reconstruction == "mse_sum":
        error = functional.mse_loss(images, target, reduction="sum") / len(target)
    else:
        error = functional.mse_loss(images, target)
    loss: Tensor = functional.cross_entropy(scores, batch.labels) + weight * (
        divergence + reconstruction_weight * error
    )
    return loss


class VAEOptions(BaseModel):
    """The settings of an algorithm that trains a classifier as an auto-encoder."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    vae_weight: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    """Weight of divergence and reconstruction loss beside the cross-entropy (lambda)."""
    reconstruction: Reconstruction = "mse"
    """Reconstruction loss: squared error averaged over pixels (the paper), summed, or binary cross-entropy summed."""
    # left out where it is 1, so that digests of runs without it stay as they were
    reconstruction_weight: float = Field(default=1.0, gt=0, allow_inf_nan=False, exclude_if=lambda value: value == 1)
    """Factor of the reconstruction loss beside the divergence; both are multiplied by vae_weight."""
    kl: Literal["sum", "mean"] = "sum"
    """Divergence summed or averaged over the latent's coordinates."""

    def vae_loss(self, model: nn.Module, batch: Batch, context: object) -> Tensor:
        """l1 + lambda (l2 + l3) (section 3.2), a scalar; a loss of local training."""
        return vae_loss(
            model, batch, weight=self.vae_weight, reconstruction=self.reconstruction, kl=self.kl,
            reconstruction_weight=self.reconstruction_weight,
        )  # fmt: skip


@torch.inference_mode()
def require_vae(model: nn.Module, inputs: Tensor, algorithm: str, methods: Sequence[str] = ("reconstruct",)) -> None:
    """Check that a network can be trained as an auto-encoder of these images.

    Args:
        model: A user's own, or a built-in one.
        inputs: One sample as it is stored, ``[1, ...]``.
        algorithm: For the error's sentence.
        methods: What it must have.

    Raises:
        FedfillError: Where it lacks a method, the inputs are no 8-bit images, or its images have another shape.
    """
    for method in methods:
        if not callable(getattr(model, method, None)):
            raise FedfillError(
                f"model: {algorithm} needs the method {method}, and {type(model).__name__} lacks it; see docs/algorithms/feddpms.md"
            )
    if inputs.dtype != torch.uint8:
        raise FedfillError(
            f"data: {algorithm} decodes 8-bit images, and these inputs are {inputs.dtype}; give uint8 images"
        )
    scores, images, mu, _ = copy.deepcopy(model).eval().reconstruct(normalise(inputs))  # type: ignore[operator]
    if images.shape != inputs.shape or mu.dim() != 2 or len(scores) != len(inputs):
        raise FedfillError(
            f"model: reconstruct gives images of shape {list(images.shape)} and means of shape {list(mu.shape)} for inputs "
            f"of shape {list(inputs.shape)}; allowed: the inputs' shape, and [samples, latent]"
        )


@torch.no_grad()
def latent_size(model: nn.Module, data: Samples) -> int:
    """The number of coordinates l of the model's latent codes."""
    return int(model.encoder(normalise(data.inputs[:1])).shape[1])  # type: ignore[operator]


@torch.no_grad()
def class_means(model: nn.Module, data: Samples, classes: Sequence[int], bound: Bound, clip: float) -> Tensor:
    """Mean latent code of each class, over the real data alone and in evaluation mode.

    Args:
        model: In evaluation mode: in training mode batch norm would couple the samples, and no sensitivity would hold.
        data: Images and labels.
        classes: Classes that `data` holds.
        bound: ``sigmoid``: every coordinate lies in [0, 1]; ``clip``: each code's l2 norm is clipped to `clip`; ``none``.
        clip: Norm of ``clip``.

    Returns:
        ``[len(classes), l]``.

    Raises:
        ValueError: Where a class has no sample.
    """
    means = []
    for label in classes:
        own = data[data.labels == label]
        total: Tensor | None = None
        for start in range(0, len(own), _CHUNK):
            codes = model.encoder(normalise(own.inputs[start : start + _CHUNK]))  # type: ignore[operator]  # [b, l]
            if bound == "sigmoid":
                codes = codes.clamp(
                    0, 1
                )  # changes nothing behind a sigmoid; behind anything else the bound still holds
            if bound == "clip":
                codes = codes * (clip / codes.norm(dim=1, keepdim=True).clamp_min(1e-12)).clamp_max(1)
            part = codes.sum(0)
            total = part if total is None else total + part
        if total is None:
            raise ValueError(f"there is no sample of class {label}")
        means.append(total / len(own))
    if not means:
        blank = data.inputs.new_zeros(1, *data.inputs.shape[1:])
        return model.encoder(normalise(blank))[:0]  # type: ignore[operator,no-any-return]
    return torch.stack(means)


@torch.no_grad()
def decode(model: nn.Module, codes: Tensor) -> Tensor:
    """Images of latent codes as they are stored.

    Args:
        model: With a ``decoder``.
        codes: ``[n, l]``.

    Returns:
        uint8 images, ``[n, channels, height, width]``.
    """
    return torch.cat([quantise(model.decoder(part)) for part in torch.split(codes, _CHUNK)])  # type: ignore[operator]


@torch.no_grad()
def accepted_codes(
    model: nn.Module,
    centre: Tensor,
    std: float,
    label: int,
    *,
    quota: int,
    candidates: int,
    exhaust: bool,
    generator: torch.Generator | KeyedStream,
    check: Callable[[], None] = lambda: None,
) -> tuple[Tensor, int]:
    """Codes around `centre` whose images the model recognises as `label` (FedDPMS, equations 1 and 2).

    Args:
        model: Its decoder makes the images, its encoder and classifier judge them.
        centre: ``[l]``.
        std: Standard deviation of the Gaussian noise on every coordinate.
        label: The class that must be recognised.
        quota: How many codes are wanted.
        candidates: How many draws at the most. A class of which the first 10 * candidates / quota draws bring nothing
            is given up: at the least rate that can meet the quota that happens once in 20,000 times.
        exhaust: Draw all candidates even when the quota is met: their number then tells nothing.
        generator: Stream of the noise.
        check: Called before each chunk of draws; what it raises ends them.

    Returns:
        Accepted codes ``[k, l]``, k <= quota, in the order drawn, and the number of draws up to the last of them (all
        draws where the quota was not met, or with `exhaust`).
    """
    found: list[Tensor] = []
    have = drawn = 0
    while drawn < candidates and (exhaust or have < quota):
        check()
        b = min(_CHUNK, candidates - drawn)
        noise = normal(generator, (b, len(centre)), centre.device)
        codes = centre + std * noise  # [b, l]
        hits = (model(normalise(decode(model, codes))).argmax(1) == label).nonzero()[:, 0][: quota - have]  # [k]
        found.append(codes[hits])
        have += len(hits)
        drawn += int(hits[-1]) + 1 if have == quota and not exhaust else b
        if not have and not exhaust and drawn >= 10 * candidates / quota:
            break
    return torch.cat([*found, centre.new_empty(0, len(centre))]), drawn
