"""Commands of a trained model: write it for others, and let it predict."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

import fedfill
from fedfill.cli.options import Options, takes
from fedfill.cli.terminal import MOST_ROWS, READABLE, out, tell
from fedfill.errors import FedfillError
from fedfill.runs.progress import err

if TYPE_CHECKING:
    from fedfill.studies.export import Exported
    from fedfill.studies.model import Predictions

HEADERS = (b"file,row,class,probability", b"file,row,rank,class,probability", b"file,row,risk", b"file,row,value")
"""First lines of `predict`'s files."""
TIMES = b"file,row,risk,median,survival at "
"""What the first line of its files of times begins with; times follow."""


@takes({"data_dir"}, data_dir="With --pt2 and --onnx: another folder with the run's data. [default: the run's]")
def export(
    options: Options,
    run: Annotated[Path, typer.Argument(help="Directory of a finished run.")],
    to: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the model: new, empty, or with an earlier export of this run. [default: RUN/model]"
        ),
    ] = None,
    pt2: Annotated[
        bool, typer.Option("--pt2", help="Also write model.pt2, which plain PyTorch runs without fedfill.")
    ] = False,
    onnx: Annotated[
        bool,
        typer.Option("--onnx", help="Also write model.onnx, for ONNX runtimes; needs pip install 'fedfill[onnx]'."),
    ] = False,
) -> None:
    """Write a finished run's model for others to use."""
    with _status("writing and checking the model", pt2 or onnx):
        exported = fedfill.export(run, to, pt2=pt2, onnx=onnx, **options)
    _print_exported(exported)


def describe(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A CSV or Parquet file, or a folder with train.csv.")],
    out: Annotated[Path, typer.Option(help="The TOML file to write, which must not be there yet.")],
    target: Annotated[
        str | None, typer.Option(help="The column to be told of a row. [default: label]", show_default=False)
    ] = None,
    event: Annotated[
        str | None,
        typer.Option(
            help="The column that is 1 where an event came, and 0 where a row left without it; --target is then the time.",
            show_default=False,
        ),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="The column that says where a row comes from. [default: domain, where there is one]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Draft a schema of a table, for sites to edit and to agree on."""
    from fedfill.studies.describe import draft  # here: it brings torch

    made = draft(table, target=target, event=event, site=site, out=out)
    tell(f"Written: {out}, with {len(made.schema.columns)} columns and the target {made.schema.target.column}.")
    if made.codes:
        tell(f"Words, since zeros before digits may make them codes: {', '.join(map(repr, made.codes))}.")
    for name, why in made.left_out.items():
        tell(f"Left out: {name!r}, which {why}.")
    tell("Its bounds and values come from records: edit them, and agree on them, before others see them.")
    method = "fedavg" if event is None else "kaplanmeier"
    own = f"./{table}" if len(table.parts) == 1 else table  # a bare name is that of a data set
    split = "" if made.schema.site is None else " --partition domain"
    tell(f"Use it: fedfill run {method} --data {own} --schema-file {out}{split}")


@takes({"device"})
def predict(
    options: Options,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of 'fedfill export', or a finished run.")],
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Images, folders of images, Parquet files with images; of a table CSV or Parquet files.",
        ),
    ],
    client: Annotated[
        str | None, typer.Option(help="Whose model, by name or number, where clients have models of their own.")
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, help="So many of the most probable classes. [default: 1]", show_default=False)
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE.csv", help="Write all rows there. [default: printed; as CSV where it is no terminal]"
        ),
    ] = None,
) -> None:
    """Predict classes of new images or rows, or times to an event."""
    if output is not None:
        _check_place(output)
    with _status("predicting", True) as status:
        seen = None if status is None else lambda n: status.update(f"predicting: {n:,} done")
        found = fedfill.predict(directory, paths, client, seen=seen, **options)
    if output is not None:
        from fedfill.runs.directory import write_atomically

        write_atomically(output, found.to_csv(top).encode())
        tell(f"Written: {output}, {len(found):,} prediction{'s' if len(found) != 1 else ''}")
    elif out.is_terminal:
        _print_predictions(found, top)
    else:
        out.file.write(found.to_csv(top))
    for note in found.notes:
        err.print(note, width=min(err.width, READABLE))


def _check_place(place: Path) -> None:
    """Refuse a folder, and a file that is something else than earlier predictions."""
    if place.is_dir():
        raise FedfillError(f"out: {place} is a folder; allowed: a file, such as {place / 'predictions.csv'}")
    if not place.exists():
        return
    try:
        ours = place.is_file()
        with place.open("rb") if ours else nullcontext() as file:
            first = b"?" if file is None else file.readline(200).rstrip()
            ours = not first or first in HEADERS or first.startswith(TIMES)
    except OSError as error:
        raise FedfillError(f"out: can't read {place} ({error.strerror or error}); name another place") from error
    if not ours:
        raise FedfillError(
            f"out: {place} is there and holds no predictions of fedfill; remove it, or name another place"
        )


def _status(text: str, wanted: bool) -> Any:
    """A line that moves while something takes long, on a terminal."""
    return err.status(text) if wanted and err.is_terminal else nullcontext()


def _print_exported(exported: Exported) -> None:
    """What was written, and what others should know of it."""
    card = exported.card
    run, inputs, models = card["run"], card["inputs"], card["weights"]
    sizes = " x ".join(map(str, inputs["shape"]))
    whose = f"models of {len(models)} clients" if "client" in models[0] else "model"
    told = ((word, run.get(name)) for name, word in (("accuracy", "accuracy"), ("r2", "R²"), ("c_index", "C-index")))
    accuracy = "".join(f", {word} {figure:.4f} on the test set" for word, figure in told if figure is not None)
    seed = "" if run["seed"] is None else f", seed {run['seed']}"
    text = f"The {whose} of {run['algorithm']} on {run['data']}, {run['rounds']} round{'s' if run['rounds'] != 1 else ''}{seed}{accuracy}."
    takes = {
        "images": f"Takes images of {sizes}",
        "table": "Takes rows of a table",
        "numbers": f"Takes numbers of {sizes}",
    }
    lines = [
        text,
        f"{takes[inputs['kind']]}; {_names(card)}; {models[0]['parameters']:,} numbers.",
        *(
            f"{one['file']}: compared on {one['compared_on']:,} real samples, {_difference(one)}."
            for one in card["programs"]
        ),
        f"Privacy: {card['privacy']['statement'].rsplit('In total: ', 1)[-1]}",
        *card["privacy"]["not_in_the_account"],
    ]
    for line in lines:
        out.print(line, width=min(out.width, READABLE))
    client = f" --client '{models[0]['client']}'" if "client" in models[0] else ""
    tell(f"\nWritten: {exported.directory}")
    tell(f"Use it: fedfill predict {exported.directory}{client} PATH")


def _difference(program: dict[str, Any]) -> str:
    """How far a program is from its model, in a clause."""
    if "same_class" not in program:
        return f"largest difference {program['largest_difference_of_scores']:.1e} of a number's size"
    return f"largest difference of a probability {program['largest_difference']:.1e}; the same class for {program['same_class']:,}"


def _names(card: dict[str, Any]) -> str:
    """What a model says, in a clause."""
    target = card["inputs"].get("schema", {}).get("target", {})
    grid = target.get("grid", ())
    if card["run"].get("ranks_only"):
        return "ranks rows by their risk, and tells no probability"
    if target.get("kind") == "number":
        return f"tells the number {target['column']}, from {target['low']:g} to {target['high']:g} where it was learnt"
    return (
        f"tells times to an event on {len(grid)} grid times"
        if grid
        else f"names one of {len(card['class_names'])} classes"
    )


def _print_predictions(found: Predictions, top: int) -> None:
    """A row for each prediction, as far as there is room."""
    from fedfill.studies.model import SURVIVAL

    header, *rows = found.table(top)
    shown = [k for k, name in enumerate(header) if name != "row" or any(row[k] for row in rows)]
    shown = [k for k in shown if not header[k].startswith(SURVIVAL) or k == len(header) - 1]  # the file has every time
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for k in shown:
        table.add_column(header[k], overflow="fold", justify="left" if header[k] in ("file", "class") else "right")
    for row in rows[:MOST_ROWS]:
        table.add_row(*(row[k] if header[k] != "probability" else f"{float(row[k]):.4f}" for k in shown))
    out.print(table)
    if len(rows) > MOST_ROWS:
        out.print(f"... and {len(rows) - MOST_ROWS:,} more rows; --out FILE.csv has all.")
