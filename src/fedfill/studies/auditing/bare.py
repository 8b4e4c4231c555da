"""Releases without a guarantee: how well records, and classes, are told from them. No bound follows from these figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfill.data.federation import Federation
from fedfill.data.samples import Samples, normalise
from fedfill.experiment.prepare import Prepared
from fedfill.privacy.bounds import Floats
from fedfill.privacy.scores import roc, told_apart
from fedfill.protocol.messages import Message
from fedfill.studies.auditing.attacks import gaussian
from fedfill.studies.auditing.exchanged import exchange
from fedfill.studies.auditing.replays import Replayer, Transcript, value_of
from fedfill.synthesis.measures import nearest_distances, nearness
from fedfill.tree import Weights

FEWEST = 8
"""Records on each side of which an attacker can learn a threshold."""
MOST = 2000
"""Records of each side, and released samples, that are compared."""


def told(
    prepared: Prepared, transcript: Transcript, client: int, weights: Weights, made: Samples | None
) -> dict[str, Any]:
    """What is told of a client's records by releases that no guarantee covers.

    Args:
        prepared: The run.
        transcript: What was asked and declared in it.
        client: That is attacked.
        weights: Of the final model.
        made: Synthetic samples that the server made of what it was sent without a guarantee; None: there are none.

    Returns:
        As in ``audit.json``; empty where everything has a guarantee, or nothing is there to compare with.
    """
    federation, trust = prepared.federation, getattr(prepared.algorithm, "trust", "site")
    data, test = federation.clients[client].train, federation.test
    asked = [
        (call, {name for name, release in declared.items() if release.mu is None and not gaussian(release, trust)}, filled)
        for call, declared, filled in zip(transcript.calls, transcript.releases, transcript.filled, strict=False)
        if call.client == client
    ]  # fmt: skip
    released = sorted({name for _, names, _ in asked for name in names})
    if not released or not len(test):
        return {}
    calls = [(call, sorted(names & filled)) for call, names, filled in asked]
    pairs = [pair for (i, _), pair in transcript.replies.items() if i == client]
    updates = [pair for pair in pairs if isinstance(getattr(pair[1], "weights", None), dict) and pair[1].weights]  # type: ignore[attr-defined]
    seen: Weights = updates[-1][1].weights if updates else weights  # type: ignore[attr-defined]
    members, others = alike(data, test)
    try:
        found = membership(prepared.model, seen, members, others)
    except (RuntimeError, TypeError, ValueError, IndexError):  # not a model of this network
        found = None
    held = [c for c, n in enumerate(data.counts(federation.classes)) if n]
    replayer = Replayer(
        prepared.algorithm, prepared.model, prepared.initial, federation.classes, schema=federation.schema
    )
    return {
        "released": released,
        "membership": found,
        "of": "its update" if updates else "the final model",
        "classes_told": classes_told(*updates[-1], held, federation.classes) if updates else None,
        "exchanged": exchange(replayer, calls, data, test, prepared.experiment.seed).document(),
        "samples": _samples(pairs, released, made, client, federation),
    }


@torch.inference_mode()
def membership(model: nn.Module, weights: Weights, members: Samples, others: Samples) -> dict[str, Any] | None:
    """How well an attacker tells a client's records from new ones, by the loss of a model.

    Args:
        model: The network.
        weights: That the attacker sees.
        members: Records that it was trained on.
        others: Records that it has never seen, best of the same classes (`alike`).

    Returns:
        ``advantage`` (hits less false alarms at a threshold that was learnt on half of the records), ``interval`` (of 95 %),
        ``area`` (under the curve) and ``records`` of each kind; None for fewer than eight.
    """
    n = min(len(members), len(others), MOST)
    if n < FEWEST:
        return None
    model.load_state_dict(weights, strict=False)
    model.eval()

    def losses(data: Samples) -> Any:
        scores = model(normalise(data.inputs[:n]))
        return -functional.cross_entropy(scores, data.labels[:n], reduction="none").double().numpy()

    return _apart(losses(members), losses(others))


def _apart(ins: Floats, outs: Floats) -> dict[str, Any]:
    found, interval = told_apart(ins, outs)
    return {"advantage": found, "interval": list(interval), "area": roc(ins, outs)[0], "records": len(ins)}


def alike(data: Samples, others: Samples) -> tuple[Samples, Samples]:
    """Records of both kinds, of each class equally many: else an attacker would tell classes apart, and no records.

    Args:
        data: Of a client.
        others: Records that nobody trained on.

    Returns:
        The first of each class on both sides, class after class; numbers as labels are no classes, and all are alike.
    """
    if data.of_numbers:
        n = min(len(data), len(others))
        return data[:n], others[:n]
    ins, outs = [], []
    for label in torch.unique(data.labels).tolist():
        own, new = ((x.labels == label).nonzero().flatten() for x in (data, others))
        n = min(len(own), len(new))
        ins.append(own[:n])
        outs.append(new[:n])
    empty = torch.zeros(0, dtype=torch.int64)
    # of all classes in turn, so that halves, and the first of them, are of all classes too
    order = torch.argsort(torch.cat([empty, *(torch.arange(len(x)) for x in ins)]), stable=True)
    return data[torch.cat([empty, *ins])[order]], others[torch.cat([empty, *outs])[order]]


def classes_told(message: Message, reply: Message, held: list[int], classes: int) -> float | None:
    """Which classes a client holds, told by how the bias of the last layer moved in its update.

    Args:
        message: With the weights that it started from.
        reply: With those that it trained.
        held: Its classes.
        classes: Of the task.

    Returns:
        The probability that a class which it holds moved up more than one which it doesn't; None where it holds all, or no such
        tensor was sent.
    """
    before, after = getattr(message, "weights", None), getattr(reply, "weights", None)
    if not isinstance(before, dict) or not isinstance(after, dict) or not 0 < len(held) < classes:
        return None
    last = [name for name, tensor in after.items() if tensor.shape == (classes,) and name in before]
    if not last:
        return None
    moved = (after[last[-1]].double() - before[last[-1]].double()).cpu().numpy()
    mine = np.isin(np.arange(classes), held)
    return roc(moved[mine], moved[~mine])[0]


def _samples(
    pairs: Sequence[tuple[Message, Message]], released: Sequence[str], made: Samples | None, client: int,
    federation: Federation,
) -> dict[str, Any] | None:  # fmt: skip
    """What released samples tell: those that the client sent, or else those that the server made of what all sent."""
    own = federation.clients[client].train
    sent = [x for _, reply in pairs for name in released for x in samples_in(value_of(reply, name), own.inputs)]
    if sent:
        return {"of": "the client", **nearest_told(torch.cat(sent), own, federation.test)}
    if made is None or not len(made):
        return None
    everybody = [one.train for one in federation.clients if len(one.train)]
    # of each client alike, where there are too many
    most = max(MOST // len(everybody), FEWEST)
    every = [one[torch.linspace(0, len(one) - 1, min(len(one), most)).long()] for one in everybody]
    data = Samples(torch.cat([one.inputs for one in every]), torch.cat([one.labels for one in every]))
    return {"of": "all clients", **nearest_told(made.inputs.cpu(), data, federation.test)}


def samples_in(value: Any, like: Tensor) -> Iterator[Tensor]:
    """Samples of the task in a field of a reply.

    Args:
        value: Of the field: tensors, samples, or records and lists of these. Named tensors are weights, and not looked into.
        like: Inputs as they are stored, ``[n, ...]``; a row of numbers is no image, and is known in `Samples` alone.

    Yields:
        Inputs of the same type and shape, ``[m, ...]``, m at least 1.
    """
    if isinstance(value, Samples):
        if len(value) and value.inputs.dtype == like.dtype and value.inputs.shape[1:] == like.shape[1:]:
            yield value.inputs.cpu()
    elif isinstance(value, Tensor):
        if like.dim() > 2 and len(value) and value.dtype == like.dtype and value.shape[1:] == like.shape[1:]:
            yield value.cpu()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from samples_in(item, like)
    elif is_dataclass(value):
        for item in fields(value):
            yield from samples_in(getattr(value, item.name), like)


def nearest_told(released: Tensor, data: Samples, test: Samples) -> dict[str, Any]:
    """What released samples tell of the records that they were made from, by the nearest ones.

    Args:
        released: Inputs as they are stored, ``[n, ...]``, at least one.
        data: Records that they may be made from.
        test: Records that nobody trained on.

    Returns:
        ``released`` (how many), ``membership`` (as `membership`, by the distance of a record to the nearest released sample), and
        ``nearness``: ``times`` as far from its nearest record as a new record is from it lies a released sample (medians),
        and the share of the released ones that is as near as the nearest hundredth of the new ones; None each for too few records.
    """
    members, others = alike(data, test)
    n, some = min(len(members), MOST), released[:: -(-len(released) // MOST)]
    known: dict[str, Any] = {"released": len(released), "membership": None, "nearness": None}
    if n < FEWEST:
        return known
    ins, outs = (-nearest_distances(x.inputs[:n], some).double().numpy() for x in (members, others))
    found = nearness(some, data.inputs, others.inputs[:n])
    times = found.median.value / found.real_median if found.real_median else None
    return known | {
        "membership": _apart(ins, outs),
        "nearness": {"times": times, "share_below": found.share_below.value},
    }
