"""The command that answers: which method suits these clients."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

import fedfill
from fedfill.cli.commands import in_folder, numbers_of, require_tracker, tracked
from fedfill.cli.options import FIELDS, Options, Track, takes
from fedfill.cli.terminal import out as screen
from fedfill.cli.terminal import paragraph, tell
from fedfill.runs.progress import progress, stages
from fedfill.runs.shown import headline_of, percent, size

if TYPE_CHECKING:
    from fedfill.studies.study import Study


@takes(
    FIELDS - {"seed", "evaluate_every", "start_from"},
    settings=True,
    rounds="Number of rounds (T) of the last stage. [default: 50; 20 with a target_epsilon]",
    client_validation="Share of each client's other samples by which methods are chosen. [default: 0.1 to 0.25, more of fewer samples]",
)
def study(
    options: Options,
    budget: Annotated[
        str | None,
        typer.Option(
            help="A wish, such as 10m: rounds and seeds are fewer where they would take longer; a run that began is finished. [default: no limit]"
        ),
    ] = None,
    goal: Annotated[
        str,
        typer.Option(
            help="Where the model will be used: on samples like those of all clients (everyone), at each client on its own (own), or "
            "auto, which is own where clients' samples look different. [default: auto]",
            show_default=False,
        ),
    ] = "auto",
    seeds: Annotated[
        str, typer.Option(help="Seeds of the last stage, separated by commas. [default: 0,1,2]", show_default=False)
    ] = "0,1,2",
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the study, which goes on where it stopped. [default: runs/study]", show_default=False
        ),
    ] = Path("runs/study"),
    track: Track = None,
) -> None:
    """Find out which method suits these clients, and why."""
    for given_above in ("algorithm", "seed"):
        options.pop(given_above, None)
    require_tracker(track)
    stage = ""
    with stages() as begin:
        follow = begin("", 1)

        def on_stage(name: str, runs: int) -> None:
            nonlocal follow, stage
            follow, stage = begin(name, runs), name

        found = fedfill.study(
            seeds=numbers_of(seeds), goal=goal, budget=budget, out=out, on_stage=on_stage,
            on_run=lambda label, seed: tracked(track, in_folder(out, f"{stage}-{label}-seed{seed}"), follow(f"{label}, seed {seed}")),
            quiet=True, **options,
        )  # fmt: skip
    print_study(found)


@takes({"data_dir", "device", "workers"})
def grid(
    options: Options,
    file: Annotated[
        Path, typer.Argument(help="TOML file with algorithms, seeds, [options] and [grid]; see docs/comparing.md.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the comparisons; finished runs are not run again. [default: runs/grid]", show_default=False
        ),
    ] = Path("runs/grid"),
    track: Track = None,
) -> None:
    """Run the same comparison for every combination of some options."""
    from fedfill.studies.grid import combinations, markdown, read_grid, run_grid
    from fedfill.studies.sweep import candidates

    require_tracker(track)
    asked = read_grid(file)
    runs = len(combinations(asked)) * len(asked.seeds) * sum(len(candidates(label)) for label in asked.algorithms)
    with progress(runs) as follow:
        cells = run_grid(
            file,
            out=out,
            on_run=lambda label, seed: tracked(
                track, in_folder(out, f"{label}-seed{seed}"), follow(f"{label}, seed {seed}")
            ),
            quiet=True,
            **options,
        )
    tell(markdown(cells))
    tell(f"All figures: {out}/grid.csv; a comparison for each combination in its own folder below {out}")


def print_study(study: Study) -> None:
    """What was seen, what was run, and the answer."""
    screen.print("[bold]Who holds what[/bold]", markup=True)
    for sentence in study.seen.sentences():
        paragraph(f"* {sentence}.")
    where = "on samples like those of all clients" if study.goal == "everyone" else "at each client on its own samples"
    paragraph(f"So methods were judged {where} (--goal {study.goal}).")
    first_run = study.final.first
    table = Table(
        title=f"\n{first_run['dataset']}, {first_run['partition']}, {first_run['clients']} clients, seeds {', '.join(map(str, study.plan.seeds))}", title_justify="left", box=box.SIMPLE_HEAD, padding=0, collapse_padding=True, caption_justify="left",
        caption=f"validation: what decided ({headline_of(first_run)[0]}), in percent, mean ± standard deviation over seeds; test: "
        + ("on everyone's test set" if study.goal == "everyone" else "mean over the clients' own test splits")
        + ", by which nothing was chosen; screened: validation in the screening, one seed, rounds as in its column",
    )  # fmt: skip
    table.add_column("method", overflow="fold")
    for column in ("validation", "test", "rounds", "traffic", "sec.", "screened"):
        table.add_column(column, justify="right", no_wrap=True)
    last = {candidate.label: candidate for candidate in study.finalists}
    first = {candidate.label: candidate for candidate in study.screened}
    for label in [*last, *(label for label in first if label not in last)]:
        candidate, early = last.get(label), first.get(label)
        screened = "-" if early is None else f"{percent(early.mean, None)} ({early.rounds})"
        cells = ["-"] * 5
        if candidate is not None:
            tested = candidate.accuracy if study.goal == "everyone" else candidate.own
            cells = [
                percent(*_moments(candidate.validation)), percent(*_moments(tested)), str(candidate.rounds), size(candidate.bytes),
                f"{candidate.seconds:.1f}",
            ]  # fmt: skip
        table.add_row(label.replace(":", "\n ").replace(",", "\n "), *cells, screened)
    screen.print(table)
    answer = study.recommendation
    screen.print("\n[bold]Recommendation[/bold]", markup=True)
    if answer is None:
        paragraph("None: every method diverged in the last stage. Try a smaller learning_rate.")
    else:
        for sentence in answer.sentences:
            paragraph(f"* {sentence}.")
    screen.print("\n[bold]Not tried[/bold]", markup=True)
    for names, why in study.not_tried.items():
        paragraph(f"* {names}: {why}.")
    if study.commands:
        screen.print("\n[bold]To train it, with the validation samples too, and to use it[/bold]", markup=True)
        for command in study.commands:
            tell(command)
    tell(f"\nStudy: {study.directory}/study.json; its stages: {study.directory}/screen, final")


def _moments(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation; nothing where a value is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return None, None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None
