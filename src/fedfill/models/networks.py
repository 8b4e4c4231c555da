"""The networks of the papers: FedDPMS's (supplement, tables 1 and 2), as classifiers and as auto-encoders, Fed-ZDA's, SDA-FL's and FRAug's; and feature maps from a seed.

All have the same named parts, so that a baseline and FedDPMS share every tensor that they have in common:

* ``encoder``: convolutional trunk and, in FedDPMS's networks, a latent layer (``encoder.mu``; with a decoder also ``encoder.logvar``),
* ``classifier``: latent code to class scores,
* ``projection``: a head between the two, as in MOON; only where an algorithm or the user asks for it,
* ``personal``: a second classifier, which begins with zeros; only where an algorithm asks for it,
* ``decoder``: latent code to an image with values in (0, 1); only where an algorithm asks for it.

Widths of FedDPMS's: ``paper`` follows the tables (convolution, ReLU); ``wide`` the widths of the authors' program
(convolution, PReLU, batch norm, dropout). The other networks have one shape each.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from fedfill.errors import FedfillError, did_you_mean
from fedfill.models.classifiers import Classifier, Encoder, VAEClassifier
from fedfill.models.encoders import ENCODERS
from fedfill.models.features import FeatureMap, default_words, uncentred
from fedfill.models.hazards import ProportionalHazards
from fedfill.models.layers import Dropout
from fedfill.models.names import NAMES
from fedfill.models.quadratic import Quadratic
from fedfill.models.views import NORMALISATION
from fedfill.streams import derive


class ModelSettings(BaseModel):
    """Settings of the built-in networks; ``--set model.NAME=VALUE``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    width: Literal["paper", "wide"] = "paper"
    """The paper's tables, or the widths that the authors' program uses (PReLU, batch norm, dropout)."""
    latent: int | None = Field(default=None, ge=1, le=4096)
    """Size l of the latent layer; none: 32 for grey images of at least 16 pixels, 16 below, 128 for colour."""
    latent_activation: Literal["sigmoid", "relu", "none"] = "none"
    """Activation of the latent layer; FedDPMS's paper puts a sigmoid into every network."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout of the wide networks; none: 0.2 for colour, 0 for grey, as in the authors' program."""
    projection: int | None = Field(default=None, ge=1, le=4096)
    """Size of a projection head between latent layer and classifier (MOON's network); none: no head, or 256 where the algorithm needs one."""
    # left out where they are none, so that records and digests of what doesn't use them stay as they were
    stem: Literal["small", "imagenet"] | None = Field(default=None, exclude_if=lambda value: value is None)
    """Front of resnet18: a 3x3 convolution, for small images (none does the same), or ImageNet's for those of 64 pixels and more: a 7x7 one with stride 2, and pooling."""
    features: str | None = Field(default=None, exclude_if=lambda value: value is None)
    """Map of the network features: steps from left to right, of conv(F), patches(F), scatter, project(d), fourier(D), relu(D), unit and clip; none: conv(200) > project(2048) for images, fourier(1024) for other inputs."""
    features_seed: int | None = Field(default=None, ge=0, exclude_if=lambda value: value is None)
    """Seed of the map of the network features; none: the experiment's."""
    frozen: Literal["encoder", "classifier"] | None = Field(default=None, exclude_if=lambda value: value is None)
    """Part of the network that is not trained; none: all of it is, but a map of features."""
    last_layer: Literal["linear", "gaussian", "diagonal"] | None = Field(
        default=None, exclude_if=lambda value: value is None
    )
    """Last layer of the network features: linear (none does the same), or a Gaussian for each class with a covariance (gaussian) or variances (diagonal) of its own, which fedcgs fits."""
    weights: str | None = Field(default=None, exclude_if=lambda value: value is None)
    """File with the weights to begin with, .safetensors or a state dict as .pt or .pth, by our names or torchvision's of its resnet18; none: from scratch."""


OF_ONE_SHAPE = (*ENCODERS, "features", "hazards")
"""Networks without a latent layer."""
OF_THE_LATENT = ("width", "latent", "latent_activation", "dropout")
"""Settings that only networks with a latent layer have."""


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether inputs of this shape are grey or colour images."""
    return len(shape) == 3 and min(shape) > 0 and shape[0] in (1, 3)


def _fits(shape: tuple[int, ...], multiple: int = 4) -> bool:
    """Whether networks that halve their images a few times take inputs of this shape."""
    return is_image(shape) and not (shape[1] % multiple or shape[2] % multiple)


def choose(shape: tuple[int, ...], settings: ModelSettings, needs: Collection[str]) -> tuple[str, ModelSettings]:
    """The network that ``auto`` stands for: the same one for all algorithms with these needs together.

    Args:
        shape: Of one input.
        settings: As they were given.
        needs: Of all algorithms that shall use it: named parts, and `NORMALISATION`.

    Returns:
        Its name and its settings.
    """
    if shape and min(shape) > 0 and not (is_image(shape) and ("decoder" in needs or _fits(shape))):
        return "mlp", settings
    if NORMALISATION in needs and "width" not in settings.model_fields_set:
        settings = settings.model_copy(update={"width": "wide"})
    return "cnn2" if shape[:1] == (1,) else "cnn4", settings


def described(name: str, shape: tuple[int, ...], settings: ModelSettings, needs: Mapping[str, str]) -> str:
    """Which network it is, and why, in one sentence.

    Args:
        name: Of the network.
        shape: Of one input.
        settings: As they were chosen.
        needs: Of all algorithms that use it: which one needs what.

    Returns:
        For example ``"Network: cnn2 with width=wide, for grey images and the normalisation layers that fedbn needs."``
    """
    wide = settings.width == "wide" and name not in OF_ONE_SHAPE
    inputs = (
        ("grey images" if shape[0] == 1 else "colour images") if is_image(shape) else f"samples of shape {list(shape)}"
    )
    if is_image(shape) and name == "mlp" and not _fits(shape):
        inputs += f" of {shape[1]}x{shape[2]}, as convolutions here need sides that are multiples of 4"
    why = ""
    if NORMALISATION in needs:
        why = f" and the normalisation layers that {needs[NORMALISATION]} needs"
    elif "decoder" in needs:
        why = f" and the decoder that {needs['decoder']} needs"
    which = " with width=wide, that is with batch norm" if wide else ""
    if name == "features":
        which = f" {settings.features or default_words(shape)}"
    return f"Network: {name}{which}, for {inputs}{why}."


def record_of(name: str, settings: ModelSettings) -> dict[str, object]:
    """The settings that a network has: a record leaves out what does not apply to it, whose default may change.

    Args:
        name: Of the network.
        settings: As they were checked.

    Returns:
        By name, as ``experiment.toml`` keeps them.
    """
    return applicable(name, settings.model_dump())


def applicable(name: str, settings: Mapping[str, object]) -> dict[str, object]:
    """Those of some settings that the network of this name has; 0.1.0 recorded all of them for all networks."""
    left_out = OF_THE_LATENT if name in OF_ONE_SHAPE else ()
    return {setting: value for setting, value in settings.items() if setting not in left_out}


def _convolution(inputs: int, outputs: int, wide: bool) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
    return [convolution, nn.PReLU(), nn.BatchNorm2d(outputs)] if wide else [convolution, nn.ReLU()]


def _transposed(inputs: int, outputs: int, stride: int, wide: bool) -> list[nn.Module]:
    layer = nn.ConvTranspose2d(inputs, outputs, 3, stride=stride, padding=1, output_padding=stride - 1)
    return [layer, nn.PReLU(), nn.BatchNorm2d(outputs)] if wide else [layer, nn.ReLU()]


def build(
    name: str, shape: tuple[int, ...], classes: int, settings: ModelSettings, *, needs: Collection[str] = (), seed: int,
    loaded: bool = False,
) -> Classifier:  # fmt: skip
    """A built-in network with its initial weights, of which a part may be frozen: see `_built`.

    Where it is `loaded` others follow, and the centre of a map of features, which takes seconds, is left out.
    """
    try:
        network = _built(name, shape, classes, settings, needs=needs, seed=seed)
    except (MemoryError, RuntimeError) as error:  # torch has no kind of its own for it where there is no GPU
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        raise FedfillError(
            f"model: '{name}' for inputs of {'x'.join(map(str, shape))} does not fit into the memory; image_size makes images smaller"
        ) from error
    if "personal" in needs:
        network.personal = copy.deepcopy(network.classifier)
        for parameter in network.personal.parameters():
            nn.init.zeros_(parameter)
    if isinstance(network.encoder, FeatureMap) and not loaded:
        network.encoder.centre_itself()
    if settings.frozen is not None:
        network.get_submodule(settings.frozen).requires_grad_(False)
        if not any(parameter.requires_grad for parameter in network.parameters()):
            raise FedfillError(
                f"frozen: found {settings.frozen} with model {name}, of which nothing else is trained; allowed: none"
            )
    return network


def _built(
    name: str, shape: tuple[int, ...], classes: int, settings: ModelSettings, *, needs: Collection[str], seed: int
) -> Classifier:
    """A built-in network with its initial weights.

    The parts that two variants share are made first and from the same stream, so that they start equal. In FedDPMS's
    networks convolutions and linear layers start Xavier-uniform with ReLU gain and zero bias: the paper is silent, its
    authors' program does so.

    Args:
        name: A name of `NAMES`.
        shape: (channels, height, width) of one image; the sides are multiples of 4, of 8 for ``resnet18``. Any for ``mlp`` and ``features``.
        classes: Number of classes, at least 2.
        settings: Width, latent size and activation; `fedfill.models.pretrained` is for ``weights``.
        needs: Parts that the algorithm needs; ``decoder`` and ``projection`` are made on request, and ``personal``, a second
            classifier of zeros.
        seed: Of the initial weights.

    Returns:
        A `Classifier`, or a `VAEClassifier` where a decoder is needed.

    Raises:
        FedfillError: Where the name is unknown or the images don't fit the network.
    """
    if name not in NAMES:
        raise FedfillError(f"model: unknown name '{name}'; {did_you_mean(name, NAMES)}")
    if name == "auto":
        name, settings = choose(shape, settings, needs)
    multiple = 8 if name == "resnet18" else 4
    if not _fits(shape, multiple) and name not in ("mlp", "features", "hazards"):
        raise FedfillError(
            f"model: '{name}' takes images of 1 or 3 channels with sides that are multiples of {multiple}, found shape {list(shape)}; "
            f"allowed: {'images of another size (image_size), ' if len(shape) == 3 else ''}--model mlp, or a torch.nn.Module of your own from Python"
        )
    if settings.stem is not None and name != "resnet18":
        raise FedfillError(f"stem: found {settings.stem} with model {name}; allowed with resnet18 alone")
    for setting in ("features", "features_seed", "last_layer"):
        if (value := getattr(settings, setting)) is not None and name != "features":
            raise FedfillError(f"{setting}: found '{value}' with model {name}; allowed with features alone")
    if name in OF_ONE_SHAPE:
        return _of_one_shape(name, shape, classes, settings, needs=needs, seed=seed)
    channels, height, width = shape
    wide = settings.width == "wide"
    if settings.dropout and not wide:
        raise FedfillError(
            f"dropout: found {settings.dropout:g} with width=paper, whose networks have none; allowed with width=wide alone"
        )
    small = min(height, width) < 16
    latent = settings.latent or (128 if channels == 3 else 16 if small else 32)
    dropout = settings.dropout if settings.dropout is not None else (0.2 if channels == 3 else 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "cnn2" and not wide:
            stages = [[16], [32]]
        else:
            stages = [[32, 32], [64]] if name == "cnn2" else [[32, 32], [64, 64]]
        last = stages[-1][-1]
        rows, columns = height // 4, width // 4
        features = last * rows * columns

        trunk: list[nn.Module] = []
        inputs = channels
        for stage in stages:
            for outputs in stage:
                trunk += _convolution(inputs, outputs, wide)
                inputs = outputs
            # a maximum before a ReLU has the same bits as one behind it, on a quarter of the values; PReLU is not monotone
            trunk.insert(len(trunk) if wide else -1, nn.MaxPool2d(2))
            if wide and dropout:
                trunk.append(Dropout(dropout))
        encoder = Encoder(nn.Sequential(*trunk, nn.Flatten()), features, latent, settings.latent_activation)
        classifier = nn.Linear(latent, classes)
        _initialise(encoder)
        _initialise(classifier)
        projection = None
        if size := settings.projection or (256 if "projection" in needs else None):
            # drawn after the others, so that the encoder starts as it does without a head
            projection = nn.Sequential(nn.Linear(latent, latent), nn.ReLU(), nn.Linear(latent, size))
            classifier = nn.Linear(size, classes)
            _initialise(projection)
            _initialise(classifier)
        if "decoder" not in needs:
            return Classifier(encoder, classifier, projection)

        encoder.logvar = nn.Linear(features, latent)
        up: list[nn.Module] = [nn.Linear(latent, features)]
        if not wide:
            up.append(nn.ReLU())
        up.append(nn.Unflatten(1, (last, rows, columns)))  # [b, last, side/4, side/4]
        # outputs and strides of the transposed convolutions before the last
        if name == "cnn2":
            plan = [(64, 1), (32, 2)] if wide else [(16, 2)]
        else:
            plan = [(64, 1), (32, 2), (32, 1)] if wide else [(64, 1), (64, 2), (32, 1)]
        inputs = last
        for outputs, stride in plan:
            up += _transposed(inputs, outputs, stride, wide)
            inputs = outputs
        up += [nn.ConvTranspose2d(inputs, channels, 3, stride=2, padding=1, output_padding=1), nn.Sigmoid()]
        decoding = nn.Sequential(*up)
        _initialise(encoder.logvar)
        _initialise(decoding)
        return VAEClassifier(encoder, classifier, decoding, projection)


def _of_one_shape(
    name: str, shape: tuple[int, ...], classes: int, settings: ModelSettings, *, needs: Collection[str], seed: int
) -> Classifier:
    """A network of `ENCODERS` with a linear classifier, which starts as torch's do: the papers are silent."""
    if "decoder" in needs:
        allowed = "auto, cnn2, cnn4" if is_image(shape) else f"data of images, and not samples of shape {list(shape)}"
        raise FedfillError(f"model: {name} has no decoder, which this algorithm needs; allowed: {allowed}")
    for setting in OF_THE_LATENT:
        if getattr(settings, setting) != ModelSettings.model_fields[setting].default:
            raise FedfillError(
                f"{setting}: found {getattr(settings, setting)} with model {name}, which has one shape only; allowed: projection, weights"
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder: nn.Module
        if name == "features":
            own = seed if settings.features_seed is None else derive(settings.features_seed, "initial weights")
            encoder, features = uncentred(settings.features, shape, own)
        elif name == "hazards":
            encoder, features = nn.Flatten(), math.prod(shape)
        else:
            encoder, features = ENCODERS[f"{name}-imagenet" if settings.stem == "imagenet" else name](shape)
        projection, size = None, settings.projection or (256 if "projection" in needs else None)
        if size:
            projection = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, size))
        if name == "hazards":
            return Classifier(encoder, ProportionalHazards(size or features, classes), projection)
        if settings.last_layer in (None, "linear"):
            return Classifier(encoder, nn.Linear(size or features, classes), projection)
        return Classifier(encoder, Quadratic(size or features, classes, settings.last_layer == "diagonal"), projection)


def _initialise(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight, nn.init.calculate_gain("relu"))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
