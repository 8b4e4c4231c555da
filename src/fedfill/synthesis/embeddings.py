"""Synthetic embeddings: FRAug's shared generator, its client-specific transformation, prototypes and distances; FedGEN's generator.

Chen et al., "FRAug: Tackling Federated Learning with Non-IID Features via Representation Augmentation", ICCV 2023, section 3.3.
Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional

from fedfill.tree import Weights

Distance = Literal["mmd", "mmd_per_class", "mean_cov", "l2"]


class EmbeddingGenerator(nn.Module):
    """Latent noise and a label to an embedding that belongs to no client.

    Args:
        latent: Size l of the noise.
        classes: Number of classes.
        size: Size d of an embedding.
        device: Where it lives.
    """

    def __init__(self, latent: int, classes: int, size: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(
            nn.Linear(latent + classes, size, device=device), nn.BatchNorm1d(size, device=device), nn.ReLU(),
            nn.Linear(size, size, device=device), nn.BatchNorm1d(size, device=device), nn.ReLU(),
        )  # fmt: skip

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """Embeddings ``[b, d]`` from noise ``[b, l]`` and labels ``[b]``."""
        return self.layers(torch.cat([z, functional.one_hot(labels, self.classes).to(z)], 1))  # type: ignore[no-any-return]


class RTNet(nn.Module):
    """A client's transformation of the generator's embeddings: residuals that carry its domain.

    Args:
        latent: Size l of the hidden layer.
        classes: Number of classes.
        size: Size d of an embedding.
        device: Where it lives.
    """

    def __init__(self, latent: int, classes: int, size: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(
            nn.Linear(size + classes, latent, device=device), nn.BatchNorm1d(latent, device=device), nn.ReLU(),
            nn.Linear(latent, size, device=device), nn.BatchNorm1d(size, device=device),
        )  # fmt: skip

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Residuals ``[b, d]`` for embeddings ``[b, d]`` and labels ``[b]``."""
        return self.layers(torch.cat([embeddings, functional.one_hot(labels, self.classes).to(embeddings)], 1))  # type: ignore[no-any-return]


class LatentGenerator(nn.Module):
    """FedGEN's generator: latent noise and a label to an embedding of any size and sign, by one hidden layer.

    Args:
        latent: Size of the noise.
        width: Size of the hidden layer.
        classes: Number of classes.
        size: Size l of an embedding.
        device: Where it lives.
    """

    def __init__(self, latent: int, width: int, classes: int, size: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(
            nn.Linear(latent + classes, width, device=device), nn.BatchNorm1d(width, device=device), nn.ReLU(),
            nn.Linear(width, size, device=device),
        )  # fmt: skip

    def forward(self, e: Tensor, labels: Tensor) -> Tensor:
        """Embeddings ``[b, l]`` from noise ``[b, latent]`` and labels ``[b]``."""
        return self.layers(torch.cat([e, functional.one_hot(labels, self.classes).to(e)], 1))  # type: ignore[no-any-return]


Make = Callable[[torch.device | str], nn.Module]
"""Makes one of the networks on a device."""


def empty(make: Make, device: torch.device | str) -> nn.Module:
    """A network whose tensors hold anything; nothing is drawn for it."""
    return make("meta").to_empty(device=device)


def initial(make: Make, stream: torch.Generator) -> Weights:
    """The tensors of a network that is drawn from a stream, distributed as torch's own.

    Torch's layers draw from its global generator, which clients that run side by side would share.

    Args:
        make: Makes the network.
        stream: Of its initial weights.

    Returns:
        Tensors by name, on the stream's device.
    """
    network = empty(make, stream.device)
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            bound = layer.in_features**-0.5
            nn.init.uniform_(layer.weight, -bound, bound, generator=stream)
            nn.init.uniform_(layer.bias, -bound, bound, generator=stream)
        elif isinstance(layer, nn.BatchNorm1d):
            layer.reset_parameters()
    return {name: tensor.detach() for name, tensor in network.state_dict().items()}


def follow_prototypes(
    prototypes: Tensor, seen: Tensor, embeddings: Tensor, labels: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Moving averages of each class's embeddings (section 3.3.2).

    The first mean of a class is taken as it is: from zeros the average would lag behind for dozens of steps.

    Args:
        prototypes: ``[classes, d]``.
        seen: Which classes have one, ``[classes]`` bool.
        embeddings: Of a mini-batch, ``[b, d]``.
        labels: ``[b]``.
        momentum: Share of the new mean, in 0..1.

    Returns:
        New prototypes and new marks; classes that the mini-batch lacks stay.
    """
    members = functional.one_hot(labels, len(prototypes)).to(embeddings)  # [b, classes]
    counts = members.sum(0)  # [classes]
    means = (members.T @ embeddings) / counts.clamp_min(1)[:, None]  # [classes, d]
    share = torch.where(seen, momentum, 1.0).to(embeddings)[:, None]
    moved = torch.where((counts > 0)[:, None], torch.lerp(prototypes, means, share), prototypes)
    return moved, seen | (counts > 0)


def mmd(a: Tensor, b: Tensor, kernels: int = 5, factor: float = 2.0) -> Tensor:
    """Maximum mean discrepancy with a sum of Gaussian kernels (Gretton et al. 2012), the biased estimate.

    Args:
        a: ``[n, d]``.
        b: ``[m, d]``.
        kernels: How many; their bandwidths are powers of `factor` around the mean squared distance of all pairs.
        factor: From one bandwidth to the next.

    Returns:
        A scalar in ``[0, 2 * kernels]``; its gradient leaves the bandwidth out.
    """
    n, m = len(a), len(b)
    joint = torch.cat([a, b])  # [n + m, d]
    # |x - y|^2 = |x|^2 + |y|^2 - 2 x y, many times faster than all differences; around the mean less is cancelled
    joint = joint - joint.detach().mean(0)
    squares = joint.square().sum(1)
    distances = (squares[:, None] + squares - 2 * joint @ joint.T).clamp_min(0)  # [n + m, n + m]
    pairs = max((n + m) ** 2 - (n + m), 1)
    bandwidth = (distances.detach().sum() / pairs / factor ** (kernels // 2)).clamp_min(1e-12)
    kernel = torch.stack([torch.exp(-distances / (bandwidth * factor**k)) for k in range(kernels)]).sum(0)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


def mmd_per_class(a: Tensor, a_labels: Tensor, b: Tensor, b_labels: Tensor) -> Tensor:
    """The mean of `mmd` over the classes of which both have at least two samples; 0 where there is none.

    Args:
        a: ``[n, d]``.
        a_labels: ``[n]``.
        b: ``[m, d]``.
        b_labels: ``[m]``.

    Returns:
        A scalar.
    """
    shared = [
        int(c) for c in torch.unique(a_labels) if int((a_labels == c).sum()) > 1 and int((b_labels == c).sum()) > 1
    ]
    if not shared:
        return (a * 0).sum()
    return torch.stack([mmd(a[a_labels == c], b[b_labels == c]) for c in shared]).mean()


def mean_cov(a: Tensor, b: Tensor) -> Tensor:
    """Squared differences of means and of covariances, each averaged over its entries: ``[n, d]`` and ``[m, d]`` to a scalar."""
    means = functional.mse_loss(a.mean(0), b.mean(0))
    return means + functional.mse_loss(_covariance(a), _covariance(b))


def _covariance(x: Tensor) -> Tensor:
    centred = x - x.mean(0)
    return centred.T @ centred / max(len(x) - 1, 1)  # [d, d]


def distance(kind: Distance, a: Tensor, a_labels: Tensor, b: Tensor, b_labels: Tensor) -> Tensor:
    """How far synthetic embeddings are from others.

    Args:
        kind: ``mmd`` of the whole mini-batch, ``mmd_per_class``, ``mean_cov``, or ``l2``, the mean squared difference of
            pairs, which has no upper bound.
        a: Synthetic ones, ``[n, d]``.
        a_labels: ``[n]``.
        b: The others, ``[m, d]``; with ``l2`` as many.
        b_labels: ``[m]``.

    Returns:
        A scalar, 0 or more.
    """
    if kind == "mmd":
        return mmd(a, b)
    if kind == "mmd_per_class":
        return mmd_per_class(a, a_labels, b, b_labels)
    return mean_cov(a, b) if kind == "mean_cov" else functional.mse_loss(a, b)


class EmbeddingOptions(BaseModel):
    """The settings of an algorithm whose clients train on synthetic embeddings."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    embedding_latent: int | None = Field(default=None, ge=1, le=2**16)
    """Size of the generator's noise and of the transformation's hidden layer (l); none: half an embedding's."""
    latent_noise: Literal["normal", "uniform"] = "normal"
    """Distribution of the generator's noise: N(0, 1), or uniform in 0..1 as in the authors' program."""
    generator_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the generator's distance from real embeddings (lambda_G of equation 5)."""
    rtnet_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the transformation's closeness to real embeddings (lambda_R of equation 6)."""
    generator_distance: Distance = "mmd"
    """What the generator maximises: mmd, mmd_per_class, mean_cov, or l2 (to the prototypes), which has no upper bound."""
    rtnet_distance: Distance = "mmd"
    """What the transformation minimises."""
    prototype_momentum: float = Field(default=0.3, gt=0, le=1)
    """Share of a mini-batch's class means in the prototypes (m)."""
    on_real: bool = True
    """Whether the head is trained on real embeddings with residuals."""
    on_prototypes: bool = True
    """Whether the head is trained on class prototypes with residuals."""
    personalised: bool = True
    """Whether residuals go through the client's transformation; if not, the generator's embeddings are used as they are."""


class Embeddings:
    """Where one client's synthetic embeddings come from; what changes from mini-batch to mini-batch lies in its attributes.

    Args:
        options: How they are made.
        generator: Shared by the clients.
        rtnet: The client's transformation.
        prototypes: Moving averages of its classes' embeddings, ``[classes, d]``.
        seen: Which classes have one, ``[classes]``.
        rotations: Where the balanced labels go on, those of the head and those of the generator.
        stream: Of all draws.
    """

    def __init__(
        self, options: EmbeddingOptions, generator: nn.Module, rtnet: nn.Module, prototypes: Tensor, seen: Tensor,
        rotations: Sequence[int], stream: torch.Generator,
    ) -> None:  # fmt: skip
        self.options, self.generator, self.rtnet, self.stream = options, generator, rtnet, stream
        self.prototypes, self.seen, self.rotations = prototypes, seen, list(rotations)

    def latent(self, b: int) -> Tensor:
        """Noise ``[b, l]``."""
        size, device = int(self.options.embedding_latent or 1), self.stream.device
        if self.options.latent_noise == "uniform":
            return torch.rand(b, size, generator=self.stream, device=device)
        return torch.randn(b, size, generator=self.stream, device=device)

    def balanced(self, which: int, b: int) -> Tensor:
        """Labels ``[b]`` of all classes in turn, going on from one mini-batch to the next.

        Those of the head (0) and of the generator (1) rotate apart: in turns each might meet the same half for ever.
        """
        labels = (torch.arange(b, device=self.stream.device) + self.rotations[which]) % len(self.prototypes)
        self.rotations[which] = (self.rotations[which] + b) % len(self.prototypes)
        return labels

    def residual(self, labels: Tensor) -> Tensor:
        """The transformation of the generator's embeddings, ``[b, d]``."""
        found: Tensor = self.rtnet(self.generator(self.latent(len(labels)), labels), labels)
        return found

    def embeddings(self, v: Tensor, labels: Tensor, weight: float) -> list[tuple[Tensor, Tensor]]:
        """Domain-specific embeddings with their labels: on real ones, and on prototypes of classes that were seen."""
        found = []
        if self.options.on_real:
            made = v + weight * self.residual(labels) if self.options.personalised else self.agnostic(labels)
            found.append((made, labels))
        if self.options.on_prototypes and bool(self.seen.any()):
            wanted = self.balanced(0, len(labels))
            wanted = wanted[self.seen[wanted]]
            if len(wanted):
                base = self.prototypes[wanted]
                made = base + weight * self.residual(wanted) if self.options.personalised else self.agnostic(wanted)
                found.append((made, wanted))
        return found

    def agnostic(self, labels: Tensor) -> Tensor:
        """The generator's embeddings as they are, ``[b, d]``."""
        made: Tensor = self.generator(self.latent(len(labels)), labels)
        return made

    def apart(self, g: Tensor, wanted: Tensor, v: Tensor, labels: Tensor) -> Tensor:
        """How far the generator's embeddings are from the client's; `l2` compares pairs, so each with the prototype of its class.

        Those of classes that were not seen have none and are left out; 0 where all are.
        """
        kind = self.options.generator_distance
        if kind != "l2":
            return distance(kind, g, wanted, v, labels)
        mine = self.seen[wanted]
        if not bool(mine.any()):
            return (g * 0).sum()
        return distance(kind, g[mine], wanted[mine], self.prototypes[wanted[mine]], wanted[mine])
