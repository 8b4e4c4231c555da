"""FedCVAE: Heinbaugh et al., "Data-Free One-Shot Federated Learning Under Very High Statistical Heterogeneity", ICLR 2023."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill import tree
from fedfill.algorithms import Algorithm
from fedfill.data.samples import Samples
from fedfill.errors import FedfillError
from fedfill.privacy import sums as privacy
from fedfill.privacy.releases import dpsgd, unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import HEAVIEST, Message, shapes_of
from fedfill.protocol.relay import collect
from fedfill.protocol.server import Server
from fedfill.synthesis import cvae
from fedfill.synthesis.cvae import Drawn, Mixture, Privacy
from fedfill.synthesis.cvae_networks import CVAESettings, decoder_of, require_images, start
from fedfill.training.aggregation import Mean, combined
from fedfill.tree import Tree, Weights

FEWEST = 2
"""Records that a client must have: the decoder of one record is that record."""


@dataclass(frozen=True)
class Begin(Message):
    """Server to client: the conditional VAE that everybody starts from, encoder and decoder."""

    weights: Weights


@dataclass(frozen=True)
class Own(Message):
    """Client to server: what it learned, and from how much.

    Attributes:
        decoder: Tensors of its decoder, running statistics among them; None: it has too few records for one.
        counts: Its records of each class, ``[C]`` int64; noisy ones with noise=dpsgd.
    """

    decoder: Weights | None
    counts: Tensor


class FedCVAE(Algorithm):
    """One round: each client's decoder makes the images on which the server trains the classifier.

    Use it when there is time for one exchange, clients hold few classes each, and decoders may leave them.
    """

    name = "fedcvae"
    own_loops = "the clients' conditional VAEs"
    single_round = True
    paper: ClassVar = {"": {"batch_size": 32}}
    unfair = "it has one round; give the others rounds=1 and its local_epochs"

    local_epochs: int = Field(default=20, ge=1)
    """Passes of a client over its data, with its conditional VAE."""
    aggregate: Literal["kd", "ens"] = "kd"
    """What makes the images: one decoder that learns from all clients' (kd), or the clients' own (ens)."""
    latent: int = Field(default=10, ge=1, le=4096)
    """Coordinates of the latent code."""
    beta: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the divergence beside the reconstruction."""
    truncation: float = Field(default=2.0, gt=0, le=8)
    """Latent codes are drawn from a standard normal on the condition that each coordinate is within this range."""
    balanced: bool = False
    """Whether clients' decoders are asked for all classes alike, in place of as they are in the records."""
    average_start: bool = True
    """With kd, whether the server's decoder starts from the mean of the clients' decoders, or from where these started."""
    decoder_samples: int = Field(default=5000, ge=1)
    """With kd, images of the clients' decoders from which the server's learns."""
    decoder_epochs: int = Field(default=10, ge=1)
    """With kd, passes over them."""
    decoder_learning_rate: float = Field(default=0.01, gt=0, allow_inf_nan=False)
    """With kd, of Adam on the server's decoder."""
    classifier_samples: int = Field(default=5000, ge=1)
    """Synthetic images on which the classifier is trained."""
    classifier_epochs: int = Field(default=10, ge=1)
    """Passes over them."""
    noise: Literal["none", "dpsgd"] = "none"
    """Noise on the gradients of the clients' conditional VAEs: none, or dpsgd, clipped per image and accounted."""
    clip: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """With dpsgd: largest norm of one image's gradient."""
    target_epsilon: float | None = Field(default=None, gt=0, le=100)
    """With dpsgd: epsilon of all that a client sends, for one record that is added or removed."""
    target_delta: float = Field(default=1e-5, ge=1e-12, lt=1)
    """Delta of `target_epsilon`."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that a decoder can make what the data hold, and that noise and epsilon come together."""
        require_images(inputs, self.name)
        if (self.noise == "dpsgd") != (self.target_epsilon is not None):
            told = "none" if self.target_epsilon is None else f"{self.target_epsilon:g}"
            allowed = "a number above 0" if self.noise == "dpsgd" else "none, or noise=dpsgd"
            raise FedfillError(f"target_epsilon: found {told} with noise={self.noise}; allowed: {allowed}")
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The classifier, and the decoders that make the images."""
        return {**super().server_state(initial), "decoders": None}

    def networks(self, inputs: Tensor, classes: int) -> CVAESettings:
        """How the conditional VAEs for such inputs ``[1, ...]`` are built; batch norm would couple what dpsgd clips."""
        norm: Literal["batch", "group"] = "group" if self.noise == "dpsgd" else "batch"
        return CVAESettings(tuple(inputs.shape[1:]), classes, self.latent, norm)

    # The round: algorithms 1 (ens) and 2 (kd)

    def round(self, server: Server, t: int) -> None:
        """Collect the clients' decoders, distil them into one or not, and train the classifier on what they make."""
        begin = start(self.networks(server.sample.inputs, server.classes), server.stream("cvae"))
        flaw = partial(self.flaw, begin, server.classes)
        found = collect(server, self.train_cvae, Begin(begin), flaw, attempts=1)
        decoders = self.mixture(server, found)
        server.state.decoders = self.distilled(server, decoders, begin) if self.aggregate == "kd" else decoders
        training = replace(self.training(t), epochs=self.classifier_epochs, steps=None)
        images = self.classifier_images(server)
        server.state.weights = server.fit(server.initial, self.loss, training, data=images).weights

    @client_handler
    def train_cvae(self, client: Client, message: Begin) -> Own:
        """Train encoder and decoder on the client's records; the encoder stays."""
        settings, records = self.networks(client.blank, client.classes), len(client.data)
        counts = torch.tensor(client.data.counts(client.classes), device=client.data.labels.device)
        if self.noise == "none":
            client.release("counts", unbounded("how many records of each class the client holds"))
        else:
            counts = self.noisy(client, counts)
        if records < FEWEST:
            return Own(None, counts)
        if self.noise == "none":
            # decoders learn what images look like, and not what augmentation makes of them
            mini_batches = client.batches(replace(self.training(client.round), augmentation=None))
            draws = client.stream("latent noise")
            trained = cvae.train(message.weights, mini_batches, settings, self.learning_rate, self.beta, draws)
            client.release("decoder", unbounded("the client's decoder, trained without noise"))
        else:
            spent = self.spent(records)
            coins, noise = client.noise("coins"), client.noise("gradients")
            trained = cvae.train_privately(
                message.weights, client.data, settings, self.learning_rate, self.beta, spent, coins, noise, client.check
            )
            target = self.target_epsilon or 0.0, self.target_delta
            what = "the client's decoder and counts"
            client.release("decoder", dpsgd(what, spent.multiplier, spent.probability, spent.steps, target))
        return Own(decoder_of(trained), counts)

    def flaw(self, begin: Weights, classes: int, reply: Own) -> str | None:
        """Why a reply is not what was asked for."""
        counts = reply.counts
        sound = counts.dtype == torch.int64 and counts.shape == (classes,)
        if not sound or not bool((counts >= 0).all() & (counts <= HEAVIEST // classes).all()):
            return "its counts are not numbers of records by class"
        if reply.decoder is not None and shapes_of(reply.decoder) != shapes_of(decoder_of(begin)):
            return "its decoder is not the one that was asked for"
        return None

    def mixture(self, server: Server, found: Mapping[int, Any]) -> Mixture:
        """The decoders that came, with their counts; who has too few records is named."""
        usable = {i: reply for i, reply in found.items() if reply.decoder is not None and bool(reply.counts.any())}
        if not usable:
            if any(reply.decoder is not None for reply in found.values()):
                raise FedfillError(
                    f"target_epsilon: found {self.target_epsilon}, whose noise has left no client a count above 0, so nothing can be "
                    "drawn; allowed: more, or clients with more records"
                )
            raise FedfillError(
                f"engine: no client sent a decoder, so there is nothing to train on; a client needs {FEWEST} records or more"
            )
        if len(usable) < len(found):
            without = ", ".join(str(i) for i in found if i not in usable)
            server.warn(
                f"These clients have too few records for a decoder, or noise has left no count of theirs above 0, and the others go on "
                f"without them: {without}."
            )
        counts = torch.stack([reply.counts for reply in usable.values()])
        if len(missing := (counts.sum(0) == 0).nonzero()[:, 0].tolist()):
            server.warn(
                f"Nobody holds these classes, so they are neither drawn nor learned: {', '.join(map(str, missing))}."
            )
        return Mixture([reply.decoder for reply in usable.values()], counts)

    def distilled(self, server: Server, local: Mixture, begin: Weights) -> Mixture:
        """One decoder that makes of codes and classes what the clients' made of them (algorithm 2, lines 5 to 13)."""
        first = decoder_of(begin)
        if self.average_start:
            sizes = local.counts.sum(1).tolist()
            mean = combined(Mean(own, float(n), float(n)) for own, n in zip(local.decoders, sizes, strict=True))
            first = mean.tensors if mean is not None else first
        drawn = self.drawn(server, local, self.decoder_samples, self.balanced, "decoder")
        settings = self.networks(server.sample.inputs, server.classes)
        how = self.decoder_epochs, self.batch_size, self.decoder_learning_rate
        decoder = cvae.distil(first, drawn, settings, *how, server.stream("decoder batches"))
        if not tree.is_finite(decoder):
            server.warn(
                "Training diverged: the server's decoder holds a NaN or an infinity, and its images show nothing; try a smaller "
                "decoder_learning_rate."
            )
        return Mixture([decoder], local.counts.sum(0, keepdim=True))

    def classifier_images(self, server: Server) -> Samples:
        """What the classifier is trained on: with kd all classes alike, with ens as in the records unless balanced."""
        balanced = self.balanced or self.aggregate == "kd"
        return self.drawn(server, server.state.decoders, self.classifier_samples, balanced, "classifier").samples

    def drawn(self, server: Server, decoders: Mixture, n: int, balanced: bool, purpose: str) -> Drawn:
        """Images of decoders, none of a class of which the decoder has seen nothing."""
        wanted = cvae.allocate(decoders.counts, n, balanced, server.stream(f"{purpose} classes"))
        settings = self.networks(server.sample.inputs, server.classes)
        return cvae.decode(decoders, wanted, settings, self.truncation, server.stream(f"{purpose} codes"))

    def synthetic(self, server: Server, per_class: int | None = None) -> Samples | None:
        """Images of the decoders: so many of each class that somebody holds, or those on which the classifier was trained."""
        decoders: Mixture | None = server.state.decoders
        if decoders is None:
            return None
        if per_class is None:
            return self.classifier_images(server)
        held = int((decoders.counts.sum(0) > 0).sum())
        return self.drawn(server, decoders, per_class * held, balanced=True, purpose="samples").samples

    # Privacy

    @property
    def counts_mu(self) -> float:
        """What the counts may cost: the usual small share of the budget."""
        whole = privacy.mu_for(self.target_epsilon or math.inf, self.target_delta)
        return whole * math.sqrt(privacy.COUNTS_SHARE)

    def noisy(self, client: Client, counts: Tensor) -> Tensor:
        """Counts with noise, as whole numbers; a class that can't be told from none counts as one that the client lacks."""
        std = 1 / self.counts_mu
        bounds = {"counts": privacy.counts(len(counts))}
        client.release("counts", privacy.released("records by class", bounds, {"counts": std}, "site"))
        found = privacy.add_noise(counts.double(), std, False, client.noise("counts"))
        return torch.where(found > 3 * std, found.round(), 0.0).long()

    def spent(self, records: int) -> Privacy:
        """Steps and noise of a client with so many records; their number counts as known."""
        probability = min(1.0, self.batch_size / records)
        steps = self.local_steps or max(1, round(self.local_epochs / probability))
        budget = self.target_epsilon or math.inf
        multiplier = cvae.multiplier(budget, self.target_delta, probability, steps, self.counts_mu)
        return Privacy(self.clip, probability, steps, multiplier)
