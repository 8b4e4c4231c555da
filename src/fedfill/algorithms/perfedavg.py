"""Per-FedAvg: Fallah, Mokhtari and Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees", NeurIPS 2020."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfill.algorithms import Broadcast, Start, Update
from fedfill.algorithms.fedavg import FedAvg
from fedfill.data.samples import Batch
from fedfill.protocol.client import Client, client_handler
from fedfill.training.fit import Context, Loss
from fedfill.training.functional import gradient, loss_at
from fedfill.tree import Tree, Weights


class PerFedAvg(FedAvg):
    """FedAvg of a model that is good after one gradient step on a client's own data, which each client takes (algorithm 1).

    Use it when clients have few samples and new ones come, who shall have a model of their own at once.
    """

    name = "perfedavg"
    personal = True

    inner_rate: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Size of the step that makes a model personal (alpha); 0: FedAvg."""
    order: Literal["first", "hessian_free", "exact"] = "first"
    """Second derivatives: left out (first), by a difference of gradients (hessian_free), or exact."""
    hessian_step: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """With order=hessian_free: how far apart these gradients are (delta)."""
    inner_share: float = Field(default=0.5, gt=0, lt=1)
    """Share of each mini-batch that the inner step is taken on; the rest is for the outer one."""
    adaptation_steps: int = Field(default=1, ge=0)
    """Steps of size inner_rate that a client takes to its own model; 0: it is judged by the global one."""

    def client_state(self) -> dict[str, Tree]:
        """The client's model; None before its first training. Others with local=perfedavg keep it beside their ``own``."""
        return {**super().client_state(), "adapted": None}

    def personal_weights(self, state: Mapping[str, Tree], weights: Weights) -> Weights:
        """The client's model."""
        own: Weights | None = state.get("adapted")
        return weights if own is None else own

    def objective(self, start: Start, loss: Loss) -> Loss:
        """F_i(w) = f_i(w - alpha grad f_i(w)), the inner gradient and the outer one on samples of their own (equation 6)."""
        if not self.inner_rate:
            return loss
        return self.hessian_free(loss) if self.order == "hessian_free" else self.after_a_step(loss)

    def after_a_step(self, loss: Loss) -> Loss:
        """The loss at w' = w - alpha g(w; B1) on B2; without second derivatives its gradient in w is that in w'."""

        def meta(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            inner, outer = divided(batch, self.inner_share)
            g = gradient(loss, model, inner, context, create_graph=self.order == "exact")
            w = dict(model.named_parameters())
            return loss_at(
                loss, model, {name: w[name] - self.inner_rate * step for name, step in g.items()}, outer, context
            )

        return meta

    def hessian_free(self, loss: Loss) -> Loss:
        """A term with the gradient g2 - alpha (g(w + delta g2; B1) - g(w - delta g2; B1)) / (2 delta), g2 = g(w'; B2)."""

        def meta(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            inner, outer = divided(batch, self.inner_share)
            g = gradient(loss, model, inner, context)
            w = {name: p for name, p in model.named_parameters() if name in g}
            leaves = {name: (p - self.inner_rate * g[name]).detach().requires_grad_() for name, p in w.items()}
            value = loss_at(loss, model, leaves, outer, context)
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
            g2 = dict(zip(leaves, found, strict=True))
            ahead, back = (
                gradient(loss, model, inner, context, at={name: p + far * g2[name] for name, p in w.items()})
                for far in (self.hessian_step, -self.hessian_step)
            )
            share = self.inner_rate / (2 * self.hessian_step)
            slope = {name: g2[name] - share * (ahead[name] - back[name]) for name in w}
            term = torch.stack([(p * slope[name]).sum() for name, p in w.items()]).sum()
            return value.detach() + term - term.detach()

        return meta

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """Local steps on the meta-objective; beside them the received model takes its step on the client's data."""
        done = self.contribute(client, message, self.loss)
        if self.inner_rate and self.adaptation_steps:
            step = {"optimizer": "sgd", "learning_rate": self.inner_rate, "momentum": 0.0, "weight_decay": 0.0}
            training = replace(self.training(client.round), steps=self.adaptation_steps, **step)  # type: ignore[arg-type]
            client.state.adapted = client.fit(message.weights, self.loss, training).weights
        return done.reply(Update)


def divided(batch: Batch, share: float) -> tuple[Batch, Batch]:
    """A mini-batch in two, each with two samples at least, as batch norm needs them; twice the whole where it has fewer than four.

    Args:
        batch: Of b samples.
        share: Of the first part.

    Returns:
        Two mini-batches.
    """
    b = len(batch.labels)
    if b < 4:
        return batch, batch
    cut = min(max(2, round(share * b)), b - 2)
    return tuple(
        Batch(batch.inputs[part], batch.labels[part], batch.index[part]) for part in (slice(cut), slice(cut, b))
    )  # type: ignore[return-value]
