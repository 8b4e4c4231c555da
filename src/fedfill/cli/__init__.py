"""The command line: reads options; no logic of its own.

Rooms that need torch are imported by the commands that use them, so that help and slips are answered at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated, Any

import typer

import fedfill
from fedfill.cli import deploy
from fedfill.cli.answers import grid, study
from fedfill.cli.audits import audit
from fedfill.cli.benches import bench
from fedfill.cli.commands import compare, measure, partition, reproduce, resume, run, synthesise
from fedfill.cli.help import Grouped, GroupedGroup, example
from fedfill.cli.listing import list_names
from fedfill.cli.reports import report
from fedfill.cli.terminal import out
from fedfill.cli.use import describe, export, predict
from fedfill.errors import FedfillError
from fedfill.runs.progress import err

RESUMED = {"study", "run", "resume", "compare", "grid", "bench", "reproduce", "deploy"}
"""Commands that train, and keep what is finished."""
KEPT = "finished rounds are kept, and the same command with the same --out or 'fedfill resume' goes on from there"


class Sentences(GroupedGroup):
    """Answers a user's slip with one sentence and exit code 2, and Ctrl-C with a word on what is kept and code 130."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except FedfillError as error:
            err.print(f"fedfill: {error}", soft_wrap=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            kept = f"; {KEPT}" if ctx.invoked_subcommand in RESUMED else ""
            err.print(f"fedfill: stopped{kept}", soft_wrap=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Sentences,
    help="Federated learning when clients' data differ: which method suits, a model in use, an account of privacy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
EXAMPLES = {
    "study": ("fedfill study --data ./photos --partition dirichlet:0.3 --clients 8 --budget 10m",),
    "report": ("fedfill report runs/compare --out report.html",),
    "export": ("fedfill export runs/NAME --to model",),
    "predict": ("fedfill predict model photo.png more/",),
    "run": (
        "fedfill run fedavg --data digits --partition dirichlet:0.1 --rounds 20",
        "fedfill run my.py:Mine --data ./photos",
    ),
    "resume": ("fedfill resume runs/NAME --rounds 50",),
    "compare": ("fedfill compare fedavg fedprox:mu=0.1 local --data digits --rounds 20 --seeds 0,1,2",),
    "grid": ("fedfill grid grid.toml --out runs/grid",),
    "bench": ("fedfill bench natural --sets penguins,opt",),
    "reproduce": ("fedfill reproduce feddpms-table1-fmnist --data-dir DATA --seeds 0",),
    "synthesise": ("fedfill synthesise runs/NAME --per-class 200 --out made.safetensors",),
    "measure": ("fedfill measure runs/NAME --ceiling",),
    "audit": (
        "fedfill audit fed3r --set target_epsilon=3 --repeats 10000",
        "fedfill audit dpfedavg --canaries 5000",
        "fedfill audit runs/NAME",
    ),
    "partition": ("fedfill partition --data ./photos --partition classes:2 --clients 10",),
    "describe": ("fedfill describe people.csv --target died --site hospital --out schema.toml",),
    "list": ("fedfill list algorithms", "fedfill list settings feddpms"),
}
"""Under the help of each command."""
for command in (
    study, run, resume, compare, grid, bench, reproduce, report, export, predict, synthesise, measure, audit, partition,
    describe,
):  # fmt: skip
    app.command(cls=Grouped, epilog=example(*EXAMPLES[command.__name__]))(command)
app.command("list", cls=Grouped, epilog=example(*EXAMPLES["list"]))(list_names)
app.add_typer(deploy.app, name="deploy")


@app.callback(invoke_without_command=True)
def main_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Options without a command."""
    if version:
        out.print(fedfill.__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of the command ``fedfill``."""
    # of an image that is refused in a sentence
    warnings.filterwarnings("ignore", "Image size .* exceeds limit", module="PIL")
    try:
        app()
    except OSError as error:
        try:
            print(flush=True)  # whether this fails too says whose error it is
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its end
            err.print(f"fedfill: standard output can't be written ({error.strerror})", soft_wrap=True)
            sys.exit(2)
        raise
