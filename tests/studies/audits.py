"""Small releases for tests of audits: real release code on a few records, repeated."""

import math

import numpy as np
import torch

from fedfill.data.samples import Samples
from fedfill.privacy import sums as privacy
from fedfill.privacy.audit import Claim, of_repeats
from fedfill.protocol.client import Client, State
from fedfill.protocol.sums import contribute
from fedfill.statistics.noise import Noise
from fedfill.statistics.sums import class_moments
from fedfill.streams import derive
from fedfill.studies.auditing.replays import PILOT, Pair, numbers_of, repeat

D, CLASSES = 6, 3


def client(data, seed, *, id=0, round=0, hidden="it sees sums alone", resident=None, fit=None, classes=CLASSES):
    """A client whose noise comes from this seed."""
    return Client(
        id=id, round=round, data=data, classes=classes, state=State({}), initial={}, seed=seed,
        resident=resident or (lambda weights: None), fit=fit, hidden=hidden,
    )  # fmt: skip


def records(n=5, seed=0):
    """Features of length 1 and labels, as a table."""
    stream = torch.Generator().manual_seed(seed)
    z = torch.nn.functional.normalize(torch.randn(n, D, generator=stream), dim=1)
    return Samples(z, torch.arange(n) % CLASSES)


def noise_for(statistic, epsilon, trust="site", honest=None):
    bounds = statistic.bounds()
    mu = privacy.mu_for(epsilon, 1e-5)
    return Noise(trust, privacy.stds(bounds, privacy.shares(bounds), mu), honest)


def neighbours(statistic, noise, replaced):
    """Features of the records that a canary's coin toggles, where the sums differ most; None: no record."""
    a = 1 / noise.stds["gram"] if "gram" in noise.stds else 0.0
    b = 1 / noise.stds["moments"] if "moments" in noise.stds else 0.0
    e = torch.eye(D)
    if not replaced:
        return None, e[0]
    u = max(-1.0, -b * b / (2 * a * a)) if a else -1.0
    return u * e[0] + math.sqrt(1 - u * u) * e[1], e[0]


def pair_of(view, without, with_it, seed=0):
    fixed = derive(seed, "fixed")
    std = np.stack([view(without, derive(seed, "pilot", k)) for k in range(PILOT)]).std(0, ddof=1)
    std = np.maximum(std, 1e-9)
    return Pair(without, with_it, view(with_it, fixed) - view(without, fixed), std)


def audited(view, without, with_it, claim, repeats=1000, seed=0, **words):
    """The finding of an attack on one release."""
    pair = pair_of(view, without, with_it, seed)
    ins, outs, coordinates = repeat(view, pair, seed, repeats)
    return of_repeats("release", "noise", claim, ins, outs, coordinates=coordinates, **words)


def sums_view(statistic, noise, clients=1, declared=None):
    """What the server gets of one client's sums."""

    def view(data, seed):
        one = client(data, seed)
        reply = contribute(one, statistic, [(data.inputs, data.labels)], noise, clients)
        if declared is not None:
            declared[:] = [one.releases["sums"]]
        return numbers_of(reply, ["Sums.sums"])

    return view


def with_record(data, z, label=0):
    return data if z is None else data + Samples(z[None], torch.tensor([label]))


def audited_sums(epsilon=1.0, replaced=False, repeats=1000, seed=0, trust="site", wrap=lambda view: view, **blocks):
    """An audit of summed statistics at the boundary, by the claim that their own release makes."""
    statistic = class_moments(D, CLASSES, **blocks)
    noise, declared = noise_for(statistic, epsilon, trust), []
    without, with_it = neighbours(statistic, noise, replaced)
    view = wrap(sums_view(statistic, noise, declared=declared))
    view(records(), 0)
    claim = Claim(declared[0].mu if replaced else declared[0].added_mu, (), replaced)
    base = records()
    return audited(view, with_record(base, without), with_record(base, with_it), claim, repeats, seed)
