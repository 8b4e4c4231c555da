"""Releases: what a field of a reply gives away about a client's data, and how that is declared."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedfill.privacy import accountant
from fedfill.tree import Record

WORDS = 1000
"""Characters of the words of a release at the most: they are kept in every checkpoint, and may come from elsewhere."""
CONDITIONS = 20
STEPS = 10**9
MOST_NOISE = 1e9


@dataclass(frozen=True)
class Release(Record):
    """What one field of a reply gives away about one record of the client that sends it.

    It is told for one record that is replaced by another of the same class and, where it can be, for one that is added or
    removed.

    Attributes:
        mechanism: How the field was made, in plain words. Releases with the same words are booked together, so they
            should name settings and not figures that change with every round or client. At most `WORDS` characters.
        mu: Parameter of Gaussian differential privacy with respect to one record. 0: independent of this client's
            data, or made only from what others already hold. None: nothing bounds it.
        conditions: Under which `mu` holds; where `mu` is None, under which `conditional_mu` would hold. At most
            `CONDITIONS`, each of at most `WORDS` characters.
        conditional_mu: Where `mu` is None, what the noise alone would cost if the conditions were met.
        sampled: What is released beside `mu` by a Gaussian mechanism on Poisson samples: noise multiplier with respect
            to the largest norm of one record's share, probability of a record, steps. None: nothing.
        added_mu: As `mu`, for one record that is added or removed; with a mu alone, as a replaced record is one of each.
            None: nothing bounds it, or nobody has worked it out.
        conditional_added_mu: As `conditional_mu`, where `added_mu` is None.
    """

    mechanism: str
    mu: float | None
    conditions: tuple[str, ...] = ()
    conditional_mu: float | None = None
    sampled: tuple[float, float, int] | None = None
    added_mu: float | None = None
    conditional_added_mu: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no release, and write a mu without a bound as None; hosts' words arrive here unseen.

        Raises:
            ValueError: Where a figure is out of its range, or the words are too long.
        """
        if self.mu is None and self.added_mu is not None:
            raise ValueError("a release with an added_mu has a mu of twice as much at the most, not none")
        for name in ("mu", "conditional_mu", "added_mu", "conditional_added_mu"):
            value = getattr(self, name)
            if value is None:
                continue
            if not value >= 0:
                raise ValueError(f"{name} of a release is 0 or more, not {value}")
            if value > _LARGEST:
                object.__setattr__(self, name, None)
        if self.mu is None:
            object.__setattr__(self, "added_mu", None)
        if len(self.conditions) > CONDITIONS:
            raise ValueError(f"a release has {CONDITIONS} conditions at the most, not {len(self.conditions)}")
        if max(map(len, (self.mechanism, *self.conditions))) > WORDS:
            raise ValueError(f"the words of a release have {WORDS} characters at the most")
        if self.sampled is not None:
            _check_sampled(*self.sampled)


_LARGEST = math.sqrt(sys.float_info.max)  # of a mu whose square can be written down


def _check_sampled(noise: float, probability: float, steps: int) -> None:
    if not 0 < noise <= MOST_NOISE:
        raise ValueError(
            f"the noise multiplier of a release lies above 0 and is {MOST_NOISE:g} at the most, not {noise}"
        )
    if not 0 < probability <= 1:
        raise ValueError(f"the probability of a release lies above 0 and is 1 at the most, not {probability}")
    if not isinstance(steps, int) or not 1 <= steps <= STEPS:
        raise ValueError(f"the steps of a release are a whole number from 1 to 10^9, not {str(steps)[:20]}")


def public(why: str) -> Release:
    """A field that says nothing about the client's own records.

    Args:
        why: In plain words, such as "drawn from a fixed distribution" or "made from what others already hold".

    Returns:
        A release with a mu of 0, whether a record is replaced or added.
    """
    return Release(why, 0.0, added_mu=0.0)


def unbounded(what: str, conditions: Iterable[str] = ()) -> Release:
    """A field about which nothing is guaranteed.

    Args:
        what: In plain words, such as "model update as trained".
        conditions: What would have to hold for a guarantee; mostly there are none.

    Returns:
        A release without a mu.
    """
    return Release(what, None, tuple(conditions))


def gaussian(
    what: str,
    sensitivity: float,
    std: float,
    copies: int = 1,
    conditions: Iterable[str] = (),
    met: bool = True,
    noise: str | None = None,
    added: float | None = None,
) -> Release:
    """A field with Gaussian noise on every coordinate.

    Several vectors about disjoint records, such as the means of different classes, are one release with the
    sensitivity of the worst of them.

    Args:
        what: What the noise is on, in plain words, such as "3 class means".
        sensitivity: Largest l2 distance that one record can move it, 0 or more; infinite where nothing bounds it.
        std: Standard deviation of the noise on each coordinate, 0 or more.
        copies: How often the same thing is in the field, each time with fresh noise; with a filter, how many are drawn.
        conditions: Under which the figure holds.
        met: Whether this run meets them as far as anyone can promise. If not, there is no guarantee, and the figure is
            kept as what the noise alone would cost.
        noise: Words for the noise in place of "std 3", for a std that differs between clients.
        added: As `sensitivity`, for one record that is added or removed; None: nothing bounds it.

    Returns:
        A release with the mus of this noise. No mu where there is no noise or no bounded sensitivity.

    Raises:
        FedfillError: Where `std` or `copies` is out of range.
        ValueError: Where `sensitivity` or `added` is negative or not a number.
    """
    mu = accountant.gaussian_mu(sensitivity, std, copies)
    added_mu = None if added is None else accountant.gaussian_mu(added, std, copies)
    words = f"Gaussian noise ({noise or f'std {std:g}'}) on {what}" if std > 0 else f"no noise on {what}"
    if copies > 1:
        words += f", {copies} copies each"
    if met:
        return Release(words, mu, tuple(conditions), added_mu=added_mu)
    return Release(words, None, tuple(conditions), mu, conditional_added_mu=added_mu)


NUMBER_KNOWN = (
    "the number of the client's records is public, as the probability of a record and the steps follow from it"
)


def dpsgd(
    what: str,
    noise_multiplier: float,
    probability: float,
    steps: int,
    target: tuple[float, float] | None = None,
    conditions: Iterable[str] = (),
) -> Release:
    """What was made with stochastic gradient descent on clipped and noisy gradients (Abadi et al. 2016).

    Args:
        what: In plain words, such as "images of a generator".
        noise_multiplier: Standard deviation of the noise on a sum of gradients over the norm that each is clipped to,
            above 0.
        probability: With which a record is in a step, in (0, 1].
        steps: How many.
        target: Epsilon and delta that the noise was found for, which then differs between clients; None: the noise is told.
        conditions: Others under which the figure holds, beside `NUMBER_KNOWN`.

    Returns:
        A release whose epsilon is that of all steps together.

    Raises:
        ValueError: Where noise, probability or steps are out of range.
    """
    words = f"noise multiplier {noise_multiplier:g}"
    if target is not None:
        words = f"epsilon {target[0]:g} at delta {target[1]:g} for a record added or removed"
    named = (NUMBER_KNOWN, *conditions)
    sampled = (noise_multiplier, probability, steps)
    return Release(f"DP-SGD ({words}) behind {what}", 0.0, named, sampled=sampled, added_mu=0.0)


class Declared(Record):
    """Base of records that cross, whole messages and the typed parts of them, each with a declaration of its own.

    Attributes:
        declared: What fields of a reply release about the client's data, where that is the same for every reply.
            A field that is declared neither here nor by ``client.release`` counts as a release without a guarantee.
    """

    declared: ClassVar[Mapping[str, Release]] = {}
