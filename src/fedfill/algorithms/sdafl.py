"""SDA-FL: Li et al., "Federated Learning with GAN-based Data Synthesis for Non-IID Clients", 2022."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import UNKNOWN, Batch, Samples, draw, fits, some_of_each
from fedfill.errors import FedfillError
from fedfill.privacy.releases import public, unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message, shapes_of
from fedfill.protocol.relay import Delivered, collect
from fedfill.protocol.server import Server
from fedfill.synthesis import gan
from fedfill.synthesis.gan_networks import GANSettings, require_images
from fedfill.synthesis.gan_options import NoisyGANOptions
from fedfill.training.fit import Context, Loss
from fedfill.training.mixup import draw_lambda, mixup_loss
from fedfill.training.pseudo_labels import compact, confident, labelling_notes, pseudo_labels
from fedfill.tree import Tree, Weights


@dataclass(frozen=True)
class Pretrain(Message):
    """Server to client: train your GAN until it has done so many steps."""

    iterations: int


@dataclass(frozen=True)
class Pretrained(Message):
    """Client to server: how many it has done."""

    declared: ClassVar = {"iterations": public("as many as the server asked for")}

    iterations: int


@dataclass(frozen=True)
class ImagesRequest(Message):
    """Server to client: so many images of your GAN, please."""

    images: int


@dataclass(frozen=True)
class Images(Message):
    """Client to server: images of its GAN, ``[n, ...]`` as images are stored, and ``[n]`` int64 labels where it knows them."""

    declared: ClassVar = {"labels": unbounded("which classes the client holds")}

    inputs: Tensor
    labels: Tensor | None


@dataclass(frozen=True)
class Aided(Broadcast):
    """Server to client: the global model and the newest labels; the images once.

    Attributes:
        labels: A class for each image of the pool, -1 for none, ``[n]`` int8 or int16; None: no image has one yet.
        pool: All clients' images, until the client was heard of.
    """

    labels: Tensor | None
    pool: Tensor | None


@dataclass(frozen=True)
class AidedUpdate(Update):
    """Client to server: what the aggregation takes, and the model as trained where the server labels with it."""

    declared: ClassVar = {**Update.declared, "model": unbounded("model as trained")}

    model: Weights | None


class SDAFL(NoisyGANOptions, FedAvg):
    """Synthetic data aided federated learning: GAN images, labelled anew in each round, mixed with real ones (algorithm 1).

    Use it when each client has one or two classes and has time to train an image generator first.
    """

    name = "sdafl"
    own_loops = "the clients' GANs"
    exchanges = True
    draws_beside = True
    presets: ClassVar = {
        "cifar10": {"gan_iterations": 36_000, "server_steps": 10},
        "covid": {"gan_iterations": 4_500, "server_steps": 10},
    }
    paper: ClassVar = {  # 40 steps in the semi-supervised experiments
        "": {"local_steps": 90, "optimizer": "sgd", "learning_rate": 0.03, "lr_decay": 1.0},
        "covid": {"local_steps": 30},
    }
    conditional: ClassVar = False
    """Whether the GANs know the labels of what they make."""

    weighting: Literal["samples", "uniform"] = "uniform"
    """Weights of the average: all equal, or each client's number of real samples."""
    images_per_client: int = Field(default=4000, ge=1)
    """Synthetic images that each client uploads, once."""
    tau: float = Field(default=0.95, ge=0, le=1)
    """Probability above which a model's word is taken for a label (equation 4)."""
    mixup_alpha: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Mixing shares come from Beta(alpha, alpha); the paper has it in 0..1 and gives no number. 0: synthetic images alone."""
    real_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the real images' own loss beside that of the mixtures (lambda_2 of equation 8)."""
    server_steps: int = Field(default=50, ge=0)
    """Mini-batches of synthetic images that the server trains on after each average."""
    relabel_rounds: int | None = Field(default=None, ge=0)
    """Rounds after which labels stay as they are; none: they never do (figure 4b)."""
    unlabelled_batch_size: int = Field(default=64, ge=1)
    """Images without a label, where a client holds some, beside those of `batch_size` in a mini-batch."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that a GAN can make what the data hold, and that the server sees what it labels with."""
        require_images(inputs, self.name)
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, all clients' images with labels and owners, and the clients that hold the images."""
        return {**super().server_state(initial), "pool": None, "owners": None, "delivered": Delivered()}

    def client_state(self) -> dict[str, Tree]:
        """The client's GAN until it uploads, and then all clients' images."""
        return {**super().client_state(), "gan": None, "pool": None}

    # Before the first round: GANs, and what they make

    def pretraining_steps(self) -> int:
        """Chunks of the pre-training, and the upload."""
        return math.ceil(self.gan_iterations / self.gan_chunk) + 1

    def pretrain(self, server: Server, step: int) -> None:
        """Pre-train the GANs of all clients, and collect their images."""
        if step + 1 == self.pretraining_steps():
            self.collect(server)
        else:
            ask = Pretrain(min((step + 1) * self.gan_chunk, self.gan_iterations))
            server.call(range(server.clients), self.pretrain_gan, ask)

    @client_handler
    def pretrain_gan(self, client: Client, message: Pretrain) -> Pretrained:
        """Steps of the client's GAN on all of its images, labelled or not; what was lost before is caught up with."""
        self.train_gan(client, message.iterations)
        return Pretrained(message.iterations)

    def train_gan(self, client: Client, iterations: int) -> GANSettings:
        """Train the client's GAN until it has done so many steps; how it is built."""
        settings, counts = self.gan(client.classes if self.conditional else 0), client.data.counts(client.classes)
        # its own classes, as it uploads no others; under dpsgd all: the account holds whatever images the client has
        wanted = [c for c, n in enumerate(counts) if n] if self.conditional and self.noise != "dpsgd" else None
        now, data = client.state.gan, self.images_of(client)
        client.state.gan = self.advance(now, data, iterations, settings, client, wanted)
        return settings

    def images_of(self, client: Client) -> Samples:
        """What the client's GAN is trained on: everything that it holds, or with a classifier what has labels."""
        return client.data if self.conditional or not len(client.unlabelled) else client.data + client.unlabelled

    def collect(self, server: Server) -> None:
        """All clients' images as one pool; who isn't heard of is asked three times."""
        found = collect(server, self.upload, ImagesRequest(self.images_per_client), partial(self.flaw, server))
        if len(found) < server.clients:
            without = ", ".join(str(i) for i in range(server.clients) if i not in found)
            server.warn(f"no images came from these clients, and the others go on without them: {without}")
        if not found:
            raise FedfillError("engine: no client uploaded synthetic images, so there is nothing to aid with")
        inputs = torch.cat([reply.inputs for reply in found.values()])  # [n, ...]
        unknown = torch.full((self.images_per_client,), UNKNOWN, device=inputs.device)
        labels = [unknown if reply.labels is None else reply.labels for reply in found.values()]
        server.state.pool = Samples(inputs, torch.cat(labels))
        server.state.owners = torch.tensor(list(found), device=inputs.device).repeat_interleave(self.images_per_client)

    def flaw(self, server: Server, reply: Images) -> str | None:
        """Why a reply is not what was asked for."""
        n, labels = len(reply.inputs), reply.labels
        known = torch.zeros(n, dtype=torch.int64) if labels is None else labels
        sound = fits(Samples(reply.inputs, known), server.sample, server.classes)
        if sound and n == self.images_per_client and (labels is not None) == self.conditional:
            return None
        return "its images are not those that were asked for"

    @client_handler
    def upload(self, client: Client, message: ImagesRequest) -> Images:
        """Images of the client's GAN, with labels where it knows them."""
        settings = self.train_gan(client, self.gan_iterations)  # nothing is left to do unless a call was lost
        stream = client.stream("images")
        labels, known = None, tuple[str, ...]()
        if self.conditional:
            known = ("the share of each class on the client is public, as the images' labels are drawn by it",)
            shares = torch.tensor(client.data.counts(client.classes), dtype=torch.float32, device=stream.device)
            labels = torch.multinomial(shares, message.images, replacement=True, generator=stream)
        wanted, real = message.images if labels is None else labels, len(self.images_of(client))
        told = "images of the client's GAN", settings, real, self.gan_iterations, self.multiplier(real)
        client.release("inputs", gan.released(*told, known))
        return Images(gan.generate(client.state.gan, wanted, client.data, settings, stream), labels)

    # Rounds

    def round(self, server: Server, t: int) -> None:
        """Train with the images' newest labels; label again, average, train at the server."""
        state, cohort = server.state, self.cohort(server, t)
        labels = compact(state.pool.labels, server.classes)
        messages = {i: Aided(state.weights, labels, state.delivered.once(i, state.pool.inputs)) for i in cohort}
        individually = self.relabels(t)
        replies, mean = self.gather(server, cohort, self.train_aided, messages, individually=individually)
        state.delivered = state.delivered.acknowledged(replies)
        if individually:
            self.label(server, replies)
        state.weights = mean["weights"]
        self.update(server, t)
        server.note(**labelling_notes(state.pool.labels, state.owners, server.classes))

    def relabels(self, t: int) -> bool:
        """Whether the server labels the images in this round."""
        return not self.conditional and (self.relabel_rounds is None or t < self.relabel_rounds)

    def label(self, server: Server, replies: Mapping[int, Any]) -> None:
        """Each client's images, by the model that it has just sent (equation 4); who was not asked keeps old labels."""
        pool, labels = server.state.pool, server.state.pool.labels.clone()
        for i, reply in replies.items():
            own = server.state.owners == i
            weights = reply.model if self.sends_model else reply.weights
            if shapes_of(weights or {}) != shapes_of(server.state.weights):
                server.lose(i, "train_aided", "its model is not the one that was asked for, so labels stay")
            elif bool(own.any()):
                labels[own] = pseudo_labels(server.model(weights), pool.inputs[own], self.tau)
        server.state.pool = Samples(pool.inputs, labels)

    def update(self, server: Server, t: int) -> None:
        """Train the average on two mini-batches of synthetic images at a time (section 4)."""
        known = server.state.pool.labels >= 0
        if not self.server_steps or int(known.sum()) < 2:  # batch norm can't train on one
            return
        labelled = server.state.pool[known]
        training = replace(self.training(t), steps=self.server_steps)
        server.state.weights = server.fit(
            server.state.weights, self.aided(labelled, None), training, data=labelled
        ).weights

    @client_handler
    def train_aided(self, client: Client, message: Aided) -> AidedUpdate:
        """Local steps on real images and on mixtures of real and synthetic ones (equations 5 to 8)."""
        if message.pool is not None:
            client.state.pool = message.pool
            client.state.gan = None  # it has done its work
        labelled = unlabelled = None
        if message.labels is not None:
            labels = message.labels.long()
            labelled = Samples(client.state.pool, labels)[labels >= 0]
        if len(client.unlabelled):
            unlabelled = confident(client.model(message.weights), client.unlabelled, self.tau)
        done = self.contribute(client, message, self.aided(labelled, unlabelled))
        model = done.trained if self.sends_model and self.relabels(client.round) else None
        return done.reply(AidedUpdate, model=model)

    def aided(self, synthetic: Samples | None, unlabelled: Samples | None) -> Loss:
        """l_1 + lambda_2 l_2 of equations 6 to 8; l_2 alone as long as no synthetic image has a label.

        Real images with a model's labels (`unlabelled`) join each mini-batch of real images, or at the server of synthetic ones.
        """

        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            if unlabelled is not None and len(unlabelled):
                inputs, labels = draw(unlabelled, self.unlabelled_batch_size, context.generator)
                index = torch.cat([batch.index, batch.index.new_full(labels.shape, -1)])
                batch = Batch(torch.cat([batch.inputs, inputs]), torch.cat([batch.labels, labels]), index)
            real = self.loss(model, batch, context)
            if synthetic is None or not len(synthetic):
                return real
            inputs, labels = draw(synthetic, len(batch.labels), context.generator)
            share = draw_lambda(self.mixup_alpha, context.generator)
            return mixup_loss(model, inputs, labels, batch.inputs, batch.labels, share) + self.real_weight * real

        return loss

    def synthetic(self, server: Server, per_class: int | None = None) -> Samples | None:
        """All clients' images with their newest labels: a fixed set, of which a class may have fewer than are asked for."""
        pool: Samples | None = server.state.pool
        return pool if pool is None or per_class is None else some_of_each(pool, per_class, server.stream("samples"))


class SDAFLAC(SDAFL):
    """SDA-FL with auxiliary classifiers in the GANs, which make labels known (section 5.2, table 4).

    Use it when you would use sdafl and clients may tell which classes they hold.
    """

    name = "sdafl-ac"
    conditional = True
