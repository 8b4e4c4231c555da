"""FRAug: Chen et al., "FRAug: Tackling Federated Learning with Non-IID Features via Representation Augmentation", ICCV 2023.

Clients of different domains share a generator of embeddings; each turns its embeddings into ones of its own domain, and trains the
head of its model on them. Normalisation layers stay with the clients, as in FedBN.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms.fedbn import FedBN, without_normalisation
from fedfill.data.samples import normalise
from fedfill.errors import FedfillError
from fedfill.models.layers import draws_from
from fedfill.models.views import weights_of
from fedfill.privacy.ledger import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.server import Server
from fedfill.synthesis.embeddings import (
    Distance,
    EmbeddingGenerator,
    Make,
    RTNet,
    distance,
    empty,
    follow_prototypes,
    initial,
)  # fmt: skip
from fedfill.training.fit import make_optimizer, training_mode
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


class FRAug(FedBN):
    """Federated representation augmentation (algorithm 1)."""

    name = "fraug"
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
    generator_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Step size of the generator, in all rounds; none: that of the model."""
    rtnet_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Step size of the transformation network, in all rounds; none: that of the model."""
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
    residual_schedule: Literal["exponential", "constant"] = "exponential"
    """Weight of the residuals: exp(gamma (t - T)), or always 1."""
    residual_gamma: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Gamma of the residuals' exponential schedule; none: 0.01."""
    synthetic_gamma: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Gamma of the schedule of the synthetic embeddings' weight in the loss."""
    synthetic_limit: float = Field(default=0.5, ge=0, le=1)
    """Largest weight of the synthetic embeddings in the loss; 0: none of them is used."""
    on_real: bool = True
    """Whether the head is trained on real embeddings with residuals."""
    on_prototypes: bool = True
    """Whether the head is trained on class prototypes with residuals."""
    personalised: bool = True
    """Whether residuals go through the client's transformation; if not, the generator's embeddings are used as they are."""
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
        head = dict(model.named_children()).get("classifier")
        if not isinstance(head, nn.Linear) or getattr(model, "projection", None) is not None:
            raise FedfillError(
                f"model: {self.name} needs a linear head named classifier on an encoder, and {type(model).__name__} has "
                f"{'a projection before it' if isinstance(head, nn.Linear) else f'a {type(head).__name__} there'}; "
                "allowed: a built-in network without projection, or a module with the parts encoder and classifier = torch.nn.Linear"
            )
        _require_scores_of_the_head(model, inputs)
        constant = self.residual_schedule == "constant"
        if constant and self.residual_gamma is not None:
            raise FedfillError(
                f"residual_gamma: found {self.residual_gamma:g} with residual_schedule=constant, which has none; allowed: none"
            )
        latent = self.embedding_latent or max(1, head.in_features // 2)
        # FedAvg's and not FedBN's: without normalisation layers a client still has its own transformation and prototypes
        resolved = super(FedBN, self).resolved(rounds=rounds, model=model, inputs=inputs)
        return resolved.model_copy(
            update={
                "embedding_latent": latent,
                "residual_gamma": None if constant else 0.01 if self.residual_gamma is None else self.residual_gamma,
            }
        )

    def residual_weight(self, t: int, rounds: int) -> float:
        """a_t, in (0, 1]: how much of a residual is added in round `t` of `rounds`, from 0."""
        gamma = self.residual_gamma
        return 1.0 if self.residual_schedule == "constant" or gamma is None else math.exp(gamma * (t - rounds))

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
        nets = self.networks(client, model, message.generator)
        update = _LocalUpdate(self, client, model, nets, message)
        training = self.training(client.round)
        with draws_from(model, client.stream("draws")):
            for step, batch in enumerate(client.batches(training)):
                update.classification(batch.inputs, batch.labels)
                if step % self.generator_every == 0 and (self.on_real or self.on_prototypes):
                    update.generation(batch.inputs, batch.labels)
        trained = weights_of(model)
        client.state.own = {name: trained[name] for name in own}
        generator = weights_of(nets.generator)
        client.state.private = update.private({k: x for k, x in generator.items() if k not in message.generator})
        return SharedUpdate(
            {name: trained[name] for name in message.weights}, len(client.data),
            {name: generator[name] for name in message.generator},
        )  # fmt: skip

    def networks(self, client: Client, model: nn.Module, received: Weights) -> _Networks:
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
        return _Networks(generator, transformation, kept)


@dataclass(frozen=True)
class _Networks:
    """The networks of one local update beside the model."""

    generator: nn.Module
    rtnet: nn.Module
    kept: Private


class _LocalUpdate:
    """One client's iterations in a round: what changes from step to step."""

    def __init__(self, settings: FRAug, client: Client, model: Any, nets: _Networks, message: Shared) -> None:
        self.settings, self.model, self.message = settings, model, message
        self.generator, self.rtnet = nets.generator, nets.rtnet
        self.prototypes, self.seen = nets.kept.prototypes, nets.kept.seen
        self.rotations, self.classes = list(nets.kept.rotations), client.classes
        self.stream = client.stream("embeddings")
        training = settings.training(client.round)
        others = [
            replace(training, learning_rate=rate or training.learning_rate, weight_decay=0.0)
            for rate in (settings.generator_rate, settings.rtnet_rate)
        ]
        self.optimizers = [
            make_optimizer(list(module.parameters()), its, fused=False)
            for module, its in zip((model, self.generator, self.rtnet), (training, *others), strict=True)
        ]
        for optimizer, state in zip(self.optimizers, nets.kept.momenta or [], strict=False):
            groups_now = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": _copied(state), "param_groups": groups_now})

    def private(self, generator: Weights) -> Private:
        """What the client keeps."""
        momenta = [_copied(optimizer.state_dict()["state"]) for optimizer in self.optimizers]
        return Private(weights_of(self.rtnet), generator, self.prototypes, self.seen, momenta, self.rotations)

    def latent(self, b: int) -> Tensor:
        """Noise ``[b, l]``."""
        size, device = int(self.settings.embedding_latent or 1), self.stream.device
        if self.settings.latent_noise == "uniform":
            return torch.rand(b, size, generator=self.stream, device=device)
        return torch.randn(b, size, generator=self.stream, device=device)

    def balanced(self, which: int, b: int) -> Tensor:
        """Labels ``[b]`` of all classes in turn, going on from one mini-batch to the next.

        Those of the head (0) and of the generator (1) rotate apart: in turns each might meet the same half for ever.
        """
        labels = (torch.arange(b, device=self.stream.device) + self.rotations[which]) % self.classes
        self.rotations[which] = (self.rotations[which] + b) % self.classes
        return labels

    def residual(self, labels: Tensor) -> Tensor:
        """The transformation of the generator's embeddings, ``[b, d]``."""
        found: Tensor = self.rtnet(self.generator(self.latent(len(labels)), labels), labels)
        return found

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

    def embeddings(self, v: Tensor, labels: Tensor, weight: float) -> list[tuple[Tensor, Tensor]]:
        """Domain-specific embeddings with their labels: on real ones, and on prototypes of classes that were seen."""
        found = []
        if self.settings.on_real:
            made = v + weight * self.residual(labels) if self.settings.personalised else self.agnostic(labels)
            found.append((made, labels))
        if self.settings.on_prototypes and bool(self.seen.any()):
            wanted = self.balanced(0, len(labels))
            wanted = wanted[self.seen[wanted]]
            if len(wanted):
                base = self.prototypes[wanted]
                made = base + weight * self.residual(wanted) if self.settings.personalised else self.agnostic(wanted)
                found.append((made, wanted))
        return found

    def agnostic(self, labels: Tensor) -> Tensor:
        """The generator's embeddings as they are, ``[b, d]``."""
        made: Tensor = self.generator(self.latent(len(labels)), labels)
        return made

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

    def apart(self, g: Tensor, wanted: Tensor, v: Tensor, labels: Tensor) -> Tensor:
        """How far the generator's embeddings are from the client's; `l2` compares pairs, so each with the prototype of its class.

        Those of classes that were not seen have none and are left out; 0 where all are.
        """
        kind = self.settings.generator_distance
        if kind != "l2":
            return distance(kind, g, wanted, v, labels)
        mine = self.seen[wanted]
        if not bool(mine.any()):
            return (g * 0).sum()
        return distance(kind, g[mine], wanted[mine], self.prototypes[wanted[mine]], wanted[mine])

    def step(self, which: int, loss: Tensor, module: nn.Module) -> None:
        """One step of one of the three networks; the others keep their gradients clean."""
        optimizer, parameters = self.optimizers[which], [p for p in module.parameters() if p.requires_grad]
        optimizer.zero_grad()
        loss.backward(inputs=parameters)  # type: ignore[no-untyped-call]
        optimizer.step()


def _require_scores_of_the_head(model: nn.Module, inputs: Tensor) -> None:
    """Make sure that the model is its head on its encoder and nothing else, since nothing else would be trained."""
    name, generator = type(model).__name__, torch.Generator().manual_seed(0)
    trial = copy.deepcopy(model).eval()
    encoder: nn.Module = trial.encoder  # type: ignore[assignment]
    head: nn.Linear = trial.classifier  # type: ignore[assignment]
    with torch.no_grad():
        extractor = {id(parameter) for parameter in encoder.parameters()}
        for parameter in trial.parameters():
            # a layer in between may begin with zeros, which would hide it, and so may a head
            if id(parameter) not in extractor and parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        try:
            x = normalise(inputs)
            scores, v = trial(x), encoder(x)
        except Exception as error:  # whatever a foreign module may raise, whose forward may change x first
            raise FedfillError(
                f"model: {FRAug.name} trains classifier(encoder(x)), and {name} or its encoder does not take x "
                f"({type(error).__name__}); allowed: a forward that is classifier(encoder(x))"
            ) from error
        size = head.in_features
        if not isinstance(v, Tensor) or list(v.shape) != [1, size]:
            what = f"embeddings of shape {list(v.shape)}" if isinstance(v, Tensor) else f"a {type(v).__name__} of them"
        elif not torch.allclose(head(v), scores, rtol=1e-4, atol=1e-5, equal_nan=True):
            what = "other scores than its classifier on its encoder"
        else:
            return
    raise FedfillError(
        f"model: {FRAug.name} trains classifier(encoder(x)) and nothing beside it, and {name} makes {what}; "
        f"allowed: embeddings of shape [samples, {size}], and a forward that is classifier(encoder(x))"
    )


def _size(model: nn.Module) -> int:
    """Size d of an embedding: what the linear head takes."""
    return int(model.classifier.in_features)  # type: ignore[union-attr, arg-type]


def _copied(state: Mapping[Any, Any]) -> Tree:
    return {
        index: {name: x.detach().clone() for name, x in values.items() if x is not None}
        for index, values in state.items()
    }
