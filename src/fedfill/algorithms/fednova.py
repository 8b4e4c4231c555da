"""FedNova: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedfill.algorithms import Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.protocol.server import Server
from fedfill.tree import Weights


class FedNova(FedAvg):
    """FedAvg whose local updates count by their direction, however many steps a client made.

    Use it when clients' data sets differ much in size, so that some make many more steps than others.
    """

    name = "fednova"
    numbers = True
    scales = True

    def pack(self, start: Start, trained: Weights, steps: int) -> tuple[Weights, float]:
        """d_i = (w_t - w_i) / |a_i| in the place of the parameters, and |a_i| (section 4)."""
        a = effective_steps(steps, start.training.momentum)
        directions = {
            name: (before - trained[name]) / a if a else before * 0 for name, before in start.parameters().items()
        }
        return {**trained, **directions}, a

    def combine(self, server: Server, weights: Weights, mean: Weights, replies: Sequence[Any]) -> Weights:
        """w_t - tau_eff sum p_i d_i with tau_eff = sum p_i |a_i| (equation 9); buffers are averaged."""
        p = [reply.samples if self.by else 1 for reply in replies]
        tau = sum(share * reply.scale for share, reply in zip(p, replies, strict=True)) / sum(p)
        moved = server.parameters(weights)
        return {**mean, **{name: before - tau * mean[name] for name, before in moved.items()}}


def effective_steps(steps: int, momentum: float) -> float:
    """|a_i|: how far the gradients of all steps count, each by what momentum makes of it (section 3).

    Args:
        steps: tau_i, mini-batches done.
        momentum: rho, in [0, 1).

    Returns:
        (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho), which is tau without momentum.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
