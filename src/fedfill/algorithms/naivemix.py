"""NaiveMix: Yoon et al., "FedMix: Approximation of Mixup under Mean Augmented Federated Learning", ICLR 2021."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedfill.algorithms import Broadcast, Contribution, Request, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch, Samples, normalise
from fedfill.errors import FedfillError
from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.relay import Delivered, collect
from fedfill.protocol.server import Server
from fedfill.training.fit import Context
from fedfill.training.mixup import mixup_loss
from fedfill.tree import Record, Tree, Weights


@dataclass(frozen=True)
class Means(Record):
    """Means of groups of samples.

    Attributes:
        inputs: Mean inputs, normalised, ``[groups, ...]`` float32.
        targets: Mean one-hot labels, ``[groups, classes]`` float32.
    """

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class SharedMeans(Message):
    """Client to server: means over groups of its samples."""

    declared: ClassVar = {"means": unbounded("means of small groups of images and labels, exact")}

    means: Means


@dataclass(frozen=True)
class Mixing(Broadcast):
    """Server to client: the global model, and everybody's means until the client was heard of."""

    means: Means | None


class NaiveMix(FedAvg):
    """FedAvg on samples that are mixed with means over groups of everybody's samples (section 3.2).

    Use it when most clients have one class alone and may share exact means of raw data.
    """

    name = "naivemix"
    exchanges = True

    mix: float = Field(default=0.05, ge=0, le=1)
    """Share of the mean in a mixed sample (lambda)."""
    group_size: int = Field(default=64, ge=1)
    """Samples behind a mean, at the least (M_k); 1 shares the samples themselves."""

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, everybody's means, and the clients that hold them."""
        return {**super().server_state(initial), "means": None, "delivered": Delivered()}

    def client_state(self) -> dict[str, Tree]:
        """Everybody's means."""
        return {**super().client_state(), "means": None}

    def round(self, server: Server, t: int) -> None:
        """Exchange the means once; then select, train on mixed samples, average."""
        self.mix_and_average(server, t)

    def mix_and_average(self, server: Server, t: int) -> dict[int, Any]:
        """The round; returns its replies."""
        state = server.state
        if state.means is None:
            state.means = self.exchange(server)
        cohort = self.cohort(server, t)
        messages = {i: Mixing(state.weights, state.delivered.once(i, state.means)) for i in cohort}
        replies, mean = self.gather(server, cohort, self.train_mixed, messages)
        state.delivered = state.delivered.acknowledged(replies)
        state.weights = mean["weights"]
        return replies

    def exchange(self, server: Server) -> Means:
        """Collect the means of all clients, in client order."""

        def flaw(reply: SharedMeans) -> str | None:
            groups = len(reply.means.inputs)
            asked = ((groups, *server.sample.inputs.shape[1:]), (groups, server.classes))
            found = (reply.means.inputs.shape, reply.means.targets.shape)
            return None if found == asked else "its means are none of this task's samples"

        replies = collect(server, self.share_means, Request(), flaw, attempts=1)
        found = [reply.means for reply in replies.values()]
        if not any(len(means.inputs) for means in found):
            raise FedfillError("engine: no client shared means, so there is nothing to mix with")
        return Means(torch.cat([means.inputs for means in found]), torch.cat([means.targets for means in found]))

    @client_handler
    def share_means(self, client: Client, message: Request) -> SharedMeans:
        """Means over random groups of the client's samples."""
        return SharedMeans(group_means(client.data, client.classes, self.group_size, client.stream("groups")))

    @client_handler
    def train_mixed(self, client: Client, message: Mixing) -> Update:
        """Local epochs from the global model on mixed samples."""
        return self.on_mixtures(client, message).reply(Update)

    def on_mixtures(self, client: Client, message: Mixing) -> Contribution:
        """The local training, on mini-batches that are each mixed with one mean."""
        means = client.keep("means", message.means)

        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            k = int(torch.randint(len(means.inputs), (), generator=context.generator, device=context.generator.device))
            return self.mixed_loss(model, batch, means.inputs[k], means.targets[k])

        return self.contribute(client, message, loss)

    def mixed_loss(self, model: nn.Module, batch: Batch, mean: Tensor, target: Tensor) -> Tensor:
        """(1 - lambda) CE(f(u), y) + lambda CE(f(u), y-bar) at u = (1 - lambda) x + lambda x-bar.

        Args:
            model: In training.
            batch: Inputs ``[b, ...]`` and labels ``[b]``.
            mean: x-bar, of the shape of one input.
            target: y-bar, ``[classes]``.

        Returns:
            A scalar.
        """
        targets = target.expand(len(batch.labels), -1)  # [b, classes]
        return mixup_loss(model, mean.expand_as(batch.inputs), targets, batch.inputs, batch.labels, self.mix)


def group_means(data: Samples, classes: int, size: int, generator: torch.Generator) -> Means:
    """Means over random groups of samples, of `size` or a few more each; all samples where there are fewer.

    Args:
        data: A client's samples.
        classes: Number of classes of the task.
        size: Samples in a group at the least.
        generator: Stream of the grouping.

    Returns:
        Means of normalised inputs and of one-hot labels.
    """
    order = torch.randperm(len(data), generator=generator, device=generator.device)
    groups = torch.tensor_split(order, max(1, len(data) // size))
    inputs = [normalise(data.inputs[group]).mean(0) for group in groups]
    targets = [functional.one_hot(data.labels[group], classes).float().mean(0) for group in groups]
    return Means(torch.stack(inputs), torch.stack(targets))
