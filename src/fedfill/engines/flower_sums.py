"""The server's side of a sum whose parts it must not see: keys first, masked parts then, and a new circle where one is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedfill.engines.flower_keys import question_of
from fedfill.engines.flower_messages import UNREAD, AskKey, GivenKey, Hidden
from fedfill.errors import ContractError, FedfillError
from fedfill.privacy.masking import SumKey
from fedfill.privacy.releases import Release
from fedfill.protocol.messages import HEAVIEST, Answers, Average, Lost, Message, Outcome, reason, shapes_of
from fedfill.training.aggregation import Part, Sum
from fedfill.tree import Record

ATTEMPTS = 3
"""Circles for one sum at the most: each that gave masked parts away counts in the account."""
Ask = Callable[[Sequence[int], Message | Record], dict[int, Outcome]]
"""Sends one message to clients, and waits for what comes of it."""


@dataclass
class _Spent:
    """What one client's replies to all attempts came to."""

    releases: tuple[tuple[str, Release], ...] = ()
    size: int = 0
    fit_seconds: float = 0.0
    train_samples: int = 0
    error: BaseException | None = None


@dataclass
class MaskedSum:
    """One sum of hidden parts.

    Args:
        handler: That makes a part.
        ask_keys: Sends the request for keys.
        ask_parts: Calls the handler.
        average: What is summed, and of how many at the least.
    """

    handler: str
    ask_keys: Ask
    ask_parts: Ask
    average: Average
    _spent: dict[int, _Spent] = field(default_factory=dict)

    def call(self, messages: Mapping[int, Message]) -> Answers:
        """Ask until all of a circle have answered, or too few are left."""
        clients = sorted(messages)
        message = messages[clients[0]]
        if any(other is not message for other in messages.values()):
            raise ContractError(f"'{self.handler}' hides its parts of a sum, so that all clients need one message")
        question = question_of(message)
        self._spent = {i: _Spent() for i in clients}
        left = clients
        for _ in range(ATTEMPTS):
            circle = self._circle(left, question)
            left = [key.client for key in circle]
            if len(left) < max(2, self.average.least):
                break
            outcomes = self.ask_parts(left, Hidden(message, circle))
            self._book(outcomes)
            good = {i: outcome for i, outcome in outcomes.items() if outcome.error is None}
            if len(good) == len(left):
                return self._opened(good)
            left = sorted(good)
        return self._unopened(left, len(clients))

    def _unopened(self, left: Sequence[int], asked: int) -> Answers:
        """What came of all attempts where none was opened: the run ends, with one sentence."""
        own = next((f" ({reason(spent.error)})" for spent in self._spent.values() if spent.error is not None), "")
        least = max(2, self.average.least)
        why = (
            f"{len(left)} of {asked} clients were left{own}, and with trust=secure the sum may be opened from {least} on, whose shares "
            f"of the noise make the whole of it; nothing was opened in {ATTEMPTS} attempts or fewer, and 'fedfill resume' asks again"
        )
        outcomes = {i: self._outcome(i, spent.error or Lost(why)) for i, spent in self._spent.items()}
        last = max(outcomes)  # behind all that is booked
        return Answers({**outcomes, last: replace(outcomes[last], error=FedfillError(f"honest: {why}"))}, {})

    def _circle(self, clients: Sequence[int], question: str) -> list[SumKey]:
        """Who gave a key, in ascending order."""
        keys = []
        for i, outcome in sorted(self.ask_keys(clients, AskKey(self.handler, question)).items()):
            self._spent[i].size += outcome.size
            if isinstance(outcome.reply, GivenKey) and outcome.reply.key.client == i:
                keys.append(outcome.reply.key)
            else:  # nothing of its data was in it
                self._spent[i].error = outcome.error or Lost("it gave another client's key")
        return keys

    def _book(self, outcomes: dict[int, Outcome]) -> None:
        """Check parts, and count them: one that was masked can be opened as long as the others' may still turn up."""
        for i, outcome in outcomes.items():
            if outcome.error is None and outcome.reply is not None:
                try:
                    found = {name: shapes_of(getattr(outcome.reply, name)) for name in self.average.shapes}
                    if found != dict(self.average.shapes):
                        raise ValueError("the reply has other names, types or shapes than were asked for")
                except (ValueError, AttributeError) as wrong:
                    outcomes[i] = replace(outcome, error=Lost(str(wrong)))
        told = next((o.releases for o in outcomes.values() if o.error is None), UNREAD)
        for i, outcome in outcomes.items():
            spent = self._spent[i]
            # what is lost was masked as the others' are, and tells no more than these
            spent.releases += told if outcome.releases == UNREAD else outcome.releases
            spent.size += outcome.size
            spent.fit_seconds += outcome.fit_seconds
            spent.train_samples += outcome.train_samples
            spent.error = outcome.error

    def _opened(self, good: Mapping[int, Outcome]) -> Answers:
        """The sum modulo 2^64, in which all masks cancel."""
        means: dict[str, Part] = {}
        for name in self.average.shapes:
            total: Sum | None = None
            for _, outcome in sorted(good.items()):
                part = Sum(getattr(outcome.reply, name))
                if total is None:
                    total = part.begun()
                else:
                    total.add(part)
            assert total is not None
            means[name] = total
            whole = [x for x in total.tensors.values() if x.numel()]
            if any(int(x.max()) > HEAVIEST or int(x.min()) < -HEAVIEST for x in whole):
                why = Lost(
                    "the sum makes no sense: one of the hosts sent a part that is none, and under masks nobody knows which"
                )
                return Answers({i: self._outcome(i, spent.error or why) for i, spent in self._spent.items()}, {})
        rests = {i: self.average.rest(o.reply) for i, o in good.items() if o.reply is not None}
        return Answers({i: self._outcome(i, s.error, rests.get(i)) for i, s in self._spent.items()}, means)

    def _outcome(self, i: int, error: BaseException | None, reply: Message | None = None) -> Outcome:
        spent = self._spent[i]
        return Outcome(reply, error, spent.releases, spent.size, spent.fit_seconds, spent.train_samples)
