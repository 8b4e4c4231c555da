"""q-FFL: Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020; here its algorithm q-FedAvg."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from fedfill.algorithms import Composable, Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.errors import FedfillError
from fedfill.models.views import trainable
from fedfill.protocol.server import Server
from fedfill.training.evaluation import mean_loss
from fedfill.training.optimizers import OptimizerName
from fedfill.tree import Weights


class QFFL(FedAvg):
    """Clients with a larger loss count for more (algorithm 2).

    Use it when the worst client matters more than the mean.
    """

    name = "qffl"
    numbers = True
    scales = True
    unfair = "it takes 1 / learning_rate for the loss's curvature, which only plain gradient steps have; give the others optimizer=sgd and its learning_rate"

    q: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """How much fairness weighs; 0 is the plain mean of the clients."""

    optimizer: OptimizerName = "sgd"
    """Of the local training: sgd, since the step size stands for the loss's curvature."""
    learning_rate: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    """Step size of the local training."""
    weighting: Literal["uniform"] = "uniform"
    """Clients count by their losses, and not by their samples."""

    def check_compatible(self, whole: Composable) -> None:
        """With another optimizer L = 1 / learning rate is huge, h with it, and the model would never move."""
        super().check_compatible(whole)
        if self.q and (whole.optimizer != "sgd" or whole.momentum):
            found = f"optimizer={whole.optimizer}" + (f" and momentum={whole.momentum:g}" if whole.momentum else "")
            raise FedfillError(
                f"optimizer: found {found} with qffl, whose steps are measured in 1 / learning_rate; allowed: optimizer=sgd "
                "and momentum=0, or q=0"
            )

    def pack(self, start: Start, trained: Weights, steps: int) -> tuple[Weights, float]:
        """Delta_i = F_i^q L (w_t - w_i) in the place of the parameters, and h_i; L is 1 / learning rate (lines 6 to 8)."""
        lipschitz = 1 / start.training.learning_rate
        model = start.client.model(start.weights)
        loss = mean_loss(model, start.data) + 1e-10
        moved = {name: lipschitz * (before - trained[name]) for name, before in trainable(model, start.weights).items()}
        # a parameter that two layers share counts once
        norm = sum(float(moved[name].double().square().sum()) for name, _ in model.named_parameters() if name in moved)
        try:
            h = self.q * loss ** (self.q - 1) * norm + lipschitz * loss**self.q
        except OverflowError:
            raise FedfillError(
                f"q: found {self.q:g}, and a client's loss of {loss:.3g} to this power is beyond all numbers; try a smaller q"
            ) from None
        return {**trained, **{name: loss**self.q * step for name, step in moved.items()}}, h

    def combine(self, server: Server, weights: Weights, mean: Weights, replies: Sequence[Any]) -> Weights:
        """w_t - sum Delta_i / sum h_i (line 9); buffers are averaged."""
        h = sum(reply.scale for reply in replies) / len(replies)
        moved = server.parameters(weights)
        return {**mean, **{name: before - mean[name] / h for name, before in moved.items()}}
