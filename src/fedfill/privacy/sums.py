"""What a noisy sum of bounded records costs: sensitivities, shares of a budget, noise, and who adds it.

A block of a sum adds up a function of one record at a time, whose l2 length has a bound for every record that could
exist. Noise of standard deviation sigma on each coordinate then has a mu of the bound over sigma for one record added
or removed. A replaced record (by another of the same class) moves a block further; by how much depends on the block.

Symmetric blocks travel as their upper triangle (`pack`), and have noise on their isometric coordinates (`add_noise`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from fedfill.errors import FedfillError, did_you_mean
from fedfill.privacy import accountant
from fedfill.privacy.packed import add_noise, add_whole_noise, isometric, pack, unpack
from fedfill.privacy.releases import Release, unbounded

__all__ = [
    "GIVES_AWAY",
    "BlockBound",
    "Trust",
    "add_noise",
    "add_whole_noise",
    "client_factor",
    "counts",
    "gram",
    "honest_default",
    "isometric",
    "moments",
    "mu_added",
    "mu_for",
    "mu_replaced",
    "other",
    "pack",
    "released",
    "shares",
    "stds",
    "sum_factor",
    "unpack",
]

Trust = Literal["none", "site", "secure", "server"]
"""Who adds the noise: nobody, every client all of it, every client a part, the server."""
Kind = Literal["gram", "moments", "counts", "other"]

COUNTS_SHARE = 0.02
"""Share of the budget that counts get by default: only relative errors of a class's size matter."""
SUM_ALONE = "the server learns the sum of the replies and no single reply"
MASKED = "every host runs the published program, and was given the other hosts' public keys by their own people and not by the server"
"""The condition of an engine that masks replies, in place of `SUM_ALONE`."""
TRUSTED = "the server adds the noise as told, and forgets the single replies"
AS_THEY_ARE = "sums, sent as they are"
GIVES_AWAY = (
    "A Gram matrix without noise of a client with fewer records than features gives its records' features away. "
    "Noise at each client (a target_epsilon with trust=site) or a protocol that shows the server the sum alone "
    "(trust=secure) prevents it."
)
"""To be said wherever a Gram matrix goes to the server without noise."""


@dataclass(frozen=True)
class BlockBound:
    """How far one record can move a block of a sum.

    Attributes:
        bound: Largest l2 length of one record's part, which is how far it moves the block when it is added or removed.
            Above 0.
        replaced: How far at the most when it is replaced by another of the same class, 0..2 times `bound`.
        count: Coordinates of the block; of a symmetric one, those of its upper triangle.
        kind: What is known of the block. The Gram matrix and the moments that are released together are those of the
            same feature vectors; others have the kind "other".
    """

    bound: float
    replaced: float
    count: int
    kind: Kind = "other"

    def __post_init__(self) -> None:
        """Refuse what bounds nothing.

        Raises:
            ValueError: Where a figure is out of its range.
        """
        if not 0 < self.bound < math.inf or not 0 <= self.replaced <= 2 * self.bound or self.count < 1:
            raise ValueError(f"this bounds no block of a sum: {self}")


def gram(radius: float, features: int, classes: int = 1) -> BlockBound:
    """The bound of ``sum z z'``, or of one such matrix for each class, of which a record touches one.

    ``||zz' - ww'||**2 = |z|**4 + |w|**4 - 2 (z.w)**2`` is 2 radius**4 at the most, for orthogonal z and w.

    Args:
        radius: Largest length of a feature vector z.
        features: Its coordinates.
        classes: How many matrices there are.

    Returns:
        The bound of all of them together, in isometric coordinates.
    """
    square = radius * radius
    return BlockBound(square, math.sqrt(2) * square, classes * features * (features + 1) // 2, "gram")


def moments(radius: float, features: int, classes: int) -> BlockBound:
    """The bound of the sum of feature vectors by class; a record is replaced by its opposite at the worst.

    Args:
        radius: Largest length of a feature vector.
        features: Its coordinates.
        classes: How many there are.

    Returns:
        The bound of the sums of all classes together.
    """
    return BlockBound(radius, 2 * radius, classes * features, "moments")


def counts(classes: int) -> BlockBound:
    """The bound of the number of records by class, which a record of the same class leaves as it is.

    Args:
        classes: How many there are.

    Returns:
        The bound of all counts together.
    """
    return BlockBound(1.0, 0.0, classes, "counts")


def other(bound: float, count: int) -> BlockBound:
    """The bound of a block of which no more is known than one record's length.

    Args:
        bound: Largest l2 length of one record's part.
        count: Coordinates.

    Returns:
        A bound with twice that for a replaced record.
    """
    return BlockBound(bound, 2 * bound, count)


def shares(bounds: Mapping[str, BlockBound], harm: Mapping[str, float] | None = None) -> dict[str, float]:
    """How a budget is divided: the part of mu squared (of a record added or removed) that each block costs.

    The rule makes ``sum_b harm_b count_b sigma_b**2`` least at a given mu: a block's share goes with
    ``bound * sqrt(harm * count)``. By default counts get `COUNTS_SHARE`, and of the rest a Gram matrix 2/3 and moments 1/3,
    which are constants that no data were asked for; other blocks are divided by the rule with a harm of 1.

    Args:
        bounds: Of the blocks, by name.
        harm: How much a squared error in one coordinate of each block hurts, above 0; a public figure.

    Returns:
        Shares above 0, by name, which add up to 1.

    Raises:
        FedfillError: Where there is no block, or `harm` has other names or values that are not above 0.
    """
    if not bounds:
        raise FedfillError("blocks: found none; allowed: one or more")
    if harm is not None:
        if harm.keys() != bounds.keys() or not all(0 < value < math.inf for value in harm.values()):
            raise FedfillError(f"harm: found {dict(harm)}; allowed: a number above 0 for each of {', '.join(bounds)}")
        return _normal({name: b.bound * math.sqrt(harm[name] * b.count) for name, b in bounds.items()})
    counted = [name for name, b in bounds.items() if b.kind == "counts"]
    rest = {name: b for name, b in bounds.items() if b.kind != "counts"}
    if not rest or not counted:
        return _default(bounds)
    given = {name: COUNTS_SHARE / len(counted) for name in counted}
    given |= {name: (1 - COUNTS_SHARE) * share for name, share in _default(rest).items()}
    return _normal({name: given[name] for name in bounds})


def _default(bounds: Mapping[str, BlockBound]) -> dict[str, float]:
    kinds = {b.kind: name for name, b in bounds.items()}
    if len(bounds) == 2 and kinds.keys() == {"gram", "moments"}:
        return {name: {"gram": 2 / 3, "moments": 1 / 3}[b.kind] for name, b in bounds.items()}
    return _normal({name: b.bound * math.sqrt(b.count) for name, b in bounds.items()})


def _normal(weights: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


@functools.lru_cache(maxsize=1024)
def mu_for(epsilon: float, delta: float) -> float:
    """The largest mu that keeps a promise; `accountant.epsilon` of it is the promise, to a billionth of mu.

    Args:
        epsilon: What is promised, above 0: for one record added or removed where mu is used for `stds`.
        delta: Between 0 and 1, both excluded.

    Returns:
        A mu whose exact epsilon is no more than what was promised.

    Raises:
        FedfillError: Where `epsilon` or `delta` is out of range.
    """
    return 1 / accountant.std_for(1.0, epsilon, delta)


def stds(bounds: Mapping[str, BlockBound], parts: Mapping[str, float], mu: float) -> dict[str, float]:
    """The noise of each block, for one who adds all of it.

    Args:
        bounds: Of the blocks, by name.
        parts: Their `shares`.
        mu: Of all blocks together for one record added or removed, above 0; infinite for no noise.

    Returns:
        Standard deviations on each (isometric) coordinate, ``bound / (mu sqrt(share))``, by name.

    Raises:
        FedfillError: Where the shares have other names, are not above 0 or don't add up to 1.
        ValueError: Where `mu` is not above 0.
    """
    above = all(part > 0 for part in parts.values())
    if parts.keys() != bounds.keys() or not above or not math.isclose(math.fsum(parts.values()), 1.0):
        raise FedfillError(
            f"share: found {dict(parts)}; allowed: numbers above 0 that add up to 1, for each of {', '.join(bounds)}"
        )
    if not mu > 0:
        raise ValueError(f"no noise makes a mu of {mu}")
    return {name: b.bound / (mu * math.sqrt(parts[name])) for name, b in bounds.items()}


def mu_added(bounds: Mapping[str, BlockBound], noise: Mapping[str, float]) -> float:
    """The mu of all blocks together for one record added or removed.

    Args:
        bounds: Of the blocks, by name.
        noise: Their standard deviations, by name.

    Returns:
        The root of the sum of squares of bound over std: exact where one record can attain all bounds. Infinite where a
        block has no noise.
    """
    return math.hypot(*(accountant.gaussian_mu(b.bound, noise[name]) for name, b in bounds.items()))


def mu_replaced(bounds: Mapping[str, BlockBound], noise: Mapping[str, float]) -> float:
    """The mu of all blocks together for one record replaced by another of the same class.

    A Gram matrix and moments of the same features don't have their worst case at once: for unit vectors with u = z.w,
    mu squared is ``a**2 (2 - 2 u**2) + b**2 (2 - 2 u)`` with a and b the mus of the two for a record added. Its maximum, at
    u = -b**2 / (2 a**2) or -1, is exact where features fill the ball in two dimensions or more.

    Args:
        bounds: Of the blocks, by name.
        noise: Their standard deviations, by name.

    Returns:
        That maximum for one Gram matrix with moments (counts add nothing). Other blocks add their squares, which is an
        upper bound. Infinite where a block that the record moves has no noise.
    """
    pair = _same_features(bounds)
    rest = [accountant.gaussian_mu(b.replaced, noise[name]) for name, b in bounds.items() if name not in pair]
    if not pair:
        return math.hypot(*rest)
    a, b = (accountant.gaussian_mu(bounds[name].bound, noise[name]) for name in pair)
    return math.hypot(_together(a, b), *rest)


def _same_features(bounds: Mapping[str, BlockBound]) -> tuple[str, ...]:
    """Names of the Gram matrix and the moments, where there is one of each and their bounds are of the same radius."""
    grams = [name for name, b in bounds.items() if b.kind == "gram"]
    means = [name for name, b in bounds.items() if b.kind == "moments"]
    if len(grams) != 1 or len(means) != 1:
        return ()
    same = math.isclose(bounds[grams[0]].bound, bounds[means[0]].bound ** 2)
    return (grams[0], means[0]) if same else ()


def _together(a: float, b: float) -> float:
    if math.inf in (a, b):
        return math.inf
    if b * b > 2 * a * a:
        return 2 * b
    return math.hypot(math.sqrt(2) * a, math.sqrt(2) * b, b * b / (math.sqrt(2) * a)) if a else 0.0


def honest_default(replies: int) -> int:
    """How many of the clients in a sum are relied on to keep their part of the noise: two thirds.

    Args:
        replies: Clients in the sum, 1 or more.

    Returns:
        Two thirds of them, rounded up.
    """
    return -(-2 * replies // 3)


def client_factor(trust: Trust, replies: int, honest: int) -> float:
    """What each client multiplies the stds by.

    Args:
        trust: Who adds the noise.
        replies: Clients that are asked.
        honest: How many of them are relied on, with ``secure``; fixed before they are asked.

    Returns:
        1 for ``site``, ``1 / sqrt(honest)`` for ``secure``, else 0.

    Raises:
        FedfillError: Where `trust` is unknown, or `honest` is not in 1..replies with ``secure``.
    """
    _check(trust, replies, honest)
    if trust == "secure":
        return 1 / math.sqrt(honest)
    return 1.0 if trust == "site" else 0.0


def sum_factor(trust: Trust, replies: int, honest: int) -> float:
    """The std of the noise in a sum over the stds, all who add to it taken together.

    Args:
        trust: Who adds the noise.
        replies: Clients in the sum.
        honest: As in `client_factor`; where fewer than these answered, the sum must not be opened.

    Returns:
        0, ``sqrt(replies)``, ``sqrt(replies / honest)`` or 1, in the order of `Trust`.

    Raises:
        FedfillError: Where `trust` is unknown, or `honest` is not in 1..replies with ``secure``.
    """
    _check(trust, replies, honest)
    if trust == "secure":
        return math.sqrt(replies / honest)
    return {"none": 0.0, "site": math.sqrt(replies), "server": 1.0}[trust]


def _check(trust: Trust, replies: int, honest: int) -> None:
    if trust not in get_args(Trust):
        raise FedfillError(f"trust: found '{trust}'; {did_you_mean(trust, get_args(Trust))}")
    if replies < 1:
        raise ValueError(f"a sum has a reply or more, not {replies}")
    if trust == "secure" and not 1 <= honest <= replies:
        raise FedfillError(f"honest: found {honest}; allowed: 1 to {replies}, the number of clients in the sum")


def released(
    words: str,
    bounds: Mapping[str, BlockBound],
    noise: Mapping[str, float],
    trust: Trust,
    replies: int = 1,
    honest: int = 1,
    hidden: str = "",
    conditions: Iterable[str] = (),
) -> Release:
    """What the ledger books for the sums that one client sends.

    Args:
        words: What is summed, in plain words, such as "sums of features by class". The same for every client and round.
        bounds: Of the blocks, by name.
        noise: The `stds`, by name; not read with ``none``.
        trust: Who adds the noise.
        replies: Clients that are asked, with ``secure``.
        honest: As in `client_factor`.
        hidden: With ``secure``: under which condition single replies are kept from the server, such as `SUM_ALONE` or `MASKED`.
            Empty where they aren't: then there is no guarantee.
        conditions: More of them, such as that the features of a record depend on that record alone.

    Returns:
        A release with both mus for ``site``, and for ``secure`` where replies are hidden; with conditional ones for
        ``server`` and where they aren't; without any for ``none``.

    Raises:
        FedfillError: As in `client_factor`.
    """
    _check(trust, replies, honest)
    if trust == "none":
        gives_away = any(block.kind == "gram" for block in bounds.values())
        return unbounded(f"{AS_THEY_ARE}: {words}{f'. {GIVES_AWAY}' if gives_away else ''}")
    share = f"at least {honest} of the {replies} clients in the sum add their share of noise and keep it to themselves"
    adds = {"site": "at each client", "secure": "shared between the clients", "server": "by the server alone"}[trust]
    more = {"site": (), "secure": (hidden or SUM_ALONE, share), "server": (TRUSTED,)}[trust]
    added, replaced = mu_added(bounds, noise), mu_replaced(bounds, noise)
    met = trust == "site" or (trust == "secure" and bool(hidden))
    kind = "Discrete Gaussian" if trust == "secure" else "Gaussian"
    return Release(
        f"{kind} noise {adds}, std by block, on {words}",
        replaced if met else None,
        (*more, *conditions),
        None if met else replaced,
        added_mu=added if met else None,
        conditional_added_mu=None if met else added,
    )
