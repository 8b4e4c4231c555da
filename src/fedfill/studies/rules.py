"""Which methods a study tries: few, for what was seen of the clients; fixed before any study was run, and tuned on none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedfill.studies.look import Look

Goal = Literal["everyone", "own"]
"""Where the model will be used: on samples like those of all clients together, or at each client on its own."""

SUMS, TRAINED = "sums", "trained"
HEAD = ":head="

PATCHES = "patches(300, cells=4) > project(2048)"
"""Features of images whose filters are learned by sums."""


@dataclass(frozen=True)
class Entry:
    """One thing that is run.

    Attributes:
        label: For `fedfill.compare`. One with ``head=`` gives two candidates: with the new last layer and without.
        kind: ``sums`` (a round or a few) or ``trained`` (in many rounds).
        why: In a few words.
    """

    label: str
    kind: str
    why: str


REFERENCES = (
    Entry("local", TRAINED, "each client alone: what a federation has to beat"),
    Entry("central", TRAINED, "all data in one place: what a federation may reach at most"),
)

NOT_TRIED: Mapping[str, str] = {
    "feddpms, sdafl, fedzdac, fedzdas": "their synthetic data cost much; over fedavg they brought -3.5 to +4 points here, with one class per client -18.5 (feddpms) to +41 (sdafl, in equal rounds, fedavg with one seed)",
    "fedmix": "all clients get exact means of everybody's records, and its default can diverge, see docs/algorithms/fedmix.md",
    "fedgauss with --extra": "synthetic images from sums beside each client's own; two commands, see docs/synthetic-data.md",
    "feddyn": "where clients can train long in a round; it beat fedavg with every seed in experiments/field, by 1 to 2 points with ccvr",
    "fedavgm": "where few of many clients take part; also where each has one class: 12 points above fedavg there, 3 with ccvr",
    "fedadam, fedyogi, fedadagrad": "for long runs with a tuned server_rate; untuned they lost 2 to 35 points in ten rounds",
    "fedsam, mofedsam": "where each client has one class: 11 and 15 points above fedavg there, 1 to 2 with ccvr, for more than twice the time",
    "feddc": "where clients take part often, in long runs; with few classes per client it lost 24 to 31 points in ten rounds",
    "fedcurv": "where clients take part often and lambda is tuned; untuned it was level with fedavg, for three times the bytes",
    "moon": "for clients that lack classes and take part often; it lost 3 to 25 points in ten rounds",
    "fednova": "where some clients make many more steps than others; where all make as many it is fedavg",
    "qffl": "where the worst client matters more than the mean, and q is tuned; untuned it lost 34 to 41 points in ten rounds",
    "fedntd": "against forgetting the classes that a client lacks, as head=ccvr is; one forward pass more in each step",
    "feddecorr": "for clients with few classes each and wide representations; small gains in its paper",
    "fedlc, fedrs": "for clients that lack classes, as head=ccvr is, which a study does try; below fedavg where they have few",
    "fedgen": "for clients that lack classes, as head=ccvr is; its weight and decay have to be tuned",
    "fedrod": "for clients that lack classes and need a common model and their own; compare it with fedlc and pfedavg",
    "fedda-cvae": "for clients that lack classes and may send mean codes of them; it was below fedavg wherever it was tried",
    "fedgan, feddpgan": "for clients that lack classes and may share an image generator, feddpgan's with noise; by default it trains for hours",
    "pfnm": "for networks that clients began apart; from a common start, which a study has, units keep their places",
    "fedma": "where a round may take an exchange for each layer; 0 to 14 points above fedavg, 0 to 1 with ccvr, for up to six times the time",
    "clusteredsampling": "where few of many clients take part; a study lets all of them",
    "ditto": "for clients who need a model of their own and may have few samples; near to pfedavg, for twice the steps",
    "pfedme": "for clients who need a model of their own, where two rates can be tuned; with its defaults it was far below fedavg",
    "perfedavg": "for new clients with few samples, who adapt in one step; near to pfedavg on tables, 6 points below it on digits of four sources",
    "fedper, fedrep, fedbabu": "for clients with many samples each and classes of their own, or that look very different",
    "lgfedavg": "for clients that look very different, where bytes are dear: it sends the last layer alone",
    "fedproto": "for clients with models of their own and next to no bytes; it shares less than fed3r does, and in more rounds",
    "ifca": "for clients of a few kinds that call the same things otherwise; how many, you have to know",
    "cfl, fesem": "for clients of a few kinds, as ifca is; cfl finds out how many, in many rounds",
    "feddg, mixstyle": "for a model that shall serve looks that no client has, which no split of the clients' own shows",
}
"""When each of those suits that are left out whatever was seen, and why it is left out. Points of synthetic
data are those of docs/synthetic-data.md, all others those of experiments/field: ten clients, all in each of ten rounds, the last layer
as trained or, where that is said, with ``ccvr``."""

WITHOUT_A_PLACE: Mapping[str, str] = {
    "dpfedavg": "it protects whole clients against all but the server, and needs hundreds of them",
    "kaplanmeier": "it is for times to an event, and knows no columns",
    "moments": "it trains nothing; run it first, and give its schema to the study",
    "fedcgs": "another head from the same sums as fed3r; 'fedfill compare' has it",
    "fedpft, fedgauss, dpmerf, fedcvae, mst, aim": "their guarantee is for synthetic data; see docs/synthetic-data.md",
}
"""What can have a guarantee and is left out where one is asked for."""


def entries(seen: Look, goal: Goal, shape: tuple[int, ...], private: bool, survival: bool = False) -> list[Entry]:
    """What a study runs.

    Args:
        seen: A look at the clients.
        goal: Where the model will be used.
        shape: Of one sample's inputs.
        private: Whether a guarantee is asked for (``target_epsilon``): then those alone that give one.
        survival: Whether times to an event are predicted.

    Returns:
        The cheap ones first.
    """
    images = len(shape) == 3 and min(shape[1:]) >= 16
    found = [Entry("fed3r", SUMS, "one round, the same model for every split")]
    if private:
        return [*found, Entry("softmax", SUMS, "bears noise best of the methods on sums")]
    if survival:
        found.append(Entry("cox", SUMS, "the usual model of times to an event, equal to that of all rows together"))
    if images:
        found.append(Entry(f"fed3r:features={PATCHES}", SUMS, "the same on features that sums have learned"))
    if goal == "own":
        found.append(Entry("pfed3r", SUMS, "a head for each client, from sums"))
    found += [
        Entry(f"fedavg{HEAD}ccvr", TRAINED, "the usual first choice, also with a new last layer"),
        Entry(f"scaffold{HEAD}ccvr", TRAINED, "corrects the drift that unlike labels cause"),
    ]
    if seen.label_skew != "none":
        found.append(Entry(f"fedprox:mu=0.01,{HEAD[1:]}ccvr", TRAINED, "holds local models close to the global one"))
    if goal == "own":
        found.append(Entry(f"fedbn{HEAD}pfed3r", TRAINED, "clients keep their normalisation layers"))
        found.append(Entry("pfedavg", TRAINED, "each client fine-tunes a copy of the global model"))
        if seen.feature_shift and images:
            found.append(Entry("fraug", TRAINED, "shared embeddings, made personal, where inputs look different"))
    return found


def left_out(tried: Sequence[Entry], known: Collection[str], private: bool = False) -> dict[str, str]:
    """What was not tried, when it suits, and why it was left out.

    Args:
        tried: What was.
        known: Names of all algorithms.
        private: Whether a guarantee was asked for.

    Returns:
        Reasons by names.
    """
    reasons = WITHOUT_A_PLACE if private else NOT_TRIED
    named = {word for names in reasons for word in names.replace(",", " ").split()}
    ran = {entry.label.partition(":")[0] for entry in (*tried, *(() if private else REFERENCES))}
    others = sorted(set(known) - named - ran)
    why = "they give no guarantee for a whole run" if private else "no rule names them for what was seen here"
    return {**reasons, ", ".join(others): why}


def goal_of(seen: Look, domains: bool) -> Goal:
    """Where the model will be used, if nobody says: at each client on its own where their inputs look different."""
    return "own" if domains or seen.feature_shift else "everyone"


def validation_share(samples: int) -> float:
    """Share of each client's samples for validation, so that about a thousand of them decide: between .1 and .25."""
    return min(0.25, max(0.1, round(1000 / max(samples, 1), 2)))


def score(shares: Sequence[float | None], sizes: Sequence[int], goal: Goal) -> float | None:
    """How good a model is on the validation splits.

    Args:
        shares: What is recognised of each client's split; None for a client without one.
        sizes: Of the splits.
        goal: ``everyone``: the share of all clients' validation samples that is recognised; ``own``: the mean over clients.

    Returns:
        A share; None where there is no such split.
    """
    known = [(share, size) for share, size in zip(shares, sizes, strict=True) if share is not None]
    if not known:
        return None
    weights = [size if goal == "everyone" else 1 for _, size in known]
    return sum(share * weight for (share, _), weight in zip(known, weights, strict=True)) / sum(weights)
