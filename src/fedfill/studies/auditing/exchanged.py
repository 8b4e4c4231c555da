"""Releases without a guarantee, made again with one record of the client exchanged for another of its class: does that show?

The attacker knows all other records, and what else may stand in the record's place. What it can't know is the randomness of the
release. Nothing here knows an algorithm. Real records stand in for each other, and no canaries: this says what is told of such
records, and proves no bound.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedfill import tree
from fedfill.data.samples import Samples
from fedfill.privacy.bounds import Floats
from fedfill.privacy.risk import wilson
from fedfill.privacy.scores import advantage
from fedfill.protocol.messages import Message
from fedfill.streams import derive, numpy_stream
from fedfill.studies.auditing.replays import Call, Replayer, numbers_of, value_of

MOST = 400
"""Of the client's records so many are there at the most: enough for any mean, and quickly read."""
TRIED, CANDIDATES = 20, 10
"""Records that are exchanged, one after the other, and for each those of which an attacker picks one, the right one among them."""
TRIED_NOISY, CANDIDATES_NOISY = 4, 5
"""Likewise, where each needs repeats."""
PILOT = 12
"""Repeats from which the randomness of each number is estimated."""
CENTRES = 2
"""Repeats whose mean is what a candidate's release is like; the same randomness for all, so that it hides no difference."""
REPEATS = 12
"""Of a release with the record, and with another in its place, for each record that is tried."""
LONGEST = 0.5
"""Seconds of one processor that a release may take, which is made some 150 times."""
TRAINED = 1e-3
"""By how much local training is made to move weights, to see which fields come from it."""


@dataclass
class Tally:
    """What came of the tries on one field.

    Attributes:
        noise: Whether its numbers are others each time.
        moving: Of how many records, of those that were exchanged, it depends; the others count no further.
        exchanged: How many these are.
        ins: Releases with the record.
        hits: Of which so many were said to be with it.
        outs: Releases with another in its place.
        alarms: Likewise.
        picks: Releases of whose candidates one was picked.
        picked: How often the right one.
    """

    noise: bool
    moving: int
    exchanged: int
    ins: int = 0
    hits: int = 0
    outs: int = 0
    alarms: int = 0
    picks: int = 0
    picked: int = 0

    def document(self, name: str) -> dict[str, Any]:
        """As in ``audit.json``."""
        found, interval = advantage(self.hits, self.ins, self.alarms, self.outs)
        return {
            "field": name, "random": self.noise, "moving": self.moving, "exchanged": self.exchanged, "advantage": found,
            "interval": list(interval), "picked": self.picked / self.picks,
            "picked_interval": list(wilson(self.picked / self.picks, self.picks)),
        }  # fmt: skip


@dataclass
class Exchanged:
    """What exchanging records showed of the fields of a client's releases.

    Attributes:
        tallies: Of each field that a record moves.
        unmoved: Fields that no record moved.
        kept: Those of them beside which the client kept something from earlier calls, which may hold the record.
        trained: Fields that come from local training, which is not repeated.
        untried: Why the others were not tried, in plain words, by field.
        chances: For each record that was tried, 1 by its candidates.
        beside: Records of the client beside the one.
    """

    tallies: dict[str, Tally] = field(default_factory=dict)
    unmoved: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    untried: dict[str, str] = field(default_factory=dict)
    chances: list[float] = field(default_factory=list)
    beside: int = 0

    def document(self) -> dict[str, Any]:
        """As in ``audit.json``."""
        return {
            "fields": [self.tallies[name].document(name) for name in sorted(self.tallies)],
            "chance": float(np.mean(self.chances)) if self.chances else None, "beside": self.beside,
            "unmoved": sorted(self.unmoved), "kept": sorted(self.kept), "trained": sorted(self.trained),
            "untried": dict(sorted(self.untried.items())),
        }  # fmt: skip


def exchange(
    replayer: Replayer, calls: Sequence[tuple[Call, Sequence[str]]], data: Samples, others: Samples, seed: int
) -> Exchanged:
    """Exchange records of a client, and see which fields of its releases tell.

    Args:
        replayer: Runs the handlers.
        calls: To the client, each with the fields of its reply that are attacked; of a field the last call is taken.
        data: Of the client.
        others: Records that nobody trained on.
        seed: Of the audit.

    Returns:
        What was found.
    """
    last = {name: k for k, (_, names) in enumerate(calls) for name in names}
    order = torch.argsort(data.labels, stable=True)
    kept = data[order[torch.linspace(0, len(data) - 1, min(MOST, len(data))).long()]] if len(data) else data
    found = Exchanged(beside=max(len(kept) - 1, 0))
    tried = _neighbours(kept, others, seed)
    for k, (call, _) in enumerate(calls):
        names = sorted(name for name, at in last.items() if at == k)
        if names and not tried:
            found.untried |= dict.fromkeys(
                names, "no new record of a class of the client can stand in the place of one"
            )
        elif names:
            _attack(_Release(replayer, call, names), kept, tried, seed, found)
    return found


@dataclass
class _Release:
    """Some fields of the reply to one call, as figures; tables of equally many rows also as sums of rows, weighted by one another."""

    replayer: Replayer
    call: Call
    names: list[str]
    rows: set[str] = field(default_factory=set)
    lengths: dict[str, int] = field(default_factory=dict)

    def answer(self, data: Samples, seed: int, trained: float = 0.0) -> Message:
        """The reply, made again."""
        return self.replayer.answer(self.call, data, seed, trained)[0]

    def figures(self, reply: Message) -> dict[str, Floats]:
        """The numbers of each field; where their number varies the mean row of each table, brought to one length."""
        found = {}
        for name in self.names:
            x = _numbers(reply, name, whole=name not in self.rows)
            # one of another length than those before is cut, or has zeros at its end: what is found of it is true all the same
            length = self.lengths.get(name, len(x))
            found[name] = np.concatenate([x[:length], np.zeros(length - len(x[:length]))])
        return found

    def __call__(self, data: Samples, seed: int) -> dict[str, Floats]:
        """Figures of the reply, made again."""
        return self.figures(self.answer(data, seed))

    def steady(self, replies: Sequence[Message]) -> None:
        """See by these replies which fields vary in length, and fix how long their figures are."""
        for name in self.names:
            if len({len(_numbers(reply, name)) for reply in replies}) > 1:
                self.rows.add(name)
            self.lengths[name] = max(len(_numbers(reply, name, name not in self.rows)) for reply in replies)


JOINT = " weighted by one another"


def _joint(reply: Message, names: Sequence[str]) -> list[str]:
    """What the fields of some tables, which belong together row by row, are called together; nothing where there are none."""
    held = [name for name in names if isinstance(x := value_of(reply, name), Tensor) and x.dim() and len(x) > 1]
    lists = [name for name in held if value_of(reply, name).dim() == 1]
    rows = {len(value_of(reply, name)) for name in lists}
    tables = [name for name in held if name not in lists and len(value_of(reply, name)) in rows]
    return [", ".join([*lists, *tables]) + JOINT] if lists and tables else []


def _numbers(reply: Message, name: str, whole: bool = True) -> Floats:
    if not name.endswith(JOINT):
        return numbers_of(reply, [name], whole)
    values = [
        x for x in (value_of(reply, one) for one in name.removesuffix(JOINT).split(", ")) if isinstance(x, Tensor)
    ]
    # in whichever order the rows stand, their sums are the same
    sums = [
        (a.double() @ b.double().flatten(1)).cpu().numpy()
        for a in values for b in values if a.dim() == 1 and b.dim() > 1 and len(a) == len(b)
    ]  # fmt: skip
    return np.concatenate([np.zeros(0), *sums])


def _neighbours(data: Samples, others: Samples, seed: int) -> list[list[Samples]]:
    """For each record that is tried the data, and the data with a new record of its class in its place, again and again."""
    stream = numpy_stream(seed, "audit", "exchanged")
    found = []
    for i in stream.permutation(len(data))[:TRIED]:
        same = np.ones(len(others), bool) if data.of_numbers else (others.labels == data.labels[i]).cpu().numpy()
        news = stream.permutation(np.flatnonzero(same))[: CANDIDATES - 1]
        if len(news):
            found.append([data, *(_exchanged(data, int(i), others[int(j) : int(j) + 1]) for j in news)])
    return found


def _exchanged(data: Samples, i: int, new: Samples) -> Samples:
    """The data with another record in the place of one, so that all else stays where it is."""
    return data[:i] + new.to(data.labels.device) + data[i + 1 :]


def _attack(view: _Release, data: Samples, tried: list[list[Samples]], seed: int, found: Exchanged) -> None:
    fixed = derive(seed, "audit", "exchanged", "fixed")
    began, loops = time.process_time(), view.replayer.loops
    try:
        with _steps() as steps:
            reply = view.answer(data, fixed)
    except Exception as error:  # a handler may want what is there in a run alone; whose it is, it is not known here
        found.untried |= dict.fromkeys(view.names, f"its handler does not run alone ({type(error).__name__})")
        return
    seconds = time.process_time() - began
    alone = bool(steps) or view.replayer.loops > loops
    if alone or seconds > LONGEST:
        why = "it comes from a training of its own" if alone else "it is long in the making"
        found.untried |= dict.fromkeys(view.names, f"{why}, and would have to be made again hundreds of times")
        return
    base = view.figures(reply)
    found.untried |= {
        name: "it holds no numbers without local training, which is not repeated"
        for name in view.names
        if not len(base[name])
    }
    view.names = [name for name in view.names if len(base[name])]
    shown = {}
    for r, some in enumerate(tried):
        other = view.answer(some[1], fixed)
        if any(_movers(view, base, {r: other}).values()):  # the others may be large models, and are needed no more
            shown[r] = other
    movers = _movers(view, base, shown)
    moved = [name for name in view.names if movers[name]]
    still = [name for name in view.names if name not in moved]
    drilled = view.figures(view.answer(data, fixed, TRAINED)) if still else base
    found.trained += [name for name in still if not np.array_equal(base[name], drilled[name])]
    still = [name for name in still if name not in found.trained]
    found.unmoved += still
    found.kept += still if tree.tensors(view.call.state) else []
    if not moved:
        return
    view.names = [*moved, *_joint(reply, moved)]
    replies = [reply, *(view.answer(data, derive(seed, "audit", "exchanged", "pilot", k)) for k in range(2))]
    again = [view.figures(one) for one in replies]
    noisy = any(not np.array_equal(x[name], again[0][name]) for x in again for name in moved)
    if noisy:
        replies += [view.answer(data, derive(seed, "audit", "exchanged", "pilot", k)) for k in range(2, PILOT)]
    view.steady([*replies, *shown.values()])
    # at the same randomness, the joint ones too
    movers = _movers(view, view.figures(reply), shown)
    counts = {name: len(own) for name, own in movers.items()}
    if noisy:
        movers = {name: own[:TRIED_NOISY] for name, own in movers.items()}
    spread = _spread([view.figures(one) for one in replies])
    # without noise sums of rows tell no more than the rows, which tell all
    names = view.names if noisy else moved
    tallies = {name: Tally(bool((spread[name] > 0).any()), counts[name], len(tried)) for name in names}
    for r in sorted({r for name in names for r in movers[name]}):
        some = tried[r][:CANDIDATES_NOISY] if noisy else tried[r]
        found.chances.append(1 / len(some))
        own = {name: tally for name, tally in tallies.items() if r in movers[name]}
        _try(view, some, derive(seed, "audit", "exchanged", r), noisy, spread, own)
    found.tallies |= {name: tally for name, tally in tallies.items() if tally.ins}


def _movers(view: _Release, base: Mapping[str, Floats], shown: Mapping[int, Message]) -> dict[str, list[int]]:
    """For each field the records that move it, by replies with another in the place of one."""
    found: dict[str, list[int]] = {name: [] for name in view.names}
    for r, reply in shown.items():
        for name, x in view.figures(reply).items():
            if not np.array_equal(base[name], x):
                found[name].append(r)
    return found


def _spread(releases: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    """The standard deviation of each number, 0 where it never changes."""
    stacked = {name: np.stack([x[name] for x in releases]) for name in releases[0]}
    return {name: np.where(np.ptp(x, 0) > 0, x.std(0, ddof=1), 0.0) for name, x in stacked.items()}


def _try(
    view: _Release, some: list[Samples], seed: int, noisy: bool, spread: Mapping[str, Floats], tallies: Mapping[str, Tally]
) -> None:  # fmt: skip
    """Tell releases with a record from those with another in its place, and pick the record among the candidates."""
    repeats, centres = (REPEATS, CENTRES) if noisy else (0, 1)
    likely = []
    for one in some:
        again = [view(one, derive(seed, "centre", k)) for k in range(centres)]
        # where nothing varies the value itself, as a mean of equal numbers may be rounded
        likely.append({n: np.where(spread[n] > 0, np.mean([x[n] for x in again], 0), again[0][n]) for n in tallies})
    ins = [view(some[0], derive(seed, "in", k)) for k in range(repeats)]
    outs = [view(some[1], derive(seed, "out", k)) for k in range(repeats)]
    for name, tally in tallies.items():
        centre = np.stack([x[name] for x in likely])
        if not tally.noise:  # the same each time: one look is enough
            own = [_far(centre[k], centre, spread[name]) for k in range(2)]
            with_it, without = own[:1], own[1:]
        else:
            with_it, without = ([_far(x[name], centre, spread[name]) for x in side] for side in (ins, outs))
        tally.ins, tally.outs, tally.picks = (
            tally.ins + len(with_it),
            tally.outs + len(without),
            tally.picks + len(with_it),
        )
        tally.hits += sum(bool(far[0] < far[1]) for far in with_it)
        tally.alarms += sum(bool(far[0] < far[1]) for far in without)
        tally.picked += sum(bool(far[0] < far[1:].min()) for far in with_it)


def _far(x: Floats, centres: Floats, spread: Floats) -> Floats:
    """How far a release is from those of the candidates, ``[n]``; numbers without noise decide alone where they differ."""
    # a difference that no noise explains is certain, however small
    sure = (x != centres)[:, spread == 0].sum(1)
    noisy = spread > 0
    far: Floats = (((x - centres)[:, noisy] / spread[noisy]) ** 2).sum(1) + 1e12 * sure
    return far


@contextmanager
def _steps() -> Iterator[list[None]]:
    """Count the steps of optimizers meanwhile: a handler that takes some trains in a loop of its own."""
    steps: list[None] = []
    handle = register_optimizer_step_post_hook(lambda *_: steps.append(None))
    try:
        yield steps
    finally:
        handle.remove()
