"""FedSAM and FedASAM: sharpness-aware minimisation at the clients.

Caldarola et al., "Improving Generalization in Federated Learning by Seeking Flat Minima", ECCV 2022, and Qu et al., "Generalized
Federated Learning via Sharpness Aware Minimization", ICML 2022.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch
from fedfill.training.fit import Context, Loss
from fedfill.training.functional import gradient, loss_at
from fedfill.tree import Weights


class FedSAM(FedAvg):
    """FedAvg whose clients step by the gradient at the worst point nearby, towards flat minima.

    Use it when clients' data differ and a round may take twice the time; rho wants to be tuned.
    """

    name = "fedsam"

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
