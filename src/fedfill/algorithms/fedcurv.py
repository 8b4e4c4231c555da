"""FedCurv: Shoham et al., "Overcoming Forgetting in Federated Learning on Non-IID Data", 2019."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch
from fedfill.models.views import trainable
from fedfill.protocol.server import Server
from fedfill.training.fit import Context, Loss
from fedfill.training.functional import fisher_information
from fedfill.tree import Tree, Weights, zeros_like


class FedCurv(FedAvg):
    """FedAvg whose clients hold fast those parameters that matter to the others, by the others' Fisher information.

    Use it when clients' data differ and all take part often; it sends three times as much as fedavg.
    """

    name = "fedcurv"

    curv_lambda: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the others' penalties (lambda); 0: FedAvg, and nothing more is sent."""

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, and the sums over the last cohort; None stands for zeros."""
        return {**super().server_state(initial), "curvature": None}

    def client_state(self) -> dict[str, Tree]:
        """What the client sent last, and in which round."""
        return {"curvature": None, "sent_in": None}

    def down(self, server: Server) -> Weights | None:
        """Sum F_j and sum F_j w_j over those that trained in the last round."""
        if not self.curv_lambda:
            return None
        weights = server.state.weights
        return server.state.curvature or zeros_like(both(*[server.parameters(weights)] * 2))

    def objective(self, start: Start, loss: Loss) -> Loss:
        """L_i(w) + lambda sum over j != i of (w - w_j)^T diag(F_j) (w - w_j), but for a constant."""
        if start.control is None:
            return loss
        state = start.client.state
        took_part = state.sent_in is not None and state.sent_in == start.client.round - 1
        own = state.curvature if took_part else zeros_like(start.control)
        others = {name: total - own[name] for name, total in start.control.items()}
        curvature = {name: others[f"F {name}"].clamp(min=0) for name in start.parameters() if f"F {name}" in others}
        # the sum is F (w - v)^2 and a constant, F the sum of the F_j and v the mean of the w_j by them
        centre = {name: others[f"Fw {name}"] / f.clamp(min=1e-12) for name, f in curvature.items()}

        def curved(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            held = [(curvature[name], w - centre[name]) for name, w in model.named_parameters() if name in centre]
            terms = [(f * away.square()).sum() for f, away in held]
            return loss(model, batch, context) + self.curv_lambda * torch.stack(terms).sum()

        return curved

    def up(self, start: Start, trained: Weights, steps: int) -> Weights | None:
        """F_i and F_i w_i at the trained model."""
        if start.control is None:
            return None
        model = start.client.model(trained)
        fisher = fisher_information(model, trainable(model, trained), start.data)
        sent = both(fisher, {name: f * trained[name] for name, f in fisher.items()})
        start.client.state.curvature, start.client.state.sent_in = sent, start.client.round
        return sent

    def absorb(self, server: Server, mean: Weights, replies: int) -> None:
        """The sums over the replies."""
        server.state.curvature = {name: replies * tensor for name, tensor in mean.items()}


def both(fisher: Weights, pulled: Weights) -> Weights:
    """F and F w of all parameters as one message's tensors."""
    return {f"F {name}": f for name, f in fisher.items()} | {f"Fw {name}": fw for name, fw in pulled.items()}
