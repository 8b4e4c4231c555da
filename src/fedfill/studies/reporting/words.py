"""Words and tables of a report: headline, figures at a glance, privacy account, settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedfill.experiment.verdicts import Verdict, uneven
from fedfill.studies.reporting.again import compare_again, run_again
from fedfill.studies.reporting.audited import audits
from fedfill.studies.reporting.parts import Line, Part, Trial
from fedfill.studies.reporting.totals import epsilons
from fedfill.studies.reporting.values import (
    Room,
    Section,
    Table,
    amount,
    duration,
    many,
    percent,
    sentence,
    spread,
)
from fedfill.studies.verdicts import HIGHEST, points


def headline(part: Part) -> tuple[str, tuple[Verdict, ...]]:
    """What a reader has to take away, and the verdicts that are left to tell."""
    first = next((verdict for verdict in part.verdicts if verdict.kind == HIGHEST), None)
    if first is not None:
        return sentence(first.sentence), tuple(verdict for verdict in part.verdicts if verdict is not first)
    known = [line for line in part.lines if line.known]
    if not known:
        return "No round has been evaluated yet.", part.verdicts
    if not any(line.scored for line in known):
        labels = " and ".join(line.label for line in known)
        return f"What {labels} found stands below; nothing is scored, as no model tells rows apart.", part.verdicts
    if part.apart:
        words = ", ".join(part.apart)
        return f"{len(known)} runs on data that differ ({words}): their figures can't be compared.", part.verdicts
    if len(known) > 1:
        so_far = " so far" if part.unfinished else ""
        best = max(known, key=lambda line: line.mean("accuracy") or 0.0)
        return (
            f"{best.label} is highest{so_far} on everyone's test set: {percent(best.mean('accuracy'))}.",
            part.verdicts,
        )
    line = known[0]
    shared, own = line.mean("accuracy"), line.mean("mean_client_accuracy")
    so_far = "" if all(trial.finished for trial in line.known) else " so far"
    if part.score != "Accuracy":
        return f"With {line.label} the {part.score} on everyone's test set is {percent(shared)}{so_far}.", part.verdicts
    if line.personal and own is not None:
        return (
            f"With {line.label} each client's own model gets {percent(own)} of its own test split right, {percent(shared)} of everyone's.",
            part.verdicts,
        )
    worst = line.mean("worst_client_accuracy")
    tail = "" if worst is None else f"; the worst client is at {percent(worst)} on its own"
    return f"{line.label} gets {percent(shared)} of everyone's test set right{so_far}{tail}.", part.verdicts


def who_is_worst(part: Part) -> str:
    """How the worst client fares with the highest method, and with the one that is best for it."""
    worst = [(line.mean("worst_client_accuracy"), line) for line in part.lines]
    known = [(share, line) for share, line in worst if share is not None]
    if len(part.lines) < 2 or not known or part.apart:
        return ""
    highest = max((line for _, line in known), key=lambda line: line.mean("accuracy") or 0.0)
    kindest = max(known, key=lambda pair: pair[0])[1]
    over = ", mean over seeds" if len(part.seeds) > 1 else ""
    text = f"With {highest.label} the worst client is at {percent(highest.mean('worst_client_accuracy'))} of its own test split{over}"
    if kindest is highest:
        return f"{text}; no other method is better for the worst."
    return f"{text}; {kindest.label} is best for the worst, with {percent(kindest.mean('worst_client_accuracy'))}."


def told(verdict: Verdict) -> str:
    """A verdict's sentence, without its kind where it begins with it."""
    text = verdict.sentence
    for end in (": ", ", "):
        text = text.removeprefix(f"{verdict.kind}{end}")
    return sentence(text)


def tiles(part: Part) -> list[tuple[str, str, str]]:
    """The figures of a single method: ``(name, value, remark)``."""
    line = part.lines[0]
    if len(part.lines) > 1 or not line.known:
        return []
    first = line.known[0]
    figures = first.figures
    ranked = part.score == "C-index"
    remark = "pairs of rows in the right order, after the last round" if ranked else _best(line)
    head = "Everyone's test set" if part.score == "Accuracy" else f"{part.score}, everyone's test set"
    found = [(head, spread(line.values("accuracy")), remark)] if line.scored else []
    if (balanced := line.mean("balanced_accuracy")) is not None and uneven(figures):
        found.append(("Balanced accuracy", percent(balanced), "each class counts the same"))
    if (error := line.mean("rmse")) is not None:
        found.append(("RMSE", f"{error:.4g}", "root mean squared error, in the target's unit"))
    if (area := line.mean("auc")) is not None:
        found.append(("AUC", percent(area), _of_probabilities(line)))
    if (own := line.values("mean_client_accuracy")) and len(own) == len(line.known):
        judged = sum(share is not None for share in figures.get("accuracy_by_client") or [])
        of = "pairs of rows of one client" if ranked else f"mean over {many(judged, 'client')}"
        found.append(("Own test splits", spread(own), of))
    if (worst := line.values("worst_client_accuracy")) and len(worst) == len(line.known):
        shares = first.figures.get("accuracy_by_client") or []
        known = [(share, i) for i, share in enumerate(shares) if share is not None]
        who = (
            f"client {_name(first, min(known)[1])}, own test split"
            if known and len(line.known) == 1
            else "own test split"
        )
        found.append(("Worst client", spread(worst), who))
    up, down = line.mean("bytes_up"), line.mean("bytes_down")
    if up is not None and down is not None:
        found.append(("Traffic", amount(up + down), f"{amount(up)} up, {amount(down)} down"))
    done = len(first.rounds)
    found.append(("Time", duration(line.mean("seconds")), many(done, "round")))
    found.append(("Privacy", *_guarantee(figures.get("privacy", {}))))
    return found


def _of_probabilities(line: Line) -> str:
    """What else is known of a method's probabilities."""
    named = (("auc_within_clients", "within clients"), ("brier", "Brier"), ("calibration_error", "calibration error"))
    known = [(called, value) for name, called in named if (value := line.mean(name)) is not None]
    return "; ".join(f"{called} {value:.3f}" for called, value in known)


def _best(line: Line) -> str:
    best = line.mean("best_accuracy")
    figures = line.known[0].figures
    if best is None or len(line.known) > 1:
        return "after the last round"
    if figures.get("best_round") == len(line.known[0].rounds):
        return "last round, the highest of all"
    return f"last round; highest in round {figures.get('best_round')}: {percent(best)}"


def _name(trial: Trial, client: int) -> str:
    held = trial.holdings
    return held.client_names[client] if held is not None and client < len(held.client_names) else str(client)


def _guarantee(account: Mapping[str, Any]) -> tuple[str, str]:
    """Epsilon in all in two figures at the most, and of what."""
    replaced, added, delta = (account.get(name) for name in ("total_epsilon", "total_epsilon_added", "delta"))
    if replaced is None:
        return "no guarantee", "see the account below"
    at = f", delta {delta:g}" if delta is not None else ""
    if replaced == 0:
        return "ε 0", "nothing sent depends on a client's own records"
    if added is not None:
        return f"ε {added:#.3g}", f"one record added or removed; {replaced:.3g} replaced{at}"
    return f"ε {replaced:#.3g}", f"one record replaced by another of its class{at}"


def results(part: Part) -> Table | None:
    """Methods side by side."""
    if len(part.lines) < 2:
        return None
    base = part.comparison.baseline.label if part.comparison is not None else None
    names = ("accuracy", "mean_client_accuracy", "worst_client_accuracy")
    means = {name: [line.mean(name) for line in part.lines] for name in names}
    strong = set()
    for column, name in enumerate(names, 1):
        known = [value for value in means[name] if value is not None]
        if known and max(known) > min(known):
            strong |= {(k, column) for k, value in enumerate(means[name]) if value == max(known)}
    header = [
        "method",
        "everyone's test set",
        "own splits",
        "worst client",
        *([f"against {base}, points"] if base else []),
        "traffic",
        "time",
        "privacy",
    ]
    rows = []
    for k, line in enumerate(part.lines):
        whole = line.known and None not in line.trials
        up, down = line.mean("bytes_up"), line.mean("bytes_down")
        difference = []
        if part.comparison is not None:
            found = part.comparison.difference(part.comparison.rows[k], part.comparison.headline[1])
            difference = ["–" if found is None else points(found)]
        rows.append(
            [
                line.label,
                *(
                    spread(line.values(name)) if whole else ("diverged" if name == "accuracy" else "–")
                    for name in names
                ),
                *difference,
                amount(up + down) if up is not None and down is not None else "–",
                duration(line.mean("seconds")),
                _guarantee(line.known[0].figures.get("privacy", {}))[0] if line.known else "–",
            ]
        )
    seeds = (
        f"; mean ± standard deviation over {len(part.seeds)} seeds"
        if len(part.seeds) > 1
        else "; one seed"
        if part.seeds
        else ""
    )
    caption = f"{'' if part.score == 'Accuracy' else f'{part.score}, in percent. '}After the last round{seeds}. Bold: highest."
    if base and len(part.seeds) > 1:
        caption += " Differences are paired by seed, with the interval of 95 %."
    return Table(caption, header, rows, frozenset(strong))


def privacy(part: Part, where: str, room: Room) -> Section:
    """The account in its own words, and what it is made of."""
    said: dict[str, list[str]] = {}
    folded = []
    for line in part.lines:
        if not line.known:
            continue
        account = line.known[0].figures.get("privacy", {})
        statement = (
            account.get("statement")
            or f"So far: {_guarantee(account)[0]}. The account is written when the run has ended."
        )
        said.setdefault(statement, []).append(line.label)
        entries = account.get("entries") or []
        if entries and room.rows:
            rows = [_entry(entry) for entry in entries[: room.rows]]
            header = (
                "what is sent",
                "how it is protected",
                "ε, record added or removed",
                "ε, record replaced",
                "clients",
                "times",
                "under these conditions",
            )
            folded.append(Table(f"What {line.label} sends", header, rows))
    lead = "What is protected, from whom, and what is not: a guarantee counts for what it names and for nothing else."
    if len(part.seeds) > 1:
        lead += f" The accounts are those of seed {part.seeds[0]}."
    texts = []
    for statement, labels in said.items():
        whole, mark, total = statement.rpartition("In total: ")  # what it comes to is said first
        label = f"{', '.join(labels)}. {mark}{total}" if len(part.lines) > 1 else f"{mark}{total}"
        texts.append((label.rstrip("."), whole.strip()) if mark else (", ".join(labels), statement))
    return Section(
        "privacy", "Privacy account", lead, [*epsilons(part, where, room), *audits(part)], folded=folded, texts=texts
    )


def _entry(entry: Mapping[str, Any]) -> tuple[str, ...]:
    def epsilon(name: str) -> str:
        value, conditional = entry.get(name), entry.get(f"conditional_{name}")
        if value is not None:
            return f"{value:.3g}"
        return f"none ({conditional:.3g} by its noise alone)" if conditional is not None else "none"

    # one that has a figure for a replaced record alone
    added = "–" if entry.get("epsilon") is not None and entry.get("epsilon_added") is None else epsilon("epsilon_added")
    conditions = "; ".join(map(str, entry.get("conditions") or [])) or "–"
    return (
        str(entry.get("released")),
        str(entry.get("mechanism")),
        added,
        epsilon("epsilon"),
        str(entry.get("clients")),
        str(entry.get("times")),
        conditions,
    )


def settings(part: Part, room: Room) -> Section:
    """How to run it again, all settings, and what happened on the way."""
    code = _code(part)
    folded, texts = [], []
    experiments = [(line.label, line.known[0].experiment) for line in part.lines if line.known] or [
        (line.label, trial.experiment) for line in part.lines for trial in line.trials[:1] if trial is not None
    ]
    flat = {label: _flat(experiment) for label, experiment in experiments}
    names = list(dict.fromkeys(name for one in flat.values() for name in one))
    shown = names if room.rows else []
    if shown:
        rows = [(name, *(one.get(name, "–") for one in flat.values())) for name in shown]
        folded.append(Table("All settings", ("setting", *flat) if len(flat) > 1 else ("setting", "value"), rows))
    notes = list(dict.fromkeys(note for trial in part.trials for note in trial.figures.get("notes", [])))
    if notes:
        texts.append(("Data and network", " ".join(sentence(note) for note in notes[:12])))
    lost = sum(trial.figures.get("lost_replies") or 0 for trial in part.trials)
    warnings = list(dict.fromkeys(text for trial in part.trials for text in trial.figures.get("warnings", [])))
    if lost:
        texts.append(("Lost replies", f"{lost:,} replies of clients were lost and left out."))
    if warnings and room.rows:
        more = f"; {len(warnings) - 20} more lie in summary.json" if len(warnings) > 20 else ""
        folded.append(
            Table(
                f"Warnings on the way{more}",
                ("number", "warning"),
                [(str(k), text) for k, text in enumerate(warnings[:20], 1)],
            )
        )
    traces = [_trace(trial) for trial in part.trials]
    if room.rows:
        folded.append(
            Table(
                "Runs",
                ("folder", "seed", "rounds", "fedfill", "digest", "SHA-256 of the weights", "machine"),
                traces[: room.rows],
            )
        )
    return Section("settings", "Settings, and how to run it again", folded=folded, texts=texts, code=code)


def _code(part: Part) -> list[tuple[str, str]]:
    known = [line.known[0].experiment for line in part.lines if line.known]
    if part.kind == "comparison" and part.comparison is not None:
        labels = [line.label for line in part.lines]
        return [("The same comparison again", compare_again(labels, part.seeds, known))]
    code = []
    for line in part.lines:
        for trial in [trial for trial in line.trials if trial is not None][:1]:
            label = "The same run again" if len(part.lines) == 1 else f"{line.label} again"
            if trial.deployed:
                code.append(
                    (f"{label}: a deployment, whose data stay on their hosts", f"fedfill resume {trial.folder}")
                )
            else:
                others = [str(t.experiment.get("seed")) for t in line.trials[1:] if t is not None]
                code.append(
                    (label + (f" (and with seed {', '.join(others)})" if others else ""), run_again(trial.experiment))
                )
    return code


def _flat(experiment: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in experiment.items():
        if isinstance(value, Mapping):
            prefix = "model." if name == "model_settings" else ""
            found |= {f"{prefix}{key}": str(one) for key, one in value.items()}
        elif name != "digest":
            found[name] = str(value)
    return found


def _trace(trial: Trial) -> tuple[str, ...]:
    held, figures = trial.experiment, trial.figures
    return (
        str(trial.folder), str(held.get("seed")), f"{len(trial.rounds)} of {held.get('rounds')}", str(held.get("version")),
        str(held.get("digest")), str(figures.get("weights_sha256", "–"))[:16], str(figures.get("machine", "–")),
    )  # fmt: skip
