"""Twenty-two mistakes in the making of private releases, each caught by an audit that its sound twin passes."""

import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from tests.studies.audits import (
    CLASSES,
    D,
    audited,
    audited_sums,
    client,
    neighbours,
    noise_for,
    records,
    sums_view,
    with_record,
)
from torch import nn

from fedfill.algorithms.dpfedavg import DPFedAvg
from fedfill.privacy import dpsgd
from fedfill.privacy import sums as privacy
from fedfill.privacy.audit import Claim
from fedfill.privacy.keyed import seeded
from fedfill.protocol.client import Client
from fedfill.protocol.sums import contribute
from fedfill.statistics.noise import Noise
from fedfill.statistics.sums import class_moments
from fedfill.streams import derive
from fedfill.studies.auditing.replays import numbers_of
from fedfill.synthesis import gan
from fedfill.synthesis.gan_networks import GANSettings

EPSILON = 6.0
add_noise, clipped_sum = privacy.add_noise, dpsgd.clipped_sum


SOUND = {}
"""Audits of twins that several faults have, by name: each repeats the same bits."""


def judge(audit, monkeypatch, plant, twin=None):
    """The sound twin first: a monkeypatch that broke the audit itself would show there."""
    sound = SOUND.get(twin) or audit()
    if twin is not None:
        SOUND[twin] = sound
    assert sound.p_value > 1e-4, sound
    assert sound.verdict != "FAIL"
    plant(monkeypatch)
    caught = audit()
    assert caught.verdict == "FAIL", caught


# Sums


def noise_with(change):
    """A plant that draws another noise: change(block, std, symmetric, generator)."""
    return lambda patch: patch.setattr(privacy, "add_noise", change)


def half(block, std, symmetric, generator):
    return add_noise(block, std / 2, symmetric, generator)


def variance(block, std, symmetric, generator):
    return add_noise(block, std**0.5, symmetric, generator)


def divided_twice(block, std, symmetric, generator):
    return add_noise(block, std / 5, symmetric, generator)


def one_for_all(block, std, symmetric, generator):
    return block + std * generator.normal(1)


def exact_counts(block, std, symmetric, generator):
    return block if block.shape == (CLASSES,) else add_noise(block, std, symmetric, generator)


def share_of_the_noise(patch):
    patch.setattr(Noise, "factor", lambda self, clients: 1 / math.sqrt(4))


@pytest.mark.parametrize(
    ("plant", "blocks"),
    [
        (noise_with(half), {}),
        (noise_with(variance), {"radius": 32.0, "gram": False, "counts": False}),
        (noise_with(divided_twice), {}),
        (noise_with(one_for_all), {"gram": False}),
        (noise_with(exact_counts), {}),
        (share_of_the_noise, {}),
    ],
    ids=["1 half the noise", "2 variance", "10 divided twice", "8 broadcast", "13 exact counts", "11 a share each"],
)
def test_faults_in_the_noise_of_sums(monkeypatch, plant, blocks):
    if "radius" in blocks:

        def audit():
            statistic = class_moments(D, CLASSES, **blocks)
            noise, base = noise_for(statistic, EPSILON), records()
            assert noise.stds["moments"] > 4
            z = blocks["radius"] * torch.eye(D)[0]
            claim = Claim(privacy.mu_added(statistic.bounds(), noise.stds), (), False)
            return audited(sums_view(statistic, noise), base, with_record(base, z), claim, 700)

    else:

        def audit():
            return audited_sums(EPSILON, repeats=700, **blocks)

    judge(audit, monkeypatch, plant, f"sums with {blocks}")


def two_rounds(ask):
    """An audit of two rounds of sums, of which the record is in the second alone."""
    statistic = class_moments(D, CLASSES, gram=False)
    noise = noise_for(statistic, EPSILON)
    mu = privacy.mu_added(statistic.bounds(), noise.stds)

    def view(data, seed):
        parts = []
        for t, own in enumerate((records(), data)):
            one = client(own, seed, round=t)
            reply = contribute(one, statistic, [(own.inputs, own.labels)], noise, 1)
            parts.append(numbers_of(reply, ["Sums.sums"]))
        return np.concatenate(parts)

    base = records()
    _, z = neighbours(statistic, noise, False)
    return audited(view, base, with_record(base, z), Claim(math.sqrt(2) * mu, (), False), ask)


def test_7_the_same_noise_in_every_round(monkeypatch):
    def same(patch):
        patch.setattr(Client, "noise", lambda self, purpose: seeded(self._seed, purpose, self.id))

    judge(lambda: two_rounds(700), monkeypatch, same)


def test_17_noise_of_half_precision(monkeypatch):
    z = torch.nn.functional.normalize(torch.randn(2, D, generator=torch.Generator().manual_seed(1)), dim=1)

    def audit():
        statistic = class_moments(D, CLASSES)
        noise, base = noise_for(statistic, EPSILON), records()
        claim = Claim(privacy.mu_replaced(statistic.bounds(), noise.stds))
        return audited(sums_view(statistic, noise), with_record(base, z[0]), with_record(base, z[1]), claim, 700)

    def coarse(block, std, symmetric, generator):
        fine = add_noise(torch.zeros_like(block), std, symmetric, generator)
        return block + fine.half().double()

    judge(audit, monkeypatch, noise_with(coarse))


def test_20_a_lost_reply_is_made_again_with_fresh_noise(monkeypatch):
    statistic = class_moments(D, CLASSES)
    noise, base = noise_for(statistic, EPSILON), records()
    _, z = neighbours(statistic, noise, False)
    attempts = {"fresh": False}

    def view(data, seed):
        seeds = [seed, derive(seed, "again") if attempts["fresh"] else seed]
        once = sums_view(statistic, noise)
        return np.concatenate([once(data, one) for one in seeds])

    claim = Claim(privacy.mu_added(statistic.bounds(), noise.stds), (), False)
    judge(
        lambda: audited(view, base, with_record(base, z), claim, 1000),
        monkeypatch,
        lambda patch: patch.setitem(attempts, "fresh", True),
    )


def test_21_the_sensitivity_of_an_added_record_for_one_that_is_replaced(monkeypatch):
    judge(
        lambda: audited_sums(EPSILON, True, 1500, gram=False, counts=False),
        monkeypatch,
        lambda patch: patch.setattr(privacy, "mu_replaced", privacy.mu_added),
    )


def test_22_one_clients_share_of_the_noise_is_missing(monkeypatch):
    """Of two clients, whose shares make the whole noise once they are summed."""
    statistic = class_moments(D, CLASSES, gram=False, counts=False)
    noise = Noise("secure", {"moments": 1.0}, 2)
    base, z = records(), torch.eye(D)[0]

    def view(data, seed):
        parts = []
        for i, own in enumerate((data, base[:1])):
            reply = contribute(client(own, seed, id=i), statistic, [(own.inputs, own.labels)], noise, 2)
            parts.append(numbers_of(reply, ["Sums.sums"]) / 2.0 ** noise.on_grid(statistic, 2).blocks["moments"].bits)
        return parts[0] + parts[1]

    def without(block, std, symmetric, generator):
        calls.append(0)
        return block if len(calls) % 2 == 0 else add_whole_noise(block, std, symmetric, generator)

    calls, add_whole_noise = [], privacy.add_whole_noise
    judge(
        lambda: audited(view, base, with_record(base, z), Claim(1.0, (), False), 1000),
        monkeypatch,
        lambda patch: patch.setattr(privacy, "add_whole_noise", without),
    )


# Gradients


def linear(weights, x):
    """Its gradient is the sample itself, in two tensors."""
    return (weights["w"] * x[: D - 1]).sum() + weights["b"] * x[D - 1]


ZEROS = {"w": torch.zeros(D - 1), "b": torch.tensor(0.0)}
E0 = torch.eye(D)[0]
FLAT = torch.ones(D) / math.sqrt(D)
BOTH = torch.eye(D)[0] / math.sqrt(2) + torch.eye(D)[D - 1] / math.sqrt(2)


def flat(sums):
    return torch.cat([sums["w"], sums["b"][None]]).double().numpy()


def once_each(clip):
    """The clip, whose sum over a batch that comes again is known: the noise alone is new in each repeat."""
    known = {}

    def remembered(loss, weights, batch, bound):
        x = batch[0]
        of = (x.shape, x.numpy().tobytes())
        if of not in known:
            known[of] = clip(loss, weights, batch, bound)
        return known[of]

    return remembered


def gradients(without, with_it, multiplier=1.3, others=None, claim=None, repeats=500):
    """An audit of one noisy sum of gradients, clipped to 1, of a few other records and one that is replaced."""
    rest = torch.zeros(0, D) if others is None else others

    def view(x, seed):
        noise = seeded(seed, "noise")
        return flat(dpsgd.noisy_sum(linear, ZEROS, (x,), 1.0, multiplier, noise))

    with mock.patch.object(dpsgd, "clipped_sum", once_each(dpsgd.clipped_sum)):
        return audited(
            view,
            torch.cat([rest, without[None]]),
            torch.cat([rest, with_it[None]]),
            claim or Claim(2 / multiplier),
            repeats,
        )


def clip_with(change):
    return lambda patch: patch.setattr(dpsgd, "clipped_sum", change)


def summed(x):
    return {"w": x[:, : D - 1].sum(0), "b": x[:, D - 1].sum()}


def unclipped(loss, weights, batch, clip):
    return summed(batch[0])


def clipped_after(loss, weights, batch, clip):
    total = batch[0].sum(0)
    return summed((total * min(1.0, len(batch[0]) * clip / float(total.norm())))[None])


def by_largest(loss, weights, batch, clip):
    x = batch[0]
    return summed(x * (clip / x.abs().amax(1, keepdim=True).clamp_min(1e-12)).clamp_max(1))


def per_tensor(loss, weights, batch, clip):
    x = batch[0]
    parts = [x[:, : D - 1], x[:, D - 1 :]]
    return summed(torch.cat([p * (clip / p.norm(dim=1, keepdim=True).clamp_min(1e-12)).clamp_max(1) for p in parts], 1))


def batch_norm(loss, weights, batch, clip):
    x = batch[0]
    return clipped_sum(loss, weights, ((x - x.mean(0)) / x.std(0).clamp_min(1e-6),), clip)


def median(loss, weights, batch, clip):
    return clipped_sum(loss, weights, batch, float(batch[0].norm(dim=1).median()))


OTHERS = torch.nn.functional.normalize(torch.randn(5, D, generator=torch.Generator().manual_seed(2)), dim=1)


@pytest.mark.parametrize(
    ("plant", "long", "others"),
    [
        (unclipped, 5 * E0, None),
        (clipped_after, 5 * E0, OTHERS),
        (by_largest, 5 * FLAT, None),
        (per_tensor, 5 * BOTH, None),
        (batch_norm, 50 * FLAT, OTHERS),
    ],
    ids=["3 no clip", "4 after the sum", "5 largest coordinate", "6 per tensor", "18 batch norm"],
)
def test_faults_in_the_clip(monkeypatch, plant, long, others):
    repeats = 2500 if plant is per_tensor else 500
    judge(lambda: gradients(-long, long, others=others, repeats=repeats), monkeypatch, clip_with(plant))


def test_19_the_clip_is_the_median_length_of_the_batch(monkeypatch):
    others = torch.stack([0.5 * E0, 8 * E0])
    judge(lambda: gradients(torch.zeros(D), 5 * E0, others=others), monkeypatch, clip_with(median))


def test_9_the_clip_comes_after_the_noise(monkeypatch):
    def late(loss, weights, batch, clip, multiplier, noise):
        total = summed(batch[0])
        x = torch.cat([total["w"], total["b"][None]])
        x = x + noise.normal(x.shape).float() * multiplier * clip
        return summed((x * min(1.0, 6 * clip / float(x.norm())))[None])

    judge(
        lambda: gradients(-5 * E0, 5 * E0, others=OTHERS),
        monkeypatch,
        lambda patch: patch.setattr(dpsgd, "noisy_sum", late),
    )


def test_a_clip_of_what_is_noisy_already_is_no_fault(monkeypatch):
    original = dpsgd.noisy_sum

    def cut(*given):
        total = original(*given)
        length = math.sqrt(sum(float(x.square().sum()) for x in total.values()))
        return {name: x * min(1.0, 3 / length) for name, x in total.items()}

    monkeypatch.setattr(dpsgd, "noisy_sum", cut)
    assert gradients(-E0, E0, others=OTHERS).verdict != "FAIL"


def test_16_one_tensor_leaves_without_noise(monkeypatch):
    original = dpsgd.noisy_sum

    def bare_bias(loss, weights, batch, clip, multiplier, noise):
        total = original(loss, weights, batch, clip, multiplier, noise)
        return {**total, "b": dpsgd.clipped_sum(loss, weights, batch, clip)["b"]}

    judge(lambda: gradients(-BOTH, BOTH), monkeypatch, lambda patch: patch.setattr(dpsgd, "noisy_sum", bare_bias))


def steps(claim, probability, count, multiplier, repeats=250):
    """An audit of several noisy sums over Poisson samples, by their total."""

    def view(x, seed):
        coins, noise = seeded(seed, "coins"), seeded(seed, "noise")
        total = np.zeros(D)
        for _ in range(count):
            index = dpsgd.poisson_sample(len(x), probability, coins)
            total += flat(dpsgd.noisy_sum(linear, ZEROS, (x[index],), 1.0, multiplier, noise))
        return total

    with mock.patch.object(dpsgd, "clipped_sum", once_each(dpsgd.clipped_sum)):
        return audited(view, -5 * E0[None], 5 * E0[None], claim, repeats, gaussian=False)


def test_14_every_record_is_in_every_step(monkeypatch):
    claim = Claim(0.0, ((1.0, 0.2, 5),))
    judge(
        lambda: steps(claim, 0.2, 5, 1.0),
        monkeypatch,
        lambda patch: patch.setattr(dpsgd, "poisson_sample", lambda n, probability, coins: torch.arange(n)),
    )


def test_15_rounds_are_booked_as_steps(monkeypatch):
    settings = GANSettings(latent=4, width=4, batch_size=4, critic_steps=5, noise="dpsgd")
    book = gan.dpsgd

    def once(what, multiplier, probability, count, promise="", conditions=()):
        return book(what, multiplier, probability, count // settings.critic_steps, promise, conditions)

    def audit():
        booked = gan.released("images", settings, 4, 1, 2.0).sampled
        return steps(Claim(0.0, (booked,)), booked[1], settings.critic_steps, booked[0])

    judge(audit, monkeypatch, lambda patch: patch.setattr(gan, "dpsgd", once))


# Clients


def test_12_the_sum_is_divided_by_the_cohort_that_came(monkeypatch):
    network = nn.Linear(D, 1, bias=False)
    algorithm = DPFedAvg(noise_multiplier=1.0)
    start = {"weight": torch.zeros(1, D)}
    true_size = {"on": False}

    def view(updates, seed):
        share = len(updates) / 40 if true_size["on"] else 0.25
        server = SimpleNamespace(
            participation=share, clients=40, round=0, model=lambda weights: network, note=lambda **figures: None,
            noise=lambda purpose, hidden: seeded(seed, purpose),
        )  # fmt: skip
        mean = {"weight": updates.mean(0, keepdim=True)}
        return algorithm.combine(server, start, mean, [None] * len(updates))["weight"].double().numpy().flatten()

    aligned = E0.repeat(10, 1)
    judge(
        lambda: audited(view, aligned, torch.cat([aligned, -E0[None]]), Claim(1.0, (), False), 1500),
        monkeypatch,
        lambda patch: patch.setitem(true_size, "on", True),
    )
