"""What an engine can do: carry messages to clients, run their handlers, keep their states.

The rules, the same on every engine:

* a received message can't be changed: a handler that writes into one ends the run;
* a handler's writes to its state take effect when it returns, and not when it raises, is late or answers with a NaN;
* an error in a handler is a reply, and so are a worker that died, a late answer and one that makes no sense: it is
  reported and left out, and the round goes on with the others;
* replies come back in the order of the clients' numbers, whoever answered first;
* every byte that crosses is counted, and every field of a reply is a release until it is declared otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fedfill.privacy.releases import Release
from fedfill.protocol.messages import Answers, Average, Message
from fedfill.training.evaluation import Evaluation
from fedfill.tree import Tree, Weights


class Engine(Protocol):
    """Carries messages to clients and runs their handlers.

    Attributes:
        workers: How many clients it runs at a time.
        evaluation: What the evaluation on the clients' own test splits releases about these; None in a simulation, whose
            evaluation is an observer's and no part of the federation.
        evaluated: Clients whose scores left them at the last evaluation, or may have; none in a simulation.
        origin: Names a run from its beginning on, over all resumes, to hosts that keep clients' states; empty in a simulation.
    """

    workers: int
    evaluation: Release | None
    evaluated: Sequence[int]
    origin: str

    def call(self, handler: str, messages: Mapping[int, Message], t: int, average: Average | None = None) -> Answers:
        """Run a handler on every client that has a message.

        Args:
            handler: Name of a method of the algorithm.
            messages: By client.
            t: The round.
            average: Which fields of the replies to average.

        Returns:
            An outcome for every client, and the means.

        Raises:
            ContractError: Where a handler wrote into what it received.
        """
        ...

    def evaluate(self, weights: Weights, t: int) -> Evaluation:
        """Score the global weights, or of a `personal` algorithm every client's own, as they are after round `t`.

        Args:
            weights: Of the whole model.
            t: The round that is over.

        Returns:
            Accuracies and losses on the test set and on the clients' own splits.

        Raises:
            FedfillError: Where there is nothing to score on.
        """
        ...

    def states(self) -> dict[int, Tree]:
        """The committed states of the clients, for the checkpoint; nothing where they stay with the clients."""
        ...

    def restore(self, states: Mapping[int, Tree]) -> None:
        """Put the clients' states back."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
