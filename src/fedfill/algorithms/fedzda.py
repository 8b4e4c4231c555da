"""Fed-ZDAC and Fed-ZDAS: Hao et al., "Towards Fair Federated Learning with Zero-Shot Data Augmentation", CVPR Workshops 2021.

Images conjured from a model's batch-norm statistics (`fedfill.synthesis.inversion`, algorithm 1) are trained on beside the real ones:
at the clients, from the global model (algorithm 2, `FedZDAC`), or at the server, from each client's model (algorithm 3, `FedZDAS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill import tree
from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.dataset import together
from fedfill.data.samples import Samples, some_of_each
from fedfill.errors import FedfillError
from fedfill.models.views import NORMALISATION
from fedfill.privacy.releases import public, unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import shapes_of
from fedfill.protocol.server import Server
from fedfill.synthesis.inversion import Inversion, Statistic, invert, require_statistics
from fedfill.training.fit import Buffers
from fedfill.tree import Record, Tree, Weights


@dataclass(frozen=True)
class ZeroShot(Broadcast):
    """Server to client: the global model with its batch-norm statistics, and whether to add synthetic images.

    Attributes:
        augment: Whether the client adds synthetic images in this round.
        synthetic: The images, where the server makes them for all; None: the client makes its own.
    """

    augment: bool
    synthetic: Samples | None


@dataclass(frozen=True)
class ZeroShotUpdate(Update):
    """Client to server: the trained model and the number of real samples behind it.

    Attributes:
        model: The trained model as it is, where the server inverts it and the aggregation sends something else.
        losses: Statistics' distance and cross-entropy before and after the inversion, where the client made images.
    """

    declared: ClassVar = {
        **Update.declared,
        "model": unbounded("model as trained, with the statistics of the client's own images"),
        "losses": public("follows from the global model"),
    }

    model: Weights | None
    losses: list[float] | None


@dataclass(frozen=True)
class Made(Record):
    """Synthetic images that a client keeps.

    Attributes:
        model: SHA-256 of the model that they were made from.
        round: When.
        samples: Images and labels.
        losses: As in `ZeroShotUpdate`.
    """

    model: str
    round: int
    samples: Samples
    losses: list[float]


class _ZeroShotDataAugmentation(FedAvg):
    """What both deployments share: when they begin, and how images are made."""

    parts = (NORMALISATION,)
    paper: ClassVar = {"": {"batch_size": 10, "optimizer": "sgd", "learning_rate": 0.02, "lr_decay": 1.0}}

    weighting: Literal["samples", "uniform"] = "uniform"
    """Weights of the average: all equal (equation 2), or each client's number of samples."""
    start_round: int | None = Field(default=None, ge=0)
    """Rounds of plain training before the first synthetic image; none: 80 % of all rounds (section 4.6)."""
    images_per_class: int = Field(default=64, ge=1)
    """Synthetic images of each class, from each model that is inverted."""
    inversion_steps: int = Field(default=200, ge=1)
    """Steps of Adam on the pixels."""
    inversion_rate: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Step size of Adam on the pixels."""
    statistic: Statistic = "std"
    """Whether deviations or variances of the layers' inputs are matched; the paper has both words."""
    statistics_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the distance between statistics."""
    class_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the cross-entropy in the inversion."""
    tv_weight: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the total variation in the inversion."""
    l2_weight: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the mean squared pixel in the inversion."""
    jitter: int = Field(default=0, ge=0)
    """Pixels by which images are rolled at random before each step of the inversion."""
    clamp: bool | None = None
    """Whether pixels are kept in the range of real images while they are made; none: where images are bytes, as floats may have any range."""
    server_epochs: int = Field(default=1, ge=1)
    """Epochs of the server on synthetic images."""
    server_batch_size: int = Field(default=64, ge=1)
    """Samples in a mini-batch of the server."""
    server_buffers: Buffers = "average"
    """Whether running statistics follow the synthetic images at the server (average), or stay (frozen); with `buffers=frozen` they always stay."""

    @property
    def inversion(self) -> Inversion:
        """How images are made."""
        return Inversion(
            per_class=self.images_per_class, steps=self.inversion_steps, learning_rate=self.inversion_rate,
            statistic=self.statistic, statistics_weight=self.statistics_weight, class_weight=self.class_weight,
            tv_weight=self.tv_weight, l2_weight=self.l2_weight, jitter=self.jitter, clamp=bool(self.clamp),
        )  # fmt: skip

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Choose the first round with synthetic images, and make sure that the model can be inverted."""
        require_statistics(model, self.name)
        if self.start_round is not None and self.start_round >= rounds:
            raise FedfillError(
                f"start_round: found {self.start_round}; allowed: 0 to rounds - 1, which is {rounds - 1}"
            )
        if self.jitter and inputs.dim() != 4:
            raise FedfillError(f"jitter: found {self.jitter} with inputs of shape {list(inputs.shape[1:])}; allowed: 0")
        start = min(rounds - 1, round(0.8 * rounds)) if self.start_round is None else self.start_round
        clamp = inputs.dtype == torch.uint8 if self.clamp is None else self.clamp
        checked = super().resolved(rounds=rounds, model=model, inputs=inputs)
        return checked.model_copy(update={"start_round": start, "clamp": clamp})

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, and the last synthetic images that the server made."""
        return {**super().server_state(initial), "synthetic": None}

    def synthetic(self, server: Server, per_class: int | None = None) -> Samples | None:
        """The server's last images, a fixed set, or where it made none as many as are asked for from the global model."""
        made: Samples | None = server.state.synthetic
        stream = server.stream("samples")
        if made is None:
            model, wanted = server.model(server.state.weights), per_class or self.images_per_class
            # as many at a time as in the rounds: the statistics that are matched are those of one batch
            sizes = [min(self.images_per_class, wanted - k) for k in range(0, wanted, self.images_per_class)]
            made = together(
                [
                    invert(
                        model, range(server.classes), server.sample, replace(self.inversion, per_class=n), stream
                    ).samples
                    for n in sizes
                ]
            )
        return made if per_class is None else some_of_each(made, per_class, stream)

    def train_at_server(self, server: Server, replies: Mapping[int, Any], t: int) -> None:
        """Images from the clients' models, and the average trained on them (algorithm 3, lines 8 to 11).

        With the clients' optimizer and learning rate; the paper gives none for the server.
        """
        state = server.state
        state.synthetic = self.invert_models(server, replies)
        training = replace(
            self.training(t), epochs=self.server_epochs, steps=None, batch_size=self.server_batch_size,
            buffers="frozen" if self.buffers == "frozen" else self.server_buffers,
        )  # fmt: skip
        state.weights = server.fit(state.weights, self.loss, training, data=state.synthetic).weights

    def invert_models(self, server: Server, replies: Mapping[int, Any]) -> Samples:
        """Class-balanced images from each client's model, all together (algorithm 3, lines 8 and 9).

        Under a private aggregation the only model that may be looked into is the new global one.
        """
        models = {0: server.state.weights} if self.aggregation_of.private else self.models_of(server, replies)
        generator = server.stream("inversion")
        made = [
            invert(server.model(weights), range(server.classes), server.sample, self.inversion, generator)
            for _, weights in sorted(models.items())
        ]
        server.note(inversion={str(i): [*one.first, *one.best] for i, one in zip(sorted(models), made, strict=True)})
        return Samples(torch.cat([one.samples.inputs for one in made]), torch.cat([one.samples.labels for one in made]))

    def models_of(self, server: Server, replies: Mapping[int, Any]) -> dict[int, Weights]:
        """The clients' trained models; who sent none that could be inverted is left out."""
        models: dict[int, Weights] = {}
        for i, reply in replies.items():
            model = reply.model if self.sends_model else reply.weights
            if model is not None and shapes_of(model) == shapes_of(server.state.weights):
                models[i] = model
            else:
                server.lose(i, "inversion", "it sent no model that could be inverted")
        if not models:
            raise FedfillError("engine: no client sent a model that could be inverted")
        return models


class FedZDAC(_ZeroShotDataAugmentation):
    """Clients invert the global model and train on real and synthetic images (algorithm 2).

    Use it when clients lack classes and have time to make images; needs batch norm, and gained little here.
    """

    name = "fedzdac"

    augmented_classes: Literal["all", "missing"] = "all"
    """Classes of the synthetic images: all (algorithm 2), or those of which the client has fewer than `few` samples."""
    few: int = Field(default=1, ge=1)
    """Samples below which a class counts as missing."""
    generate_at: Literal["client", "server_broadcast"] = "client"
    """Who inverts the global model: each client for itself, or the server once for all of them."""
    reuse_rounds: int = Field(default=1, ge=1)
    """Rounds for which a client goes on with the images that it made before."""
    server_step: Literal["none", "zdas"] = "none"
    """Whether the server then does what Fed-ZDAS's does."""

    def client_state(self) -> dict[str, Tree]:
        """The images that the client made last."""
        return {**super().client_state(), "made": None}

    def round(self, server: Server, t: int) -> None:
        """Select, train on real and synthetic images, average; where asked for, train the average at the server."""
        state, cohort = server.state, self.cohort(server, t)
        augment = t >= (self.start_round or 0)
        synthetic = None
        if augment and self.generate_at == "server_broadcast":
            model = server.model(state.weights)
            made = invert(model, range(server.classes), server.sample, self.inversion, server.stream("inversion"))
            state.synthetic = synthetic = made.samples
        message = ZeroShot(state.weights, augment, synthetic)
        step = augment and self.server_step == "zdas"
        each = step and not self.aggregation_of.private
        replies, mean = self.gather(server, cohort, self.train_augmented, message, individually=each)
        losses = {str(i): reply.losses for i, reply in replies.items() if reply.losses is not None}
        if losses and not self.aggregation_of.private:  # they would name the cohort
            server.note(losses=losses)
        state.weights = mean["weights"]
        if step:
            self.train_at_server(server, replies, t)

    @client_handler
    def train_augmented(self, client: Client, message: ZeroShot) -> ZeroShotUpdate:
        """Generate, train on both, send (algorithm 2, lines 6 to 8)."""
        data, made = client.data, None
        if message.augment:
            wanted = self.wanted(client)
            if message.synthetic is not None:
                synthetic = message.synthetic[
                    torch.isin(message.synthetic.labels, torch.tensor(wanted).to(data.labels))
                ]
                data = data + (synthetic if len(synthetic) else None)
            elif wanted:
                made = self.make(client, message.weights, wanted)
                data = data + made.samples
                if self.augmented_classes == "missing":
                    client.release(
                        "losses", unbounded("losses that tell which classes were made, and so which are missing")
                    )
        done = self.contribute(client, message, self.loss, data=data)
        inverted = message.augment and self.server_step == "zdas" and self.sends_model
        return done.reply(
            ZeroShotUpdate,
            samples=len(client.data),
            model=done.trained if inverted else None,
            losses=made.losses if made else None,
        )

    def wanted(self, client: Client) -> list[int]:
        """Classes of the synthetic images."""
        counts = client.data.counts(client.classes)
        return [c for c in range(client.classes) if self.augmented_classes == "all" or counts[c] < self.few]

    def make(self, client: Client, weights: Weights, classes: Sequence[int]) -> Made:
        """Images from the received model; those of before where the model is the same, or young enough."""
        model, kept = tree.sha256(weights), client.state.made
        if kept is not None and (kept.model == model or client.round - kept.round < self.reuse_rounds):
            return kept  # type: ignore[no-any-return]
        sample = client.data[:1]
        found = invert(client.model(weights), classes, sample, self.inversion, client.stream("inversion"), client.check)
        client.state.made = Made(model, client.round, found.samples, [*found.first, *found.best])
        return client.state.made  # type: ignore[no-any-return]


class FedZDAS(_ZeroShotDataAugmentation):
    """The server inverts every client's model and trains their average on the images (algorithm 3).

    Use it when some classes are rare and the server has much time; the network needs batch norm.
    """

    name = "fedzdas"

    def round(self, server: Server, t: int) -> None:
        """Select, train on real images, invert each model, average, train the average on the images."""
        state, cohort = server.state, self.cohort(server, t)
        augment = t >= (self.start_round or 0)
        message = ZeroShot(state.weights, augment, None)
        each = augment and not self.aggregation_of.private
        replies, mean = self.gather(server, cohort, self.train_real, message, individually=each)
        state.weights = mean["weights"]
        if augment:
            self.train_at_server(server, replies, t)

    @client_handler
    def train_real(self, client: Client, message: ZeroShot) -> ZeroShotUpdate:
        """Train on the real images alone, send (algorithm 3, line 6)."""
        done = self.contribute(client, message, self.loss)
        model = done.trained if message.augment and self.sends_model else None
        return done.reply(ZeroShotUpdate, model=model, losses=None)
