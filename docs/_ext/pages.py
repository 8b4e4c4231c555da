"""What the site adds to the Markdown files, which stay plain so that they read well where they lie.

* A page with the comment ``<!-- contents -->`` lists pages: the links below each of its headings are a part of the
  table of contents.
* ``<!-- settings -->``, ``<!-- commands -->`` and ``<!-- document: NAMES -->`` are filled in from the code.
"""

import importlib
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

CONTENTS = "<!-- contents -->"
ITEM = re.compile(r"^(?:\*|\|) .*$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\(([^)#:]+)\.md\)")


def linked(text: str) -> list[str]:
    """The pages that lists and tables link to, without their ending."""
    return list(dict.fromkeys(LINK.findall("\n".join(ITEM.findall(text)))))


def contents(text: str) -> str:
    """Hidden tables of contents: one for each heading with links, captioned by it."""
    parts = re.split(r"^## +(.+)\n", text, flags=re.MULTILINE)
    trees = []
    for caption, part in [("", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]:
        pages = linked(part)
        if pages:
            head = ["```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), ""]
            trees.append("\n".join([*head, *pages, "```", ""]))
    return "\n".join(trees)


def cell(text: str) -> str:
    """Text that breaks no table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def settings() -> str:
    """Every algorithm's settings beside those that all share, and the networks'."""
    from fedfill.algorithms._base import Algorithm
    from fedfill.catalogue import built_in
    from fedfill.cli.listing import settings_of

    def table(rows: list[tuple[str, str, str]]) -> str:
        lines = ["| setting | default | meaning |", "|---|---|---|"]
        return "\n".join([*lines, *(f"| `{name}` | {cell(default)} | {cell(text)} |" for name, default, text in rows)])

    shared = {*Algorithm.model_fields}
    every = settings_of("local")
    parts = ["## Of every algorithm", table([r for r in every if r[0] in shared])]
    parts += ["## Of the networks", table([r for r in every if r[0].startswith("model.")])]
    plain = {name: (default, text) for name, default, text in every}
    for name, when in sorted(built_in().items()):
        rows = [row for row in settings_of(name) if plain.get(row[0]) != row[1:]]
        parts += [f"## {name}", when, table(rows) if rows else "No setting of its own."]
    return "\n\n".join(parts)


def commands() -> str:
    """Every command's help, as a terminal of 88 columns shows it."""
    import click
    import typer

    from fedfill.cli import app

    def pages(command: click.Command, context: click.Context) -> Iterator[str]:
        yield f"## {context.command_path}\n\n```text\n{command.get_help(context).strip()}\n```"
        for name in getattr(command, "commands", {}):
            below = command.commands[name]
            yield from pages(below, click.Context(below, info_name=name, parent=context, terminal_width=88))

    top = typer.main.get_command(app)
    return "\n\n".join(pages(top, click.Context(top, info_name="fedfill", terminal_width=88)))


def documented(names: list[str]) -> str:
    """Public names with their signatures and docstrings; of classes, what they define themselves."""
    lines = ["```{eval-rst}"]
    for name in names:
        room, _, own = name.rpartition(".")
        found = getattr(importlib.import_module(room), own)
        if not isinstance(found, type):
            lines.append(f".. autofunction:: {name}")
        elif issubclass(found, Exception):
            lines.append(f".. autoexception:: {name}")
        else:
            lines += [f".. autoclass:: {name}", "   :members:", "   :exclude-members: model_config, model_post_init"]
    return "\n".join([*lines, "```"])


def fill(app: Any, page: str, source: list[str]) -> None:
    """Fill in a page that asks for it."""
    text = source[0]
    if CONTENTS in text:
        text += "\n" + contents(text)
    for mark, made in (("<!-- settings -->", settings), ("<!-- commands -->", commands)):
        if mark in text:
            text = text.replace(mark, made())
    source[0] = re.sub(r"<!-- document: (.+?) -->", lambda found: documented(found[1].split()), text, flags=re.DOTALL)


def without_fields(app: Any, what: str, name: str, found: object, *rest: object) -> tuple[str, None] | None:
    """No signature for a class whose fields are described one by one below it."""
    return ("", None) if isinstance(found, type) and issubclass(found, BaseModel) else None


SMALL_COLON = "\N{SMALL COLON}"


def hide_colons(app: Any, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in a field's docstring for its type; here it is a sentence."""
    if what in ("attribute", "property", "data"):
        lines[:] = [line.replace(": ", f"{SMALL_COLON} ") for line in lines]


def show_colons(app: Any, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Undo it."""
    lines[:] = [line.replace(SMALL_COLON, ":") for line in lines]


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", hide_colons, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", show_colons, priority=600)
    app.connect("autodoc-process-signature", without_fields)
    return {"parallel_read_safe": True}
