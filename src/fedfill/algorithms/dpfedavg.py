"""DP-FedAvg: McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018.

Client-level differential privacy of everything that the server makes public, against everybody but the server itself and, in a
simulation, who knows the seed: each client's whole update is clipped, Gaussian noise is added to their sum, and cohorts are drawn
by independent coins. In a deployment noise and coins come from a key that only the server has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from fedfill.algorithms import Composable, Start
from fedfill.algorithms.fedavg import FedAvg
from fedfill.errors import FedfillError
from fedfill.models.views import first_names, normalisation, trainable
from fedfill.privacy.accountant import sampled_epsilon
from fedfill.protocol.server import Server
from fedfill.tree import Weights


class DPFedAvg(FedAvg):
    """FedAvg on clipped updates with noise on their sum (algorithm 1, with the estimator f_f: a fixed denominator).

    Use it when the model must not tell who took part, clients trust the server, and there are many of them.
    """

    name = "dpfedavg"
    numbers = True
    private = True

    clip: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Largest l2 norm of a client's update (S), running statistics of batch norm included."""
    noise_multiplier: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Standard deviation of the noise on the sum of the updates, as a multiple of `clip` (z)."""
    client_delta: float = Field(default=1e-5, gt=0, lt=1)
    """Delta at which each round's record gives epsilon."""
    weighting: Literal["uniform"] = "uniform"
    """Clients count alike: a client with more samples would have more to hide."""

    def check_compatible(self, whole: Composable) -> None:
        """One client may move the sum by its own clipped update alone, and not by others' updates too."""
        super().check_compatible(whole)
        if whole.exchanges:
            raise FedfillError(
                f"aggregation: found {self.name} with {whole.name}, where what a client shares reaches the others' updates, each of "
                "which is clipped by itself, and no epsilon would hold; allowed: fednova, qffl, none"
            )

    def sample(self, server: Server, t: int) -> list[int]:
        """Each client with the probability `participation`, whatever the others' coins say; perhaps nobody."""
        return server.select_independently(t)

    def pack(self, start: Start, trained: Weights, steps: int) -> tuple[Weights, None]:
        """w_t plus the clipped update: Delta min(1, S / ||Delta||), over all tensors that are no whole numbers."""
        update = {name: trained[name] - w for name, w in start.weights.items() if w.is_floating_point()}
        norm = sum(float(step.double().square().sum()) for step in update.values()) ** 0.5
        share = min(1.0, self.clip / norm) if norm else 1.0
        return {name: w + share * update[name] if name in update else w for name, w in start.weights.items()}, None

    def combine(self, server: Server, weights: Weights, mean: Weights, replies: Sequence[Any]) -> Weights:
        """w_t + (sum of clipped updates + N(0, (z S)^2 I)) / (q K); counters of batch norm stay."""
        expected = server.participation * server.clients
        std = self.noise_multiplier * self.clip
        model = server.model(weights)
        first, learnt = first_names(model), trainable(model, weights)
        # what is frozen moves for nobody, so there is nothing to hide; what layers share gets one noise under all its names
        fixed = {name for name, _ in model.named_buffers()} - normalisation(model)  # what a feature map has
        running = (weights.keys() - first.keys() - fixed) if self.buffers == "average" else set()
        moving = [name for name in weights if name in learnt or name in running]
        sums = {
            name: len(replies) * (mean[name] - weights[name]) for name in moving if weights[name].is_floating_point()
        }
        stream = server.noise("dp", sums)
        new = dict(weights)
        for name in moving:
            w = weights[name]
            if (same := first.get(name, name)) != name:
                new[name] = new[same]
            elif name in sums:
                noise = stream.normal(w.shape).to(w.device) * std  # rounded to the model's type once it is in the sum
                new[name] = (w.double() + (sums[name].double() + noise) / expected).to(w.dtype)
        spent = sampled_epsilon(self.noise_multiplier, server.participation, server.round + 1, self.client_delta)
        server.note(client_epsilon=spent)
        return new
