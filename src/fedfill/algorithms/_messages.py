"""Messages of a training, what one starts from, and what it brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from fedfill.data.samples import Samples
from fedfill.models.views import trainable
from fedfill.privacy.releases import Release, unbounded
from fedfill.protocol.client import Client
from fedfill.protocol.messages import Message
from fedfill.training.fit import LocalTraining
from fedfill.tree import Weights


@dataclass(frozen=True)
class Request(Message):
    """Server to client: nothing but the request that the handler's name says."""


@dataclass(frozen=True)
class Broadcast(Message):
    """Server to client: the shared tensors of the model, and what the local objective needs beside them.

    Attributes:
        weights: By the names of the model.
        control: By the names of parameters; `Composable.gather` fills it in.
    """

    weights: Weights
    control: Weights | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Update(Message):
    """Client to server: what one local training brings.

    Attributes:
        weights: The shared tensors, as the aggregation wants them; FedAvg takes the trained ones as they are.
        samples: Number of samples behind them.
        scale: A number of the aggregation's.
        control: What the local objective sends beside the model.
    """

    declared: ClassVar[Mapping[str, Release]] = {
        "weights": unbounded("model update, sent as it is"),
        "samples": unbounded("number of samples, sent as it is"),
        "scale": unbounded("a number of the local training, sent as it is"),
        "control": unbounded("correction of the local training, sent as it is"),
    }

    weights: Weights
    samples: int
    scale: float | None = field(default=None, kw_only=True)
    control: Weights | None = field(default=None, kw_only=True)


U = TypeVar("U", bound=Update)


@dataclass(frozen=True)
class Start:
    """What one local training starts from.

    Attributes:
        client: Who trains; its state holds what the local objective keeps between rounds.
        data: Training samples, synthetic ones among them where the algorithm adds some.
        weights: The shared tensors, as received.
        control: What the server sent beside them.
        training: Budget and optimizer.
        draws_beside: Whether the loss passes other samples through the model than those of the mini-batch.
    """

    client: Client
    data: Samples
    weights: Weights
    control: Weights | None
    training: LocalTraining
    draws_beside: bool = False

    def parameters(self) -> Weights:
        """Those of the shared tensors that are trained: no buffers."""
        return trainable(self.client.model(self.weights), self.weights)


@dataclass(frozen=True)
class Contribution:
    """What one local training brought.

    Attributes:
        update: What the aggregation and the local objective send.
        trained: The shared tensors as they were trained.
        beside: The tensors that were trained along.
        loss: Mean of the mini-batches' losses.
    """

    update: Update
    trained: Weights
    beside: Weights
    loss: float

    def reply(self, kind: type[U], **more: Any) -> U:
        """The message to send.

        Args:
            kind: `Update`, or a message that extends it.
            **more: Its further fields, and those that it has otherwise.

        Returns:
            A message of this kind.
        """
        return kind(**{**vars(self.update), **more})
