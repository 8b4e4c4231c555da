"""Options: made from the fields of `Experiment`, so that a new field is an option without another line.

Defaults are named in the help and live in `Experiment`: None is an option that was not given, and --config may have it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from fedfill import __version__
from fedfill.cli.slips import check_options, completer
from fedfill.errors import FedfillError, checked
from fedfill.experiment.settings import GROUPS, HEADINGS, TABLES, Experiment, group_of, over

FIELDS = frozenset(Experiment.model_fields) - TABLES - {"algorithm"}
"""Fields that are options; the algorithm is an argument, and settings are given by --set."""

Options = dict[str, Any]
"""Fields of `Experiment` and settings by name, all that were given: the words of `fedfill.run`."""

Track = Annotated[
    str | None,
    typer.Option(
        help="Show each round in tensorboard, mlflow or wandb, each an extra; files below runs/tracked. [default: none]"
    ),
]
Out = Annotated[Path | None, typer.Option(help="Run directory. [default: one below runs/ named by the experiment]")]


def _parameter(name: str, kind: Any, *flags: str, **info: Any) -> inspect.Parameter:
    option = typer.Option(None, *flags, autocompletion=completer(name), **info)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


_SETTINGS = (
    _parameter(
        "setting",
        list[str] | None,
        "--set",
        rich_help_panel=GROUPS[""],
        metavar="KEY=VALUE",
        help="A setting of the algorithm, its training or the network; may be repeated. "
        "See 'fedfill list settings ALGORITHM'.",
    ),
    _parameter(
        "config",
        Path | None,
        rich_help_panel=GROUPS[""],
        help="TOML file with these options (data_dir for --data-dir) and a [settings] table, such as the experiment.toml "
        "of a run. Options given here win.",
    ),
)


def takes(fields: Collection[str], *, settings: bool = False, **helps: str) -> Callable[..., Callable[..., None]]:
    """Give a command options for fields of `Experiment`.

    Args:
        fields: Their names.
        settings: Whether it has --set and --config too.
        **helps: Texts in place of the fields' own.

    Returns:
        Decorates a command, a function of the `Options` that were given and of its own parameters.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in list(inspect.signature(command).parameters.items())[1:]
        ]
        ordered = sorted(
            Experiment.model_fields, key=lambda name: HEADINGS.index(group_of(Experiment.model_fields[name]))
        )
        made = [_option(name, helps.get(name)) for name in ordered if name in fields]
        parameters = [*own, *made, *(_SETTINGS if settings else ())]
        places = {name: f"has an option of its own, {_flag(name)}" for name in FIELDS | {p.name for p in own}}
        arguments = [p.name for p in own if isinstance(p.annotation.__metadata__[0], ArgumentInfo)]
        places |= dict.fromkeys(["algorithm", *arguments], "stands before the options")

        @functools.wraps(command)
        def answered(**given: Any) -> None:
            mine = {parameter.name: given[parameter.name] for parameter in own}
            options = _merged(given, given.get("config"), given.get("setting") or (), places)
            check_options(options, data="partition" in fields)
            if "algorithm" in mine:
                mine["algorithm"] = options.pop("algorithm", None)
            command(options, **mine)

        answered.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        answered.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return answered

    return decorate


def words_of(annotation: Any) -> list[str]:
    """What a setting that takes words may be; empty for numbers and free text."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    words = [word for part in get_args(annotation) for word in words_of(part)]
    return [*words, "none"] if words and type(None) in get_args(annotation) else words


def help_of(name: str) -> str:
    """A field's docstring as help: other fields are named as options, and what follows ``None:`` is the default."""
    field = Experiment.model_fields[name]
    text, _, empty = " ".join((field.description or "").split()).partition(" None: ")
    text = re.sub(r"`(\w+)`", lambda match: _flag(match[1]), text)
    return f"{text} [default: {empty.rstrip('.') if field.default is None else field.default}]"


def _option(name: str, text: str | None) -> inspect.Parameter:
    annotation = Experiment.model_fields[name].annotation
    kind: Any = next(part for part in (*get_args(annotation), annotation) if part is not NoneType)
    words = words_of(annotation) if kind is not bool else []
    if name.endswith("_dir"):
        kind = Path
    elif words:
        kind = str  # `Experiment` has the sentence for a wrong one
    metavar = f"[{'|'.join(words)}]" if words else None
    return _parameter(
        name,
        kind | None,
        metavar=metavar,
        help=text or help_of(name),
        rich_help_panel=group_of(Experiment.model_fields[name]),
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _merged(
    given: Mapping[str, Any], config: Path | None, pairs: Collection[str], places: Mapping[str, str]
) -> Options:
    """From --config, over it a command's own options, over them --set.

    Args:
        given: Parameters of a command by name.
        config: The file.
        pairs: KEY=VALUE each.
        places: Where else a key is given that --set may not have.

    Returns:
        Fields of `Experiment` and settings, all that were given.

    Raises:
        FedfillError: Where the file holds anything that is not allowed, or a --set is none.
    """
    options: Options = {}
    if config is not None:
        from fedfill.runs.directory import read_toml

        document = read_toml(Path(config))  # older releases of typer pass text
        document.pop("digest", None)  # an experiment.toml has this and the version too
        version = document.pop("version", __version__)
        checked(Experiment, {"algorithm": "", **document}, "config")
        own, models = document.pop("settings", {}), document.pop("model_settings", {})
        for what, word in document.pop("own", {}).items():  # with the settings that stand behind the name in `own`
            (own if what in own else document)[what] = word + "".join(str(own.get(what, "")).partition(":")[1:])
        if version != __version__:  # nobody asked for what 0.1.0 recorded of networks that don't have it
            from fedfill.models.networks import applicable

            models = applicable(document.get("model", ""), models)
        for key in own:
            if key in places:
                raise FedfillError(
                    f"config: '{key}' in [settings] stands above it, beside 'algorithm', and not among the settings"
                )
        options = {**document, **own, **{f"model.{key}": value for key, value in models.items()}}
    options |= {name: given[name] for name in Experiment.model_fields if given.get(name) is not None}
    options |= {name: str(value) for name, value in options.items() if isinstance(value, Path)}
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise FedfillError(f"--set: found '{pair}'; allowed: KEY=VALUE")
        if key in places:
            raise FedfillError(f"--set: '{key}' {places[key]}")
        settings[key] = value
    return over(options, settings)
