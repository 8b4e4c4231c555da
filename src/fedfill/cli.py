"""The command line: reads options, prints tables; no logic of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedfill import __version__
from fedfill.algorithms.base import algorithms, find
from fedfill.compare import Comparison
from fedfill.compare import compare as compare_algorithms
from fedfill.data import partitions, sources
from fedfill.data.federation import class_table, federate
from fedfill.errors import FedfillError, did_you_mean
from fedfill.experiment import Experiment, OnRound, Result, checked
from fedfill.experiment import resume as resume_run
from fedfill.experiment import run as run_experiment
from fedfill.models import networks
from fedfill.models.networks import ModelSettings
from fedfill.runs.directory import read_toml, writing
from fedfill.runs.pictures import heat_map

LISTS = {"datasets": sources.NAMES, "partitions": partitions.NAMES, "models": networks.NAMES}
MOST_ROWS = 40

app = typer.Typer(
    help="Federated learning when clients' data differ, with the gaps filled by synthetic data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Data = Annotated[
    str | None,
    typer.Option(help="Data set: a name of 'fedfill list datasets' or a folder below --data-dir. [default: digits]"),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with data sets as Parquet or images. [default: $FEDFILL_DATA]")
]
DataFraction = Annotated[float | None, typer.Option(help="Share of the training set that is used. [default: 1.0]")]
Partition = Annotated[
    str | None,
    typer.Option(
        help="How the data are divided among clients; see 'fedfill list partitions'. [default: dirichlet:0.5]"
    ),
]
Clients = Annotated[int | None, typer.Option(help="Number of clients. [default: 10]")]
ClientTest = Annotated[
    float | None, typer.Option(help="Share of each client's samples kept as its own test split. [default: 0.1]")
]
Participation = Annotated[float | None, typer.Option(help="Share of the clients in a round. [default: 1.0]")]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds. [default: 50]")]
Seed = Annotated[int | None, typer.Option(help="Seed of every stream of randomness. [default: 0]")]
Model = Annotated[str | None, typer.Option(help="Network; see 'fedfill list models'. [default: auto]")]
Engine = Annotated[str | None, typer.Option(help="Engine that runs the clients. [default: local]")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N. [default: auto]")]
Workers = Annotated[
    int | None, typer.Option(help="Threads over clients; changes no result. [default: one a processor]")
]
Delta = Annotated[float | None, typer.Option(help="Delta of the privacy account. [default: 1e-05]")]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the algorithm, its training or the model; may be repeated. See 'fedfill list settings ALGORITHM'.",
    ),
]
Config = Annotated[
    Path | None, typer.Option(help="TOML file with the same options and a [settings] table; options given here win.")
]


@contextmanager
def sentences() -> Iterator[None]:
    """Turn a user's slip into one sentence and an exit code, and Ctrl-C into a word on what is left."""
    try:
        yield
    except FedfillError as error:
        err.print(f"fedfill: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print(
            "fedfill: stopped; rounds that were finished are kept, and the same command or 'fedfill resume' goes on from there",
            soft_wrap=True,
        )
        raise typer.Exit(130) from None


@app.callback(invoke_without_command=True)
def main_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Options without a command."""
    if version:
        out.print(__version__)
        raise typer.Exit


@app.command()
def run(
    algorithm: Annotated[
        str | None, typer.Argument(help="Name of 'fedfill list algorithms'; may stand in --config.")
    ] = None,
    data: Data = None,
    data_dir: DataDir = None,
    data_fraction: DataFraction = None,
    partition: Partition = None,
    clients: Clients = None,
    client_test: ClientTest = None,
    participation: Participation = None,
    rounds: Rounds = None,
    seed: Seed = None,
    model: Model = None,
    engine: Engine = None,
    device: Device = None,
    workers: Workers = None,
    delta: Delta = None,
    directory: Annotated[
        Path | None, typer.Option("--out", help="Run directory. [default: a new one below runs/]")
    ] = None,
    setting: Setting = None,
    config: Config = None,
) -> None:
    """Run one experiment and leave a run directory."""
    with sentences():
        options = _options(config, setting, dict(
            data=data, data_dir=data_dir, data_fraction=data_fraction, partition=partition, clients=clients,
            client_test=client_test, participation=participation, rounds=rounds, seed=seed, model=model, engine=engine,
            device=device, workers=workers, delta=delta,
        ))  # fmt: skip
        name = algorithm or options.pop("algorithm", None)
        options.pop("algorithm", None)
        if name is None:
            raise FedfillError(
                "algorithm: none is given; name one of 'fedfill list algorithms' or give a --config that does"
            )
        with progress() as follow:
            result = run_experiment(name, out=directory, on_round=follow(f"{name}"), **options)
        _print_result(result)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(help="A run directory.")],
    workers: Workers = None,
    device: Device = None,
    data_dir: DataDir = None,
) -> None:
    """Continue a run that was stopped or killed at any moment."""
    with sentences():
        with progress() as follow:
            result = resume_run(
                directory, on_round=follow(directory.name), workers=workers, device=device, data_dir=data_dir
            )
        _print_result(result)


@app.command()
def compare(
    algorithms: Annotated[
        list[str], typer.Argument(help="Names, or names with settings: fedavg:latent_activation=none")
    ],
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    data: Data = None,
    data_dir: DataDir = None,
    data_fraction: DataFraction = None,
    partition: Partition = None,
    clients: Clients = None,
    client_test: ClientTest = None,
    participation: Participation = None,
    rounds: Rounds = None,
    model: Model = None,
    engine: Engine = None,
    device: Device = None,
    workers: Workers = None,
    delta: Delta = None,
    directory: Annotated[
        Path, typer.Option("--out", help="Folder of the runs; finished ones are not run again.")
    ] = Path("runs/compare"),
    setting: Setting = None,
    config: Config = None,
) -> None:
    """Run several algorithms over several seeds on the same partitions: mean ± standard deviation."""
    with sentences():
        options = _options(config, setting, dict(
            data=data, data_dir=data_dir, data_fraction=data_fraction, partition=partition, clients=clients,
            client_test=client_test, participation=participation, rounds=rounds, model=model, engine=engine,
            device=device, workers=workers, delta=delta,
        ))  # fmt: skip
        options.pop("algorithm", None)
        options.pop("seed", None)
        with progress() as follow:
            comparison = compare_algorithms(
                algorithms, seeds=_seeds(seeds), out=directory,
                on_run=lambda label, seed: follow(f"{label}, seed {seed}"), **options,
            )  # fmt: skip
        _print_comparison(comparison)


@app.command()
def partition(
    data: Data = None,
    data_dir: DataDir = None,
    data_fraction: DataFraction = None,
    partition: Partition = None,
    clients: Clients = None,
    client_test: ClientTest = None,
    seed: Seed = None,
    picture: Annotated[Path, typer.Option("--out", help="File of the heat map.")] = Path("runs/partition.png"),
) -> None:
    """Show the class distribution of every client as a table, and write the heat map."""
    with sentences():
        given = dict(data=data, data_dir=str(data_dir) if data_dir else None, data_fraction=data_fraction, partition=partition,
                     clients=clients, client_test=client_test, seed=seed)  # fmt: skip
        plan = checked(Experiment, {"algorithm": "", **{k: v for k, v in given.items() if v is not None}}, "option")
        federation = federate(
            plan.data, data_dir=Path(plan.data_dir) if plan.data_dir else None, fraction=plan.data_fraction,
            partition=plan.partition, clients=plan.clients, seed=plan.seed, client_test=plan.client_test,
        )  # fmt: skip
        header, rows = class_table(federation)
        table = Table(title=f"{federation.name}, {plan.partition}, seed {plan.seed}", title_justify="left")
        for column in header:
            table.add_column(column, justify="right")
        for row in rows[:MOST_ROWS]:
            table.add_row(str(row[0]), *(str(value) if value else "·" for value in row[1:]))
        out.print(table)
        if len(rows) > MOST_ROWS:
            out.print(f"... and {len(rows) - MOST_ROWS} more clients, all of them in the picture")
        for note in federation.notes:
            out.print(note, soft_wrap=True, markup=False)
        with writing(picture):
            picture.parent.mkdir(parents=True, exist_ok=True)
            heat_map(federation.counts, federation.class_names, picture)
        out.print(f"Heat map: {picture}", soft_wrap=True, markup=False)


@app.command("list")
def list_names(
    what: Annotated[str, typer.Argument(help="algorithms, datasets, partitions, models or settings")],
    algorithm: Annotated[str | None, typer.Argument(help="With settings: whose.")] = None,
) -> None:
    """What can be named: algorithms, datasets, partitions, models, or the settings of an algorithm."""
    with sentences():
        table = Table(show_header=False, box=None, pad_edge=False)
        if what == "algorithms":
            for name, kind in algorithms().items():
                table.add_row(name, (kind.__doc__ or "").strip().splitlines()[0])
        elif what in LISTS:
            for name, words in LISTS[what].items():
                table.add_row(name, words)
        elif what == "settings":
            if algorithm is None:
                raise FedfillError("list settings: name an algorithm, such as 'fedfill list settings feddpms'")
            known = [("", find(algorithm).model_fields), ("model.", ModelSettings.model_fields)]
            for prefix, fields in known:
                for name, info in fields.items():
                    table.add_row(
                        f"{prefix}{name}", "none" if info.default is None else str(info.default), info.description or ""
                    )
        else:
            raise FedfillError(f"list: found '{what}'; {did_you_mean(what, ['algorithms', 'settings', *LISTS])}")
        out.print(table)


def main() -> None:
    """Entry point of the command ``fedfill``."""
    app()


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise FedfillError(
            f"seeds: found '{text}'; allowed: whole numbers separated by commas, such as 0,1,2"
        ) from None


def _options(config: Path | None, settings: list[str] | None, given: dict[str, Any]) -> dict[str, Any]:
    """Options from the file, then those of the command line, then --set."""
    options: dict[str, Any] = {}
    if config is not None:
        document = read_toml(config)
        for key in ("digest", "version"):  # an experiment.toml is a config too
            document.pop(key, None)
        own, models = document.pop("settings", {}), document.pop("model_settings", {})
        if not isinstance(own, dict) or not isinstance(models, dict):
            raise FedfillError(f"config: settings and model_settings of {config} must be tables")
        checked(Experiment, {"algorithm": "", **document}, "config")
        options = {**document, **own, **{f"model.{key}": value for key, value in models.items()}}
    options |= {key: value for key, value in given.items() if value is not None}
    for pair in settings or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise FedfillError(f"--set: found '{pair}'; allowed: KEY=VALUE")
        if key in Experiment.model_fields:
            raise FedfillError(f"--set: '{key}' has an option of its own, --{key.replace('_', '-')}")
        options[key.strip()] = value.strip()
    return options


@contextmanager
def progress() -> Iterator[Callable[[str], OnRound]]:
    """A progress bar on a terminal, a line for each round elsewhere.

    Yields:
        Makes the follower of one run from its label.
    """
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figure]}"),
        TimeRemainingColumn(), console=err, transient=True,
    )  # fmt: skip

    def follow(label: str) -> OnRound:
        tasks: list[Any] = []

        def on_round(record: dict[str, Any], rounds: int) -> None:
            figure = f"accuracy {record['accuracy']:.4f}"
            if err.is_terminal:
                if not tasks:
                    tasks.append(bar.add_task(label, total=rounds, completed=record["round"] - 1, figure=""))
                bar.update(tasks[0], completed=record["round"], figure=figure)
            else:
                err.print(
                    f"{label}: round {record['round']}/{rounds}, {figure}, {record['seconds']:.1f} s",
                    soft_wrap=True,
                    markup=False,
                )
            for sentence in record["warnings"]:
                err.print(f"{label}, round {record['round']}: {sentence}", style="yellow", soft_wrap=True, markup=False)
            for lost in record["lost"]:
                err.print(
                    f"{label}, round {record['round']}: lost client {lost['client']} ({lost['handler']}): {lost['reason']}",
                    style="yellow",
                    soft_wrap=True,
                    markup=False,
                )

        return on_round

    if err.is_terminal:
        with bar:
            yield follow
    else:
        yield follow


def _print_result(result: Result) -> None:
    summary = result.summary
    table = Table(
        show_header=False,
        title=f"{summary['algorithm']} on {summary['dataset']}, {summary['partition']}, {summary['clients']} clients, seed {summary['seed']}",
        title_justify="left",
    )
    table.add_row("accuracy, last round", _share(summary["accuracy"]))
    table.add_row(
        "best accuracy (chosen on the test set)", f"{_share(summary['best_accuracy'])} in round {summary['best_round']}"
    )
    if summary["worst_client_accuracy"] is not None:
        table.add_row("worst client, own test split", _share(summary["worst_client_accuracy"]))
        table.add_row(
            "variance over clients / classes", f"{summary['client_variance']:.1f} / {summary['class_variance']:.1f}"
        )
    table.add_row("sent up / down", f"{_bytes(summary['bytes_up'])} / {_bytes(summary['bytes_down'])}")
    table.add_row("samples trained on", f"{summary['train_samples']:,}")
    table.add_row("seconds (of it in local training)", f"{summary['seconds']:.1f} ({summary['seconds_in_fit']:.1f})")
    table.add_row("weights", summary["weights_sha256"][:16])
    out.print(table)
    for note in summary["notes"]:
        out.print(note, soft_wrap=True, markup=False)
    out.print(f"Privacy: {summary['privacy']['statement']}", soft_wrap=True, markup=False)
    out.print(f"Run directory: {result.directory}", soft_wrap=True, markup=False)


def _print_comparison(comparison: Comparison) -> None:
    seeds = ", ".join(map(str, comparison.seeds))
    first = comparison.rows[0].results[0].summary
    table = Table(
        title=f"{first['dataset']}, {first['partition']}, {first['clients']} clients, {first['rounds']} rounds, seeds {seeds}",
        title_justify="left",
        caption="mean ± standard deviation over seeds; 'best' is the best round, chosen on the test set"
        if len(comparison.seeds) > 1
        else "one seed, so no deviation; 'best' is the best round, chosen on the test set",
        caption_justify="left",
    )
    for column in ("algorithm", "accuracy", "best", "worst client", "sent up + down", "seconds"):
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    for row in comparison.rows:
        up, down = row.figure("bytes_up")[0], row.figure("bytes_down")[0]
        table.add_row(
            row.label, *(_mean(*row.figure(name)) for name in ("accuracy", "best_accuracy", "worst_client_accuracy")),
            _bytes((up or 0) + (down or 0)), f"{row.figure('seconds')[0]:.1f}",
        )  # fmt: skip
    out.print(table)
    for note in first["notes"]:
        out.print(note, soft_wrap=True, markup=False)
    for row in comparison.rows:
        out.print(
            f"Privacy of {row.label}: {row.results[0].summary['privacy']['statement']}", soft_wrap=True, markup=False
        )
    out.print(
        f"Run directories: {comparison.directory}/<algorithm>-seed<seed>; figures: {comparison.directory}/comparison.csv",
        soft_wrap=True,
        markup=False,
    )


def _mean(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return "-"
    return f"{mean:.4f}" if deviation is None else f"{mean:.4f} ± {deviation:.4f}"


def _share(value: float) -> str:
    return f"{value:.4f}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
