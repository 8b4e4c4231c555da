"""What a feature map learns before the first round, by sums alone: filters of patches, and the centre of the features.

`Featured` is the base of the algorithms that fit a last layer on features which nobody trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms._base import Algorithm
from fedfill.algorithms._layers import CHUNK, Ask, changed
from fedfill.data.samples import normalise
from fedfill.errors import FedfillError
from fedfill.models.features import Centred, FeatureMap, default_words
from fedfill.models.filters import Patches
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.server import Server
from fedfill.protocol.sums import Sums, collect, contribute
from fedfill.statistics import patches
from fedfill.statistics.noise import NoisySums
from fedfill.statistics.spectral_noise import dimension_for
from fedfill.statistics.sums import class_moments, plain_sum, within
from fedfill.tree import Weights

CENTRE_SHARE = 0.02
"""Of the privacy budget, for the centre."""


class Featured(NoisySums, Algorithm):
    """An algorithm on the features of a network that is not trained, of which sums may learn what can be learned."""

    network: ClassVar[str] = "features"

    filter_steps: int | None = Field(default=None, ge=0)
    """Exchanges in which the filters of patches are learned from all clients' images (spherical k-means), after one for their whitening; none: 12, or 0 under noise and where there are no patches."""
    centre: Literal["seeded", "federated"] | None = None
    """Centre of the features: the mean over seeded inputs (seeded), or over all clients' records, with noise where there is any (federated); none: federated under noise, on images."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Fill in what there is to learn in this network."""
        encoder = getattr(model, "encoder", None)
        learns = isinstance(encoder, FeatureMap) and any(isinstance(step, Patches) for step in encoder)
        noisy = self.target_epsilon is not None
        steps = self.filter_steps if self.filter_steps is not None else 12 if learns and not noisy else 0
        if steps and not learns:
            raise FedfillError(
                f"filter_steps: found {steps} on a network without patches; allowed: 0, or features=patches(300)"
            )
        if steps and noisy:
            raise FedfillError(
                f"filter_steps: found {steps} with a target_epsilon, and each exchange would cost of it; allowed: 0, which takes "
                "filters as drawn, or features=conv(200)"
            )
        centre = self.centre or ("federated" if noisy and centred(encoder) else "seeded")
        if centre == "federated" and not centred(encoder):
            raise FedfillError(
                "centre: found federated on a network without one; allowed: seeded, or --model features on images"
            )
        checked = super().resolved(rounds=rounds, model=model, inputs=inputs)
        return checked.model_copy(update={"filter_steps": steps, "centre": centre})

    def network_settings(self, shape: tuple[int, ...], samples: int, clients: int) -> Mapping[str, Any]:
        """Under noise as many features as it lets one use, from public numbers alone: `dimension_for`."""
        if self.target_epsilon is None or not samples:
            return {}
        statistic = class_moments(64, 2, counts=False)  # the noise does not depend on how many features there are
        noise = self.noise(statistic, 1 - CENTRE_SHARE)
        assert noise is not None
        std = noise.stds["gram"] * noise.in_the_sum(clients, clients) / 2**0.5
        return {"features": default_words(shape, dimension_for(samples, std))}

    @property
    def left(self) -> float:
        """Share of the privacy budget behind the centre."""
        return 1 - CENTRE_SHARE if self.centre == "federated" else 1.0

    # Before the first round

    def pretraining_steps(self) -> int:
        """Whitening and k-means of the filters, then the centre."""
        return (1 + self.filter_steps if self.filter_steps else 0) + (self.centre == "federated")

    def pretrain(self, server: Server, step: int) -> None:
        """One exchange."""
        if self.filter_steps and step <= self.filter_steps:
            self.learn_filters(server, step)
        else:
            self.learn_centre(server)

    def learn_filters(self, server: Server, step: int) -> None:
        """Whitening from the patches' moments (Coates and Ng 2011), then steps of k-means from what each filter is nearest to."""
        state, path = server.state, path_of(server, Patches)
        message = Ask(changed(server, state.weights), server.clients)
        if step == 0:
            n = len(state.weights[f"{path}.mean"])
            collected = collect(server, self.patch_moments, message, patches.moments(n), None)
            sums = collected.sums
            found = patches.whitening(sums["first"], sums["second"], max(float(sums["patches"]), 1))
            new = dict(zip(("mean", "whitening"), found, strict=True))
        else:
            dictionary = state.weights[f"{path}.dictionary"]
            collected = collect(server, self.patch_clusters, message, patches.clusters(dictionary), None)
            new = {"dictionary": patches.update(dictionary, collected.sums["clusters"])}
        state.weights = {
            **state.weights,
            **{f"{path}.{name}": x.to(state.weights[f"{path}.{name}"]) for name, x in new.items()},
        }
        if step == self.filter_steps:
            place = path_of(server, Centred)
            encoder = cast("FeatureMap", server.model(state.weights).encoder)
            state.weights = {**state.weights, f"{place}.centre": encoder.seeded_centre()}

    @client_handler
    def patch_moments(self, client: Client, message: Ask) -> Sums:
        """Sums of p and p p' over the patches of the client's images."""
        layer, found = patches_of(client, message.weights)
        return contribute(client, patches.moments(len(layer.mean)), found, None, message.clients)

    @client_handler
    def patch_clusters(self, client: Client, message: Ask) -> Sums:
        """For each filter the sum over the whitened patches that it is nearest to."""
        layer, found = patches_of(client, message.weights)
        whitened = ((patches.whitened(p.double(), layer.mean, layer.whitening), y) for p, y in found)
        return contribute(client, patches.clusters(layer.dictionary), whitened, None, message.clients)

    def learn_centre(self, server: Server) -> None:
        """The mean of the features before they are centred, over all clients' records; each is of length 1."""
        state, path = server.state, path_of(server, Centred)
        statistic = plain_sum(len(state.weights[f"{path}.centre"]))
        message = Ask(changed(server, state.weights), server.clients)
        noise = self.noise(statistic, CENTRE_SHARE)
        collected = collect(server, self.feature_sum, message, statistic, noise, purpose="centre")
        mean = collected.sums["sum"] / collected.sums["records"].clamp(min=1)
        state.weights = {**state.weights, f"{path}.centre": mean.to(state.weights[f"{path}.centre"])}

    @client_handler
    def feature_sum(self, client: Client, message: Ask) -> Sums:
        """The sum of the client's features before they are centred."""
        encoder = cast("FeatureMap", client.model({**client.initial, **message.weights}).encoder)
        statistic = plain_sum(len(encoder.get_buffer("centred.centre")))
        noise = self.noise(statistic, CENTRE_SHARE)
        return contribute(client, statistic, uncentred(client, encoder), noise, message.clients, purpose="centre")


def centred(encoder: nn.Module | None) -> bool:
    """Whether an encoder centres features of length 1: those of images."""
    return isinstance(encoder, FeatureMap) and len(encoder.shape) == 3


def path_of(server: Server, kind: type[nn.Module]) -> str:
    """The name of the module of this type in the server's network."""
    model = server.model(server.initial)
    return next(str(name) for name, module in model.named_modules() if isinstance(module, kind))


def patches_of(client: Client, changed: Weights) -> tuple[Patches, Iterator[tuple[Tensor, Tensor]]]:
    """The step ``patches`` of the client's network, and even patches of its images, at places that follow from these alone."""
    encoder = cast("FeatureMap", client.model({**client.initial, **changed}).encoder)
    layer = next(step for step in encoder if isinstance(step, Patches))

    def found() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(client.data), CHUNK):
            client.check()
            images = normalise(client.data.inputs[start : start + CHUNK])
            places = patches.positions(images, layer.size, patches.PER_RECORD, encoder.seed)
            rows = patches.patches_at(images, places, layer.size).flatten(0, 1)
            yield rows, rows.new_zeros(len(rows), dtype=torch.int64)

    return layer, found()


def uncentred(client: Client, encoder: FeatureMap) -> Iterator[tuple[Tensor, Tensor]]:
    """Features before they are centred, of length 1 at the most, and labels."""
    for start in range(0, len(client.data), CHUNK):
        client.check()
        part = client.data[start : start + CHUNK]
        yield within(encoder.before_centre(normalise(part.inputs)), 1.0), part.labels
