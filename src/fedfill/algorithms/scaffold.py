"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedfill.algorithms import Composable, Start
from fedfill.algorithms._plain_steps import PlainSteps
from fedfill.errors import FedfillError
from fedfill.protocol.server import Server
from fedfill.training.fit import Penalty
from fedfill.tree import Tree, Weights, zeros_like


class Scaffold(PlainSteps):
    """FedAvg whose local gradients are corrected by control variates (algorithm 1, option II).

    Use it when clients' data differ, most take part often, and plain SGD with a small learning rate will do.
    """

    name = "scaffold"
    numbers = True
    paper: ClassVar = {"": {"learning_rate": 0.05}}
    read_off = "its control variates"
    unfair = "control variates are read off plain gradient steps; give the others optimizer=sgd and its learning_rate"

    weighting: Literal["samples", "uniform"] = "uniform"
    """Weights of the average: all equal, as in the paper, or each client's number of samples."""

    def check_compatible(self, whole: Composable) -> None:
        """Control variates are read off plain gradient steps, and their mean belongs to the mean of the models."""
        if (aggregation := whole.aggregation_of).aggregates:
            raise FedfillError(
                f"aggregation: found {aggregation.name} with scaffold, whose control variates assume the plain mean of the "
                "local models; allowed: none"
            )
        super().check_compatible(whole)

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, and c; None stands for zeros."""
        return {**super().server_state(initial), "control": None}

    def client_state(self) -> dict[str, Tree]:
        """c_i; None stands for zeros."""
        return {"control": None}

    def down(self, server: Server) -> Weights:
        """The server's c."""
        weights = server.state.weights
        return server.state.control or zeros_like(server.parameters(weights))

    def penalty(self, start: Start) -> Penalty:
        """A term whose gradient is c - c_i: the step becomes w - lr (g - c_i + c) (algorithm 1, line 10)."""
        control = start.control or {}
        own = start.client.state.control or zeros_like(control)
        return Penalty(slope={name: control[name] - own[name] for name in control})

    def up(self, start: Start, trained: Weights, steps: int) -> Weights:
        """c_i+ - c_i with c_i+ = c_i - c + (w_t - w_i) / (K lr), K the steps that were made (line 12, option II)."""
        control = start.control or {}
        if not steps:
            return zeros_like(control)
        own = start.client.state.control or zeros_like(control)
        moved = steps * start.training.learning_rate
        change = {name: (start.weights[name] - trained[name]) / moved - control[name] for name in control}
        start.client.state.control = {name: own[name] + change[name] for name in control}
        return change

    def absorb(self, server: Server, mean: Weights, replies: int) -> None:
        """C + |S|/N mean(c_i+ - c_i) (line 17)."""
        share = replies / server.clients
        before = server.state.control or zeros_like(mean)
        server.state.control = {name: before[name] + share * mean[name] for name in mean}
