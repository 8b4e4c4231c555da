"""FedOpt: Reddi et al., "Adaptive Federated Optimization", ICLR 2021.

The mean movement of the clients' models is taken for a gradient, on which the server's own optimizer steps (algorithms 1 and 2).
`FedAvgM` is that of Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedfill.algorithms.fedavg import FedAvg
from fedfill.protocol.server import Server
from fedfill.tree import Tree, Weights, zeros_like


class FedAvgM(FedAvg):
    """FedAvg whose server follows the mean movement with momentum.

    Use it when few clients take part in a round, so that the average jumps from round to round.
    """

    name = "fedavgm"
    numbers = True

    server_rate: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Step size of the server (eta)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Share of the last step's direction that is kept."""

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, and m; None stands for zeros."""
        return {**super().server_state(initial), "moment": None}

    def combine(self, server: Server, weights: Weights, mean: Weights, replies: Sequence[Any]) -> Weights:
        """M <- beta1 m + D with D = mean(w_i) - w_t, and w_t + eta m; buffers are averaged."""
        parameters = server.parameters(weights)
        before = server.state.moment or zeros_like(parameters)
        moved = {name: mean[name] - w for name, w in parameters.items()}
        m = {name: self.beta1 * before[name] + d for name, d in moved.items()}
        server.state.moment = m
        # mean + (eta m - D): the mean itself, to the bit, where eta is 1 and beta1 is 0
        return {**mean, **{name: mean[name] + (self.server_rate * m[name] - moved[name]) for name in m}}


class Adaptive(FedAvg):
    """What the three adaptive ones have in common: a step size for each parameter (algorithm 2)."""

    server_rate: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Step size of the server (eta): about how far a parameter moves in a round."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """How much of the mean movement's average is kept."""
    tau: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """What is added to the root of the squares' average: movements far below it are not made larger."""

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, m and v; None stands for zeros, and for tau^2."""
        return {**super().server_state(initial), "moment": None, "squares": None}

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v of a parameter.

        Args:
            v: The last one.
            square: D^2, of the same shape.

        Returns:
            Numbers of at least 0.
        """
        raise NotImplementedError

    def combine(self, server: Server, weights: Weights, mean: Weights, replies: Sequence[Any]) -> Weights:
        """M <- beta1 m + (1 - beta1) D, v by the rule, and w_t + eta m / (sqrt(v) + tau); buffers are averaged."""
        parameters = server.parameters(weights)
        m = server.state.moment or zeros_like(parameters)
        v = server.state.squares or {name: torch.full_like(w, self.tau**2) for name, w in parameters.items()}
        moved = {name: mean[name] - w for name, w in parameters.items()}
        m = {name: self.beta1 * m[name] + (1 - self.beta1) * d for name, d in moved.items()}
        v = {name: self.second(v[name], d.square()) for name, d in moved.items()}
        server.state.moment, server.state.squares = m, v
        steps = {name: self.server_rate * m[name] / (v[name].sqrt() + self.tau) for name in m}
        return {**mean, **{name: w + steps[name] for name, w in parameters.items()}}


class FedAdagrad(Adaptive):
    """FedAvg whose server steps by Adagrad on the mean movement: step sizes shrink with all that a parameter ever moved.

    Use it when some parameters move in few rounds alone, as in models of words; its steps become small in long runs.
    """

    name = "fedadagrad"
    numbers = True

    beta1: float = Field(default=0.0, ge=0, lt=1)
    """How much of the mean movement's average is kept."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """V + D^2."""
        return v + square


class FedAdam(Adaptive):
    """FedAvg whose server steps by Adam on the mean movement.

    Use it when movements of a model's layers differ much in size, and you have the time to tune server_rate.
    """

    name = "fedadam"
    numbers = True

    beta2: float = Field(default=0.99, ge=0, lt=1)
    """How much of the squares' average is kept."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Beta2 v + (1 - beta2) D^2."""
        return self.beta2 * v + (1 - self.beta2) * square


class FedYogi(FedAdam):
    """FedAdam whose squares' average never falls faster than by (1 - beta2) D^2.

    Use it in the place of fedadam when rare clients make large movements, after which Adam's steps grow too fast.
    """

    name = "fedyogi"
    numbers = True

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """V - (1 - beta2) D^2 sign(v - D^2)."""
        return v - (1 - self.beta2) * square * torch.sign(v - square)
