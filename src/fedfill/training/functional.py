"""A loss as a function of a model's tensors.

What it is, and its gradient, elsewhere than where the model stands; and how much it says of each tensor, by the Fisher information.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fedfill.data.samples import Batch, Samples, normalise
from fedfill.models.views import first_names
from fedfill.training.fit import Context, Loss
from fedfill.tree import Weights, zeros_like

GRADIENTS_AT_ONCE = 1 << 24
"""Numbers of all samples' own gradients that are held at once."""


class Program(nn.Module):
    """A loss as a module, so that its model can be lent other tensors.

    Args:
        model: What the loss is of.
        loss: A pure function (model, batch, context) -> scalar.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, inputs: Tensor, labels: Tensor, index: Tensor, context: Context) -> Tensor:
        """The loss of one mini-batch, a scalar."""
        return self.loss(self.model, Batch(inputs, labels, index), context)


def loss_at(loss: Loss, model: nn.Module, lent: Weights, batch: Batch, context: Context) -> Tensor:
    """A loss of a model with other tensors in the place of some of its own.

    Args:
        loss: A pure function (model, batch, context) -> scalar.
        model: Keeps its tensors, but for running statistics that are not among `lent`.
        lent: By the names of the model; of what layers share, the first name alone.
        batch: One mini-batch.
        context: As a loss gets it.

    Returns:
        A scalar, with a graph to `lent` and to the model's other parameters.
    """
    named = {f"model.{name}": tensor for name, tensor in lent.items()}
    given = (batch.inputs, batch.labels, batch.index, context)
    return cast("Tensor", functional_call(Program(model, loss), named, given))


def gradient(
    loss: Loss, model: nn.Module, batch: Batch, context: Context, *, at: Weights | None = None, create_graph: bool = False
) -> Weights:  # fmt: skip
    """The gradient of a loss where the model stands, or elsewhere, taken without a trace.

    Running statistics stay, and the stream of draws is put back, so that the next pass drops the same units.

    Args:
        loss: A pure function (model, batch, context) -> scalar.
        model: In the mode in which it is trained.
        batch: One mini-batch.
        context: As a loss gets it.
        at: Where it is taken, by the names of parameters; None: where the model stands.
        create_graph: Whether the gradient itself can be differentiated.

    Returns:
        By the names of the parameters on which the loss depends, of what layers share the first.
    """
    draws = context.generator.get_state()
    still = {name: buffer.clone() for name, buffer in model.named_buffers()}
    own: Weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if at is not None:
        own = {name: x.detach().requires_grad_() for name, x in at.items()}
    # a network may work in place on what it is given
    given = Batch(batch.inputs.clone(), batch.labels, batch.index)
    here = loss_at(loss, model, still if at is None else {**still, **own}, given, context)
    found = torch.autograd.grad(here, list(own.values()), allow_unused=True, create_graph=create_graph)
    context.generator.set_state(draws)
    return {name: g for name, g in zip(own, found, strict=True) if g is not None}


def fisher_information(model: nn.Module, parameters: Weights, samples: Samples) -> Weights:
    """The diagonal of the empirical Fisher information: the mean square of each sample's own gradient of its log-likelihood.

    Args:
        model: In evaluation mode.
        parameters: Its own, by name; what layers share has several names.
        samples: ``[n, ...]``; with none of them it is 0.

    Returns:
        Of the names and shapes of the parameters.
    """
    first = first_names(model)
    own = {name: w for name, w in parameters.items() if first[name] == name}

    def surprise(tensors: Weights, x: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, tensors, (x[None],)), label[None])

    each = vmap(grad(surprise), in_dims=(None, 0, 0))
    total = zeros_like(own)
    size = max(1, GRADIENTS_AT_ONCE // max(1, sum(w.numel() for w in own.values())))
    for start in range(0, len(samples), size):
        some = samples[start : start + size]
        for name, g in each(own, normalise(some.inputs), some.labels).items():
            total[name] += g.square().sum(0)
    return {name: total[first[name]] / max(1, len(samples)) for name in parameters}
