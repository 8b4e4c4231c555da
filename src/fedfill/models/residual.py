"""Residual networks: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016."""

from __future__ import annotations

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm beside a shortcut (figure 2), added before the last ReLU.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out; where they differ, or with a stride, the shortcut is a 1x1 convolution with batch norm.
        stride: Of the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """``[b, inputs, h, w]`` to ``[b, outputs, h / stride, w / stride]``."""
        return self.relu(self.residual(x) + self.shortcut(x))  # type: ignore[no-any-return]


def resnet18(channels: int, stem: str = "small") -> nn.Sequential:
    """ResNet-18 without its last layer; for small images one 3x3 convolution without pooling stands in the place of the 7x7 one.

    Convolutions start normal with the variance of their fan-out (He et al. 2015), normalisation layers as the identity.

    Args:
        channels: Of the images.
        stem: ``small``, or ``imagenet`` for the paper's (table 1), which brings images to a quarter of their side.

    Returns:
        Maps ``[b, channels, h, w]`` to ``[b, 512]``.
    """
    layers: list[nn.Module] = [nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    if stem == "imagenet":
        layers[0] = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        layers.insert(2, nn.MaxPool2d(3, 2, padding=1))  # before the ReLU: the same bits
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1)]
        inputs = outputs
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network
