"""The contract between algorithms and engines: messages, handlers, state, and what a server and a client can do.

An algorithm sees a `Server` in its ``round`` and a `Client` in its handlers, and nothing else. An engine carries
messages, runs handlers and keeps the clients' states; it knows no algorithm. The rules, the same on every engine:

* a received message can't be changed: a handler that writes into one ends the run;
* a handler's writes to its state take effect when it returns, and not when it raises;
* an error in a handler is a reply: it is reported and left out, and the round goes on with the others;
* replies come back in the order of the clients' numbers, whoever answered first;
* every byte that crosses is counted, and every field of a reply is a release until it is declared otherwise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
from torch import nn

from fedfill import tree
from fedfill.data.samples import Samples
from fedfill.errors import ContractError, FedfillError
from fedfill.privacy.ledger import Ledger, Release, unbounded
from fedfill.streams import numpy_stream, torch_stream
from fedfill.training.evaluation import Evaluation
from fedfill.training.local import Fit, Fitted, LocalTraining, Loss
from fedfill.tree import Record, Tree, Weights


class Message(Record):
    """Base of the messages: subclass it as a frozen dataclass whose fields are everything that crosses.

    Attributes:
        declared: What fields of a reply release about the client's data, where that is the same for every reply.
            A field that is declared neither here nor by ``client.release`` counts as a release without a guarantee.
    """

    declared: ClassVar[Mapping[str, Release]] = {}


Handler = Callable[[Any, "Client", Any], Awaitable[Message]]
H = TypeVar("H", bound=Handler)
BoundHandler = Callable[["Client", Any], Awaitable[Message]]


def client_handler(function: H) -> H:
    """Mark a coroutine method ``(self, client, message) -> reply`` as one that servers may call."""
    function.is_client_handler = True  # type: ignore[attr-defined]
    return function


class State:
    """Named trees that outlive a round: ``state.weights = ...``; written to the checkpoint, nothing hidden beside them.

    Args:
        values: Initial values by name.
    """

    def __init__(self, values: Mapping[str, Tree] | None = None) -> None:
        object.__setattr__(self, "_values", dict(values or {}))

    def __getattr__(self, name: str) -> Any:
        """The value of this name."""
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(
                f"the state holds no '{name}'; give it a first value in server_state or client_state"
            ) from None

    def __setattr__(self, name: str, value: Tree) -> None:
        """Set the value of this name."""
        if hasattr(State, name):
            raise ContractError(f"'{name}' can't be a name in a state; choose another")
        self.__dict__["_values"][name] = value

    def tree(self) -> dict[str, Tree]:
        """All values by name."""
        return cast("dict[str, Tree]", self.__dict__["_values"])


class Client:
    """What a handler sees of its client; all but the last two arguments are attributes.

    Args:
        id: The client's number, 0..clients-1.
        round: The current round.
        data: The client's training samples; they never leave it.
        classes: Number of classes of the task.
        state: What this client keeps between rounds.
        initial: The experiment's initial weights, which every party can make from the seed: they cost no bytes.
        seed: Of the experiment.
        resident: Loads weights into the worker's model.
    """

    def __init__(
        self,
        *,
        id: int,
        round: int,
        data: Samples,
        classes: int,
        state: State,
        initial: Weights,
        seed: int,
        resident: Callable[[Weights], nn.Module],
    ) -> None:
        self.id = id
        self.round = round
        self.data = data
        self.classes = classes
        self.state = state
        self.initial = initial
        self.releases: dict[str, Release] = {}
        self._seed = seed
        self._resident = resident
        self._streams: dict[str, torch.Generator] = {}

    def stream(self, purpose: str) -> torch.Generator:
        """The stream of randomness of (seed, purpose, round, client), on the data's device.

        Asked for again in the same handler it goes on where it was; handlers that are called in the same round draw the
        same values for the same purpose, so each needs purposes of its own.
        """
        if purpose not in self._streams:
            self._streams[purpose] = torch_stream(
                self._seed, purpose, self.round, self.id, device=self.data.labels.device
            )
        return self._streams[purpose]

    def model(self, weights: Weights) -> nn.Module:
        """A model that holds `weights`, in evaluation mode, valid until the next `model` or `fit` of this handler."""
        return self._resident(weights).eval()

    def release(self, field_name: str, release: Release) -> None:
        """Declare what a field of this handler's reply releases about the client's data."""
        self.releases[field_name] = release

    async def fit(
        self,
        weights: Weights,
        loss: Loss,
        training: LocalTraining,
        *,
        data: Samples | None = None,
        samples_per_epoch: int | None = None,
    ) -> Fitted:
        """Local training; the one heavy wait of a handler.

        Args:
            weights: Start; these tensors are trained and returned.
            loss: A pure function (model, batch, context) -> scalar.
            training: Budget and optimizer.
            data: Training samples; None: the client's own.
            samples_per_epoch: Uniform draws without replacement per epoch; None: every sample.

        Returns:
            Trained weights, steps, samples and mean loss.
        """
        return await _Wait(Fit(weights, loss, self.data if data is None else data, training, samples_per_epoch))


class _Wait:
    def __init__(self, request: Fit) -> None:
        self.request = request

    def __await__(self) -> Generator[Fit, Fitted, Fitted]:
        return (yield self.request)


@dataclass(frozen=True)
class Outcome:
    """What came of one call to one client.

    Attributes:
        reply: The answer, or None where there is none.
        error: The exception in place of an answer.
        releases: What the handler declared, by field.
        fit_seconds: Seconds in local training.
        train_samples: Samples passed through local training.
    """

    reply: Message | None = None
    error: BaseException | None = None
    releases: Mapping[str, Release] = field(default_factory=dict)
    fit_seconds: float = 0.0
    train_samples: int = 0


class Engine(Protocol):
    """Carries messages to clients and runs their handlers.

    Attributes:
        workers: How many clients it runs at a time.
    """

    workers: int

    def call(self, handler: str, messages: Mapping[int, Message], t: int) -> Mapping[int, Outcome]:
        """Run the handler of this name on every client that has a message, in round `t`."""
        ...

    def evaluate(self, weights: Weights) -> Evaluation:
        """Score the global weights on the test set and on every client's own test split."""
        ...

    def states(self) -> dict[int, Tree]:
        """The committed states of the clients, for the checkpoint."""
        ...

    def restore(self, states: Mapping[int, Tree]) -> None:
        """Put the clients' states back."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


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


M = TypeVar("M", bound=Message)


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
        model: A model for the server's own use, in no client's way.

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
        model: Callable[[Weights], nn.Module],
    ) -> None:
        self.clients = clients
        self.classes = classes
        self.rounds = rounds
        self.participation = participation
        self.seed = seed
        self.initial = initial
        self.state = State()
        self.ledger = Ledger()
        self.costs = Costs()
        self.lost: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}
        self.warnings: list[str] = []
        self._engine = engine
        self._model = model
        self._round = 0

    def begin(self, t: int) -> None:
        """Start the record of round `t`."""
        self._round = t
        self.lost, self.notes, self.warnings = [], {}, []

    def select(self, t: int) -> list[int]:
        """The cohort of round `t`: max(1, round(participation * clients)) clients, uniform, in ascending order."""
        size = max(1, round(self.participation * self.clients))
        if size >= self.clients:
            return list(range(self.clients))
        chosen = numpy_stream(self.seed, "cohort", t).choice(self.clients, size, replace=False)
        return sorted(int(i) for i in chosen)

    def stream(self, purpose: str) -> torch.Generator:
        """The server's stream of randomness of (seed, purpose, round)."""
        device = next((tensor.device for tensor in self.initial.values()), "cpu")
        return torch_stream(self.seed, "server", purpose, self._round, device=device)

    def model(self, weights: Weights) -> nn.Module:
        """A model that holds `weights`, in evaluation mode, valid until the next call."""
        return self._model(weights).eval()

    def warn(self, sentence: str) -> None:
        """Tell the user something in one sentence; it is in the round's record too."""
        self.warnings.append(sentence)

    def note(self, **figures: Any) -> None:
        """Put JSON values into this round's record."""
        self.notes.update(figures)

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
            ContractError: Where the algorithm broke the contract.
            FedfillError: Where no reply is left.
        """
        name = handler.__name__
        if not getattr(handler, "is_client_handler", False):
            raise ContractError(f"'{name}' is not marked with @client_handler")
        each = dict.fromkeys(cohort, messages) if isinstance(messages, Message) else {i: messages[i] for i in cohort}
        sizes: dict[int, int] = {}  # by identity: one message often goes to a whole cohort
        down = sum(sizes[id(m)] if id(m) in sizes else sizes.setdefault(id(m), tree.size(m)) for m in each.values())
        outcomes = self._engine.call(name, each, self._round)

        replies: dict[int, Any] = {}
        up = 0
        first: BaseException | None = None
        for i in sorted(each):
            outcome = outcomes[i]
            self.costs.fit_seconds += outcome.fit_seconds / min(self._engine.workers, len(each))
            self.costs.train_samples += outcome.train_samples
            if isinstance(outcome.error, ContractError | FedfillError):
                raise outcome.error
            if outcome.reply is None:
                first = first or outcome.error
                self._lose(i, name, f"{type(outcome.error).__name__}: {outcome.error}")
                continue
            up += tree.size(outcome.reply)
            for what, release in self._releases(outcome):
                self.ledger.add(i, what, release)
            if tree.is_finite(outcome.reply):
                replies[i] = outcome.reply
            else:
                self._lose(i, name, "the reply holds a NaN or an infinity")
        leg = self.costs.legs.setdefault(name, [0, 0])
        leg[0] += down
        leg[1] += up
        self.costs.bytes_down += down
        self.costs.bytes_up += up
        if each and not replies:
            if first is not None:
                raise ContractError(f"no client could run '{name}' in round {self._round + 1}") from first
            raise FedfillError(
                f"training diverged: in round {self._round + 1} every client's reply held a NaN or an infinity; "
                "try a smaller learning_rate"
            )
        return replies

    def _lose(self, client: int, handler: str, reason: str) -> None:
        self.lost.append({"client": client, "handler": handler, "reason": reason})

    def _releases(self, outcome: Outcome) -> Iterator[tuple[str, Release]]:
        reply = outcome.reply
        kind = type(reply).__name__
        unknown = outcome.releases.keys() - {item.name for item in fields(reply)}  # type: ignore[arg-type]
        if unknown:
            raise ContractError(f"a release is declared for '{min(unknown)}', which is no field of {kind}")
        for item in fields(reply):  # type: ignore[arg-type]
            if getattr(reply, item.name) is None and item.name not in outcome.releases:
                continue
            declared = outcome.releases.get(item.name) or reply.declared.get(item.name)  # type: ignore[union-attr]
            yield f"{kind}.{item.name}", declared or UNDECLARED


UNDECLARED = unbounded("sent as it is")
