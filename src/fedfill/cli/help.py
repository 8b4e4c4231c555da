"""What ``--help`` looks like: options under headings, and an example below."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from fedfill.errors import FedfillError, did_you_mean


def _write(command: Any, ctx: Any, formatter: Any) -> None:
    """A section for arguments, one for each heading in the order of their options, and last one for what has none."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        heading = getattr(parameter, "rich_help_panel", None) or "Options"
        if parameter.param_type_name == "argument":
            heading = "Arguments"
        name, text = record
        # typer escapes a bracket for rich, also where rich does not write the help
        sections.setdefault(heading, []).append((name, text.replace("\\[", "[")))
    sections["Options"] = sections.pop("Options", [])
    for heading, records in sections.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)


class Grouped(TyperCommand):
    """A command whose options stand under headings, those of `rich_help_panel`, in plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        _write(self, ctx, formatter)


class GroupedGroup(TyperGroup):
    """Likewise a group of commands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options and commands."""
        _write(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; a slip is one sentence, where typer and click would each add the same suggestion."""
        if args and not args[0].startswith("-") and args[0] not in self.commands and not ctx.resilient_parsing:
            raise FedfillError(f"command: unknown name '{args[0]}'; {did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def example(*lines: str) -> str:
    """The end of a command's help."""
    return "\n".join(["\b", "Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)])
