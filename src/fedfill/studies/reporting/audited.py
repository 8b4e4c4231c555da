"""Audits in a report: for each claim that was attacked what the account says, and what an attack proved."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from fedfill.errors import FedfillError
from fedfill.files import read_regular
from fedfill.runs.records import Checked, Number, first_fault
from fedfill.studies.reporting.bars import Bar, bars_of
from fedfill.studies.reporting.parts import Part
from fedfill.studies.reporting.values import Chart, Table

FILE = "audit.json"


class _Finding(Checked):
    released: str
    neighbours: str
    ledger_epsilon: Number | None
    found_epsilon: Number | None
    verdict: str


class _Document(Checked):
    confidence: Number
    delta: Number
    findings: list[_Finding]


def audits(part: Part) -> list[Chart]:
    """A chart for each run in whose folder an audit lies, of those that had a claim to attack.

    Args:
        part: Of the report.

    Returns:
        Bars, with a table of the same figures.

    Raises:
        FedfillError: Where an audit's file is damaged.
    """
    charts = []
    for line in part.lines:
        for trial in line.known:
            found = _read(trial.folder / FILE)
            if found is None or not found.findings:
                continue
            whose = f"{line.label}, seed {trial.experiment.get('seed')}" if len(part.lines) > 1 else line.label
            charts.append(_chart(whose, found))
    return charts


def _read(path: Path) -> _Document | None:
    try:
        return _Document.model_validate(json.loads(read_regular(path)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        why = first_fault(error) if isinstance(error, ValidationError) else "it is no JSON"
        raise FedfillError(
            f"report: {path} is damaged ({why}); 'fedfill audit {path.parent}' writes it again, or remove it"
        ) from error


def _chart(whose: str, found: _Document) -> Chart:
    bars, rows = [], []
    for one in found.findings:
        change = "replaced" if "replaced" in one.neighbours else "added or removed"
        bars.append(Bar(f"{one.released}, {change}", one.ledger_epsilon, style=0, text=_words(one.ledger_epsilon)))
        bars.append(Bar("proved by an attack", one.found_epsilon, style=1, text=_words(one.found_epsilon)))
        rows.append((one.released, one.neighbours, _words(one.ledger_epsilon), _words(one.found_epsilon), one.verdict))
    title = f"The account attacked: {whose}"
    note = (
        "The upper bar is what the account claims, an upper bound on epsilon; the lower one what an attack proved, a lower bound, at delta "
        f"{found.delta:g} with {100 * found.confidence:g} % confidence. The truth lies between. A small lower bound is no evidence of privacy."
    )
    about = "; ".join(f"{name}, {kind}: claimed {upper}, proved {lower}" for name, kind, upper, lower, _ in rows) + "."
    high = max((bar.value for bar in bars if bar.value is not None), default=1.0) or 1.0
    drawing = bars_of(bars, title=title, description=about, x_label="epsilon", high=high)
    header = ("released", "neighbours", "claimed epsilon", "proved, at least", "verdict")
    return Chart(title, note, drawing, Table(title, header, rows))


def _words(epsilon: float | None) -> str:
    return "none" if epsilon is None else f"{epsilon:.3g}"
