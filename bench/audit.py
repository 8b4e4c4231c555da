"""Audits with known truth: how tight they are, and that sound code is not blamed.

``python -m bench.audit tight`` audits Gaussian sums, DP-SGD in a GAN and clipped averages of clients at epsilon 1, 3 and 8;
``python -m bench.audit alarms`` audits 200 sound releases and counts the alarms.
"""

from __future__ import annotations

import sys
import time

import torch
from tests.studies.audits import audited_sums

import fedfill
from fedfill.data.samples import Samples
from fedfill.privacy import accountant
from fedfill.privacy import sums as privacy
from fedfill.privacy.audit import Claim, Finding, of_guesses
from fedfill.privacy.keyed import seeded
from fedfill.privacy.one_run import Guesses
from fedfill.streams import derive, numpy_stream
from fedfill.studies.auditing.gradient_canaries import GradientCanaries
from fedfill.synthesis import gan
from fedfill.synthesis.gan_networks import GANSettings

REPEATS = {8.0: 4000, 3.0: 10_000, 1.0: 40_000}
PROBABILITY, STEPS = 0.1, 50


def multiplier_for(epsilon: float, probability: float, steps: int) -> float:
    """The noise at which a replaced record costs so much."""
    low, high = 0.3, 100.0
    while high - low > 1e-4 * low:
        middle = (low + high) / 2
        found = accountant.replaced_epsilon(0.0, ((middle, probability, steps),), 1e-5)
        low, high = (middle, high) if found > epsilon else (low, middle)
    return high


def of_gan(
    multiplier: float, seed: int, canaries: int = 1000, probability: float = PROBABILITY, steps: int = STEPS
) -> Finding:
    """Canary gradients in one run of a GAN's critic."""
    like = Samples(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    inserted = GradientCanaries(canaries, seed)
    data = inserted.records(like, torch.zeros(canaries, dtype=torch.int64))
    settings = GANSettings(
        latent=4,
        width=2 if canaries <= 1000 else 5,
        batch_size=int(probability * canaries),
        critic_steps=steps,
        noise="dpsgd",
    )
    start = gan.start((1, 8, 8), settings, torch.Generator().manual_seed(derive(seed, "start")))
    draws = torch.Generator().manual_seed(derive(seed, "draws"))
    with inserted.inserted():
        gan.train(start, data, 1, settings, draws, seeded(seed, "noise"), multiplier)
    release = gan.released("images", settings, canaries, 1, multiplier)
    assert release.sampled is not None
    guesses = Guesses.of(inserted.scores, inserted.coins)
    return of_guesses("images", release.mechanism, Claim(0.0, (release.sampled,)), guesses)


def of_clients(epsilon: float, seed: int, canaries: int) -> Finding:
    """Canary clients in five rounds of dpfedavg, in which everybody takes part."""
    multiplier = 5**0.5 / privacy.mu_for(epsilon, 1e-5)
    found = fedfill.audit(
        "dpfedavg", rounds=5, clients=3, canaries=canaries, seed=seed, noise_multiplier=multiplier, data_fraction=0.2
    )
    return found.findings[0]


def tight(seeds: range = range(3)) -> None:
    """The table of docs/privacy-audit.md."""
    for epsilon, repeats in REPEATS.items():
        cases = {
            f"sums, replaced, {repeats} repeats": lambda s, e=epsilon, n=repeats: audited_sums(e, True, n, s),
            f"sums, added, {repeats} repeats": lambda s, e=epsilon, n=repeats: audited_sums(e, False, n, s),
            "DP-SGD, 1000 canaries": lambda s, e=epsilon: of_gan(multiplier_for(e, PROBABILITY, STEPS), s),
            "DP-SGD, 5000 canaries": lambda s, e=epsilon: of_gan(multiplier_for(e, PROBABILITY, STEPS), s, 5000),
            "clients, 1000 canaries": lambda s, e=epsilon: of_clients(e, s, 1000),
            "clients, 5000 canaries": lambda s, e=epsilon: of_clients(e, s, 5000),
        }
        for name, audit in cases.items():
            began = time.perf_counter()
            found = [audit(seed) for seed in seeds]
            seconds = (time.perf_counter() - began) / len(found)
            ratios = " ".join(f"{one.ratio:.2f}" for one in found)
            bounds = " ".join(f"{one.found_epsilon:.3g}" for one in found)
            verdicts = {one.verdict for one in found}
            ledger = found[0].ledger_epsilon
            print(
                f"{epsilon:g} | {name} | {ledger:.3g} | {bounds} | {ratios} | {seconds:.0f} s | {verdicts}", flush=True
            )


def alarms(runs: int = 200) -> None:
    """Sound releases of all kinds; nothing may fail."""
    failed = suspicious = 0
    for k in range(runs):
        stream = numpy_stream(k, "alarms")
        kind = k % 4
        epsilon = float(stream.choice([1.0, 3.0, 8.0]))
        if kind < 2:
            blocks = {"gram": bool(stream.random() < 0.5), "counts": bool(stream.random() < 0.5)}
            found = audited_sums(epsilon, kind == 0, 500, derive(k, "audit"), **blocks)
        elif kind == 2:
            found = of_gan(multiplier_for(epsilon, 0.2, 5), derive(k, "audit"), 200, 0.2, 5)
        else:
            found = of_clients(epsilon, k, 300)
        failed += found.verdict == "FAIL"
        suspicious += found.p_value < 0.05
        if found.p_value < 0.05:
            print(k, found, flush=True)
    print(f"{runs} sound releases: {failed} FAIL, {suspicious} with p < 0.05", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"tight": tight, "alarms": alarms}[sys.argv[1]]()
