"""FedGauss: images of each class drawn from one Gaussian of its lowest frequencies, in one round from sums; ours.

See ``docs/algorithms/fedgauss.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms._from_synthetic import FromSynthetic
from fedfill.algorithms._layers import CHUNK
from fedfill.data.samples import Samples
from fedfill.errors import FedfillError
from fedfill.privacy.sums import COUNTS_SHARE
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Sums, collect, contribute, sound_counts, warn_of_absent
from fedfill.statistics.calibration import ClassGaussians
from fedfill.statistics.noise import NoisySums
from fedfill.statistics.spectral_noise import noise_edge
from fedfill.statistics.sums import LARGEST, Statistic, class_moments
from fedfill.synthesis.image_gaussians import Frequencies, denoised, drawn_images
from fedfill.tree import Tree, Weights

FINE = 5 / 7
"""Share of the frequencies along each side, where each class has a covariance."""
HALF = 1 / 2
"""The same, where all classes share one."""
COARSE = 0.02
"""Edge of the noise in a class's covariance, for vectors of length 1, from which on all classes share one."""


@dataclass(frozen=True)
class AskCounts(Message):
    """Server to client: the request for the number of records of each class, with the number of clients."""

    clients: int


@dataclass(frozen=True)
class AskMoments(Message):
    """Server to client: the request for moments.

    Attributes:
        clients: How many clients are asked.
        by_class: Whether second moments are wanted of each class, or of all together.
        frequencies: Share of the frequencies along each side.
    """

    clients: int
    by_class: bool
    frequencies: float


class FedGauss(NoisySums, FromSynthetic):
    """Synthetic images from class means and covariances of the lowest frequencies, which are sums over all clients.

    Use it where images themselves are wanted, with a guarantee for every record; for a classifier alone fed3r is better.
    """

    name = "fedgauss"

    covariance: Literal["class", "shared"] | None = None
    """Whether each class has a covariance of its own, or all share one; none: one for each class, but where noise would drown it."""
    frequencies: float | None = Field(default=None, gt=0, le=1)
    """Share of the lowest frequencies, along each side of an image, that are kept; none: 5/7, and half of them with one covariance for all."""
    radius: float | None = Field(default=None, gt=0, le=1)
    """Length to which an image is shortened before it is summed, in shares of a white image's; none: 1 without noise, 0.45 under noise."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse what is no image, and fix the length."""
        if inputs.dtype != torch.uint8 or inputs.dim() != 4:
            raise FedfillError(
                f"data: {self.name} makes images, found {str(inputs.dtype).removeprefix('torch.')} inputs of shape {list(inputs.shape[1:])}; "
                "allowed: images of whole numbers in 0..255"
            )
        self.check_trust()
        checked = super().resolved(rounds=rounds, model=model, inputs=inputs)
        radius = self.radius or (1.0 if self.target_epsilon is None else 0.45)
        return checked.model_copy(update={"radius": radius})

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The classifier, the Gaussians, and whether each class has a covariance."""
        return {**super().server_state(initial), "gaussians": None, "by_class": self.covariance != "shared"}

    def kept(self, by_class: bool) -> float:
        """Share of the frequencies along each side."""
        return self.frequencies or (FINE if by_class else HALF)

    @property
    def counts_first(self) -> bool:
        """Whether noisy counts have to decide what is asked for."""
        return self.target_epsilon is not None and self.covariance is None

    def pretraining_steps(self) -> int:
        """An exchange of its own, so that a run that goes on asks the same question again."""
        return int(self.counts_first)

    def pretrain(self, server: Server, step: int) -> None:
        """Counts, from which follows whether each class has a covariance of its own: where the noise does not drown it."""
        statistic = class_moments(1, server.classes, moments=False, gram=False)
        noise = self.noise(statistic, COUNTS_SHARE)
        counts = sound_counts(
            collect(server, self.count, AskCounts(server.clients), statistic, noise, purpose="counts")
        )
        server.state.by_class = self.stands_out(server, counts)

    def stands_out(self, server: Server, counts: Tensor) -> bool:
        """Whether the noise in a class's covariance is small, by what is public."""
        shape, kept = tuple(server.sample.inputs.shape[1:]), self.kept(by_class=True)
        d = self.vectors(shape, kept).numbers
        if not bool((counts > 0).any()) or server.classes * d * d > LARGEST:
            return False
        noise = self.noise(self.statistic(shape, server.classes, True, kept), self.left)
        assert noise is not None
        std = noise.stds["class_grams"] * noise.in_the_sum(server.clients, server.clients) / math.sqrt(2)
        return noise_edge(std, d) / float(counts[counts > 0].mean()) <= COARSE

    @property
    def left(self) -> float:
        """Share of the privacy budget for the moments."""
        return 1 - COUNTS_SHARE if self.counts_first else 1.0

    @client_handler
    def count(self, client: Client, message: AskCounts) -> Sums:
        """How many records of each class the client has."""
        statistic = class_moments(1, client.classes, moments=False, gram=False)
        labels = client.data.labels
        records = [(labels.new_zeros(len(labels), 1, dtype=torch.float64), labels)]
        noise = self.noise(statistic, COUNTS_SHARE)
        return contribute(client, statistic, records, noise, message.clients, purpose="counts")

    def round(self, server: Server, t: int) -> None:
        """Moments, then images, then the classifier."""
        by_class = server.state.by_class
        kept = self.kept(by_class)
        statistic = self.statistic(tuple(server.sample.inputs.shape[1:]), server.classes, by_class, kept)
        message, noise = AskMoments(server.clients, by_class, kept), self.noise(statistic, self.left)
        found = collect(server, self.moment_sums, message, statistic, noise, purpose="moments")
        counts = sound_counts(found)  # of those clients whose moments are in the sums
        warn_of_absent(server, counts, found.stds["counts"], "there are no images of it")
        if not bool((counts > 0).any()):
            return  # nothing stands out of the noise, and the warning has said so
        std = max(found.stds.get(name, 0.0) for name in ("gram", "class_grams")) / math.sqrt(2)
        gaussians = denoised(found.sums, counts, std)
        server.state.gaussians = {name: x.float() for name, x in vars(gaussians).items()}
        server.note(covariance="class" if by_class else "shared", frequencies=kept)
        self.train_classifier(server, t)

    def statistic(self, shape: tuple[int, ...], classes: int, by_class: bool, kept: float) -> Statistic:
        """N, M, and the second moments of each class or of all."""
        d = self.vectors(shape, kept).numbers
        if (classes if by_class else 1) * d * d > LARGEST:
            raise FedfillError(
                f"frequencies: found {kept:.3g} of images of shape {list(shape)}, whose second moments are {d} x {d} numbers"
                f"{f' for each of {classes} classes' if by_class else ''}; allowed: {LARGEST:,} numbers in all, by smaller frequencies, "
                "covariance=shared or a smaller image_size"
            )
        return class_moments(d, classes, gram=not by_class, by_class=by_class)

    def vectors(self, shape: tuple[int, ...], kept: float) -> Frequencies:
        """What an image is taken as."""
        return Frequencies.of(shape, kept, self.radius or 1.0)

    @client_handler
    def moment_sums(self, client: Client, message: AskMoments) -> Sums:
        """First and second moments of the client's images."""
        shape = tuple(client.data.inputs.shape[1:])
        statistic = self.statistic(shape, client.classes, message.by_class, message.frequencies)
        noise = self.noise(statistic, self.left)
        records = self.records(client, self.vectors(shape, message.frequencies))
        return contribute(client, statistic, records, noise, message.clients, purpose="moments")

    def records(self, client: Client, frequencies: Frequencies) -> Iterator[tuple[Tensor, Tensor]]:
        """Vectors ``[b, d]`` and labels."""
        for start in range(0, len(client.data), CHUNK):
            client.check()
            part = client.data[start : start + CHUNK]
            yield frequencies.vectors(part.inputs), part.labels

    def synthetic(self, server: Server, per_class: int | None = None) -> Samples | None:
        """New images; none where the noise has left nothing."""
        return None if server.state.gaussians is None else super().synthetic(server, per_class)

    def synthesise(self, server: Server, per_class: int) -> Samples:
        """Draws from the Gaussians, as images."""
        found: Weights = server.state.gaussians
        gaussians = ClassGaussians(**{name: x.double().cpu() for name, x in found.items()})
        frequencies = self.vectors(tuple(server.sample.inputs.shape[1:]), self.kept(server.state.by_class))
        drawn = drawn_images(gaussians, frequencies, per_class, lambda c: server.stream(f"images of class {c}"))
        return drawn.to(server.sample.inputs.device)
