"""FedNTD: Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning", NeurIPS 2022."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedfill.algorithms import Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch
from fedfill.models.layers import evaluating, inputs_of, output_of
from fedfill.models.views import first_names
from fedfill.training.fit import Context, Loss


class FedNTD(FedAvg):
    """FedAvg whose clients keep what the global model says of all classes but the true one, by distillation.

    Use it when clients lack classes, which they forget in their local epochs; it needs three classes or more.
    """

    name = "fedntd"

    beta: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the distillation; 0: none."""
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Temperature of both softmaxes (tau)."""

    def objective(self, start: Start, loss: Loss) -> Loss:
        """L_CE + beta L_NTD."""
        if not self.beta:
            return loss

        def distilled(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            with torch.no_grad(), evaluating(model):
                first = first_names(model)  # of what layers share
                received = {name: w for name, w in context.received.items() if first.get(name, name) == name}
                # a network may work in place on what it is given
                z_global = functional_call(model, received, (batch.inputs.clone(),))  # [b, classes]
            with inputs_of(model) as given, output_of(model) as seen:
                supervised = loss(model, batch, context)
            # a loss may have passed other samples, or none, through the whole model
            own = [scores for inputs, scores in zip(given, seen, strict=True) if inputs is batch.inputs]
            z = own[-1] if own else model(batch.inputs)  # [b, classes]
            return supervised + self.beta * not_true_distance(z, z_global, batch.labels, self.temperature)

        return distilled


def not_true_distance(z: Tensor, z_global: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """tau^2 KL(softmax of z_global / tau || softmax of z / tau), the true class left out of both, the mean.

    Args:
        z: Scores of the model in training, ``[b, classes]``.
        z_global: Those of the global model, ``[b, classes]``.
        labels: True classes, ``[b]``.
        temperature: tau.

    Returns:
        A scalar.
    """
    not_true = functional.one_hot(labels, z.shape[1]) == 0  # [b, classes]
    own, received = (
        functional.log_softmax(scores[not_true].view(len(z), -1) / temperature, dim=1)  # [b, classes - 1]
        for scores in (z, z_global)
    )
    return temperature**2 * functional.kl_div(own, received, reduction="batchmean", log_target=True)
