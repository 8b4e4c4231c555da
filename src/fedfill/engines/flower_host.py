"""The host's side of a Flower federation: a ClientApp that runs the handlers on the data that the host names itself."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from flwr.app import Context
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp
from torch import nn

from fedfill import tree
from fedfill.data.federation import ClientData
from fedfill.data.samples import Samples
from fedfill.data.schema import Schema
from fedfill.engines.flower_keys import NO_KEYS, hidden, promise, question_of, redeemed, state_name
from fedfill.engines.flower_messages import (
    EVALUATE,
    HELLO,
    PATIENCE,
    PROTOCOL,
    SUM_KEY,
    Answer,
    AskKey,
    Evaluate,
    GivenKey,
    Hello,
    Hidden,
    encode,
    first_line,
    handlers_of,
    pack,
    unpack,
)
from fedfill.engines.flower_scores import kind_of
from fedfill.engines.runner import ClientRunner, make_resident
from fedfill.errors import FedfillError
from fedfill.privacy.masking import Occasion, Parties
from fedfill.privacy.sums import MASKED
from fedfill.protocol.messages import Lost
from fedfill.runs.directory import noise_key, write_atomically
from fedfill.training.fit import Resident
from fedfill.training.precision import Precision
from fedfill.tree import Record, Tree, Weights

__all__ = ["ClientApp", "Context", "Site", "client_app"]

log = logging.getLogger("fedfill")


class _NotForMe(ValueError):
    """A message for another client, or another experiment's."""


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
        parties: Keys of all hosts, for sums whose parts nobody may see; None: this one takes no part in them.
        precision: Of local trainings.
        schema: What all agreed on about a table; None: nothing was.
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
    parties: Parties | None = None
    precision: Precision = "float32"
    schema: Schema | None = None


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
                log.warning("refused '%s': %s", name, first_line(str(refused)))
                answer = Answer(error=first_line(str(refused)), mistaken=isinstance(refused, _NotForMe))
            return Envelope(pack(encode(answer)), reply_to=message)

        return act

    for handler, (kind, _) in handlers_of(program).items():
        app.train(handler)(action(functools.partial(_run, handler, kind), f"train.{handler}"))
    app.query("hello")(action(_say_hello, HELLO))
    app.query("evaluate")(action(_score, EVALUATE))
    app.query("sum_key")(action(_give_key, SUM_KEY))
    return app


class _Office:
    """A host's part, for as long as its process lives: mostly for one message. What is not asked for is not made."""

    def __init__(self, site: Site) -> None:
        torch.set_num_threads(1)
        self.site = site

    @functools.cached_property
    def resident(self) -> Resident:
        """The host's model."""
        return make_resident(self.site.template, self.site.device, self.site.precision)

    @functools.cached_property
    def train(self) -> Samples:
        """Its labelled training samples."""
        return self.site.data.train.to(self.site.device)

    @functools.cached_property
    def unlabelled(self) -> Samples:
        """Its samples without labels."""
        return self.site.data.unlabelled.to(self.site.device)

    @functools.cached_property
    def runner(self) -> ClientRunner:
        """Runs its handlers."""
        site = self.site
        return ClientRunner(
            site.program, classes=site.classes, initial=site.initial, seed=site.seed, device=site.device,
            timeout=PATIENCE if site.timeout is None else site.timeout,
            secret=self.noise_key,
            schema=site.schema,
            hides="",  # Flower's server receives each host's reply, but for those under masks
        )  # fmt: skip

    @property
    def noise_key(self) -> bytes | None:
        """The host's key for noise; None: noise comes from the seed."""
        return noise_key(self.site.folder / "noise.key", self.site.digest) if self.site.secret else None

    @property
    def key_path(self) -> Path:
        """Where the secret part of a key for one sum lies until it is used."""
        return self.path.with_suffix(".sum_key")

    def state_name(self, occasion: Occasion, state: Tree) -> str:
        """A keyed hash of all that an answer is made of: its circle draws other noise where it is another."""
        made_of = {"data": self.train, "unlabelled": self.unlabelled, "state": state}
        return state_name(self.noise_key, occasion, made_of)

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
            raise FedfillError(f"state-dir: {self.path} can't be read ({first_line(str(damaged))})") from damaged
        return kept  # type: ignore[no-any-return]


def _run(handler: str, kind: Any, office: _Office, message: Tree, words: dict[str, Any]) -> Answer:
    """Run a handler and commit the state, on disk, before the reply is sent."""
    site = office.site
    _check_client(site, words)
    t = _round(words)
    circle, asked = (message.circle, message.message) if isinstance(message, Hidden) else ([], message)
    tree.validated(asked, kind)
    message = tree.to(asked, site.device)
    office.path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(office.path.with_suffix(".lock")):
        pending = None
        if circle:
            if site.parties is None:
                raise ValueError(NO_KEYS)
            occasion = Occasion(site.digest, handler, t, question_of(asked))
            pending = redeemed(office.key_path, occasion, circle, site.parties)
        kept, run = office.kept(), words["run"]
        state, before = _stored(kept, run, t, words.get("begun"), words.get("origin"))
        anew = kept is not None and kept.run != run
        if pending is not None and office.state_name(pending.occasion, state) != pending.key.state:
            raise ValueError("what this client's answer is made of has changed since it gave its key")
        if state and (missing := sorted(site.program.client_state().keys() - state.keys())):
            raise FedfillError(f"state-dir: {office.path} has no '{missing[0]}': another state of fedfill wrote it")
        state = tree.to(state, site.device)
        outcome, new = office.runner.serve(
            office.resident, handler, site.client, office.train, office.unlabelled, state, message,
            t - site.program.pretraining_steps(),
            MASKED if circle else "", [f"{key.client} {key.state}" for key in circle],
            None if site.parties is None else len(site.parties.all),
        )  # fmt: skip
        if pending is not None and outcome.reply is not None:
            outcome = replace(outcome, reply=hidden(outcome.reply, pending, circle))
        office.runner.check(handler)
        if outcome.error is not None:
            log.warning("'%s' failed", handler, exc_info=outcome.error)
        if outcome.error is None or anew:
            write_atomically(
                office.path, tree.to_bytes(Kept(run, t, before, new or state, words["origin"])), mode=0o600
            )
    if outcome.error is not None:
        error = outcome.error
        text = str(error) if isinstance(error, Lost | FedfillError) else f"{type(error).__name__}: {error}"
        return Answer(error=first_line(text), fit_seconds=outcome.fit_seconds, train_samples=outcome.train_samples)
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


def _give_key(office: _Office, message: Tree, words: dict[str, Any]) -> Answer:
    """Make a key for one sum."""
    tree.validated(message, AskKey)
    site, t = office.site, _round(words)
    _check_client(site, words)
    if site.parties is None:
        raise ValueError(NO_KEYS)
    office.path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(office.path.with_suffix(".lock")):
        state, _ = _stored(office.kept(), words["run"], t, words.get("begun"), words.get("origin"))
        occasion = Occasion(site.digest, message.handler, t, message.question)
        name = office.state_name(occasion, state)
        return Answer(GivenKey(promise(office.key_path, occasion, site.client, site.parties, name)))


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
    kind = kind_of(own, 0 if site.schema is None else len(site.schema.target.grid))
    return Answer(kind.of(office.resident, own, held, site.classes))
