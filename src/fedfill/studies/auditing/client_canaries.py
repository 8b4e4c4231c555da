"""Canary clients: virtual clients whose whole update is one of many orthogonal directions, or nothing.

As in Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning", ICLR 2024, with orthonormal directions in
place of random ones, so that canaries are not each other's noise, and a coin for each, so that the bound is rigorous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import fft
from torch import nn

from fedfill.data.samples import Samples
from fedfill.errors import FedfillError
from fedfill.models.views import trainable
from fedfill.privacy.bounds import Floats
from fedfill.protocol.client import Client, State
from fedfill.protocol.messages import Message, Outcome, releases_of
from fedfill.streams import derive, numpy_stream
from fedfill.training.fit import Fit, Fitted
from fedfill.tree import Weights

LONG = 5.0
"""Length of a canary's update before the clip, in multiples of the clip, so that a missing clip shows."""


class Directions:
    """Rows of a cosine transform with random signs: orthonormal, dense, and never all in memory.

    Args:
        count: How many, below the number of coordinates.
        size: Coordinates.
        seed: Of signs and rows.
    """

    def __init__(self, count: int, size: int, seed: int) -> None:
        if count >= size:
            raise FedfillError(
                f"canaries: found {count}, and the model has {size} trained coordinates; allowed: fewer canaries than these, or a larger model"
            )
        stream = numpy_stream(seed, "audit", "directions")
        self._signs = stream.choice([-1.0, 1.0], size)
        self._rows = 1 + stream.permutation(size - 1)[:count]
        self._size = size

    def __getitem__(self, j: int) -> Floats:
        """Direction `j`, ``[size]`` of length 1."""
        angles = np.pi * (2 * np.arange(self._size) + 1) * (self._rows[j] / (2 * self._size))
        return np.asarray(np.sqrt(2 / self._size) * np.cos(angles) * self._signs)

    def scores(self, vector: Floats) -> Floats:
        """Inner products of a vector ``[size]`` with all directions, ``[count]``."""
        return np.asarray(fft.dct(self._signs * vector, norm="ortho")[self._rows])


class ClientCanaries:
    """Virtual clients that run the algorithm's own handlers, whose local training moves the model along their direction.

    Args:
        program: The algorithm.
        model: Its network.
        initial: The experiment's initial weights.
        sample: One sample of nothing.
        classes: Of the task.
        first: The number of the first virtual client.
        count: How many there are.
        clip: Length to which the algorithm claims to clip an update.
        seed: Of the audit.

    Attributes:
        coins: +1: the canary takes part; -1: it answers with what it received, and moves nothing. ``[count]``
        directions: Along which they move.
    """

    def __init__(
        self, program: Any, model: nn.Module, initial: Weights, sample: Samples, *,
        classes: int, first: int, count: int, clip: float, seed: int,
    ) -> None:  # fmt: skip
        self._program, self._model, self._initial, self._sample = program, model, initial, sample
        self._classes, self._first, self._length, self._seed = classes, first, LONG * clip, seed
        learnt = trainable(model, initial)
        self._names = [name for name in initial if name in learnt and initial[name].is_floating_point()]
        size = sum(initial[name].numel() for name in self._names)
        self.directions = Directions(count, size, seed)
        self.coins = numpy_stream(seed, "audit", "coins").choice([-1, 1], count)

    def answer(self, client: int, handler: str, message: Message, t: int) -> Outcome:
        """The algorithm's own reply to such a training."""
        program = self._program

        def fit(request: Fit) -> Fitted:
            return Fitted(self._moved(request.weights, client - self._first), 1, 1, 0.0)

        def resident(weights: Weights) -> nn.Module:
            self._model.load_state_dict(weights, strict=False)
            return self._model

        virtual = Client(
            id=client, round=t, data=self._sample, classes=self._classes, state=State(program.client_state()),
            initial=self._initial, seed=derive(self._seed, "audit", "clients"), resident=resident, fit=fit,
        )  # fmt: skip
        reply = getattr(program, handler)(virtual, message)
        return Outcome(reply, None, tuple(releases_of(reply, virtual.releases)))

    def _moved(self, weights: Weights, j: int) -> Weights:
        if self.coins[j] < 0:
            return {name: tensor.clone() for name, tensor in weights.items()}
        moved, step, done = dict(weights), self.directions[j] * self._length, 0
        for name in self._names:
            n = weights[name].numel()
            part = torch.from_numpy(step[done : done + n]).to(weights[name])
            moved[name] = weights[name] + part.reshape(weights[name].shape)
            done += n
        return moved

    def scores(self, before: Weights, after: Weights) -> Floats:
        """How far the public model moved along each direction, ``[count]``."""
        moved = [(after[name].double() - before[name].double()).flatten().cpu() for name in self._names]
        return self.directions.scores(torch.cat(moved).numpy())
