"""Verdicts: what a reader of a run's figures has to know before quoting them, one sentence each with what to do."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfill.runs.shown import headline_of

CONSTANT, AT_CHANCE = 0.98, 0.01
"""Share of the test set in one predicted class, and how far the accuracy is above the largest class's share at the most, that
tell a model which has learnt nothing."""

BEHIND = 0.1
"""How far under the mean over clients the worst one is said to be left behind."""

RISING = 0.01
"""How much the mean accuracy of the last quarter of the evaluated rounds is above the quarter before, when more rounds would help."""

JUDGED = 8
"""The fewest evaluated rounds on which a rise is looked for."""

UNEVEN = 1.5
"""How many times its even share the largest class has, when classes are called uneven."""

ONE_CLASS, NOTHING_LEARNT, FITTED, BALANCED, OWN_SPLIT, NOT_CONVERGED, LEFT_BEHIND, PARTLY_PRIVATE = (
    "one class", "nothing learnt", "fitted samples", "uneven classes", "own split", "not converged", "left behind", "partly private",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """One thing to know.

    Attributes:
        kind: Two or three words, the same for the same thing.
        sentence: With the figure, and what to do; no full stop at its end.
    """

    kind: str
    sentence: str


def collapse(record: Mapping[str, Any], personal: bool) -> Verdict | None:
    """What is wrong with a model that knows nothing of the classes: it names one alone, or is no better; None: nothing.

    Args:
        record: Of a round with an evaluation.
        personal: Whether clients have models of their own. One that knows its client's few classes is right, and a poor judge
            of the common test set; so the clients' own test splits decide, and without these nothing is said.

    Returns:
        The verdict, or None.
    """
    most, largest, accuracy = record.get("most_predicted"), record.get("largest_class"), record["accuracy"]
    helps = "try a smaller learning_rate, another optimizer or more rounds"
    if record.get("train_samples") == 0:  # nothing was learnt step by step
        helps = "try another method or network, and look at what the columns tell"
    if largest is None or largest >= CONSTANT:  # a test set of one class tells nothing
        return None
    if personal:
        own = record.get("mean_client_accuracy")
        if own is None or own > largest + AT_CHANCE:
            return None
        return Verdict(
            NOTHING_LEARNT,
            f"the clients' own models reach {own:.3f} on their own test splits, no more than the largest class has of the whole "
            f"test set ({largest:.3f}); {helps}",
        )
    if most is not None and most >= CONSTANT:
        return Verdict(
            ONE_CLASS,
            f"the model takes {most:.0%} of the test set for one and the same class (accuracy {accuracy:.3f}); {helps}",
        )
    if accuracy <= largest + AT_CHANCE:
        return Verdict(
            NOTHING_LEARNT,
            f"an accuracy of {accuracy:.3f} is no better than naming the largest class always ({largest:.3f}); {helps}",
        )
    return None


def balanced_accuracy(by_class: Sequence[float | None]) -> float | None:
    """The mean over classes of the share that is recognised of each; None where the test set has no class."""
    present = [share for share in by_class if share is not None]
    return statistics.fmean(present) if present else None


def uneven(summary: Mapping[str, Any]) -> bool:
    """Whether the test set's largest class is so large that accuracy says little of the others."""
    largest, shares = summary.get("largest_class"), summary.get("accuracy_by_class") or ()
    classes = sum(share is not None for share in shares)
    return largest is not None and classes > 1 and largest > UNEVEN / classes


def rise(records: Sequence[Mapping[str, Any]], own: bool = False) -> float | None:
    """How much the accuracy of the last quarter of the evaluated rounds is above the quarter before.

    Args:
        records: Of the rounds.
        own: Whether the mean on the clients' own test splits counts, where it is known, as it does for models of their own.

    Returns:
        A difference of shares; None: too few rounds.
    """
    judged = [record for record in records if "accuracy" in record]
    # a new last layer after the last round is a jump, and no rise
    name = "mean_client_accuracy"
    if not own or any(record.get(name) is None for record in judged):
        name = "accuracy"
    curve = [record.get(f"{name}_of_trained_head", record[name]) for record in judged]
    quarter = len(curve) // 4
    if len(curve) < JUDGED:
        return None
    return statistics.fmean(curve[-quarter:]) - statistics.fmean(curve[-2 * quarter : -quarter])


def left_behind(summary: Mapping[str, Any]) -> tuple[int, float, float] | None:
    """The client that is far under the others, where that is no accident of a small test split.

    Args:
        summary: Of a run, or of what its keys hold.

    Returns:
        Its number, its accuracy on its own test split, and the mean over clients; None where nobody is left behind.
    """
    accuracies: Sequence[float | None] = summary["accuracy_by_client"]
    known = {i: share for i, share in enumerate(accuracies) if share is not None}
    if len(known) < 2:
        return None
    mean = statistics.fmean(known.values())
    worst = min(known, key=lambda i: (known[i], i))
    if mean - known[worst] < BEHIND:
        return None
    sizes = summary.get("own_test_samples")
    if sizes is not None:
        from scipy.special import bdtr  # scipy.stats takes half a second of every start

        # the worst of many clients is far down by chance: so unlikely a count, for anyone of them, one time in twenty
        hits = round(known[worst] * sizes[worst])
        if bdtr(hits, sizes[worst], mean) * len(known) > 0.05:
            return None
    return worst, known[worst], mean


def partly_private(account: Mapping[str, Any]) -> Verdict | None:
    """Whether some of what was sent has a guarantee and some has none, so that the noise on the one protects nobody.

    Args:
        account: Of a run, as in ``summary.json``.

    Returns:
        The verdict, or None.
    """
    entries: Sequence[Mapping[str, Any]] = account.get("entries") or ()
    noisy = sorted({str(one["released"]) for one in entries if one.get("epsilon")})
    bare = sorted(
        {
            str(one["released"])
            for one in entries
            if one.get("epsilon") is None and one.get("conditional_epsilon") is None
        }
    )
    if not noisy or not bare:
        return None
    return Verdict(
        PARTLY_PRIVATE,
        f"noise protects {', '.join(noisy)} alone: {', '.join(bare)} went without a guarantee, and so there is none in total; see what "
        "each tells (docs/privacy.md), and send nothing beside sums where a guarantee is needed (fed3r, fedcgs, softmax)",
    )


def of_run(summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> tuple[Verdict, ...]:
    """The verdicts on one run.

    Args:
        summary: Its figures, as in ``summary.json``.
        records: Of its rounds.

    Returns:
        Those that apply, the gravest first.
    """
    personal = summary.get("personal", False)
    found: list[Verdict] = []
    judged = [record for record in records if "accuracy" in record]
    if judged and (verdict := collapse(judged[-1], personal)) is not None:
        found.append(verdict)
    if summary["accuracy"] is not None and summary.get("test_fraction") == 0:
        found.append(
            Verdict(
                FITTED,
                "no test set was held out (test_fraction 0): among the samples that are judged are those that the model was fitted to, which says little "
                "of new ones; leave test_fraction out to judge or compare models",
            )
        )
    if personal and (own := summary["mean_client_accuracy"]) is not None:
        score = headline_of(summary)[0]
        what, alone = ("", ", which holds its own classes alone,") if score == "accuracy" else (f" {score}", "")
        found.append(
            Verdict(
                OWN_SPLIT,
                f"clients have models of their own: {own:.3f} is the mean{what} on each client's own test split{alone} and "
                f"{summary['accuracy']:.3f} the mean on everyone's test set; compare methods by one of the two, "
                "the one on which the model will be used",
            )
        )
    if uneven(summary) and (balanced := balanced_accuracy(summary["accuracy_by_class"])) is not None:
        found.append(
            Verdict(
                BALANCED,
                f"the largest class has {summary['largest_class']:.0%} of the test set; the balanced accuracy, in which each class "
                f"counts the same, is {balanced:.3f} where accuracy is {summary['accuracy']:.3f}: quote both",
            )
        )
    of_times = summary.get("target") == "survival"  # a C-index of few rows is no share of them
    if not of_times and (behind := left_behind(summary)) is not None:
        worst, share, mean = behind
        names = summary.get("client_names")
        who = f"client {worst}" if names is None else names[worst]
        # nobody is told to take what the run has already
        of_number = summary.get("target") == "number"  # for which nobody has another last layer
        others = ", ".join(
            name for name in ("ditto" if of_number else "pfed3r", "fedbn") if name != summary.get("algorithm")
        )
        tries = f"{'another' if personal else 'a'} personal model ({others})"
        if not personal and not of_number and "accuracy_of_trained_head" not in summary:
            tries = f"a new last layer (head=ccvr) or {tries}"
        found.append(
            Verdict(
                LEFT_BEHIND,
                f"{who} is left behind: {share:.3f} on its own test split, where the mean over clients is {mean:.3f}; "
                f"look at what it holds (fedfill partition), and try {tries}",
            )
        )
    if (risen := rise(records, personal)) is not None and risen >= RISING:
        found.append(
            Verdict(
                NOT_CONVERGED,
                f"not converged: over the last quarter of the rounds the {headline_of(summary)[0]} still rose by {100 * risen:.1f} points; "
                "give it more with 'fedfill resume RUN --rounds N'",
            )
        )
    if (partly := partly_private(summary.get("privacy") or {})) is not None:
        found.append(partly)
    return tuple(found)
