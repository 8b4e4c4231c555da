"""Units of a network whose layers stand in a row: which layers these are, and their units in another order.

A unit is an output of a linear layer or a channel of a convolution. In another order, with the columns of the next layer moved
along, the units of a hidden layer compute the same function.
"""

from __future__ import annotations

import copy
import itertools
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedfill.data.samples import normalise
from fedfill.errors import FedfillError
from fedfill.models.layers import evaluating
from fedfill.models.views import first_names
from fedfill.tree import Weights

WITH_UNITS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Types of layers whose units can be put in another order."""
ALLOWED = (
    "cnn2 and cnn4 with width=paper, cnn2fc, cnn2fc-small, or a module of linear layers and convolutions in a row, all trained, without "
    "normalisation layers, shortcuts and shared layers"
)


@dataclass(frozen=True)
class Layer:
    """A layer with units.

    Attributes:
        path: Its name among the modules.
        inputs: Units of the layer before; of the first layer, channels of an image or values of a row.
        outputs: Its own units.
    """

    path: str
    inputs: int
    outputs: int

    def of(self, weights: Weights) -> Weights:
        """The layer's tensors: its weight, and its bias where it has one."""
        names = f"{self.path}.weight", f"{self.path}.bias"
        return {name: weights[name] for name in names if name in weights}

    def incoming(self, weights: Weights) -> Tensor:
        """What each unit makes of those before it: ``[outputs, inputs r]``; r: numbers for one pair of units."""
        return weights[f"{self.path}.weight"].flatten(1)

    def biases(self, weights: Weights) -> Tensor:
        """``[outputs, 1]``, or ``[outputs, 0]`` where it has none."""
        bias = weights.get(f"{self.path}.bias")
        return weights[f"{self.path}.weight"].new_empty(self.outputs, 0) if bias is None else bias[:, None]

    def outgoing(self, weights: Weights) -> Tensor:
        """What it makes of each unit before it: ``[inputs, outputs r]``."""
        return self._by_inputs(weights).transpose(0, 1).reshape(self.inputs, -1)

    def with_inputs(self, weights: Weights, order: Tensor) -> Weights:
        """Its tensors where input i is what input ``order[i]`` was."""
        own, name = self.of(weights), f"{self.path}.weight"
        return {**own, name: self._by_inputs(weights)[:, order].reshape(own[name].shape)}

    def _by_inputs(self, weights: Weights) -> Tensor:
        # an image is flattened channel by channel, so a channel's values stand side by side, as those of a kernel do
        return weights[f"{self.path}.weight"].reshape(self.outputs, self.inputs, -1)


def reordered(weights: Weights, layers: list[Layer], n: int, order: Tensor) -> Weights:
    """The same network with the units of one hidden layer in another order.

    Args:
        weights: Of the whole network.
        layers: All its layers, in order.
        n: Which of them; not the last.
        order: Unit i is the one that was at ``order[i]``, int64 ``[outputs]``.

    Returns:
        Weights of the same names.
    """
    rows = {name: x[order] for name, x in layers[n].of(weights).items()}
    return {**weights, **rows, **layers[n + 1].with_inputs(weights, order)}


def layers_in_order(model: nn.Module, inputs: Tensor) -> list[Layer]:
    """The layers with units of a model that `require_units` let pass, in the order in which a sample meets them.

    Args:
        model: The network.
        inputs: Of one sample, normalised or as bytes, ``[1, ...]``.

    Returns:
        The last one makes the scores.
    """
    found: list[Layer] = []
    for path in _called(model, inputs)[0]:
        outputs, own = model.get_parameter(f"{path}.weight").shape[:2]
        found.append(Layer(path, found[-1].outputs if found else own, outputs))
    return found


def require_units(model: nn.Module, inputs: Tensor, algorithm: str) -> list[Layer]:
    """Check that the units of every hidden layer can be put in another order without a change of what a model computes.

    Args:
        model: The network.
        inputs: Of one sample, normalised or as bytes, ``[1, ...]``.
        algorithm: For the error's sentence.

    Returns:
        Its layers in order.

    Raises:
        FedfillError: Where it has something else than linear layers and convolutions, or they stand not in a row.
    """
    if (flaw := _flaw(model, inputs)) is not None:
        raise FedfillError(
            f"model: {algorithm} matches units of layers in a row, and {type(model).__name__} {flaw}; allowed: {ALLOWED}"
        )
    return layers_in_order(model, inputs)


def _flaw(model: nn.Module, inputs: Tensor) -> str | None:
    """Why a model's units can't be put in another order."""
    first = first_names(model)
    for name in model.state_dict():
        path, _, own = name.rpartition(".")
        layer = model.get_submodule(path)
        if not isinstance(layer, WITH_UNITS) or own not in ("weight", "bias"):
            return f"has a {type(layer).__name__}{f' ({path})' if path else ''}"
        if first.get(name) != name:
            return f"shares '{name}' with '{first.get(name)}'"
        if getattr(layer, "groups", 1) != 1:
            return f"has a convolution in groups ({path})"
        if not model.get_parameter(name).requires_grad:
            return f"does not train '{name}'"
    paths = {name.rpartition(".")[0] for name in first}
    called, scores, last = _called(model, inputs)
    for path in sorted(paths):
        if called.count(path) != 1:
            return f"calls '{path}' {called.count(path)} times for one sample"
    if not called or not isinstance(model.get_submodule(called[-1]), nn.Linear) or not torch.equal(scores, last):
        return "does not end with a linear layer"
    return _mixed(model, inputs)


def _called(model: nn.Module, inputs: Tensor) -> tuple[list[str], Tensor, Tensor]:
    """Paths of the layers with units as they are called, the model's outputs, and those of the layer called last."""
    called: list[tuple[str, Tensor]] = []
    with torch.no_grad(), evaluating(model), ExitStack() as stack:
        for path, layer in model.named_modules():
            if isinstance(layer, WITH_UNITS):
                hook = layer.register_forward_hook(
                    lambda _module, _inputs, made, path=path: called.append((path, made))
                )
                stack.callback(hook.remove)
        scores: Tensor = model(normalise(inputs))
    return [path for path, _ in called], scores, called[-1][1] if called else scores


def _mixed(model: nn.Module, inputs: Tensor) -> str | None:
    """Try a model with drawn weights: which hidden layer's units do more than feed the next layer, each in its own place."""
    trial, stream = copy.deepcopy(model).eval(), torch.Generator().manual_seed(0)
    layers = layers_in_order(model, inputs)
    for before, layer in itertools.pairwise(layers):
        own = model.get_parameter(f"{layer.path}.weight").shape[1]
        # behind a flattened image, and nowhere else, a unit stands for several inputs
        linear = isinstance(model.get_submodule(layer.path), nn.Linear)
        if own % layer.inputs or (own != layer.inputs and not linear):
            return f"does not lead from '{before.path}' to '{layer.path}'"
    x = torch.randn(4, *inputs.shape[1:], generator=stream).to(inputs.device)
    drawn = {
        name: torch.randn(w.shape, generator=stream) / max(w[0].numel(), 1) ** 0.5
        for name, w in trial.state_dict().items()
    }

    def scores(weights: Weights) -> Tensor:
        trial.load_state_dict(weights)
        return trial(x.clone())  # type: ignore[no-any-return]

    with torch.no_grad():
        made = scores(drawn)
        close = 1e-3 * float(made.abs().max())
        for n, layer in enumerate(layers[:-1]):
            found = scores(reordered(drawn, layers, n, torch.arange(layer.outputs).roll(1)))
            if not torch.allclose(found, made, rtol=0, atol=close):
                return f"uses the outputs of '{layer.path}' not in the next layer alone, or not unit by unit"
    return None
