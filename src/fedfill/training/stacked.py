"""Local trainings of several clients as one program: their parameters stacked, one step of all of them at a time.

On a GPU a step of a small network takes the time of starting its kernels, whoever many samples it has; one program starts them
once for all clients. On a CPU it takes longer than one client after another, as convolutions with a kernel for each client are
slow there.

Mini-batches and draws are those of each client's own streams. What a client gets is what `fedfill.training.fit.fit` gives,
but for the order in which sums are rounded, and the layout of images in memory, along which dropout draws.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedfill.data.samples import Batch, normalise
from fedfill.models.layers import Streams, draws_from
from fedfill.streams import torch_stream
from fedfill.training.augmentation import augmented
from fedfill.training.fit import Context, Fit, Fitted, Resident, positions, training_mode
from fedfill.training.functional import Program
from fedfill.training.optimizers import Momenta
from fedfill.tree import Weights


class NotStackedError(Exception):
    """Raised where trainings can't be one program: a loss or a layer does what it can't do for many clients at once."""


def kind_of(request: Fit) -> tuple[Any, ...]:
    """What two trainings must have in common to be stacked: the loss, the budget, the tensors, the samples' shape."""
    penalty = request.penalty
    terms = penalty and (penalty.mu, tuple(penalty.centre), tuple(penalty.slope))
    shapes = tuple((name, tensor.shape) for name, tensor in request.loaded.items())
    inputs = request.data.inputs
    return request.loss, request.training, shapes, tuple(request.fixed), terms, inputs.shape[1:], inputs.dtype


def fit_stacked(
    resident: Resident,
    requests: Sequence[Fit],
    orders: Sequence[torch.Generator],
    draws: Sequence[torch.Generator],
) -> list[Fitted]:
    """Train several clients' models at once.

    Args:
        resident: The worker's model, whose layers are used with tensors of all clients.
        requests: Of one kind (`kind_of`), one for each client.
        orders: Their streams of mini-batches.
        draws: Their streams of what layers draw.

    Returns:
        What each training brought, in the order of the requests.

    Raises:
        NotStackedError: Where the loss or a layer can't be run so; nothing was trained, and the streams have moved on.
        Interrupted: Where the worker was told to stop.
        TimeoutError: Where the deadline passed.
    """
    if any(request.samples_per_epoch is not None and request.samples_per_epoch < 1 for request in requests):
        raise NotStackedError("samples_per_epoch")
    first = requests[0]
    model = resident.load(first.loaded)
    training_mode(model, first.training.buffers, first.fixed)
    program = Program(model, first.loss)
    trained = [name for name, p in model.named_parameters() if name in first.weights and p.requires_grad]
    if not trained:
        raise NotStackedError("nothing to train")
    stack = _Stack(requests, trained, resident)
    ahead = _MiniBatches(requests, orders)
    total = torch.zeros(len(requests), device=stack.device)
    steps, samples = [0] * len(requests), [0] * len(requests)
    active = list(range(len(requests)))
    while True:
        resident.check()
        places = {k: index for k in active if (index := next(ahead.positions[k], None)) is not None}
        active = list(places)
        if not active:
            break
        sizes: dict[int, list[int]] = defaultdict(list)
        for k, index in places.items():
            sizes[len(index)].append(k)
        for size, members in sizes.items():
            batch = ahead.batch(members, [places[k] for k in members])
            try:
                losses = stack.step(program, members, batch, [draws[k] for k in members], steps[members[0]])
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                raise NotStackedError(str(error)) from error
            total[members] += losses
            for k in members:
                steps[k] += 1
                samples[k] += size
    means = (total / torch.tensor(steps, device=total.device).clamp(min=1)).tolist()
    return [Fitted(*done) for done in zip(stack.apart(), steps, samples, means, strict=True)]


class _MiniBatches:
    """What mini-batches of several clients are made of.

    All clients' samples lie behind one another, so that one step's are found at once.

    Args:
        requests: What the clients are asked to train.
        orders: By client, the stream that orders its samples.

    Attributes:
        positions: By client, the positions of the samples of each of its mini-batches.
    """

    def __init__(self, requests: Sequence[Fit], orders: Sequence[torch.Generator]) -> None:
        self._inputs = torch.cat([request.data.inputs for request in requests])
        self._labels = torch.cat([request.data.labels for request in requests])
        device = self._labels.device
        lengths = [len(request.data) for request in requests]
        self._starts = [sum(lengths[:k]) for k in range(len(lengths))]
        self._training = requests[0].training
        self._changes = [torch_stream(order.initial_seed(), "augmentation", device=device) for order in orders]
        self.positions = [
            positions(request.data, request.training, order, request.samples_per_epoch)
            for request, order in zip(requests, orders, strict=True)
        ]

    def batch(self, members: Sequence[int], places: Sequence[Tensor]) -> Batch:
        """The mini-batches of some clients, one behind the other: inputs ``[k, b, ...]``, labels and positions ``[k, b]``."""
        index = torch.stack(list(places))
        starts = torch.tensor([self._starts[k] for k in members], device=index.device)
        whole = index + starts[:, None]
        inputs = normalise(self._inputs[whole])
        if self._training.augmentation is not None:
            kind = self._training.augmentation
            inputs = torch.stack([augmented(x, kind, self._changes[k]) for k, x in zip(members, inputs, strict=True)])
        return Batch(inputs, self._labels[whole], index)


class _Stack:
    """The tensors of all clients ``[K, ...]``, and what their optimizers remember."""

    def __init__(self, requests: Sequence[Fit], trained: Sequence[str], resident: Resident) -> None:
        first = requests[0]
        # torch chooses its form: the fused one of Adam has one count of steps for all clients
        self._rule = replace(first.training.rule, fused=False)
        self._trained = list(trained)
        self._names = list(first.weights)
        loaded = [request.loaded for request in requests]
        self.tensors = {name: _stacked([each[name] for each in loaded], own=True) for name in first.loaded}
        self.device = next(iter(self.tensors.values())).device
        self._received = {name: _stacked([each[name] for each in loaded]) for name in first.loaded}
        self._momenta = {name: self._start(self.tensors[name]) for name in trained}
        self._mu, self._centre, self._slope = 0.0, {}, {}
        if first.penalty is not None:
            penalties = [cast("Any", r.penalty) for r in requests]
            self._mu = first.penalty.mu
            centred = [name for name in first.penalty.centre if name in self._momenta and self._mu]
            self._centre = {name: _stacked([p.centre[name] for p in penalties]) for name in centred}
            sloped = [name for name in first.penalty.slope if name in self._momenta]
            self._slope = {name: _stacked([p.slope[name] for p in penalties]) for name in sloped}

    def _start(self, tensor: Tensor) -> Momenta:
        """What the optimizer keeps of all clients' values of a parameter, but for the number of steps."""
        if self._rule.kind == "sgd":
            return {"momentum_buffer": torch.zeros_like(tensor)} if self._rule.momentum else {}
        return {part: x for part, x in self._rule.start(tensor).items() if part != "step"}

    def apart(self) -> list[Weights]:
        """Each client's tensors."""
        rows = {name: self.tensors[name].unbind() for name in self._names}
        return [{name: row[k] for name, row in rows.items()} for k in range(len(next(iter(rows.values()))))]

    def step(
        self, program: Program, members: list[int], batch: Batch, draws: list[torch.Generator], done: int
    ) -> Tensor:
        """One step of some clients, which all have made as many before; their losses ``[len(members)]``."""
        everyone = len(members) == len(next(iter(self.tensors.values())))
        index = torch.tensor(members, device=self.device)

        def picked(tensor: Tensor) -> Tensor:
            shared = tensor.shape[0] == 1 or everyone
            return tensor if shared else tensor[index]

        current = {name: picked(tensor) for name, tensor in self.tensors.items()}
        leaves = {name: current[name].detach().requires_grad_() for name in self._trained}
        lent = {**current, **leaves}
        # what all have in common goes in once
        received = {name: picked(tensor) for name, tensor in self._received.items()}
        places = {name: None if len(tensor) == 1 else 0 for name, tensor in received.items()}
        received = {name: tensor[0] if len(tensor) == 1 else tensor for name, tensor in received.items()}

        def loss(tensors: Weights, received: Weights, inputs: Tensor, labels: Tensor, index: Tensor) -> Tensor:
            context = Context(received, cast("torch.Generator", _NoDraws()), done)
            named = {f"model.{name}": tensor for name, tensor in tensors.items()}
            return cast("Tensor", functional_call(program, named, (inputs, labels, index, context)))

        with draws_from(program.model, Streams(draws)):
            losses = vmap(loss, in_dims=(0, places, 0, 0, 0), randomness="error")(
                lent, received, batch.inputs, batch.labels, batch.index
            )
        found = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        gradients = [torch.zeros_like(w) if g is None else g for w, g in zip(leaves.values(), found, strict=True)]
        with torch.no_grad():
            by_name = dict(zip(leaves, gradients, strict=True))
            for name, centre in self._centre.items():
                by_name[name].add_(current[name] - picked(centre), alpha=self._mu)
            for name, slope in self._slope.items():
                by_name[name].add_(picked(slope))
            momenta = {name: {part: picked(x) for part, x in parts.items()} for name, parts in self._momenta.items()}
            used = [name for name, g in zip(leaves, found, strict=True) if g is not None or name in self._slope]
            used += [name for name in self._centre if name not in used]
            counted = [{**momenta[n], "step": torch.tensor(float(done))} for n in used]
            self._rule.step([current[n] for n in used], [by_name[n] for n in used], counted)
            if not everyone:
                for name, tensor in self.tensors.items():
                    tensor[index] = current[name]
                for name, parts in momenta.items():
                    for part, tensor in parts.items():
                        self._momenta[name][part][index] = tensor
        return losses.detach()


class _NoDraws:
    """Stands where a loss would find the client's stream: what it draws there can't be drawn for many clients at once."""


def _stacked(tensors: Sequence[Tensor], *, own: bool = False) -> Tensor:
    """``[K, ...]``; where all are one tensor and nobody writes into them ``[1, ...]``."""
    if all(tensor is tensors[0] for tensor in tensors):
        once = tensors[0][None]
        return once.expand(len(tensors), *tensors[0].shape).clone() if own else once
    return torch.stack(list(tensors))
