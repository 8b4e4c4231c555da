"""Local training: a client's epochs of stochastic gradient descent, on one resident model per worker."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from fedfill.data.samples import Batch, Samples, normalise
from fedfill.models.layers import draws_from
from fedfill.streams import torch_stream
from fedfill.training.augmentation import Augmentation, augmented
from fedfill.training.optimizers import Optimizer, OptimizerName, Rule
from fedfill.training.precision import Precision, autocast
from fedfill.tree import Weights

Buffers = Literal["average", "frozen"]


@dataclass(frozen=True)
class LocalTraining:
    """The budget and the optimizer of one local training.

    Attributes:
        epochs: Passes over the data; ignored where `steps` is given.
        steps: Number of mini-batches in place of epochs, or None.
        batch_size: Samples in a mini-batch.
        optimizer: ``adam``, ``adamw`` or ``sgd``, fresh at each call.
        learning_rate: Step size.
        momentum: Of ``sgd``.
        weight_decay: L2 penalty (decoupled for ``adamw``).
        buffers: Whether running statistics of normalisation layers are learnt (``average``: the server averages them) or
            stay as they were received and are normalised with (``frozen``).
        augmentation: Of the images of each mini-batch; None: they are as they are.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 64
    optimizer: OptimizerName = "adam"
    learning_rate: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    buffers: Buffers = "average"
    augmentation: Augmentation | None = None

    @property
    def rule(self) -> Rule:
        """How the optimizer moves parameters."""
        return Rule(self.optimizer, self.learning_rate, self.momentum, self.weight_decay)


@dataclass(frozen=True)
class Context:
    """What a loss may know beside model and batch.

    Attributes:
        received: The weights that this training started from, fixed ones among them; never changed.
        generator: The client's stream for draws inside the loss.
        step: Mini-batches done so far.
    """

    received: Weights
    generator: torch.Generator
    step: int


Loss = Callable[[nn.Module, Batch, Context], Tensor]


@dataclass(frozen=True)
class Penalty:
    """What an objective has beside its loss: mu/2 ||w - v||^2 + <c, w> over parameters w.

    Its gradient mu (w - v) + c needs no network. It is added in place to the loss's, which takes a pass over the parameters and
    not a tenth of a training step, as a term of the loss does. Parameters that are not named, or not trained, are left alone.

    Attributes:
        mu: Weight of the square, at least 0.
        centre: v, by the names of parameters.
        slope: c, likewise.
    """

    mu: float = 0.0
    centre: Weights = field(default_factory=dict)
    slope: Weights = field(default_factory=dict)

    def adder(self, model: nn.Module) -> Callable[[], None]:
        """What adds its gradient to that of the model's parameters.

        Args:
            model: Whose parameters they are; they must not be replaced after it.

        Returns:
            To call after each backward pass.
        """
        own: Weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        held = [name for name in self.centre if name in own and self.mu]
        moved = [name for name in self.slope if name in own]
        near, centre = [own[name] for name in held], [self.centre[name] for name in held]
        steep, slope = [own[name] for name in moved], [self.slope[name] for name in moved]

        @torch.no_grad()
        def add() -> None:
            if near:
                torch._foreach_add_(_gradients(near), torch._foreach_sub(near, centre), alpha=self.mu)
            if steep:
                torch._foreach_add_(_gradients(steep), slope)

        return add


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    """Those of parameters; zeros where the loss does not depend on one."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@dataclass(frozen=True)
class Fit:
    """A request for local training: what ``client.fit`` hands to the engine.

    Attributes:
        weights: Start; only these tensors are trained and returned. Tensors of the model that are neither among them nor
            `fixed` are filled with NaN, so that a loss can't read another client's leftovers unnoticed.
        loss: A pure function (model, batch, context) -> scalar.
        data: Training samples.
        training: Budget and optimizer.
        samples_per_epoch: Draw this many samples per epoch, uniformly and without replacement; None: all.
        penalty: Of the parameters, beside the loss.
        fixed: Further tensors of the model, which stay as they are; running statistics among them are normalised with.
    """

    weights: Weights
    loss: Loss
    data: Samples
    training: LocalTraining
    samples_per_epoch: int | None = None
    penalty: Penalty | None = None
    fixed: Weights = field(default_factory=dict)

    @property
    def loaded(self) -> Weights:
        """All tensors that the model has to hold at the start."""
        return {**self.weights, **self.fixed} if self.fixed else self.weights


@dataclass(frozen=True)
class Fitted:
    """The outcome of a local training.

    Attributes:
        weights: The trained tensors, under the names that were given.
        steps: Mini-batches done.
        samples: Samples passed through, repeats counted.
        loss: Mean of the mini-batch losses, without the penalty; 0 where there was no step.
    """

    weights: Weights
    steps: int
    samples: int
    loss: float


class Interrupted(Exception):
    """Raised in a worker when the run is being stopped."""


class Resident:
    """One worker's model, into which each client's weights are copied in turn.

    Args:
        template: Copied once.
        device: Where it lives.
        channels_last: Whether images and convolutions use the channels-last layout.
        precision: What `fit` computes in.

    Attributes:
        model: The model.
        tensors: Its parameters and buffers by name.
        autocast: Makes what forward pass and loss of a training step run in.
        stop: Set from another thread to end a running `fit` at its next mini-batch.
        deadline: When, by `time.monotonic`, a running `fit` ends at its next mini-batch.
    """

    def __init__(
        self, template: nn.Module, device: torch.device, channels_last: bool, precision: Precision = "float32"
    ) -> None:
        self.autocast = functools.partial(autocast, device, precision)
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.model = copy.deepcopy(template).to(device)
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.tensors: Weights = self.model.state_dict(keep_vars=False)
        self.stop = False
        self.deadline = float("inf")

    def check(self) -> None:
        """End what runs where it is no longer wanted.

        Raises:
            Interrupted: Where the worker was told to stop.
            TimeoutError: Where the deadline passed.
        """
        if self.stop:
            raise Interrupted
        if time.monotonic() > self.deadline:
            raise TimeoutError("the time for this call is over")

    def load(self, weights: Weights) -> nn.Module:
        """Copy `weights` into the model and poison what they leave out with NaN.

        Args:
            weights: Tensors by name.

        Returns:
            The resident model, valid until the next `load`.

        Raises:
            KeyError: Where a name is not the model's.
            ValueError: Where a shape is not the model's.
        """
        for name, tensor in weights.items():
            if tensor.shape != self.tensors[name].shape:
                raise ValueError(
                    f"'{name}' has shape {list(tensor.shape)}, and {list(self.tensors[name].shape)} in the model"
                )
            self.tensors[name].copy_(tensor)
        if len(weights) < len(self.tensors):
            for name, tensor in self.tensors.items():
                if name not in weights:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        for parameter in self.model.parameters():
            parameter.grad = None
        return self.model

    def read(self, names: Weights) -> Weights:
        """Copies of the model's tensors under these names, in the plain layout."""
        return {name: self.tensors[name].clone(memory_format=torch.contiguous_format) for name in names}

    def inputs(self, data: Samples, index: Tensor | slice) -> Tensor:
        """The normalised inputs at these positions in the model's layout."""
        inputs = data.inputs[index]
        if inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=self.layout)
        return normalise(inputs)


def batches(order: Tensor, batch_size: int) -> Iterator[Tensor]:
    """Consecutive mini-batches of `order`.

    A last batch of a single sample joins the one before it, since batch norm can't train on one sample.

    Args:
        order: Sample positions, ``[n]``.
        batch_size: At least 1.

    Yields:
        Positions, ``[b]``.
    """
    n = len(order)
    start = 0
    while start < n:
        stop = min(start + batch_size, n)
        if batch_size > 1 and n - stop == 1:
            stop = n
        yield order[start:stop]
        start = stop


def positions(
    data: Samples, training: LocalTraining, order: torch.Generator, samples_per_epoch: int | None = None
) -> Iterator[Tensor]:
    """The positions of the samples of each mini-batch of one local training.

    Args:
        data: Training samples.
        training: How many mini-batches, of which size.
        order: The stream of their order, on the data's device.
        samples_per_epoch: As in `Fit`.

    Yields:
        Positions, ``[b]``; none where there are no samples.
    """
    n, device = len(data), data.labels.device
    per_epoch = n if samples_per_epoch is None else min(samples_per_epoch, n)
    epoch = steps = 0
    while n and (training.steps is not None or epoch < training.epochs):
        for index in batches(torch.randperm(n, generator=order, device=device)[:per_epoch], training.batch_size):
            if steps == training.steps:
                return
            yield index
            steps += 1
        epoch += 1


def mini_batches(
    resident: Resident,
    data: Samples,
    training: LocalTraining,
    order: torch.Generator,
    samples_per_epoch: int | None = None,
) -> Iterator[Batch]:
    """The mini-batches of one local training, in the layout of the worker's model.

    Args:
        resident: The worker's model.
        data: Training samples.
        training: How many, of which size.
        order: The stream of their order, on the data's device; augmentation has one that is derived from it, so that the order
            is the same with and without.
        samples_per_epoch: As in `Fit`.

    Yields:
        So many mini-batches; none where there are no samples.

    Raises:
        Interrupted: Where the worker was told to stop.
        TimeoutError: Where the deadline passed.
    """
    changes = torch_stream(order.initial_seed(), "augmentation", device=data.labels.device)
    for index in positions(data, training, order, samples_per_epoch):
        resident.check()
        inputs = resident.inputs(data, index)
        if training.augmentation is not None:
            inputs = augmented(inputs, training.augmentation, changes).contiguous(memory_format=resident.layout)
        yield Batch(inputs, data.labels[index], index)


def fit(resident: Resident, request: Fit, order: torch.Generator, draws: torch.Generator) -> Fitted:
    """Train the resident model as the request says.

    Args:
        resident: The worker's model.
        request: What to train from which weights, on what, and how.
        order: The stream of the mini-batches, on the model's device.
        draws: The stream of what layers and losses draw, on the model's device; one of its own, so that algorithms which
            draw in their loss see the same mini-batches as those which don't.

    Returns:
        New weights and what was done.

    Raises:
        ValueError: Where `samples_per_epoch` is below 1, or there is nothing to train.
        Interrupted: Where the worker was told to stop.
        TimeoutError: Where the deadline passed.
    """
    received = request.loaded
    model = resident.load(received)
    training = request.training
    training_mode(model, training.buffers, request.fixed)
    parameters = [p for name, p in model.named_parameters() if name in request.weights and p.requires_grad]
    if not parameters:
        raise ValueError("fit needs at least one trainable parameter among the weights")
    optimizer = Optimizer(parameters, training.rule)
    if request.samples_per_epoch is not None and request.samples_per_epoch < 1:
        raise ValueError(f"samples_per_epoch is {request.samples_per_epoch}; at least 1 is needed")
    total = torch.zeros((), device=request.data.labels.device)
    add_penalty = request.penalty.adder(model) if request.penalty else None
    steps = samples = 0
    with draws_from(model, draws):
        for batch in mini_batches(resident, request.data, training, order, request.samples_per_epoch):
            optimizer.zero_grad()
            with resident.autocast():
                loss = request.loss(model, batch, Context(received, draws, steps))
            loss.backward(inputs=parameters if request.fixed else None)  # type: ignore[no-untyped-call]
            if add_penalty is not None:
                add_penalty()
            optimizer.step()
            total += loss.detach()
            steps += 1
            samples += len(batch.labels)
    return Fitted(resident.read(request.weights), steps, samples, float(total) / max(steps, 1))


def training_mode(model: nn.Module, buffers: Buffers, fixed: Collection[str] = ()) -> None:
    """Put a model into training mode; running statistics that are frozen or `fixed`, by name, are normalised with and stay."""
    model.train()
    if buffers == "frozen" or fixed:
        for name, layer in model.named_modules():
            if getattr(layer, "running_mean", None) is not None:
                layer.train(buffers != "frozen" and f"{name}.running_mean".removeprefix(".") not in fixed)
