"""Forward-mode differentiation of plain networks, chains of well-known layers: how the scores move when all inputs move in one direction.

torch's own forward mode has one state per process, and workers are threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.models.classifiers import Classifier, Encoder

# the tangent of a layer's output from (layer, input, output, tangent of the input)
Rule = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def _convolution(layer: nn.Module, _x: Tensor, _y: Tensor, tangent: Tensor) -> Tensor:
    assert isinstance(layer, nn.Conv2d)
    return layer._conv_forward(tangent, layer.weight, None)  # type: ignore[no-any-return]


def _linear(layer: nn.Module, _x: Tensor, _y: Tensor, tangent: Tensor) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return functional.linear(tangent, layer.weight)


def _max_pool(layer: nn.Module, x: Tensor, _y: Tensor, tangent: Tensor) -> Tensor:
    """The tangents at the places of the maxima."""
    assert isinstance(layer, nn.MaxPool2d)
    with torch.no_grad():
        _, index = functional.max_pool2d(
            x, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode, return_indices=True
        )
    b, c, height, width = index.shape
    # with the channels last, as they lie in memory
    places = index.permute(0, 2, 3, 1).reshape(b, height * width, c)
    values = tangent.permute(0, 2, 3, 1).reshape(len(tangent), -1, c).expand(b, -1, -1)  # [b, height * width before, c]
    return values.gather(1, places).reshape(b, height, width, c).permute(0, 3, 1, 2)


RULES: dict[type[nn.Module], Rule] = {
    nn.Conv2d: _convolution,
    nn.Linear: _linear,
    nn.MaxPool2d: _max_pool,
    nn.ReLU: lambda _layer, _x, y, tangent: tangent * (y > 0),
    nn.Sigmoid: lambda _layer, _x, y, tangent: tangent * (y * (1 - y)),
    nn.Tanh: lambda _layer, _x, y, tangent: tangent * (1 - y * y),
    nn.Flatten: lambda layer, _x, _y, tangent: layer.forward(tangent),
    nn.Identity: lambda _layer, _x, _y, tangent: tangent,
}
"""By type of layer; a subclass may compute something else, and has none."""
CHAINS = {nn.Sequential, Classifier, Encoder}
"""Modules that hand each part's output to the next part and compute nothing themselves."""


def is_plain(model: nn.Module) -> bool:
    """Whether `jvp` knows all that a network computes.

    Args:
        model: Any.

    Returns:
        Whether it is a chain of layers with a rule, none of which works in place, and without hooks, which may change what
        goes on.
    """
    if any(part._forward_hooks or part._forward_pre_hooks for part in model.modules()):
        return False
    return all(
        type(part) in CHAINS
        if next(part.children(), None)
        else type(part) in RULES and not getattr(part, "inplace", False) and getattr(part, "start_dim", 1) == 1
        for part in model.modules()
    )


def jvp(model: nn.Module, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, and their derivative when every input moves in one direction; both keep their graphs to the parameters.

    The model is called as usual, and a hook behind each layer carries the tangent along.

    Args:
        model: A plain network.
        x: Inputs, ``[b, ...]``.
        direction: Of the shape of one input.

    Returns:
        Scores ``[b, classes]`` and J(x) direction, ``[b, classes]``.
    """
    tangent = direction.unsqueeze(0)  # [1, ...] until a layer makes samples differ

    def carry(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal tangent
        tangent = RULES[type(layer)](layer, inputs[0], output, tangent)

    hooks = [part.register_forward_hook(carry) for part in model.modules() if type(part) in RULES]
    try:
        scores = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return scores, tangent.expand_as(scores)
