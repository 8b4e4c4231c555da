"""q-FFL: Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020; here its algorithm q-FedAvg."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from fedfill.algorithms import Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.engines.contract import Server
from fedfill.models.views import trainable
from fedfill.training.evaluation import mean_loss
from fedfill.tree import Weights


class QFFL(FedAvg):
    """Clients with a larger loss count for more (algorithm 2)."""

    name = "qffl"

    q: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """How much fairness weighs; 0 is the plain mean of the clients."""

    weighting: Literal["uniform"] = "uniform"
    """Clients count by their losses, and not by their samples."""

    def pack(self, start: Start, trained: Weights, steps: int) -> tuple[Weights, float]:
        """Delta_i = F_i^q L (w_t - w_i) in the place of the parameters, and h_i; L is 1 / learning rate (lines 6 to 8)."""
        lipschitz = 1 / start.training.learning_rate
        loss = mean_loss(start.client.model(start.weights), start.data) + 1e-10
        moved = {name: lipschitz * (before - trained[name]) for name, before in start.parameters().items()}
        norm = sum(float(step.double().square().sum()) for step in moved.values())
        h = self.q * loss ** (self.q - 1) * norm + lipschitz * loss**self.q
        return {**trained, **{name: loss**self.q * step for name, step in moved.items()}}, h

    def combine(self, server: Server, weights: Weights, mean: Weights, replies: Sequence[Any]) -> Weights:
        """w_t - sum Delta_i / sum h_i (line 9); buffers are averaged."""
        h = sum(reply.scale for reply in replies) / len(replies)
        moved = trainable(server.model(weights), weights)
        return {**mean, **{name: before - mean[name] / h for name, before in moved.items()}}
