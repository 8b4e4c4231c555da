"""FedDC: Gao et al., "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction", CVPR 2022."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from fedfill.algorithms import Start
from fedfill.algorithms._plain_steps import PlainSteps
from fedfill.protocol.server import Server
from fedfill.training.fit import Penalty
from fedfill.tree import Tree, Weights, zeros_like


class FedDC(PlainSteps):
    """Clients learn how far they drift from the global model, and server and clients take that into account (algorithm 1).

    Use it when clients' data differ and all take part often; it has the terms of feddyn and of scaffold at once.
    """

    name = "feddc"
    read_off = "its correction"
    unfair = "its gradients' correction is read off plain gradient steps; give the others optimizer=sgd and its learning_rate"

    dc_alpha: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Weight of the penalty on the drift (alpha)."""

    weighting: Literal["uniform"] = "uniform"
    """Weights of the average: the server's step is on the plain mean."""

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, c, and the mean of all clients' h_i; None stands for zeros."""
        return {**super().server_state(initial), "control": None, "drift": None}

    def client_state(self) -> dict[str, Tree]:
        """c_i and h_i; None stands for zeros."""
        return {"control": None, "drift": None}

    def down(self, server: Server) -> Weights:
        """The server's c."""
        weights = server.state.weights
        return server.state.control or zeros_like(server.parameters(weights))

    def penalty(self, start: Start) -> Penalty:
        """alpha/2 ||w - (w_t - h_i)||^2 + <w, c - c_i>, beside F_i(w) (the three terms of the local objective)."""
        control, state = start.control or {}, start.client.state
        own, drift = state.control or zeros_like(control), state.drift or zeros_like(control)
        centre = {name: start.weights[name] - h for name, h in drift.items()}
        return Penalty(self.dc_alpha, centre, {name: c - own[name] for name, c in control.items()})

    def up(self, start: Start, trained: Weights, steps: int) -> Weights:
        """h_i + D_i with D_i = w_i - w_t, and c_i+ - c_i with c_i+ = c_i - c - D_i / (K lr), K the steps that were made."""
        control, state = start.control or {}, start.client.state
        if not steps:
            return zeros_like(control)
        own, drift = state.control or zeros_like(control), state.drift or zeros_like(control)
        moved = {name: trained[name] - start.weights[name] for name in control}
        change = {name: -d / (steps * start.training.learning_rate) - control[name] for name, d in moved.items()}
        state.drift = {name: drift[name] + d for name, d in moved.items()}
        state.control = {name: own[name] + change[name] for name in change}
        return change

    def absorb(self, server: Server, mean: Weights, replies: int) -> None:
        """C + |S|/N mean(c_i+ - c_i)."""
        before = server.state.control or zeros_like(mean)
        server.state.control = {name: before[name] + replies / server.clients * mean[name] for name in mean}

    def combine(self, server: Server, weights: Weights, mean: Weights, replies: Sequence[Any]) -> Weights:
        """Mean over S of w_i, and the mean over all N of h_i, which grows by |S|/N mean(D_i); buffers are averaged."""
        parameters = server.parameters(weights)
        before, share = server.state.drift or zeros_like(parameters), len(replies) / server.clients
        drift = {name: before[name] + share * (mean[name] - w) for name, w in parameters.items()}
        server.state.drift = drift
        return {**mean, **{name: mean[name] + h for name, h in drift.items()}}
