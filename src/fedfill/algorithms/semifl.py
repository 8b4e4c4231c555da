"""SemiFL: Diao et al., "SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with Alternate Training", NeurIPS 2022.

A baseline of SDA-FL's semi-supervised experiments (Li et al. 2022, figure 2), where clients have labels. To give the server the labelled
samples that SemiFL starts from, all clients send theirs, raw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedfill.algorithms import Broadcast, Composable, Request, Update
from fedfill.algorithms._names import known_algorithms
from fedfill.algorithms._values import able
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch, Samples, draw, fits, normalise
from fedfill.errors import FedfillError
from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import Message
from fedfill.protocol.relay import collect
from fedfill.protocol.server import Server
from fedfill.training.augmentation import flips, require_bytes, strong, weak
from fedfill.training.fit import Context, LocalTraining, Loss
from fedfill.training.mixup import draw_lambda, mixup_loss
from fedfill.training.pseudo_labels import predicted
from fedfill.tree import Tree, Weights

CHUNK = 512
"""Samples that go through the network together, at the most, where statistics of batch norm are computed anew."""


@dataclass(frozen=True)
class Labelled(Message):
    """Client to server: all of its labelled samples as they are, and how many it has without labels."""

    declared: ClassVar = {
        "samples": unbounded("the client's labelled samples themselves: raw data leave it"),
        "unlabelled": unbounded("number of samples, sent as it is"),
    }

    samples: Samples
    unlabelled: int


@dataclass(frozen=True)
class Trained(Update):
    """Client to server: the trained model and the number of confident samples behind it; no model where there were too few."""

    weights: Weights | None  # type: ignore[assignment]


@dataclass(frozen=True)
class Statistics(Message):
    """Client to server: running statistics of the model's layers on the client's samples, and how many these are."""

    declared: ClassVar = {
        "statistics": unbounded("batch-norm statistics over all of the client's samples"),
        "samples": unbounded("number of samples, sent as it is"),
    }

    statistics: Weights
    samples: int


class SemiFL(FedAvg):
    """Alternate training: clients on samples that the global model is sure of, the server on the labelled ones, which they send it.

    Use it as a baseline in simulations with few labels: clients send their labelled samples to the server.
    """

    name = "semifl"
    draws_beside = True
    paper: ClassVar = {
        "": {"local_steps": 40, "batch_size": 16, "optimizer": "sgd", "learning_rate": 0.03, "lr_decay": 1.0}
    }
    unlabelled = True

    weighting: Literal["samples", "uniform"] = "uniform"
    """Weights of the average: all equal, or each client's number of confident samples."""
    unlabelled_batch_size: int = Field(default=64, ge=2)
    """Confident samples in a mini-batch of a client."""
    tau: float = Field(default=0.95, ge=0, le=1)
    """Probability above which a sample is confident."""
    mixup_alpha: float = Field(default=0.75, ge=0, allow_inf_nan=False)
    """Mixing shares come from Beta(alpha, alpha); 0: confident samples as they are."""
    flip: bool | None = None
    """Whether augmentation flips images; none: where they are in colour."""
    server_learning_rate: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Step size of the server along the clients' pseudo-gradient."""
    server_momentum: float = Field(default=0.5, ge=0, lt=1)
    """Momentum of this step."""
    server_steps: int = Field(default=40, ge=0)
    """Mini-batches of the server in a round."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Choose whether to flip, and refuse data without images and what needs every client of a round."""
        if self.aggregation is not None:
            raise FedfillError(
                f"aggregation: found {self.aggregation.name} with semifl, whose server makes a step of its own; allowed: none"
            )
        if type(self.objective_of).down is not Composable.down:
            composable = [kind for kind in known_algorithms().values() if issubclass(kind, Composable)]
            alone = [k.name for k in composable if k.name in able("local") and k.down is Composable.down]
            raise FedfillError(
                f"local: found {self.local.name} with semifl, whose clients drop out of rounds; "
                f"allowed: {', '.join(alone)}, none"
            )
        flip = flips(inputs, self.flip, self.name)
        require_bytes(inputs, self.name)
        return super().resolved(rounds=rounds, model=model, inputs=inputs).model_copy(update={"flip": flip})

    def training(self, t: int) -> LocalTraining:
        """The clients' budget and optimizer."""
        return replace(super().training(t), batch_size=self.unlabelled_batch_size)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, the labelled samples, and the last step along the pseudo-gradient."""
        return {**super().server_state(initial), "pool": None, "velocity": {}}

    # Before the first round: the clients' labelled samples

    def pretraining_steps(self) -> int:
        """One exchange."""
        return 1

    def pretrain(self, server: Server, step: int) -> None:
        """All clients' labelled samples as one pool; who isn't heard of is asked three times."""
        found = collect(
            server, self.share, Request(),
            lambda reply: None if fits(reply.samples, server.sample, server.classes) else "its samples are none of this task",
        )  # fmt: skip
        if not any(reply.unlabelled > 0 for reply in found.values()):
            raise FedfillError(
                "labelled_per_client: found no client with samples that have no label, on which semifl trains; "
                "allowed: a number below the clients' samples"
            )
        if missing := [str(i) for i in range(server.clients) if i not in found]:
            server.warn(f"the server's pool is without the labelled samples of client {', '.join(missing)}")
        pool = [reply.samples for reply in found.values()]
        server.state.pool = Samples(torch.cat([s.inputs for s in pool]), torch.cat([s.labels for s in pool]))
        lone = min(len(server.state.pool), self.batch_size) == 1
        if lone and self.server_steps and self.buffers == "average" and statistics_of(server.model(server.initial)):
            what = "labelled_per_client" if len(server.state.pool) == 1 else "batch_size"
            raise FedfillError(
                f"{what}: found 1, and the server of semifl can't train batch norm on one labelled sample; allowed: at least 2, "
                "buffers=frozen, or a network without batch norm"
            )

    @client_handler
    def share(self, client: Client, message: Request) -> Labelled:
        """The client's labelled samples, raw."""
        return Labelled(client.data, len(client.unlabelled))

    # Rounds

    def round(self, server: Server, t: int) -> None:
        """Train at the clients, step along their mean, train at the server."""
        state, cohort = server.state, self.cohort(server, t)
        if t == 0:
            self.refresh(server, cohort)
        replies, mean = self.gather(server, cohort, self.train_confident, Broadcast(state.weights))
        server.note(confident={str(i): reply.samples for i, reply in replies.items()})
        if "weights" in mean:  # else everybody dropped out
            self.follow(server, mean["weights"])
        training = replace(self.training(t), batch_size=self.batch_size, steps=self.server_steps)
        state.weights = server.fit(state.weights, self.weakly, training, data=state.pool).weights
        self.refresh(server, cohort)

    def follow(self, server: Server, mean: Weights) -> None:
        """SGD with momentum on w - mean(w_i), the clients' pseudo-gradient; buffers are averaged."""
        state = server.state
        parameters = server.parameters(state.weights)
        last, momentum, rate = state.velocity, self.server_momentum, self.server_learning_rate
        state.velocity = {n: w - mean[n] + (momentum * last[n] if last else 0) for n, w in parameters.items()}
        state.weights = {**mean, **{n: w - rate * state.velocity[n] for n, w in parameters.items()}}

    def weakly(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        """The server's loss: cross-entropy of weakly augmented samples."""
        return self.loss(model, replace(batch, inputs=weak(batch.inputs, context.generator, bool(self.flip))), context)

    @client_handler
    def train_confident(self, client: Client, message: Broadcast) -> Trained:
        """Local steps on samples that the received model is sure of; nothing where there are fewer than two."""
        inputs = client.unlabelled.inputs
        probabilities, classes = predicted(client.model(message.weights), inputs)
        guessed = Samples(inputs, classes)
        confident = guessed[probabilities > self.tau]
        if len(confident) < 2:  # batch norm can't train on one
            return Trained(None, 0)
        return self.contribute(client, message, self.fix_mix(guessed), data=confident).reply(Trained)

    def fix_mix(self, guessed: Samples) -> Loss:
        """Cross-entropy of strongly augmented confident samples, and mixup of weakly augmented ones with any others.

        Args:
            guessed: All of the client's samples without labels, with the received model's guesses.

        Returns:
            The loss of a mini-batch of confident samples.
        """

        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            generator, flip = context.generator, bool(self.flip)
            fix = functional.cross_entropy(model(strong(batch.inputs, generator, flip)), batch.labels)
            inputs, labels = draw(guessed, len(batch.labels), generator)
            share = draw_lambda(self.mixup_alpha, generator)
            own, others = weak(batch.inputs, generator, flip), weak(inputs, generator, flip)
            return fix + mixup_loss(model, own, batch.labels, others, labels, share)

        return loss

    # Statistics of batch norm (sBN)

    def refresh(self, server: Server, cohort: list[int]) -> None:
        """Compute the global model's running statistics anew, on the samples of clients."""
        state = server.state
        old = statistics_of(server.model(state.weights))
        if old and self.buffers == "average":
            message = Broadcast(state.weights)
            _, mean = server.average(cohort, self.recompute, message, of={"statistics": old}, by="samples")
            state.weights = {**state.weights, **mean["statistics"]}

    @client_handler
    def recompute(self, client: Client, message: Broadcast) -> Statistics:
        """Running statistics of the received model on all of the client's samples."""
        data = client.data + client.unlabelled
        return Statistics(recomputed(client.model(message.weights), data.inputs), len(data))


def statistics_of(model: nn.Module) -> Weights:
    """Copies of the running statistics of a model's layers, batch counters among them, by their names in the state dict."""
    return {
        f"{path}.{name}" if path else name: buffer.clone()
        for path, layer in model.named_modules(remove_duplicate=False)
        if getattr(layer, "running_mean", None) is not None
        for name, buffer in layer.named_buffers(recurse=False)
    }


def recomputed(model: nn.Module, inputs: Tensor) -> Weights:
    """Running statistics as means over chunks of samples, each normalised by its own statistics on the way.

    Args:
        model: In evaluation mode, as it is again afterwards but for its running statistics.
        inputs: As stored, ``[n, ...]``, at least two.

    Returns:
        As `statistics_of`.
    """
    # of batch norm alone: instance norm has no plain mean over batches
    layers: list[Any] = [
        m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    ]
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.train()
            layer.momentum = None  # a plain mean
        with torch.no_grad():
            for part in inputs.tensor_split(math.ceil(len(inputs) / CHUNK)):
                model(normalise(part))
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.eval()
            layer.momentum = momentum
    return statistics_of(model)
