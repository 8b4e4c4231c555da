"""What a server publishes under its own noise (trust=server), made again and again from neighbouring data.

The server's own code runs, round by round, with new noise each time. One client answers, on the data that are given, what it was
asked in a real run; an attacker who knows the records of all others would take their sums away in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fedfill.data.samples import Samples
from fedfill.errors import FedfillError
from fedfill.experiment.loop import make_server
from fedfill.experiment.prepare import Prepared
from fedfill.privacy.bounds import Floats
from fedfill.privacy.releases import Release
from fedfill.protocol import sums
from fedfill.protocol.messages import Answers, Average, Lost, Message, Outcome
from fedfill.protocol.sums import Collected
from fedfill.studies.auditing.replays import Call, Replayer
from fedfill.training.evaluation import Evaluation
from fedfill.tree import Tree, Weights


class OneClient:
    """An engine on which one client answers, on whatever data, and the others are lost.

    Args:
        replayer: Runs the handlers.
        calls: To the client that answers, in order: what it was asked in the run that was watched. What it would be asked now
            follows from other noise, which would hide what the records change.
        data: Of this client.
        seed: Of its randomness.
    """

    workers = 1
    evaluation: Release | None = None
    evaluated: Sequence[int] = ()
    origin = ""

    def __init__(self, replayer: Replayer, calls: Sequence[Call], data: Samples, seed: int) -> None:
        self._replayer, self._calls, self._data, self._seed = replayer, iter(calls), data, seed
        self._client = calls[0].client

    def call(self, handler: str, messages: Mapping[int, Message], t: int, average: Average | None = None) -> Answers:
        """Ask everybody."""
        outcomes = {i: Outcome(error=Lost("not asked in this audit")) for i in messages}
        if self._client in messages:
            reply, releases = self._replayer.answer(next(self._calls), self._data, self._seed)
            outcomes[self._client] = Outcome(reply, releases=tuple(releases.items()))
        return Answers(outcomes)

    def evaluate(self, weights: Weights, t: int) -> Evaluation:
        """Nothing is scored here."""
        raise NotImplementedError

    def states(self) -> dict[int, Tree]:
        """None are kept."""
        return {}

    def restore(self, states: Mapping[int, Tree]) -> None:
        """None are kept."""

    def close(self) -> None:
        """Nothing is open."""


class _Seen(Exception):
    """All sums have been published that there are."""


@dataclass
class Published:
    """All sums that the server opens in a run, noise and all; what is made of them later tells no more.

    Attributes:
        prepared: The run.
        replayer: Runs the handlers.
        calls: To the client whose data are replaced, in order.
    """

    prepared: Prepared
    replayer: Replayer
    calls: Sequence[Call]
    _exchanges: int = field(default=0, init=False)

    def __call__(self, data: Samples, seed: int) -> Floats:
        """The sums, one after the other, ``[k]``; symmetric matrices as upper triangles. Refused where they are others each time."""
        prepared, rounds = self.prepared, self.prepared.experiment.rounds
        again = replace(prepared, experiment=prepared.experiment.model_copy(update={"seed": seed}))
        server = make_server(again, OneClient(self.replayer, self.calls, data, seed), torch.device("cpu"))
        algorithm, steps = prepared.algorithm, prepared.algorithm.pretraining_steps()
        found: list[Floats] = []
        try:
            with _opened(found, self._exchanges):
                for step in range(steps):
                    server.begin(step - steps)
                    algorithm.pretrain(server, step)
                for t in range(rounds):
                    server.begin(t)
                    algorithm.round(server, t)
                    algorithm.conclude(server, t)
        except (
            FedfillError
        ) as error:  # under other noise the server has asked for other sums than those that are answered
            raise FedfillError(
                f"audit: what {algorithm.name} asks for depends on noise that came before, and with trust=server no attack of this audit "
                "can use that; allowed: trust=site, or settings with which nothing is chosen"
            ) from error
        self._exchanges = len(found)
        return np.concatenate(found) if found else np.zeros(0)


@contextmanager
def _opened(found: list[Floats], enough: int) -> Iterator[None]:
    """Note every sum that is opened meanwhile; leave with the last of them, where it is known how many there are."""

    def noted(opened: Weights, stds: Mapping[str, float], replies: int) -> Collected:
        found.append(np.concatenate([_numbers(x) for _, x in sorted(opened.items())]))
        if len(found) == enough:
            raise _Seen
        return Collected(opened, stds, replies)

    sums.Collected = noted  # type: ignore[assignment,misc]
    try:
        yield
    except _Seen:
        pass
    finally:
        sums.Collected = Collected  # type: ignore[misc]


def _numbers(x: torch.Tensor) -> Floats:
    """Each number once."""
    if x.ndim == 2 and x.shape[0] == x.shape[1] and torch.equal(x, x.T):
        x = x[tuple(torch.triu_indices(*x.shape))]
    found: Floats = x.double().flatten().numpy()
    return found
