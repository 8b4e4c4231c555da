"""The Flower engine: a real federation, where data stay on other people's hosts.

The server program runs in a Flower ServerApp and calls handlers by named actions, ``train.HANDLER``; each host runs them
in a Flower ClientApp (`fedfill.engines.flower_host`). What arrives is checked before it is used
(`fedfill.engines.flower_messages`), and what makes no sense is a lost reply.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import httpx
import torch
from flwr.app import Array, Context, RecordDict
from flwr.app import Message as Envelope
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedfill import tree
from fedfill.data.samples import Samples
from fedfill.engines.flower_messages import (
    APP_ERRORS,
    EVALUATE,
    GONE,
    HELLO,
    PATIENCE,
    PROTOCOL,
    SUM_KEY,
    UNREAD,
    Answer,
    Evaluate,
    GivenKey,
    Hello,
    Mistaken,
    Unread,
    encode,
    first_line,
    handlers_of,
    pack,
    unpack,
)
from fedfill.engines.flower_scores import AnyScores, kind_of, lossless
from fedfill.engines.flower_sums import MaskedSum
from fedfill.engines.runner import make_resident
from fedfill.errors import FedfillError
from fedfill.privacy.releases import unbounded
from fedfill.protocol.messages import HEAVIEST, Answers, Average, Lost, Message, Outcome, releases_of
from fedfill.training.evaluation import Evaluation, Splits, divergence, gather, score_all
from fedfill.tree import Record, Tree, Weights

__all__ = ["Context", "FlowerEngine", "Grid", "ServerApp", "server_app"]

log = logging.getLogger("fedfill")

POLL = 0.2
GRACE = 60.0
"""Seconds beyond a client's own time limit that the server waits: for the host's process to start and for the wire."""
AGAIN = 60.0
"""Seconds until a refused node is asked again: its people may have mended it, or the node in its place has gone."""


def server_app(main: Callable[[Grid, Context], None]) -> ServerApp:
    """A ServerApp that runs `main`."""
    app = ServerApp()
    app.main()(main)
    return app


class FlowerEngine:
    """Calls handlers on the hosts of a Flower federation.

    Args:
        grid: Flower's way to the hosts.
        program: The algorithm.
        clients: How many hosts there are.
        classes: Number of classes of the task.
        test: The server's test set; where it is empty, and for personal models, which the server never sees, the hosts' own
            test splits stand in.
        template: The model, for the evaluation on the test set.
        digest: Of the experiment; a host with another one is not called.
        device: Where the test set lives.
        timeout: Seconds that a host has for one call; None: `PATIENCE`. `GRACE` more may pass on the way.
        evaluate_clients: Whether hosts have test splits of their own.
        validate_clients: Whether hosts have validation splits.
        limit: Bytes of a reply at the most.
        wait: Seconds to wait for all hosts at the start.
        enough: So many hosts will do once that time is over.
        times: Where labels are cells of a time to an event, the number of the grid's times; else 0.
    """

    def __init__(
        self,
        grid: Grid,
        program: Any,
        *,
        clients: int,
        classes: int,
        test: Samples,
        template: nn.Module,
        digest: str,
        device: torch.device,
        timeout: float | None = None,
        evaluate_clients: bool = True,
        validate_clients: bool = False,
        limit: int = 2**30,
        wait: float = 300.0,
        enough: int = 1,
        times: int = 0,
    ) -> None:
        self.workers = clients
        self._judged = bool(getattr(program, "trains", True))
        evaluate_clients, validate_clients = evaluate_clients and self._judged, validate_clients and self._judged
        own = [name for name, there in (("test", evaluate_clients), ("validation", validate_clients)) if there]
        splits = f"the client's own {' and '.join(own)} split{'s' if len(own) > 1 else ''}, exact"
        if times:
            scores = f"numbers of pairs of rows that a model ranks right, and loss, on {splits}"
        elif program.personal:
            scores = f"accuracy by class and loss of the client's own model on {splits}"
        else:
            scores = f"accuracy on {splits}"
        test = test[:0] if program.personal else test
        self.evaluation = unbounded(scores) if own else None
        self.evaluated: Sequence[int] = ()
        if not len(test) and not evaluate_clients and self._judged:
            raise FedfillError(
                "client_test: found 0 on a server without a test set; allowed: more than 0, or a test-data"
            )
        self._grid = grid
        self._clients = clients
        self._classes = classes
        self._times = times
        self._test = test.to(device)
        self._device = device
        self._resident = make_resident(template, device)
        self._digest = digest
        self._seconds = GRACE + (PATIENCE if timeout is None else timeout)
        self._limit = limit
        self._kinds = {f"train.{name}": reply for name, (_, reply) in handlers_of(program).items()}
        self._kinds |= {HELLO: Hello, EVALUATE: kind_of(test, times), SUM_KEY: GivenKey}
        self._nodes: dict[int, int] = {}  # client -> node
        self._refused: dict[int, tuple[str, float]] = {}  # node -> why, and when
        self._told: set[tuple[int, str]] = set()
        self._asked: dict[str, tuple[int, float]] = {}  # hello -> node, and when
        self._begun: int | None = None
        self.origin = secrets.token_hex(8)
        self._pretraining_steps = program.pretraining_steps()
        self._tested = False
        self._gather(wait, enough)
        if not len(test) and not self._tested and self._judged:
            why = "personal models never leave their hosts" if program.personal else "the server has no test set"
            raise FedfillError(
                f"client_test: no host that is there has a test split of its own, and {why}; allowed: data with samples enough "
                "for one on at least one host"
            )

    def call(self, handler: str, messages: Mapping[int, Message], t: int, average: Average | None = None) -> Answers:
        """Run a handler on every host that has a message."""
        if average is not None and average.least and messages:
            ask_parts = partial(self._ask_all, f"train.{handler}", t)
            return MaskedSum(handler, partial(self._ask_all, SUM_KEY, t), ask_parts, average).call(messages)
        bodies: dict[int, Array] = {}  # by identity: one message often goes to everyone
        for message in messages.values():
            if id(message) not in bodies:
                bodies[id(message)] = encode(message)
        words = self._words(t)
        contents = {i: pack(bodies[id(message)], **words, client=i) for i, message in messages.items()}
        replies = self._ask(f"train.{handler}", contents, self._seconds)
        return Answers(self._outcomes({i: replies[i] for i in messages}, f"train.{handler}"))

    def _ask_all(self, action: str, t: int, clients: Sequence[int], message: Message | Record) -> dict[int, Outcome]:
        """What comes of one message to clients."""
        body, words = encode(message), self._words(t)
        contents = {i: pack(body, **words, client=i) for i in clients}
        return self._outcomes(self._ask(action, contents, self._seconds), action)

    def evaluate(self, weights: Weights, t: int) -> Evaluation:
        """Score weights on the server's test set and on the hosts' own splits."""
        scores, diverged = self._scores(weights, t) if self.evaluation is not None else ({}, None)
        told = [scores.get(i) for i in range(self._clients)]
        by_client = [None if one is None else one.own for one in told]
        held = [None if one is None else one.held for one in told]
        held = held if any(share is not None for share in held) else []
        if len(self._test):
            self._resident.load(weights)
            nobody = self._test[:0]
            scored, none = (score_all(self._resident, part, self._times) for part in (self._test, nobody))
            splits = Splits(self._test, nobody, nobody, (0,) * self._clients, (0,) * self._clients, self._times)
            found = gather([scored, none], splits, self._classes)
        elif (pooled := self._kinds[EVALUATE].together(scores)) is None:
            if diverged is not None:
                raise divergence(t, diverged)
            raise FedfillError(
                f"clients: after round {t + 1} no host gave scores on its own test split, and there is no other test set to score on; "
                "finished rounds are kept, and 'fedfill resume' goes on from there"
            )
        else:
            found = pooled
        return replace(found, accuracy_by_client=by_client, validation_by_client=held)

    def _scores(self, weights: Weights, t: int) -> tuple[dict[int, Any], float | None]:
        """What the hosts' scores are, and a loss that is none in scores that are plausible otherwise."""
        scores: dict[int, Any] = {}
        diverged = None
        body = encode(Evaluate(weights))
        self._greet()  # who has come since is asked too
        contents = {i: pack(body, **self._words(t), client=i) for i in self._nodes}
        outcomes = self._outcomes(self._ask(EVALUATE, contents, self._seconds), EVALUATE)
        self.evaluated = [i for i, outcome in outcomes.items() if outcome.reply is not None or outcome.releases]
        for i, outcome in outcomes.items():
            told = outcome.reply
            if isinstance(told, AnyScores) and told.plausible(self._classes):
                scores[i] = told
                continue
            log.warning("client %d gave no scores: %s", i, outcome.error or "its scores make no sense")
            if not isinstance(told, AnyScores) or told.loss <= HEAVIEST:
                continue
            if lossless(told).plausible(self._classes):
                diverged = told.loss
        return scores, diverged

    def states(self) -> dict[int, Tree]:
        """Nothing: states lie with the hosts, each with the one from before the round that is under way."""
        return {}

    def restore(self, states: Mapping[int, Tree]) -> None:
        """Nothing to do: a host goes back to where the checkpoint was when the round is asked for again."""

    def close(self) -> None:
        """Nothing to do: Flower closes the grid."""

    def _words(self, t: int) -> dict[str, str | int]:
        """What stands beside each message of a round: hosts find by it the state that the server means."""
        t += self._pretraining_steps  # on the wire the steps before the first round count as rounds
        self._begun = t if self._begun is None else self._begun
        return {"digest": self._digest, "round": t, "begun": self._begun, "origin": self.origin}

    def _outcomes(self, replies: Mapping[int, Envelope | Lost], action: str) -> dict[int, Outcome]:
        """What came of the messages to clients; a node that turns out to be another client is asked anew who it is."""
        outcomes = {i: self._outcome(reply, action) for i, reply in replies.items()}
        for i, outcome in outcomes.items():
            if isinstance(outcome.error, Mistaken):
                self._nodes.pop(i, None)
        return outcomes

    def _outcome(self, reply: Envelope | Lost, action: str) -> Outcome:
        if isinstance(reply, Lost):
            return Outcome(error=reply, releases=UNREAD if isinstance(reply, Unread) else ())
        if reply.has_error():
            if (code := reply.error.code) in GONE:
                return Outcome(error=Unread(f"Flower error {code}: {GONE[code]}"), releases=UNREAD)
            return Outcome(error=Lost(f"Flower error {code}: {first_line(reply.error.reason)}"))
        try:
            answer = unpack(reply.content, self._limit)[0]
            tree.validated(answer, Answer)
            if answer.reply is not None:
                tree.validated(answer.reply, self._kinds[action])
                kind = type(answer.reply).__name__
                # every field is a release, whatever the host says of it
                told = {name.removeprefix(f"{kind}."): release for name, release in answer.releases}
                known = {item.name for item in fields(answer.reply)}
                releases = tuple(releases_of(answer.reply, {k: v for k, v in told.items() if k.split(".")[0] in known}))
                value = tree.to(answer.reply, self._device)
        except Exception as broken:  # whatever bytes from elsewhere may bring about is their sender's loss alone
            return Outcome(error=Unread(first_line(str(broken))), releases=UNREAD)
        if answer.mistaken:
            return Outcome(error=Mistaken(first_line(answer.error)))
        if answer.reply is None:
            return Outcome(error=Lost(first_line(answer.error) or "the host gave neither a reply nor an error"))
        seconds = answer.fit_seconds if 0 <= answer.fit_seconds <= self._seconds else 0.0
        samples = answer.train_samples if 0 <= answer.train_samples <= HEAVIEST else 0
        return Outcome(value, None, releases, tree.size(value), seconds, samples)

    def _gather(self, wait: float, enough: int) -> None:
        """Wait until all hosts are there, or enough of them and the time is over."""
        end = time.monotonic() + wait
        while True:
            self._greet()
            if len(self._nodes) == self._clients:
                return
            if time.monotonic() > end:
                break
            time.sleep(POLL)
        if len(self._nodes) < max(1, enough):
            why = f" ({len(self._refused)} refused: {next(iter(self._refused.values()))[0]})" if self._refused else ""
            raise FedfillError(
                f"clients: {len(self._nodes)} of {self._clients} hosts were there after {wait:g} s{why}, and at least "
                f"{max(1, enough)} must be"
            )
        log.warning("%d of %d hosts are there; the others may still come", len(self._nodes), self._clients)

    def _greet(self) -> None:
        """Ask nodes that are new who they are, without waiting for them, hear those that answered, forget who is gone."""
        online, now = set(self._grid.get_node_ids()), time.monotonic()
        self._nodes = {i: node for i, node in self._nodes.items() if node in online}
        self._refused = {n: (why, at) for n, (why, at) in self._refused.items() if n in online and now < at + AGAIN}
        asked = {node for node, _ in self._asked.values()}
        strangers = sorted(online - set(self._nodes.values()) - self._refused.keys() - asked)
        if strangers:
            content = pack(encode(None), digest=self._digest, round=0, client=-1)
            hellos = [Envelope(content, node, HELLO, ttl=2 * GRACE) for node in strangers]
            names = zip(self._grid.push_messages(hellos), strangers, strict=False)
            self._asked |= {name: (node, now) for name, node in names if name}
        for name, (node, since) in list(self._asked.items()):
            reply = self._pull(name)
            if reply is None and node in online and now < since + 2 * GRACE:
                continue
            del self._asked[name]
            self._meet(node, reply if reply is not None else Lost("no answer"))

    def _meet(self, node: int, reply: Envelope | Lost) -> None:
        """A node has said who it is, or has not."""
        outcome = self._outcome(reply, HELLO)
        problem = str(outcome.error) if outcome.error is not None else self._problem(outcome.reply)
        if problem is None:
            self._nodes[outcome.reply.client] = node  # type: ignore[union-attr]
            self._tested |= outcome.reply.own_test  # type: ignore[union-attr]
            return
        if isinstance(reply, Lost) or (reply.has_error() and reply.error.code not in APP_ERRORS):
            problem = f"did not say who it is: {problem}"  # it is asked again at once
        else:
            self._refused[node] = (problem, time.monotonic())
            problem = f"is refused: {problem}"
        if (node, problem) not in self._told:
            log.warning("node %d %s", node, problem)
        self._told.add((node, problem))

    def _problem(self, hello: Any) -> str | None:
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
            return "it runs another release of fedfill"
        if hello.digest != self._digest:
            return "it runs another experiment or release, or its initial weights are others"
        if not 0 <= hello.client < self._clients:
            return f"its client number is {hello.client}; allowed: 0 to {self._clients - 1}"
        if hello.client in self._nodes:
            return f"another node is client {hello.client} already"
        return None

    def _ask(self, action: str, contents: Mapping[int, RecordDict], seconds: float) -> dict[int, Envelope | Lost]:
        """Send to clients; one that has no node is lost at once."""
        self._greet()
        there = {i: (self._nodes[i], content) for i, content in contents.items() if i in self._nodes}
        replies = self._exchange(action, there, seconds)
        return {i: replies[i] if i in there else Lost("its host is not there") for i in contents}

    def _exchange(
        self, action: str, contents: Mapping[int, tuple[int, RecordDict]], seconds: float
    ) -> dict[int, Envelope | Lost]:
        """Send to nodes and wait for the replies; Flower's own wait would look every three seconds only."""
        keys = list(contents)
        # Flower forgets a late reply, and not before this server has given it up
        envelopes = [Envelope(contents[k][1], contents[k][0], action, ttl=seconds + GRACE) for k in keys]
        ids = zip(self._grid.push_messages(envelopes), keys, strict=False)
        waiting = {name: k for name, k in ids if name}
        replies, end = dict[int, Envelope | Lost](), time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            for name in list(waiting):
                if (reply := self._pull(name)) is not None:
                    replies[waiting.pop(name)] = reply
            if waiting:
                time.sleep(POLL)
        late, lost = Unread(f"no answer within {seconds:g} s"), Lost("its message could not be sent")
        return {k: replies.get(k, late if k in waiting.values() else lost) for k in keys}

    def _pull(self, name: str) -> Envelope | Lost | None:
        """The reply to a message, or None as long as there is none.

        One at a time: a reply that Flower itself can't read is then its sender's loss alone. It is never asked for again,
        since Flower forgets what it has given out.
        """
        try:
            return next(iter(self._grid.pull_messages([name])), None)
        except httpx.HTTPError:  # the SuperLink is gone: that ends the run
            raise
        except Exception as unreadable:
            return Unread(f"malformed message: {first_line(str(unreadable))}")
