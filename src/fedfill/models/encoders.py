"""Encoders of one shape: Fed-ZDA's, SDA-FL's and FRAug's for digits, one for rows of numbers, and ResNet-18."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import nn

from fedfill.models.residual import resnet18


def _cnn2bn(shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """The encoder of the Fed-ZDA paper (section 4.1), and how many features it gives."""
    channels, height, width = shape
    kernel, plan = (5, (16, 32)) if channels == 1 else (3, (16, 16))
    layers: list[nn.Module] = []
    inputs = channels
    for outputs in plan:
        convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
        # a maximum before a ReLU has the same bits as one behind it, on a quarter of the values
        layers += [convolution, nn.BatchNorm2d(outputs), nn.MaxPool2d(2), nn.ReLU()]
        inputs = outputs
    layers.append(nn.Flatten())
    features = inputs * (height // 4) * (width // 4)
    if channels != 1:
        layers += [nn.Linear(features, 80), nn.ReLU(), nn.Linear(80, 60), nn.ReLU()]
        features = 60
    return nn.Sequential(*layers), features


def _cnn2fc(shape: tuple[int, ...], plan: tuple[int, int], features: int) -> tuple[nn.Module, int]:
    """The encoder of the SDA-FL paper's network without widths (section 5.1), with those of McMahan et al. 2017 (section 3)."""
    channels, height, width = shape
    layers: list[nn.Module] = []
    inputs = channels
    for outputs in plan:
        layers += [nn.Conv2d(inputs, outputs, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()]
        inputs = outputs
    hidden = nn.Linear(inputs * (height // 4) * (width // 4), features)
    return nn.Sequential(*layers, nn.Flatten(), hidden, nn.ReLU()), features


def _digits6(shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """The encoder of the FRAug paper's network for digits (section 4.2), with the widths of the authors' program."""
    channels, height, width = shape
    layers: list[nn.Module] = []
    inputs = channels
    for outputs, pooled in ((64, True), (64, True), (128, False)):
        layers += [nn.Conv2d(inputs, outputs, 5, padding=2), nn.BatchNorm2d(outputs)]
        # a maximum before a ReLU has the same bits as one behind it, on a quarter of the values
        layers += [nn.MaxPool2d(3, 2, padding=1), nn.ReLU()] if pooled else [nn.ReLU()]
        inputs = outputs
    layers.append(nn.Flatten())
    features = inputs * (height // 4) * (width // 4)
    for hidden in (2048, 512):
        layers += [nn.Linear(features, hidden), nn.BatchNorm1d(hidden), nn.ReLU()]
        features = hidden
    return nn.Sequential(*layers), features


def _mlp(shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Hidden layers for inputs of any shape, flattened."""
    layers: list[nn.Module] = [nn.Flatten()]
    features = math.prod(shape)
    for hidden in (128, 64):
        layers += [nn.Linear(features, hidden), nn.BatchNorm1d(hidden), nn.ReLU()]
        features = hidden
    return nn.Sequential(*layers), features


ENCODERS: dict[str, Callable[[tuple[int, ...]], tuple[nn.Module, int]]] = {
    "cnn2bn": _cnn2bn,
    "cnn2fc": partial(_cnn2fc, plan=(32, 64), features=512),
    "cnn2fc-small": partial(_cnn2fc, plan=(16, 32), features=128),
    "digits6": _digits6,
    "mlp": _mlp,
    "resnet18": lambda shape: (resnet18(shape[0]), 512),
    "resnet18-imagenet": lambda shape: (resnet18(shape[0], stem="imagenet"), 512),
}
"""By network: the encoder for inputs of a shape, and how many features it gives."""
