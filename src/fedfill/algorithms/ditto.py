"""Ditto: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021."""

from __future__ import annotations

from pydantic import Field

from fedfill.algorithms import Broadcast, Update
from fedfill.algorithms._keeping import KeepsItsOwn
from fedfill.protocol.client import Client, client_handler
from fedfill.training.fit import Penalty


class Ditto(KeepsItsOwn):
    """FedAvg, and beside it a model of each client's own that is held close to the global one (algorithm 1).

    Use it when each client needs a model of its own and some have too few samples to train one alone.
    """

    name = "ditto"
    numbers = True

    ditto_lambda: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """How close a client's model is held to the global one (lambda); 0: each client alone."""

    @client_handler
    def train(self, client: Client, message: Broadcast) -> Update:
        """The global half as FedAvg has it; then v_i on F_i(v) + lambda/2 ||v - w_t||^2, from where it was (equation 1)."""
        done = self.contribute(client, message, self.loss)
        v = client.initial if client.state.own is None else client.state.own
        near = Penalty(self.ditto_lambda, message.weights)
        client.state.own = client.fit(v, self.loss, self.training(client.round), penalty=near).weights
        return done.reply(Update)
