"""Commands of real federations on Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fedfill
from fedfill.cli import terminal
from fedfill.cli.help import Grouped, GroupedGroup, example
from fedfill.cli.options import FIELDS, Options, Out, takes
from fedfill.cli.slips import check_algorithms, completer
from fedfill.errors import FedfillError
from fedfill.experiment.settings import SIMULATION
from fedfill.runs.progress import progress

app = typer.Typer(
    help="Real federations on Flower: write an app, or rehearse one.",
    no_args_is_help=True,
    rich_markup_mode=None,
    cls=GroupedGroup,
)


@app.command(cls=Grouped, epilog=example("fedfill deploy rehearse fedavg --clients 3 --rounds 2"))
@takes(FIELDS - SIMULATION, settings=True)
def rehearse(
    options: Options,
    algorithm: Annotated[
        str,
        typer.Argument(
            help="A name of 'fedfill list algorithms', or FILE.py:NAME.", autocompletion=completer("algorithm")
        ),
    ],
    out: Out = None,
) -> None:
    """Run an experiment on real Flower processes of this machine."""
    check_algorithms([algorithm])
    with progress() as follow:
        result = fedfill.run(
            algorithm, out=out, on_round=follow(algorithm), quiet=True, **{**options, "engine": "flower"}
        )
    terminal.print_result(result)


@app.command(
    cls=Grouped, epilog=example("fedfill deploy init app fedavg --clients 4 --class-names no,yes --shape 1x28x28")
)
@takes(
    # the hosts have the data and their own machines
    FIELDS
    - SIMULATION
    - {"start_from", "extra", "data_fraction", "domain_fractions", "test_fraction", "partition", "device"},
    settings=True,
    data="A data set that looks like the hosts', or a name for theirs. [default: digits]",
    clients="Number of hosts. [default: 3]",
)
def init(
    options: Options,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder of the app.")],
    algorithm: Annotated[
        str | None,
        typer.Argument(
            help="A name of 'fedfill list algorithms'. [default: fedavg]",
            autocompletion=completer("algorithm"),
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            help="Name of the app, and of the connection to its SuperLink. [default: federation]", show_default=False
        ),
    ] = "federation",
    class_names: Annotated[
        str | None, typer.Option(help="The hosts' classes in order, separated by commas. [default: those of --data]")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of one image, such as 1x28x28. [default: that of --data]")
    ] = None,
) -> None:
    """Write the app of a deployment, and how to start every party."""
    from fedfill.deployment.app import init_app

    check_algorithms([algorithm or "fedavg"])
    names = None if class_names is None else [word.strip() for word in class_names.split(",")]
    options["engine"] = "flower"
    place = init_app(Path(folder), algorithm or "fedavg", name=name, class_names=names, shape=_shape(shape), **options)
    terminal.tell(f"The app lies in {place}; its README.md says how to start every party.")


def _shape(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.replace(",", "x").split("x")]
    except ValueError:
        raise FedfillError(f"shape: found '{text}'; allowed: whole numbers such as 1x28x28") from None
