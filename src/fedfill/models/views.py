"""Views: which tensors of a model are meant, chosen by named part or module type, never by a piece of a name."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from fedfill.data.samples import normalise
from fedfill.errors import FedfillError
from fedfill.models.classifiers import Encoder
from fedfill.models.layers import inputs_of, output_of
from fedfill.models.quadratic import Quadratic
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


def layers_of(weights: Weights) -> list[list[str]]:
    """Names of tensors by the layer that holds them, in the model's order."""
    groups: dict[str, list[str]] = {}
    for name in weights:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return list(groups.values())


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


def require_linear_head(model: nn.Module, inputs: Tensor, algorithm: str) -> nn.Linear:
    """Check that a model is a linear head on an encoder and nothing else, for what trains nothing else.

    Args:
        model: The model.
        inputs: Of one sample, normalised or as bytes, ``[1, ...]``.
        algorithm: For the error's sentence.

    Returns:
        The head, the part ``classifier``.

    Raises:
        FedfillError: Where it is anything else.
    """
    linear = dict(model.named_children()).get("classifier")
    if not isinstance(linear, nn.Linear) or getattr(model, "projection", None) is not None:
        raise FedfillError(
            f"model: {algorithm} needs a linear head named classifier on an encoder, and {type(model).__name__} has "
            f"{'a projection before it' if isinstance(linear, nn.Linear) else f'a {type(linear).__name__} there'}; "
            "allowed: a built-in network without projection, or a module with the parts encoder and classifier = torch.nn.Linear"
        )
    name, generator = type(model).__name__, torch.Generator().manual_seed(0)
    trial = copy.deepcopy(model).eval()
    encoder: nn.Module = trial.encoder  # type: ignore[assignment]
    head: nn.Linear = trial.classifier  # type: ignore[assignment]
    with torch.no_grad():
        extractor = {id(parameter) for parameter in encoder.parameters()}
        for parameter in trial.parameters():
            # a layer in between may begin with zeros, which would hide it, and so may a head
            if id(parameter) not in extractor and parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        try:
            x = normalise(inputs)
            scores, v = trial(x), encoder(x)
        except Exception as error:  # whatever a foreign module may raise, whose forward may change x first
            raise FedfillError(
                f"model: {algorithm} trains classifier(encoder(x)), and {name} or its encoder does not take x "
                f"({type(error).__name__}); allowed: a forward that is classifier(encoder(x))"
            ) from error
        size = head.in_features
        if not isinstance(v, Tensor) or list(v.shape) != [1, size]:
            what = f"embeddings of shape {list(v.shape)}" if isinstance(v, Tensor) else f"a {type(v).__name__} of them"
        elif not torch.allclose(head(v), scores, rtol=1e-4, atol=1e-5, equal_nan=True):
            what = "other scores than its classifier on its encoder"
        else:
            return linear
    raise FedfillError(
        f"model: {algorithm} trains classifier(encoder(x)) and nothing beside it, and {name} makes {what}; "
        f"allowed: embeddings of shape [samples, {size}], and a forward that is classifier(encoder(x))"
    )


def last_linear(model: nn.Module, inputs: Tensor, algorithm: str) -> str:
    """Where a model's last layer is, for what fits that layer alone.

    Args:
        model: Any; it is tried in evaluation mode.
        inputs: Of one sample, normalised or as bytes, ``[1, ...]``.
        algorithm: For the error's sentence.

    Returns:
        The path of the linear layer, or the `Quadratic`, whose outputs are the model's scores; of several the last.

    Raises:
        FedfillError: Where no linear layer's outputs are.
    """
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Quadratic)]
    training = model.training
    with torch.no_grad(), ExitStack() as stack:
        seen = {name: stack.enter_context(output_of(module)) for name, module in linear}
        scores = model.eval()(normalise(inputs))
    if training:
        model.train()
    for name in reversed(seen):
        if len(seen[name]) == 1 and torch.equal(seen[name][0], scores):
            return str(name)
    raise FedfillError(
        f"model: {algorithm} fits the last layer of a network, and what {type(model).__name__} returns is not the output of a "
        "torch.nn.Linear; allowed: a built-in network, or a module whose forward ends with a linear layer"
    )


def feature_range(model: nn.Module) -> tuple[float, float]:
    """Between which numbers the activation behind a model's ``encoder`` keeps every feature; infinite where nothing does."""
    encoder = getattr(model, "encoder", None)
    steps = list(encoder.children()) if isinstance(encoder, nn.Sequential) else [getattr(encoder, "activation", None)]
    last = None if getattr(model, "projection", None) is not None or not steps else steps[-1]
    return (
        0.0 if isinstance(last, nn.Sigmoid | nn.ReLU) else -math.inf,
        1.0 if isinstance(last, nn.Sigmoid) else math.inf,
    )


def radius(model: nn.Module, layer: str, inputs: Tensor) -> float:
    """Length of the longest feature vector that a layer can receive; infinite where nothing that is known bounds it.

    Args:
        model: In evaluation mode.
        layer: Its path.
        inputs: Of one sample, normalised or as bytes, ``[1, ...]``.

    Returns:
        The ``radius`` of the encoder (1 of a feature map), and the root of how many features there are behind a sigmoid; what
        stands between the encoder and the layer has no bound.
    """
    encoder = getattr(model, "encoder", None)
    if isinstance(encoder, Encoder) and isinstance(encoder.activation, nn.Sigmoid):
        bound = math.sqrt(encoder.mu.out_features)
    elif encoder is None or not math.isfinite(bound := float(getattr(encoder, "radius", math.inf))):
        return math.inf
    with torch.no_grad(), output_of(encoder) as made, inputs_of(model.get_submodule(layer)) as received:
        model(normalise(inputs))
    return bound if len(made) == len(received) == 1 and torch.equal(made[0], received[0]) else math.inf
