"""Weights to begin with, from a file of the user's: by our names, or by those that torchvision gives its resnet18."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fedfill.errors import FedfillError
from fedfill.models.residual import BasicBlock
from fedfill.tree import Weights

HEAD = "classifier."
_INSIDE = {
    "conv1": "residual.0",
    "bn1": "residual.1",
    "conv2": "residual.3",
    "bn2": "residual.4",
    "downsample.0": "shortcut.0",
    "downsample.1": "shortcut.1",
}
"""Torchvision's names of a block's layers, and ours."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NOT_NEGATIVE = ("running_var", "num_batches_tracked")


def load(model: nn.Module, file: str) -> str:
    """Put the weights of a file into a model.

    The head is taken where it fits the classes, and stays as it is where it doesn't or where there is none. Everything else
    has to be there; but old files lack the counters of batch norm, which then begin at 0.

    Args:
        model: A built-in network, changed in place.
        file: ``.safetensors``, or a state dict as ``.pt`` or ``.pth``, of which nothing but tensors is read.

    Returns:
        A sentence on what was taken.

    Raises:
        FedfillError: Where the file can't be read or doesn't fit; the model is then as it was.
    """
    found: dict[str, tuple[str, Tensor]] = {}
    for given, tensor in _read(file).items():
        name = _ours(model, given)
        if name in found:
            raise FedfillError(
                f"model.weights: {file} has '{found[name][0]}' and '{given}' for one tensor; allowed: one"
            )
        found[name] = (given, tensor)
    own: Weights = model.state_dict()
    head = {name for name in own if name.startswith(HEAD)}
    fits = all(name in found and found[name][1].shape == own[name].shape for name in head)
    taken: Weights = {}
    for name, tensor in own.items():
        if name in head and not fits:
            continue
        if name in found:
            given, new = found[name]
            known = new.dtype in (_FLOATS if tensor.is_floating_point() else _INTEGERS)
            if new.shape != tensor.shape or not known:
                raise FedfillError(
                    f"model.weights: '{given}' in {file} is {_kind(new)}, and the network has {_kind(tensor)} there; allowed: weights "
                    "of this network (--model, model.stem, which is imagenet in torchvision's, and the images' channels decide on its shapes)"
                )
            taken[name] = new = new.to(tensor.dtype)
            if not bool(torch.isfinite(new).all()):
                raise FedfillError(
                    f"model.weights: '{given}' in {file} holds a NaN, an infinity or a number beyond {tensor.dtype}; allowed: finite numbers"
                )
            if name.endswith(_NOT_NEGATIVE) and bool((new < 0).any()):
                raise FedfillError(f"model.weights: '{given}' in {file} holds a negative number; allowed: 0 or more")
        elif name.endswith("num_batches_tracked"):
            taken[name] = torch.zeros_like(tensor)
        else:
            raise FedfillError(
                f"model.weights: {file} has no '{name}'; allowed: all tensors of the network but its head's, by our names or "
                "torchvision's"
            )
    unknown = [given for name, (given, _) in found.items() if name not in own and not name.startswith(HEAD)]
    if unknown:
        raise FedfillError(
            f"model.weights: {file} has '{unknown[0]}', which the network has not; allowed: its tensors alone"
        )
    model.load_state_dict(taken, strict=False)
    said = "its head among them" if fits else "but not its head, which doesn't fit these classes and begins as drawn"
    return f"The network begins with the weights of {file}, {said}."


def _ours(model: nn.Module, name: str) -> str:
    """Our name of a tensor of torchvision's resnet18; any other name as it is."""
    layer, _, tensor = name.rpartition(".")
    first = layer.split(".")[0]
    if first == "fc":
        return HEAD + tensor
    if layer in ("conv1", "bn1"):
        return f"encoder.{int(layer == 'bn1')}.{tensor}"
    if first not in ("layer1", "layer2", "layer3", "layer4"):
        return name
    blocks = [path for path, module in model.named_modules() if isinstance(module, BasicBlock)]
    _, _, rest = layer.partition(".")
    block, _, inside = rest.partition(".")
    if block not in ("0", "1") or inside not in _INSIDE or len(blocks) != 8:
        return name
    return f"{blocks[2 * int(first[-1]) - 2 + int(block)]}.{_INSIDE[inside]}.{tensor}"


def _read(file: str) -> Weights:
    try:
        path = Path(file).expanduser()
        there = path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, a folder closed to us, or a user who is unknown
        raise FedfillError(
            f"model.weights: {file} can't be looked for ({type(error).__name__}: {error}); allowed: a file that is there"
        ) from error
    if path.suffix.lower() not in (".safetensors", ".pt", ".pth"):
        raise FedfillError(f"model.weights: found {file}; allowed: a file that ends in .safetensors, .pt or .pth")
    if not there:
        raise FedfillError(f"model.weights: found no file {file}; allowed: one that is there")
    try:
        held: Any
        if path.suffix.lower() == ".safetensors":
            held = safetensors.torch.load_file(path)
        else:
            held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes torch raise whatever comes first
        raise FedfillError(
            f"model.weights: {file} can't be read ({type(error).__name__}); allowed: a whole file with tensors alone, as "
            "safetensors or as torch.save(model.state_dict(), file)"
        ) from error
    if not isinstance(held, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in held.items()
    ):
        beside = (
            next((name for name, x in held.items() if not isinstance(x, Tensor)), None)
            if isinstance(held, dict)
            else None
        )
        raise FedfillError(
            f"model.weights: {file} holds {'a ' + type(held).__name__ if beside is None else repr(beside) + ', which is no tensor'}; "
            "allowed: a state dict, which is tensors by name and nothing beside them"
        )
    for name, tensor in held.items():
        if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise FedfillError(
                f"model.weights: '{name}' in {file} is sparse, nested, quantized or without values; allowed: plain tensors"
            )
    return held


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
