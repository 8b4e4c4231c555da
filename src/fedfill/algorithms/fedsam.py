"""FedSAM, FedASAM and MoFedSAM: sharpness-aware minimisation at the clients.

Caldarola et al., "Improving Generalization in Federated Learning by Seeking Flat Minima", ECCV 2022, and Qu et al., "Generalized
Federated Learning via Sharpness Aware Minimization", ICML 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Start
from fedfill.algorithms._plain_steps import PlainSteps
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch
from fedfill.protocol.server import Server
from fedfill.training.fit import Context, Loss, Penalty
from fedfill.training.functional import gradient, loss_at
from fedfill.tree import Tree, Weights, zeros_like


class FedSAM(FedAvg):
    """FedAvg whose clients step by the gradient at the worst point nearby, towards flat minima.

    Use it when clients' data differ and a round may take twice the time; rho wants to be tuned.
    """

    name = "fedsam"
    numbers = True

    rho: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    """How far away the gradient is taken; 0: FedAvg."""
    adaptive: bool = False
    """Whether distances are measured in each parameter's own size (FedASAM)."""
    asam_eta: float = Field(default=0.2, gt=0, allow_inf_nan=False)
    """With adaptive=true: what is added to each parameter's size."""

    def objective(self, start: Start, loss: Loss) -> Loss:
        """F(w + e) with e = rho g / ||g|| and g the gradient of F at w, on the same mini-batch; e has no gradient."""
        if not self.rho:
            return loss

        def sharp(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            g = gradient(loss, model, batch, context)
            own = dict(model.named_parameters())
            e = self.worst({name: own[name].detach() for name in g}, g)
            return loss_at(loss, model, {name: own[name] + e[name] for name in g}, batch, context)

        return sharp

    def worst(self, parameters: Weights, g: Weights) -> Weights:
        """The step to where the loss is largest, to first order, within a ball of radius rho around the parameters.

        Args:
            parameters: w, by their names.
            g: The gradient there, likewise.

        Returns:
            rho T^2 g / ||T g||; T is |w| + eta where it is adaptive, and 1 else.
        """
        sizes: Weights | dict[str, float] = dict.fromkeys(g, 1.0)
        if self.adaptive:
            sizes = {name: w.abs() + self.asam_eta for name, w in parameters.items()}
        scaled = {name: sizes[name] * step for name, step in g.items()}
        norm = torch.stack([step.double().square().sum() for step in scaled.values()]).sum().sqrt()
        share = (self.rho / (norm + 1e-12)).float()
        return {name: share * sizes[name] * step for name, step in scaled.items()}


class MoFedSAM(PlainSteps, FedSAM):
    """FedSAM whose clients step along a mix of their own gradient and of the cohort's last direction (Qu et al., algorithm 2).

    Use it in the place of fedsam when few of many clients take part in a round; without rho it is FedCM.
    """

    name = "mofedsam"
    numbers = True
    scales = True
    read_off = "the cohort's direction"
    unfair = (
        "the cohort's direction is read off plain gradient steps; give the others optimizer=sgd and its learning_rate"
    )

    own_share: float = Field(default=0.1, gt=0, le=1)
    """Share of the own gradient in a step (beta); 1: FedSAM."""

    learning_rate: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    """Step size of the local training."""
    weighting: Literal["uniform"] = "uniform"
    """Weights of the average: the direction is of the plain mean."""

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, and M; None stands for zeros."""
        return {**super().server_state(initial), "direction": None}

    def down(self, server: Server) -> Weights:
        """The cohort's last direction M."""
        weights = server.state.weights
        return server.state.direction or zeros_like(server.parameters(weights))

    def objective(self, start: Start, loss: Loss) -> Loss:
        """Beta F(w + e): its gradient is the own part of v = beta g + (1 - beta) M."""
        sharp = super().objective(start, loss)
        return lambda model, batch, context: self.own_share * sharp(model, batch, context)

    def penalty(self, start: Start) -> Penalty:
        """(1 - beta) <M, w>, whose gradient is the common part of v."""
        return Penalty(slope={name: (1 - self.own_share) * m for name, m in (start.control or {}).items()})

    def pack(self, start: Start, trained: Weights, steps: int) -> tuple[Weights, float]:
        """The model, and K_i."""
        return trained, float(steps)

    def combine(self, server: Server, weights: Weights, mean: Weights, replies: Sequence[Any]) -> Weights:
        """The mean, and M <- -mean(D_i) / (K lr) with K the mean of the K_i; where nobody made a step, M stays."""
        steps = sum(reply.scale for reply in replies) / len(replies)
        moved = steps * self.training(server.round).learning_rate
        parameters = server.parameters(weights)
        if moved:
            server.state.direction = {name: (w - mean[name]) / moved for name, w in parameters.items()}
        return mean
