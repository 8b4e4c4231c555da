"""Views: which tensors of a model are meant, chosen by named part or module type, never by a piece of a name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fedfill.errors import FedfillError
from fedfill.tree import Weights

NORMALISATION = "normalisation layers"
"""What some algorithms need in a network, beside parts with names."""


def weights_of(model: nn.Module) -> Weights:
    """Copies of all parameters and buffers of the model's state dict."""
    plain = torch.contiguous_format
    return {name: tensor.detach().clone(memory_format=plain) for name, tensor in model.state_dict().items()}


def part(weights: Weights, *names: str) -> Weights:
    """The tensors that belong to the named parts (the model's direct children), buffers included.

    Args:
        weights: Tensors by their names in the state dict.
        *names: Names of parts, such as ``"encoder"``.

    Returns:
        The same tensors, in the order of `weights`.
    """
    return {key: tensor for key, tensor in weights.items() if key.split(".", 1)[0] in names}


def rest(weights: Weights, *names: str) -> Weights:
    """The tensors that `part` leaves out."""
    return {key: tensor for key, tensor in weights.items() if key.split(".", 1)[0] not in names}


def trainable(model: nn.Module, weights: Weights) -> Weights:
    """Those of the tensors that are trainable parameters of the model: no buffers, nothing that is frozen.

    A parameter that two layers share has two names, and both are there.
    """
    named = model.named_parameters(remove_duplicate=False)
    return {name: weights[name] for name, p in named if p.requires_grad and name in weights}


def first_names(model: nn.Module) -> dict[str, str]:
    """By each name of a parameter the first name of the same: one that layers share has several, any other only its own."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def names_by_type(model: nn.Module, *types: type[nn.Module]) -> set[str]:
    """Names in the state dict that belong to modules of these types, wherever they stand (downsample branches too)."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, types)
        for name in module.state_dict()
    }


def normalisation(model: nn.Module) -> set[str]:
    """Names in the state dict that belong to normalisation layers of any kind: scales, shifts and running statistics."""
    # the bases are private, and every layer of torch that normalises is one of these or has them as its base
    batch, instance = nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm
    return names_by_type(model, batch, instance, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def require_parts(model: nn.Module, needs: Sequence[str], algorithm: str) -> None:
    """Check that the model has what an algorithm needs.

    Args:
        model: The model.
        needs: Names of direct children that must exist, and `NORMALISATION`.
        algorithm: For the error's sentence.

    Raises:
        FedfillError: Where a part is missing.
    """
    if NORMALISATION in needs and not normalisation(model):
        raise FedfillError(
            f"model: {algorithm} needs normalisation layers, and {type(model).__name__} has none; allowed: --model auto, "
            "--model cnn2bn, --model digits6, --model resnet18, width=wide, or a module with such layers"
        )
    have = [name for name, _ in model.named_children()]
    parts = [name for name in needs if name != NORMALISATION]
    for name in parts:
        if name not in have:
            raise FedfillError(
                f"model: {algorithm} needs the parts {', '.join(parts)}, and {type(model).__name__} has no '{name}' "
                f"(its parts: {', '.join(have) or 'none'})"
            )
