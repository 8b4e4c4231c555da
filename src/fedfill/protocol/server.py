"""What an algorithm's ``round`` sees: cohorts, calls to clients, means over replies, state, and the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fedfill import tree
from fedfill.data.samples import Samples
from fedfill.data.schema import Schema
from fedfill.errors import DIVERGED, ContractError, DivergedError, FedfillError
from fedfill.models.views import trainable
from fedfill.privacy.keyed import KeyedStream, seeded
from fedfill.privacy.ledger import Ledger
from fedfill.protocol.client import BoundHandler, State
from fedfill.protocol.engine import Engine
from fedfill.protocol.messages import (
    NOT_FINITE,
    Average,
    Averaging,
    Lost,
    Message,
    Outcome,
    reason,
    specified,
    tensors_of,
)
from fedfill.streams import numpy_stream, torch_stream
from fedfill.training.aggregation import Part
from fedfill.training.fit import Fit, Fitted, LocalTraining, Loss, Resident, fit
from fedfill.tree import Weights


@dataclass
class Costs:
    """What is counted over a whole run.

    Attributes:
        bytes_down: Server to clients.
        bytes_up: Clients to server.
        train_samples: Samples passed through local training.
        fit_seconds: Seconds in local training, those of workers that ran side by side averaged.
        legs: Bytes by handler: ``{handler: [down, up]}``.
    """

    bytes_down: int = 0
    bytes_up: int = 0
    train_samples: int = 0
    fit_seconds: float = 0.0
    legs: dict[str, list[int]] = field(default_factory=dict)


class Server:
    """What an algorithm's ``round`` sees.

    Args:
        engine: Carries the messages.
        clients: Number of clients.
        classes: Number of classes of the task.
        rounds: Number of rounds of the whole run.
        participation: Share of the clients in a round, in (0, 1].
        seed: Of the experiment.
        initial: The experiment's initial weights.
        resident: A model for the server's own use, in no client's way.
        sample: One sample of nothing, with the type and shape of the clients'.
        min_replies: Good replies that a call to a whole cohort must have.
        secret: Gives a key that only the server has, from which noise and coins come that protect clients; None: they come
            from the seed.
        schema: What all agreed on about the table that is learnt from; None: nothing was.
        names: What the clients are called; empty: by their numbers.

    Attributes:
        state: What the server keeps between rounds.
        ledger: What clients released so far.
        costs: Bytes, samples and seconds so far.
        lost: Replies that failed in this round: client, handler, reason.
        notes: Figures that the algorithm put into this round's record.
        warnings: Sentences for the user in this round.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        clients: int,
        classes: int,
        rounds: int,
        participation: float,
        seed: int,
        initial: Weights,
        resident: Resident,
        sample: Samples,
        min_replies: int = 1,
        secret: Callable[[], bytes] | None = None,
        schema: Schema | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.schema = schema
        self.names = list(names) or [f"client {i}" for i in range(clients)]
        self.clients = clients
        self.classes = classes
        self.rounds = rounds
        self.participation = participation
        self.seed = seed
        self.initial = initial
        self.sample = sample
        self.state = State()
        self.ledger = Ledger()
        self.costs = Costs()
        self.lost: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}
        self.warnings: list[str] = []
        self._engine = engine
        self._resident = resident
        self._min_replies = min_replies
        self._secret = secret
        self._round = 0
        self._fits = 0
        self._cohort_size = 0
        self._by_coins = False

    def begin(self, t: int) -> None:
        """Start the record of round `t`; the steps before the first round are those from -1 downwards."""
        self._round, self._fits, self._by_coins = t, 0, False
        self.lost, self.notes, self.warnings = [], {}, []
        if t < 0:
            self._cohort_size = self.clients

    def select(self, t: int) -> list[int]:
        """The cohort of round `t`: max(1, round(participation * clients)) clients, uniform, in ascending order."""
        size = self._cohort_size = max(1, round(self.participation * self.clients))
        if size >= self.clients:
            return list(range(self.clients))
        chosen = numpy_stream(self.seed, "cohort", t).choice(self.clients, size, replace=False)
        return sorted(int(i) for i in chosen)

    def select_independently(self, t: int) -> list[int]:
        """The cohort of round `t` by Poisson sampling: each client with probability `participation`, in ascending order.

        It may lose all replies, as it may have nobody in it: a run that ended then would tell who was drawn.
        In a deployment nobody but the server may know the coins: they are what makes a small participation cheap.
        """
        name = "server", "cohort", t
        own = seeded(self.seed, *name) if self._secret is None else KeyedStream(self._secret(), *name)
        coins = own.uniform(self.clients).tolist()
        chosen = [i for i in range(self.clients) if coins[i] < self.participation]
        self._cohort_size, self._by_coins = len(chosen), True
        return chosen

    @property
    def round(self) -> int:
        """The current round, from 0; negative in the steps before the first."""
        return self._round

    @property
    def _when(self) -> str:
        return f"round {self._round + 1}" if self._round >= 0 else f"the preparation ({-self._round} steps to go)"

    def stream(self, purpose: str) -> torch.Generator:
        """The server's stream of randomness of (seed, purpose, round)."""
        device = next((tensor.device for tensor in self.initial.values()), "cpu")
        return torch_stream(self.seed, "server", purpose, self._round, device=device)

    def noise(self, purpose: str, hidden: Weights) -> KeyedStream:
        """The stream for noise that shall protect clients in what the server makes public.

        In a simulation its key is made of the seed, so that a run can be repeated to the bit. In a deployment nobody but the
        server may know it.

        Args:
            purpose: As in `stream`.
            hidden: What the noise is added to. A round that is done again after a crash gets the same noise for the same
                tensors and other noise for others: the difference of two sums with equal noise would show what it hides.

        Returns:
            The stream at its start.
        """
        device = next((tensor.device for tensor in self.initial.values()), "cpu")
        name = "server", purpose, self._round
        if self._secret is None:
            return seeded(self.seed, *name, device=device)
        return KeyedStream(self._secret(), *name, tree.sha256(hidden), device=device)

    def model(self, weights: Weights) -> nn.Module:
        """A model that holds `weights`, in evaluation mode, valid until the next `model` or `fit`."""
        return self._resident.load(weights).eval()

    def parameters(self, weights: Weights) -> Weights:
        """Those of the tensors that are trained: no buffers, nothing that is frozen; of shared ones all names."""
        return trainable(self._resident.model, weights)

    def fit(self, weights: Weights, loss: Loss, training: LocalTraining, *, data: Samples) -> Fitted:
        """Training at the server, on data that it holds: synthetic images, say.

        Args:
            weights: Start; these tensors are trained and returned.
            loss: A pure function (model, batch, context) -> scalar.
            training: Budget and optimizer.
            data: Training samples.

        Returns:
            Trained weights, steps, samples and mean loss.
        """
        device = data.labels.device
        order, draws = (
            torch_stream(self.seed, "server", name, self._round, self._fits, device=device) for name in ("fit", "draws")
        )
        self._fits += 1
        return fit(self._resident, Fit(weights, loss, data, training), order, draws)

    def warn(self, sentence: str) -> None:
        """Tell the user something in one sentence; it is in the round's record too."""
        self.warnings.append(sentence)

    def note(self, **figures: Any) -> None:
        """Put JSON values into this round's record; a NaN or an infinity, which JSON lacks, becomes None with a warning."""
        for name, value in figures.items():
            if not tree.is_finite(value):
                self.warn(f"Training diverged: '{name}' is no finite number; try a smaller learning rate.")
        self.notes.update(tree.finite_or_none(figures))

    def call(
        self, cohort: Sequence[int], handler: BoundHandler, messages: Message | Mapping[int, Message]
    ) -> dict[int, Any]:
        """Send messages to clients, run a handler on each, and collect the replies.

        Args:
            cohort: Clients to call.
            handler: A method of the algorithm that is marked with `client_handler`.
            messages: One message for all, or one for each client of the cohort.

        Returns:
            The good replies by client, in ascending order. A reply that failed or holds a NaN or an infinity is left out,
            reported in `lost`, and can be asked for again in a later round.

        Raises:
            ContractError: Where the algorithm broke the contract, or a handler raised on every client.
            FedfillError: Where too few replies are left.
        """
        return self._call(cohort, handler, messages, None)[0]

    def average(
        self,
        cohort: Sequence[int],
        handler: BoundHandler,
        messages: Message | Mapping[int, Message],
        *,
        of: Mapping[str, Weights],
        by: str | Mapping[str, str] | None,
        numbers: Sequence[str] = (),
        whole: bool = False,
    ) -> tuple[dict[int, Any], dict[str, Weights]]:
        """Like `call`, for replies of which the server needs some fields only as a weighted mean.

        Engines take the mean where the clients run, so that one model travels in the place of many. A real federation
        counts, and sends, every client's own.

        Args:
            cohort: Clients to call.
            handler: A method of the algorithm that is marked with `client_handler`.
            messages: One message for all, or one for each client of the cohort.
            of: The fields, each with tensors that have the names, types and shapes that every reply's must have.
            by: The field with a reply's weight, such as ``"samples"``, for all of them or for each; None, and a field
                without one: all replies weigh the same.
            numbers: Further fields that have to hold a number of at least 0, or the reply is left out.
            whole: Whether the server needs every reply's own tensors as well: they come as they are, and the mean is taken here.

        Returns:
            The good replies as from `call`, with None in these fields unless they are whole; and the mean of each field that
            a reply held.

        Raises:
            ContractError: Where the algorithm broke the contract, or a handler raised on every client.
            FedfillError: Where too few replies are left.
        """
        spec, name = specified(of, by, numbers), handler.__name__
        if not whole:
            replies, means = self._call(cohort, handler, messages, spec)
            return replies, tensors_of(means, spec, name)
        replies, averaging = {}, Averaging(spec, self.clients)
        for i, reply in self.call(cohort, handler, messages).items():
            checked = averaging.add(i, Outcome(reply))
            if checked.error is None:
                replies[i] = reply
            else:
                self.lose(i, name, reason(checked.error))
        if not replies:
            reasons = self._reasons(name, none_left=True)
            raise FedfillError(f"engine: no reply to '{name}' held what was asked for ({'; '.join(reasons[:3])})")
        return replies, tensors_of(averaging.total(), spec, name)

    def sum(
        self, cohort: Sequence[int], handler: BoundHandler, messages: Message | Mapping[int, Message], *,
        of: Mapping[str, Weights], least: int = 0, counts: Sequence[str] = (),
    ) -> tuple[dict[int, Any], dict[str, Weights]]:  # fmt: skip
        """Like `call`, for replies of which the server needs some fields only as a sum: the basis of `fedfill.protocol.sums`.

        Args:
            cohort: Clients to call.
            handler: A method of the algorithm that is marked with `client_handler`.
            messages: One message for all, or one for each client of the cohort.
            of: The fields, each with tensors of the names and shapes that every reply's must have: int64 where these hold
                whole numbers, float64 where they hold others. Replies may hold int32 and float32 in their place.
            least: Where above 0, no single reply may reach the server, and a sum of fewer replies than this must not be opened. A
                real federation then hides replies under masks; elsewhere the server's program gets sums alone in any case.
            counts: Names of the tensors that count something; a reply with one below 0 is left out. None where replies hold noise.

        Returns:
            The good replies as from `call`, with None in these fields; and the sums, in int64 or float64, taken in client
            order. What a lost reply would have added is not in them.

        Raises:
            ContractError: Where the algorithm broke the contract, or a handler raised on every client.
            FedfillError: Where too few replies are left.
        """
        spec = replace(specified(of, None), total=True, least=least, counts=tuple(counts))
        replies, sums = self._call(cohort, handler, messages, spec)
        return replies, tensors_of(sums, spec, handler.__name__)

    def _call(
        self,
        cohort: Sequence[int],
        handler: BoundHandler,
        messages: Message | Mapping[int, Message],
        average: Average | None,
    ) -> tuple[dict[int, Any], Mapping[str, Part]]:
        name = handler.__name__
        if not getattr(handler, "is_client_handler", False):
            raise ContractError(f"'{name}' is not marked with @client_handler")
        each = dict.fromkeys(cohort, messages) if isinstance(messages, Message) else {i: messages[i] for i in cohort}
        sizes: dict[int, int] = {}  # by identity: one message often goes to a whole cohort
        down = sum(sizes[id(m)] if id(m) in sizes else sizes.setdefault(id(m), tree.size(m)) for m in each.values())
        answers = self._engine.call(name, each, self._round, average)

        averaging = Averaging(average, self.clients) if answers.means is None else None
        replies: dict[int, Any] = {}
        up = 0
        first: BaseException | None = None
        for i in sorted(each):
            outcome = answers.outcomes[i]
            self.costs.fit_seconds += outcome.fit_seconds / min(self._engine.workers, len(each))
            self.costs.train_samples += outcome.train_samples
            for what, release in outcome.releases:  # also of what came too late, could not be read, or ends the run
                self.ledger.add(i, what, release)
            if isinstance(outcome.error, ContractError | FedfillError):
                raise outcome.error
            if outcome.reply is not None:
                up += outcome.size
                if averaging is not None:
                    outcome = averaging.add(i, outcome)
            if outcome.error is None:
                replies[i] = outcome.reply
                continue
            if not isinstance(outcome.error, Lost):
                first = first or outcome.error
            self.lose(i, name, reason(outcome.error))
        leg = self.costs.legs.setdefault(name, [0, 0])
        leg[0] += down
        leg[1] += up
        self.costs.bytes_down += down
        self.costs.bytes_up += up
        if each and not replies and first is not None and len(each) >= self._cohort_size:
            raise ContractError(f"no client could run '{name}' in {self._when}") from first
        self._require(replies, each, name)
        return replies, averaging.total() if averaging is not None else answers.means or {}

    def _require(self, replies: Mapping[int, Any], asked: Mapping[int, Any], handler: str) -> None:
        """A call to a part of the cohort may lose them all: the algorithm asks again in a later round."""
        if self._by_coins or len(asked) < self._cohort_size or len(replies) >= min(self._min_replies, len(asked)):
            return
        reasons = self._reasons(handler, none_left=not replies)
        raise FedfillError(
            f"min_replies: in {self._when} {len(replies)} of {len(asked)} clients gave a good reply to '{handler}', "
            f"but {self._min_replies} were needed ({'; '.join(reasons[:3])}); finished rounds are kept, and 'fedfill resume' goes on from there"
        )

    def _reasons(self, handler: str, none_left: bool) -> list[str]:
        """Why replies were left out. Training diverged where none is left since all held a NaN or an infinity."""
        reasons = sorted({loss["reason"] for loss in self.lost if loss["handler"] == handler})
        if none_left and reasons == [NOT_FINITE]:
            raise DivergedError(
                f"{DIVERGED}in {self._when} every client's reply held a NaN or an infinity; try a smaller learning_rate"
            )
        return reasons

    def lose(self, client: int, handler: str, reason: str) -> None:
        """Record that a reply, or what it shared, is left out; algorithms do so for one that makes no sense.

        Args:
            client: Whose it was.
            handler: What was called.
            reason: In a few words.
        """
        self.lost.append({"client": client, "handler": handler, "reason": reason})
