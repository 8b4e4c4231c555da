"""An engine that an audit looks through: what each release said, and virtual clients whose replies are canaries.

No algorithm knows of it. Without canaries the run has the same bits as on the engine that is wrapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fedfill.privacy.releases import Release
from fedfill.protocol.engine import Engine
from fedfill.protocol.messages import Answers, Average, Averaging, Message, Outcome
from fedfill.training.evaluation import Evaluation
from fedfill.tree import Tree, Weights


class Watch(Protocol):
    """Sees every call to a client, one after the other."""

    def before(self, client: int, handler: str, message: Message, t: int, state: Tree) -> None:
        """A handler is about to run, on this committed state."""
        ...

    def after(self, client: int, outcome: Outcome) -> None:
        """It has run; the whole reply is there, whatever is averaged of it."""
        ...


class Replies(Protocol):
    """Virtual clients."""

    def answer(self, client: int, handler: str, message: Message, t: int) -> Outcome:
        """What one of them replies."""
        ...


class AuditedEngine:
    """Delegates everything to an engine, client by client, and takes means and sums itself, in client order.

    Args:
        engine: That runs the real clients.
        real: How many these are; clients of higher numbers are virtual.
        clients: All of them.
        watch: Sees the calls to real clients; None: nobody does.
        canaries: The virtual clients; None: there are none.
    """

    def __init__(
        self,
        engine: Engine,
        real: int,
        clients: int | None = None,
        watch: Watch | None = None,
        canaries: Replies | None = None,
    ) -> None:
        self._engine = engine
        self._real = real
        self._clients = real if clients is None else clients
        self._watch = watch
        self._canaries = canaries

    @property
    def workers(self) -> int:
        """Clients at a time of the engine."""
        return self._engine.workers

    @workers.setter
    def workers(self, number: int) -> None:
        self._engine.workers = number

    @property
    def evaluation(self) -> Release | None:
        """Of the engine."""
        return self._engine.evaluation

    @evaluation.setter
    def evaluation(self, release: Release | None) -> None:
        self._engine.evaluation = release

    @property
    def evaluated(self) -> Sequence[int]:
        """Of the engine."""
        return self._engine.evaluated

    @evaluated.setter
    def evaluated(self, clients: Sequence[int]) -> None:
        self._engine.evaluated = clients

    @property
    def origin(self) -> str:
        """Of the engine."""
        return self._engine.origin

    @origin.setter
    def origin(self, name: str) -> None:
        self._engine.origin = name

    def call(self, handler: str, messages: Mapping[int, Message], t: int, average: Average | None = None) -> Answers:
        """Run a handler on every client that has a message."""
        averaging = Averaging(average, self._clients)
        outcomes: dict[int, Outcome] = {}
        states = self._engine.states() if self._watch is not None else {}
        for i in sorted(messages):
            if i >= self._real and self._canaries is not None:
                outcome = self._canaries.answer(i, handler, messages[i], t)
            else:
                if self._watch is not None:
                    self._watch.before(i, handler, messages[i], t, states.get(i))
                outcome = self._engine.call(handler, {i: messages[i]}, t).outcomes[i]
                if self._watch is not None:
                    self._watch.after(i, outcome)
            outcomes[i] = averaging.add(i, outcome)
        return Answers(outcomes, averaging.total())

    def evaluate(self, weights: Weights, t: int) -> Evaluation:
        """As the engine."""
        return self._engine.evaluate(weights, t)

    def states(self) -> dict[int, Tree]:
        """As the engine."""
        return self._engine.states()

    def restore(self, states: Mapping[int, Tree]) -> None:
        """As the engine."""
        self._engine.restore(states)

    def close(self) -> None:
        """As the engine."""
        self._engine.close()
