"""FedGEN: Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021.

The server trains a generator of latents, which all clients' heads shall classify as asked for; clients train their heads on its
latents too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch
from fedfill.errors import DIVERGED, DivergedError, FedfillError
from fedfill.models.views import last_linear, part, weights_of
from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.messages import shapes_of
from fedfill.protocol.server import Server
from fedfill.synthesis.embeddings import LatentGenerator, Make, empty, initial
from fedfill.training.fit import Context, Loss
from fedfill.training.optimizers import Optimizer, Rule
from fedfill.tree import Tree, Weights


@dataclass(frozen=True)
class Guided(Broadcast):
    """Server to client: the global model, and from the second round on what it is trained on beside the client's samples.

    Attributes:
        generator: Its tensors.
        labels: With which probability it is asked for each class, ``[classes]`` float32.
    """

    generator: Weights | None
    labels: Tensor | None


@dataclass(frozen=True)
class CountedUpdate(Update):
    """Client to server: the trained model, and the samples of each class behind it.

    Attributes:
        counts: ``[classes]``.
        head: Its classifier, where `weights` are not the model as it is.
    """

    declared: ClassVar = {
        **Update.declared,
        "counts": unbounded("samples of each class, exact"),
        "head": unbounded("part of the model update, sent as it is"),
    }

    counts: list[int]
    head: Weights | None


class FedGEN(FedAvg):
    """FedAvg whose clients also train their heads on latents of a generator that the server has learnt from all heads (algorithm 1).

    Use it when clients lack classes and the server may see each client's head; here it could not be told apart from fedavg.
    """

    name = "fedgen"
    own_loops = "the generator"
    exchanges = True
    parts: ClassVar[tuple[str, ...]] = ("classifier",)
    paper: ClassVar = {
        "": {
            "local_steps": 20, "batch_size": 32, "optimizer": "sgd", "learning_rate": 0.01, "lr_decay": 0.99, "lr_decay_every": 1,
        },
    }  # fmt: skip

    latent_weight: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """Weight of the generator's latents in the local loss, in the first round (alpha); 0: FedAvg, and there is no generator."""
    latent_decay: float = Field(default=0.98, gt=0, le=1)
    """Factor of this weight in each round."""
    latent_labels: Literal["shares", "uniform"] = "shares"
    """How often the generator is asked for each class: as often as it is among all samples (p(y)), or all equally, as in the authors' program."""
    latent_noise: Literal["normal", "uniform"] = "normal"
    """Distribution of the generator's noise: N(0, 1), or uniform in 0..1 as in the authors' program."""
    ensemble: Literal["losses", "scores"] = "losses"
    """What the generator minimises: the mean of the heads' losses, each head's by its share of the class (the authors' program), or the loss of their mean scores (the paper's objective)."""
    diversity: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the loss that keeps latents of different noise apart (eta)."""
    generator_steps: int = Field(default=50, ge=1)
    """Steps of the generator in each round."""
    generator_batch: int = Field(default=128, ge=2)
    """Latents in a step."""
    generator_learning_rate: float = Field(default=3e-4, gt=0, allow_inf_nan=False)
    """Of Adam, whose momenta outlive a round."""
    generator_weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """L2 penalty of the generator."""
    generator_latent: int = Field(default=32, ge=1, le=2**16)
    """Size of the generator's noise."""
    generator_width: int = Field(default=256, ge=1, le=2**16)
    """Size of its hidden layer."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that the part `classifier` is a linear layer with which the network ends."""
        found = last_linear(model, inputs, self.name)
        if found != "classifier" or not isinstance(model.get_submodule(found), nn.Linear):
            raise FedfillError(
                f"model: {self.name} trains the part 'classifier' on latents, and {type(model).__name__} ends with "
                f"'{found}', a {type(model.get_submodule(found)).__name__}; "
                "allowed: a network whose part classifier is a torch.nn.Linear and its last layer"
            )
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, the generator with its optimizer's momenta, p(y), and the clients' counts ``[clients, classes]``."""
        return {**super().server_state(initial), **dict.fromkeys(("generator", "momenta", "labels", "counts"))}

    def round(self, server: Server, t: int) -> None:
        """Select, train with the last round's generator, average; train the generator against the heads that came back."""
        if not self.latent_weight:
            super().round(server, t)
            return
        state, cohort = server.state, self.cohort(server, t)
        message = Guided(state.weights, state.generator, state.labels)
        replies, mean = self.gather(server, cohort, self.train_guided, message, individually=not self.sends_model)
        self.learn(server, self.sound(server, replies))
        state.weights = mean["weights"]

    def sound(self, server: Server, replies: Mapping[int, CountedUpdate]) -> dict[int, tuple[Weights, list[int]]]:
        """Each client's head and counts; those that make no sense have no part in the generator's training."""
        wanted, found = shapes_of(part(server.state.weights, "classifier")), {}
        for i, reply in replies.items():
            head, n = (reply.head or {}) if self.sends_model else part(reply.weights, "classifier"), reply.counts
            if shapes_of(head) == wanted and len(n) == server.classes and all(0 <= k < 2**40 for k in n):
                found[i] = head, n
            else:
                server.lose(
                    i, "train_guided", "its head or its counts are not of this task, so the generator goes without"
                )
        return found

    def learn(self, server: Server, found: Mapping[int, tuple[Weights, list[int]]]) -> None:
        """Steps of the generator: the heads' loss and eta L_div on e ~ N(0, I) and y of the classes that the cohort has."""
        state, device = server.state, server.sample.labels.device
        if not any(any(n) for _, n in found.values()):
            return
        n = torch.tensor([own for _, own in found.values()], device=device)  # [heads, classes]
        shares = n / n.sum(0).clamp(min=1)  # a_iy, [heads, classes]
        w = torch.stack([head["classifier.weight"] for head, _ in found.values()])  # [heads, classes, l]
        b = torch.stack([head.get("classifier.bias", w.new_zeros(w.shape[1])) for head, _ in found.values()])
        make = self.maker(server.classes, w.shape[2])
        generator = empty(make, device)
        generator.load_state_dict(state.generator or initial(make, server.stream("generator")))
        rule = Rule("adam", self.generator_learning_rate, weight_decay=self.generator_weight_decay, fused=False)
        optimizer = Optimizer(list(generator.parameters()), rule, state.momenta)
        stream, labels, total = server.stream("latents"), self.labels(n.sum(0)), torch.zeros((), device=device)
        for _ in range(self.generator_steps):
            e, y = self.draw(labels, self.generator_batch, stream)
            z = generator(e, y)  # [b, l]
            scores = torch.einsum("hcl,bl->hbc", w, z) + b[:, None]  # [heads, b, classes]
            loss = ensemble_loss(scores, y, shares[:, y], self.ensemble)
            total += loss.detach()
            if self.diversity:
                loss = loss + self.diversity * diversity_loss(z, e)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        made = weights_of(generator)
        if not all(bool(tensor.isfinite().all()) for tensor in (*made.values(), total)):
            raise DivergedError(
                f"{DIVERGED}in round {server.round + 1} the generator holds a NaN or an infinity; try a smaller generator_learning_rate"
            )
        server.note(generator_loss=float(total) / self.generator_steps)
        known = torch.zeros(server.clients, server.classes, dtype=n.dtype, device=device)
        state.counts = (known if state.counts is None else state.counts).index_copy(
            0, torch.tensor([*found], device=device), n
        )
        state.generator, state.momenta = made, optimizer.momenta
        state.labels = self.labels(state.counts.sum(0))

    def maker(self, classes: int, size: int) -> Make:
        """What makes a generator of latents ``[b, size]``."""
        return partial(LatentGenerator, self.generator_latent, self.generator_width, classes, size)

    def labels(self, counts: Tensor) -> Tensor:
        """With which probability the generator is asked for each class, ``[classes]``, from how many samples there are."""
        weights = counts.float() if self.latent_labels == "shares" else (counts > 0).float()
        return weights / weights.sum()

    def draw(self, labels: Tensor, b: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
        """Noise ``[b, generator_latent]`` and labels ``[b]`` for the generator."""
        y = torch.multinomial(labels, b, replacement=True, generator=stream)
        e = torch.empty(b, self.generator_latent, device=labels.device)
        return e.uniform_(generator=stream) if self.latent_noise == "uniform" else e.normal_(generator=stream), y

    @client_handler
    def train_guided(self, client: Client, message: Guided) -> CountedUpdate:
        """Local epochs on the client's samples and on the generator's latents."""
        loss = self.loss if message.generator is None else self.guided(client, message)
        done = self.contribute(client, message, loss)
        head = part(done.trained, "classifier") if self.sends_model else None
        return done.reply(CountedUpdate, counts=client.data.counts(client.classes), head=head)

    def guided(self, client: Client, message: Guided) -> Loss:
        """F_i + alpha_t E_y,e CE(h(G(e, y)), y), as many latents as the mini-batch has samples."""
        labels: Tensor = message.labels  # type: ignore[assignment]
        size = message.weights["classifier.weight"].shape[1]
        generator = empty(self.maker(client.classes, size), labels.device).eval()
        generator.load_state_dict(message.generator)  # type: ignore[arg-type]
        alpha = self.latent_weight * self.latent_decay**client.round

        def loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            real = self.loss(model, batch, context)
            e, y = self.draw(labels, len(batch.labels), context.generator)
            with torch.no_grad():
                z = generator(e, y)  # [b, l]
            # by hand: who watches the head for the samples' latents or adjusts its scores means the samples
            head: Any = model.get_submodule("classifier")
            return real + alpha * functional.cross_entropy(functional.linear(z, head.weight, head.bias), y)

        return loss


def ensemble_loss(scores: Tensor, labels: Tensor, shares: Tensor, kind: Literal["losses", "scores"]) -> Tensor:
    """How far several heads are from the labels.

    Args:
        scores: Of each head, ``[heads, b, classes]``.
        labels: ``[b]``.
        shares: Of each head's client in all samples of the label (a_iy), ``[heads, b]``.
        kind: ``losses``: the mean over b of sum_i a_iy CE(scores_i, y); ``scores``: CE of the heads' mean scores.

    Returns:
        A scalar.
    """
    if kind == "scores":
        return functional.cross_entropy(scores.mean(0), labels)
    each = functional.cross_entropy(scores.flatten(0, 1), labels.repeat(len(scores)), reduction="none")
    return (shares * each.view_as(shares)).sum(0).mean()


def diversity_loss(z: Tensor, e: Tensor) -> Tensor:
    """exp(-mean over pairs j, k of d(z_j, z_k) d(e_j, e_k)), small where latents of different noise differ.

    Args:
        z: Latents, ``[b, l]``; d is the mean absolute difference.
        e: Their noise, ``[b, latent]``; d is the mean squared difference.

    Returns:
        A scalar in (0, 1].
    """
    apart = torch.cdist(z, z, p=1) / z.shape[1]  # [b, b]
    noise = (e[:, None] - e).square().mean(2)  # [b, b]
    return torch.exp(-(apart * noise).mean())
