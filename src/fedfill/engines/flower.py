"""The Flower engine: a real federation, where data stay on other people's hosts.

The server program runs in a Flower ServerApp and calls handlers by named actions, ``train.HANDLER``; each host runs them
in a Flower ClientApp on the data that it names itself. A message crosses as a RecordDict: one array with the tree's
safetensors bytes, and a few words on whose, when and which experiment's it is. Nothing is pickled, everything that
arrives is checked before it is used, and what makes no sense is a lost reply.
"""

from __future__ import annotations

import functools
import hmac
import inspect
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import torch
from filelock import FileLock
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedfill import tree
from fedfill.data.federation import ClientData
from fedfill.data.samples import Samples
from fedfill.engines.contract import Message
from fedfill.engines.exchange import HEAVIEST, Answers, Average, Lost, Outcome, releases_of
from fedfill.engines.host import Host, make_resident
from fedfill.errors import FedfillError
from fedfill.privacy.ledger import Release, unbounded
from fedfill.runs.directory import write_atomically
from fedfill.training.evaluation import Evaluation, divergence, score_all, shares
from fedfill.training.local import Resident
from fedfill.tree import Record, Tree, Weights

__all__ = [
    "ClientApp",
    "Context",
    "FlowerEngine",
    "Grid",
    "ServerApp",
    "Site",
    "client_app",
    "server_app",
]

log = logging.getLogger("fedfill")

PROTOCOL = 1
POLL = 0.2
GRACE = 60.0
"""Seconds beyond a client's own time limit that the server waits: for the host's process to start and for the wire."""
PATIENCE = 3600.0
"""Seconds that a host has for one call where the experiment sets none."""
AGAIN = 60.0
"""Seconds until a refused node is asked again: its people may have mended it, or the node in its place has gone."""
APP_ERRORS = (1, 2)
"""Flower's codes for a host's program that can't be loaded or raises; the others are about nodes and the wire."""
GONE = {
    3: "the message, or the reply to it, is no longer there",
    4: "the reply is no longer there",
    5: "its node is gone, and a reply may lie with it",
}
"""Flower's codes behind which a reply may be that nobody has read, in words that also hold of one that came too late."""
STYPE = "fedfill.safetensors"
STRUCTURE = 2**22
"""Bytes of a message's structure at the most: some twenty thousand tensors, or half a million numbers outside of tensors."""

DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
DTYPES |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
"""What tensors in a message may be."""

HELLO, EVALUATE = "query.hello", "query.evaluate"

UNREAD = (("a reply that could not be read", unbounded("it may have been seen on its way")),)
"""What is released by a reply of which nobody knows what it held."""


class Unread(Lost):
    """A reply that may have left its host, and been seen by others, without having been read here."""


class Mistaken(Lost):
    """A refusal of a message that was meant for another client, or another experiment's."""


class _NotForMe(ValueError):
    """The same on the host's side."""


# What crosses


@dataclass(frozen=True)
class Hello(Message):
    """Host to server: which client it is, and what it runs.

    Attributes:
        client: Its number.
        protocol: Of this module.
        digest: Of the experiment: program version, settings, classes, initial weights and code.
        own_test: Whether it has a test split of its own.
    """

    client: int
    protocol: int
    digest: str
    own_test: bool


@dataclass(frozen=True)
class Evaluate(Message):
    """Server to host: the global weights."""

    weights: Weights


@dataclass(frozen=True)
class Scores(Message):
    """Host to server: how the weights, or its own model, do on its own splits for test and validation.

    Attributes:
        correct: Recognised samples of the test split by class.
        samples: Samples of the test split by class.
        loss: Sum of their losses.
        validated: Recognised samples of the validation split.
        validation: Samples of the validation split.
    """

    correct: list[int]
    samples: list[int]
    loss: float
    validated: int
    validation: int


@dataclass(frozen=True)
class Answer(Record):
    """Host to server: what came of a handler.

    Attributes:
        reply: The answer, or None.
        error: One line in its place.
        releases: What the reply gives away, by field.
        fit_seconds: Seconds in local training.
        train_samples: Samples passed through local training.
        mistaken: Whether the error is that the message was for another client or experiment.
    """

    reply: Message | None = None
    error: str | None = None
    releases: tuple[tuple[str, Release], ...] = ()
    fit_seconds: float = 0.0
    train_samples: int = 0
    mistaken: bool = False


def pack(body: Array, **words: str | int) -> RecordDict:
    """A Flower message's content.

    Args:
        body: From `encode`.
        **words: Beside it.

    Returns:
        The content.
    """
    return RecordDict({"tree": ArrayRecord({"safetensors": body}), "words": ConfigRecord(dict(words))})


def encode(value: Tree) -> Array:
    """A tree as Flower carries it."""
    data = tree.to_bytes(value)
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)


def unpack(content: RecordDict, limit: int) -> tuple[Tree, dict[str, Any]]:
    """What `pack` packed, from anyone.

    Args:
        content: A Flower message's content.
        limit: Bytes at the most.

    Returns:
        The tree and the words beside it.

    Raises:
        ValueError: Where it is larger, or is no such thing.
    """
    try:
        body, words = content.array_records["tree"]["safetensors"], dict(content.config_records["words"])
    except (KeyError, AttributeError, TypeError) as missing:
        raise ValueError(f"malformed message: it has no {missing}") from missing
    if not isinstance(body.data, bytes) or body.stype != STYPE:
        raise ValueError(f"malformed message: its array is of the kind '{body.stype}', not '{STYPE}'")
    if len(body.data) > limit:
        raise ValueError(f"oversized message: {len(body.data):,} bytes, and max-message-bytes is {limit:,}")
    try:
        value = tree.from_bytes(body.data, STRUCTURE)
    except Exception as broken:  # a record's own check may raise anything
        raise ValueError(f"malformed message: {broken}") from broken
    if tree.size(value) > limit:  # one tensor may stand in many places
        raise ValueError(f"oversized message: {tree.size(value):,} bytes unpacked, and max-message-bytes is {limit:,}")
    strange = {tensor.dtype for tensor in tree.tensors(value)} - DTYPES
    if strange:
        raise ValueError(f"malformed message: it holds tensors of the type {strange.pop()}")
    return value, words


def handlers_of(program: Any) -> dict[str, tuple[Any, Any]]:
    """The client handlers of an algorithm: by name, the kinds of message that they take and of reply that they give."""
    found = {}
    for name in dir(type(program)):
        function = inspect.getattr_static(type(program), name)
        if getattr(function, "is_client_handler", False):
            try:
                hints = get_type_hints(function)
            except NameError as unknown:
                raise FedfillError(
                    f"algorithm: the handler '{name}' names a message that can't be found ({unknown}); "
                    "allowed with engine=flower: messages on the top level of a module"
                ) from unknown
            message = [hint for argument, hint in hints.items() if argument not in ("client", "return")]
            found[name] = (message[0] if message else Any, hints.get("return", Any))
    return found


# The server's side


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
    ) -> None:
        self.workers = clients
        own = [name for name, there in (("test", evaluate_clients), ("validation", validate_clients)) if there]
        splits = f"the client's own {' and '.join(own)} split{'s' if len(own) > 1 else ''}, exact"
        if program.personal:
            scores, test = f"accuracy by class and loss of the client's own model on {splits}", test[:0]
        else:
            scores = f"accuracy on {splits}"
        self.evaluation = unbounded(scores) if own else None
        self.evaluated: Sequence[int] = ()
        if not len(test) and not evaluate_clients:
            raise FedfillError(
                "client_test: found 0 on a server without a test set; allowed: more than 0, or a test-data"
            )
        self._grid = grid
        self._clients = clients
        self._classes = classes
        self._test = test.to(device)
        self._device = device
        self._resident = make_resident(template, device)
        self._digest = digest
        self._seconds = GRACE + (PATIENCE if timeout is None else timeout)
        self._limit = limit
        self._kinds = {f"train.{name}": reply for name, (_, reply) in handlers_of(program).items()}
        self._kinds |= {HELLO: Hello, EVALUATE: Scores}
        self._nodes: dict[int, int] = {}  # client -> node
        self._refused: dict[int, tuple[str, float]] = {}  # node -> why, and when
        self._told: set[tuple[int, str]] = set()
        self._asked: dict[str, tuple[int, float]] = {}  # hello -> node, and when
        self._begun: int | None = None
        self.origin = secrets.token_hex(8)
        self._preparations = program.preparations()
        self._tested = False
        self._gather(wait, enough)
        if not len(test) and not self._tested:
            why = "personal models never leave their hosts" if program.personal else "the server has no test set"
            raise FedfillError(
                f"client_test: no host that is there has a test split of its own, and {why}; allowed: data with samples enough "
                "for one on at least one host"
            )

    def call(self, handler: str, messages: Mapping[int, Message], t: int, average: Average | None = None) -> Answers:
        """Run a handler on every host that has a message.

        Args:
            handler: Name of a method of the algorithm.
            messages: By client.
            t: The round.
            average: Ignored: every host's reply comes to the server, which takes the means.

        Returns:
            An outcome for every client.
        """
        bodies: dict[int, Array] = {}  # by identity: one message often goes to everyone
        for message in messages.values():
            if id(message) not in bodies:
                bodies[id(message)] = encode(message)
        words = self._words(t)
        contents = {i: pack(bodies[id(message)], **words, client=i) for i, message in messages.items()}
        replies = self._ask(f"train.{handler}", contents, self._seconds)
        return Answers(self._outcomes({i: replies[i] for i in messages}, f"train.{handler}"))

    def evaluate(self, weights: Weights, t: int) -> Evaluation:
        """Score weights on the server's test set and on the hosts' own splits.

        Args:
            weights: Of the whole model.
            t: The round that is over.

        Returns:
            Accuracies and losses; a host that does not answer has none.

        Raises:
            FedfillError: Where there is nothing to score on.
        """
        scores, diverged = self._scores(weights, t) if self.evaluation is not None else ({}, None)
        by_client = [
            sum(scores[i].correct) / sum(scores[i].samples) if i in scores and any(scores[i].samples) else None
            for i in range(self._clients)
        ]
        held = [
            scores[i].validated / scores[i].validation if i in scores and scores[i].validation else None
            for i in range(self._clients)
        ]
        held = held if any(share is not None for share in held) else []
        if len(self._test):
            self._resident.load(weights)
            scored = score_all(self._resident, self._test)
            by_class = shares(scored.correct, self._test.labels, self._classes)
            accuracy, loss = float(scored.correct.double().mean()), float(scored.losses.double().mean())
            return Evaluation(accuracy, loss, by_class, by_client, held)
        hits = [sum(s.correct[c] for s in scores.values()) for c in range(self._classes)]
        sizes = [sum(s.samples[c] for s in scores.values()) for c in range(self._classes)]
        if not sum(sizes) and diverged is not None:
            raise divergence(t, diverged)
        if not sum(sizes):
            raise FedfillError(
                f"clients: after round {t + 1} no host gave scores on its own test split, and there is no other test set to score on; "
                "finished rounds are kept, and 'fedfill resume' goes on from there"
            )
        by_class = [hit / size if size else None for hit, size in zip(hits, sizes, strict=True)]
        loss = sum(s.loss for s in scores.values()) / sum(sizes)
        return Evaluation(sum(hits) / sum(sizes), loss, by_class, by_client, held)

    def _scores(self, weights: Weights, t: int) -> tuple[dict[int, Scores], float | None]:
        """What the hosts' scores are, and a loss that is none in scores that are plausible otherwise."""
        scores: dict[int, Scores] = {}
        diverged = None
        body = encode(Evaluate(weights))
        self._greet()  # who has come since is asked too
        contents = {i: pack(body, **self._words(t), client=i) for i in self._nodes}
        outcomes = self._outcomes(self._ask(EVALUATE, contents, self._seconds), EVALUATE)
        self.evaluated = [i for i, outcome in outcomes.items() if outcome.reply is not None or outcome.releases]
        for i, outcome in outcomes.items():
            told = outcome.reply
            if isinstance(told, Scores) and self._plausible(told):
                scores[i] = told
                continue
            log.warning("client %d gave no scores: %s", i, outcome.error or "its scores make no sense")
            if isinstance(told, Scores) and not told.loss <= HEAVIEST and self._plausible(replace(told, loss=0.0)):
                diverged = told.loss
        return scores, diverged

    def states(self) -> dict[int, Tree]:
        """Nothing: states lie with the hosts, each with the one from before the round that is under way."""
        return {}

    def restore(self, states: Mapping[int, Tree]) -> None:
        """Nothing to do: a host goes back to where the checkpoint was when the round is asked for again.

        Args:
            states: Of no client.
        """

    def close(self) -> None:
        """Nothing to do: Flower closes the grid."""

    def _words(self, t: int) -> dict[str, str | int]:
        """What stands beside each message of a round: hosts find by it the state that the server means."""
        t += self._preparations  # on the wire the steps before the first round count as rounds
        self._begun = t if self._begun is None else self._begun
        return {"digest": self._digest, "round": t, "begun": self._begun, "origin": self.origin}

    def _plausible(self, scores: Scores) -> bool:
        return (
            len(scores.correct) == len(scores.samples) == self._classes
            and all(0 <= hit <= size <= HEAVIEST for hit, size in zip(scores.correct, scores.samples, strict=True))
            and 0 <= scores.loss <= HEAVIEST
            and 0 <= scores.validated <= scores.validation <= HEAVIEST
        )

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
            code = reply.error.code
            if code in GONE:
                return Outcome(error=Unread(f"Flower error {code}: {GONE[code]}"), releases=UNREAD)
            return Outcome(error=Lost(f"Flower error {code}: {_line(reply.error.reason)}"))
        try:
            answer = unpack(reply.content, self._limit)[0]
            tree.validated(answer, Answer)
            if answer.reply is not None:
                tree.validated(answer.reply, self._kinds[action])
                kind = type(answer.reply).__name__
                # every field is a release, whatever the host says of it
                told = {name.removeprefix(f"{kind}."): release for name, release in answer.releases}
                known = {item.name for item in fields(answer.reply)}
                releases = tuple(releases_of(answer.reply, {k: v for k, v in told.items() if k in known}))
                value = tree.to(answer.reply, self._device)
        except Exception as broken:  # whatever bytes from elsewhere may bring about is their sender's loss alone
            return Outcome(error=Unread(_line(str(broken))), releases=UNREAD)
        if answer.mistaken:
            return Outcome(error=Mistaken(_line(answer.error)))
        if answer.reply is None:
            return Outcome(error=Lost(_line(answer.error) or "the host gave neither a reply nor an error"))
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
        away: dict[int, Envelope | Lost] = {i: Lost("its host is not there") for i in contents if i not in there}
        return away | self._exchange(action, there, seconds)

    def _exchange(
        self, action: str, contents: Mapping[int, tuple[int, RecordDict]], seconds: float
    ) -> dict[int, Envelope | Lost]:
        """Send to nodes and wait for the replies; Flower's own wait would look every three seconds only."""
        keys = list(contents)
        # it is Flower that forgets a late reply, and not before this server has given it up
        envelopes = [Envelope(contents[k][1], contents[k][0], action, ttl=seconds + GRACE) for k in keys]
        ids = list(self._grid.push_messages(envelopes))
        waiting = {name: k for name, k in zip(ids, keys, strict=False) if name}
        replies: dict[int, Envelope | Lost] = {}
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            for name in list(waiting):
                reply = self._pull(name)
                if reply is not None:
                    replies[waiting.pop(name)] = reply
            if waiting:
                time.sleep(POLL)
        late = Unread(f"no answer within {seconds:g} s")
        unsent = Lost("its message could not be sent")
        return {k: replies.get(k, late if k in waiting.values() else unsent) for k in keys}

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
            return Unread(f"malformed message: {_line(str(unreadable))}")


def _line(text: str | None) -> str:
    """The first line of a text from elsewhere, of a length that a record bears."""
    lines = (text or "").strip().splitlines()
    return "".join(c for c in lines[0] if c.isprintable())[:300] if lines else ""


# The host's side


@dataclass(frozen=True)
class Site:
    """What a host brings.

    Attributes:
        client: Its number.
        data: Its samples.
        program: The algorithm.
        template: The model.
        initial: The experiment's initial weights.
        classes: Number of classes of the task.
        seed: Of the experiment.
        digest: Of the experiment.
        device: Where data and models live.
        folder: Where its state lies.
        timeout: Seconds for one call, or None.
        secret: Whether noise comes from a key that only this host has, and not from the seed.
        limit: Bytes of a message at the most.
    """

    client: int
    data: ClientData
    program: Any
    template: nn.Module
    initial: Weights
    classes: int
    seed: int
    digest: str
    device: torch.device
    folder: Path
    timeout: float | None
    secret: bool
    limit: int


@dataclass(frozen=True)
class Kept(Record):
    """A client's state on its host's disk.

    Attributes:
        run: The Flower run that wrote it last.
        round: The last round in which a handler ran; the steps before the first round count as rounds here.
        before: The state as that round found it.
        now: The state since.
        origin: Names what that run began, or went on with: a Flower run is a new one at each resume.
    """

    run: str
    round: int
    before: Tree
    now: Tree
    origin: str = ""


def client_app(program: Any, arrive: Callable[[Context], Site]) -> ClientApp:
    """A ClientApp with one named action for each handler of an algorithm.

    Args:
        program: The algorithm.
        arrive: Makes the host's part from Flower's context; called at the first message of a process.

    Returns:
        The app.
    """
    app = ClientApp()
    offices: dict[tuple[int, int], _Office] = {}  # one at a time: a host's process serves one node of one run

    def office_for(context: Context) -> _Office:
        key = (context.run_id, context.node_id)
        if key not in offices:
            offices.clear()
            offices[key] = _Office(arrive(context))
        return offices[key]

    def action(serve: Callable[[_Office, Tree, dict[str, Any]], Answer], name: str) -> Callable[..., Envelope]:
        def act(message: Envelope, context: Context) -> Envelope:
            try:
                office = office_for(context)
                value, words = unpack(message.content, office.site.limit)
                if words.get("digest") != office.site.digest and name != HELLO:
                    raise _NotForMe("the message is another experiment's")
                answer = serve(office, value, {**words, "run": str(context.run_id)})
            # SystemExit too: without a reply Flower waits for a minute
            except (ValueError, OSError, FedfillError, SystemExit) as refused:
                log.warning("refused '%s': %s", name, _line(str(refused)))
                answer = Answer(error=_line(str(refused)), mistaken=isinstance(refused, _NotForMe))
            return Envelope(pack(encode(answer)), reply_to=message)

        return act

    for handler, (kind, _) in handlers_of(program).items():
        app.train(handler)(action(functools.partial(_run, handler, kind), f"train.{handler}"))
    app.query("hello")(action(_say_hello, HELLO))
    app.query("evaluate")(action(_score, EVALUATE))
    return app


def server_app(main: Callable[[Grid, Context], None]) -> ServerApp:
    """A ServerApp that runs `main`."""
    app = ServerApp()
    app.main()(main)
    return app


class _Office:
    """A host's part, for as long as its process lives: mostly for one message. What is not asked for is not made."""

    def __init__(self, site: Site) -> None:
        torch.set_num_threads(1)
        self.site = site

    @functools.cached_property
    def resident(self) -> Resident:
        """The host's model."""
        return make_resident(self.site.template, self.site.device)

    @functools.cached_property
    def train(self) -> Samples:
        """Its labelled training samples."""
        return self.site.data.train.to(self.site.device)

    @functools.cached_property
    def unlabelled(self) -> Samples:
        """Its samples without labels."""
        return self.site.data.unlabelled.to(self.site.device)

    @functools.cached_property
    def host(self) -> Host:
        """Runs its handlers."""
        site = self.site
        return Host(
            site.program, classes=site.classes, initial=site.initial, seed=site.seed, device=site.device,
            timeout=PATIENCE if site.timeout is None else site.timeout,
            secret=_key(site.folder / "noise.key", site.digest) if site.secret else None,
        )  # fmt: skip

    @property
    def path(self) -> Path:
        return self.site.folder / f"client-{self.site.client}-{self.site.digest}.safetensors"

    def kept(self) -> Kept | None:
        """The state on disk, or None."""
        if not self.path.exists():
            return None
        try:
            kept = tree.from_bytes(self.path.read_bytes())
            tree.validated(kept, Kept)
        except (OSError, ValueError) as damaged:
            raise FedfillError(f"state-dir: {self.path} can't be read ({_line(str(damaged))})") from damaged
        return kept  # type: ignore[no-any-return]


def _key(path: Path, digest: str) -> bytes:
    """The host's key for its noise in one experiment, from its own, which is made at first use; nobody else may ever read it."""
    if not path.exists():
        write_atomically(path, secrets.token_bytes(32), mode=0o600)
    return hmac.digest(path.read_bytes(), digest.encode(), "sha256")


def _run(handler: str, kind: Any, office: _Office, message: Tree, words: dict[str, Any]) -> Answer:
    """Run a handler and commit the state, on disk, before the reply is sent."""
    site = office.site
    _check_client(site, words)
    t = _round(words)
    tree.validated(message, kind)
    message = tree.to(message, site.device)
    office.path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(office.path.with_suffix(".lock")):
        kept, run = office.kept(), words["run"]
        state, before = _stored(kept, run, t, words.get("begun"), words.get("origin"))
        anew = kept is not None and kept.run != run
        state = tree.to(state, site.device)
        outcome, new = office.host.serve(
            office.resident, handler, site.client, office.train, office.unlabelled, state, message,
            t - site.program.preparations(),
        )  # fmt: skip
        office.host.check(handler)
        if outcome.error is not None:
            log.warning("'%s' failed", handler, exc_info=outcome.error)
        if outcome.error is None or anew:
            write_atomically(
                office.path, tree.to_bytes(Kept(run, t, before, new or state, words["origin"])), mode=0o600
            )
    if outcome.error is not None:
        error = outcome.error
        text = str(error) if isinstance(error, Lost | FedfillError) else f"{type(error).__name__}: {error}"
        return Answer(error=_line(text), fit_seconds=outcome.fit_seconds, train_samples=outcome.train_samples)
    return Answer(outcome.reply, None, outcome.releases, outcome.fit_seconds, outcome.train_samples)


def _check_client(site: Site, words: dict[str, Any]) -> None:
    if words.get("client") != site.client:
        raise _NotForMe(f"the message is for client {words.get('client')!r}, and this is client {site.client}")


def _round(words: dict[str, Any]) -> int:
    t = words.get("round")
    if not isinstance(t, int) or t < 0:
        raise ValueError(f"malformed message: round {t!r}")
    return t


def _stored(kept: Kept | None, run: str, t: int, begun: Any, origin: Any) -> tuple[Tree, Tree]:
    """The state to go on with in round `t` of a server's run that began with round `begun`, and the one that `t` began with.

    A server that was killed begins its last round anew, and so does the client, whether or not it is called in it again. What
    is left of the same experiment in another run directory is another origin's, and no state of this one.
    """
    if not isinstance(origin, str):
        raise ValueError(f"malformed message: origin {origin!r}")
    if not isinstance(begun, int) or not 0 <= begun <= t:
        raise ValueError(f"malformed message: begun {begun!r}")
    if kept is not None and kept.origin != origin and begun:
        log.warning(
            "what lies here is another run's: this client goes on in round %d as one that never took part", t + 1
        )
    if kept is None or kept.origin != origin or (kept.run != run and not begun):
        return None, None
    if kept.run != run and kept.round == begun:
        return kept.before, kept.before
    if kept.round > (t if kept.run == run else begun):
        raise ValueError(
            f"the server asks for round {t + 1}, and this client has been in round {kept.round + 1}; "
            "what it had before is gone"
        )
    return kept.now, kept.before if kept.run == run and kept.round == t else kept.now


def _say_hello(office: _Office, message: Tree, words: dict[str, Any]) -> Answer:
    """Say who this is."""
    return Answer(Hello(office.site.client, PROTOCOL, office.site.digest, len(office.site.data.test) > 0))


def _score(office: _Office, message: Tree, words: dict[str, Any]) -> Answer:
    """Score weights on the host's own splits, or the client's own model, which never leaves it."""
    tree.validated(message, Evaluate)
    site = office.site
    _check_client(site, words)
    own, held = site.data.test.to(site.device), site.data.validation.to(site.device)
    weights = tree.to(message.weights, site.device)
    if site.program.personal:
        state, _ = _stored(office.kept(), words["run"], _round(words), words.get("begun"), words.get("origin"))
        weights = site.program.personal_weights(tree.to(state or {}, site.device), weights)
    office.resident.load(weights)
    correct = [0] * site.classes
    loss = 0.0
    if len(own):
        scored = score_all(office.resident, own)
        correct = torch.bincount(own.labels, weights=scored.correct.double(), minlength=site.classes).long().tolist()
        loss = float(scored.losses.double().sum())
    validated = int(score_all(office.resident, held).correct.sum())
    return Answer(Scores(correct, own.counts(site.classes), loss, validated, len(held)))
