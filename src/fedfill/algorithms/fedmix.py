"""FedMix: Yoon et al., "FedMix: Approximation of Mixup under Mean Augmented Federated Learning", ICLR 2021."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedfill.algorithms.naivemix import NaiveMix
from fedfill.data.samples import Batch
from fedfill.training.mixup import mixed_entropy
from fedfill.training.tangents import is_plain, scores_and_tangent


class FedMix(NaiveMix):
    """Mixup with other clients' samples, approximated to first order by their means (algorithm 2)."""

    name = "fedmix"

    # left out where it is true, so that digests of earlier runs stay as they were
    first_order: bool = Field(default=True, exclude_if=lambda value: value)
    """Whether the term of first order, which has no lower bound, is trained on; false leaves it out, which is what FedDPMS's authors' program comes to."""

    def mixed_loss(self, model: nn.Module, batch: Batch, mean: Tensor, target: Tensor) -> Tensor:
        """Mixup's loss, expanded around u = (1 - lambda) x (proposition 1).

        (1 - lambda) CE(f(u), y) + lambda CE(f(u), y-bar) + (1 - lambda) lambda <d CE(f(u), y) / du, x-bar>; the gradient is
        each sample's own, and keeps its graph: without it the last term would train nothing.
        """
        u = (1 - self.mix) * batch.inputs  # [b, ...]
        n = len(batch.labels)
        if not self.first_order:
            scores = model(u)  # [b, classes]
            return mixed_entropy(scores, target.expand_as(scores), batch.labels, self.mix)
        if is_plain(model):
            scores, tangent = scores_and_tangent(model, u, mean)  # [b, classes] each
            slope = scores.softmax(1) - functional.one_hot(batch.labels, scores.shape[1])  # d CE / d scores
            towards = (slope * tangent).sum() / n
        else:
            scores = model(u.requires_grad_().clone())  # [b, classes]; a copy, as a network may work in place
            total = functional.cross_entropy(scores, batch.labels, reduction="sum")
            (slope,) = torch.autograd.grad(total, u, create_graph=True)  # [b, ...]
            towards = (slope * mean).sum() / n
        mixed = mixed_entropy(scores, target.expand_as(scores), batch.labels, self.mix)
        return mixed + (1 - self.mix) * self.mix * towards
