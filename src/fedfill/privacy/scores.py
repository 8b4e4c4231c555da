"""Scores of repeated releases: how much one looks like it was made with a canary, larger where it was.

Each is a pure function of what was released. It is learnt on one half of the repeats and judged on the other, so that any of
them gives a sound bound. NumPy and SciPy only.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import linalg

from fedfill.privacy.bounds import Floats
from fedfill.privacy.risk import wilson

RIDGE = 1e-9
"""Of the mean variance, added to each: where noise leaves a direction out, the score shows it as a huge distance."""
LATTICE = (8, 12, 16, 20)
"""Bits behind the point on which noise of a low precision leaves its marks."""
SHOWN = 50
"""Repeats from which the marks are learnt."""


def halves(values: Floats) -> tuple[Floats, Floats]:
    """The repeats of even and of odd number."""
    return values[0::2], values[1::2]


def advantage(hits: int, ins: int, alarms: int, outs: int) -> tuple[float, tuple[float, float]]:
    """The membership advantage: hits less false alarms (Yeom et al. 2018), 0 by a coin and 1 with certainty.

    Args:
        hits: Members that were called members.
        ins: Members, at least 1.
        alarms: Others that were called members.
        outs: Others, at least 1.

    Returns:
        The advantage, -1..1, and its interval of 95 % (Newcombe 1998, method 10).
    """
    p, q = hits / ins, alarms / outs
    (low_p, high_p), (low_q, high_q) = wilson(p, ins), wilson(q, outs)
    found = p - q
    return found, (found - math.hypot(p - low_p, high_q - q), found + math.hypot(high_p - p, q - low_q))


def told_apart(ins: Floats, outs: Floats) -> tuple[float, tuple[float, float]]:
    """The membership advantage of a score, at the threshold that is best on one half, judged on the other.

    Args:
        ins: Scores of members, larger ones speak for members, at least 2.
        outs: Scores of others, at least 2.

    Returns:
        As `advantage`.
    """
    (learn_in, test_in), (learn_out, test_out) = halves(ins), halves(outs)
    places = np.unique(np.concatenate([learn_in, learn_out]))
    gains = [float((learn_in >= x).mean() - (learn_out >= x).mean()) for x in places]
    threshold = places[int(np.argmax(gains))]
    return advantage(int((test_in >= threshold).sum()), len(test_in), int((test_out >= threshold).sum()), len(test_out))


def joint_scores(ins: Floats, outs: Floats) -> tuple[Floats, Floats, float]:
    """Fisher's discriminant of several figures of each release, for faults that one projection misses.

    Args:
        ins: Figures of the repeats with the canary, ``[n, k]``: projections, norms, single coordinates, of one or more releases.
        outs: Those without it, ``[n, k]``.

    Returns:
        Scores of the second half of each, and the threshold between them that the first halves give.
    """
    (learn_in, test_in), (learn_out, test_out) = halves(ins), halves(outs)
    centre = (learn_in.mean(0) + learn_out.mean(0)) / 2
    scale = np.concatenate([learn_in - learn_in.mean(0), learn_out - learn_out.mean(0)]).std(0)
    gap = learn_in.mean(0) - learn_out.mean(0)
    # figures of one size, so that one ridge suits all; what has no noise keeps its own
    unit = np.where(scale > 0, scale, np.maximum(np.abs(gap), 1e-30))
    a, b = (learn_in - learn_in.mean(0)) / unit, (learn_out - learn_out.mean(0)) / unit
    spread = (a.T @ a + b.T @ b) / max(len(a) + len(b) - 2, 1)
    ridge = RIDGE * max(float(np.trace(spread)) / len(spread), RIDGE)
    weights = linalg.solve(spread + ridge * np.eye(len(spread)), gap / unit, assume_a="pos") / unit
    return (test_in - centre) @ weights, (test_out - centre) @ weights, 0.0


def lattice_scores(ins: Floats, outs: Floats) -> tuple[Floats, Floats]:
    """How many coordinates lie on the lattice of the other releases with the canary, less those without it.

    Noise that is coarser than what it is added to leaves the digits behind its own as they were. Digits that are never seen
    twice are no mark; noise of full precision has none.

    Args:
        ins: Single coordinates of the repeats with the canary, ``[n, k]``.
        outs: Those without it, ``[n, k]``.

    Returns:
        Scores -4 k..4 k of the repeats from which nothing was learnt.
    """
    found_in, found_out = np.zeros(len(ins) - SHOWN), np.zeros(len(outs) - SHOWN)
    for bits in LATTICE:
        digits_in, digits_out = np.mod(ins * 2.0**bits, 1.0), np.mod(outs * 2.0**bits, 1.0)
        for k in range(ins.shape[1]):
            of_in, of_out = (_usual(digits[:SHOWN, k]) for digits in (digits_in, digits_out))
            if of_in == of_out or of_in is None or of_out is None:
                continue
            for found, digits in ((found_in, digits_in), (found_out, digits_out)):
                found += (digits[SHOWN:, k] == of_in).astype(float) - (digits[SHOWN:, k] == of_out)
    return found_in, found_out


def _usual(digits: Floats) -> float | None:
    """What most of these digits are; None where no one is in the majority."""
    values, times = np.unique(digits, return_counts=True)
    most = int(times.argmax())
    return float(values[most]) if 2 * int(times[most]) > len(digits) else None


def roc(ins: Floats, outs: Floats, at: float = 1e-3) -> tuple[float, float]:
    """Area under the curve of hits over false alarms, and hits where false alarms are at most `at`."""
    order = np.sort(outs)
    below = np.searchsorted(order, ins, "left") + np.searchsorted(order, ins, "right")
    threshold = order[len(order) - 1 - int(at * len(order))]
    return float(below.mean()) / (2 * len(outs)), float((ins > threshold).mean())
