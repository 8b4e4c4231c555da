"""Verdicts: a claim of the ledger beside what an attack proves of it.

A lower bound above the ledger's epsilon is a bug in noise, clipping, sampling or booking, up to the stated error. One near it
says that the account is tight. One near 0 says that the attack was weak; it is no evidence of privacy.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from fedfill.privacy import accountant
from fedfill.privacy.bounds import Curve, Floats, Rates, gaussian_curve, normal_mu, normal_p_value, trade_off
from fedfill.privacy.one_run import Guesses
from fedfill.privacy.scores import halves, joint_scores, lattice_scores, roc

FAIL = 1e-4
"""A claim that is refuted at this level is wrong: at 95 % a perfect test would fail 10 of 200 sound runs."""
SUSPICIOUS = 0.05
TIGHT = 0.5
"""From which share of the ledger's epsilon an audit is called tight."""
POINTS = 200
SHARES = (0.8, 0.1, 0.1)
"""Of the error, for the exact score, the joint one and the lattice: the first is the best there is for sound code."""
REACH = 1.5
"""A curve is told up to this multiple of the ledger's epsilon."""

Verdict = Literal["PASS (tight)", "PASS (loose attack)", "suspicious: repeat with more", "FAIL", "no claim to test"]


@dataclass(frozen=True)
class Claim:
    """What the ledger says of one release, or of several together.

    Attributes:
        mu: Of all Gaussian mechanisms together.
        sampled: Gaussian mechanisms on Poisson samples, as in `accountant.replaced_epsilon`.
        replaced: Whether neighbours differ by a record that is replaced; else by one record, or client, that is added or removed.
    """

    mu: float
    sampled: tuple[tuple[float, float, int], ...] = ()
    replaced: bool = True

    def epsilon(self, delta: float) -> float:
        """The ledger's figure."""
        whole = accountant.replaced_epsilon if self.replaced else accountant.added_epsilon
        return whole(self.mu, self.sampled, delta)

    def curve(self, delta: float) -> Curve:
        """The whole claim: exact for Gaussian noise, else by the accountant's own pairs of epsilon and delta."""
        if not self.sampled:
            return gaussian_curve(self.mu)
        deltas = accountant.replaced_deltas if self.replaced else accountant.added_deltas
        epsilons = tuple(np.linspace(0, REACH * max(self.epsilon(delta), 0.1), POINTS).tolist())
        return trade_off(epsilons, deltas(self.mu, self.sampled, epsilons))


@dataclass(frozen=True)
class Finding:
    """One line of an audit.

    Attributes:
        released: What was attacked.
        mechanism: How it was made, in the ledger's words.
        neighbours: What the coin of a canary toggles.
        ledger_epsilon: What the ledger claims; None: nothing.
        found_epsilon: What was proved, with confidence 1 - alpha: epsilon is at least this.
        found_directly: The same without presuming that the release is as Gaussian noise is.
        gaussian_mu: The mu behind `found_epsilon`.
        ceiling: The largest epsilon that this audit could have found.
        method: In a few words.
        canaries: Canaries, or repeats with and without one together.
        guesses: Of one run; 0 for repeats.
        right: Of the guesses.
        p_value: Level at which the claim is refuted; 1 without a claim.
        area: Under the curve of hits over false alarms; None where it was not computed.
        verdict: In the words of `Verdict`.
    """

    released: str
    mechanism: str
    neighbours: str
    ledger_epsilon: float | None
    found_epsilon: float
    found_directly: float
    gaussian_mu: float
    ceiling: float
    method: str
    canaries: int
    guesses: int
    right: int
    p_value: float
    area: float | None
    verdict: Verdict

    @property
    def ratio(self) -> float | None:
        """What was found over what is claimed."""
        return self.found_epsilon / self.ledger_epsilon if self.ledger_epsilon else None

    def document(self) -> dict[str, Any]:
        """For ``audit.json``, which has no infinity."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def judged(claimed: float | None, found: float, p_value: float) -> Verdict:
    """The verdict on a claim of so much epsilon, of which so much was found."""
    if claimed is None:
        return "no claim to test"
    if p_value < FAIL:
        return "FAIL"
    if p_value < SUSPICIOUS:
        return "suspicious: repeat with more"
    return "PASS (tight)" if found >= TIGHT * claimed else "PASS (loose attack)"


def of_repeats(
    released: str, mechanism: str, claim: Claim | None, figures_in: Floats, figures_out: Floats, *,
    coordinates: int = 0, delta: float = 1e-5, alpha: float = 0.05, neighbours: str = "", gaussian: bool = True,
) -> Finding:  # fmt: skip
    """The verdict from repeats of a release with and without a canary.

    Three scores are tried: the first figure alone, which for Gaussian noise is the best there is; all figures together; and the
    lattice of single coordinates. They share the error as `SHARES` says.

    Args:
        released: What was repeated.
        mechanism: In the ledger's words.
        claim: Of the ledger; None: it has none.
        figures_in: Of each repeat with the canary, ``[n, k]``: the exact score first, then anything.
        figures_out: Of those without, ``[n, k]``.
        coordinates: How many of the last figures are single coordinates as they were released.
        delta: At which epsilon is told.
        alpha: 1 minus the confidence.
        neighbours: What the canary's coin toggles.
        gaussian: Whether the release has Gaussian noise, so that its exact score is normal.

    Returns:
        The finding.
    """
    first, last = figures_in[:, 0], figures_out[:, 0]
    scores: list[tuple[Floats, Floats, bool, float | None]] = [(first, last, gaussian, None)]
    if figures_in.shape[1] > 1:
        by_all = joint_scores(figures_in, figures_out)
        scores.append((by_all[0], by_all[1], gaussian, by_all[2]))
    if coordinates:
        marks = lattice_scores(figures_in[:, -coordinates:], figures_out[:, -coordinates:])
        scores.append((*marks, False, 0.5))
    shares = SHARES if len(scores) > 1 else (1.0,)
    tests = [
        _test(ins, outs, claim, delta, alpha * share, normal, threshold)
        for (ins, outs, normal, threshold), share in zip(scores, shares, strict=False)
    ]
    found = max(tests, key=lambda test: test[0])
    mu, direct = found[0], max(test[1] for test in tests)
    p_value = min(1.0, *(test[2] / share for test, share in zip(tests, shares, strict=False)))
    n = min(len(first), len(last))
    claimed = None if claim is None else claim.epsilon(delta)
    # with the parametric test any mu can be found; without it, one that makes no error
    ceiling = accountant.epsilon(Rates(0, n, 0, n).mu(alpha), delta) if not gaussian else math.inf
    epsilon = max(accountant.epsilon(mu, delta), direct)
    return Finding(
        released, mechanism, neighbours, claimed, epsilon, direct, mu, ceiling,
        f"{n} repeats with and without the canary, {('exact score', 'joint score', 'lattice score')[tests.index(found)]}",
        len(first) + len(last), 0, 0, p_value, roc(first, last)[0], judged(claimed, epsilon, p_value),
    )  # fmt: skip


def _test(
    ins: Floats, outs: Floats, claim: Claim | None, delta: float, alpha: float, gaussian: bool, threshold: float | None
) -> tuple[float, float, float]:
    """The mu that is found, the epsilon that needs no family, and the p-value of the claim."""
    if threshold is None:
        # the midpoint is learnt on one half and used on the other
        (learn_in, ins_left), (learn_out, outs_left) = halves(ins), halves(outs)
        threshold = float(learn_in.mean() + learn_out.mean()) / 2
        rates = Rates.at(threshold, ins_left, outs_left)
    else:
        rates = Rates.at(threshold, ins, outs)
    direct = rates.epsilon(delta, alpha)
    p_value = 1.0 if claim is None else rates.p_value(claim.curve(delta))
    mu = rates.mu(alpha)
    if gaussian:
        normal = normal_mu(ins, outs, alpha)
        if normal.sound:
            mu = normal.bound
            if claim is not None and not claim.sampled:
                p_value = normal_p_value(ins, outs, claim.mu)
    return mu, direct, p_value


def of_guesses(
    released: str, mechanism: str, claim: Claim | None, guesses: Guesses, *,
    delta: float = 1e-5, alpha: float = 0.05, neighbours: str = "", area: float | None = None,
) -> Finding:  # fmt: skip
    """The verdict from guesses of the coins of one run.

    Args:
        released: What the canaries went into.
        mechanism: In the ledger's words.
        claim: Of the ledger; None: it has none.
        guesses: Of the coins.
        delta: At which epsilon is told.
        alpha: 1 minus the confidence.
        neighbours: What a canary's coin toggles.
        area: Under the curve of hits over false alarms.

    Returns:
        The finding.
    """
    mu, direct = guesses.mu(alpha), guesses.epsilon(delta, alpha)
    p_value = 1.0 if claim is None else guesses.p_value(claim.curve(delta))
    claimed = None if claim is None else claim.epsilon(delta)
    epsilon = max(accountant.epsilon(mu, delta), direct)
    ceiling = accountant.epsilon(guesses.perfect.mu(alpha), delta)
    return Finding(
        released, mechanism, neighbours, claimed, epsilon, direct, mu, ceiling, "one run, guesses of the canaries' coins",
        guesses.canaries, guesses.made, guesses.right, p_value, area, judged(claimed, epsilon, p_value),
    )  # fmt: skip
