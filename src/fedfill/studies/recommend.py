"""From the runs of a study to a recommendation in plain words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfill.experiment.verdicts import RISING, rise
from fedfill.runs.shown import headline_of
from fedfill.studies.comparison import Comparison, Difference, Row, paired_difference
from fedfill.studies.rules import HEAD, Goal, score
from fedfill.studies.verdicts import points

ALIKE = 0.005
"""Validation accuracies that are no further apart than this are alike: the one with fewer rounds, then with less traffic, is taken."""


@dataclass(frozen=True)
class Candidate:
    """A method with its figures; of a run with a new last layer there are two, with it and without.

    Attributes:
        label: As `fedfill.compare` takes it.
        validation: For each seed the share that decides (see `fedfill.studies.rules.score`); None where training diverged.
        accuracy: For each seed on everyone's test set; nothing is chosen by it.
        own: For each seed the mean over clients on their own test splits; likewise.
        rounds: Of its runs.
        bytes: Up and down, the mean over seeds.
        seconds: Likewise.
        rising: How much the accuracy still rose at the end, where that was looked at.
        guarantee: The sum of the privacy account in one sentence.
        figure: What the shares are: see `fedfill.runs.shown.headline_of`.
    """

    label: str
    validation: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]
    own: tuple[float | None, ...]
    rounds: int
    bytes: float
    seconds: float
    rising: float | None
    guarantee: str
    figure: str = "accuracy"

    @property
    def mean(self) -> float | None:
        """The mean of the figures that decide; None where a run diverged."""
        known = [value for value in self.validation if value is not None]
        return statistics.fmean(known) if len(known) == len(self.validation) else None

    def over(self, other: Candidate) -> Difference | None:
        """The paired difference of what decides; None where a run has diverged."""
        pairs = [
            (a, b) for a, b in zip(self.validation, other.validation, strict=True) if a is not None and b is not None
        ]
        return paired_difference([a - b for a, b in pairs]) if len(pairs) == len(self.validation) else None


@dataclass(frozen=True)
class Recommendation:
    """What to take.

    Attributes:
        label: The method, with its settings.
        sure: ``yes``, ``no`` (within the noise, or the same on every seed) or ``one seed``.
        sentences: Why, how sure, at which cost, with which guarantee; each with figures, the first one to be read alone.
    """

    label: str
    sure: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """What a study was asked for, and what it took.

    Attributes:
        rounds: Of the last stage.
        seeds: How many.
        budget: Seconds; None: no limit.
        elapsed: Seconds that it took in this call.
        private: Whether a guarantee was asked for.
        trust: Who adds its noise.
    """

    rounds: int
    seeds: int = 3
    budget: float | None = None
    elapsed: float = 0.0
    private: bool = False
    trust: str = "site"


def without_head(label: str) -> str:
    """A label without its ``head``."""
    name, _, rest = label.partition(":")
    kept = [pair for pair in rest.split(",") if pair and not f":{pair}".startswith(HEAD)]
    return ":".join([name, *([",".join(kept)] if kept else [])])


def candidates(comparison: Comparison, goal: Goal) -> list[Candidate]:
    """All candidates of a stage, in its order."""
    return [found for row in comparison.rows for found in _of_row(row, goal)]


def _of_row(row: Row, goal: Goal) -> list[Candidate]:
    judged = [("validation_by_client", "accuracy", "mean_client_accuracy", row.label)]
    last = [result.rounds[-1] for result in row.finished]
    if HEAD in f":{row.label.replace(',', ':')}" and last and all("validation_of_trained_head" in one for one in last):
        trained = ("validation_of_trained_head", "accuracy_of_trained_head", "mean_client_accuracy_of_trained_head")
        judged.insert(0, (*trained, without_head(row.label)))
    found = []
    rises = [
        value
        for value in (
            rise(result.rounds, goal == "own" or result.summary.get("personal", False)) for result in row.finished
        )
        if value is not None
    ]
    for k, (validation, accuracy, own, label) in enumerate(judged):
        figures: list[tuple[float | None, float | None, float | None]] = []
        for result in row.results:
            if result is None:
                figures.append((None, None, None))
                continue
            one = result.rounds[-1]
            shares = one.get(validation, [])
            decides = (
                score(shares, result.summary.get("validation_samples", [1] * len(shares)), goal) if shares else None
            )
            figures.append((decides, one.get(accuracy), one.get(own)))
        first = row.finished[0].summary if row.finished else {}
        decided, tested, own_split = ([figure[place] for figure in figures] for place in range(3))
        found.append(
            Candidate(
                label,
                tuple(decided),
                tuple(tested),
                tuple(own_split),
                rounds=first.get("rounds", 0),
                bytes=sum(row.figure(name)[0] or 0 for name in ("bytes_up", "bytes_down")),
                seconds=row.figure("seconds")[0] or 0.0,
                rising=statistics.fmean(rises) if rises and not k else None,  # the curve is that of the first
                guarantee=first["privacy"]["statement"].rsplit(". ", 1)[-1] if first else "",
                figure=headline_of(first)[0],
            )
        )
    return found


def ranked(found: Sequence[Candidate]) -> list[Candidate]:
    """From the best to the worst by what decides; those that diverged are left out."""
    whole = [candidate for candidate in found if candidate.mean is not None]
    return sorted(whole, key=lambda candidate: -(candidate.mean or 0))


def choose(found: Sequence[Candidate]) -> Candidate | None:
    """The best; among those that are alike the one with the fewest rounds, and then with the least traffic."""
    order = ranked(found)
    if not order:
        return None
    best = order[0].mean or 0
    alike = [candidate for candidate in order if best - (candidate.mean or 0) <= ALIKE]
    return min(alike, key=lambda candidate: (candidate.rounds, candidate.bytes))


def recommend(
    found: Sequence[Candidate], references: Mapping[str, Candidate], goal: Goal, asked: Asked
) -> Recommendation | None:
    """What to take, in plain words.

    Args:
        found: The finalists, of the same seeds.
        references: ``local`` and ``central``, or the same method ``without noise``, where they were run.
        goal: Where the model will be used.
        asked: What was asked for.

    Returns:
        The recommendation; None where all diverged.
    """
    chosen = choose(found)
    if chosen is None:
        return None
    others = [candidate for candidate in ranked(found) if candidate is not chosen]
    where = (
        "on all clients' validation samples together"
        if goal == "everyone"
        else "on each client's own validation samples"
    )
    reached = "it recognises" if chosen.figure == "accuracy" else f"its {chosen.figure} is"
    sentences = [f"take {chosen.label}: {reached} {_percent(chosen.validation)} {where}, which decided"]
    sure, said = _compared(chosen, others)
    sentences += [*said, *_cut(chosen, found, asked), *_for_scale(chosen, references, goal, asked)]
    sentences.append(
        f"it costs {_many(chosen.rounds, 'round')}, {chosen.bytes / 1e6:,.1f} MB in all and {chosen.seconds:,.0f} seconds here"
    )
    sentences.append(f"privacy: {chosen.guarantee}".rstrip("."))
    rising = [f"{c.label} ({100 * c.rising:+.1f})" for c in found if c.rising is not None and c.rising >= RISING]
    if rising:
        sentences.append(
            f"not converged, in points over the last quarter of the rounds: {', '.join(rising)}; with more rounds the answer may change"
        )
    return Recommendation(chosen.label, sure, tuple(sentences))


def _compared(chosen: Candidate, others: Sequence[Candidate]) -> tuple[str, list[str]]:
    """How sure the choice is, and how far the others are."""
    seeds = len(chosen.validation)
    sure, sentences = "one seed" if seeds == 1 else "yes", list[str]()
    if not others:
        return sure, ["one seed, so chance may decide"] if seeds == 1 else []
    ahead = chosen.over(others[0])
    assert ahead is not None
    if seeds > 1:
        sure = "no" if ahead.within_noise else "yes"
    how = {
        "yes": "more than chance",
        "no": f"within the noise of {seeds} seeds"
        if ahead.half_width is not None
        else "the same on every seed, from which nothing follows of chance",
        "one seed": "of one seed, so chance may decide",
    }
    alike = f"; as the two are alike ({100 * ALIKE:.1f} points), the one that costs less was taken"
    sentences.append(
        f"it is {points(ahead)} points from {others[0].label}, the next: {how[sure]}{alike if ahead.mean < 0 else ''}"
    )
    plain = next((candidate for candidate in others[1:] if candidate.label == "fedavg"), None)
    if plain is not None and (gain := chosen.over(plain)) is not None:
        doubt = ", which is within the noise" if gain.within_noise and gain.half_width is not None else ""
        sentences.append(f"over plain FedAvg it gains {points(gain)} points{doubt}")
    return sure, sentences


def _cut(chosen: Candidate, found: Sequence[Candidate], asked: Asked) -> list[str]:
    """What a budget took away, and whether it was kept."""
    if asked.budget is None:
        return []
    had, seeds = max(candidate.rounds for candidate in found), len(chosen.validation)
    sentences = []
    if had < asked.rounds or seeds < asked.seeds:
        sentences.append(
            f"the budget left {had} of {_many(asked.rounds, 'round')} and {seeds} of {_many(asked.seeds, 'seed')}, which favours methods "
            "of one round: with a larger one, in another folder, the answer may change"
        )
    if asked.elapsed > asked.budget:
        sentences.append(
            f"it took {asked.elapsed:,.0f} seconds, and {asked.budget:,.0f} were asked for: methods on sums, one round of each other "
            "method and one seed are the least"
        )
    return sentences


def _for_scale(chosen: Candidate, references: Mapping[str, Candidate], goal: Goal, asked: Asked) -> list[str]:
    """Test figures, of it and of what it is held against."""

    def figures(candidate: Candidate) -> Sequence[float | None]:
        return candidate.accuracy if goal == "everyone" else candidate.own

    test = "everyone's test set" if goal == "everyone" else "the clients' own test splits"
    if all(value is None for value in figures(chosen)):
        return [f"nobody has samples in {test} (client_test), so that no figure stands beside what decided"]
    sentences = [f"on {test}, by which nothing was chosen, it has {_percent(figures(chosen))}"]
    for label, words in (
        ("local", "a client alone has"),
        ("central", "with all data in one place FedAvg's network reaches"),
        ("without noise", "without noise, and so without a guarantee, it has"),
    ):
        if label in references:
            reference = references[label]
            after = f" after {_many(reference.rounds, 'round')}"
            sentences.append(f"for scale, on {test}: {words} {_percent(figures(reference))}{after}, one seed")
    alone = references.get("local")
    if goal == "own" and alone is not None and (alone.mean or 0) >= (chosen.mean or 0) - ALIKE:
        sentences.append("a client alone is as good on its own samples: for these alone no federation is needed")
    if asked.private and asked.trust == "site":
        sentences.append(
            "each client adds the whole noise (trust=site), so that nobody has to be trusted; with trust=secure the sum has about as "
            "much noise as one client adds now, on the conditions that docs/privacy.md names"
        )
    return sentences


def _percent(values: Sequence[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    if not known:
        return "no figure"
    mean = f"{statistics.fmean(known):.2f}"
    return f"{mean} percent" if len(known) == 1 else f"{mean} ± {statistics.stdev(known):.2f} percent"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def document(candidate: Candidate) -> dict[str, Any]:
    """As ``study.json`` holds it."""
    return {**vars(candidate), "mean": candidate.mean}
