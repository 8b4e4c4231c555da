"""FedPFT: Beitollahi et al., "Parametric Feature Transfer: One-shot Federated Learning with Foundation Models", 2024.

See ``docs/algorithms/fedpft.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms._features import Featured
from fedfill.algorithms._layers import Ask, Layer, bounded, changed, features, layer_of
from fedfill.errors import FedfillError
from fedfill.models.features import FeatureMap, default_words
from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import HEAVIEST, Message, shapes_of
from fedfill.protocol.relay import collect as ask_once
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Sums, collect, contribute, sound_counts, warn_of_absent
from fedfill.statistics.calibration import noisy_class_gaussians, train_on_samples
from fedfill.statistics.gaussian_heads import lda
from fedfill.statistics.heads import LinearHead
from fedfill.statistics.mixtures import Mixture, draw_from, fit_mixtures
from fedfill.statistics.ridge import Spectrum, choose_lambda
from fedfill.statistics.sums import LARGEST, Statistic, class_moments, one_hot
from fedfill.tree import Tree, Weights

FITTED = unbounded("mixtures fitted to features, sent as they are")


def ridge(gram: Tensor, moments: Tensor, counts: Tensor) -> LinearHead:
    """Ridge regression on one-hot labels, with the lambda of least generalised cross-validation.

    Args:
        gram: G, ``[d, d]``.
        moments: M, ``[d, C]``.
        counts: N, ``[C]``.

    Returns:
        The head; a class that has no record never wins.
    """
    spectrum = Spectrum.of(gram, moments)
    return spectrum.solution(choose_lambda(spectrum, float(counts.sum())).lam, counts)


SOLVED: dict[str, Callable[[Tensor, Tensor, Tensor], LinearHead]] = {"ridge": ridge, "lda": lda}
"""Heads that follow from sums G, M and N over draws, by the name of the classifier."""


@dataclass(frozen=True)
class Mixtures(Message):
    """Client to server: a mixture of Gaussians for each of its classes.

    Attributes:
        labels: Class of each component, ``[m]``.
        sizes: How many of the client's records it stands for, ``[m]``.
        means: ``[m, d]``.
        covariances: ``[m, d, d]``, ``[m, d]`` or ``[m]``.
    """

    declared: ClassVar = dict.fromkeys(("labels", "sizes", "means", "covariances"), FITTED)

    labels: Tensor
    sizes: Tensor
    means: Tensor
    covariances: Tensor


class FedPFT(Featured):
    """Clients send Gaussian mixtures of their features; the server fits the last layer to draws from these.

    Use it where features are good and records differ in looks from client to client; with a guarantee fedcgs is its equal.
    """

    name = "fedpft"
    single_round = True

    components: int = Field(default=10, ge=1)
    """Gaussians of each class at each client (K); one with a target_epsilon, which is of all clients' records together."""
    covariance: Literal["full", "diag", "spherical"] = "diag"
    """Of each Gaussian: a matrix (full), a variance for each feature (diag), or one for all (spherical)."""
    classifier: Literal["softmax", "ridge", "lda"] = Field(
        default="softmax", exclude_if=lambda value: value == "softmax"
    )
    """What is fitted to the draws as the last layer: softmax regression (softmax), ridge regression on one-hot labels with the lambda of least generalised cross-validation (ridge), or a linear discriminant (lda)."""
    head_steps: int = Field(default=2000, ge=1)
    """Mini-batches of 256 draws on which the last layer is trained, with classifier=softmax."""

    def network_settings(self, shape: tuple[int, ...], samples: int, clients: int) -> Mapping[str, Any]:
        """Few features: each Gaussian has a mean and variances of all of them."""
        own = super().network_settings(shape, samples, clients)
        return {"features": default_words(shape, 512), **own}

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Refuse networks whose last layer can't be fitted, and mixtures under noise."""
        layer = Layer.of(model, inputs, self.name)
        bounded(self, layer)
        if self.target_epsilon is not None and (self.components != 1 or self.covariance != "full"):
            raise FedfillError(
                f"components: found {self.components} with covariance={self.covariance} and a target_epsilon, under which each class is one "
                "Gaussian, from sums; allowed: components=1 and covariance=full"
            )
        if self.classifier == "lda" and model.get_submodule(layer.path).bias is None:
            raise FedfillError(
                f"classifier: found lda, which gives each class a bias, with a layer {layer.path} that has none; allowed: softmax or ridge"
            )
        if self.target_epsilon is not None:
            self.statistic(layer)  # refuses what does not fit into memory
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The network, and the components of all clients."""
        return {**super().server_state(initial), "mixture": None}

    def round(self, server: Server, t: int) -> None:
        """Collect the mixtures, draw from them, train the last layer."""
        weights = server.state.weights
        layer = layer_of(server, weights, self.name)
        server.state.mixture = self.gather(server, layer)
        if server.state.mixture is None:
            return  # nothing stands out of the noise; a warning has said so
        head = self.head_of(server, layer, *self.draws(server))
        server.state.weights = {**weights, **layer.holding(head, weights)}

    def head_of(self, server: Server, layer: Layer, z: Tensor, labels: Tensor) -> LinearHead:
        """The head of draws ``[n, d]`` with labels ``[n]``."""
        if self.classifier != "softmax":
            z, targets = z.double(), one_hot(labels, layer.classes)
            return SOLVED[self.classifier](z.T @ z, z.T @ targets, targets.sum(0))
        start = LinearHead(
            torch.zeros(layer.classes, layer.features, dtype=torch.float64),
            torch.zeros(layer.classes, dtype=torch.float64),
        )
        return train_on_samples(start, z, labels, server.stream("batches"), steps=self.head_steps)

    def gather(self, server: Server, layer: Layer) -> Weights | None:
        """All clients' components; under noise one of each class, from sums."""
        message = Ask(changed(server, server.state.weights), server.clients)
        if self.target_epsilon is None:
            replies = ask_once(server, self.fit_own, message, partial(self.flaw, layer), attempts=1).values()
            if not any(len(reply.labels) for reply in replies):
                raise FedfillError(
                    "engine: no client sent a mixture that can be used, so there is nothing to draw from; needed: a client with a record"
                )
            found: Weights = {
                name: torch.cat([getattr(reply, name) for reply in replies]).cpu() for name in Mixtures.declared
            }
            counts = torch.bincount(found["labels"], minlength=layer.classes)
            warn_of_absent(server, counts, 0.0, "it is never predicted")
            return found
        statistic = self.statistic(layer)
        collected = collect(server, self.class_sums, message, statistic, self.noise(statistic, self.left))
        counts = sound_counts(collected)
        warn_of_absent(server, counts, collected.stds["counts"], "it is never predicted")
        held_ones = counts > 0
        if not bool(held_ones.any()):
            return None
        std = collected.stds["class_grams"] / math.sqrt(2)
        gaussians = noisy_class_gaussians(collected.sums["class_grams"], collected.sums["moments"], counts, std)
        return {
            "labels": held_ones.nonzero().flatten(),
            "sizes": counts[held_ones].float(),
            "means": gaussians.means[held_ones].float(),
            "covariances": gaussians.covariances[held_ones].float(),
        }

    def flaw(self, layer: Layer, reply: Mixtures) -> str | None:
        """Why a reply is not what was asked for."""
        labels, m, d = reply.labels, reply.labels.numel(), layer.features
        covariances = {"full": (m, d, d), "diag": (m, d), "spherical": (m,)}[self.covariance]
        wanted = {"sizes": (m,), "means": (m, d), "covariances": covariances}
        shapes = {"labels": (torch.int64, (m,)), **{name: (torch.float32, shape) for name, shape in wanted.items()}}
        if shapes_of({name: getattr(reply, name) for name in shapes}) != shapes:
            return "its components have other types or shapes than were asked for"
        if not bool(((labels >= 0) & (labels < layer.classes)).all()):
            return "a component is of no class of this task"
        if m and int(torch.bincount(labels).max()) > self.components:
            return f"it has more than {self.components} components of a class"
        if not bool(((reply.sizes >= 0) & (reply.sizes <= HEAVIEST)).all()):
            return "its sizes are no numbers of records"
        return None

    @client_handler
    def fit_own(self, client: Client, message: Ask) -> Mixtures:
        """The client's mixtures, by expectation maximisation."""
        weights = {**client.initial, **message.weights}
        layer = Layer.of(client.model(weights), client.blank, self.name)
        chunks = [(z.float().cpu(), labels.cpu()) for z, labels in features(client, weights, layer)]
        z = torch.cat([torch.zeros(0, layer.features), *(z for z, _ in chunks)])
        labels = torch.cat([torch.zeros(0, dtype=torch.int64), *(labels for _, labels in chunks)])
        stream = client.stream("mixtures")
        seed = int(torch.randint(2**31, (1,), generator=stream, device=stream.device))
        fitted = fit_mixtures(z, labels, self.components, self.covariance, seed)
        return Mixtures(**vars(fitted))

    def statistic(self, layer: Layer) -> Statistic:
        """For each class the sum of z z', the sum of z, and how many there are."""
        return class_moments(layer.features, layer.classes, radius=layer.radius, gram=False, by_class=True)

    @client_handler
    def class_sums(self, client: Client, message: Ask) -> Sums:
        """Sums over the client's records."""
        weights = {**client.initial, **message.weights}
        layer = Layer.of(client.model(weights), client.blank, self.name)
        statistic = self.statistic(layer)
        noise = self.noise(statistic, self.left)
        return contribute(client, statistic, features(client, weights, layer), noise, message.clients)

    def draws(self, server: Server) -> tuple[Tensor, Tensor]:
        """Features as many as there are records, of the length that the network's have.

        The records are as many as the clients say. So that no number fills the memory, the draws are `LARGEST` numbers at
        the most, 2 GiB: where there were more, all components have fewer draws, by one factor, and a warning says so. A component
        has one draw at the least.
        """
        mixture = Mixture(**server.state.mixture)
        model = server.model(server.initial)
        layer = Layer.of(model, server.sample.inputs, self.name)
        n, most = float(mixture.sizes.double().sum()), LARGEST // layer.features
        if n > most:
            server.warn(
                f"The clients' mixtures stand for {n:.0f} records, and {most} features are drawn, of all in proportion."
            )
            mixture = replace(mixture, sizes=mixture.sizes * (most / n))
        z, labels = draw_from(mixture, server.stream("draws"))
        if isinstance(getattr(model, "encoder", None), FeatureMap):
            z = layer.radius * z / z.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return z.clamp(*layer.range), labels
