"""FedGAN: Rasouli, Sun and Rajagopal, "FedGAN: Federated Generative Adversarial Networks for Distributed Data", 2020.

First the clients train one GAN together, by averages of generator and critic, and then a classifier, each on its own images and on
images of the common generator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Samples
from fedfill.errors import FedfillError
from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.relay import Delivered
from fedfill.protocol.server import Server
from fedfill.synthesis import gan
from fedfill.synthesis.gan import GAN
from fedfill.synthesis.gan_networks import require_images
from fedfill.synthesis.gan_options import GANOptions
from fedfill.tree import Tree, Weights


@dataclass(frozen=True)
class Common(Message):
    """Server to client: the common GAN, and for how many steps to train it.

    Attributes:
        generator: Its tensors.
        critic: Its tensors.
        iterations: Steps of the generator.
    """

    generator: Weights
    critic: Weights
    iterations: int


@dataclass(frozen=True)
class Own(Message):
    """Client to server: the GAN behind these steps.

    Attributes:
        generator: Its tensors.
        critic: Its tensors.
        samples: Labelled images that it was trained on; None where clients count alike.
    """

    declared: ClassVar = {
        "generator": unbounded("the client's generator, trained without noise"),
        "critic": unbounded("the client's critic, trained without noise"),
        "samples": unbounded("number of samples, sent as it is"),
    }

    generator: Weights
    critic: Weights
    samples: int | None


@dataclass(frozen=True)
class Augmented(Broadcast):
    """Server to client: the global model, and the common generator's tensors until the client was heard of."""

    generator: Weights | None


class FedGAN(GANOptions, FedAvg):
    """All clients train one GAN by averages of its generator and its critic (algorithm 1), and fill up their data with its images.

    Use it when clients lack classes and may exchange an image generator often; feddpgan is the same with noise.
    """

    name = "fedgan"
    own_loops = "the GAN"
    exchanges = True

    gan_chunk: int = Field(default=20, ge=1)
    """Steps of each client's GAN between two averages (K), which are checkpoints as well."""
    gan_weighting: Literal["samples", "uniform"] = "samples"
    """Weights of these averages: each client's number of labelled images (p_i), or all equal."""
    images_per_class: int = Field(default=400, ge=1)
    """Synthetic images of each class that a client adds to its own."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that a GAN can make what the data hold, and that nobody waits for a moving average."""
        if self.gan_average:
            raise FedfillError(
                f"gan_average: found {self.gan_average} with {self.name}, whose generator is the clients' average already; allowed: 0"
            )
        require_images(inputs, self.name)
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, the common GAN, and the clients that hold the generator."""
        return {**super().server_state(initial), "gan": None, "delivered": Delivered()}

    def client_state(self) -> dict[str, Tree]:
        """Images of the common generator."""
        return {**super().client_state(), "synthetic": None}

    @property
    def gan_by(self) -> str | None:
        """Samples, or nothing."""
        return "samples" if self.gan_weighting == "samples" else None

    def pretraining_steps(self) -> int:
        """Exchanges of the GAN's training."""
        return math.ceil(self.gan_iterations / self.gan_chunk)

    def pretrain(self, server: Server, step: int) -> None:
        """Every client trains the common GAN; their weighted mean is the new one."""
        state = server.state
        if state.gan is None:
            shape = tuple(server.sample.inputs.shape[1:])
            state.gan = gan.start(shape, self.gan(server.classes), server.stream("gan start"))
        now, left = state.gan, self.gan_iterations - step * self.gan_chunk
        message = Common(now.generator, now.critic, min(self.gan_chunk, left))
        everybody = range(server.clients)
        of = {"generator": now.generator, "critic": now.critic}
        _, mean = server.average(everybody, self.train_gan, message, of=of, by=self.gan_by)
        state.gan = GAN(mean["generator"], mean["critic"], None, None, now.iterations + message.iterations)

    @client_handler
    def train_gan(self, client: Client, message: Common) -> Own:
        """Steps of the common GAN on the client's labelled images."""
        received = GAN(message.generator, message.critic, None, None, 0)
        found = self.advance(received, client.data, message.iterations, self.gan(client.classes), client)
        return Own(found.generator, found.critic, len(client.data) if self.gan_by else None)

    def round(self, server: Server, t: int) -> None:
        """FedAvg on real and synthetic images."""
        state, cohort = server.state, self.cohort(server, t)
        messages = {i: Augmented(state.weights, state.delivered.once(i, state.gan.generator)) for i in cohort}
        replies, mean = self.gather(server, cohort, self.train_augmented, messages)
        state.delivered = state.delivered.acknowledged(replies)
        state.weights = mean["weights"]

    @client_handler
    def train_augmented(self, client: Client, message: Augmented) -> Update:
        """Local training on the client's own images and on the generator's."""
        if message.generator is not None:
            client.state.synthetic = self.images(
                message.generator, client.classes, client.data, client.stream("images"), self.images_per_class
            )
        data = client.data + client.state.synthetic
        return self.contribute(client, message, self.loss, data=data).reply(Update, samples=len(client.data))

    def images(
        self, generator: Weights, classes: int, sample: Samples, stream: torch.Generator, per_class: int
    ) -> Samples:
        """Equally many images of each class."""
        labels = torch.arange(classes, device=stream.device).repeat_interleave(per_class)
        made = gan.generate(GAN(generator, {}, None, None, 0), labels, sample, self.gan(classes), stream)
        return Samples(made, labels)

    def synthetic(self, server: Server, per_class: int | None = None) -> Samples | None:
        """Images of the common generator, as many as are asked for."""
        if server.state.gan is None:
            return None
        generator, wanted = server.state.gan.generator, per_class or self.images_per_class
        return self.images(generator, server.classes, server.sample, server.stream("samples"), wanted)
