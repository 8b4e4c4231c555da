"""Commands of one run and of many."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fedfill
from fedfill.cli import terminal
from fedfill.cli.compared import print_comparison
from fedfill.cli.options import FIELDS, Options, Out, Track, takes
from fedfill.cli.slips import check_algorithms, completer
from fedfill.errors import FedfillError, checked
from fedfill.experiment.settings import DATA, INCIDENTAL, PLACES, Experiment, refuse_settings
from fedfill.runs.progress import both, progress

Moved = Annotated[
    str | None,
    typer.Option(metavar="FILE.py:NAME", help="Where that part of your own lies now. [default: where it lay]"),
]

if TYPE_CHECKING:
    from fedfill.experiment.loop import OnRound


@takes(FIELDS, settings=True)
def run(
    options: Options,
    algorithm: Annotated[
        str | None,
        typer.Argument(
            help="A name of 'fedfill list algorithms' or FILE.py:NAME; may stand in --config instead.",
            autocompletion=completer("algorithm"),
        ),
    ] = None,
    out: Out = None,
    track: Track = None,
) -> None:
    """Run one experiment and leave a run directory."""
    if algorithm is None:
        raise FedfillError(
            "algorithm: none is given; name one of 'fedfill list algorithms' or give a --config that does"
        )
    refuse_settings(algorithm)
    check_algorithms([algorithm])
    with progress() as follow:
        result = fedfill.run(
            algorithm, out=out, on_round=tracked(track, algorithm, follow(algorithm)), quiet=True, **options
        )
    terminal.print_result(result)


@takes(
    INCIDENTAL | PLACES | {"rounds"},
    rounds="A larger number of rounds (T) than the run has. [default: the run's]",
    start_from="Where the run lies now whose weights this one began with. [default: the run's]",
    extra="Where the file lies now whose samples the clients have beside their own. [default: the run's]",
)
def resume(
    options: Options,
    directory: Annotated[Path, typer.Argument(help="A run directory.")],
    algorithm: Moved = None,
    model: Moved = None,
    partition: Moved = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Where data that have a path lie now. [default: where they lay]")
    ] = None,
    track: Track = None,
) -> None:
    """Continue a run that was stopped, or give one more rounds.

    What is not given stays as it was in the run, whatever the default. Parts of your own are read from their files again.
    """
    options |= {"algorithm": algorithm, "model": model, "partition": partition, "data": data}
    with progress() as follow:
        result = fedfill.resume(
            directory, on_round=tracked(track, directory.name, follow(directory.name)), quiet=True, **options
        )
    terminal.print_result(result)


@takes(FIELDS - {"seed"}, settings=True)
def compare(
    options: Options,
    algorithms: Annotated[
        list[str],
        typer.Argument(
            autocompletion=completer("algorithm"),
            help="Names or FILE.py:NAME, also with settings of their own: fedavg:weighting=uniform",
        ),
    ],
    seeds: Annotated[
        str, typer.Option(help="Seeds, separated by commas. [default: 0,1,2]", show_default=False)
    ] = "0,1,2",
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the runs; finished ones are not run again. [default: runs/compare]", show_default=False
        ),
    ] = Path("runs/compare"),
    track: Track = None,
) -> None:
    """Compare algorithms over several seeds: mean ± deviation."""
    for given_above in ("algorithm", "seed"):  # a --config for one run is good for a comparison too
        options.pop(given_above, None)
    check_algorithms(algorithms)
    require_tracker(track)
    numbers = numbers_of(seeds)
    from fedfill.studies.sweep import candidates

    with progress(len(numbers) * sum(len(candidates(label)) for label in algorithms)) as follow:
        comparison = fedfill.compare(
            algorithms,
            seeds=numbers,
            out=out,
            on_run=lambda label, seed: tracked(
                track, in_folder(out, f"{label}-seed{seed}"), follow(f"{label}, seed {seed}")
            ),
            quiet=True,
            **options,
        )
    print_comparison(comparison)


@takes({"data_dir", "device", "workers"})
def reproduce(
    options: Options,
    table: Annotated[str, typer.Argument(help="A folder with a table.toml, or the name of one below experiments.")],
    only: Annotated[list[str] | None, typer.Option(help="A row, by its name; may be given again.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas. [default: the table's]")] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the runs; finished ones are not run again. [default: runs/reproduce]", show_default=False
        ),
    ] = Path("runs/reproduce"),
) -> None:
    """Run a paper's table and write the figures beside the paper's."""
    from fedfill.studies.table import find_table, markdown

    with progress() as follow:
        found = fedfill.reproduce(
            table,
            only=only or (),
            seeds=numbers_of(seeds) if seeds is not None else None,
            out=out,
            on_run=lambda row, seed: follow(f"{row}, seed {seed}"),
            **options,
        )
    terminal.tell(markdown(found))
    terminal.tell(f"Written into {find_table(table)}/README.md and results.json")


@takes({"data_dir", "device"})
def measure(
    options: Options,
    subject: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Directory of a finished run with synthetic samples, or a file of 'fedfill synthesise', of a table a .parquet file.",
        ),
    ],
    oracle: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a finished run on the same data, such as central's, whose model judges images as well. [default: nobody's]"
        ),
    ] = None,
    per_class: Annotated[
        int | None,
        typer.Option(help="Samples of each class that are made, not of a table. [default: those of the run's picture]"),
    ] = None,
    ceiling: Annotated[
        bool,
        typer.Option(
            "--ceiling", help="Train the same classifier on the real samples too, for comparison; of a table always."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of measures.json and measures.png. [default: RUN/samples, or NAME.measures beside a file]"
        ),
    ] = None,
) -> None:
    """Measure how good synthetic samples are: a run's, or a file's.

    Of a table with a schema it also measures what the rows give away.
    """
    options |= {"per_class": per_class, "ceiling": ceiling}
    terminal.print_measures(fedfill.measure(subject, oracle=oracle, out=out, **options))


@takes({"data_dir", "device"})
def synthesise(
    options: Options,
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a finished run that makes synthetic samples.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="The file, which ends in .safetensors, with a picture beside it; or, of a run on a table with a schema, in .parquet."
        ),
    ],
    per_class: Annotated[
        int | None,
        typer.Option(
            help="Samples of each class. [default: 500; of a .parquet file as many as there are]", show_default=False
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="A data set, by its name or its folder, whose nearest images the picture shows below."),
    ] = None,
) -> None:
    """Write a run's synthetic samples as a file."""
    terminal.print_synthesised(fedfill.synthesise(directory, out=out, per_class=per_class, against=against, **options))


@takes(DATA | {"seed"})
def partition(
    options: Options,
    out: Annotated[
        Path, typer.Option(help="PNG file of the heat map. [default: runs/partition.png]", show_default=False)
    ] = Path("runs/partition.png"),
) -> None:
    """Show the class distribution of every client."""
    from fedfill.experiment.prepare import divide
    from fedfill.runs.directory import writing
    from fedfill.runs.pictures import heat_map

    plan = checked(Experiment, {"algorithm": "", **options}, "option")
    federation = divide(plan)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        heat_map(federation.counts, federation.class_names, out, federation.client_names)
    terminal.print_federation(federation, f"{federation.name}, {plan.partition}, seed {plan.seed}")
    terminal.tell(f"Heat map: {out}")


def require_tracker(tracker: str | None) -> None:
    """Refuse a tracker that can't be used, before anything runs."""
    if tracker is not None:
        from fedfill.studies.track import require

        require(tracker)


def tracked(tracker: str | None, label: str, follow: OnRound) -> OnRound | None:
    """Progress, and a tracker beside it where one is asked for."""
    if tracker is None:
        return follow
    from fedfill.studies.track import track

    return both(track(tracker, label), follow)


def in_folder(out: Path, label: str) -> str:
    """What a tracker calls one of many runs: runs of two folders are no lines of one chart."""
    return f"{out.expanduser().resolve().name}-{label}"


def numbers_of(text: str) -> list[int]:
    """The seeds that an option names."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise FedfillError(
            f"seeds: found '{text}'; allowed: whole numbers separated by commas, such as 0,1,2"
        ) from None
