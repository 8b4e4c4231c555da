"""What a handler sees of its client: data, state, streams of randomness, and local training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fedfill.data.samples import Batch, Samples
from fedfill.data.schema import Schema
from fedfill.errors import ContractError
from fedfill.privacy.keyed import KeyedStream, seeded
from fedfill.privacy.releases import Release
from fedfill.protocol.messages import Message
from fedfill.streams import torch_stream
from fedfill.training.fit import Fit, Fitted, LocalTraining, Loss, Penalty
from fedfill.tree import Tree, Weights

Handler = Callable[[Any, "Client", Any], Message]
H = TypeVar("H", bound=Handler)
BoundHandler = Callable[["Client", Any], Message]


def client_handler(function: H) -> H:
    """Mark a method ``(self, client, message) -> reply`` as one that servers may call."""
    function.is_client_handler = True  # type: ignore[attr-defined]
    return function


class State:
    """Named trees that outlive a round: ``state.weights = ...``; written to the checkpoint, nothing hidden beside them.

    Args:
        values: Initial values by name.
    """

    def __init__(self, values: Mapping[str, Tree] | None = None) -> None:
        object.__setattr__(self, "_values", dict(values or {}))

    def __getattr__(self, name: str) -> Any:
        """The value of this name."""
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(
                f"the state holds no '{name}'; give it a first value in server_state or client_state"
            ) from None

    def __setattr__(self, name: str, value: Tree) -> None:
        """Set the value of this name."""
        if hasattr(State, name):
            raise ContractError(f"'{name}' can't be a name in a state; choose another")
        self.__dict__["_values"][name] = value

    def tree(self) -> dict[str, Tree]:
        """All values by name."""
        return cast("dict[str, Tree]", self.__dict__["_values"])


class Client:
    """What a handler sees of its client; all but `seed`, `resident`, `fit`, `check`, `batches` and `secret` are attributes.

    Args:
        id: The client's number, 0..clients-1.
        round: The current round.
        data: The client's labelled training samples; they never leave it.
        classes: Number of classes of the task.
        state: What this client keeps between rounds.
        initial: The experiment's initial weights, which every party can make from the seed: they cost no bytes.
        seed: Of the experiment.
        resident: Loads weights into the worker's model.
        fit: Trains the worker's model; None: nobody may.
        check: Raises where what runs is no longer wanted.
        batches: Makes the mini-batches of a training.
        secret: Makes a stream of noise that nobody else can follow; None: noise comes from the seed.
        unlabelled: The client's samples without labels; None: it has none, and the attribute is empty.
        hidden: Under which condition the server gets no single reply of this call, but the sum alone; empty: it gets the reply.
        together: With how many clients' replies, its own among them, a hidden one is summed; None: with those of all that are asked.
        registered: How many clients there are altogether, as this one knows from elsewhere than the server; None: as the server says.
        scratch: What may be computed again at any time, such as features of a frozen network; it is no part of the state.
        schema: What all agreed on about the table, of whose rows `data` are; None: nothing was.
    """

    def __init__(
        self,
        *,
        id: int,
        round: int,
        data: Samples,
        classes: int,
        state: State,
        initial: Weights,
        seed: int,
        resident: Callable[[Weights], nn.Module],
        fit: Callable[[Fit], Fitted] | None = None,
        check: Callable[[], None] = lambda: None,
        batches: Callable[[Samples, LocalTraining], Iterator[Batch]] = lambda data, training: iter(()),
        secret: Callable[[str], KeyedStream] | None = None,
        unlabelled: Samples | None = None,
        hidden: str = "",
        together: int | None = None,
        registered: int | None = None,
        scratch: dict[str, Any] | None = None,
        schema: Schema | None = None,
    ) -> None:
        self.id = id
        self.round = round
        self.data = data
        self.unlabelled = data[:0] if unlabelled is None else unlabelled
        self.classes = classes
        self.state = state
        self.initial = initial
        self.schema = schema
        self.hidden = hidden
        self.together = together
        self.registered = registered
        self.releases: dict[str, Release] = {}
        self.scratch = {} if scratch is None else scratch
        self._seed = seed
        self._resident = resident
        self._fit = fit
        self._check = check
        self._batches = batches
        self._secret = secret
        self._streams: dict[str, torch.Generator] = {}
        self._noises: dict[str, KeyedStream] = {}

    @property
    def blank(self) -> torch.Tensor:
        """One input of nothing, ``[1, ...]``, of the type and shape of the client's, who may have none."""
        return self.data.inputs.new_zeros(1, *self.data.inputs.shape[1:])

    def stream(self, purpose: str) -> torch.Generator:
        """The stream of randomness of (seed, purpose, round, client), on the data's device.

        Asked for again in the same handler it goes on where it was; handlers that are called in the same round draw the
        same values for the same purpose, so each needs purposes of its own.
        """
        if purpose not in self._streams:
            self._streams[purpose] = torch_stream(
                self._seed, purpose, self.round, self.id, device=self.data.labels.device
            )
        return self._streams[purpose]

    def noise(self, purpose: str) -> KeyedStream:
        """The stream for noise, and for coins, that shall protect this client's data: ChaCha20 under a key.

        In a simulation the key is made of the seed, so that a run can be repeated to the bit. In a deployment it is the
        host's own, and nobody else may know it. Asked for again in the same handler the stream goes on where it was.
        """
        if purpose not in self._noises:
            device = self.data.labels.device
            self._noises[purpose] = (
                seeded(self._seed, purpose, self.round, self.id, device=device)
                if self._secret is None
                else self._secret(purpose)
            )
        return self._noises[purpose]

    def unguaranteed(self, purpose: str) -> torch.Generator:
        """As `noise`, for what has no guarantee whatever its noise is: torch's generator, `stream` in a simulation.

        In a deployment its seed is of the host's key, so that nobody can simply draw the same.
        """
        if self._secret is None:
            return self.stream(purpose)
        if purpose not in self._streams:
            seed = int(self._secret(purpose).words(1)[0]) >> 1
            self._streams[purpose] = torch.Generator(device=self.data.labels.device).manual_seed(seed)
        return self._streams[purpose]

    def model(self, weights: Weights) -> nn.Module:
        """A model that holds `weights`, in evaluation mode, valid until the next `model` or `fit` of this handler."""
        return self._resident(weights).eval()

    def batches(self, training: LocalTraining, *, data: Samples | None = None) -> Iterator[Batch]:
        """The mini-batches of a training whose steps the handler takes itself, on the model of `model`.

        For what `fit` can't say: several optimizers, networks beside the model. The order is that of `fit`, and so are the
        ends: where the run is being stopped, or the time is over.

        Args:
            training: How many, of which size.
            data: Training samples; None: the client's own.

        Returns:
            One after the other.
        """
        return self._batches(self.data if data is None else data, training)

    def keep(self, name: str, received: Tree) -> Any:
        """What the server sends once: kept in the state where it came, and as it was kept where it did not.

        Args:
            name: In the client's state.
            received: A field of the message; None: it came before.

        Returns:
            What is kept.
        """
        if received is not None:
            setattr(self.state, name, received)
        return getattr(self.state, name)

    def check(self) -> None:
        """End the handler where the run is being stopped or its time is over; for long work of its own, beside `fit`."""
        self._check()

    def release(self, field_name: str, release: Release) -> None:
        """Declare what a field of this handler's reply releases about the client's data."""
        self.releases[field_name] = release

    def fit(
        self,
        weights: Weights,
        loss: Loss,
        training: LocalTraining,
        *,
        data: Samples | None = None,
        samples_per_epoch: int | None = None,
        penalty: Penalty | None = None,
        fixed: Weights | None = None,
    ) -> Fitted:
        """Local training; the one heavy call of a handler. An engine may let it wait for other clients' calls in its threads.

        Args:
            weights: Start; these tensors are trained and returned.
            loss: A pure function (model, batch, context) -> scalar.
            training: Budget and optimizer.
            data: Training samples; None: the client's own.
            samples_per_epoch: Uniform draws without replacement per epoch; None: every sample.
            penalty: Of the parameters, beside the loss.
            fixed: Further tensors of the model, which stay as they are.

        Returns:
            Trained weights, steps, samples and mean loss.
        """
        if self._fit is None:
            raise ContractError("this client has no model to train")
        own = self.data if data is None else data
        return self._fit(Fit(weights, loss, own, training, samples_per_epoch, penalty, fixed or {}))
