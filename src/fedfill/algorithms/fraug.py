"""FRAug: Chen et al., "FRAug: Tackling Federated Learning with Non-IID Features via Representation Augmentation", ICCV 2023.

Clients of different domains share a generator of embeddings; each turns its embeddings into ones of its own domain, and trains the
head of its model on them. Normalisation layers stay with the clients, as in FedBN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms.fedbn import FedBN, without_normalisation
from fedfill.errors import FedfillError
from fedfill.models.layers import draws_from
from fedfill.models.views import require_linear_head, weights_of
from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.server import Server
from fedfill.synthesis.embeddings import (
    EmbeddingGenerator,
    EmbeddingOptions,
    Embeddings,
    Make,
    RTNet,
    distance,
    empty,
    follow_prototypes,
    initial,
)  # fmt: skip
from fedfill.training.fit import training_mode
from fedfill.training.optimizers import Optimizer
from fedfill.tree import Record, Tree, Weights


@dataclass(frozen=True)
class Shared(Broadcast):
    """Server to client: all of the model but its normalisation layers, and the generator.

    Attributes:
        generator: All of it, or all but its batch norm.
        residual: Weight of the residuals in this round (a_t).
        synthetic: Weight of the synthetic embeddings' loss in this round (b_t).
    """

    generator: Weights
    residual: float
    synthetic: float


@dataclass(frozen=True)
class SharedUpdate(Update):
    """Client to server: the same, trained, and the number of samples behind it."""

    declared: ClassVar = {
        **Update.declared, "generator": unbounded("generator of embeddings, trained on the client's own"),
    }  # fmt: skip

    generator: Weights


@dataclass(frozen=True)
class Private(Record):
    """What a client keeps beside its normalisation layers; nothing of it is ever sent.

    Attributes:
        rtnet: Its transformation network.
        generator: Batch norm of the generator, where it is local.
        prototypes: Moving averages of its classes' embeddings, ``[classes, d]``.
        seen: Which classes have one, ``[classes]``.
        momenta: Of the three optimizers.
        rotations: Where the balanced labels go on, those of the head and those of the generator.
    """

    rtnet: Weights
    generator: Weights
    prototypes: Tensor
    seen: Tensor
    momenta: Tree
    rotations: list[int]


class FRAug(EmbeddingOptions, FedBN):
    """Federated representation augmentation (algorithm 1).

    Use it when clients' images look different and each client has few; after 50 rounds it was no better than FedBN.
    """

    name = "fraug"
    own_loops = "all its networks"
    parts = ("encoder", "classifier")
    presets: ClassVar = {
        "digits-domains": {"residual_schedule": "constant", "synthetic_gamma": 0.002},
        "office_home": {"generator_norm": "local"},
        "pacs": {"generator_weight": 10.0},
    }
    paper: ClassVar = {
        "": {
            "local_epochs": 1, "local_steps": 10, "batch_size": 32, "optimizer": "sgd", "learning_rate": 0.01, "lr_decay": 1.0,
            "momentum": 0.5, "generator_rate": 0.05, "rtnet_rate": 0.05,
        },
        "digits-domains": {"batch_size": 64, "local_steps": 20},
        "office_home": {"batch_size": 16, "rtnet_rate": 0.025},
        "pacs": {"local_steps": 5},
    }  # fmt: skip

    batch_size: int = Field(default=64, ge=2)
    """Samples in a mini-batch (B)."""
    weighting: Literal["samples", "uniform"] = "samples"
    """Weights of the average: each client's number of samples (the authors' program), or all equal."""
    norm_shared: Literal["nothing"] = Field(default="nothing", exclude_if=lambda value: value == "nothing")
    """Normalisation layers stay with the clients as a whole."""
    generator_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Step size of the generator, in all rounds; none: that of the model."""
    rtnet_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Step size of the transformation network, in all rounds; none: that of the model."""
    residual_schedule: Literal["exponential", "constant"] = "exponential"
    """Weight of the residuals: exp(gamma (t - T)), or always 1."""
    residual_gamma: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Gamma of the residuals' exponential schedule; none: 0.01."""
    synthetic_gamma: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Gamma of the schedule of the synthetic embeddings' weight in the loss."""
    synthetic_limit: float = Field(default=0.5, ge=0, le=1)
    """Largest weight of the synthetic embeddings in the loss; 0: none of them is used."""
    generator_norm: Literal["shared", "local"] = "shared"
    """Whether the generator's batch norm is averaged, or stays with the clients."""
    generator_every: int = Field(default=1, ge=1)
    """Mini-batches for each step of generator and transformation."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that the model is an extractor and a linear head, and that nothing is asked for that isn't done here."""
        for axis in ("local", "aggregation"):
            if getattr(self, axis) is not None:
                raise FedfillError(
                    f"{axis}: found {getattr(self, axis).name} with {self.name}, whose clients take three kinds of steps of their own; allowed: none"
                )
        head = require_linear_head(model, inputs, self.name)
        if self.residual_schedule == "constant" and self.residual_gamma is not None:
            raise FedfillError(
                f"residual_gamma: found {self.residual_gamma:g} with residual_schedule=constant, which has none; allowed: none"
            )
        latent = self.embedding_latent or max(1, head.in_features // 2)
        # FedAvg's and not FedBN's: without normalisation layers a client still has its own transformation and prototypes
        resolved = super(FedBN, self).resolved(rounds=rounds, model=model, inputs=inputs)
        return resolved.model_copy(update={"embedding_latent": latent})

    def residual_weight(self, t: int, rounds: int) -> float:
        """a_t, in (0, 1]: how much of a residual is added in round `t` of `rounds`, from 0."""
        gamma = 0.01 if self.residual_gamma is None else self.residual_gamma
        return 1.0 if self.residual_schedule == "constant" else math.exp(gamma * (t - rounds))

    def synthetic_weight(self, t: int, rounds: int) -> float:
        """b_t, up to `synthetic_limit`: the weight of the synthetic embeddings' loss in round `t` of `rounds`, from 0."""
        return min(self.synthetic_limit, math.exp(self.synthetic_gamma * (t - rounds)))

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, and the generator."""
        return {**super().server_state(initial), "generator": None}

    def client_state(self) -> dict[str, Tree]:
        """Normalisation layers, and what belongs to the embeddings; the momenta of the model."""
        return {**super().client_state(), "private": None}

    def makers(self, model: nn.Module, classes: int) -> tuple[Make, Make]:
        """What makes a generator and a transformation network for the model's embeddings."""
        sizes = int(self.embedding_latent or 1), classes, _size(model)
        return partial(EmbeddingGenerator, *sizes), partial(RTNet, *sizes)

    def round(self, server: Server, t: int) -> None:
        """ServerUpdate: send model and generator, average both."""
        state = server.state
        model = server.model(state.weights)
        make, _ = self.makers(model, server.classes)
        if state.generator is None:
            # one for all: the mean of networks that each drew for itself would be a smaller one
            state.generator = initial(make, server.stream("generator"))
        shared, generator = without_normalisation(model, state.weights), state.generator
        if self.generator_norm == "local":
            generator = without_normalisation(make("meta"), generator)
        weights = self.residual_weight(t, server.rounds), self.synthetic_weight(t, server.rounds)
        sent = {"weights": shared, "generator": generator}
        message = Shared(shared, generator, *weights)
        _, mean = server.average(self.cohort(server, t), self.train_augmented, message, of=sent, by=self.by)
        state.weights = {**state.weights, **mean["weights"]}
        state.generator = {**state.generator, **mean["generator"]}

    @client_handler
    def train_augmented(self, client: Client, message: Shared) -> SharedUpdate:
        """ClientUpdate: in turn the classification model, and generator and transformation network."""
        own = self.own(client, message.weights)
        model = client.model({**message.weights, **own})
        update = _LocalUpdate(self, client, model, self.networks(client, model, message.generator), message)
        used = message.synthetic > 0 and (self.on_real or self.on_prototypes)
        with draws_from(model, client.stream("draws")):
            for step, batch in enumerate(client.batches(self.training(client.round))):
                update.classification(batch.inputs, batch.labels)
                if used and step % self.generator_every == 0:
                    update.generation(batch.inputs, batch.labels)
        trained = weights_of(model)
        client.state.own = {name: trained[name] for name in own}
        generator = weights_of(update.generator)
        client.state.private = update.private({k: x for k, x in generator.items() if k not in message.generator})
        return SharedUpdate(
            {name: trained[name] for name in message.weights}, len(client.data),
            {name: generator[name] for name in message.generator},
        )  # fmt: skip

    def networks(self, client: Client, model: nn.Module, received: Weights) -> tuple[nn.Module, nn.Module, Private]:
        """Generator and transformation network, and what the client keeps beside them."""
        classes, device = client.classes, client.data.labels.device
        make_generator, make_rtnet = self.makers(model, classes)
        kept = client.state.private
        if kept is None:
            own = initial(make_generator, client.stream("generator"))
            kept = Private(
                initial(make_rtnet, client.stream("rtnet")), {k: x for k, x in own.items() if k not in received},
                torch.zeros(classes, _size(model), device=device), torch.zeros(classes, dtype=torch.bool, device=device),
                None, [0, 0],
            )  # fmt: skip
        generator, transformation = empty(make_generator, device), empty(make_rtnet, device)
        generator.load_state_dict({**received, **kept.generator})
        transformation.load_state_dict(kept.rtnet)
        return generator, transformation, kept


class _LocalUpdate(Embeddings):
    """One client's iterations in a round: what changes from step to step."""

    def __init__(
        self, settings: FRAug, client: Client, model: Any, nets: tuple[nn.Module, nn.Module, Private], message: Shared
    ) -> None:
        generator, rtnet, kept = nets
        pool = kept.prototypes, kept.seen, kept.rotations
        super().__init__(settings, generator, rtnet, *pool, client.stream("embeddings"))
        self.settings, self.model, self.message = settings, model, message
        training = settings.training(client.round)
        others = [
            replace(training, learning_rate=rate or training.learning_rate, weight_decay=0.0)
            for rate in (settings.generator_rate, settings.rtnet_rate)
        ]
        self.optimizers = [
            Optimizer(list(module.parameters()), replace(its.rule, fused=False), momenta)
            for module, its, momenta in zip(
                (model, self.generator, self.rtnet), (training, *others), kept.momenta or [None] * 3, strict=True
            )
        ]

    def private(self, generator: Weights) -> Private:
        """What the client keeps."""
        momenta = [optimizer.momenta for optimizer in self.optimizers]
        return Private(weights_of(self.rtnet), generator, self.prototypes, self.seen, momenta, self.rotations)

    def classification(self, inputs: Tensor, labels: Tensor) -> None:
        """Equation 1: the model on real embeddings, and its head alone on synthetic ones; generator and transformation stay."""
        settings, model = self.settings, self.model
        training_mode(model, settings.buffers)
        self.generator.eval()
        self.rtnet.eval()
        v = model.encoder(inputs)  # [b, d]
        real = functional.cross_entropy(model.classifier(v), labels)
        terms, share = [], self.message.synthetic
        with torch.no_grad():
            synthetic = self.embeddings(v.detach(), labels, self.message.residual) if share else []
        for made, wanted in synthetic:
            terms.append(functional.cross_entropy(model.classifier(made), wanted))
        loss = (1 - share) * real + share * torch.stack(terms).mean() if terms else real
        self.step(0, loss, model)
        self.prototypes, self.seen = follow_prototypes(
            self.prototypes, self.seen, v.detach(), labels, settings.prototype_momentum
        )

    def generation(self, inputs: Tensor, labels: Tensor) -> None:
        """Equations 5 and 6: generator and transformation; the model is fixed, in evaluation mode."""
        if len(labels) < 2:
            return  # batch norm can't train on one sample
        settings, model = self.settings, self.model
        model.eval()
        self.generator.train()
        self.rtnet.train()
        with torch.no_grad():
            v = model.encoder(inputs)  # [b, d]
        wanted = self.balanced(1, len(labels))
        g = self.agnostic(wanted)
        away = self.apart(g, wanted, v, labels)
        loss = functional.cross_entropy(model.classifier(g), wanted) - settings.generator_weight * away
        self.step(1, loss, self.generator)
        if not settings.personalised:
            return
        self.generator.eval()
        terms = []
        for base, base_labels in ((v, labels), (self.prototypes[wanted], wanted)):
            mine = self.seen[base_labels]
            if int(mine.sum()) < 2:
                continue
            base, base_labels = base[mine], base_labels[mine]
            with torch.no_grad():
                agnostic = self.agnostic(base_labels)
            made = base + self.rtnet(agnostic, base_labels)
            scores = functional.log_softmax(model.classifier(made), 1)
            entropy = -(scores.exp() * scores).sum(1).mean()
            near = distance(settings.rtnet_distance, made, base_labels, base, base_labels)
            terms.append(settings.rtnet_weight * near - entropy)
        if terms:
            self.step(2, torch.stack(terms).mean(), self.rtnet)

    def step(self, which: int, loss: Tensor, module: nn.Module) -> None:
        """One step of one of the three networks; the others keep their gradients clean."""
        optimizer, parameters = self.optimizers[which], [p for p in module.parameters() if p.requires_grad]
        optimizer.zero_grad()
        loss.backward(inputs=parameters)  # type: ignore[no-untyped-call]
        optimizer.step()


def _size(model: nn.Module) -> int:
    """Size d of an embedding: what the linear head takes."""
    return int(model.classifier.in_features)  # type: ignore[union-attr, arg-type]
