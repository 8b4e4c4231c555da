"""DP-MERF: Harder, Adamczewski and Park, "DP-MERF: Differentially Private Mean Embeddings with Random Features", AISTATS 2021.

Federated by sums, in one round: the mean embeddings of all clients' records are a sum. See ``docs/algorithms/dpmerf.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms._from_synthetic import FromSynthetic
from fedfill.algorithms._layers import CHUNK
from fedfill.data.samples import Samples, normalise
from fedfill.errors import FedfillError
from fedfill.models.features import FeatureMap, features
from fedfill.models.smooth_features import require_smooth
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Sums, collect, contribute, sound_counts, warn_of_absent
from fedfill.statistics.noise import NoisySums
from fedfill.statistics.sums import Statistic, class_moments, within
from fedfill.synthesis.gan import GAN, generate, start
from fedfill.synthesis.gan_networks import GANSettings, Generator, require_images
from fedfill.synthesis.moment_generator import Estimator, match_means
from fedfill.tree import Tree, Weights

STAGE = 250
"""Steps of the generator between two checkpoints, and between two learning rates."""
DECAY = 0.7
"""What the learning rate is multiplied by from one stage to the next."""


@dataclass(frozen=True)
class AskEmbeddings(Message):
    """Server to client: the request for the sums of embeddings, with the number of clients."""

    clients: int


class DPMERF(NoisySums, FromSynthetic):
    """A generator at the server, trained until its images have the mean random features of all clients' images, by class.

    Use it as the reference of private synthetic images from sums; fedgauss needs no generator.
    """

    name = "dpmerf"
    own_loops = "the generator"

    embedding: str = "fourier(2000, width=0.5)"
    """What is averaged over images: words of a map of features, of conv, project, fourier, relu, unit and clip."""
    embedding_seed: int = Field(default=0, ge=0)
    """Of the map, which is the same for everybody and public."""
    generator_steps: int = Field(default=1000, ge=1)
    """Steps of the generator's training, at the server."""
    generator_batch: int = Field(default=20, ge=2)
    """Images of each class in a step."""
    generator_learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """Adam's for the generator, in the first of its stages of 250 steps; each has 0.7 times the one before."""
    generator_latent: int = Field(default=32, ge=1)
    """Size of the generator's noise."""
    generator_width: int = Field(default=32, ge=1)
    """Channels of the generator's widest images."""
    moments: Literal["first", "second"] = Field(default="first", exclude_if=lambda value: value == "first")
    """What the generator comes near to: the mean features of a class, or their mean second moments (z z') as well."""
    estimator: Estimator = "biased"
    """Of the distance of means: the paper's, or one without the bias of a batch's own spread (unbiased)."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse what is no image, and maps without a gradient."""
        require_images(inputs, self.name)
        self.check_trust()
        try:
            require_smooth(self.map_of(inputs)[0])
        except FedfillError as refused:  # its words are those of the network of features
            raise FedfillError(
                f"embedding:{str(refused).removeprefix('embedding:').removeprefix('features:')}"
            ) from refused
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def map_of(self, inputs: Tensor) -> tuple[FeatureMap, int]:
        """The map of features, and the length of what it gives."""
        encoder, d = features(self.embedding, tuple(inputs.shape[1:]), self.embedding_seed)
        return encoder.to(inputs.device), d

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The classifier, the mean embeddings ``[C', D]`` of the classes that somebody holds, these, and the generator.

        With ``moments=second`` the mean second moments ``[C', D, D]`` as well.
        """
        empty: dict[str, Tree] = {"targets": None, "classes": None, "generator": None}
        return {**super().server_state(initial), **empty, **({"seconds": None} if self.moments == "second" else {})}

    def pretraining_steps(self) -> int:
        """The one exchange, and the stages of the generator's training."""
        return 1 + math.ceil(self.generator_steps / STAGE)

    def pretrain(self, server: Server, step: int) -> None:
        """Collect, then a stage of the training."""
        if step == 0:
            self.gather(server)
        elif server.state.targets is not None:
            self.train_generator(server, step - 1)

    def gather(self, server: Server) -> None:
        """The mean embedding of each class, over all clients' records."""
        encoder, d = self.map_of(server.sample.inputs)
        statistic = self.statistic(d, server.classes)
        message = AskEmbeddings(server.clients)
        collected = collect(server, self.embeddings, message, statistic, self.noise(statistic))
        counts = sound_counts(collected)
        warn_of_absent(server, counts, collected.stds["counts"], "there are no images of it")
        held = counts > 0
        if bool(held.any()):
            means = (collected.sums["moments"][:, held] / counts[held]).T
            server.state.targets = within(means, encoder.radius).float().to(server.sample.inputs.device)
            server.state.classes = held.nonzero().flatten().to(server.sample.inputs.device)
            if self.moments == "second":
                sums = collected.sums["class_grams"][held] / counts[held][:, None, None]
                # no mean of z z' is longer than the longest one: noise may have made it so
                seconds = within(sums.flatten(1), encoder.radius**2).view_as(sums)
                server.state.seconds = seconds.float().to(server.sample.inputs.device)

    def statistic(self, d: int, classes: int) -> Statistic:
        """M and N, and with ``moments=second`` the second moments of each class."""
        return class_moments(d, classes, gram=False, by_class=self.moments == "second")

    @client_handler
    def embeddings(self, client: Client, message: AskEmbeddings) -> Sums:
        """Sums of the client's embeddings, by class."""
        encoder, d = self.map_of(client.data.inputs)
        statistic = self.statistic(d, client.classes)

        def records() -> Iterator[tuple[Tensor, Tensor]]:
            for begin in range(0, len(client.data), CHUNK):
                client.check()
                part = client.data[begin : begin + CHUNK]
                yield within(encoder(normalise(part.inputs)), encoder.radius), part.labels

        return contribute(client, statistic, records(), self.noise(statistic), message.clients)

    def train_generator(self, server: Server, stage: int) -> None:
        """Steps towards the means; no record is looked at."""
        state, sizes = server.state, self.sizes(server.classes)
        shape = tuple(server.sample.inputs.shape[1:])
        if state.generator is None:
            state.generator = start(shape, sizes, server.stream("generator")).generator
        generator = Generator(shape, sizes).to(server.sample.inputs.device)
        generator.load_state_dict(state.generator)
        loss = match_means(
            generator,
            self.map_of(server.sample.inputs)[0],
            state.targets,
            state.classes,
            seconds=state.seconds if self.moments == "second" else None,
            steps=min(STAGE, self.generator_steps - stage * STAGE),
            per_class=self.generator_batch,
            learning_rate=self.generator_learning_rate * DECAY**stage,
            estimator=self.estimator,
            draws=server.stream("noise of the generator"),
        )
        state.generator = {name: x.detach().clone() for name, x in generator.state_dict().items()}
        server.note(distance=loss)

    def sizes(self, classes: int) -> GANSettings:
        """Of the generator."""
        return GANSettings(latent=self.generator_latent, width=self.generator_width, classes=classes)

    def round(self, server: Server, t: int) -> None:
        """The classifier, on the generator's images."""
        if server.state.generator is not None:  # else nothing stands out of the noise, and a warning has said so
            self.train_classifier(server, t)

    def synthesise(self, server: Server, per_class: int) -> Samples:
        """Images of the generator."""
        state: Any = server.state
        labels = state.classes.repeat_interleave(per_class)
        made = generate(
            GAN(state.generator, {}, None, None, 0),
            labels,
            server.sample,
            self.sizes(server.classes),
            server.stream("images"),
        )
        return Samples(made, labels)

    def synthetic(self, server: Server, per_class: int | None = None) -> Samples | None:
        """New images; none where the noise has left nothing."""
        return None if server.state.generator is None else super().synthetic(server, per_class)
