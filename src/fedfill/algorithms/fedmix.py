"""FedMix: Yoon et al., "FedMix: Approximation of Mixup under Mean Augmented Federated Learning", ICLR 2021."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedfill.algorithms import Update
from fedfill.algorithms.naivemix import Mixing, NaiveMix
from fedfill.data.samples import Batch
from fedfill.errors import FedfillError
from fedfill.privacy.releases import unbounded
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.server import Server
from fedfill.training.forward_mode import is_plain, jvp
from fedfill.training.mixup import mixed_entropy


@dataclass(frozen=True)
class MixedUpdate(Update):
    """Client to server: the trained model, and whether its loss had no floor; None where it kept one."""

    declared: ClassVar = {**Update.declared, "below": unbounded("that the local loss fell below zero")}

    below: bool | None


class FedMix(NaiveMix):
    """Mixup with other clients' samples, approximated to first order by their means (algorithm 2).

    Use it when clients lack classes and may share exact means of raw data; try first_order=false or floor=true.
    """

    name = "fedmix"

    # left out where they are as in the paper, so that digests of earlier runs stay as they were
    first_order: bool = Field(default=True, exclude_if=lambda value: value)
    """Whether the term of first order, which has no lower bound, is trained on; false leaves it out, which is what FedDPMS's authors' program comes to."""
    floor: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether no sample's loss may fall below zero, which mixup's can't either; ours, not the paper's."""

    def resolved(self, *, rounds: int, model: nn.Module, inputs: Tensor) -> Self:
        """Make sure that a floor is under something."""
        if self.floor and not self.first_order:
            raise FedfillError(
                "floor: found true with first_order=false, whose loss can't fall below zero; allowed: false, or first_order=true"
            )
        return super().resolved(rounds=rounds, model=model, inputs=inputs)

    def round(self, server: Server, t: int) -> None:
        """NaiveMix's; and a word where the loss of a client fell below zero."""
        replies = self.mix_and_average(server, t)
        if lost := [i for i, reply in replies.items() if reply.below]:
            server.warn(
                f"the loss of {len(lost)} of {len(replies)} clients fell below zero: FedMix's term of first order has no lower "
                "bound, and training follows it down; optimizer=sgd, floor=true or first_order=false may help"
            )

    @client_handler
    def train_mixed(self, client: Client, message: Mixing) -> MixedUpdate:
        """Local epochs from the global model on mixed samples."""
        done = self.on_mixtures(client, message)
        return done.reply(MixedUpdate, below=True if done.loss < 0 else None)

    def mixed_loss(self, model: nn.Module, batch: Batch, mean: Tensor, target: Tensor) -> Tensor:
        """Mixup's loss, expanded around u = (1 - lambda) x (proposition 1).

        (1 - lambda) CE(f(u), y) + lambda CE(f(u), y-bar) + (1 - lambda) lambda <d CE(f(u), y) / du, x-bar>; the gradient is
        each sample's own, and keeps its graph: without it the last term would train nothing.
        """
        u = (1 - self.mix) * batch.inputs  # [b, ...]
        if not self.first_order:
            scores = model(u)  # [b, classes]
            return mixed_entropy(scores, target.expand_as(scores), batch.labels, self.mix)
        if is_plain(model):
            scores, tangent = jvp(model, u, mean)  # [b, classes] each
            slope = scores.softmax(1) - functional.one_hot(batch.labels, scores.shape[1])  # d CE / d scores
            towards = slope * tangent
        else:
            scores = model(u.requires_grad_().clone())  # [b, classes]; a copy, as a network may work in place
            total = functional.cross_entropy(scores, batch.labels, reduction="sum")
            (slope,) = torch.autograd.grad(total, u, create_graph=True)  # [b, ...]
            towards = slope * mean
        targets, weight = target.expand_as(scores), (1 - self.mix) * self.mix
        if self.floor:
            each = mixed_entropy(scores, targets, batch.labels, self.mix, reduction="none")  # [b]
            return (each + weight * towards.flatten(1).sum(1)).clamp(min=0).mean()
        mixed = mixed_entropy(scores, targets, batch.labels, self.mix)
        return mixed + weight * (towards.sum() / len(batch.labels))
