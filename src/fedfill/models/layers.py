"""Layers whose random draws come from a named stream in place of torch's global generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedfill.errors import FedfillError


class Streams:
    """The streams of several clients whose models are run as one program under `torch.vmap`.

    Args:
        streams: One for each client, in the order of the program's first dimension.
    """

    def __init__(self, streams: Sequence[torch.Generator]) -> None:
        self.streams = tuple(streams)


class _Drawn(torch.autograd.Function):
    """A tensor filled with draws, for each client of a stacked program from a stream of its own."""

    @staticmethod
    def forward(like: Tensor, fill: Fill, streams: Streams) -> Tensor:
        raise RuntimeError("streams of several clients are for a program that is stacked")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        return None, None, None

    @staticmethod
    def vmap(info: Any, places: tuple[Any, ...], like: Tensor, fill: Fill, streams: Streams) -> tuple[Tensor, int]:
        shape = like.movedim(places[0], 0).shape[1:] if places[0] is not None else like.shape
        drawn = like.new_empty((info.batch_size, *shape))
        for own, stream in zip(drawn, streams.streams, strict=True):
            fill(own, stream)
        return drawn, 0


Fill = Callable[[Tensor, torch.Generator | None], Tensor]


def drawn(empty: Tensor, fill: Fill, source: torch.Generator | Streams | None) -> Tensor:
    """A tensor filled with draws.

    Args:
        empty: Of its shape; written into.
        fill: Fills a tensor in place from a stream.
        source: One stream, or those of several clients.

    Returns:
        The tensor.
    """
    return _Drawn.apply(empty, fill, source) if isinstance(source, Streams) else fill(empty, source)  # type: ignore[no-untyped-call]


class Dropout(nn.Module):
    """Dropout with draws from `generator`: worker threads share the global one, so results would depend on their number.

    Args:
        p: Probability of dropping, in [0, 1).
        channels: Drop whole channels (the second dimension) in place of single elements.
    """

    def __init__(self, p: float = 0.5, *, channels: bool = False) -> None:
        super().__init__()
        self.p = p
        self.channels = channels
        self.generator: torch.Generator | Streams | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements with probability `p` and scale the rest by 1 / (1 - p), in training mode only."""
        if not self.training or self.p == 0:
            return x
        keep = 1 - self.p
        mask = x.new_empty(x.shape[:2] + (1,) * (x.dim() - 2)) if self.channels else torch.empty_like(x)
        return x * drawn(mask, lambda m, stream: m.bernoulli_(keep, generator=stream), self.generator).div_(keep)

    def extra_repr(self) -> str:
        """Shown in the module's printed form."""
        return f"p={self.p}, channels={self.channels}"


class Gaussian(nn.Module):
    """The reparameterised draw z = mu + exp(logvar / 2) * eps of a VAE (Kingma and Welling 2014), eps from `generator`."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: torch.Generator | Streams | None = None

    def forward(self, mu: Tensor, logvar: Tensor) -> Tensor:
        """A draw for each row.

        Args:
            mu: Means, ``[b, l]``.
            logvar: Logarithms of the variances, ``[b, l]``.

        Returns:
            Codes, ``[b, l]``.
        """
        eps = drawn(torch.empty_like(mu), lambda x, stream: x.normal_(generator=stream), self.generator)
        return mu + torch.exp(0.5 * logvar) * eps


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
GLOBAL_DRAWS = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
INNER_DROPOUT = (nn.RNNBase, nn.MultiheadAttention)


def with_streams(model: nn.Module) -> nn.Module:
    """Put `Dropout` in the place of torch's own dropout layers, in place.

    Args:
        model: Any module.

    Returns:
        The same module.

    Raises:
        FedfillError: Where the module draws at random in a way that can't be given a stream.
    """
    for name, child in list(model._modules.items()):  # named_children leaves out a layer's second place
        if child is None:
            continue
        if isinstance(child, DROPOUTS) and child.p == 1:
            raise FedfillError(f"model: the layer '{name}' drops everything (p=1); allowed: p below 1")
        if isinstance(child, nn.Dropout):
            setattr(model, name, Dropout(child.p))
        elif isinstance(child, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            setattr(model, name, Dropout(child.p, channels=True))
        elif isinstance(child, GLOBAL_DRAWS) or (isinstance(child, INNER_DROPOUT) and child.dropout):
            raise FedfillError(
                f"model: the layer '{name}' is a {type(child).__name__}, which draws from torch's global generator; "
                "allowed: Dropout, Dropout1d, Dropout2d, Dropout3d and layers that draw nothing"
            )
        else:
            with_streams(child)
    return model


@contextmanager
def output_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what a module returns each time that it is called for a while, so that nothing is computed twice."""
    seen: list[Tensor] = []
    hook = module.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def inputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what a module receives each time that it is called for a while."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Let all layers work in evaluation mode for a while; each has its own mode back afterwards."""
    modes = [(layer, layer.training) for layer in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training


@contextmanager
def draws_from(model: nn.Module, generator: torch.Generator | Streams) -> Iterator[None]:
    """Let the random layers of `model` draw from `generator` for a while."""
    layers = [layer for layer in model.modules() if isinstance(layer, Dropout | Gaussian)]
    for layer in layers:
        layer.generator = generator
    try:
        yield
    finally:
        for layer in layers:
            layer.generator = None
