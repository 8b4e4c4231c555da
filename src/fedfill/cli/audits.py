"""The command that attacks what the ledger claims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

import fedfill
from fedfill.cli import terminal
from fedfill.cli.options import FIELDS, Options, takes
from fedfill.cli.slips import check_algorithms
from fedfill.errors import FedfillError

if TYPE_CHECKING:
    from fedfill.studies.audit import Audit


@takes(FIELDS, settings=True)
def audit(
    options: Options,
    subject: Annotated[
        str,
        typer.Argument(metavar="RUN|ALGORITHM", help="A run directory, or a name of 'fedfill list algorithms'."),
    ],
    canaries: Annotated[int, typer.Option(help="Canaries in one run. [default: 1000]", show_default=False)] = 1000,
    repeats: Annotated[
        int,
        typer.Option(help="Repeats of a release with and without its canary. [default: 4000]", show_default=False),
    ] = 4000,
    level: Annotated[
        str, typer.Option(help="What a canary is: record, client or auto. [default: auto]", show_default=False)
    ] = "auto",
    confidence: Annotated[float, typer.Option(help="Of the bounds. [default: 0.95]", show_default=False)] = 0.95,
    as_json: Annotated[bool, typer.Option("--json", help="Print audit.json alone.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of audit.json. [default: RUN; of an algorithm none]")] = None,
) -> None:
    """Attack what the account of privacy claims: a bound from below."""
    if not (Path(subject) / "experiment.toml").exists():
        if Path(subject).is_dir() or (len(Path(subject).parts) > 1 and ".py:" not in subject):
            raise FedfillError(f"audit: {subject} holds no run (there is no experiment.toml)")
        check_algorithms([subject])
    given: dict[str, Any] = {"level": level, **options}
    found = fedfill.audit(subject, canaries=canaries, repeats=repeats, confidence=confidence, out=out, **given)
    if as_json:
        from fedfill.runs.directory import to_json

        typer.echo(to_json(found.document).decode())
    else:
        _print(found, confidence)
    if found.failed:
        raise typer.Exit(1)


def _print(found: Audit, confidence: float) -> None:
    if not found.findings:
        terminal.tell("No claim to test: nothing that was sent has a guarantee for a single record or client.")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("released", "neighbours", "ledger epsilon", "found, at least", "could have found", "p", "verdict"):
        table.add_column(column, overflow="fold")
    for one in found.findings:
        table.add_row(
            one.released, one.neighbours, _number(one.ledger_epsilon), _number(one.found_epsilon), _number(one.ceiling),
            f"{one.p_value:.2g}", one.verdict,
        )  # fmt: skip
    if found.findings:
        terminal.out.print(table)
        terminal.tell(
            f"Found with {100 * confidence:g} % confidence at delta {found.document['delta']:g}, as the Gaussian noise that would explain it. "
            "A small bound is no evidence of privacy: it may be the attack that is weak. FAIL means that the ledger's claim is refuted (p < 0.0001)."
        )
        for one in found.findings:
            told = f", {one.right} of {one.guesses} guesses right" if one.guesses else ""
            terminal.tell(
                f"{one.released}: {one.method}{told}; without presuming Gaussian noise at least {one.found_directly:.3g}."
            )
    for sentence in without_guarantee(found.document["without_guarantee"]):
        terminal.tell(sentence)
    if found.path is not None:
        terminal.tell(f"Written into {found.path}")


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    return "any" if not math.isfinite(value) else f"{value:.3g}"


def without_guarantee(bare: Mapping[str, Any]) -> Iterator[str]:
    """What attacks found in releases that no guarantee covers, in plain words.

    Args:
        bare: As in ``audit.json``.

    Yields:
        A sentence or two at a time; nothing where there are no such releases.
    """
    if not bare:
        return
    yield f"Without a guarantee: {', '.join(bare['released'])}."
    yield "Advantage is hits less false alarms, in points: 0 by a coin, 100 with certainty."
    if bare["membership"]:
        yield (
            f"Membership by loss: with {bare['of']} an attacker tells records that the client trained on from new ones of the same "
            f"classes: {_advantage(bare['membership'])}."
        )
    else:
        yield f"Membership by loss: not scored, as {bare['of']} gives no loss of enough records."
    if bare["classes_told"] is not None:
        yield (
            f"Reconstruction of classes: the update puts a class that the client holds above one that it lacks {_percent(bare['classes_told'])} "
            "of the time (50 %: it tells nothing; 100 %: it tells all classes)."
        )
    yield from _exchanged(bare["exchanged"])
    if bare["samples"]:
        yield from _nearest(bare["samples"])
    yield "These are simple attacks. Others may do better."


def _exchanged(found: Mapping[str, Any]) -> Iterator[str]:
    sure = [one for one in found["fields"] if not one["random"] and one["advantage"] == 1]
    if found["fields"]:
        yield (
            f"One record exchanged: an attacker knows {found['beside']} other records of the client, and has to say whether one more was used, or "
            "another of its class in its place."
        )
    if sure:
        names = ", ".join(f"{one['field']}{_moved(one)}" for one in sure)
        yield f"{names}: tells it with certainty, as no noise hides the record (advantage 100)."
    for one in found["fields"]:
        if one not in sure:
            yield f"{one['field']}{_moved(one)}: {_advantage(one)}."
    if found["fields"]:
        picks = "; ".join(f"{one['field']} {_percent(one['picked'])}" for one in found["fields"])
        yield (
            f"Reconstruction of a record: from a list of candidates the attacker picks the right one so often (by chance {_percent(found['chance'])}): "
            f"{picks}."
        )
    moving = [name for name in found["unmoved"] if name not in found["kept"]]
    if not found["fields"]:
        yield "One record exchanged for another: no field could be scored in this way, for these reasons."
    if moving:
        yield f"The same whichever record is there: {', '.join(moving)}."
    if found["kept"]:
        yield (
            f"Not scored by exchange: {', '.join(found['kept'])}, as what the client kept from earlier calls is not made again, and may hold the record."
        )
    if found["trained"]:
        yield f"Not scored by exchange: {', '.join(found['trained'])}, as local training is not repeated."
    reasons: dict[str, list[str]] = {}
    for name, why in found["untried"].items():
        reasons.setdefault(why, []).append(name)
    for why, whose in reasons.items():
        yield f"Not scored by exchange: {', '.join(whose)}. Reason: {why}."


def _moved(one: Mapping[str, Any]) -> str:
    return (
        ""
        if one["moving"] == one["exchanged"]
        else f" (moved by {one['moving']} of {one['exchanged']} records, and only by these)"
    )


def _nearest(found: Mapping[str, Any]) -> Iterator[str]:
    whose = "that the client sent" if found["of"] == "the client" else "that the server makes of what all clients sent"
    if found["membership"] is None:
        yield f"Released samples: the {found['released']} {whose} were not scored, as there are too few records to compare with."
        return
    yield (
        f"Membership by released samples: an attacker takes the records that lie nearest to the {found['released']} {whose} for records of "
        f"{found['of']}: {_advantage(found['membership'])}."
    )
    times, share = found["nearness"]["times"], found["nearness"]["share_below"]
    far = (
        ""
        if times is None
        else f"a released sample is {times:.2f} times as far from its nearest record as a new record is (medians); "
    )
    yield (
        f"Reconstruction by released samples: {far}{_percent(share)} of them are as near as the nearest 1 % of new records (about 1 %: no copies)."
    )


def _advantage(found: Mapping[str, Any]) -> str:
    points, (low, high) = round(100 * found["advantage"]), found["interval"]
    side = "below" if points < 0 else "above"
    return f"hits {abs(points)} points {side} false alarms (95 %: {round(100 * low)} to {round(100 * high)})"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
