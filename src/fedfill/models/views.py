"""Views: which tensors of a model are meant, chosen by named part or module type, never by a piece of a name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedfill.errors import FedfillError
from fedfill.tree import Weights


def weights_of(model: nn.Module) -> Weights:
    """Copies of all parameters and buffers of the model's state dict."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


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


def names_by_type(model: nn.Module, *types: type[nn.Module]) -> set[str]:
    """Names in the state dict that belong to modules of these types, wherever they stand (downsample branches too)."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, types)
        for name in module.state_dict()
    }


def require_parts(model: nn.Module, parts: Sequence[str], algorithm: str) -> None:
    """Check that the model has the parts that an algorithm names.

    Args:
        model: The model.
        parts: Names of direct children that must exist.
        algorithm: For the error's sentence.

    Raises:
        FedfillError: Where a part is missing.
    """
    have = [name for name, _ in model.named_children()]
    for name in parts:
        if name not in have:
            raise FedfillError(
                f"model: {algorithm} needs the parts {', '.join(parts)}, and {type(model).__name__} has no '{name}' "
                f"(its parts: {', '.join(have) or 'none'})"
            )
