"""Releases of one client, made again and again from neighbouring data: the algorithm's own handlers, with new noise each time.

What the client was asked in a real run is asked again, on its data and on its data with one record replaced or added. The
messages stay those of that run, and local training is switched off: what is protected must not depend on it, or is so under the
condition that networks count as fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedfill import tree
from fedfill.data.samples import Batch, Samples
from fedfill.data.schema import Schema
from fedfill.errors import FedfillError
from fedfill.privacy.bounds import Floats
from fedfill.privacy.releases import Release
from fedfill.protocol.client import Client, State
from fedfill.protocol.messages import Message, Outcome, releases_of
from fedfill.streams import derive, numpy_stream
from fedfill.training.fit import Fit, Fitted, LocalTraining
from fedfill.tree import Tree, Weights

SHOWN = 16
"""Single coordinates among the figures of a repeat: those that the canary moves furthest, and as many others."""
PILOT = 200
"""Repeats from which the noise on each coordinate is estimated."""
LENGTHS = 20
"""Repeats of which the longest release says how long one is, where noise decides it."""
HIDDEN = "the server sees sums alone, as an audit presumes"


@dataclass(frozen=True)
class Call:
    """What a client was asked, and in which state."""

    client: int
    handler: str
    message: Message
    t: int
    state: Tree


@dataclass
class Transcript:
    """Watches a run: everything that some clients were asked, and what they declared of their replies.

    Attributes:
        clients: Which.
        calls: In order.
        releases: What was declared of the reply to each call.
        filled: Of which fields of it there were numbers.
        replies: The last whole reply of each client to each handler, with the message, the last of all at the end.
    """

    clients: Sequence[int]
    calls: list[Call] = field(default_factory=list)
    releases: list[dict[str, Release]] = field(default_factory=list)
    filled: list[frozenset[str]] = field(default_factory=list)
    replies: dict[tuple[int, str], tuple[Message, Message]] = field(default_factory=dict)

    def before(self, client: int, handler: str, message: Message, t: int, state: Tree) -> None:
        """Note the question."""
        if client in self.clients:
            self.calls.append(Call(client, handler, message, t, tree.copy(state)))

    def after(self, client: int, outcome: Outcome) -> None:
        """Note what is declared of the answer."""
        if client in self.clients:
            reply, releases = outcome.reply, dict(outcome.releases)
            self.releases.append(releases)
            self.filled.append(
                frozenset(name for name in releases if any(x.size for x in _numbers(value_of(reply, name), True)))
            )
            if outcome.reply is not None:
                call = self.calls[-1]
                self.replies.pop((client, call.handler), None)
                self.replies[client, call.handler] = call.message, outcome.reply


class Replayer:
    """Runs handlers on whatever data, outside of any engine.

    Args:
        program: The algorithm.
        model: Its network.
        initial: The experiment's initial weights.
        classes: Of the task.
        hidden: Whether the server gets no single reply, but sums.
        schema: What was agreed on about the table of whose rows the data are; None: nothing was.

    Attributes:
        loops: How often a handler has asked for mini-batches, to train by itself; it gets none.
    """

    def __init__(
        self, program: Any, model: nn.Module, initial: Weights, classes: int, *, hidden: bool = True, schema: Schema | None = None
    ) -> None:  # fmt: skip
        self._program, self._model, self._initial, self._classes = program, model, initial, classes
        self._hidden, self._schema = hidden, schema
        self.loops = 0
        self._tensors = model.state_dict()  # what loads them by the model takes longer than most releases

    def answer(self, call: Call, data: Samples, seed: int, trained: float = 0.0) -> tuple[Message, dict[str, Release]]:
        """A reply and what is declared of it, by field; local training adds `trained` to every weight, and does nothing else."""

        def resident(weights: Weights) -> nn.Module:
            for name, tensor in weights.items():
                if name in self._tensors:
                    self._tensors[name].copy_(tensor)
            return self._model

        def fit(request: Fit) -> Fitted:
            weights = {
                k: x + trained if trained and x.is_floating_point() else x.clone() for k, x in request.weights.items()
            }
            return Fitted(weights, 1, len(request.data), 0.0)

        def batches(data: Samples, training: LocalTraining) -> Iterator[Batch]:
            self.loops += 1
            return iter(())

        client = Client(
            id=call.client, round=call.t, data=data, classes=self._classes,
            state=State(tree.copy(call.state or self._program.client_state())), initial=self._initial, seed=seed,
            resident=resident, fit=fit, batches=batches, hidden=HIDDEN if self._hidden else "", schema=self._schema,
        )  # fmt: skip
        reply = getattr(self._program, call.handler)(client, call.message)
        return reply, dict(releases_of(reply, client.releases))


def numbers_of(reply: Message, paths: Sequence[str], whole: bool = True) -> Floats:
    """The numbers in some fields of a reply, one after the other; of tables the mean row alone unless they are wanted whole."""
    found: list[Floats] = [np.zeros(0)]
    for path in paths:
        found += list(_numbers(value_of(reply, path), whole))
    return np.concatenate(found)


def value_of(reply: Message | None, path: str) -> Any:
    """What stands in a field of a reply, named as its release is, ``Kind.field``; None where it is another kind."""
    kind, *names = path.split(".")
    value: Any = reply if type(reply).__name__ == kind else None
    for name in names:
        value = getattr(value, name, None)
    return value


def _numbers(value: Any, whole: bool) -> Iterator[Floats]:
    if isinstance(value, Tensor):
        x = value.detach().cpu().double()
        yield (x if whole or x.dim() < 2 else x.sum(0) / max(len(x), 1)).flatten().numpy()
    elif isinstance(value, bool | int | float):
        yield np.array([float(value)])
    elif isinstance(value, Mapping):
        for name in sorted(value):
            yield from _numbers(value[name], whole)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item, whole)
    elif is_dataclass(value):
        for item in fields(value):
            yield from _numbers(getattr(value, item.name), whole)


View = Callable[[Samples, int], Floats]
"""What the attacker sees, ``[k]``, of some data and with a seed for all noise."""


class Unsteady(FedfillError):
    """How much is released depends on noise, or on a record."""


def sized(view: View) -> View:
    """The view, as long as it has the length of its first figures."""
    length: list[int] = []

    def checked(data: Samples, seed: int) -> Floats:
        found = view(data, seed)
        if not length:
            length.append(len(found))
        if len(found) != length[0]:
            raise Unsteady(
                "audit: how many numbers are released depends on noise or on a record; allowed: settings of which it does not"
            )
        return found

    return checked


def padded(view: View, data: Samples, seed: int) -> View:
    """The view brought to one length: cut, or with zeros at its end. What is found of it is a bound all the same.

    Args:
        view: What is seen, best by mean rows (`numbers_of`), of which few are missing.
        data: Of the client.
        seed: Of the audit.

    Returns:
        A view of the largest length in some repeats.
    """
    longest = max(len(view(data, derive(seed, "audit", "length", k))) for k in range(LENGTHS))

    def even(given: Samples, seed: int) -> Floats:
        found = view(given, seed)[:longest]
        return np.concatenate([found, np.zeros(longest - len(found))])

    return even


@dataclass(frozen=True)
class Pair:
    """Neighbours, and how far apart what is released of them lies.

    Attributes:
        without: Data without the canary, or with its opposite.
        with_it: Data with it.
        gap: Difference of what is released of both, without noise, ``[k]``.
        std: Of the noise on each coordinate, estimated, ``[k]``.
    """

    without: Samples
    with_it: Samples
    gap: Floats
    std: Floats

    @property
    def mu(self) -> float:
        """The distance in deviations of the noise: what a perfect attack on this pair finds."""
        return float(np.linalg.norm(self.gap / self.std))


def worst_pair(view: View, data: Samples, seed: int, *, replaced: bool = True, tries: int = 48) -> Pair:
    """Look for neighbours whose releases differ most, measured by the noise on them.

    The noise is taken out of a comparison by giving both the same seed. Candidates are images or rows of all kinds, then changes of the best.

    Args:
        view: What is released.
        data: Of the client; the canary is a record beside these.
        seed: Of the audit.
        replaced: Whether the canary takes the place of a record of its class, else it is added.
        tries: Candidates.

    Returns:
        The best pair.

    Raises:
        Unsteady: Where views of some length only are allowed (`sized`), and one has another.
    """
    stream = numpy_stream(seed, "audit", "candidates")
    fixed = derive(seed, "audit", "fixed")
    noise = np.stack([view(data, derive(seed, "audit", "pilot", k)) for k in range(PILOT)])
    std = noise.std(0, ddof=1)
    # coordinates without noise: any difference there is certain
    std = np.maximum(std, 1e-9 * max(1.0, float(np.abs(noise).max(initial=0.0))))

    def seen(record: Tensor, label: int) -> Floats:
        return np.asarray(view(_with(data, record, label), fixed) / std)

    def best(records: Sequence[Tensor], label: int) -> tuple[float, Tensor | None, Tensor]:
        whitened = np.stack([seen(record, label) for record in records])
        if not replaced:
            far = np.linalg.norm(whitened - view(data, fixed) / std, axis=1)
            return float(far.max()), None, records[int(far.argmax())]
        square = (whitened**2).sum(1)
        distances = square[:, None] + square[None] - 2 * whitened @ whitened.T
        i, j = divmod(int(distances.argmax()), len(records))
        return math.sqrt(max(float(distances[i, j]), 0.0)), records[i], records[j]

    labels = sorted(set(data.labels.tolist()))
    few = [_candidate(data, stream, k) for k in range(6)]
    label = max(labels, key=lambda c: best(few, c)[0])
    found = best([_candidate(data, stream, k) for k in range(tries)], label)
    for _ in range(6):
        kept = [record for record in (found[1], found[2]) if record is not None]
        changed = [_changed(record, stream) for record in kept for _ in range(8)]
        found = max(found, best([*kept, *changed], label), key=lambda one: one[0])
    _, other, record = found
    without = data if other is None else _with(data, other, label)
    with_it = _with(data, record, label)
    return Pair(without, with_it, view(with_it, fixed) - view(without, fixed), std)


def _with(data: Samples, record: Tensor, label: int) -> Samples:
    """The data and one record more."""
    return data + Samples(record[None].to(data.inputs), torch.tensor([label], device=data.labels.device))


def _candidate(data: Samples, stream: np.random.Generator, k: int) -> Tensor:
    """A record of the kind that the number says: the darkest, the brightest, real ones and their opposites, patterns, noise."""
    shape = tuple(data.inputs.shape[1:])
    some = data.inputs[int(stream.integers(len(data)))]
    images = data.inputs.dtype == torch.uint8
    low, high = (0.0, 255.0) if images else (-1e3, 1e3)
    if k < 2:
        return torch.full(shape, (low, high)[k])
    kind = k % 5
    if kind == 0:
        return some.double()
    if kind == 1:
        return high + low - some.double()
    flat = np.full(int(np.prod(shape)), low if images else 0.0)
    if kind == 2:  # a single coordinate, and in tables its opposite
        flat[int(stream.integers(len(flat)))] = high if images or stream.random() < 0.5 else low
    elif kind == 3:
        flat = np.where(stream.random(len(flat)) < 0.5, low, high)
    else:
        flat = np.where(np.arange(len(flat)) % int(stream.integers(2, 9)) == 0, high, low)
    return torch.from_numpy(flat.reshape(shape))


def _changed(record: Tensor, stream: np.random.Generator) -> Tensor:
    """The record with some numbers at an end of their range."""
    low, high = (0.0, 255.0) if float(record.min()) >= 0 else (-1e3, 1e3)
    share = 0.5 ** int(stream.integers(1, 6))
    flat = record.double().flatten().numpy().copy()
    where = stream.random(len(flat)) < share
    flat[where] = stream.choice([low, high], int(where.sum()))
    if low < 0 and stream.random() < 0.5:
        flat = -flat
    return torch.from_numpy(flat.reshape(tuple(record.shape)))


def repeat(view: View, pair: Pair, seed: int, repeats: int) -> tuple[Floats, Floats, int]:
    """Figures of the release of both neighbours, over and over.

    Args:
        view: What is released.
        pair: The neighbours.
        seed: Of the audit.
        repeats: Of each.

    Returns:
        Figures with and without the canary, ``[repeats, k]`` each: the exact score of Neyman and Pearson for Gaussian noise, the
        length of the release, single coordinates; and how many of the last are coordinates.
    """
    direction = pair.gap / pair.std**2
    direction = direction / max(float(np.linalg.norm(pair.gap / pair.std)), 1e-30)
    order = np.argsort(-np.abs(pair.gap / pair.std), kind="stable")
    others = numpy_stream(seed, "audit", "coordinates").permutation(order[SHOWN:])[:SHOWN]
    chosen = np.concatenate([others, order[:SHOWN]]).astype(int)

    def figures(data: Samples, name: str) -> Floats:
        rows = np.empty((repeats, 2 + len(chosen)))
        for k in range(repeats):
            x = view(data, derive(seed, "audit", name, k))
            rows[k, 0], rows[k, 1], rows[k, 2:] = x @ direction, np.linalg.norm(x / pair.std), x[chosen]
        return rows

    ins, outs = figures(pair.with_it, "with"), figures(pair.without, "without")
    return ins, outs, min(SHOWN, len(order))
