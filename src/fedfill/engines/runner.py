"""Runs clients' handlers by the protocol's rules, whichever engine brought the message."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedfill import tree
from fedfill.data.samples import Batch, Samples
from fedfill.data.schema import Schema
from fedfill.engines.allocator import keep_freed_memory
from fedfill.engines.together import Train, alone
from fedfill.errors import ContractError
from fedfill.privacy.keyed import KeyedStream
from fedfill.privacy.sums import SUM_ALONE
from fedfill.protocol.client import Client, State
from fedfill.protocol.messages import Lost, Message, Outcome, releases_of
from fedfill.streams import torch_stream
from fedfill.training.fit import Fit, Fitted, Interrupted, LocalTraining, Resident, mini_batches
from fedfill.training.precision import Precision
from fedfill.tree import Tree, Weights

LONE = "batch norm can't be trained on one sample, but buffers=frozen or a network without it can"
"""Why a reply is lost where torch said so: a circumstance of the client's data, and no mistake of the algorithm's author."""


def refuses_one_sample(error: Exception) -> bool:
    """Whether torch's batch norm raised it because of a mini-batch with one value for each channel."""
    return isinstance(error, ValueError) and "more than 1 value per channel" in str(error)


def prefers_channels_last(model: nn.Module) -> bool:
    """Whether convolutions should run in the channels-last layout.

    It is about 1.6 times faster for plain convolutional networks on CPUs, and slower where PReLU layers stand between the
    convolutions. The rule looks at the model alone: a choice by timing would change bits from run to run.
    """
    layers = list(model.modules())
    return any(isinstance(m, nn.Conv2d) for m in layers) and not any(isinstance(m, nn.PReLU) for m in layers)


def make_resident(template: nn.Module, device: torch.device, precision: Precision = "float32") -> Resident:
    """A worker's model, in a process that is made ready for it."""
    if device.type == "cpu":
        keep_freed_memory()
    return Resident(template, device, prefers_channels_last(template), precision)


class ClientRunner:
    """Runs handlers; it keeps neither data nor states, so that each engine may keep them where it likes.

    Args:
        program: The algorithm: its handlers are looked up by name.
        classes: Number of classes of the task.
        initial: The experiment's initial weights.
        seed: Of the experiment.
        device: Where data and models live.
        timeout: Seconds that a client has for one call; None: as long as it takes.
        secret: A key that only this host has, from which noise comes in place of the seed; another one for each experiment, as
            settings that no message holds may change what is protected.
        hides: Under which condition sums over replies are all that the server gets; empty: it gets the replies.
        schema: As for `Client`.
    """

    def __init__(
        self,
        program: Any,
        *,
        classes: int,
        initial: Weights,
        seed: int,
        device: torch.device,
        timeout: float | None = None,
        secret: bytes | None = None,
        hides: str = SUM_ALONE,
        schema: Schema | None = None,
    ) -> None:
        self._program = program
        self._classes = classes
        self._initial = tree.clone(tree.to(initial, device))
        self._untouched = tree.Unchanged(self._initial)
        self._seed = seed
        self._device = device
        self._timeout = timeout
        self._secret = secret
        self._hides = hides
        self._schema = schema
        self._scratch: dict[int, dict[str, Any]] = {}

    def check(self, handler: str) -> None:
        """Make sure that no handler wrote into the initial weights."""
        if not self._untouched.holds():
            raise ContractError(f"'{handler}' wrote into the initial weights; make a copy first")

    def serve(
        self,
        resident: Resident,
        handler: str,
        i: int,
        data: Samples,
        unlabelled: Samples,
        state: Tree,
        message: Message,
        t: int,
        hidden: str | None = None,
        circle: Sequence[str] = (),
        registered: int | None = None,
        train: Train = alone,
    ) -> tuple[Outcome, Tree]:
        """Run one handler on containers of its own.

        `hidden` is as in `Client`, where this call differs from others; `circle` names whose answers are summed with this one
        and what they are made of: in another circle the noise is another. `registered` is as in `Client`. `train` does the local
        trainings.

        The state to commit is None where the handler raised, was late or broke a rule, or where its reply is not finite: then
        what was committed before stays, and a client that diverged is not lost for ever.
        """
        function = getattr(self._program, handler)
        message = tree.copy(message)
        own = State(tree.copy(state or self._program.client_state()))
        given = (message, data, unlabelled)
        untouched = tree.Unchanged((given, own.tree()))

        def asked() -> str:
            parts = {"message": message, "data": data, "unlabelled": unlabelled, "state": state}
            return hashlib.sha256(tree.to_bytes(parts)).hexdigest()

        if self._secret is not None:
            asked = functools.cache(asked)

        def secret(purpose: str) -> KeyedStream:
            # by all that the answer is made of: to the same question the same noise, to any other question other noise
            return KeyedStream(self._secret or b"", handler, purpose, t, i, asked(), *circle, device=data.labels.device)

        fits = _Fits(resident, (self._seed, t, i), self._device, train)
        client = Client(
            id=i,
            round=t,
            data=data,
            classes=self._classes,
            state=own,
            initial=self._initial,
            seed=self._seed,
            resident=resident.load,
            fit=fits,
            check=resident.check,
            batches=fits.batches,
            secret=secret if self._secret is not None else None,
            unlabelled=unlabelled,
            hidden=self._hides if hidden is None else hidden,
            together=len(circle) or None,
            registered=registered,
            scratch=self._scratch.setdefault(i, {}),
            schema=self._schema,
        )
        resident.deadline = time.monotonic() + self._timeout if self._timeout is not None else float("inf")
        reply, error = None, None
        try:
            reply = function(client, message)
        except Interrupted:
            raise
        except Exception as raised:  # an error is a reply; its traceback stays attached
            error = Lost(LONE) if refuses_one_sample(raised) else raised
        if time.monotonic() > resident.deadline:
            error = Lost(f"took longer than reply_timeout={self._timeout} s")
        spent = {"fit_seconds": fits.seconds, "train_samples": fits.samples}
        try:
            if not untouched.holds():
                raise ContractError("wrote into a received message, its data or a stored tensor; make a copy first")
            if error is not None:
                return Outcome(error=error, **spent), None  # type: ignore[arg-type]
            if not isinstance(reply, Message):
                raise ContractError(f"returned a {type(reply).__name__} in place of a Message")
            # neither a reply nor a state shares memory with what others hold, or with the worker's model
            others = (given, self._initial, resident.tensors)
            reply = _unshared(reply, (others, own.tree()))
            values = _unshared(own.tree(), (others, reply))
            size = tree.size(reply)
        except (ContractError, TypeError) as broken:
            return Outcome(error=ContractError(f"'{handler}' {broken}")), None
        try:
            releases = tuple(releases_of(reply, client.releases))
        except ContractError as unknown:
            return Outcome(error=unknown), None
        if values and not tree.is_finite(reply):
            values = None
        return Outcome(reply, None, releases, size, **spent), values  # type: ignore[arg-type]


class _Fits:
    """The local trainings of one call of a handler."""

    def __init__(self, resident: Resident, stream: tuple[int, int, int], device: torch.device, train: Train) -> None:
        self.seconds, self.samples, self._done = 0.0, 0, 0
        self._resident, self._stream, self._device, self._train = resident, stream, device, train

    def __call__(self, request: Fit) -> Fitted:
        seed, t, i = self._stream
        order, draws = (torch_stream(seed, name, t, i, self._done, device=self._device) for name in ("fit", "draws"))
        fitted, seconds = self._train(self._resident, request, order, draws)
        self._done += 1
        self.seconds += seconds
        self.samples += fitted.samples
        return fitted

    def batches(self, data: Samples, training: LocalTraining) -> Iterator[Batch]:
        """The mini-batches of a training that the handler does itself; what it does with them counts as training."""
        seed, t, i = self._stream
        order = torch_stream(seed, "fit", t, i, self._done, device=self._device)
        self._done += 1
        start = time.perf_counter()
        try:
            for batch in mini_batches(self._resident, data, training, order):
                self.samples += len(batch.labels)
                yield batch
        finally:
            self.seconds += time.perf_counter() - start


def _unshared(kept: Tree, others: Tree) -> Tree:
    """The tree with copies in the place of tensors whose memory belongs to `others`."""
    if not tree.tensors(kept):
        return tree.copy(kept)
    theirs = {_place(tensor) for tensor in tree.tensors(others)}
    return tree.map_tensors(kept, lambda x: x.detach().clone() if _place(x) in theirs else x.detach())


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
