"""FedDG: Liu et al., "FedDG: Federated Domain Generalization ... via Episodic Learning in Continuous Frequency Space", CVPR 2021.

Clients share amplitude spectra of a few images, which tell how these look and hardly what they show, and train on their own images
in the others' looks too. What is for segmentation alone, the contrast at boundaries, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Request, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch, normalise
from fedfill.errors import FedfillError
from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.relay import Delivered, collect
from fedfill.protocol.server import Server
from fedfill.training.fit import Context
from fedfill.training.functional import loss_at
from fedfill.training.losses import cross_entropy
from fedfill.training.spectra import half_width, low_amplitudes, with_amplitudes
from fedfill.tree import Record, Tree, Weights


@dataclass(frozen=True)
class Bank(Record):
    """Amplitudes of everybody's images.

    Attributes:
        amplitudes: Of the low frequencies, ``[images, channels, s, s]`` float32.
        owners: Whose each is, ``[images]`` int64.
    """

    amplitudes: Tensor
    owners: Tensor


@dataclass(frozen=True)
class SharedSpectra(Message):
    """Client to server: amplitudes of some of its images."""

    declared: ClassVar = {"amplitudes": unbounded("amplitude spectra of single images, exact")}

    amplitudes: Tensor


@dataclass(frozen=True)
class Styled(Broadcast):
    """Server to client: the global model, and everybody's amplitudes until the client was heard of."""

    bank: Bank | None


class FedDG(FedAvg):
    """FedAvg of clients that also train on their images with the amplitudes of others', in an episode after a step on their own.

    Use it when images look different from client to client, and the model shall serve looks that no client has.
    """

    name = "feddg"
    exchanges = True

    band: float = Field(default=0.1, ge=0, le=0.5)
    """Which frequencies are low, as a share of the images' shorter side (L)."""
    bank_size: int = Field(default=50, ge=1)
    """Images of each client whose amplitudes are shared, at the most."""
    mix: float = Field(default=1.0, ge=0, le=1)
    """Largest share of the foreign amplitude in a mixed one; 0: images stay as they are."""
    episode: bool = True
    """Whether the loss on the changed images is taken after a step on the others."""
    inner_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """With episode=true: size of that step (beta)."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that the inputs are images with a known range."""
        if inputs.dtype != torch.uint8 or inputs.dim() != 4:
            raise FedfillError(
                f"data: feddg exchanges amplitudes of images, found values of {inputs.dtype} and shape {list(inputs.shape[1:])}; "
                "give images as bytes"
            )
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, everybody's amplitudes, and the clients that hold them."""
        return {**super().server_state(initial), "bank": None, "delivered": Delivered()}

    def client_state(self) -> dict[str, Tree]:
        """Everybody's amplitudes."""
        return {**super().client_state(), "bank": None}

    def round(self, server: Server, t: int) -> None:
        """Exchange amplitudes once; then select, train, average."""
        state = server.state
        if state.bank is None:
            state.bank = self.exchange(server)
        cohort = self.cohort(server, t)
        messages = {i: Styled(state.weights, state.delivered.once(i, state.bank)) for i in cohort}
        replies, mean = self.gather(server, cohort, self.train_styled, messages)
        state.delivered = state.delivered.acknowledged(replies)
        state.weights = mean["weights"]

    def exchange(self, server: Server) -> Bank:
        """Collect the amplitudes of all clients, in client order."""
        shape = low_amplitudes(unit(normalise(server.sample.inputs)), self.half(server.sample.inputs)).shape[1:]

        def flaw(reply: SharedSpectra) -> str | None:
            found = reply.amplitudes
            sound = found.dtype == torch.float32 and found.shape[1:] == shape and len(found) <= self.bank_size
            sound = sound and bool((found >= 0).all())
            return None if sound else "its amplitudes are none of this task's images"

        replies = collect(server, self.share_spectra, Request(), flaw, attempts=1)
        if not replies:
            raise FedfillError("engine: no client shared amplitudes, so there are no other looks to train on")
        found = {i: reply.amplitudes for i, reply in replies.items()}
        device = server.sample.labels.device
        owners = [torch.full((len(own),), i, device=device) for i, own in found.items()]
        return Bank(torch.cat(list(found.values())), torch.cat(owners))

    @client_handler
    def share_spectra(self, client: Client, message: Request) -> SharedSpectra:
        """Amplitudes of some of the client's images, drawn at random."""
        stream = client.stream("bank")
        some = torch.randperm(len(client.data), generator=stream, device=stream.device)[: self.bank_size]
        inputs = client.data.inputs[some]
        return SharedSpectra(low_amplitudes(unit(normalise(inputs)), self.half(inputs)))

    @client_handler
    def train_styled(self, client: Client, message: Styled) -> Update:
        """Local epochs from the global model on the client's images and on the same with foreign amplitudes."""
        bank = client.keep("bank", message.bank)
        foreign = bank.amplitudes[bank.owners != client.id]

        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            return self.episodic(model, batch, self.styled(batch, foreign, context.generator), context)

        return self.contribute(client, message, loss).reply(Update)

    def styled(self, batch: Batch, foreign: Tensor, generator: torch.Generator) -> Batch:
        """The mini-batch with amplitudes on the way to foreign ones, each image's drawn anew.

        Args:
            batch: Normalised images ``[b, channels, height, width]`` and labels.
            foreign: Amplitudes of other clients' images, ``[m, channels, s, s]``.
            generator: Stream of the draws.

        Returns:
            As many samples; without a foreign image, the same.
        """
        if not self.mix or not len(foreign):
            return batch
        b, device = len(batch.labels), generator.device
        theirs = foreign[torch.randint(len(foreign), (b,), generator=generator, device=device)]
        share = self.mix * torch.rand(b, generator=generator, device=device)
        images = with_amplitudes(unit(batch.inputs), theirs, share, self.half(batch.inputs))
        return Batch(2 * images - 1, batch.labels, batch.index)

    def episodic(self, model: nn.Module, batch: Batch, styled: Batch, context: Context) -> Tensor:
        """F(w; x) + F(w - beta grad F(w; x); x'), the gradient without a derivative of its own."""
        inner = cross_entropy(model, batch)
        if not self.episode:
            return inner + cross_entropy(model, styled)
        own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        g = torch.autograd.grad(inner, list(own.values()), retain_graph=True, allow_unused=True)
        after = {name: p - self.inner_rate * d for (name, p), d in zip(own.items(), g, strict=True) if d is not None}
        return inner + loss_at(lambda model, batch, context: cross_entropy(model, batch), model, after, styled, context)

    def half(self, inputs: Tensor) -> int:
        """Low frequencies on each side of 0."""
        return half_width(inputs, self.band)


def unit(inputs: Tensor) -> Tensor:
    """Normalised images, in -1..1, in 0..1: where the mean is no negative number its phase is 0."""
    return (inputs + 1) / 2
