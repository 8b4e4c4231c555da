"""LG-FedAvg: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field
from torch import nn

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms._keeping import KeepsAPart
from fedfill.models.views import rest
from fedfill.protocol.client import Client, client_handler
from fedfill.protocol.server import Server
from fedfill.tree import Tree, Weights


@dataclass(frozen=True)
class Global(Broadcast):
    """Server to client: the shared tensors; once, after the warm rounds, the rest of the model, where the client begins."""

    rest: Weights | None


class LGFedAvg(KeepsAPart):
    """FedAvg of the classifier alone, on representations that every client learns for itself (algorithm 1).

    Use it when clients' data look different and bytes are dear: the last layer is all that is sent.
    """

    name = "lgfedavg"
    shares_head = True
    parts: ClassVar[tuple[str, ...]] = ("classifier",)

    warm_rounds: int = Field(default=0, ge=0)
    """Rounds of FedAvg of the whole model before it is divided; the paper's experiments go on from a model of FedAvg."""

    def kept(self, model: nn.Module, weights: Weights) -> Collection[str]:
        """Everything in front of the classifier."""
        return rest(weights, "classifier").keys()

    def server_state(self, initial: Weights) -> dict[str, Tree]:
        """The global model, and who has received the rest of it."""
        return {**super().server_state(initial), "begun": []}

    def round(self, server: Server, t: int) -> None:
        """FedAvg's, of the whole model at first, and of the classifier afterwards."""
        state, cohort = server.state, self.cohort(server, t)
        if t < self.warm_rounds:
            messages = dict.fromkeys(cohort, Global(state.weights, None))
        else:
            shared = self.shared(server.model(state.weights), state.weights)
            again = first = Global(shared, None)
            if self.warm_rounds:  # without, everybody has the initial model
                first = Global(shared, {name: x for name, x in state.weights.items() if name not in shared})
            messages = {i: again if i in state.begun else first for i in cohort}
        replies, mean = self.gather(server, cohort, self.train_divided, messages)
        if t >= self.warm_rounds:
            state.begun = sorted({*state.begun, *replies})
        state.weights = {**state.weights, **mean["weights"]}

    @client_handler
    def train_divided(self, client: Client, message: Global) -> Update:
        """Local epochs on both parts."""
        if message.rest is not None and client.state.own is None:
            client.state.own = message.rest
        done = self.contribute(client, message, self.loss, beside=self.own(client, message.weights))
        client.state.own = done.beside or None
        return done.reply(Update)
