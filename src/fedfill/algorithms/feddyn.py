"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from fedfill.algorithms import Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.protocol.server import Server
from fedfill.training.fit import Penalty
from fedfill.tree import Tree, Weights, zeros_like


class FedDyn(FedAvg):
    """Local objectives are regularised so that their stationary points agree with the global one (algorithm 1).

    Use it when clients' data differ and each client can train for long in a round.
    """

    name = "feddyn"
    numbers = True

    dyn_alpha: float = Field(default=0.01, gt=0, allow_inf_nan=False)
    """Weight of the dynamic regulariser (alpha)."""

    weighting: Literal["uniform"] = "uniform"
    """Weights of the average: the server's step is on the plain mean."""

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, and h; None stands for zeros."""
        return {**super().server_state(initial), "h": None}

    def client_state(self) -> dict[str, Tree]:
        """The gradient of the client's own loss at its last model; None stands for zeros."""
        return {"gradient": None}

    def penalty(self, start: Start) -> Penalty:
        """- <g_i, w> + alpha/2 ||w - w_t||^2, beside L_i(w) (equation 1)."""
        gradient = start.client.state.gradient or {}
        return Penalty(self.dyn_alpha, start.weights, {name: -g for name, g in gradient.items()})

    def up(self, start: Start, trained: Weights, steps: int) -> None:
        """g_i - alpha (w_i - w_t), which is the new gradient where the local problem was solved; nothing is sent."""
        parameters = start.parameters()
        before = start.client.state.gradient or zeros_like(parameters)
        start.client.state.gradient = {
            name: before[name] - self.dyn_alpha * (trained[name] - w) for name, w in parameters.items()
        }

    def combine(self, server: Server, weights: Weights, mean: Weights, replies: Sequence[Any]) -> Weights:
        """H - alpha/N sum (w_i - w_t), and mean(w_i) - h/alpha; buffers are averaged."""
        parameters = server.parameters(weights)
        share, alpha = len(replies) / server.clients, self.dyn_alpha
        before = server.state.h or zeros_like(parameters)
        h = {name: before[name] - alpha * share * (mean[name] - w) for name, w in parameters.items()}
        server.state.h = h
        return {**mean, **{name: mean[name] - h[name] / alpha for name in h}}
