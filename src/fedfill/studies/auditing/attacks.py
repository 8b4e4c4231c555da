"""The attacks of an audit: on Gaussian releases by repeats, on DP-SGD by canary gradients, on averages by canary clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedfill.data.federation import ClientData
from fedfill.data.samples import Samples
from fedfill.experiment.prepare import Prepared
from fedfill.experiment.summary import Result
from fedfill.privacy.audit import Claim, Finding, of_guesses, of_repeats
from fedfill.privacy.bounds import Floats
from fedfill.privacy.one_run import Guesses
from fedfill.privacy.releases import Release
from fedfill.privacy.scores import roc
from fedfill.privacy.sums import honest_default
from fedfill.studies.auditing.client_canaries import ClientCanaries
from fedfill.studies.auditing.gradient_canaries import GradientCanaries
from fedfill.studies.auditing.published import Published
from fedfill.studies.auditing.replays import (
    Call,
    Replayer,
    Transcript,
    Unsteady,
    View,
    numbers_of,
    padded,
    repeat,
    sized,
    worst_pair,
)

RECORDS = 40
"""Of the attacked client's records so many stand beside the canary: a Gaussian release is no other with more of them."""
Run = Callable[[Prepared, Prepared, Any, Any], Result]
"""Runs (what to run, whose engine, who watches, virtual clients)."""


@dataclass(frozen=True)
class Budget:
    """How much an audit may try, and at which error.

    Attributes:
        canaries: In one run.
        repeats: Of a release, with and without the canary.
        alpha: 1 minus the confidence.
        delta: At which epsilon is told.
        seed: Of canaries, coins and repeats.
    """

    canaries: int
    repeats: int
    alpha: float
    delta: float
    seed: int


def clients_attacked(prepared: Prepared, budget: Budget, run: Run) -> list[Finding]:
    """Canary clients, each of which takes part or not by a coin."""
    federation, algorithm = prepared.federation, prepared.algorithm
    private: Any = algorithm.aggregation_of  # type: ignore[attr-defined]
    first, nobody = len(federation.clients), federation.sample[:0]
    canaries = ClientCanaries(
        algorithm, prepared.model, prepared.initial, federation.sample,
        classes=federation.classes, first=first, count=budget.canaries, clip=private.clip, seed=budget.seed,
    )  # fmt: skip
    more = tuple(ClientData(nobody, nobody) for _ in range(budget.canaries))
    whole = replace(prepared, federation=replace(federation, clients=(*federation.clients, *more)))
    result = run(whole, prepared, None, canaries)
    scores = canaries.scores(prepared.initial, result.weights)
    experiment = prepared.experiment
    claim = Claim(0.0, ((private.noise_multiplier, experiment.participation, experiment.rounds),), replaced=False)
    guesses = Guesses.of(scores, canaries.coins)
    area = roc(scores[canaries.coins > 0], scores[canaries.coins < 0])[0]
    finding = of_guesses(
        "the published model", f"clipped updates with noise multiplier {private.noise_multiplier:g}", claim, guesses,
        delta=budget.delta, alpha=budget.alpha, neighbours="a client is added or removed", area=area,
    )  # fmt: skip
    return [finding]


def gradients_attacked(
    prepared: Prepared, transcript: Transcript, client: int, budget: Budget, run: Run
) -> list[Finding]:
    """Canary records, each with a gradient or its opposite by a coin; nothing where no client declares sampled gradients."""
    if not any(release.sampled for declared in transcript.releases for release in declared.values()):
        return []
    federation = prepared.federation
    own = federation.clients[client]
    canaries = GradientCanaries(budget.canaries, budget.seed)
    labels = torch.tensor(sorted(set(own.train.labels.tolist())))
    records = canaries.records(own.train, labels[torch.arange(budget.canaries) % len(labels)])
    alone = ClientData(records, own.test, validation=own.validation)
    domains = federation.domains[client : client + 1]
    lone = replace(prepared, federation=replace(federation, clients=(alone,), domains=domains))
    watch = Transcript([0])
    with canaries.inserted():
        run(lone, lone, watch, None)
    steps: dict[tuple[str, str], dict[tuple[float, float], int]] = {}
    mus: dict[tuple[str, str], float] = {}
    for declared in watch.releases:
        for name, release in declared.items():
            if release.sampled is None:
                continue
            noise, probability, times = release.sampled
            booked = steps.setdefault((name, release.mechanism), {})
            booked[noise, probability] = booked.get((noise, probability), 0) + times
            mus[name, release.mechanism] = math.hypot(mus.get((name, release.mechanism), 0.0), release.mu or 0.0)
    guesses = Guesses.of(canaries.scores, canaries.coins)
    area = roc(canaries.scores[canaries.coins > 0], canaries.scores[canaries.coins < 0])[0]
    return [
        of_guesses(
            name, mechanism, Claim(mus[name, mechanism], tuple((*key, n) for key, n in sorted(booked.items()))), guesses,
            delta=budget.delta, alpha=budget.alpha, neighbours="a record's gradient is replaced by the opposite one", area=area,
        )
        for (name, mechanism), booked in steps.items()
    ]  # fmt: skip


def releases_attacked(prepared: Prepared, transcript: Transcript, client: int, budget: Budget) -> list[Finding]:
    """Everything that one client sent under a Gaussian claim, made again from neighbouring data."""
    trust = getattr(prepared.algorithm, "trust", "site")
    calls = [call for call in transcript.calls if call.client == client]
    declared = [
        found for call, found in zip(transcript.calls, transcript.releases, strict=False) if call.client == client
    ]
    claimed = [
        (call, {name: release for name, release in found.items() if gaussian(release, trust)})
        for call, found in zip(calls, declared, strict=True)
        if not any(release.sampled for release in found.values())
    ]
    claimed = [(call, found) for call, found in claimed if found]
    if not any(
        _mu(release, trust, True) or _mu(release, trust, False) for _, found in claimed for release in found.values()
    ):
        return []
    federation = prepared.federation
    replayer = Replayer(
        prepared.algorithm, prepared.model, prepared.initial, federation.classes, schema=federation.schema
    )
    whole = federation.clients[client].train
    data = whole[_some(whole, RECORDS)]
    clients = len(federation.clients)
    others: list[Call] = []
    if trust == "secure":
        # the attacker knows the shares of all but the honest clients, of whom the attacked one is one
        honest = getattr(prepared.algorithm, "honest", None) or honest_default(clients)
        kept = [i for i in range(clients) if i != client][: honest - 1]
        others = [call for call in transcript.calls if call.client in kept]
    pieces = {i: one.train[_some(one.train, 1)] for i, one in enumerate(federation.clients)} if others else {}

    def view(given: Samples, seed: int, whole: bool = True) -> Floats:
        parts = []
        for call, found in claimed:
            seen = numbers_of(replayer.answer(call, given, seed)[0], list(found), whole)
            for other in others:
                if (other.handler, other.t) == (call.handler, call.t):
                    seen = seen + numbers_of(replayer.answer(other, pieces[other.client], seed)[0], list(found), whole)
            parts.append(seen)
        return np.concatenate(parts)

    seen = Published(prepared, replayer, calls) if trust == "server" else view
    found: list[Finding | None] = []
    for replaced in (True, False):
        try:
            found.append(_repeated(sized(seen), data, claimed, replayer, trust, replaced, budget))
        except Unsteady:
            if trust == "server":
                raise
            rows = padded(partial(view, whole=False), data, budget.seed)
            found.append(_repeated(rows, data, claimed, replayer, trust, replaced, budget))
    return [one for one in found if one]


def _repeated(
    view: View, data: Samples, claimed: Sequence[tuple[Call, dict[str, Release]]], replayer: Replayer, trust: str,
    replaced: bool, budget: Budget,
) -> Finding | None:  # fmt: skip
    pair = worst_pair(view, data, budget.seed, replaced=replaced)
    # the claim is the one that is made of the attacked data, whose sizes it may depend on
    mus = []
    for call, found in claimed:
        released = replayer.answer(call, pair.without, budget.seed)[1]
        mus += [_mu(released[name], trust, replaced) for name in found]
    known = [mu for mu in mus if mu is not None]
    if len(known) < len(mus):
        return None
    claim = Claim(math.hypot(*known), (), replaced)
    ins, outs, coordinates = repeat(view, pair, budget.seed, budget.repeats)
    names = sorted({name for _, found in claimed for name in found})
    mechanisms = sorted({release.mechanism for _, found in claimed for release in found.values() if release.mu != 0})
    kind = "a record is replaced by another of its class" if replaced else "a record is added or removed"
    return of_repeats(
        ", ".join(names), "; ".join(mechanisms), claim, ins, outs, coordinates=coordinates, delta=budget.delta,
        alpha=budget.alpha, neighbours=kind,
    )  # fmt: skip


def gaussian(release: Release, trust: str) -> bool:
    """Whether repeats can test what is claimed of a release."""
    return release.sampled is None and _mu(release, trust, True) is not None


def _mu(release: Release, trust: str, replaced: bool) -> float | None:
    if trust == "server" and release.mu is None:
        return release.conditional_mu if replaced else release.conditional_added_mu
    return release.mu if replaced else release.added_mu


def _some(data: Samples, n: int) -> torch.Tensor:
    """Positions of some records, of all classes alike."""
    order = torch.argsort(data.labels, stable=True)
    return order[torch.linspace(0, len(data) - 1, min(n, len(data))).long()]
