"""The command line: reads options; no logic of its own.

Rooms that need torch are imported by the commands that use them, so that help and slips are answered at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from rich.table import Table

import fedfill
from fedfill.errors import FedfillError, checked, did_you_mean
from fedfill.terminal import err, out, print_comparison, print_federation, print_measures, print_result, progress

app = typer.Typer(
    help="Federated learning when clients' data differ, with the gaps filled by synthetic data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
deploy = typer.Typer(
    help="Real federations on Flower: write an app, or rehearse one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(deploy, name="deploy")

# Defaults are named in the help and live in Experiment: None is an option that was not given, and --config may have it.
Data = Annotated[
    str | None,
    typer.Option(
        help="Data set: a name of 'fedfill list datasets', or a folder or a table (NAME.csv) below --data-dir. [default: digits]"
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with data sets as Parquet, images or CSV. [default: $FEDFILL_DATA]")
]
DataFraction = Annotated[
    float | None, typer.Option(help="Share of the training set that is used, of each domain alike. [default: 1.0]")
]
DomainFractions = Annotated[
    str | None,
    typer.Option(
        help="Shares of single domains in place of --data-fraction, such as svhn=0.2,mnist_m=0.14. [default: none]"
    ),
]
ImageSize = Annotated[
    int | None,
    typer.Option(help="Pixels to a side to which every image is brought, in colour. [default: as they are stored]"),
]
Partition = Annotated[
    str | None,
    typer.Option(help="How data are divided among clients: see 'fedfill list partitions'. [default: dirichlet:0.5]"),
]
Clients = Annotated[
    int | None,
    typer.Option(help="Number of clients; with --partition domain as many as the domains need. [default: 10]"),
]
ClientTest = Annotated[
    float | None, typer.Option(help="Share of each client's samples kept as its own test split. [default: 0.1]")
]
ClientValidation = Annotated[
    float | None,
    typer.Option(
        help="Share of what is left of each client's samples that is kept for validation. [default: no validation split]"
    ),
]
LabelledPerClient = Annotated[
    int | None,
    typer.Option(help="How many of each client's training samples keep their labels. [default: all]"),
]
Participation = Annotated[float | None, typer.Option(help="Share of the clients in a round. [default: 1.0]")]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds. [default: 50]")]
EvaluateEvery = Annotated[
    int | None,
    typer.Option(help="Rounds from one evaluation to the next, the last being one. [default: 1]"),
]
Seed = Annotated[int | None, typer.Option(help="Seed of every stream of randomness. [default: 0]")]
Model = Annotated[str | None, typer.Option(help="Network: see 'fedfill list models'. [default: auto]")]
Engine = Annotated[str | None, typer.Option(help="What runs the clients: see 'fedfill list engines'. [default: local]")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N. [default: auto]")]
Workers = Annotated[
    int | None,
    typer.Option(help="Threads or processes over clients; changes no result. [default: one for each processor]"),
]
RayAddress = Annotated[
    str | None, typer.Option(help="With --engine ray: a running cluster, such as auto or HOST:6379. [default: none]")
]
GpusPerWorker = Annotated[
    float | None, typer.Option(help="With --engine ray: share of a GPU for each worker. [default: 0.0]")
]
MinReplies = Annotated[
    int | None,
    typer.Option(help="Good replies that a call to a whole cohort needs; with fewer the run stops. [default: 1]"),
]
ReplyTimeout = Annotated[
    float | None,
    typer.Option(help="Seconds that a client has for a reply; a later one is left out. [default: no limit]"),
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
    Path | None,
    typer.Option(
        help="TOML file with these options (data_dir for --data-dir) and a [settings] table, such as the experiment.toml "
        "of a run; options given here win."
    ),
]


@contextmanager
def sentences() -> Iterator[None]:
    """Turn a user's slip into one sentence and exit code 2, and Ctrl-C into a word on what is kept and code 130."""
    try:
        yield
    except FedfillError as error:
        err.print(f"fedfill: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print(
            "fedfill: stopped; finished rounds are kept, and the same command with the same --out or 'fedfill resume' goes on from there",
            soft_wrap=True,
        )
        raise typer.Exit(130) from None


@app.callback(invoke_without_command=True)
def main_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Options without a command."""
    if version:
        out.print(fedfill.__version__)
        raise typer.Exit


@app.command()
def run(
    context: typer.Context,
    algorithm: Annotated[
        str | None, typer.Argument(help="A name of 'fedfill list algorithms'; may stand in --config instead.")
    ] = None,
    data: Data = None,
    data_dir: DataDir = None,
    data_fraction: DataFraction = None,
    domain_fractions: DomainFractions = None,
    image_size: ImageSize = None,
    partition: Partition = None,
    clients: Clients = None,
    client_test: ClientTest = None,
    client_validation: ClientValidation = None,
    labelled_per_client: LabelledPerClient = None,
    participation: Participation = None,
    rounds: Rounds = None,
    evaluate_every: EvaluateEvery = None,
    seed: Seed = None,
    model: Model = None,
    engine: Engine = None,
    device: Device = None,
    workers: Workers = None,
    ray_address: RayAddress = None,
    gpus_per_worker: GpusPerWorker = None,
    min_replies: MinReplies = None,
    reply_timeout: ReplyTimeout = None,
    delta: Delta = None,
    directory: Annotated[
        Path | None, typer.Option("--out", help="Run directory. [default: one below runs/ named by the experiment]")
    ] = None,
    setting: Setting = None,
    config: Config = None,
) -> None:
    """Run one experiment and leave a run directory."""
    with sentences():
        options = _options(context.params)
        name = options.pop("algorithm", None)
        if name is None:
            raise FedfillError(
                "algorithm: none is given; name one of 'fedfill list algorithms' or give a --config that does"
            )
        with progress() as follow:
            result = fedfill.run(name, out=directory, on_round=follow(name), **options)
        print_result(result)


@deploy.command("rehearse")
def rehearse(
    context: typer.Context,
    algorithm: Annotated[str, typer.Argument(help="A name of 'fedfill list algorithms'.")],
    data: Data = None,
    data_dir: DataDir = None,
    data_fraction: DataFraction = None,
    domain_fractions: DomainFractions = None,
    image_size: ImageSize = None,
    partition: Partition = None,
    clients: Clients = None,
    client_test: ClientTest = None,
    client_validation: ClientValidation = None,
    labelled_per_client: LabelledPerClient = None,
    participation: Participation = None,
    rounds: Rounds = None,
    evaluate_every: EvaluateEvery = None,
    seed: Seed = None,
    model: Model = None,
    device: Device = None,
    min_replies: MinReplies = None,
    reply_timeout: ReplyTimeout = None,
    delta: Delta = None,
    directory: Annotated[
        Path | None, typer.Option("--out", help="Run directory. [default: one below runs/ named by the experiment]")
    ] = None,
    setting: Setting = None,
    config: Config = None,
) -> None:
    """Run an experiment on real Flower processes of this machine."""
    with sentences():
        options = {**_options(context.params), "engine": "flower"}
        name = options.pop("algorithm")
        with progress() as follow:
            result = fedfill.run(name, out=directory, on_round=follow(name), **options)
        print_result(result)


@deploy.command("init")
def init(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder of the app.")],
    algorithm: Annotated[
        str | None, typer.Argument(help="A name of 'fedfill list algorithms'. [default: fedavg]")
    ] = None,
    name: Annotated[str, typer.Option(help="Of the app and of the connection to its SuperLink.")] = "federation",
    class_names: Annotated[
        str | None, typer.Option(help="The hosts' classes in order, separated by commas. [default: those of --data]")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Of one image, such as 1x28x28. [default: that of --data]")] = None,
    data: Annotated[
        str | None, typer.Option(help="A data set that looks like the hosts', or a name for theirs. [default: digits]")
    ] = None,
    data_dir: DataDir = None,
    image_size: ImageSize = None,
    clients: Annotated[int | None, typer.Option(help="Number of hosts. [default: 3]")] = None,
    client_test: ClientTest = None,
    client_validation: ClientValidation = None,
    labelled_per_client: LabelledPerClient = None,
    participation: Participation = None,
    rounds: Rounds = None,
    evaluate_every: EvaluateEvery = None,
    seed: Seed = None,
    model: Model = None,
    min_replies: MinReplies = None,
    reply_timeout: ReplyTimeout = None,
    delta: Delta = None,
    setting: Setting = None,
    config: Config = None,
) -> None:
    """Write the app of a deployment, and how to start every party."""
    with sentences():
        from fedfill.deployment.app import init_app

        options = {**_options(context.params), "engine": "flower"}
        kind = options.pop("algorithm", "fedavg")
        names = [word.strip() for word in class_names.split(",")] if class_names is not None else None
        place = init_app(Path(folder), kind, name=name, class_names=names, shape=_shape(shape), **options)
        out.print(
            f"The app lies in {place}; its README.md says how to start every party.", soft_wrap=True, markup=False
        )


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(help="A run directory.")],
    workers: Workers = None,
    device: Device = None,
    data_dir: DataDir = None,
    ray_address: RayAddress = None,
    gpus_per_worker: GpusPerWorker = None,
    min_replies: MinReplies = None,
    reply_timeout: ReplyTimeout = None,
) -> None:
    """Continue a run that was stopped or killed at any moment."""
    with sentences():
        with progress() as follow:
            result = fedfill.resume(
                directory,
                on_round=follow(directory.name),
                workers=workers,
                device=device,
                data_dir=data_dir,
                ray_address=ray_address,
                gpus_per_worker=gpus_per_worker,
                min_replies=min_replies,
                reply_timeout=reply_timeout,
            )
        print_result(result)


@app.command()
def compare(
    context: typer.Context,
    algorithms: Annotated[
        list[str], typer.Argument(help="Names, also with settings of their own: fedavg:latent_activation=none")
    ],
    seeds: Annotated[
        str, typer.Option(help="Seeds, separated by commas. [default: 0,1,2]", show_default=False)
    ] = "0,1,2",
    data: Data = None,
    data_dir: DataDir = None,
    data_fraction: DataFraction = None,
    domain_fractions: DomainFractions = None,
    image_size: ImageSize = None,
    partition: Partition = None,
    clients: Clients = None,
    client_test: ClientTest = None,
    client_validation: ClientValidation = None,
    labelled_per_client: LabelledPerClient = None,
    participation: Participation = None,
    rounds: Rounds = None,
    evaluate_every: EvaluateEvery = None,
    model: Model = None,
    engine: Engine = None,
    device: Device = None,
    workers: Workers = None,
    ray_address: RayAddress = None,
    gpus_per_worker: GpusPerWorker = None,
    min_replies: MinReplies = None,
    reply_timeout: ReplyTimeout = None,
    delta: Delta = None,
    directory: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Folder of the runs; finished ones are not run again. [default: runs/compare]",
            show_default=False,
        ),
    ] = Path("runs/compare"),
    setting: Setting = None,
    config: Config = None,
) -> None:
    """Compare algorithms over several seeds: mean ± deviation."""
    with sentences():
        from fedfill.studies.compare import compare as compare_algorithms

        options = _options(context.params)
        for given_above in ("algorithm", "seed"):  # a --config for one run is good for a comparison too
            options.pop(given_above, None)
        numbers = _seeds(seeds)
        count, total = itertools.count(1), len(algorithms) * len(numbers)
        with progress() as follow:
            comparison = compare_algorithms(
                algorithms,
                seeds=numbers,
                out=directory,
                on_run=lambda label, seed: follow(f"{next(count)}/{total} {label}, seed {seed}"),
                **options,
            )
        print_comparison(comparison)


@app.command()
def reproduce(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="A folder with a table.toml, or the name of one below experiments.")],
    only: Annotated[list[str] | None, typer.Option(help="A row, by its name; may be given again.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas. [default: the table's]")] = None,
    data_dir: DataDir = None,
    device: Device = None,
    workers: Workers = None,
    directory: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Folder of the runs; finished ones are not run again. [default: runs/reproduce]",
            show_default=False,
        ),
    ] = Path("runs/reproduce"),
) -> None:
    """Run a paper's table and write the figures beside the paper's."""
    with sentences():
        from fedfill.studies.reproduce import reproduce as reproduce_table
        from fedfill.studies.table import find_table, markdown

        options = _options(context.params)
        with progress() as follow:
            found = reproduce_table(
                table,
                only=only or (),
                seeds=_seeds(seeds) if seeds is not None else None,
                out=directory,
                on_run=lambda row, seed: follow(f"{row}, seed {seed}"),
                **options,
            )
        out.print(markdown(found), soft_wrap=True, markup=False)
        out.print(f"Written into {find_table(table)}/README.md and results.json", soft_wrap=True, markup=False)


@app.command()
def measure(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of a finished run with synthetic images.")
    ],
    oracle: Annotated[
        Path, typer.Option(help="Directory of a finished run on the same data, such as central's, whose model judges.")
    ],
    data_dir: DataDir = None,
    device: Device = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of measures.json and measures.png. [default: DIR/samples]")
    ] = None,
) -> None:
    """Measure how good a run's synthetic images are."""
    with sentences():
        from fedfill.studies.measure import measure as measure_images

        print_measures(measure_images(directory, oracle=oracle, data_dir=data_dir, device=device, out=folder))


@app.command()
def partition(
    context: typer.Context,
    data: Data = None,
    data_dir: DataDir = None,
    data_fraction: DataFraction = None,
    domain_fractions: DomainFractions = None,
    image_size: ImageSize = None,
    partition: Partition = None,
    clients: Clients = None,
    client_test: ClientTest = None,
    client_validation: ClientValidation = None,
    labelled_per_client: LabelledPerClient = None,
    seed: Seed = None,
    picture: Annotated[
        Path, typer.Option("--out", help="PNG file of the heat map. [default: runs/partition.png]", show_default=False)
    ] = Path("runs/partition.png"),
) -> None:
    """Show the class distribution of every client."""
    with sentences():
        from fedfill.experiment.prepare import divide
        from fedfill.experiment.settings import Experiment
        from fedfill.runs.directory import writing
        from fedfill.runs.pictures import heat_map

        plan = checked(Experiment, {"algorithm": "", **_options(context.params)}, "option")
        federation = divide(plan)
        with writing(picture):
            picture.parent.mkdir(parents=True, exist_ok=True)
            heat_map(federation.counts, federation.class_names, picture, federation.client_names)
        print_federation(federation, f"{federation.name}, {plan.partition}, seed {plan.seed}")
        out.print(f"Heat map: {picture}", soft_wrap=True, markup=False)


@app.command("list")
def list_names(
    what: Annotated[str, typer.Argument(help="algorithms, datasets, partitions, models, engines or settings")],
    algorithm: Annotated[str | None, typer.Argument(help="With settings: whose.")] = None,
) -> None:
    """List algorithms, datasets, engines, models and the like."""
    with sentences():
        kinds: dict[str, Callable[[], list[tuple[str, ...]]]] = {
            "algorithms": _algorithms,
            "datasets": _datasets,
            "partitions": _partitions,
            "models": _models,
            "engines": _engines,
            "settings": lambda: _settings(algorithm),
        }
        if what not in kinds:
            raise FedfillError(f"list: found '{what}'; {did_you_mean(what, kinds)}")
        table = Table(show_header=False, box=None, pad_edge=False)
        for row in kinds[what]():
            table.add_row(*row)
        out.print(table, markup=False)


def main() -> None:
    """Entry point of the command ``fedfill``."""
    app()


def _algorithms() -> list[tuple[str, ...]]:
    from fedfill.algorithms import known_algorithms

    return [(name, (kind.__doc__ or "").strip().splitlines()[0]) for name, kind in known_algorithms().items()]


def _datasets() -> list[tuple[str, ...]]:
    from fedfill.data.sources import NAMES

    return list(NAMES.items())


def _partitions() -> list[tuple[str, ...]]:
    from fedfill.data.partitions import NAMES

    return list(NAMES.items())


def _models() -> list[tuple[str, ...]]:
    from fedfill.models.networks import NAMES

    return list(NAMES.items())


def _engines() -> list[tuple[str, ...]]:
    from fedfill.engines import NAMES

    return list(NAMES.items())


def _settings(algorithm: str | None) -> list[tuple[str, ...]]:
    """Name, default with those for single data sets, and meaning with the words that are allowed."""
    if algorithm is None:
        raise FedfillError("list settings: name an algorithm, such as 'fedfill list settings feddpms'")
    from fedfill.algorithms import find
    from fedfill.models.networks import ModelSettings

    rows: list[tuple[str, ...]] = []
    kind = find(algorithm)
    for prefix, fields in (("", kind.model_fields), ("model.", ModelSettings.model_fields)):
        for name, info in fields.items():
            words = _words(info.annotation)
            default = "none" if info.default is None else str(info.default).lower()
            for data, preset in kind.presets.items() if not prefix else ():
                if preset.get(name, info.default) != info.default:
                    default += f"; {data}: {str(preset[name]).lower()}"
            rows.append(
                (
                    f"{prefix}{name}",
                    default,
                    (info.description or "") + (f" [{', '.join(words)}]" if words else ""),
                )
            )
    return rows


def _words(annotation: Any) -> list[str]:
    """What a setting that takes words may be; empty for numbers."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    words = [word for part in get_args(annotation) for word in _words(part)]
    return [*words, "none"] if words and type(None) in get_args(annotation) else words


def _shape(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.replace(",", "x").split("x")]
    except ValueError:
        raise FedfillError(f"shape: found '{text}'; allowed: whole numbers such as 1x28x28") from None


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise FedfillError(
            f"seeds: found '{text}'; allowed: whole numbers separated by commas, such as 0,1,2"
        ) from None


def _options(params: Mapping[str, Any]) -> dict[str, Any]:
    """The words of `fedfill.run`: from --config, over them a command's own options, over them --set.

    Args:
        params: Of a command, by the names of its function's parameters.

    Returns:
        Fields of `Experiment` and settings, all that were given.

    Raises:
        FedfillError: Where the file holds anything that is not allowed, or a --set is none.
    """
    from fedfill.experiment.settings import Experiment, over
    from fedfill.runs.directory import read_toml

    fields = set(Experiment.model_fields) - {"settings", "model_settings"}
    options: dict[str, Any] = {}
    config = params.get("config")
    if config is not None:
        document = read_toml(Path(config))  # older releases of typer pass text
        for key in ("digest", "version"):  # an experiment.toml has these too
            document.pop(key, None)
        checked(Experiment, {"algorithm": "", **document}, "config")
        own, models = document.pop("settings", {}), document.pop("model_settings", {})
        options = {**document, **own, **{f"model.{key}": value for key, value in models.items()}}
    options |= {name: params[name] for name in fields if params.get(name) is not None}
    if "data_dir" in options:
        options["data_dir"] = str(options["data_dir"])
    given: dict[str, str] = {}
    for pair in params.get("setting") or []:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise FedfillError(f"--set: found '{pair}'; allowed: KEY=VALUE")
        if key in fields:
            place = (
                "stands before the options"
                if key == "algorithm"
                else f"has an option of its own, --{key.replace('_', '-')}"
            )
            raise FedfillError(f"--set: '{key}' {place}")
        given[key] = value
    return over(options, given)
