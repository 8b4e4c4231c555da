"""FedDA: Wen et al., "Communication-Efficient Federated Data Augmentation on Non-IID Data", CVPR Workshops 2022; our reading of it.

Clients train auto-encoders whose decoders stay at home, and exchange what they know of each class: its mean latent code. The server
merges the codes of a class by attention, and each client decodes those of the classes that are scarce in its data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Samples
from fedfill.errors import FedfillError
from fedfill.models.views import part, rest
from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message, are_classes
from fedfill.protocol.relay import Delivered, collect
from fedfill.protocol.server import Server
from fedfill.synthesis.vae import VAEOptions, class_means, decode, latent_size, require_vae
from fedfill.tree import Record, Tree, Weights


@dataclass(frozen=True)
class Knowledge(Record):
    """Merged codes of the classes.

    Attributes:
        codes: ``[classes, l]`` float32; zeros for a class that nobody knows.
        known: ``[classes]`` bool.
    """

    codes: Tensor
    known: Tensor


@dataclass(frozen=True)
class OwnKnowledge(Message):
    """Client to server: mean codes of the classes that it has.

    Attributes:
        codes: ``[len(classes), l]`` float32.
        classes: Ascending.
    """

    declared: ClassVar = {
        "codes": unbounded("mean codes of each class, exact"),
        "classes": unbounded("which classes the client has"),
    }

    codes: Tensor
    classes: list[int]


@dataclass(frozen=True)
class Informed(Broadcast):
    """Server to client: encoder and classifier, and the merged codes until the client was heard of."""

    knowledge: Knowledge | None


class FedDACVAE(VAEOptions, FedAvg):
    """FedAvg of auto-encoders without their decoders; clients fill scarce classes with images of codes that all clients merged.

    Use it when clients lack classes and mean codes may leave them; it is feddpms without its choice of images.
    """

    name = "fedda-cvae"
    exchanges = True
    parts = ("encoder", "classifier", "decoder")

    knowledge_round: int | None = Field(default=None, ge=1)
    """Rounds before the exchange of codes; none: 40 % of all rounds."""
    spread: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Standard deviation of the noise around a merged code, in each coordinate."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Fill in when codes are exchanged, and check that the network is an auto-encoder of these images."""
        require_vae(model, inputs, self.name)
        when = self.knowledge_round or max(1, round(0.4 * rounds))
        if when > rounds:
            raise FedfillError(f"knowledge_round: found {when}; allowed: 1 to rounds, which is {rounds}")
        return super().resolved(rounds=rounds, model=model, inputs=inputs).model_copy(update={"knowledge_round": when})

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """Encoder and classifier, the merged codes, and the clients that hold them."""
        kept = {"weights": rest(initial, "decoder"), "knowledge": None, "delivered": Delivered()}
        return {**super().server_state(initial), **kept}

    def client_state(self) -> dict[str, Tree]:
        """The client's decoder, the merged codes, and its images of them."""
        return {**super().client_state(), "decoder": None, "knowledge": None, "synthetic": None}

    def round(self, server: Server, t: int) -> None:
        """Exchange codes once, when encoders are good enough; select, train, average."""
        state = server.state
        if state.knowledge is None and t >= (self.knowledge_round or 0):
            state.knowledge = self.exchange(server)
        cohort = self.cohort(server, t)
        messages = {i: Informed(state.weights, state.delivered.once(i, state.knowledge)) for i in cohort}
        replies, mean = self.gather(server, cohort, self.train_filled, messages)
        if state.knowledge is not None:
            state.delivered = state.delivered.acknowledged(replies)
        state.weights = mean["weights"]

    def exchange(self, server: Server) -> Knowledge:
        """Collect the mean codes of all clients, and merge those of each class."""
        weights = server.state.weights
        size = latent_size(server.model({**server.initial, **weights}), server.sample)

        def flaw(reply: OwnKnowledge) -> str | None:
            sound = are_classes(reply.classes, server.classes) and reply.codes.shape == (len(reply.classes), size)
            return None if sound and reply.codes.dtype == torch.float32 else "its codes are none of this task's classes"

        replies = collect(server, self.share_knowledge, Broadcast(weights), flaw, attempts=1)
        by_class: list[list[Tensor]] = [[] for _ in range(server.classes)]
        for reply in replies.values():
            for c, code in zip(reply.classes, reply.codes, strict=True):
                by_class[c].append(code)
        device = server.sample.labels.device
        nobody = torch.zeros(size, device=device)
        codes = [merged(found) if found else nobody for found in by_class]
        return Knowledge(torch.stack(codes), torch.tensor([bool(found) for found in by_class], device=device))

    @client_handler
    def share_knowledge(self, client: Client, message: Broadcast) -> OwnKnowledge:
        """Mean codes of the client's classes by the received encoder."""
        classes = [c for c, n in enumerate(client.data.counts(client.classes)) if n]
        model = client.model({**client.initial, **message.weights})
        return OwnKnowledge(class_means(model, client.data, classes, "none", 1.0), classes)

    @client_handler
    def train_filled(self, client: Client, message: Informed) -> Update:
        """Local epochs of encoder, classifier and the own decoder, on the client's samples and its images."""
        state = client.state
        knowledge = client.keep("knowledge", message.knowledge)
        if knowledge is not None and state.synthetic is None and state.decoder is not None:
            state.synthetic = self.fill(client, {**message.weights, **state.decoder}, knowledge)
        decoder = state.decoder or part(client.initial, "decoder")
        done = self.contribute(client, message, self.vae_loss, data=client.data + state.synthetic, beside=decoder)
        state.decoder = done.beside
        return done.reply(Update, samples=len(client.data))

    def fill(self, client: Client, weights: Weights, knowledge: Knowledge) -> Samples:
        """Images of the classes below the median count of those that the client has, so many that they reach it."""
        counts = torch.bincount(client.data.labels, minlength=client.classes)  # [classes]
        lacking = (counts[counts > 0].median() - counts).clamp(min=0) * knowledge.known
        labels = torch.arange(client.classes, device=counts.device).repeat_interleave(lacking)
        if not len(labels):
            return client.data[:0]
        codes = knowledge.codes[labels]  # [n, l]
        noise = torch.empty_like(codes).normal_(generator=client.stream("codes"))
        return Samples(decode(client.model(weights), codes + self.spread * noise), labels)


def merged(codes: Sequence[Tensor]) -> Tensor:
    """The mean of several clients' codes of a class, weighted by attention towards their plain mean.

    Args:
        codes: k_i, ``[l]`` each, at least one.

    Returns:
        ``[l]``: sum_i a_i k_i with a = softmax of <k_i, mean> / sqrt(l).
    """
    stacked = torch.stack(list(codes))  # [clients, l]
    attention = torch.softmax(stacked @ stacked.mean(0) / stacked.shape[1] ** 0.5, dim=0)  # [clients]
    return attention @ stacked
