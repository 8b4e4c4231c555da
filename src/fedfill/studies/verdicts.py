"""Verdicts on a comparison: which row is highest, how sure that is, and what has to be known before it is quoted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedfill.experiment.verdicts import FITTED, LEFT_BEHIND, NOT_CONVERGED, OWN_SPLIT, Verdict, of_run, rise
from fedfill.studies.comparison import Comparison, Difference, Row

HIGHEST, DIVERGED, ONE_SEED, NOT_SHARED, WITHIN_NOISE = "highest", "diverged", "one seed", "not shared", "within noise"


def of_comparison(comparison: Comparison) -> tuple[Verdict, ...]:
    """The verdicts on a comparison.

    Args:
        comparison: With at least one finished run.

    Returns:
        The highest row first, then what weakens the comparison, the gravest first; each kind of thing once, with all rows
        that it is true of.
    """
    whole = [row for row in comparison.rows if None not in row.results]
    several = len(comparison.seeds) > 1
    found = _highest(comparison, whole)
    found += [Verdict(DIVERGED, sentence) for sentence in comparison.diverged]
    found += _of_runs(comparison)
    if not several and len(comparison.rows) > 1:
        found.append(
            Verdict(
                ONE_SEED,
                f"one seed ({comparison.seeds[0]}) tells nothing of chance: another one may turn the order round; repeat with --seeds 0,1,2",
            )
        )
    if several and (alike := _alike(comparison, whole)):
        name, base = comparison.headline[0], comparison.baseline.label
        same = f"as accurate as {base}" if name == "accuracy" else f"with the {name} of {base}"
        found.append(
            Verdict(
                WITHIN_NOISE,
                f"{same} on every seed: {alike}; they do the same here, or the test set is too small to "
                "tell them apart",
            )
        )
    if several and (noisy := _within_noise(comparison, whole)):
        found.append(
            Verdict(
                WITHIN_NOISE,
                f"from {comparison.baseline.label} these can't be told apart on {len(comparison.seeds)} seeds, as the interval of 95 % of "
                f"the difference holds zero: {noisy}; give more seeds",
            )
        )
    found += [Verdict(NOT_SHARED, f"not shared by {note}") for note in comparison.notes]
    return tuple(found)


def points(difference: Difference) -> str:
    """A difference of shares in points, with its interval where there is one."""
    mean = f"{100 * difference.mean:+.2f}"
    return mean if difference.half_width is None else f"{mean} ± {100 * difference.half_width:.2f}"


def _highest(comparison: Comparison, whole: Sequence[Row]) -> list[Verdict]:
    """The row of the highest mean on everyone's test set, and how far the next is."""
    name, figure = comparison.headline
    means = {row.label: mean for row in whole if (mean := row.figure(figure)[0]) is not None}
    ranked = sorted((row for row in whole if row.label in means), key=lambda row: -means[row.label])
    if len(ranked) < 2:
        return []
    first, second = ranked[:2]
    ahead = comparison.difference(first, figure, second)
    sure = ""
    if ahead is not None and ahead.half_width is not None:
        sure = ", which is within the noise" if ahead.within_noise else ", which is more than chance"
    elif ahead is not None and len(comparison.seeds) > 1:
        sure = ", the same on every seed, from which nothing follows of chance"
    where = "on everyone's test set" if name == "accuracy" else f"in {name} on everyone's test set"
    text = f"{first.label} is highest {where}: {100 * means[first.label]:.2f} percent"
    if ahead is not None:
        text += f", {points(ahead)} points over {second.label}{sure}"
    return [Verdict(HIGHEST, text)]


def _within_noise(comparison: Comparison, whole: Sequence[Row]) -> str:
    differences = [(row.label, comparison.difference(row, comparison.headline[1])) for row in whole]
    return ", ".join(
        f"{label} {points(difference)}"
        for label, difference in differences
        if difference is not None and difference.half_width is not None and difference.within_noise
    )


def _alike(comparison: Comparison, whole: Sequence[Row]) -> str:
    """Rows with the baseline's figure on every seed."""
    base, figure = comparison.baseline, comparison.headline[1]
    same = (row for row in whole if row is not base and row.values(figure) == base.values(figure))
    return ", ".join(row.label for row in same if None not in row.values(figure))


def _of_runs(comparison: Comparison) -> list[Verdict]:
    """What the runs' own verdicts say: what all rows may have in common once, all else for each row with the first run's figure."""
    found: list[Verdict] = []
    personal: list[str] = []
    rising: list[str] = []
    for row in comparison.rows:
        seen: dict[str, list[tuple[int, str]]] = {}
        for seed, result in zip(comparison.seeds, row.results, strict=True):
            for verdict in of_run(result.summary, result.rounds) if result is not None else ():
                seen.setdefault(verdict.kind, []).append((seed, verdict.sentence))
        for kind, cases in seen.items():
            mostly = 2 * len(cases) > len(row.finished)
            if kind == FITTED:  # of all rows alike
                found += [Verdict(kind, cases[0][1])] if all(one.kind != kind for one in found) else []
            elif kind == OWN_SPLIT:
                personal.append(row.label)
            elif kind == NOT_CONVERGED:
                rises = [rise(result.rounds, result.summary.get("personal", False)) or 0 for result in row.finished]
                rising += [f"{row.label} ({100 * statistics.fmean(rises):+.1f})"] if mostly else []
            elif mostly or kind != LEFT_BEHIND:  # behind in a few of the seeds alone: by chance
                seed, sentence = cases[0]
                more = f" (so it is in {len(cases)} of {len(row.finished)} seeds)" if len(row.finished) > 1 else ""
                found.append(Verdict(kind, f"{row.label}, seed {seed}: {sentence}{more}"))
    if rising:
        found.append(
            Verdict(
                NOT_CONVERGED,
                f"not converged, in points over the last quarter of the rounds: {', '.join(rising)}; the order may still change, so give "
                "all of them more rounds",
            )
        )
    if personal:
        score = comparison.headline[0]
        alone = ", which holds its own classes alone" if score == "accuracy" else ""
        found.append(
            Verdict(
                OWN_SPLIT,
                f"{', '.join(personal)}: each client has a model of its own. 'own split' is the mean on each client's own test split{alone}; "
                f"'{score}' is on everyone's test set. Compare all rows by one of the two, the one on which the model will be used",
            )
        )
    return found
