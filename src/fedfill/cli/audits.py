"""The command that attacks what the ledger claims."""

from __future__ import annotations

import math
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
    bare = found.document["without_guarantee"]
    if bare:
        terminal.tell(f"Without a guarantee: {', '.join(bare['released'])}.")
        if bare["membership"]:
            told, (low, high) = bare["membership"], bare["membership"]["interval"]
            terminal.tell(
                f"Membership: by the loss of {bare['of']}, an attacker says of a record whether the client trained on it {100 * told['advantage']:.0f} "
                f"points better than by a coin (95 %: {100 * low:.0f} to {100 * high:.0f}). This is one simple attack; others may do better."
            )
        if bare["classes_told"] is not None:
            terminal.tell(
                f"Reconstruction: the update puts a class that the client holds above one that it lacks {100 * bare['classes_told']:.0f} % of the time "
                "(50: it tells nothing; 100: it tells all classes)."
            )
    if found.path is not None:
        terminal.tell(f"Written into {found.path}")


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    return "any" if not math.isfinite(value) else f"{value:.3g}"
